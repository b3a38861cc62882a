"""The scripts of the store as pure functions: what each answers, and what it leaves behind.

Left out: texts, values, turns, and every time but three: whether a lease is live, whether an outcome is younger than its grace,
whether a trigger is in the index of what is due. A broken variant overrides one of the small methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from model_state import EMPTY, NO_TICKET, NOBODY, NONE, Line, Store

if TYPE_CHECKING:
    from model_state import Message, Process, Record, Ticket

Reply = tuple[Any, ...]


class Rules(NamedTuple):
    """What the scripts are told of the tasks."""

    #: The explicit execution key of each trigger, if it has one.
    keys: tuple[str | None, ...]
    #: What contention means for each trigger: "wait", "skip" or "reject".
    policies: tuple[str, ...]
    limit: int
    max_deliveries: int | None

    def execution(self, trigger: int) -> int:
        """Where the run record of the trigger is."""
        key = self.keys[trigger]
        return trigger if key is None else len(self.keys) + sorted({k for k in self.keys if k}).index(key)

    @property
    def places(self) -> int:
        return len(self.keys) + len({key for key in self.keys if key})


class Scripts:
    """One method for each script."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

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

    # The scripts.

    def enter(self, store: Store, process: Process, given: Ticket) -> tuple[Store, Reply]:
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
            run, own = store.records[place], store.records[trigger]
        is_own = bool(own.outcome) and (place == trigger or own.outcome != "succeeded" or own.is_settled or bool(run.outcome))
        if self.is_over(run, is_own=is_own):
            return self._answer(store, process, own.outcome if is_own else run.outcome)
        if run.owner != NOBODY and run.is_live:
            return self._held(store, process, self._what(run.runs, trigger, run.run_generation, message, "execution"))
        died = own.died
        if run.owner != NOBODY and run.runs == trigger and run.run_generation == message.generation:
            died += 1
        if self.rules.max_deliveries is not None and died >= self.rules.max_deliveries:
            if place != trigger and run.runs == trigger:
                store = store.forget(place)
            store = self._end(store, process, "dead-lettered").change(trigger, is_settled=False, died=died)
            store = store.change(trigger, owner=NOBODY, is_live=False, ticket=NO_TICKET)
            return store, ("ended", "dead-lettered", False)
        return self._take(store, process, given, died)

    def _answer(self, store: Store, process: Process, outcome: str) -> tuple[Store, Reply]:
        """The trigger or its execution is over."""
        message, owner = process.message, process.owner
        own = store.records[message.trigger]
        if own.outcome and not own.is_settled and own.by != owner and own.is_fresh:
            return self._remember(store, message), ("held", "own")
        if not own.outcome:
            store = self._remember(store, message).change(message.trigger, outcome=outcome, by=owner, is_fresh=True)
        elif own.by != owner:
            store = store.change(message.trigger, by=owner, is_fresh=True)
        store = store if own.is_settled else self._keep_message(store, message)
        return store, ("ended", outcome, own.is_settled)

    def _take(self, store: Store, process: Process, given: Ticket, died: int) -> tuple[Store, Reply]:
        """Nothing of the trigger is in the way: a lease for it, if a place is free."""
        message, owner = process.message, process.owner
        trigger, place = message.trigger, self.rules.execution(message.trigger)
        line = store.line(owner)
        if line and line.is_live:
            ticket = line.ticket
        else:
            live = tuple(line for line in store.lease if line.is_live)
            if len(live) >= self.rules.limit:
                newest = store.records[trigger].generation
                newest = message.generation if newest == NONE else newest
                return self._held(store, process, self._what(live[0].trigger, trigger, newest, message, "lock"))
            ticket = self.next_token(store, given), given[1] + 1
            line = Line(owner, is_live=True, ticket=ticket, trigger=trigger)
            store = store._replace(lease=(*live, line), fence=ticket[0])
        if store.records[trigger].outcome:
            store = store.change(trigger, outcome="", is_settled=False, by=NOBODY, is_fresh=False)
        facts = {"owner": owner, "is_live": True, "ticket": ticket, "has_attempt": True, "runs": trigger}
        store = store.change(place, **facts, run_generation=message.generation)
        store = store.change(trigger, died=died, left_by=NOBODY, has_run=place != trigger)
        return self._keep_message(self._remember(store, message), message), ("acquired", ticket)

    def _what(self, runs: int, trigger: int, generation: int, message: Message, other: str) -> str:
        """What is in the way, for a trigger that may be its own forerunner."""
        if runs != trigger:
            return other
        return "predecessor" if message.generation > generation else "own"

    def _remember(self, store: Store, message: Message) -> Store:
        return store.change(message.trigger, generation=message.generation, copy=message.copy)

    def _keep_message(self, store: Store, message: Message) -> Store:
        return store.change(message.trigger, message=message.generation).set_due(message.trigger, is_due=True)

    def _end(self, store: Store, process: Process, outcome: str) -> Store:
        store = self._remember(store, process.message)
        store = store.change(process.message.trigger, outcome=outcome, by=process.owner, is_fresh=True)
        return self._keep_message(store, process.message)

    def _held(self, store: Store, process: Process, what: str) -> tuple[Store, Reply]:
        message, trigger = process.message, process.message.trigger
        is_newcomer = what in ("lock", "execution")
        place = self.rules.execution(trigger)
        has_run = store.records[trigger].has_run if place != trigger else store.records[place].has_attempt
        ending = {"skip": "skipped", "reject": "rejected"}.get(self.rules.policies[trigger])
        if is_newcomer and ending and not has_run and message.generation == 0:
            store = self._end(store, process, ending).change(trigger, is_settled=False)
            return store, ("ended", ending, False)
        store = self._remember(store, message)
        if is_newcomer and store.records[trigger].message != NONE:
            store = store.change(trigger, message=NONE).set_due(trigger, is_due=False)
        return store, ("held", what)

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
        store = self.release(store, owner)
        if place != trigger:
            if outcome == "succeeded":
                store = store.change(trigger, outcome=outcome, by=owner, is_fresh=True)
            else:
                store, place = store.forget(place), trigger
        facts = {"owner": NOBODY, "is_live": False, "ticket": NO_TICKET}
        return store.change(place, **facts, outcome=outcome, by=owner, is_fresh=True), ("finished",)

    def abandon(
        self, store: Store, process: Process, *, generation: int = NONE, again: bool = False, died: bool = False
    ) -> tuple[Store, Reply]:
        owner, trigger = process.owner, process.message.trigger
        place = self.rules.execution(trigger)
        store = self.release(store, owner)
        run, own = store.records[place], store.records[trigger]
        if died and not run.outcome and owner in (run.owner, own.left_by) and run.run_generation == own.generation:
            store = store.change(trigger, died=own.died + 1, left_by=NOBODY)
        if run.owner == owner and not run.outcome:
            store = store.change(place, owner=NOBODY, is_live=False, ticket=NO_TICKET)
            if not died:
                store = store.change(trigger, left_by=owner)
            if not again:
                store = store.change(trigger, message=NONE).set_due(trigger, is_due=False)
            elif own.message != NONE:
                store = store.set_due(trigger, is_due=True)
        if store.records[trigger] != EMPTY and generation > store.records[trigger].generation:
            store = store.change(trigger, generation=generation, copy=NONE, died=0, left_by=NOBODY)
        return store, ("abandoned",)

    def conclude(self, store: Store, process: Process, outcome: str, *, release: bool, is_told: bool) -> tuple[Store, Reply]:
        owner, trigger = process.owner, process.message.trigger
        place = self.rules.execution(trigger)
        if release:
            store = store.without(owner)
        run, own = store.records[place], store.records[trigger]
        if place != trigger and run.owner == owner and release and (not own.outcome or own.concluded_by == owner):
            store = store.forget(place)
        if own.concluded_by == owner:
            return self._settle(store, trigger) if is_told else store, ("concluded",)
        if own.outcome or own == EMPTY:
            return store, ("refused",)
        if run.owner not in (NOBODY, owner) and run.runs == trigger and run.is_live:
            return store, ("refused",)
        by = owner if release and not is_told else NOBODY
        store = store.change(trigger, owner=NOBODY, is_live=False, ticket=NO_TICKET, outcome=outcome, is_fresh=True)
        store = store.change(trigger, by=by, concluded_by=owner)
        if is_told:
            store = self._settle(store, trigger)
        elif own.message != NONE:
            store = store.set_due(trigger, is_due=True)
        return store, ("concluded",)

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
        if own.message == NONE or own.is_settled:
            return store.set_due(trigger, is_due=False), ("gone",)
        is_later = own.is_fresh if own.outcome else self.is_running(run, trigger)
        if is_later:
            return store.set_due(trigger, is_due=True), ("later",)
        return self.put_off(store, trigger), ("message", own.message, own.copy, own.outcome)
