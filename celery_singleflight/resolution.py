"""What somebody has found out about a run that died after its body began."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from celery_singleflight.errors import ResolutionError

__all__ = ("Resolution", "UncertainExecution")


@dataclass(frozen=True, slots=True)
class Resolution:
    """What an execution has come to: "succeeded" with its `result`, "failed", or "rerun" when it is to run again.

    Raises `ResolutionError` for anything else.
    """

    outcome: Literal["succeeded", "failed", "rerun"]
    result: Any = field(default=None, repr=False)
    #: For people to read.
    reason: str = ""

    def __post_init__(self) -> None:
        if self.outcome not in ("succeeded", "failed", "rerun"):
            raise ResolutionError(f"a resolution: expected 'succeeded', 'failed' or 'rerun', got {self.outcome!r}")
        if self.outcome != "succeeded" and self.result is not None:
            raise ResolutionError(f"a resolution: only one that has succeeded has a result, got one for {self.outcome!r}")


@dataclass(frozen=True, slots=True)
class UncertainExecution:
    """An execution of which nobody knows what its last run has done, for a `reconciler`. Durations in seconds."""

    #: The explicit execution key, else the task id: by what a provider may have been given as its idempotency key.
    key: str
    lock_key: str
    task: str
    args: Any = field(repr=False)
    kwargs: Any = field(repr=False)
    #: Of the run that died; the same over all attempts.
    run_id: str
    #: The id of its trigger, and its worker.
    task_id: str
    worker: str
    #: How long ago it was found.
    age: float
    #: How often it was tried to find out, this time included.
    tries: int
