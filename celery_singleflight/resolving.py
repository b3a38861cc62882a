"""What people say from outside of a run: what became of one that died, or of a step, and that steps are to be forgotten."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, Literal

from celery_singleflight.claims import Encoded, Record
from celery_singleflight.coordination import coordination
from celery_singleflight.errors import ResolutionError, ResolvedFailed, SingleflightError
from celery_singleflight.keys import LockKey
from celery_singleflight.resolution import Resolution
from celery_singleflight.results import encode, encode_error
from celery_singleflight.step_errors import StepError

if TYPE_CHECKING:
    from celery import Celery

    from celery_singleflight.binding import Binding

__all__ = ("forget_steps", "resolve", "resolve_step")


def resolve(
    app: Celery,
    task: str,
    outcome: Literal["succeeded", "failed", "rerun"],
    *,
    task_id: str | None = None,
    execution_key: str | None = None,
    result: Any = None,
    reason: str = "",
) -> int:
    """Say what a run has done that died after its body began: it has succeeded, with this `result`; failed; or is to run again.

    `task` is the task's name; the execution is that of the explicit `execution_key`, else of the `task_id`. Those who wait for
    it ask again within a second or two: they get the result or the failure, or one of them runs. Returns how many they are.
    Under `failure_policy="forget"` a failure is that of the trigger whose run it was, and the others run. It can be said of a
    run whose lease has expired, whatever the `uncertain_policy`. That one which has ended is to run again only allows a replay.

    Raises `ResolutionError` when the execution has an outcome, is under way, has not died, or is not known, and when the result
    does not serialise or is too large; `StoreUnavailable`.
    """
    said = Resolution(outcome, result, reason)
    what = f"execution {execution_key or task_id} of {task}"
    binding, record = _of(app, task, task_id, execution_key, ResolutionError)
    options, bounds = binding.options, binding.bounds
    value, why_not = encode(app, result, bounds) if outcome == "succeeded" else (Encoded("", "", b""), "")
    if why_not:
        raise ResolutionError(f"{what}: its result cannot be stored: {why_not}")
    if outcome == "failed":
        value = encode_error(app, ResolvedFailed(execution_key or task_id or "", reason), bounds)
    while True:
        word, fact = coordination(app).store.resolve(
            record,
            said.outcome,
            value,
            reason=json.dumps(["resolved", reason]),
            keep=options.result_ttl,
            keeps_failure=options.failure_policy == "keep",
        )
        if word != "other":
            break
        record = record._replace(task_id=fact, has_trigger=True)
    if word != "resolved":
        expected = "expected one whose run died after its body began"
        raise ResolutionError(f"{what}: {expected}; " + _REFUSALS[word].format(fact or "a worker"))
    return int(fact)


#: What is said of an execution that cannot be resolved.
_REFUSALS: Final = {
    "running": "{} is at it",
    "ended": "it has ended, {}",
    "certain": "none has, and it goes on by itself",
    "unknown": "the store knows nothing of it",
}


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

    Raises `StepError` when it is no uncertain step, when a run is at it, or when the result does not serialise or is too large;
    `StoreUnavailable`.
    """
    binding, record = _of(app, task, task_id, execution_key, StepError)
    value: Encoded | None = None
    if happened:
        value, why_not = encode(app, result, binding.bounds)
        if why_not:
            raise StepError(f"step {step}: its result cannot be stored: {why_not}")
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

    Between two runs of an explicit execution key the next trigger may also have other arguments than those it was done with.
    `task`, `task_id` and `execution_key` are as in `resolve_step`. Raises `StoreUnavailable`.
    """
    return coordination(app).store.forget_steps(_of(app, task, task_id, execution_key, StepError)[1])


def _of(
    app: Celery, task: str, task_id: str | None, execution_key: str | None, error: type[SingleflightError]
) -> tuple[Binding, Record]:
    if (task_id is None) == (execution_key is None):
        raise error(f"expected either a task_id or an execution_key, got {task_id!r} and {execution_key!r}")
    binding = getattr(app.tasks[task], "_binding", None) if task in app.tasks else None
    if binding is None:
        raise error(f"expected the name of a protected task, got {task!r}")
    lock_key = LockKey(binding.options.lock_name or task, "")
    return binding, Record(lock_key, task_id or "", execution_key, has_trigger=execution_key is None)
