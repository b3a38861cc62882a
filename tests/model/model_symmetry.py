"""One state for all that are alike: names are numbered as they are met, and what no later step looks at is dropped."""

from __future__ import annotations

from typing import NamedTuple

from model_state import (
    BEFORE_FIRST,
    FIRST,
    NO_TICKET,
    NOBODY,
    NONE,
    SOMEBODY,
    Line,
    Message,
    Process,
    Record,
    State,
    Store,
    Ticket,
)
from model_waits import NO_GROUP, NOBODY_WAITS, Call, Waiter, Waits


class Looks(NamedTuple):
    """What somebody looks at in a world."""

    deaths: bool
    waits: bool
    groups: bool
    hold: bool


def canonical(state: State, looks: Looks) -> State:
    """Return the state that stands for all that differ from this one only in names and in what is past."""
    return _Names(_Past(state, looks).dropped()).put()


class _Names:
    """New names for the owners, copies and tickets of a state."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.workers = tuple(sorted(state.workers, key=_worker_order))
        self.owners = {NOBODY: NOBODY, SOMEBODY: SOMEBODY}
        self.copies = {FIRST: FIRST, NONE: NONE, BEFORE_FIRST: BEFORE_FIRST}
        self.groups = {NO_GROUP: NO_GROUP}
        self._meet_owners()
        self._meet_messages()
        self._meet_groups()
        self._rank_tickets()

    def _meet_owners(self) -> None:
        store, owners = self.state.store, self.owners
        for holder in (*self.workers, *store.lease, *store.records):
            if holder:
                owners.setdefault(holder.owner, len(owners) - 1)

    def _meet_messages(self) -> None:
        state, copies = self.state, self.copies
        held = [worker.message for worker in self.workers if worker]
        calls = [call for worker in self.workers if worker for call in worker.calls]
        for known in (*state.store.records, *held, *state.store.waits.parked):
            copies.setdefault(known.copy, len(copies) - 2)
        self.ready = sorted(state.ready, key=self._message_order)
        for message in self.ready:
            copies.setdefault(message.copy, len(copies) - 2)
        siblings = {message.previous for message in (*held, *self.ready)} | {call.copy for call in (*calls, *state.handed)}
        self.counted = [message if message and message.previous in siblings else None for message in state.counted]
        for counted in self.counted:
            if counted:
                copies.setdefault(counted.previous, len(copies) - 2)
                copies.setdefault(counted.copy, len(copies) - 2)

    def _meet_groups(self) -> None:
        store, groups = self.state.store, self.groups
        for known in (*store.lease, *store.records, *store.waits.parked):
            groups.setdefault(known.group, len(groups))
        for _, group in store.waits.followers:
            groups.setdefault(group, len(groups))

    def _message_order(self, message: Message) -> tuple[int, ...]:
        copies = self.copies
        return message.trigger, message.generation, copies.get(message.previous, 99), copies.get(message.copy, 99)

    def _rank_tickets(self) -> None:
        state, store = self.state, self.state.store
        tickets = {NO_TICKET, state.given, state.fenced, (store.fence, 0), (0, state.unfenced)}
        tickets.update(holder.ticket for holder in (*store.lease, *store.records, *self.workers) if holder)
        self.tokens = {token: n for n, token in enumerate(sorted({token for token, _ in tickets}))}
        self.numbers = {number: n for n, number in enumerate(sorted({number for _, number in tickets}))}

    def put(self) -> State:
        state, store = self.state, self.state.store
        return State(
            store=Store(
                lease=tuple(map(self.line, store.lease)),
                fence=self.tokens[store.fence],
                records=tuple(map(self.record, store.records)),
                due=store.due,
                waits=self.waits(store.waits),
            ),
            ready=tuple(sorted(map(self.message, self.ready))),
            workers=tuple(map(self.worker, self.workers)),
            handed=tuple(map(self.call, state.handed)),
            faults=state.faults,
            forgets=state.forgets,
            revokes=state.revokes,
            given=self.ticket(state.given),
            fenced=self.ticket(state.fenced),
            unfenced=self.numbers[state.unfenced],
            succeeded=state.succeeded,
            told=state.told,
            deaths=state.deaths,
            overdue=state.overdue,
            counted=tuple([message and self.message(message) for message in self.counted]),
            names=max(len(self.owners), len(self.copies)),
        )

    def ticket(self, old: Ticket) -> Ticket:
        return self.tokens[old[0]], self.numbers[old[1]]

    def message(self, old: Message) -> Message:
        # A predecessor that nobody knows any more equals nothing that may come.
        trigger, copy, previous, generation, is_ahead = old
        return Message(trigger, self.copies[copy], self.copies.get(previous, BEFORE_FIRST), generation, is_ahead)

    def call(self, old: Call) -> Call:
        return old._replace(copy=self.copies.get(old.copy, BEFORE_FIRST))

    def waits(self, old: Waits) -> Waits:
        if old.groups == NO_GROUP and not old.parked:
            return old
        groups = self.groups
        return old._replace(
            parked=tuple([self.waiter(waiter) for waiter in old.parked]),
            followers=tuple([(trigger, groups[group]) for trigger, group in old.followers]),
            groups=len(groups) - 1,
        )

    def waiter(self, old: Waiter) -> Waiter:
        by = self.owners.get(old.by, SOMEBODY)
        return old._replace(copy=self.copies[old.copy], by=by, group=self.groups[old.group])

    def line(self, old: Line) -> Line:
        owner, is_live, ticket, trigger, group = old
        return Line(self.owners[owner], is_live, self.ticket(ticket), trigger, self.groups[group])

    def record(self, old: Record) -> Record:
        by, left_by, concluded_by = (self.owners.get(name, SOMEBODY) for name in (old.by, old.left_by, old.concluded_by))
        owner, ticket, copy = self.owners[old.owner], self.ticket(old.ticket), self.copies[old.copy]
        known = old.owner, old.ticket, old.copy, old.by, old.left_by, old.concluded_by, old.group
        if (owner, ticket, copy, by, left_by, concluded_by, self.groups[old.group]) == known:
            return old
        renamed = old._replace(owner=owner, ticket=ticket, copy=copy, by=by, left_by=left_by, concluded_by=concluded_by)
        return renamed._replace(group=self.groups[old.group])

    def worker(self, old: Process | None) -> Process | None:
        if old is None:
            return None
        stage, message, owner, is_unacked, ticket, *rest = old
        process = Process(stage, self.message(message), self.owners[owner], is_unacked, self.ticket(ticket), *rest)
        return process._replace(calls=tuple(map(self.call, old.calls))) if old.calls else process


def _worker_order(worker: Process | None) -> tuple[object, ...]:
    if worker is None:
        return ("~",)
    message = worker.message
    return (worker.stage, message.trigger, message.generation, worker.is_unacked, worker.believes, worker.ticket, worker.owner)


class _Past:
    """What is past in a state: facts of settled triggers, tickets and expired leases of owners that are gone."""

    def __init__(self, state: State, looks: Looks) -> None:
        self.state = state
        self.looks = looks
        self.is_settled = [record.is_settled for record in state.store.records[: len(state.told)]]
        self.workers = tuple(map(self.worker, state.workers))
        self.alive = {worker.owner for worker in self.workers if worker} - {SOMEBODY}

    def dropped(self) -> State:
        state, store = self.state, self.state.store
        # Whoever comes next writes with a later ticket.
        is_past = all(worker.ticket == NO_TICKET or worker.ticket[1] >= state.unfenced for worker in self.workers if worker)
        return state._replace(
            store=Store(
                lease=self.lease(),
                fence=store.fence,
                records=tuple(self.record(place, record) for place, record in enumerate(store.records)),
                due=tuple(due and not over for due, over in zip(store.due, self.is_settled, strict=True)),
                waits=self.waits(store.waits) if self.looks.waits else NOBODY_WAITS,
            ),
            ready=tuple(map(self.message, state.ready)),
            workers=self.workers,
            handed=tuple(map(self.call, state.handed)),
            overdue=state.overdue.intersection(store.waits.line),
            counted=tuple(None if over else last for over, last in zip(self.is_settled, state.counted, strict=True)),
            fenced=NO_TICKET if is_past else state.fenced,
            unfenced=0 if is_past else state.unfenced,
        )

    def message(self, message: Message) -> Message:
        return Message(message.trigger) if self.is_settled[message.trigger] else message

    def call(self, call: Call) -> Call:
        return Call(call.trigger, what=call.what) if self.is_settled[call.trigger] else call

    def waits(self, waits: Waits) -> Waits:
        """Hold times and groups are kept where somebody goes by them."""
        if not self.looks.hold:
            waits = waits._replace(knows_hold=False, pace=waits.pace if waits.pace == "lasts" else "")
        return waits if self.looks.groups else waits._replace(groups=NO_GROUP)

    def worker(self, worker: Process | None) -> Process | None:
        if worker is None:
            return None
        faults = self.state.faults
        stage, message, owner, is_unacked, ticket, believes, outcome, doom, has_entered, calls, may_linger, leader = worker
        if not faults and not doom:
            # Nobody dies any more: what would be given out again makes no difference.
            is_unacked = is_unacked and stage in ("exiting", "dead", "released")
            stage = "acknowledged" if stage == "told" else stage
        calls = tuple(map(self.call, calls)) if calls else calls
        if stage in ("done", "released") and not doom:
            if not is_unacked and not faults and not calls:
                return None
            owner = SOMEBODY
        outcome = outcome if stage in ("finishing", "telling", "settled") else ""
        has_entered = has_entered and is_unacked and bool(faults)
        may_linger = may_linger and stage in ("new", "lingering")
        message = self.message(message)
        return Process(
            stage, message, owner, is_unacked, ticket, believes, outcome, doom, has_entered, calls, may_linger, leader
        )

    def lease(self) -> tuple[Line, ...]:
        lease, alive = self.state.store.lease, self.alive
        if not self.looks.groups:
            lease = tuple(line._replace(group=NO_GROUP) for line in lease)
        if alive.issuperset(line.owner for line in lease):
            return lease
        lease = tuple(line if line.owner in alive else line._replace(ticket=NO_TICKET) for line in lease)
        return tuple(line for line in lease if line.is_live or line.owner in alive)

    def record(self, place: int, record: Record) -> Record:
        is_trigger = place < len(self.state.told)
        if not self.looks.groups and record.group:
            record = record._replace(group=NO_GROUP)
        if is_trigger and record.is_settled:
            return Record(outcome=record.outcome, is_settled=True, by=record.by, concluded_by=record.concluded_by)
        if not is_trigger and record.outcome:
            return Record(outcome=record.outcome, by=record.by)
        if record.owner not in self.alive and record.ticket != NO_TICKET:
            record = record._replace(ticket=NO_TICKET)
        if not self.looks.deaths and (record.died or record.left_by != NOBODY):
            record = record._replace(died=0, left_by=NOBODY)
        is_gone = record.owner != NOBODY and record.owner not in self.alive and not record.is_live
        return record._replace(owner=NOBODY) if is_gone and not self.looks.deaths else record
