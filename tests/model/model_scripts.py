"""The scripts of the store as pure functions: what each answers, and what it leaves behind.

Left out: texts, values, turns, and every time but three: whether a lease is live, whether an outcome is younger than its grace,
whether a trigger is in the index of what is due. A broken variant overrides one of the small methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_entering import Entering
from model_rules import with_calls
from model_state import EMPTY, NO_TICKET, NOBODY, NONE
from model_waits import NO_GROUP

if TYPE_CHECKING:
    from model_rules import Reply
    from model_state import Process, Record, Store, Ticket
    from model_waits import Call


class Scripts(Entering):
    """One method for each script. The last part of a reply is what it tells to publish, if that is anything."""

    # What broken variants override.

    def is_anothers(self, run: Record, owner: int, *, is_forgotten: bool) -> bool:
        return bool(run.outcome) or is_forgotten or (run.has_attempt and run.owner != owner)

    def is_taken(self, store: Store, ticket: Ticket) -> bool:
        if self.rules.limit == 1:
            return store.fence > ticket[0]
        return sum(line.is_live for line in store.lease) >= self.rules.limit

    def release(self, store: Store, owner: int) -> Store:
        return store.without(owner)

    def is_running(self, run: Record, trigger: int) -> bool:
        return run.owner != NOBODY and run.runs == trigger and run.is_live

    def put_off(self, store: Store, trigger: int) -> Store:
        return store.set_due(trigger, is_due=True)

    def end_parked(self, store: Store, calls: list[Call], trigger: int, outcome: str) -> Store:
        """A copy of a run that has ended was parked when the run was taken for dead."""
        waiter = store.waits.waiter(trigger)
        if waiter is None:
            return store
        store = store._replace(waits=store.waits.forget(trigger))
        store = store.change(trigger, message=waiter.generation).set_due(trigger, is_due=True)
        return self.end_group(store, calls, waiter.group, trigger, outcome)

    def is_left_due(self, store: Store, trigger: int) -> bool:
        """Whether a trigger that is not parked any more has a message that is looked after."""
        return store.due[trigger] and store.records[trigger].message != NONE

    # The scripts.

    def renew(self, store: Store, process: Process) -> tuple[Store, Reply]:
        line = store.line(process.owner)
        if line is None:
            return store, ("lost", "taken")
        if not line.is_live:
            return store, ("lost", "expired")
        run = store.records[self.rules.execution(process.message.trigger)]
        if run.owner not in (NOBODY, process.owner):
            return store, ("lost", "taken")
        return store, ("renewed",)

    def finish(self, store: Store, process: Process, outcome: str) -> tuple[Store, Reply]:
        owner, trigger = process.owner, process.message.trigger
        place = self.rules.execution(trigger)
        run, own = store.records[place], store.records[trigger]
        if own.outcome:
            return store, ("finished",) if own.by == owner else ("refused",)
        is_forgotten = place != trigger and not run.has_attempt and own != EMPTY
        if self.is_anothers(run, owner, is_forgotten=is_forgotten):
            return store, ("refused",)
        if store.line(owner) is None and self.is_taken(store, process.ticket):
            return store, ("refused",)
        line = store.line(owner)
        group = line.group if line else own.group
        store = self.release(store, owner)
        if place != trigger:
            if outcome == "succeeded":
                store = store.change(trigger, outcome=outcome, by=owner, is_fresh=True)
            else:
                store, place = store.forget(place), trigger
        facts = {"owner": NOBODY, "is_live": False, "ticket": NO_TICKET}
        store = store.change(place, **facts, outcome=outcome, by=owner, is_fresh=True)
        calls: list[Call] = []
        if store.waits.pace:
            store = store._replace(waits=store.waits._replace(knows_hold=True))
            store = self.end_group(store, calls, group, trigger, outcome)
            store = self.call_next(self.end_parked(store, calls, trigger, outcome), calls, 1)
        return store, with_calls(("finished",), calls)

    def abandon(
        self, store: Store, process: Process, *, generation: int = NONE, again: bool = False, died: bool = False
    ) -> tuple[Store, Reply]:
        owner, trigger = process.owner, process.message.trigger
        place = self.rules.execution(trigger)
        store = self.release(store, owner)
        run, own = store.records[place], store.records[trigger]
        is_over = bool(run.outcome or own.outcome)
        if place != trigger and run.owner == owner and own.outcome and not run.outcome:
            # The main process has given the trigger its outcome while this run lived.
            store = store.forget(place)
        if died and not is_over and owner in (run.owner, own.left_by) and run.run_generation == own.generation:
            store = store.change(trigger, died=own.died + 1, left_by=NOBODY)
        is_left = run.owner == owner and not is_over
        if is_left:
            store = store.change(place, owner=NOBODY, is_live=False, ticket=NO_TICKET)
            if not died:
                store = store.change(trigger, left_by=owner)
            if not again:
                store = self.leave_message(store, trigger)
            elif own.message != NONE:
                store = store.set_due(trigger, is_due=True)
        if store.records[trigger] != EMPTY and generation > store.records[trigger].generation:
            store = store.change(trigger, generation=generation, copy=NONE, died=0, left_by=NOBODY)
        if again:
            return self._call_ahead(store, ("abandoned",))
        return self._leave_group(store, process, is_gone=is_left and generation == NONE)

    def _leave_group(self, store: Store, process: Process, *, is_gone: bool) -> tuple[Store, Reply]:
        """A retry comes again by itself; any other message may be gone, and those who wait for its outcome go on."""
        trigger, calls = process.message.trigger, []
        waiter, group = store.waits.waiter(trigger), store.records[trigger].group
        if waiter and waiter.by == process.owner:
            # It was parked, and the one that asked has not been told so.
            store = store._replace(waits=store.waits.forget(trigger)).change(trigger, is_parked=False)
            store = self.end_group(store, calls, waiter.group, trigger, "")
        if is_gone:
            store = self.end_group(store.change(trigger, group=NO_GROUP), calls, group, trigger, "")
        return self._call_ahead(store, ("abandoned",), calls)

    def conclude(self, store: Store, process: Process, outcome: str, *, release: bool, is_told: bool) -> tuple[Store, Reply]:
        owner, trigger = process.owner, process.message.trigger
        place = self.rules.execution(trigger)
        if release:
            store = store.without(owner)
        run, own = store.records[place], store.records[trigger]
        if place != trigger and run.owner == owner and release and (not own.outcome or own.concluded_by == owner):
            store = store.forget(place)
        if own.concluded_by == owner or (is_told and own.outcome == outcome):
            return self._call_ahead(self._settle(store, trigger) if is_told else store, ("concluded",))
        if own.outcome or own == EMPTY:
            is_attended = store.waits.is_attended or bool(store.waits.parked)
            return store._replace(waits=store.waits._replace(is_attended=is_attended)), ("refused",)
        if run.owner not in (NOBODY, owner) and run.runs == trigger and run.is_live:
            return store, ("refused",)
        by = owner if release and not is_told else NOBODY
        store = store.change(trigger, owner=NOBODY, is_live=False, ticket=NO_TICKET, outcome=outcome)
        # Nobody is about to send what follows a revocation, and it is not waited for.
        store = store.change(trigger, by=by, concluded_by=owner, is_fresh=outcome != "revoked")
        waiter, group = store.waits.waiter(trigger), own.group
        if waiter:
            store = store._replace(waits=store.waits.forget(trigger)).change(trigger, message=waiter.generation)
            group = waiter.group or group
        if is_told:
            store = self._settle(store, trigger)
        elif store.records[trigger].message != NONE:
            store = store.set_due(trigger, is_due=True)
        calls: list[Call] = []
        lease = tuple(line._replace(group=NO_GROUP) if line.owner == owner else line for line in store.lease)
        store = self.end_group(store._replace(lease=lease), calls, group, trigger, outcome)
        return self._call_ahead(store, ("concluded",), calls)

    def _call_ahead(self, store: Store, reply: Reply, calls: list[Call] | None = None) -> tuple[Store, Reply]:
        calls = [] if calls is None else calls
        if store.waits.pace:
            store = self.call_next(store, calls, 1)
        return store, with_calls(reply, calls)

    def _settle(self, store: Store, trigger: int, message: int = NONE) -> Store:
        return store.change(trigger, is_settled=True, message=message).set_due(trigger, is_due=False)

    def settle(self, store: Store, process: Process) -> tuple[Store, Reply]:
        own = store.records[process.message.trigger]
        if own.by != process.owner:
            return store, ("settled", 0)
        message = own.message if own.outcome == "dead-lettered" else NONE
        return self._settle(store, process.message.trigger, message), ("settled", 1)

    def rescue(self, store: Store, trigger: int) -> tuple[Store, Reply]:
        own, run = store.records[trigger], store.records[self.rules.execution(trigger)]
        if own.is_parked and own.message == NONE and not own.outcome:
            return store.set_due(trigger, is_due=True), ("parked",)
        if own.message == NONE or own.is_settled:
            return store.set_due(trigger, is_due=False), ("gone",)
        is_later = own.is_fresh if own.outcome else self.is_running(run, trigger)
        if is_later:
            return store.set_due(trigger, is_due=True), ("later",)
        return self.put_off(store, trigger), ("message", own.message, own.copy, own.outcome)

    def recall(self, store: Store, trigger: int) -> tuple[Store, Reply]:
        waiter = store.waits.waiter(trigger)
        if waiter is None:
            is_due = self.is_left_due(store, trigger)
            return store.change(trigger, is_parked=False).set_due(trigger, is_due=is_due), ("gone",)
        if waiter.leader == NONE and not store.waits.is_called(trigger):
            group = dict(store.waits.followers).get(trigger, NO_GROUP)
            if group and self.is_left_alone(store, group):
                store = self.lead(store, waiter, group)
                store = store._replace(waits=store.waits._replace(is_attended=True))
            return store, ("later",)
        return self.put_off(store, trigger), ("message", waiter.generation, waiter.copy)

    def attend(self, store: Store) -> tuple[Store, Reply]:
        calls: list[Call] = []
        for trigger, is_reserved in store.waits.called:
            # Whoever is due no more has come by another lock key.
            if not (is_reserved or store.due[trigger]):
                waiter = store.waits.waiter(trigger)
                store = store._replace(waits=store.waits.forget(trigger))
                store = self.end_group(store, calls, waiter.group if waiter else NO_GROUP, trigger, "")
        return self.call_next(store, calls, 0), with_calls(("attended",), calls)

    def follow(self, store: Store, process: Process, leader: int) -> tuple[Store, Reply]:
        trigger, calls = process.message.trigger, []
        own, led = store.records[trigger], store.records[leader]
        place = self.rules.execution(leader)
        has_value = led.outcome != "succeeded" or place == leader or store.records[place].outcome == "succeeded"
        waiter = store.waits.waiter(trigger)
        if own.outcome and not own.is_settled and own.by != process.owner and own.is_fresh:
            return store, ("gone",)
        has_joined = waiter is not None and waiter.kind == "join"
        if led.outcome not in ("succeeded", "failed") or not has_value or (led.outcome == "failed" and has_joined):
            store = store._replace(waits=store.waits.forget(trigger))
            store = store.change(trigger, outcome="", led_by=NONE, is_settled=False, by=NOBODY)
            return store._replace(waits=store.waits._replace(is_attended=True)), ("gone",)
        outcome = own.outcome
        if not outcome:
            outcome = "coalesced" if waiter and waiter.kind == "coalesce" else led.outcome
            message = process.message
            store = store.change(trigger, outcome=outcome, led_by=leader, generation=message.generation, copy=message.copy)
        store = store.change(trigger, by=process.owner, is_fresh=True)
        if not own.is_settled:
            store = store.change(trigger, message=process.message.generation).set_due(trigger, is_due=True)
        store = self.call_next(store._replace(waits=store.waits.forget(trigger)), calls, 0)
        return store, with_calls(("ended", outcome, own.is_settled), calls)
