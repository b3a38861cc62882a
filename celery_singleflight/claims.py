"""What a delivery asks of the store, and what the store answers. Durations in seconds."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal, NamedTuple

from celery_singleflight.keys import LockKey

__all__ = ("Acquired", "Claim", "Encoded", "Ended", "Handout", "Held", "OnHeld", "Outcome", "Record", "Refused", "Surplus")

OnHeld = Literal["wait", "skip", "reject", "ask"]


class Outcome(StrEnum):
    """How a trigger ended. Every trigger gets exactly one."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SKIPPED = "skipped"
    REJECTED = "rejected"
    TIMED_OUT = "timed out waiting"
    DEAD_LETTERED = "dead-lettered"
    REVOKED = "revoked"


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
    def of_member(cls, lock_name: str, member: str) -> Record:
        """Return where the trigger of that name is recorded; its lock key is not known here."""
        task_id, _, execution_key = member.partition("\n")
        return cls(LockKey(lock_name, ""), task_id, execution_key or None)


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


class Acquired(NamedTuple):
    """The lease is ours."""

    token: int
    run_id: str
    attempt: int


class Held(NamedTuple):
    """Contention: a live lease is in the way. Durations in seconds.

    `what` is held: the "lock", the "execution" (under another lock key), or it is our "own" trigger, which another
    delivery of it runs or has just ended; or the "predecessor" that sent this retry and is about to end.
    `hold` is the recent hold time of the lock key, 0 when none is known; `turn` the time until a place reserved for us.
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

    @property
    def is_own(self) -> bool:
        """Whether it is our own trigger that is in the way, so that no policy for newcomers applies."""
        return self.what in ("own", "predecessor")


class Ended(NamedTuple):
    """The trigger is over. `settled` when Celery has done all that follows; `reason` names the blocker or the leader."""

    outcome: Outcome
    settled: bool
    reason: list[Any]
    value: Encoded


class Surplus(NamedTuple):
    """Another copy of the trigger's message is the one that counts."""

    why: str


class Handout(NamedTuple):
    """The message of a trigger that needs to be published again, as a copy made from `copy`.

    `outcome` is empty when its run died; `times` counts how often it has been handed out since it entered.
    """

    message: bytes
    copy: str
    outcome: str
    times: int


class Refused(NamedTuple):
    """Somebody else has taken over; `outcome` is empty while they run."""

    owner: str
    outcome: str
