"""The script `enter` as a pure function."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_parking import Parking
from model_rules import PARKING, Asked, with_calls
from model_state import NO_TICKET, NOBODY, NONE, Line
from model_waits import NO_GROUP

if TYPE_CHECKING:
    from model_rules import Reply
    from model_state import Message, Process, Record, Store, Ticket


class Entering(Parking):
    """What an entering trigger is told, and what is left behind."""

    # What broken variants override.

    def is_surplus(self, record: Record, message: Message) -> str:
        if message.generation < record.generation:
            return "generation"
        if message.generation == record.generation and record.copy not in (NONE, message.copy, message.previous):
            return "copy"
        return ""

    def is_asked_again(self, run: Record, process: Process) -> bool:
        return run.owner == process.owner

    def is_over(self, run: Record, *, is_own: bool) -> bool:
        return is_own or bool(run.outcome)

    def next_token(self, store: Store, given: Ticket) -> int:
        # The clock is ahead of what the last server gave, and may stand still beside what this one did.
        return store.fence + 1 if store.fence else given[0] + 1

    # The script.

    def enter(self, store: Store, process: Process, given: Ticket, *, linger: bool = False) -> tuple[Store, Reply]:
        message = process.message
        trigger, place = message.trigger, self.rules.execution(message.trigger)
        run, own = store.records[place], store.records[trigger]
        if run.owner != NOBODY and run.is_live and self.is_asked_again(run, process):
            return store, ("acquired", run.ticket)
        why = self.is_surplus(own, message)
        if why:
            return store, ("surplus", why)
        if NONE != own.generation < message.generation:
            store = store.change(trigger, died=0, left_by=NOBODY)
        ask = self.asked(store, process, linger=linger)
        store, reply = self._decide(store, ask, given)
        return store, with_calls(reply, ask.calls)

    def asked(self, store: Store, process: Process, *, linger: bool) -> Asked:
        """A trigger that has run before, or was parked, is no newcomer: whatever the policy, it waits."""
        trigger, place = process.message.trigger, self.rules.execution(process.message.trigger)
        before, policy = store.waits.waiter(trigger), self.rules.policy(trigger)
        has_run = store.records[trigger].has_run if place != trigger else store.records[place].has_attempt
        is_newcomer = not has_run and process.message.generation == 0 and before is None
        on_held = policy if is_newcomer else "queue" if policy in PARKING else "wait"
        return Asked(process, before, on_held, linger, [])

    def _decide(self, store: Store, ask: Asked, given: Ticket) -> tuple[Store, Reply]:
        message, trigger, place = ask.message, ask.trigger, self.rules.execution(ask.trigger)
        run, own = store.records[place], store.records[trigger]
        is_led = not own.is_settled and own.led_by != NONE
        has_value = place == trigger or own.is_settled or bool(run.outcome) or is_led
        is_own = bool(own.outcome) and (own.outcome != "succeeded" or has_value)
        if self.is_over(run, is_own=is_own):
            return self._answer(store, ask, own.outcome if is_own else run.outcome, is_led=is_led)
        if ask.before and ask.before.leader != NONE:
            return store, ("led", ask.before.leader)
        if run.owner != NOBODY and run.is_live:
            store = self.step_aside(store, ask)
            return self._held(store, ask, self._what(run.runs, trigger, run.run_generation, message, "execution"))
        died = own.died
        if run.owner != NOBODY and run.runs == trigger and run.run_generation == message.generation:
            died += 1
        if self.rules.max_deliveries is not None and died >= self.rules.max_deliveries:
            if place != trigger and run.runs == trigger:
                store = store.forget(place)
            store = self._end(store, ask, "dead-lettered", own.group)
            store = store.change(trigger, died=died, owner=NOBODY, is_live=False, ticket=NO_TICKET)
            return store, ("ended", "dead-lettered", False)
        if ask.on_held == "coalesce":
            store, reply = self.gather(store, ask)
            if reply:
                return store, reply
        return self._take(store, ask, given, died)

    def _answer(self, store: Store, ask: Asked, outcome: str, *, is_led: bool) -> tuple[Store, Reply]:
        """The trigger or its execution is over."""
        trigger, owner = ask.trigger, ask.process.owner
        own = store.records[trigger]
        if own.outcome and not own.is_settled and own.by != owner and own.is_fresh:
            return self._remember(store, ask.message), ("held", "own")
        if is_led:
            return store, ("led", own.led_by)
        if not own.outcome:
            store = self._remember(store, ask.message).change(trigger, outcome=outcome, by=owner, is_fresh=True)
        elif own.by != owner:
            store = store.change(trigger, by=owner, is_fresh=True)
        store = store if own.is_settled else self._keep_message(store, ask.message)
        if ask.before or not own.outcome:
            store = self.leave_line(store, ask, outcome, NO_GROUP if own.outcome else own.group)
        return store, ("ended", outcome, own.is_settled)

    def _take(self, store: Store, ask: Asked, given: Ticket, died: int) -> tuple[Store, Reply]:
        """Nothing of the trigger is in the way: a lease for it, if a place is free and it is next."""
        owner, message = ask.process.owner, ask.message
        trigger, place = ask.trigger, self.rules.execution(ask.trigger)
        line, group = store.line(owner), store.records[trigger].group
        if not (line and line.is_live):
            live = tuple(line for line in store.lease if line.is_live)
            if not self.is_next(store, trigger, self.rules.limit - len(live)):
                return self._wait(store, ask, live, has_died=died > 0)
            waiter = store.waits.waiter(trigger)
            group = (waiter.group if waiter else NO_GROUP) or group
            if not group:
                group = store.waits.groups + 1
                store = store._replace(waits=store.waits._replace(groups=group))
            line = Line(owner, is_live=True, ticket=(self.next_token(store, given), given[1] + 1), trigger=trigger, group=group)
            store = store._replace(lease=(*live, line), fence=line.ticket[0])
        if store.records[trigger].outcome:
            store = store.change(trigger, outcome="", is_settled=False, by=NOBODY, is_fresh=False, led_by=NONE)
        facts = {"owner": owner, "is_live": True, "ticket": line.ticket, "has_attempt": True, "runs": trigger}
        store = store.change(place, **facts, run_generation=message.generation)
        store = store.change(trigger, died=died, left_by=NOBODY, has_run=place != trigger, is_parked=False, group=group)
        store = self._keep_message(self._remember(store, message), message)
        return self.leave_line(store, ask), ("acquired", line.ticket)

    def _wait(self, store: Store, ask: Asked, live: tuple[Line, ...], *, has_died: bool) -> tuple[Store, Reply]:
        """Who is in the way, and where the trigger waits."""
        trigger, is_full = ask.trigger, len(live) >= self.rules.limit
        if is_full and live[0].trigger == trigger:
            store = self.step_aside(store, ask)
            newest = store.records[trigger].generation
            newest = ask.message.generation if newest == NONE else newest
            return self._held(store, ask, self._what(trigger, trigger, newest, ask.message, "lock"))
        if self.rules.policy(trigger) not in PARKING:
            return self._held(store, ask, "lock")
        return self.wait_for(store, ask, has_died=has_died)

    def _what(self, runs: int, trigger: int, generation: int, message: Message, other: str) -> str:
        """What is in the way, for a trigger that may be its own forerunner."""
        if runs != trigger:
            return other
        return "predecessor" if message.generation > generation else "own"

    def _remember(self, store: Store, message: Message) -> Store:
        return store.change(message.trigger, generation=message.generation, copy=message.copy)

    def _keep_message(self, store: Store, message: Message) -> Store:
        return store.change(message.trigger, message=message.generation).set_due(message.trigger, is_due=True)

    def _end(self, store: Store, ask: Asked, outcome: str, group: int) -> Store:
        store = self._remember(store, ask.message)
        store = store.change(ask.trigger, outcome=outcome, by=ask.process.owner, is_fresh=True, is_settled=False)
        return self.leave_line(self._keep_message(store, ask.message), ask, outcome, group)

    def _held(self, store: Store, ask: Asked, what: str) -> tuple[Store, Reply]:
        is_others = what in ("lock", "execution")
        ending = {"skip": "skipped", "reject": "rejected"}.get(ask.on_held)
        if is_others and ending:
            return self._end(store, ask, ending, store.records[ask.trigger].group), ("ended", ending, False)
        store = self._remember(store, ask.message)
        if is_others:
            store = self.leave_message(store, ask.trigger)
            if not (store.waits.parked or ask.before):
                store = store._replace(waits=store.waits._replace(pace="goes"))
        return store, ("held", what)
