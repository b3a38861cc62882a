"""Scripts with one thing wrong each in the hand-over: every one must be caught."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_scripts import Scripts
from model_world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model_config import Step
    from model_rules import Asked, Reply
    from model_state import Process, State, Store
    from model_waits import Call, Waiter


class CalledIsOutOfLine(Scripts):
    """Who is called leaves the line, and not only when it enters."""

    def reserve(self, store: Store, trigger: int) -> Store:
        return store._replace(waits=store.waits.forget(trigger))


class ParkInTwoSteps(World):
    """Whether a place is free is asked first, and then the trigger is parked."""

    def _entering(self, state: State, slot: int, worker: Process, action: str, *, linger: bool) -> Iterator[Step]:
        for step in super()._entering(state, slot, worker, action, linger=linger):
            if step.reply[:2] == ("parked", "line"):
                yield self._step("ask", state, slot, worker._replace(stage="parking"))
            else:
                yield step

    def _parking(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        ask = self.scripts.asked(state.store, worker, linger=False)
        store = self.scripts.put_by(state.store, ask)
        if ask.trigger not in store.waits.line:
            store = store._replace(waits=store.waits._replace(line=(*store.waits.line, ask.trigger)))
        yield self._step("park", state._replace(store=store), slot, worker._replace(stage="done", has_entered=True))


class NewcomerPasses(Scripts):
    """A free place is whose who comes."""

    def is_next(self, store: Store, trigger: int, free: int) -> bool:
        return free > 0 if store.waits.waiter(trigger) is None else super().is_next(store, trigger, free)


class CalledPasses(Scripts):
    """Who is called does not look whether the place is reserved for somebody before it."""

    def is_next(self, store: Store, trigger: int, free: int) -> bool:
        return free > 0 if store.waits.is_called(trigger) else super().is_next(store, trigger, free)


class KeptForEver(Scripts):
    """A place is kept, though who was called does not come."""

    def is_kept(self, waiter: Waiter, *, is_reserved: bool) -> bool:
        return True


class PassedAtOnce(Scripts):
    """Who was called and has not come is passed before it was called again."""

    def is_kept(self, waiter: Waiter, *, is_reserved: bool) -> bool:
        return is_reserved


class LookedAtNever(Scripts):
    """A call that got lost is not handed out again."""

    def hand_out(self, store: Store, calls: list[Call], waiter: Waiter, *, is_ahead: bool = False) -> Store:
        super().hand_out(store, calls, waiter, is_ahead=is_ahead)
        return store

    def look_later(self, store: Store, trigger: int) -> Store:
        return store.set_due(trigger, is_due=False)


class FollowersForgotten(Scripts):
    """Who ends calls those in line, and nobody who waits for its outcome."""

    def end_group(self, store: Store, calls: list[Call], group: int, leader: int, outcome: str) -> Store:
        return store


class RecallLetsGo(Scripts):
    """`recall` takes a trigger that waits no longer out of the index, though it may have entered meanwhile."""

    def is_left_due(self, store: Store, trigger: int) -> bool:
        return False


class AbandonLetsGo(Scripts):
    """`abandon` of a run that was overtaken takes its trigger out of the index, though a copy is parked and called."""

    def leave_message(self, store: Store, trigger: int) -> Store:
        return super().leave_message(store, trigger).set_due(trigger, is_due=False)


class FinishBesideTheParked(Scripts):
    """`finish` of a run that was taken for dead leaves the parked copy in line."""

    def end_parked(self, store: Store, calls: list[Call], trigger: int, outcome: str) -> Store:
        return store


class FactsGo(Scripts):
    """`enter` lets the facts of a lock key go after a while, though somebody waits."""

    def _held(self, store: Store, ask: Asked, what: str) -> tuple[Store, Reply]:
        store, reply = super()._held(store, ask, what)
        if reply[1] in ("lock", "execution"):
            store = store._replace(waits=store.waits._replace(pace="goes"))
        return store, reply


class RevokedLeavesFacts(Scripts):
    """`conclude` of the last one that waits lets the facts of the lock key stay."""

    def _call_ahead(self, store: Store, reply: Reply, calls: list[Call] | None = None) -> tuple[Store, Reply]:
        return super()._call_ahead(store, reply, calls) if store.waits.parked else (store, reply)
