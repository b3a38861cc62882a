"""Recording how a run has ended, and telling whoever listens."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from celery.exceptions import SoftTimeLimitExceeded

from celery_singleflight import signals
from celery_singleflight.claims import Encoded, Outcome
from celery_singleflight.discretion import kind
from celery_singleflight.ending import fail, finish
from celery_singleflight.errors import LeaseLost
from celery_singleflight.outcome import ended
from celery_singleflight.results import encode, encode_error

if TYPE_CHECKING:
    from celery_singleflight.lease import Lease
    from celery_singleflight.trigger import Trigger

__all__ = ("conclude", "conclude_without_lease")

logger = logging.getLogger(__name__)


def conclude(trigger: Trigger, lease: Lease, outcome: Outcome, subject: Any, *, keeps_steps: bool = False) -> None:
    """Record how a run has ended. Raises `LeaseLost` when it has been overtaken, and nothing of it may count."""
    value, reason = _encoded(trigger, outcome, subject)
    refused = finish(
        trigger.binding.coordination,
        lease,
        trigger.claim.record,
        outcome,
        value,
        reason=reason,
        keep=trigger.claim.keep,
        hold=trigger.binding.options.min_hold if outcome is Outcome.SUCCEEDED else 0.0,
        keeps_failure=trigger.keeps_failure,
        keeps_steps=keeps_steps,
    )
    if refused:
        raise LeaseLost(lease.lock_key, "it was finished by another run" if refused.outcome else "it was taken over")
    _ended(trigger, lease, outcome, reason)


def conclude_without_lease(trigger: Trigger, lease: Lease, error: Exception) -> None:
    """Record the failure of a run whose lease may be somebody else's by now. Raises `LeaseLost` when it has been overtaken."""
    value, reason = _encoded(trigger, Outcome.FAILED, error)
    claim = trigger.claim
    if not fail(
        trigger.binding.coordination,
        lease,
        claim.record,
        value,
        reason=reason,
        keep=claim.keep,
        execution_as=trigger.cut_off_as,
    ):
        raise LeaseLost(lease.lock_key, "its trigger was taken over")
    _ended(trigger, lease, Outcome.FAILED, reason)


def _ended(trigger: Trigger, lease: Lease, outcome: Outcome, reason: str) -> None:
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


def _encoded(trigger: Trigger, outcome: Outcome, subject: Any) -> tuple[Encoded, str]:
    app, bounds = trigger.binding.app, trigger.binding.bounds
    while True:
        try:
            if outcome is Outcome.FAILED:
                return encode_error(app, subject, bounds), kind(subject)
            if outcome is Outcome.REPLACED:
                return Encoded("", "", b""), subject.by
            value, reason = encode(app, subject, bounds)
        except SoftTimeLimitExceeded:
            continue  # the limit is one of the body, which has ended
        if reason:
            logger.warning("%s has succeeded, but its result is not stored: %s", trigger.lock_key, reason)
        return value, reason
