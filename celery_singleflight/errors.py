"""Every error of the package, in one tree.

The arguments of an error are its facts, in a fixed order, so that it survives pickling and Celery's JSON result backends;
its message is made from them.
"""

from __future__ import annotations

from celery.exceptions import ImproperlyConfigured

__all__ = (
    "ConfigurationError",
    "Contended",
    "DeadLettered",
    "ExecutionKeyReused",
    "ExecutionUncertain",
    "FencingUnavailable",
    "LeaseLost",
    "LockKeyError",
    "MaxHoldExceeded",
    "NestedLeaseLost",
    "OptionError",
    "PayloadMismatch",
    "Replaced",
    "ResolutionError",
    "ResolvedFailed",
    "ResultUnavailable",
    "ScriptError",
    "SingleflightError",
    "Skipped",
    "StaleToken",
    "StoreUnavailable",
    "WaitTimeout",
)


class SingleflightError(Exception):
    """Base of the errors of celery_singleflight, `LeaseLost` apart."""


class ConfigurationError(SingleflightError, ImproperlyConfigured):
    """A setting, an option or a task class is wrong; says what was expected and what came."""


class OptionError(ConfigurationError, ValueError):
    """A task option, call option or setting is unknown or has a wrong value."""


class LockKeyError(SingleflightError, ValueError):
    """No lock key or execution key can be made from these arguments, so the task does not run."""


class ScriptError(SingleflightError):
    """The store answered a script with something its header does not declare."""


class StoreUnavailable(SingleflightError):
    """The store could not be reached, or refused to work, after several attempts."""


class FencingUnavailable(SingleflightError):
    """With `lock_limit` above 1 the holders would fence each other out, so there is no fencing token."""

    def __init__(self, lock_key: str) -> None:
        super().__init__(lock_key)
        self.lock_key = lock_key

    def __str__(self) -> str:
        return (
            f"{self.lock_key} has a lock_limit above 1: its holders would fence each other out, so there is no fencing "
            "token to ask for"
        )


class ResultUnavailable(SingleflightError):
    """The execution has ended before, but its value could not be stored, so there is nothing to answer with."""

    def __init__(self, execution_key: str, reason: str) -> None:
        super().__init__(execution_key, reason)
        self.execution_key = execution_key
        self.reason = reason

    def __str__(self) -> str:
        return f"execution {self.execution_key} has ended, but its result is not stored: {self.reason}"


class Contended(SingleflightError):
    """A live lease of somebody else is in the way.

    `age` and `remaining` are seconds: how long the holder has held the key, and when its lease ends unless renewed.
    """

    verb = "is held"

    def __init__(self, lock_key: str, task_id: str = "", worker: str = "", age: float = 0.0, remaining: float = 0.0) -> None:
        super().__init__(lock_key, task_id, worker, age, remaining)
        self.lock_key = lock_key
        self.task_id = task_id
        self.worker = worker
        self.age = age
        self.remaining = remaining

    def __str__(self) -> str:
        return (
            f"{self.lock_key} {self.verb} by {self.task_id or 'unknown'} on {self.worker or 'unknown'} "
            f"for {self.age:.1f} s, its lease has {self.remaining:.1f} s left"
        )


class Skipped(Contended):
    """The trigger was skipped under `contention_policy="skip"`, `skip_as="raise"`."""

    verb = "was skipped: held"


class WaitTimeout(Contended):
    """The trigger waited for `wait_timeout` and was still contended."""

    verb = "was still contended at the end of wait_timeout: held"


class DeadLettered(SingleflightError):
    """The trigger does not run any more: so many of its runs have died with their process."""

    def __init__(self, lock_key: str, task_id: str, worker: str, deaths: int) -> None:
        super().__init__(lock_key, task_id, worker, deaths)
        self.lock_key = lock_key
        self.task_id = task_id
        self.worker = worker
        self.deaths = deaths

    def __str__(self) -> str:
        return (
            f"{self.task_id} on {self.lock_key} is dead-lettered: {self.deaths} of its runs died with their process, the last "
            f"on {self.worker or 'unknown'}"
        )


class NestedLeaseLost(SingleflightError):
    """A lease that the body of a task held beside its own is lost, so the run fails."""

    def __init__(self, lock_key: str, reason: str = "") -> None:
        super().__init__(lock_key, reason)
        self.lock_key = lock_key
        self.reason = reason

    def __str__(self) -> str:
        return f"a lease that the body held on {self.lock_key} is lost" + (f": {self.reason}" if self.reason else "")


class MaxHoldExceeded(SingleflightError):
    """The body ran for longer than `max_hold`, so its lease was renewed no more and the run fails."""

    def __init__(self, lock_key: str, max_hold: float) -> None:
        super().__init__(lock_key, max_hold)
        self.lock_key = lock_key
        self.max_hold = max_hold

    def __str__(self) -> str:
        return f"the run held {self.lock_key} for longer than its max_hold, {self.max_hold:g} s"


class ExecutionKeyReused(SingleflightError):
    """Another task has used this execution key under the same lock name: its outcome is not this one's."""

    def __init__(self, execution_key: str, task: str) -> None:
        super().__init__(execution_key, task)
        self.execution_key = execution_key
        self.task = task

    def __str__(self) -> str:
        return f"execution key {self.execution_key} belongs to the task {self.task}, which shares the lock name"


class PayloadMismatch(ExecutionKeyReused):
    """This execution key was recorded with another payload: it stands for something else than what is asked for now."""

    def __str__(self) -> str:
        return f"execution key {self.execution_key} was recorded by {self.task or 'its task'} with another payload"


class ExecutionUncertain(SingleflightError):
    """A run of the execution died after its body began, and is held under `uncertain_policy="hold"` until `resolve`.

    `age` is how many seconds ago that was found.
    """

    def __init__(self, execution_key: str, task_id: str = "", worker: str = "", age: float = 0.0) -> None:
        super().__init__(execution_key, task_id, worker, age)
        self.execution_key = execution_key
        self.task_id = task_id
        self.worker = worker
        self.age = age

    def __str__(self) -> str:
        run = f"the run of {self.task_id}" if self.task_id else "a run"
        return (
            f"nobody knows what {run} on {self.worker or 'unknown'}, which was found dead {self.age:.1f} s ago, has done of "
            f"execution {self.execution_key}: find out, and say so with resolve"
        )


class ResolutionError(SingleflightError, ValueError):
    """An execution cannot be resolved like this; says what was expected and what came."""


class ResolvedFailed(SingleflightError):
    """A run of the execution died, and somebody has found out that it failed."""

    def __init__(self, execution_key: str, reason: str = "") -> None:
        super().__init__(execution_key, reason)
        self.execution_key = execution_key
        self.reason = reason

    def __str__(self) -> str:
        return f"execution {self.execution_key} was found to have failed" + (f": {self.reason}" if self.reason else "")


class StaleToken(SingleflightError):
    """A resource has seen a greater fencing token: the writer holds its lease no more, and its write is refused."""

    def __init__(self, resource: str, token: int, seen: int) -> None:
        super().__init__(resource, token, seen)
        self.resource = resource
        self.token = token
        self.seen = seen

    def __str__(self) -> str:
        return f"{self.resource} has seen fencing token {self.seen}, so a write with {self.token} comes too late"


class LeaseLost(BaseException):
    """The lease is not ours any more: it was taken over, or could not be renewed before its own deadline.

    A `BaseException`, so that neither `except Exception` nor `autoretry_for` eats it.
    """

    def __init__(self, lock_key: str = "", reason: str = "") -> None:
        super().__init__(lock_key, reason)
        self.lock_key = lock_key
        self.reason = reason

    def __str__(self) -> str:
        return f"the lease on {self.lock_key} is lost" + (f": {self.reason}" if self.reason else "")


class Replaced(BaseException):
    """Another trigger, under `contention_policy="replace"`, takes the place of this run, which is asked to stop.

    A `BaseException`, as `LeaseLost` is. A body that catches it and returns has its result all the same.
    """

    def __init__(self, lock_key: str = "", by: str = "") -> None:
        super().__init__(lock_key, by)
        self.lock_key = lock_key
        self.by = by

    def __str__(self) -> str:
        return f"the run on {self.lock_key} is replaced by {self.by or 'unknown'}"
