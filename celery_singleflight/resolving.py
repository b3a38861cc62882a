"""What people say of steps from outside of a run: what became of one, and that all are to be forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_singleflight.claims import Record
from celery_singleflight.coordination import coordination
from celery_singleflight.errors import StepError
from celery_singleflight.keys import LockKey
from celery_singleflight.results import encode

if TYPE_CHECKING:
    from celery import Celery

    from celery_singleflight.claims import Encoded

__all__ = ("forget_steps", "resolve_step")


def resolve_step(
    app: Celery,
    task: str,
    step: str,
    *,
    task_id: str | None = None,
    execution_key: str | None = None,
    happened: bool,
    result: Any = None,
) -> None:
    """Say what became of a step that was begun and not recorded: whether it `happened`, and what its `result` is then.

    `task` is the task's name, `step` that of the step as `StepUncertain` has it. The execution is that of the explicit
    `execution_key`, else of the `task_id`. The next attempt goes on from there: a later trigger with that execution key, or a
    retry; where the task id is the key and its trigger has failed of it, the task sent again with the same `task_id`.
    A step that is done without its result can be given one.

    Raises `StepError` when it is no uncertain step, when a run is at it, or when the result does not serialise;
    `StoreUnavailable`.
    """
    value: Encoded | None = None
    if happened:
        value, why_not = encode(app, result)
        if why_not:
            raise StepError(f"step {step}: its result cannot be stored: {why_not}")
    record = _record_of(app, task, task_id, execution_key)
    word, fact = coordination(app).store.resolve_step(record, step, value)
    what = f"step {step} of execution {execution_key or task_id} of {task}"
    if word == "running":
        raise StepError(f"{what}: {fact or 'a worker'} is at it")
    if word == "certain":
        raise StepError(
            f"{what}: expected one that was begun and not recorded; " + (f"it is {fact}" if fact else "there is none")
        )


def forget_steps(app: Celery, task: str, *, task_id: str | None = None, execution_key: str | None = None) -> bool:
    """Forget what an execution has done, so that its next attempt begins anew. Returns whether there was anything.

    `task`, `task_id` and `execution_key` are as in `resolve_step`. Raises `StoreUnavailable`.
    """
    return coordination(app).store.forget_steps(_record_of(app, task, task_id, execution_key))


def _record_of(app: Celery, task: str, task_id: str | None, execution_key: str | None) -> Record:
    if (task_id is None) == (execution_key is None):
        raise StepError(f"expected either a task_id or an execution_key, got {task_id!r} and {execution_key!r}")
    binding = getattr(app.tasks[task], "_binding", None)
    if binding is None:
        raise StepError(f"expected the name of a protected task, got {task!r}")
    lock_key = LockKey(binding.options.lock_name or task, "")
    return Record(lock_key, task_id or "", execution_key, has_trigger=execution_key is None)
