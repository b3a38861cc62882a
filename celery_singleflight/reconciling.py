"""Finding out what a run has done that died, under the lease of the next one and in place of its body."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from celery_singleflight.claims import Encoded
from celery_singleflight.discretion import log_error
from celery_singleflight.errors import LeaseLost, Replaced, ResolvedFailed
from celery_singleflight.resolution import Resolution, UncertainExecution
from celery_singleflight.results import encode_error
from celery_singleflight.steps import insist

if TYPE_CHECKING:
    from celery_singleflight.claims import Acquired, UncertainRun
    from celery_singleflight.lease import Lease
    from celery_singleflight.trigger import Trigger

__all__ = ("Undecided", "find_out")

logger = logging.getLogger(__name__)


class Undecided(Exception):
    """Nobody knows yet what the run has done."""


def find_out(trigger: Trigger, entered: Acquired, lease: Lease) -> Resolution:
    """Ask the task's reconciler what the run has done that died.

    When it is to run again, or has failed and was the run of another trigger, that is recorded here, and the body is to follow;
    the rest is for the caller to record. A reconciler that raises has not found out. Raises `Undecided`, `LeaseLost`,
    `ResolvedFailed`.
    """
    died = entered.find_out
    assert died is not None  # noqa: S101, the caller has asked
    key, delays = trigger.execution_key, trigger.binding.options.reconcile_delays
    resolution = _ask(trigger, entered, died)
    if resolution is None:
        _warn(key, died.tries, delays)
        raise Undecided(key)
    logger.info("the reconciler has found out that %s is to be taken for: %s", key, resolution.outcome)
    if resolution.outcome == "failed" and (trigger.keeps_failure or died.task_id == trigger.claim.record.task_id):
        raise ResolvedFailed(key, resolution.reason)
    if resolution.outcome != "succeeded":
        _go_on(trigger, lease, died.task_id, resolution)
    return resolution


def _warn(key: str, tries: int, delays: tuple[float, ...]) -> None:
    """Say in the log that this try has not found out, and what comes next."""
    then = f"it is asked again {delays[tries]:g} s after this try" if tries < len(delays) else "it is left to a person"
    logger.warning("the reconciler has not found out what became of %s, at try %s of %s: %s", key, tries, len(delays), then)


def _go_on(trigger: Trigger, lease: Lease, died_task_id: str, resolution: Resolution) -> None:
    """Say that this run goes on to the body; the trigger whose run died has failed, unless it is to run again too."""
    store, record = trigger.binding.coordination.store, trigger.claim.record
    error, reason = Encoded("", "", b""), json.dumps(["resolved", resolution.reason])
    if resolution.outcome == "failed":
        record = record._replace(task_id=died_task_id)
        failure = ResolvedFailed(trigger.execution_key, resolution.reason)
        error = encode_error(trigger.binding.app, failure, trigger.binding.bounds)
    (word, _), interruption = insist(
        lease,
        lambda: store.resolve(
            record,
            resolution.outcome,
            error,
            owner=lease.owner,
            reason=reason,
            keep=trigger.binding.options.result_ttl,
            keeps_failure=False,
        ),
    )
    if interruption:
        raise interruption
    if word != "resolved":
        raise LeaseLost(trigger.lock_key.text, "its execution was taken over")


def _ask(trigger: Trigger, entered: Acquired, died: UncertainRun) -> Resolution | None:
    execution = UncertainExecution(
        key=trigger.execution_key,
        lock_key=trigger.lock_key.text,
        task=trigger.task.name,
        args=trigger.args,
        kwargs=trigger.kwargs,
        run_id=entered.run_id,
        task_id=died.task_id,
        worker=died.worker,
        age=died.age,
        tries=died.tries,
    )
    try:
        found: Any = trigger.binding.options.reconciler(execution)
    except Replaced as error:
        raise Undecided(trigger.execution_key) from error
    except Exception as error:  # noqa: BLE001, of a user's function
        log_error(logger, f"the reconciler of {trigger.task.name} has failed for {trigger.execution_key}", error)
        return None
    if found is not None and not isinstance(found, Resolution):
        logger.error(
            "the reconciler of %s: expected a Resolution or None, got one %s for %s",
            trigger.task.name,
            type(found).__name__,
            trigger.execution_key,
        )
        return None
    return found
