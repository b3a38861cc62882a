"""What a sweeper does: one thing at a time, and it may die at each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_config import Step
from model_rules import calls_in
from model_state import NONE, Message, Process, with_copy
from model_waits import Call
from model_workers import Workers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model_state import State


class Sweeper(Workers):
    """A trigger in the index may be looked at any time, which is more than a sweeper does."""

    def _sweeper(self, state: State) -> Iterator[Step]:
        if state.handed:
            yield from self._acting(state, *state.handed)
            if state.faults and "sweeper dies" in self.config.kinds:
                yield Step("sweeper dies", NONE, (), state._replace(handed=(), faults=state.faults - 1), is_fault=True)
            return
        for trigger, is_due in enumerate(state.store.due):
            if is_due:
                yield from self._rescuing(state, trigger)
        if state.store.waits.is_attended:
            store, reply = self.scripts.attend(state.store)
            yield Step("attend", NONE, reply, state._replace(store=store, handed=calls_in(reply)))
        if state.revokes:
            for trigger, record in enumerate(state.store.records[: len(state.told)]):
                if record.is_parked and not record.outcome:
                    found = (Call(trigger, what="revoke"),)
                    yield Step("find", trigger, (), state._replace(handed=found, revokes=state.revokes - 1))

    def _acting(self, state: State, call: Call, *others: Call) -> Iterator[Step]:
        trigger, after = call.trigger, state._replace(handed=others)
        if call.what == "recall":
            store, reply = self.scripts.recall(state.store, trigger)
            found = (Call(trigger, reply[2], reply[1]), *others) if reply[0] == "message" else others
            yield Step("recall", trigger, reply, state._replace(store=store, handed=found))
        elif call.what == "revoke":
            revoker = Process("sweeper", Message(trigger), owner=state.names + 1)
            store, reply = self.scripts.conclude(state.store, revoker, "revoked", release=False, is_told=False)
            handed = (*calls_in(reply), *others)
            yield Step("conclude revoked", trigger, reply, after._replace(store=store, handed=handed, names=state.names + 1))
        else:
            yield Step("sweeper publishes", NONE, (), with_copy(after, call))

    def _rescuing(self, state: State, trigger: int) -> Iterator[Step]:
        store, reply = self.scripts.rescue(state.store, trigger)
        after = state._replace(store=store)
        if reply[0] == "message":
            after = after._replace(handed=(Call(trigger, reply[2], reply[1]),))
        elif reply[0] == "parked":
            after = after._replace(handed=(Call(trigger, what="recall"),))
            kept, looked = self.scripts.recall(store, trigger)
            if looked == ("later",) and kept == store:
                if state.faults and "early look" in self.config.kinds:
                    yield Step("rescue", trigger, reply, after._replace(faults=state.faults - 1), is_fault=True)
                return
        if not after.handed or not self._is_on_its_way(state, trigger):
            yield Step("rescue", trigger, reply, after)
        elif state.faults and "second handout" in self.config.kinds:
            yield Step("rescue", trigger, reply, after._replace(faults=state.faults - 1), is_fault=True)

    def _is_on_its_way(self, state: State, trigger: int) -> bool:
        raise NotImplementedError
