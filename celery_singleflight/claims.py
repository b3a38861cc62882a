"""What a delivery asks of the store, and what the store answers. Durations in seconds."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from celery_singleflight.keys import LockKey  # noqa: TC001, a record is made with one

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = (
    "DIRECT",
    "Acquired",
    "Claim",
    "Died",
    "Doubt",
    "Encoded",
    "Ended",
    "Finished",
    "Handout",
    "Held",
    "Led",
    "Linger",
    "Merge",
    "OnHeld",
    "Outcome",
    "Parked",
    "Record",
    "Refused",
    "Surplus",
    "Terms",
    "UncertainRun",
    "Waits",
)

OnHeld = Literal["wait", "skip", "reject", "ask", "queue", "coalesce", "replace", "join"]


#: Source of a run that was called directly: no message stands behind it.
DIRECT: Final = "direct call"


class Outcome(StrEnum):
    """How a trigger ended. Every trigger gets exactly one."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SKIPPED = "skipped"
    REJECTED = "rejected"
    COALESCED = "coalesced"
    REPLACED = "replaced"
    TIMED_OUT = "timed out waiting"
    DEAD_LETTERED = "dead-lettered"
    REVOKED = "revoked"
    UNCERTAIN = "uncertain"


class Encoded(NamedTuple):
    """A stored value as its serializer made it. An empty content type means that the value could not be stored."""

    content_type: str
    content_encoding: str
    body: bytes


class Record(NamedTuple):
    """Where a run is recorded: its lock key, its trigger, and its execution key when it has an explicit one.

    A direct call has no trigger: no message stands behind it.
    """

    lock_key: LockKey
    task_id: str
    execution_key: str | None
    has_trigger: bool = True

    @property
    def member(self) -> str:
        """How the index of what is due names the trigger."""
        return self.task_id if self.execution_key is None else f"{self.task_id}\n{self.execution_key}"

    @classmethod
    def of_member(cls, lock_key: LockKey, member: str) -> Record:
        """Return where the trigger of that name is recorded. The lock key may have an empty text where it is not known."""
        task_id, _, execution_key = member.partition("\n")
        return cls(lock_key, task_id, execution_key or None)


class Waits(NamedTuple):
    """How a trigger waits when it has to. Durations in seconds.

    `keeps` is whether the store keeps the message while it runs; `linger` for how long its slot may wait; `digest` is of the
    payload, or under `coalesce` tells apart the tasks of one lock name; `which` arguments count under `coalesce`, "newest",
    "first" or "merged" with that waiting `merged_with` in its copy `merged_copy`; it is held back for `delay` after the last,
    for `within` in all.
    """

    keeps: bool = True
    linger: float = 0.0
    digest: str = ""
    expires: float | None = None
    which: str = ""
    delay: float = 0.0
    within: float = 0.0
    merged_with: str = ""
    merged_copy: str = ""


class Terms(NamedTuple):
    """What a trigger says of its execution.

    `payload` is the digest by which an explicit execution key is recognised, empty for none; `holds` whether a run that died
    leaves the execution uncertain; `delays` in how many seconds each somebody tries to find out; `source` where it comes from,
    `scheduled` for when, empty for at once; `is_redelivered` whether the broker delivers it again.
    """

    payload: str = ""
    holds: bool = False
    delays: tuple[float, ...] = ()
    source: str = "call"
    scheduled: str = ""
    is_redelivered: bool = False


class Claim(NamedTuple):
    """What one delivery of a trigger asks of the store. Durations in seconds."""

    record: Record
    owner: str
    worker: str
    run_id: str
    limit: int
    ttl: float
    keep: float
    on_held: OnHeld
    wait: float | None = None
    copy: str = ""
    previous: str = "-"
    generation: int = 0
    first_ms: str = ""
    grace: float = 0.0
    message: bytes = b""
    max_deliveries: int | None = None
    task: str = ""
    waits: Waits = Waits()
    ticket: str = ""
    terms: Terms = Terms()


class Handout(NamedTuple):
    """The message of a trigger that needs to be published again, as a copy made from `copy`.

    `outcome` is empty when its run died, or when it waits: then `first_ms` is since when, in store time, and `linger` for how
    many seconds it may wait in its slot before it asks. `times` counts how often it has been handed out since it entered.
    """

    message: bytes
    copy: str
    outcome: str = ""
    times: int = 1
    first_ms: str = ""
    linger: float = 0.0


class UncertainRun(NamedTuple):
    """A run that died after its body began, as was found `age` seconds ago; `tries` to find out, this one included."""

    task_id: str
    worker: str
    age: float
    tries: int


class Acquired(NamedTuple):
    """The lease is ours. The `calls` of this and other answers are the messages of those who are next, to be published now.

    `is_unsure` when an earlier run of the execution died; `find_out` is that run, when this one is to find out about it.
    """

    token: int
    run_id: str
    attempt: int
    calls: Sequence[Handout] = ()
    is_unsure: bool = False
    find_out: UncertainRun | None = None


class Held(NamedTuple):
    """Contention: a live lease is in the way. Durations in seconds.

    `what` is held: the "lock", the "execution" (under another lock key), or it is our "own" trigger, which another delivery
    runs or has just ended; or the "predecessor" that sent this retry; or what a run that died has done is "uncertain".
    `hold` is the recent hold time of the lock key, 0 when none is known; `turn` in what time it will be about our turn; `place`
    the place in the line of those who wait with the broker, which the `ticket` keeps; `tries` how often we have looked in vain
    since anybody has entered.
    """

    what: str
    task_id: str
    worker: str
    age: float
    remaining: float
    hold: float
    turn: float
    waited: float
    first_ms: str
    place: int = 0
    tries: int = 0
    ticket: str = ""

    @property
    def is_own(self) -> bool:
        """Whether it is our own trigger that is in the way, so that no policy for newcomers applies."""
        return self.what in ("own", "predecessor")


class Parked(NamedTuple):
    """The store has the trigger's message, and it will be called. Durations in seconds.

    `how` is "line", with its `place` in it and the `ticket` by which it has that; "group" when it gets the outcome of the run
    in the way; or "again" when it had been parked before.
    """

    how: str
    task_id: str
    worker: str
    age: float
    remaining: float
    place: int
    ticket: int
    calls: Sequence[Handout] = ()


class Linger(NamedTuple):
    """The trigger is parked, and is the one that may wait in its slot, for so many seconds, before it asks again."""

    seconds: float
    ticket: int
    calls: Sequence[Handout] = ()


class Doubt(NamedTuple):
    """A run of the execution died after its body began `age` seconds ago, and nobody knows what it has done.

    `how` is "held", the store has the trigger's message until somebody knows; "again" when it had it before; "told", if not.
    """

    how: str
    task_id: str
    worker: str
    age: float
    calls: Sequence[Handout] = ()


class Led(NamedTuple):
    """The trigger gets the outcome of another, as the index of what is due names it."""

    by: str


class Merge(NamedTuple):
    """The arguments are to be merged into the message of the trigger that waits, as the index of what is due names it.

    No name means that nobody waits: the trigger's own arguments are to be all.
    """

    by: str
    copy: str
    message: bytes


class Ended(NamedTuple):
    """The trigger is over. `settled` when Celery has done all that follows; `reason` names the blocker or the leader.

    `ended_as` is how the leader ended whose value this is, if there is one.
    """

    outcome: Outcome
    settled: bool
    reason: list[Any]
    value: Encoded
    ended_as: Outcome
    calls: Sequence[Handout] = ()


class Died(NamedTuple):
    """Another process has had this delivery and has died with its run, which holds the lease still."""


class Surplus(NamedTuple):
    """Another copy of the trigger's message is the one that counts."""

    why: str


class Finished(NamedTuple):
    """It is recorded, and the lease is released."""

    calls: Sequence[Handout] = ()


class Refused(NamedTuple):
    """Somebody else has taken over; `outcome` is empty while they run."""

    owner: str
    outcome: str
