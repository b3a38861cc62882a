"""The lease of a lock key, the execution it is for, and who holds what in the current context."""

from __future__ import annotations

import time
from contextvars import ContextVar
from os import getpid
from threading import get_ident
from typing import TYPE_CHECKING, Any

from celery_singleflight.errors import FencingUnavailable, LeaseLost, Replaced
from celery_singleflight.interruption import Stretch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_singleflight.cause import Cause
    from celery_singleflight.keys import LockKey

__all__ = (
    "Execution",
    "Holding",
    "Lease",
    "current_execution",
    "current_lease",
    "holdings",
    "is_holding",
    "is_inside",
    "note_continuation",
)


class Lease:
    """A time-limited right on a lock key, as its holder sees it. Times are monotonic seconds of this process.

    `expires_at` is counted from before the request that got or renewed the lease, so it is never later than the store's own
    expiry by more than the drift of two clocks over one lease.
    """

    __slots__ = (
        "_lost",
        "_token",
        "acquired_at",
        "body",
        "expires_at",
        "is_replaceable",
        "key",
        "limit",
        "max_hold",
        "owner",
        "renew_every",
        "ttl",
    )

    def __init__(
        self,
        key: LockKey,
        *,
        owner: str,
        token: int,
        limit: int,
        ttl: float,
        max_hold: float,
        requested_at: float,
        renew_every: float | None = None,
    ) -> None:
        self.key = key
        self.owner = owner
        self.limit = limit
        self.ttl = ttl
        self.max_hold = max_hold
        #: Seconds between two renewals, at which the holder hears too that it is to stop. A third of the lease by default.
        self.renew_every = ttl / 3 if renew_every is None else min(renew_every, ttl / 3)
        #: Whether it is a trigger's run, which may be asked to stop.
        self.is_replaceable = renew_every is not None
        self.acquired_at = requested_at
        self.expires_at = requested_at + min(ttl, max_hold)
        self._token = token
        self._lost = ""
        #: The work that is done under the lease.
        self.body = Stretch()

    @property
    def lock_key(self) -> str:
        """The lock key as text."""
        return self.key.text

    @property
    def fencing_token(self) -> int:
        """An integer that grows with every acquisition of the lock key: hand it to the resource that must refuse stale writers.

        Raises `FencingUnavailable` when `lock_limit` is above 1. Tokens compare within one lock key only.
        """
        if self.limit > 1:
            raise FencingUnavailable(self.lock_key)
        return self._token

    @property
    def token(self) -> int:
        """The number of this acquisition, whatever the lock limit; for the store's own use."""
        return self._token

    @property
    def remaining(self) -> float:
        """Seconds until the lease ends unless it is renewed; 0 when it is lost."""
        return 0.0 if self._lost else max(self.expires_at - time.monotonic(), 0.0)

    @property
    def is_lost(self) -> bool:
        """Whether the store has said so, or the lease's own deadline has passed without a renewal."""
        return bool(self._lost) or time.monotonic() >= self.expires_at

    @property
    def is_worn_out(self) -> bool:
        """Whether it is as old as `max_hold`, and is renewed no more."""
        return time.monotonic() >= self.acquired_at + self.max_hold

    def check(self) -> None:
        """Do nothing while the lease is held; raise `LeaseLost` when it is not."""
        if self.is_lost:
            raise LeaseLost(self.lock_key, self.why_lost)

    @property
    def why_lost(self) -> str:
        """Why it is lost, for people to read."""
        if self._lost:
            return self._lost
        if self.is_worn_out:
            return f"it is as old as its max_hold, {self.max_hold:g} s"
        return "it could not be renewed before its deadline"

    def mark_lost(self, reason: str) -> None:
        """Note that the lease is gone for good."""
        self._lost = self._lost or reason

    def interrupt(self) -> None:
        """Raise `LeaseLost` in the thread that works under the lease, if it still does."""
        self.body.interrupt(LeaseLost(self.lock_key, self.why_lost))

    def replace(self, by: str) -> None:
        """Raise `Replaced` in the thread that works under the lease, if it still does and is a trigger's run."""
        if self.is_replaceable:
            self.body.interrupt(Replaced(self.lock_key, by))

    def renewed(self, requested_at: float, ttl: float) -> None:
        """Note a renewal that was requested at that time and granted for `ttl` seconds."""
        self.expires_at = max(self.expires_at, requested_at + ttl)

    def __repr__(self) -> str:
        state = "lost" if self.is_lost else f"{self.remaining:.1f} s left"
        return f"<Lease {self.lock_key} token {self._token}, {state}>"


class Execution:
    """One logical unit of work, as the run that works on it sees it."""

    __slots__ = ("attempt", "caused_by", "is_forced", "is_unsure", "key", "run_id", "task_id", "work")

    def __init__(
        self,
        *,
        key: str,
        run_id: str,
        attempt: int,
        task_id: str,
        is_unsure: bool = False,
        caused_by: Cause | None = None,
        is_forced: bool = False,
    ) -> None:
        #: What must not happen twice; the provider's idempotency key.
        self.key = key
        #: Stays the same over all attempts of this execution while its record is kept.
        self.run_id = run_id
        #: 1 for the first run, one more for each further one.
        self.attempt = attempt
        self.task_id = task_id
        #: Whether an earlier run of it died after its body began, and may have done what it was to do.
        self.is_unsure = is_unsure
        #: The run whose body has published this trigger; None when it was none, or nobody knows.
        self.caused_by = caused_by
        #: Whether it is replayed by force, so that it may have succeeded before.
        self.is_forced = is_forced
        #: What this run does of it, step by step; for the package's own use. None where it goes on without its store.
        self.work: Any = None

    def __repr__(self) -> str:
        return f"<Execution {self.key} attempt {self.attempt}>"


class Holding:
    """A place in the context: this lease is held here, for this execution and task, inside of what was held before.

    There is no lease where a run goes on without its store.
    """

    __slots__ = ("continued_as", "execution", "is_outermost", "is_over", "lease", "outer", "request_id", "task", "thread")

    def __init__(
        self,
        lease: Lease | None,
        execution: Execution | None = None,
        task: object = None,
        request_id: str | None = None,
    ) -> None:
        self.lease = lease
        self.execution = execution
        self.task = task
        self.request_id = request_id
        self.thread = _here()
        self.is_over = False
        #: The generation in which the body has sent its own message on, by a retry or a replacement.
        self.continued_as: int | None = None
        self.outer = _innermost.get()

    def __enter__(self) -> None:
        lease = self.lease
        self.is_outermost = lease is not None and not lease.body.is_under_way
        _innermost.set(self)
        if lease is not None and self.is_outermost:
            lease.body.begin()

    def __exit__(self, *_: object) -> None:
        lease = self.lease
        while True:
            try:
                self.is_over = True
                if lease is not None and self.is_outermost:
                    lease.body.end()
                innermost = _innermost.get()
                while innermost is not None and not innermost.is_open:  # blocks may end in any order
                    innermost = innermost.outer
                _innermost.set(innermost)
            except (LeaseLost, Replaced):
                continue  # it came as the body ended: what the store says of the outcome counts
            return

    @property
    def is_open(self) -> bool:
        """Whether the block goes on, and so does that of the lease's outermost holder."""
        return not self.is_over and (self.lease is None or self.lease.body.is_under_way)


_innermost: ContextVar[Holding | None] = ContextVar("singleflight_holding", default=None)


def _here() -> tuple[int, int]:
    return getpid(), get_ident()


def holdings() -> Iterator[Holding]:
    """Yield what is held in this context, from the innermost outwards."""
    holding, thread = _innermost.get(), _here()
    # Where threads and forked processes inherit the context they still do not inherit the lease.
    while holding is not None and holding.thread == thread:
        if holding.is_open:  # else it was inherited by a context that goes on after the block
            yield holding
        holding = holding.outer


def is_holding() -> bool:
    """Whether this context may be inside of a block that holds something; tells at once when it is not."""
    return _innermost.get() is not None


def note_continuation(task_id: str, generation: int) -> bool:
    """Note that a message with that id was published in that generation; by its own body it is the trigger's continuation.

    Returns whether it is.
    """
    is_continuation = False
    for holding in holdings():
        if holding.request_id == task_id:
            holding.continued_as = generation
            is_continuation = True
    return is_continuation


def is_inside(task: object, request_id: str) -> bool:
    """Whether this context is inside of the body of that delivery."""
    return is_holding() and any(h.task is task and h.request_id == request_id for h in holdings())


def current_lease() -> Lease | None:
    """Return the innermost lease held in this context, or None. A thread started by a body is a context of its own."""
    return next((holding.lease for holding in holdings() if holding.lease), None)


def current_execution() -> Execution | None:
    """Return the execution of the innermost protected run in this context, or None."""
    return next((holding.execution for holding in holdings() if holding.execution), None)
