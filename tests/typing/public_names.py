"""What a type checker knows of the public names. Checked by mypy, never run."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, assert_never, assert_type

import celery_singleflight
from celery_singleflight import (
    Cause,
    ConfigurationError,
    Contended,
    Execution,
    FencingUnavailable,
    Lease,
    LeaseLost,
    LockKeyError,
    OptionError,
    Outcome,
    PayloadChanged,
    Replaced,
    ReplayRefused,
    ResultUnavailable,
    ScriptError,
    SingleflightError,
    SingleflightTask,
    Skipped,
    StepError,
    StepResultUnavailable,
    StepUncertain,
    StoreUnavailable,
    WaitTimeout,
    current_execution,
    current_lease,
    lock,
    replay,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from celery import Celery


def a_lock_gives_its_lease(app: Celery) -> None:
    with lock(app, "billing") as lease:
        assert_type(lease, Lease)
    with lock(app, "billing", 42, "x", None, wait=2.0, lock_limit=3, lease_ttl=30, max_hold=inf) as lease:
        assert_type(lease, Lease)
    manager: AbstractContextManager[Lease] = lock(app, "billing", wait=inf)
    assert_type(manager.__enter__(), Lease)

    lock()  # type: ignore[call-arg]
    lock(app, 5)  # type: ignore[arg-type]
    lock(app, "billing", wait="2")  # type: ignore[arg-type]
    lock(app, "billing", lock_limit=1.5)  # type: ignore[arg-type]
    lock(app, "billing", timeout=2)  # type: ignore[call-arg]


def a_lease_says_what_it_is(lease: Lease) -> None:
    assert_type(lease.lock_key, str)
    assert_type(lease.fencing_token, int)
    assert_type(lease.remaining, float)
    assert_type(lease.is_lost, bool)
    lease.check()
    lease.fencing_token = 7  # type: ignore[misc]
    lease.note = "mine"  # type: ignore[attr-defined]


def an_execution_says_what_it_is(execution: Execution) -> None:
    assert_type(execution.key, str)
    assert_type(execution.run_id, str)
    assert_type(execution.attempt, int)
    assert_type(execution.task_id, str)
    assert_type(execution.is_forced, bool)
    assert_type(execution.caused_by, Cause | None)
    execution.caused_by.run_id  # type: ignore[union-attr]  # noqa: B018


def a_replay_says_how_the_trigger_had_ended(app: Celery) -> None:
    assert_type(replay(app, "id", task="shop.settle"), Outcome | None)
    assert_type(replay(app, "id", task="shop.settle", execution_key="settle:42", force=True, reason="lost"), Outcome | None)
    replay(app, "id")  # type: ignore[call-arg]
    replay(app, "id", task="shop.settle", force="yes")  # type: ignore[arg-type]
    assert_type(ReplayRefused("id", "waiting").why, str)


def what_is_held_here_may_be_nothing() -> None:
    assert_type(current_lease(), Lease | None)
    assert_type(current_execution(), Execution | None)
    current_lease().check()  # type: ignore[union-attr]


class Settle(SingleflightTask):
    lock_on = ("tenant_id",)
    lock_limit = 2
    lease_ttl = 12.5
    contention_policy = "skip"
    skip_result = 0
    idempotent_on = "settle:{tenant_id}"

    def run(self, tenant_id: int) -> int:
        assert_type(self.lease, Lease)
        assert_type(self.execution, Execution)
        assert_type(self.lease.fencing_token, int)
        self.lease = None  # type: ignore[assignment,misc]
        return tenant_id


class Wrong(SingleflightTask):
    lock_limit = "2"  # type: ignore[assignment]
    lease_ttl = "30"  # type: ignore[assignment]
    lock_name = 5  # type: ignore[assignment]


def every_option_has_a_type(task: SingleflightTask) -> None:
    assert_type(task.lock_on, Any)
    assert_type(task.lock_name, str | None)
    assert_type(task.lock_limit, int | None)
    assert_type(task.lease_ttl, float | None)
    assert_type(task.max_hold, float | None)
    assert_type(task.contention_policy, str | None)
    assert_type(task.wait_timeout, float | None)
    assert_type(task.coalesce_keep, Any)
    assert_type(task.coalesce_delay, float | None)
    assert_type(task.coalesce_within, float | None)
    assert_type(task.skip_as, str | None)
    assert_type(task.skip_result, Any)
    assert_type(task.idempotent_on, Any)
    assert_type(task.result_ttl, float | None)
    assert_type(task.uncertain_policy, str | None)


def contention_says_who_and_for_how_long(error: Contended) -> None:
    assert_type(error.lock_key, str)
    assert_type(error.task_id, str)
    assert_type(error.worker, str)
    assert_type(error.age, float)
    assert_type(error.remaining, float)


def errors_are_one_tree() -> None:
    errors: list[SingleflightError] = [
        ConfigurationError("x"),
        OptionError("x"),
        LockKeyError("x"),
        ScriptError("x"),
        StoreUnavailable("x"),
        FencingUnavailable("billing[]"),
        ResultUnavailable("key", "reason"),
        StepError("x"),
        StepResultUnavailable("key", "step", "reason"),
        StepUncertain("key", "step", 2, "w", 1.0),
        PayloadChanged("key", "step charge"),
        Contended("billing[]"),
        Skipped("billing[]", "t", "w", 1.0, 2.0),
        WaitTimeout("billing[]"),
    ]
    configuration: ConfigurationError = OptionError("x")
    wrong_value: ValueError = StepError("x")
    contended: list[Contended] = [Skipped("billing[]"), WaitTimeout("billing[]")]
    lost: BaseException = LeaseLost("billing[]", "taken")
    no_error: Exception = LeaseLost("billing[]")  # type: ignore[assignment]
    replaced: BaseException = Replaced("billing[]", "t2")
    no_error = Replaced("billing[]")  # type: ignore[assignment]
    assert_type(Replaced("billing[]", "t2").lock_key, str)
    assert_type(Replaced("billing[]", "t2").by, str)
    assert_type(LeaseLost("billing[]").reason, str)
    assert_type(ResultUnavailable("key", "reason").execution_key, str)
    assert_type(StepResultUnavailable("key", "step", "reason").step, str)
    assert_type(StepUncertain("key", "step").attempt, int)
    assert_type(StepUncertain("key", "step").age, float)
    assert_type(PayloadChanged("key", "step charge").what, str)
    assert_type(FencingUnavailable("billing[]").lock_key, str)
    assert_type(errors[0], SingleflightError)
    assert_type(contended[0], Contended)
    raise lost from (configuration or wrong_value or no_error or replaced)


def an_outcome_is_one_of_its_words(outcome: Outcome) -> str:
    assert_type(Outcome("succeeded"), Outcome)
    match outcome:
        case Outcome.SUCCEEDED | Outcome.FAILED:
            return "ran"
        case Outcome.COALESCED:
            return "has the outcome of another"
        case Outcome.REPLACED:
            return "did not, or not to its end"
        case Outcome.SKIPPED | Outcome.REJECTED | Outcome.TIMED_OUT | Outcome.DEAD_LETTERED | Outcome.REVOKED:
            return "did not"
        case Outcome.UNCERTAIN:
            return "nobody knows"
        case other:
            assert_never(other)


assert_type(celery_singleflight.__version__, str)
