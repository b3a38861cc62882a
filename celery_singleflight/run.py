"""The path of one run: enter, keep alive, body, finish."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from celery.exceptions import Ignore, Reject, Retry

from celery_singleflight import signals
from celery_singleflight.cause import history_of
from celery_singleflight.claims import Acquired, Doubt, Ended, Held, Outcome, Parked, Surplus
from celery_singleflight.concluding import conclude, conclude_without_lease
from celery_singleflight.custody import GRACE
from celery_singleflight.direct import call_directly, held_here
from celery_singleflight.ending import give_back
from celery_singleflight.entering import enter
from celery_singleflight.errors import (
    ExecutionKeyReused,
    LeaseLost,
    MaxHoldExceeded,
    NestedLeaseLost,
    Replaced,
    ScriptError,
    StoreUnavailable,
)
from celery_singleflight.interruption import take_signal
from celery_singleflight.lease import Execution, Holding, Lease
from celery_singleflight.outcome import answer, end_revoked, turned_away
from celery_singleflight.reconciling import Undecided, find_out
from celery_singleflight.slots import engage
from celery_singleflight.steps import Work
from celery_singleflight.trigger import Trigger
from celery_singleflight.undoing import forget, resume, undo_steps
from celery_singleflight.waiting import await_word, park, requeue, requeue_without_store, wait_for_successor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from celery_singleflight.binding import Binding
    from celery_singleflight.entering import Answer

__all__ = ("run_trigger",)

logger = logging.getLogger(__name__)

#: Seconds between two renewals by a holder that others may ask to stop.
_HEARS_REPLACED: Final = 0.25


def run_trigger(
    task: Any, request: Any, binding: Binding, body: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Run the body for a request of the task under its lease, or do what its contention policy says.

    Returns what Celery's tracer is to take as the task's result. Raises what the body raises; `Retry` and `Ignore` when the
    trigger goes back to the broker or is left to another copy; `Contended`, `Skipped` and `WaitTimeout` where the policy says,
    `ExecutionUncertain` where it does not wait for somebody to know what an earlier run has done.
    """
    trigger = Trigger(task, request, binding, args, kwargs)
    if request.is_eager and held_here(trigger.lock_key):
        return call_directly(task, binding, body, args, kwargs, execution_key=trigger.claim.record.execution_key)
    while True:
        asked = _enter(trigger)
        if asked is None:
            return _run_unprotected(trigger, body)
        entered, requested_at = asked
        if not isinstance(entered, Acquired):
            return _run_not(trigger, entered)
        engaged_before = engage(1)
        try:
            return _run_body(trigger, entered, requested_at, body)
        except Undecided:
            continue  # it waits as the others do
        finally:
            engage(engaged_before)


def _run_not(trigger: Trigger, entered: Ended | Surplus | Doubt | Parked | Held) -> Any:
    if isinstance(entered, Ended):
        return answer(trigger, entered)
    if isinstance(entered, Surplus):
        trigger.leave(f"is left to another copy of its message that counts, by its {entered.why}")
    if isinstance(entered, Doubt):
        await_word(trigger, entered)
    return park(trigger, entered) if isinstance(entered, Parked) else requeue(trigger, entered)


def _enter(trigger: Trigger) -> tuple[Answer, float] | None:
    """Ask for the lease. Returns the answer and when it was asked for; None when it runs though the store is away."""
    try:
        return enter(trigger)
    except (StoreUnavailable, ScriptError) as error:
        give_back(trigger.binding.coordination, trigger.claim.owner, trigger.claim.record, is_brisk=True)  # if it was granted
        policy = trigger.binding.options.store_error_policy
        if policy == "run" and isinstance(error, StoreUnavailable):
            logger.error("%s[%s] runs without protection: %s", trigger.task.name, trigger.request.id, error)  # noqa: TRY400
            return None
        if policy == "fail" or trigger.request.is_eager:
            raise
        requeue_without_store(trigger, error)
    except ExecutionKeyReused as error:
        turned_away(trigger, error)
        raise
    except BaseException as error:
        # A time limit or shutdown fell into the request: what it may have got is given back. Celery fails the trigger for the
        # one, and has its message delivered again for the other.
        _give_back(trigger, again=None if isinstance(error, Exception) else GRACE)
        raise


def _run_unprotected(trigger: Trigger, body: Callable[..., Any]) -> Any:
    claim, history = trigger.claim, history_of(trigger.headers)
    execution = Execution(key=trigger.execution_key, run_id=claim.run_id, attempt=1, task_id=claim.record.task_id, **history)
    with Holding(None, execution, trigger.task, trigger.request.id):
        return _call(trigger, body)


def _call(trigger: Trigger, body: Callable[..., Any]) -> Any:
    task = trigger.task
    if task.own_before_start is not None:
        task.own_before_start(trigger.claim.record.task_id, trigger.args, trigger.kwargs)
    return body(*trigger.args, **trigger.kwargs)


def _run_body(trigger: Trigger, entered: Acquired, requested_at: float, body: Callable[..., Any]) -> Any:
    claim = trigger.claim
    lease = Lease(
        claim.record.lock_key,
        owner=claim.owner,
        token=entered.token,
        limit=claim.limit,
        ttl=claim.ttl,
        max_hold=trigger.binding.max_hold(trigger.time_limit),
        requested_at=requested_at,
        renew_every=_HEARS_REPLACED if trigger.binding.options.contention_policy == "replace" else claim.ttl / 3,
    )
    execution = Execution(
        key=trigger.execution_key,
        run_id=entered.run_id,
        attempt=entered.attempt,
        task_id=claim.record.task_id,
        is_unsure=entered.is_unsure,
        **history_of(trigger.headers),
    )
    arguments = (trigger.args, trigger.kwargs)
    execution.work = Work(trigger.binding, trigger.task.name, lease, claim.record, entered.run_id, claim.worker, arguments)
    trigger.waits_no_more()
    if not trigger.request.is_eager:
        take_signal()
    holding = Holding(lease, execution, trigger.task, trigger.request.id)
    # A run that is cut off leaves its message with the store, until the broker has delivered it again.
    left: _Left | None = _Left(again=GRACE, cut_off=True)
    try:
        try:
            value = _work(trigger, entered, holding, lease, body)
        except Undecided:
            raise
        except Exception as error:
            left = _continuation(trigger, holding) or _leave(trigger, lease, holding, error)
            raise
        except Replaced as replaced:
            undo_steps(holding, Outcome.REPLACED, replaced)
            conclude(trigger, lease, Outcome.REPLACED, replaced)
            left = None
            end_revoked(trigger, str(replaced))
        sent_on = _continuation(trigger, holding)
        if sent_on is None:
            conclude(trigger, lease, Outcome.SUCCEEDED, value)
            forget(holding)
        left = sent_on
    except LeaseLost as lost:
        try:
            _overtaken(trigger, lost.reason)
        except Ignore:
            left = _Left(cut_off=True)
            raise
    finally:
        if left is not None:
            _give_back(trigger, **left._asdict())
    return value


def _work(trigger: Trigger, entered: Acquired, holding: Holding, lease: Lease, body: Callable[..., Any]) -> Any:
    """Run the body under its lease, or find out in its place what an earlier run has done.

    Raises what the body raises; for a `LeaseLost` by its own fault the error that says so.
    """
    try:
        with holding:
            trigger.binding.coordination.heartbeat.keep(lease, trigger.claim.record)
            lease.check()  # the process may have stood still since it asked, and the store has given it meanwhile
            if signals.lease_acquired.receivers:
                signals.lease_acquired.send(sender=trigger.task, lease=lease, execution=holding.execution)
            if holding.execution is not None and holding.execution.attempt > 1:
                resume(holding)
            if entered.find_out is not None and (known := find_out(trigger, entered, lease)).outcome == "succeeded":
                return known.result
            return _call(trigger, body)
    except LeaseLost as lost:
        if lost.lock_key != lease.lock_key:
            raise NestedLeaseLost(lost.lock_key, lost.reason) from lost
        if lease.is_worn_out:
            raise MaxHoldExceeded(lease.lock_key, lease.max_hold) from lost
        raise


def _continuation(trigger: Trigger, holding: Holding) -> _Left | None:
    """Return what becomes of the message of a run that has sent itself on, however its body ended; None when it has not."""
    generation = holding.continued_as
    return None if generation is None or generation <= trigger.claim.generation else _Left(generation=generation)


def _leave(trigger: Trigger, lease: Lease, holding: Holding, error: Exception) -> _Left | None:
    """Record a failure and return None; or return what becomes of a message that goes on, as the error says."""
    if isinstance(error, Retry):
        return _Left(generation=trigger.after_retry)
    if isinstance(error, Ignore):
        return _Left(generation=trigger.after_replacement)
    if isinstance(error, Reject):
        return _Left()
    if isinstance(error, MaxHoldExceeded):
        conclude_without_lease(trigger, lease, error)
    else:
        undo_steps(holding, Outcome.FAILED, error)
        work = holding.execution.work if holding.execution else None
        conclude(trigger, lease, Outcome.FAILED, error, keeps_steps=work is not None and work.goes_on)
    return None


class _Left(NamedTuple):
    """What becomes of the message of a run without an outcome; as in `Store.abandon`."""

    generation: int | None = None
    again: float | None = None
    cut_off: bool = False


def _overtaken(trigger: Trigger, why: str) -> NoReturn:
    """End a run that lost its lease: nothing of it counts, and its trigger gets the outcome of whoever took over."""
    if trigger.request.is_eager:
        raise LeaseLost(trigger.lock_key.text, why)
    logger.warning(
        "%s[%s] lost %s, its outcome does not count: %s", trigger.task.name, trigger.request.id, trigger.lock_key, why
    )
    wait_for_successor(trigger, f"the lease on {trigger.lock_key} was lost: {why}")


def _give_back(trigger: Trigger, **how: Any) -> None:
    give_back(trigger.binding.coordination, trigger.claim.owner, trigger.claim.record, **how)
