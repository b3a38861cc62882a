"""How a trigger that does not run ends, as Celery sees it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, NoReturn

from celery_singleflight import headers as header, signals
from celery_singleflight.canvas import in_chord_header, revoke, stop_chain
from celery_singleflight.claims import Ended, Outcome
from celery_singleflight.errors import (
    Contended,
    DeadLettered,
    ExecutionKeyReused,
    ExecutionUncertain,
    PayloadMismatch,
    Replaced,
    Skipped,
    WaitTimeout,
)
from celery_singleflight.results import decode, decode_error

if TYPE_CHECKING:
    from celery_singleflight.trigger import Trigger

__all__ = ("answer", "end_revoked", "ended", "settle", "turned_away")

logger = logging.getLogger(__name__)

#: Name of the mark on a request whose trigger has its outcome: (heartbeat, record, owner, whether its message is kept).
_ENDED: Final = "_singleflight_ended"
#: With what a trigger fails whose execution key belongs to another task, or was used with another payload.
_TURNED_AWAY: Final = {"task": ExecutionKeyReused, "payload": PayloadMismatch}


def ended(trigger: Trigger) -> None:
    """Mark the request, so that the trigger is settled once Celery has sent what follows it."""
    claim, heartbeat = trigger.claim, trigger.binding.coordination.heartbeat
    setattr(trigger.request, _ENDED, (heartbeat, claim.record, claim.owner, trigger.binding.options.keep_message))
    heartbeat.begin_ending(claim.record, claim.owner)


def settle(request: Any) -> None:
    """Note that Celery has stored the result of a request and sent its callbacks; does nothing the second time."""
    mark = request.__dict__.pop(_ENDED, None)
    if mark is not None:
        heartbeat, record, owner, keeps = mark
        heartbeat.settle(record, owner, keeps)


def answer(trigger: Trigger, end: Ended) -> Any:
    """Give Celery the outcome that the store has for a trigger: return its value, or raise.

    Celery's own tracer then stores the result and sends callbacks, chain and chord. When it has done so before, this copy of
    the message needs no answer: raises `Ignore`.
    """
    app = trigger.binding.app
    if end.settled and not trigger.request.is_eager:
        trigger.leave(f"was delivered again after its end, {end.outcome.value}, and needs no answer")
    ended(trigger)
    _tell(trigger, end)
    if end.outcome in (Outcome.REPLACED, Outcome.REVOKED):
        end_revoked(trigger, _why_revoked(trigger, end))
    if end.ended_as is Outcome.SUCCEEDED:
        return decode(app, end.value, trigger.execution_key, " ".join(map(str, end.reason)))
    if end.ended_as is Outcome.FAILED and end.reason and end.reason[0] in _TURNED_AWAY:
        raise _TURNED_AWAY[end.reason[0]](trigger.execution_key, str(end.reason[1]))
    if end.ended_as is Outcome.FAILED:
        raise decode_error(app, end.value, trigger.execution_key, " ".join(map(str, end.reason)))
    if end.outcome is Outcome.DEAD_LETTERED:
        raise _dead_letter(trigger, end)
    if end.outcome is Outcome.UNCERTAIN:
        raise _uncertain(trigger, end)
    facts = _contention(trigger, end)
    if end.outcome is Outcome.REJECTED:
        raise Contended(*facts)
    if end.outcome is Outcome.TIMED_OUT:
        raise WaitTimeout(*facts)
    return _skip(trigger, facts)


def turned_away(trigger: Trigger, error: ExecutionKeyReused) -> None:
    """Note that a trigger has failed, because its execution key stands for something else."""
    ended(trigger)
    logger.info("%s[%s] does not run, failed: %s", trigger.task.name, trigger.request.id, error)
    signals.trigger_ended.send(
        sender=trigger.task,
        lock_key=trigger.lock_key.text,
        task_id=trigger.request.id,
        outcome=Outcome.FAILED,
        reason=str(error),
        ran=False,
    )


def end_revoked(trigger: Trigger, reason: str) -> NoReturn:
    """Have Celery take the trigger for revoked, and what would have followed it. Raises `Ignore`.

    In eager mode, which knows no revoked tasks, raises `Replaced`.
    """
    if trigger.request.is_eager:
        raise Replaced(trigger.lock_key.text, reason)
    revoke(trigger.task, reason)
    settle(trigger.request)
    trigger.leave(f"is revoked: {reason}")


def _why_revoked(trigger: Trigger, end: Ended) -> str:
    if end.outcome is Outcome.REPLACED:
        return str(Replaced(trigger.lock_key.text, str(end.reason[-1])))
    return " ".join(map(str, end.reason))


def _skip(trigger: Trigger, facts: tuple[str, str, str, float, float]) -> Any:
    options, task = trigger.binding.options, trigger.task
    if options.skip_as == "raise":
        raise Skipped(*facts)
    if options.skip_as == "stop" and not in_chord_header(trigger.request):
        stop_chain(task, f"{trigger.request.id} was skipped: {Skipped(*facts)}")
    return options.skip_result


def _tell(trigger: Trigger, end: Ended) -> None:
    lock_key, task_id, name = trigger.lock_key.text, trigger.request.id, trigger.task.name
    if end.outcome in (Outcome.SUCCEEDED, Outcome.FAILED):
        reason = f"answered from the stored outcome of {trigger.execution_key}"
    elif end.outcome is Outcome.COALESCED:
        reason = f"it has the outcome of another trigger, {end.ended_as}"
    elif end.outcome in (Outcome.REPLACED, Outcome.REVOKED):
        reason = _why_revoked(trigger, end)
    elif end.outcome is Outcome.DEAD_LETTERED:
        reason = str(_dead_letter(trigger, end))
    elif end.outcome is Outcome.UNCERTAIN:
        reason = str(_uncertain(trigger, end))
    else:
        reason = str(Contended(*_contention(trigger, end)))
    level = logging.ERROR if end.outcome in (Outcome.DEAD_LETTERED, Outcome.UNCERTAIN) else logging.INFO
    logger.log(level, "%s[%s] does not run, %s: %s", name, task_id, end.outcome.value, reason)
    signals.trigger_ended.send(
        sender=trigger.task, lock_key=lock_key, task_id=task_id, outcome=end.outcome, reason=reason, ran=False
    )
    if end.outcome is Outcome.SKIPPED and (trigger.request.properties or {}).get(header.EVENTS):
        trigger.task.send_event("task-skipped", lock_key=lock_key, reason=reason)


def _dead_letter(trigger: Trigger, end: Ended) -> DeadLettered:
    _, task_id, worker, deaths, _ = end.reason
    return DeadLettered(trigger.lock_key.text, task_id, worker or "", deaths)


def _uncertain(trigger: Trigger, end: Ended) -> ExecutionUncertain:
    _, task_id, worker, age_ms, _ = end.reason
    return ExecutionUncertain(trigger.execution_key, task_id or "", worker or "", age_ms / 1000)


def _contention(trigger: Trigger, end: Ended) -> tuple[str, str, str, float, float]:
    _, task_id, worker, age_ms, remaining_ms = end.reason
    return trigger.lock_key.text, task_id or "", worker or "", age_ms / 1000, remaining_ms / 1000
