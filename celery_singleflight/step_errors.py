"""The errors of steps, checkpoints and cursors; as those of `errors`."""

from __future__ import annotations

from celery_singleflight.errors import SingleflightError

__all__ = ("PayloadChanged", "StepError", "StepResultUnavailable", "StepUncertain")


class StepError(SingleflightError, ValueError):
    """A step or a cursor cannot be used like this; says what was expected and what came."""


class StepResultUnavailable(SingleflightError):
    """The step is done, but its value could not be stored, so there is nothing to go on with."""

    def __init__(self, execution_key: str, step: str, reason: str) -> None:
        super().__init__(execution_key, step, reason)
        self.execution_key = execution_key
        self.step = step
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"step {self.step} of execution {self.execution_key} is done and will not be done again, but its result is not "
            f"stored: {self.reason}; have it return what can be stored, or give it its result with resolve_step"
        )


class StepUncertain(SingleflightError):
    """The step was begun and never recorded, and is held under `uncertain_policy="hold"` until `resolve_step`.

    `attempt` is how often it was begun, `age` how many seconds ago the last time.
    """

    def __init__(self, execution_key: str, step: str, attempt: int = 1, worker: str = "", age: float = 0.0) -> None:
        super().__init__(execution_key, step, attempt, worker, age)
        self.execution_key = execution_key
        self.step = step
        self.attempt = attempt
        self.worker = worker
        self.age = age

    def __str__(self) -> str:
        return (
            f"step {self.step} of execution {self.execution_key} was begun by {self.worker or 'unknown'} {self.age:.1f} s ago "
            "and not recorded: find out whether it happened, and say so with resolve_step"
        )


class PayloadChanged(SingleflightError):
    """An earlier attempt of the execution did this with other arguments of the task, so it does not fit these."""

    def __init__(self, execution_key: str, what: str) -> None:
        super().__init__(execution_key, what)
        self.execution_key = execution_key
        self.what = what

    def __str__(self) -> str:
        return (
            f"{self.what} of execution {self.execution_key} was reached with other arguments of the task: give other arguments "
            "an execution key of their own, give a checkpoint or cursor an on_change, or begin anew after forget_steps"
        )
