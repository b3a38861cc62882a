"""A replay as an operator asks for it: by the id of a trigger alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_singleflight.binding import bindings_of
from celery_singleflight.message import headers_in
from celery_singleflight.reading import UnknownKey
from celery_singleflight.replaying import ReplayRefused, replay

if TYPE_CHECKING:
    from celery_singleflight.reading import Reading

__all__ = ("Replay", "replay_trigger")


@dataclass(frozen=True, slots=True)
class Replay:
    """What `replay` answers; `why` is "replayed", or the word of the refusal."""

    is_replayed: bool
    why: str
    #: What stands in the way, in one sentence; empty when nothing does.
    refusal: str
    task_id: str
    task: str
    #: How the trigger had ended; null where it is refused, or a resolved step had taken the outcome back.
    outcome: str | None
    is_forced: bool


def replay_trigger(
    reading: Reading, task_id: str, *, execution_key: str | None = None, force: bool = False, reason: str = ""
) -> Replay:
    """Replay the trigger of that id, whose message says of which task it is. Raises `UnknownKey` and `StoreUnavailable`."""
    names = reading.named("trigger", task_id)
    if not names:
        raise reading.unknown(task_id, "the id of a trigger that the store remembers")
    message = reading.client.hget(names[0].whole, "message")
    # Without its message it is refused whatever its task; one of the lock name knows where it is recorded.
    lock_name = reading.lock_name_in(names[0])
    tasks = [headers_in(message).get("task", "")] if message else _tasks_of(reading, lock_name)
    if not tasks:
        raise UnknownKey(f"expected the id of a trigger of this app's tasks, got {task_id}, whose lock name is {lock_name}")
    task, why, refusal, outcome = tasks[0], "replayed", "", None
    try:
        outcome = replay(reading.app, task_id, task=task, execution_key=execution_key, force=force, reason=reason)
    except ReplayRefused as refused:
        why, refusal = refused.why, str(refused)
    return Replay(not refusal, why, refusal, task_id, task, outcome, force)


def _tasks_of(reading: Reading, lock_name: str | None) -> list[str]:
    return sorted(b.name for b in bindings_of(reading.app) if (b.options.lock_name or b.name) == lock_name)
