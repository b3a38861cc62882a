"""What the model knows of a broker, its workers and the store. Names of owners and copies are small numbers."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from model_waits import NO_GROUP, NOBODY_WAITS, NONE as _NONE, Call, Waits

#: Owner tokens and copies are counted from 1. These stand for none.
NOBODY: Final = 0
#: An owner that is gone for good: no later request comes with its token.
SOMEBODY: Final = -1
#: The copy that was published first, and what is before it.
FIRST: Final = 0
BEFORE_FIRST: Final = -1
#: No copy, no generation, no trigger.
NONE: Final = _NONE

#: A fencing token, and for the judges the true number of the acquisition.
Ticket = tuple[int, int]
NO_TICKET: Final[Ticket] = (0, 0)

#: An outcome that Celery was told, and the generation of the message it was told for.
Told = tuple[int, str]
NOTHING_TOLD: Final[Told] = (NONE, "")


class Message(NamedTuple):
    """A message in the broker: one copy of a trigger."""

    trigger: int
    copy: int = FIRST
    previous: int = BEFORE_FIRST
    generation: int = 0
    #: Whether it was called ahead of its turn, and may wait in its slot before it asks.
    is_ahead: bool = False


class Process(NamedTuple):
    """A worker with one delivery.

    Stages of a run: new, body, worked, retried or overtaken, leaving. Of a trigger with an outcome: telling, told, settled
    or acknowledged. Of one that waits in its slot: lingering. Of one that gets another's outcome: led. Of the others: waiting,
    done. Of a child that died, for which the main process acts: exiting, dead, released; calling, if it has only calls to
    publish. Of a delivery whose store is away: refusing, blind.
    """

    stage: str
    message: Message
    owner: int
    #: Whether the broker will give out the message again if the worker dies.
    is_unacked: bool = True
    ticket: Ticket = NO_TICKET
    #: Whether the holder has reason to think that its lease lasts.
    believes: bool = False
    outcome: str = ""
    #: What the main process has still to do for a child past its hard time limit: to tell, to settle, to kill.
    doom: str = ""
    #: Whether the trigger entered or was parked with this delivery, so that it goes on even if the broker never gives the
    #: message out again.
    has_entered: bool = False
    #: The messages of those who are next, still to be published.
    calls: tuple[Call, ...] = ()
    #: Whether its slot may wait for a place.
    may_linger: bool = False
    #: Whose outcome it gets.
    leader: int = NONE


class Line(NamedTuple):
    """A place in the lease of the lock key."""

    owner: int
    is_live: bool
    ticket: Ticket
    trigger: int
    group: int = NO_GROUP


class Record(NamedTuple):
    """A record of the store: of an execution, of a trigger, or of both when the execution key is not explicit."""

    owner: int = NOBODY
    is_live: bool = False
    ticket: Ticket = NO_TICKET
    has_attempt: bool = False
    has_run: bool = False
    runs: int = NONE
    run_generation: int = NONE
    generation: int = NONE
    copy: int = NONE
    outcome: str = ""
    by: int = NOBODY
    #: Whether the outcome is younger than the grace that its deliverer is given.
    is_fresh: bool = False
    is_settled: bool = False
    #: The generation of the message that is stored, if one is.
    message: int = NONE
    died: int = 0
    left_by: int = NOBODY
    concluded_by: int = NOBODY
    #: Whether it has been parked and has not entered since; those who get its outcome; and whose outcome it has.
    is_parked: bool = False
    group: int = NO_GROUP
    led_by: int = NONE


EMPTY: Final = Record()


class Store(NamedTuple):
    """The store: one lock key, who waits for it, the records, and the index of what is due."""

    lease: tuple[Line, ...]
    fence: int
    #: Of each trigger, then of each explicit execution key.
    records: tuple[Record, ...]
    due: tuple[bool, ...]
    waits: Waits = NOBODY_WAITS

    def change(self, place: int, **facts: object) -> Store:
        record = self.records[place]._replace(**facts)  # type: ignore[arg-type]  # the names are those of a Record, each with its own type
        return self._replace(records=(*self.records[:place], record, *self.records[place + 1 :]))

    def forget(self, place: int) -> Store:
        return self._replace(records=(*self.records[:place], EMPTY, *self.records[place + 1 :]))

    def set_due(self, trigger: int, *, is_due: bool) -> Store:
        if self.due[trigger] == is_due:
            return self
        return self._replace(due=(*self.due[:trigger], is_due, *self.due[trigger + 1 :]))

    def line(self, owner: int) -> Line | None:
        return next((line for line in self.lease if line.owner == owner), None)

    def without(self, owner: int) -> Store:
        return self._replace(lease=tuple(line for line in self.lease if line.owner != owner))


class State(NamedTuple):
    """Everything, and what judges outside have seen of it."""

    store: Store
    ready: tuple[Message, ...]
    workers: tuple[Process | None, ...]
    #: What a sweeper has in its hands.
    handed: tuple[Call, ...]
    faults: int
    forgets: int
    #: How many of the waiting triggers may still be revoked.
    revokes: int
    #: The greatest fencing token and the number of acquisitions; those of the last write to each resource.
    given: Ticket
    fenced: Ticket
    unfenced: int
    #: Of which generation the recorded success of each execution is, what Celery was told of each trigger, and how often a run
    #: of each generation of each trigger has died.
    succeeded: tuple[int, ...]
    told: tuple[Told, ...]
    deaths: tuple[tuple[int, ...], ...]
    #: The last message of each trigger that went back to the broker.
    counted: tuple[Message | None, ...]
    #: Those in line whose reservation has run out.
    overdue: frozenset[int]
    #: The last name that was given to an owner or a copy.
    names: int


def put(values: tuple[Any, ...], place: int, new: Any) -> tuple[Any, ...]:
    return (*values[:place], new, *values[place + 1 :])


def take(state: State, message: Message) -> State:
    place = state.ready.index(message)
    return state._replace(ready=(*state.ready[:place], *state.ready[place + 1 :]))


def with_copy(state: State, message: Message | Call) -> State:
    is_ahead = isinstance(message, Call) and message.is_ahead
    copy = Message(message.trigger, state.names + 1, message.copy, message.generation, is_ahead)
    return state._replace(ready=(*state.ready, copy), names=state.names + 1)


def expired(state: State, owner: int) -> State:
    store = state.store
    lease = tuple(line._replace(is_live=line.is_live and line.owner != owner) for line in store.lease)
    records = tuple(record._replace(is_live=False) if record.owner == owner else record for record in store.records)
    return state._replace(store=store._replace(lease=lease, records=records))
