"""The path of one run: enter, keep alive, body, finish."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final, NoReturn

from celery.exceptions import Ignore, Reject, Retry

from celery_singleflight import signals
from celery_singleflight.claims import Acquired, Encoded, Ended, Held, Outcome, Surplus
from celery_singleflight.ending import finish, give_back
from celery_singleflight.errors import LeaseLost, StoreUnavailable
from celery_singleflight.lease import Execution, Holding, Lease
from celery_singleflight.outcome import answer, ended
from celery_singleflight.results import encode, encode_error
from celery_singleflight.trigger import Trigger
from celery_singleflight.waiting import requeue, requeue_without_store, wait_for_successor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from celery_singleflight.binding import Binding

__all__ = ("run_trigger",)

logger = logging.getLogger(__name__)

#: Seconds to wait in place for the run that has published this retry and only has its lease left to give back.
_FOR_PREDECESSOR: Final = (0.01, 0.02, 0.05, 0.1, 0.1)


def run_trigger(task: Any, binding: Binding, body: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:  # noqa: RET503, requeue does not return
    """Run the body for the task's current request under its lease, or do what its contention policy says.

    Returns what Celery's tracer is to take as the task's result. Raises what the body raises; `Retry` and `Ignore` when the
    trigger goes back to the broker or is left to another copy; `Contended`, `Skipped` and `WaitTimeout` where the policy says.
    """
    trigger = Trigger(task, binding, args, kwargs)
    requested_at = time.monotonic()
    entered = _enter(trigger)
    match entered:
        case Acquired():
            return _run_body(trigger, entered, requested_at, body)
        case Ended():
            return answer(trigger, entered)
        case Surplus():
            trigger.leave(f"is left to another copy of its message that counts, by its {entered.why}")
        case Held():
            _tell_contention(trigger, entered)
            requeue(trigger, entered)  # never returns


def _enter(trigger: Trigger) -> Acquired | Held | Ended | Surplus:
    store = trigger.binding.coordination.store
    try:
        entered = store.enter(trigger.claim)
        for pause in _FOR_PREDECESSOR:
            if not (isinstance(entered, Held) and entered.what == "predecessor"):
                break
            time.sleep(pause)
            entered = store.enter(trigger.claim)
    except StoreUnavailable as error:
        if trigger.request.is_eager:
            raise
        requeue_without_store(trigger, error)
    except BaseException:
        # A time limit or shutdown fell into the request: what it may have got is given back.
        _give_back(trigger)
        raise
    return entered


def _run_body(trigger: Trigger, entered: Acquired, requested_at: float, body: Callable[..., Any]) -> Any:
    claim, task = trigger.claim, trigger.task
    record, heartbeat = claim.record, trigger.binding.coordination.heartbeat
    lease = Lease(
        record.lock_key,
        owner=claim.owner,
        token=entered.token,
        limit=claim.limit,
        ttl=claim.ttl,
        max_hold=trigger.binding.max_hold(trigger.time_limit),
        requested_at=requested_at,
    )
    execution = Execution(key=trigger.execution_key, run_id=entered.run_id, attempt=entered.attempt, task_id=record.task_id)
    try:
        with Holding(lease, execution, task, trigger.request):
            heartbeat.keep(lease, record)
            if signals.lease_acquired.receivers:
                signals.lease_acquired.send(sender=task, lease=lease, execution=execution)
            if task.own_before_start is not None:
                task.own_before_start(record.task_id, trigger.args, trigger.kwargs)
            value = body(*trigger.args, **trigger.kwargs)
    except Retry:
        _give_back(trigger, generation=trigger.after_retry)
        raise
    except Reject:
        _give_back(trigger)
        raise
    except Ignore:
        _give_back(trigger, generation=trigger.after_replacement)
        raise
    except LeaseLost as lost:
        _give_back(trigger)
        _overtaken(trigger, str(lost))
    except Exception as error:
        _finish(trigger, lease, Outcome.FAILED, encode_error(trigger.binding.app, error), repr(error))
        raise
    except BaseException:
        _give_back(trigger)
        raise
    stored, why_not = encode(trigger.binding.app, value)
    if why_not:
        logger.warning("%s[%s] has succeeded, but its result is not stored: %s", task.name, record.task_id, why_not)
    _finish(trigger, lease, Outcome.SUCCEEDED, stored, why_not)
    return value


def _finish(trigger: Trigger, lease: Lease, outcome: Outcome, value: Encoded, reason: str) -> None:
    """Record how the run ended. Raises `Ignore` when it has been overtaken, and nothing of it may count."""
    claim = trigger.claim
    refused = finish(trigger.binding.coordination, lease, claim.record, outcome, value, reason=reason, keep=claim.keep)
    if refused:
        _overtaken(trigger, "it was finished by another run" if refused.outcome else "it was taken over")
    ended(trigger)
    if signals.trigger_ended.receivers:
        signals.trigger_ended.send(
            sender=trigger.task,
            lock_key=lease.lock_key,
            task_id=trigger.request.id,
            outcome=outcome,
            reason=reason,
            ran=True,
        )


def _overtaken(trigger: Trigger, why: str) -> NoReturn:
    """End a run that lost its lease: nothing of it counts, and its trigger gets the outcome of whoever took over."""
    if trigger.request.is_eager:
        raise LeaseLost(trigger.lock_key.text, why)
    logger.warning(
        "%s[%s] lost %s, its outcome does not count: %s", trigger.task.name, trigger.request.id, trigger.lock_key, why
    )
    wait_for_successor(trigger, f"the lease on {trigger.lock_key} was lost: {why}")


def _give_back(trigger: Trigger, *, generation: int | None = None) -> None:
    give_back(trigger.binding.coordination, trigger.claim.owner, trigger.claim.record, generation=generation)


def _tell_contention(trigger: Trigger, held: Held) -> None:
    logger.info(
        "%s[%s] waits: %s is held by %s on %s for %.1f s",
        trigger.task.name,
        trigger.request.id,
        trigger.lock_key,
        held.task_id,
        held.worker,
        held.age,
    )
    if signals.contended.receivers:
        signals.contended.send(
            sender=trigger.task,
            lock_key=trigger.lock_key.text,
            task_id=trigger.request.id,
            holder_task_id=held.task_id,
            holder_worker=held.worker,
            age=held.age,
            remaining=held.remaining,
        )
