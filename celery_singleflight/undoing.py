"""The end of an execution that has failed for good: its steps are undone, the last one first."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from celery.exceptions import SoftTimeLimitExceeded

from celery_singleflight.claims import Encoded, Outcome
from celery_singleflight.compensation import resolved
from celery_singleflight.discretion import kind, log_error, told
from celery_singleflight.errors import LeaseLost, Replaced, SingleflightError
from celery_singleflight.lease import Holding
from celery_singleflight.progress import Ending
from celery_singleflight.results import decode, decode_error, encode_error
from celery_singleflight.steps import insist

if TYPE_CHECKING:
    from celery_singleflight.progress import Undo
    from celery_singleflight.steps import Work

__all__ = ("forget", "resume", "undo_steps")

logger = logging.getLogger(__name__)


def resume(holding: Holding) -> None:
    """Raise the error of an earlier attempt that has begun to undo its steps: the body is not called any more.

    Does nothing when there is none. Raises `LeaseLost`.
    """
    work: Work | None = holding.execution.work if holding.execution else None
    if work is None:
        return
    writer = work.writer
    work.is_used = work.may_undo = True  # until the store has said so: a time limit may fall in here
    ending, interruption = insist(writer.lease, lambda: work.store.find_ending(writer.record, writer.run_id))
    work.is_undone = isinstance(ending, Ending)
    if not isinstance(ending, Ending):
        work.may_undo = bool(ending)
        work.is_used = ending is not None
    if interruption:
        raise interruption
    if not isinstance(ending, Ending):
        return
    if ending.outcome is Outcome.REPLACED:
        raise Replaced(writer.lease.lock_key, ending.reason)
    raise decode_error(work.app, ending.value, work.execution_key, ending.reason)


def undo_steps(holding: Holding, outcome: Outcome, error: BaseException) -> None:
    """Undo the steps that are done, the last one first, before the outcome of the execution is recorded.

    An undo that raises is logged and noted, and the others go on. Raises `LeaseLost` when the run has been overtaken.
    """
    work: Work | None = holding.execution.work if holding.execution else None
    if work is None or not work.may_undo or holding.lease is None:
        return
    holding.lease.is_replaceable = False  # it ends anyway
    with Holding(holding.lease, holding.execution, holding.task, holding.request_id):
        while True:
            try:
                _undo_all(work, holding.task, _ending(work, outcome, error))
            except SoftTimeLimitExceeded:
                continue  # the limit is one of the body, which has ended
            return


def _ending(work: Work, outcome: Outcome, error: BaseException) -> Ending:
    if outcome is Outcome.REPLACED:
        return Ending(outcome, getattr(error, "by", ""), Encoded("", "", b""))
    return Ending(outcome, kind(error), encode_error(work.app, error, work.binding.bounds))


def _undo_all(work: Work, task: Any, ending: Ending) -> None:
    told: dict[str, Any] = {}
    while (found := _next(work, ending, told)) is not None:
        work.is_undone = True
        told = {"undone": found.name} | _undo(work, task, found) if found.undo else _left_alone(work, found)


def _next(work: Work, ending: Ending, told: dict[str, Any]) -> Undo | None:
    mark = work.mark()
    found, interruption = insist(work.writer.lease, lambda: work.store.undo_step(work.writer, mark, ending, **told))
    if interruption and not isinstance(interruption, SoftTimeLimitExceeded | Replaced):
        raise interruption
    return found


def _undo(work: Work, task: Any, found: Undo) -> dict[str, Any]:
    """Call one undo; return what to note of it."""
    step = f"step {found.name} of {work.execution_key}"
    if found.is_unsure:
        logger.warning("the undo of %s was begun before and not recorded: it is called again", step)
    try:
        if not found.value.content_type:
            raise SingleflightError(f"its result is not stored: {found.note}")  # noqa: TRY301, noted like any other
        result = decode(work.app, found.value, work.execution_key, found.note)
        resolved(task, found.undo)(result)
    except LeaseLost as lost:
        if lost.lock_key == work.writer.lease.lock_key:
            raise
        return _failed(step, found, lost)
    except Exception as error:  # noqa: BLE001, the others are still to be undone
        return _failed(step, found, error)
    logger.info("%s is undone by %s", step, found.undo)
    return {}


def _failed(step: str, found: Undo, error: BaseException) -> dict[str, Any]:
    log_error(logger, f"{step} is not undone, {found.undo} raised", error)
    return {"failed": True, "note": told(error)}


def _left_alone(work: Work, found: Undo) -> dict[str, Any]:
    logger.error("the undo of step %s of %s was begun and not recorded: it is left alone", found.name, work.execution_key)
    return {}


def forget(holding: Holding) -> None:
    """Forget the steps of an execution that has succeeded. What cannot be forgotten expires."""
    work: Work | None = holding.execution.work if holding.execution else None
    if work is None or not work.is_used:
        return
    try:
        work.store.forget_steps(work.writer.record, work.writer.run_id)
    except (SingleflightError, SoftTimeLimitExceeded) as error:  # the limit is one of the body, which has ended
        logger.info("what %s has done is kept until it expires: %s", work.execution_key, error)
