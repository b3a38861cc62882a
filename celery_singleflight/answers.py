"""What the store answers, made from the replies of its scripts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from celery_singleflight.claims import (
    Acquired,
    Died,
    Doubt,
    Encoded,
    Ended,
    Held,
    Led,
    Linger,
    Merge,
    Outcome,
    Parked,
    Surplus,
    UncertainRun,
)
from celery_singleflight.custody import calls_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("Entered", "ended_of", "entered_of")

Entered = Acquired | Held | Ended | Surplus | Parked | Linger | Led | Merge | Doubt | Died


def entered_of(reply: Any) -> Entered:
    """Return what a reply of `enter` says, but that an execution key belongs to another task."""
    return _ANSWERS[reply.word](reply)


def ended_of(reply: Any) -> Ended:
    """Return how a trigger ended."""
    outcome = Outcome(reply.outcome.decode())
    return Ended(
        outcome,
        settled=bool(reply.settled),
        reason=json.loads(reply.reason or b"[]"),
        value=Encoded(reply.content_type.decode(), reply.content_encoding.decode(), reply.body),
        ended_as=Outcome(reply.ended_as.decode()) if hasattr(reply, "ended_as") else outcome,
        calls=calls_of(reply),
    )


def _acquired(reply: Any) -> Acquired:
    token, run_id, attempt, unsure = int(reply.fence), reply.run.decode(), int(reply.attempt), reply.unsure
    calls = calls_of(reply)
    if not unsure:
        return Acquired(token, run_id, attempt, calls)
    if unsure == b"1":
        return Acquired(token, run_id, attempt, calls, is_unsure=True)
    task_id, worker, age_ms, tries = json.loads(unsure)
    return Acquired(token, run_id, attempt, calls, is_unsure=True, find_out=UncertainRun(task_id, worker, age_ms / 1000, tries))


def _doubt(reply: Any) -> Doubt:
    task_id, worker = json.loads(reply.holder)
    return Doubt(reply.how.decode(), task_id, worker, reply.age_ms / 1000, calls_of(reply))


def _parked(reply: Any) -> Parked:
    task_id, worker = json.loads(reply.holder)
    age, remaining = reply.age_ms / 1000, reply.remaining_ms / 1000
    holder = (task_id or "", worker or "", age, remaining)
    return Parked(reply.how.decode(), *holder, reply.place, int(reply.ticket), calls_of(reply))


def _held(reply: Any) -> Held:
    task_id, worker = json.loads(reply.holder)
    return Held(
        what=reply.what.decode(),
        task_id=task_id or "",
        worker=worker or "",
        age=reply.age_ms / 1000,
        remaining=reply.remaining_ms / 1000,
        hold=reply.hold_ms / 1000,
        turn=reply.turn_ms / 1000,
        waited=(int(reply.now_ms) - int(reply.first_ms)) / 1000,
        first_ms=reply.first_ms.decode(),
        place=reply.place,
        tries=reply.tries,
        ticket=reply.ticket.decode(),
    )


#: What `enter` answers, by the word of its reply.
_ANSWERS: Final[dict[str, Callable[[Any], Entered]]] = {
    "acquired": _acquired,
    "died": lambda _: Died(),
    "ended": ended_of,
    "held": _held,
    "led": lambda reply: Led(reply.by.decode()),
    "linger": lambda reply: Linger(reply.ms / 1000, int(reply.ticket), calls_of(reply)),
    "merge": lambda reply: Merge(reply.by.decode(), reply.copy.decode(), reply.message),
    "parked": _parked,
    "surplus": lambda reply: Surplus(reply.why.decode()),
    "uncertain": _doubt,
}
