"""What a type checker knows of uncertain executions. Checked by mypy, never run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

from celery_singleflight import (
    Execution,
    ExecutionUncertain,
    Resolution,
    ResolvedFailed,
    SingleflightTask,
    UncertainExecution,
    resolve,
)

if TYPE_CHECKING:
    from celery import Celery


def a_reconciler_is_told_what_is_known_and_says_what_it_has_found(execution: UncertainExecution) -> Resolution | None:
    assert_type(execution.key, str)
    assert_type(execution.task_id, str)
    assert_type(execution.age, float)
    assert_type(execution.tries, int)
    if execution.tries > 3:
        return Resolution("failed", reason="the bank has refused")
    return Resolution("succeeded", result={"charge": 7}) if execution.kwargs else Resolution("rerun")


def a_person_says_what_a_run_has_done(app: Celery) -> None:
    assert_type(resolve(app, "shop.pay", "succeeded", execution_key="pay:7", result="ch_1"), int)
    resolve(app, "shop.pay", "failed", task_id="t1", reason="refused")
    resolve(app, "shop.pay", "gone", task_id="t1")  # type: ignore[arg-type]
    resolve(app, "shop.pay", task_id="t1")  # type: ignore[call-arg]
    Resolution("maybe")  # type: ignore[arg-type]


def a_run_is_told(task: SingleflightTask) -> None:
    assert_type(task.execution, Execution)
    assert_type(task.execution.is_unsure, bool)


def errors_have_their_facts(error: ExecutionUncertain, failure: ResolvedFailed) -> None:
    assert_type(error.execution_key, str)
    assert_type(error.age, float)
    assert_type(failure.reason, str)
    assert_type(Resolution("succeeded").result, Any)
