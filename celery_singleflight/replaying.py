"""Replay: a trigger that is over runs once more, under the same id, keys and rules."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from celery_singleflight import headers as header, signals
from celery_singleflight.claims import Handout, Outcome, Record
from celery_singleflight.coordination import coordination
from celery_singleflight.errors import SingleflightError
from celery_singleflight.handoff import hand_on
from celery_singleflight.keys import LockKey
from celery_singleflight.message import arguments_in, headers_in, mark_message
from celery_singleflight.options import CALL_OPTIONS
from celery_singleflight.trigger import generation_of

if TYPE_CHECKING:
    from celery import Celery

    from celery_singleflight.binding import Binding

__all__ = ("ReplayRefused", "replay")

logger = logging.getLogger(__name__)

_WHY: Final = {
    "bare": "it has ended, {fact}, and its message was not kept; keep_message says whose is, and without rescue there is none",
    "ending": "it has ended, {fact}, and Celery has not sent all that follows yet; try again in a moment",
    "foreign": "its execution key is {fact}, which is not the one that was given",
    "running": "{fact} runs it on {worker}",
    "succeeded": "it has {fact}, and to run it again needs force and a reason",
    "uncertain": "nobody knows whether {fact} has happened: find out, and say so with {worker}, or use force",
    "unexplained": "to force it needs a reason, which is recorded",
    "unknown": "the store knows nothing of it",
    "unprotected": "{fact} is no protected task of this app",
    "waiting": "it has not ended: it waits, or comes by itself; explain says for what",
}


class ReplayRefused(SingleflightError):
    """The trigger is not replayed, and nothing is changed.

    `why` is "running" (by the trigger `fact`, on `worker`), "waiting", "ending", "succeeded", "uncertain", "bare", "foreign",
    "unexplained", "unprotected" or "unknown".
    """

    def __init__(self, task_id: str, why: str, fact: str = "", worker: str = "") -> None:
        super().__init__(task_id, why, fact, worker)
        self.task_id = task_id
        self.why = why
        self.fact = fact
        self.worker = worker

    def __str__(self) -> str:
        return f"{self.task_id} is not replayed: " + _WHY[self.why].format(fact=self.fact, worker=self.worker or "unknown")


def replay(
    app: Celery, task_id: str, *, task: str, execution_key: str | None = None, force: bool = False, reason: str = ""
) -> Outcome | None:
    """Run a recorded trigger of the task of that name again: same id, same arguments, same keys and rules.

    Its outcome is taken back, also from Celery's result backend, and its message published as it was, with a new budget of
    retries, deaths and waiting. It is no newcomer, so that no policy turns it away; and where another trigger has completed its
    execution meanwhile, it is answered from that. Returns the outcome that it had, None when a resolved step has taken that
    back before. When the broker is away a sweeper publishes it.

    `force`, which needs a `reason`, runs also what has succeeded, or what nobody knows whether it has happened; the reason is
    recorded, and the run is told. The message tells the execution key; one that is given must be the same.

    Raises `ReplayRefused` when the trigger has not ended, has succeeded, or was not kept; `StoreUnavailable`.
    """
    if force and not reason.strip():
        raise ReplayRefused(task_id, "unexplained")
    binding = getattr(app.tasks.get(task), "_binding", None)
    if binding is None:
        raise ReplayRefused(task_id, "unprotected", task)
    outcome, message = _take_back(binding, task_id, execution_key, force=force, reason=reason)
    logger.log(
        logging.WARNING if force else logging.INFO,
        "%s[%s] is replayed%s, it had ended %s",
        task,
        task_id,
        f" by force ({reason})" if force else "",
        outcome or "and that was taken back with a resolved step",
    )
    _forget_result(app, task_id)
    hand_on(app, [Handout(message, "")], is_called=False)
    signals.replayed.send(
        sender=app.tasks[task],
        task_id=task_id,
        lock_name=binding.options.lock_name or task,
        outcome=outcome,
        is_forced=force,
        reason=reason,
    )
    return outcome


def _take_back(
    binding: Binding, task_id: str, execution_key: str | None, *, force: bool, reason: str
) -> tuple[Outcome | None, bytes]:
    """Clear the outcome of the trigger. Returns it, and the message to be published."""
    store, mark = coordination(binding.app).store, uuid4().hex
    record = Record(LockKey(binding.options.lock_name or binding.name, ""), task_id, execution_key)
    told: dict[str, Any] = {"holds": binding.options.uncertain_policy == "hold"}
    outcome, message = "", b""
    while True:
        reply = store.replay(record, mark, force=force, reason=reason, **told)
        if reply.word == "replayed":
            return Outcome(outcome) if outcome else None, message
        own_key = _execution_key(binding, reply.message) if reply.word in ("recorded", "waiting") and reply.message else None
        if own_key is not None and record.execution_key is None:
            record = record._replace(execution_key=own_key)
            continue
        if reply.word != "recorded":
            raise ReplayRefused(task_id, *_facts(reply))
        if own_key != record.execution_key:
            raise ReplayRefused(task_id, "foreign", own_key or task_id)
        outcome = reply.outcome.decode()
        generation, message = _renewed(reply.message, reply.generation, force=force)
        told |= {"seen": reply.seen.decode(), "message": message, "generation": generation}


def _execution_key(binding: Binding, message: bytes) -> str | None:
    given = headers_in(message).get(CALL_OPTIONS["execution_key"].header)
    return given or binding.execution_key(*arguments_in(message))


def _renewed(message: bytes, recorded: bytes, *, force: bool) -> tuple[int, bytes]:
    """Return the message with a new budget of retries, and its generation, which follows that of every older copy."""
    headers = headers_in(message)
    newest = max(int(recorded or 0), generation_of(headers.get("replaced_task_nesting"), headers.get("retries")))
    nesting = newest // generation_of(1, 0) + 1
    marks = {"retries": 0, "replaced_task_nesting": nesting, header.SOURCE: "replay", header.FORCED: force}
    return generation_of(nesting, 0), mark_message(message, marks)


def _facts(reply: Any) -> tuple[str, ...]:
    if reply.word == "uncertain":
        step = reply.step.decode()
        return (reply.word, f"step {step}", "resolve_step") if step else (reply.word, "its body", "resolve")
    if reply.word == "waiting":
        return (reply.word,)
    return reply.word, *(fact.decode() for fact in reply[1:])


def _forget_result(app: Celery, task_id: str) -> None:
    """Take the outcome back from Celery too: some backends never write over a success."""
    try:
        app.backend.forget(task_id)
    except Exception as error:  # noqa: BLE001, any backend, and one that keeps nothing cannot forget
        logger.info("the result backend still has the old state of %s: %r", task_id, error)
