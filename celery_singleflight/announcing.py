"""Answering at publish: whoever asks for what is done, or under way, gets the handle of that, and no second message is sent.

Announcements are advice. The worker decides by the run record, so whatever is wrong here costs a message, never a run.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

from celery.utils import uuid

from celery_singleflight import signals
from celery_singleflight.announcements import Announcement, Answered, Busy
from celery_singleflight.errors import LockKeyError, ScriptError, StoreUnavailable
from celery_singleflight.options import CALL_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from celery_singleflight.binding import Binding
    from celery_singleflight.store import Store

__all__ = ("answer_or_publish", "is_to_be_answered")

logger = logging.getLogger(__name__)

#: Seconds for which other publishers wait for one that is about to send; who has died by then is waited for no longer.
RESERVED: Final = 2.0
#: Seconds for which a trigger answers that the broker has and no worker has begun: it may have been lost there.
ANNOUNCED: Final = 300.0
#: Seconds between two looks of those who wait, at first and at most.
_PAUSE: Final = 0.005
_LONGEST_PAUSE: Final = 0.05

_ASKED: Final = CALL_OPTIONS["answer_at_publish"].header
_KEY: Final = CALL_OPTIONS["execution_key"].header
#: What Celery gives where the handle is made before, or the message carries more than its own task.
_NOT_PLAIN: Final = (
    *("task_id", "group_id", "chord", "chain", "link", "link_error", "retries"),
    *("replaced_task_nesting", "parent_id", "root_id"),
)
#: With these the broker or Celery may hold the message back, or drop it: nobody else is to wait for that.
_NOT_ANNOUNCED: Final = ("countdown", "eta", "expires")


def is_to_be_answered(binding: Binding, options: Mapping[str, Any]) -> bool:
    """Whether a publish with these options, ours among the headers, is a plain call that asks for an answer."""
    headers = options.get("headers") or {}
    if not headers.get(_ASKED, binding.options.answer_at_publish):
        return False
    is_of_beat = headers.get("celery_beat_task")  # whose tick needs no handle, and an outcome of its own
    return not (is_of_beat or binding.app.conf.task_always_eager or any(options.get(name) for name in _NOT_PLAIN))


def answer_or_publish(
    task: Any, binding: Binding, call: tuple[Any, Any], options: dict[str, Any], publish: Callable[..., Any]
) -> Any:
    """Return the handle of the trigger that works for the execution already; else publish, and tell others.

    A call whose execution key is the task id, or cannot be made, is published. So it is when the store is away.

    Raises `ExecutionKeyReused` and `PayloadMismatch` when the key stands for something else, and what publishing raises.
    """
    announcement = _announcement(task, binding, *call, options)
    if announcement is None:
        return publish(*call, **options)
    store = binding.coordination.publishing_store
    is_announced = not (getattr(task, "expires", None) or any(options.get(name) for name in _NOT_ANNOUNCED))
    try:
        answer = _ask(store, announcement, RESERVED if is_announced else 0.0)
    except (StoreUnavailable, ScriptError) as error:
        logger.warning("%s is published without a look at execution %s: %s", task.name, announcement.execution_key, error)
        answer = is_announced = False
    if isinstance(answer, Answered):
        return _handle(task, announcement.execution_key, answer, options)
    try:
        result = publish(*call, **{**options, "task_id": announcement.task_id})
    except BaseException:
        if answer:
            _tell(store.withdraw, announcement)
        raise
    if is_announced:
        _tell(store.confirm, announcement, ANNOUNCED)
    result.is_duplicate = False
    return result


def _announcement(task: Any, binding: Binding, args: Any, kwargs: Any, options: Mapping[str, Any]) -> Announcement | None:
    """Return what is to be said of a call; None when it has no explicit execution key."""
    args, kwargs = args or (), kwargs or {}
    try:
        key = (options.get("headers") or {}).get(_KEY) or binding.execution_key(args, kwargs)
        if key is None:
            return None
        return Announcement(binding.options.lock_name or task.name, key, uuid(), task.name, binding.payload(args, kwargs))
    except (LockKeyError, TypeError) as error:
        logger.debug("no execution key for %s at publish:", task.name, exc_info=error)
        return None


def _ask(store: Store, announcement: Announcement, reserve: float) -> Answered | bool:
    """Ask until no other publisher is about to send, or it has taken too long. Returns as `Announcements.announce`."""
    give_up_at, pause = time.monotonic() + reserve, _PAUSE
    while isinstance(answer := store.announce(announcement, reserve=reserve), Busy):
        left = give_up_at - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left, answer.seconds + 0.001))
        pause = min(pause * 2, _LONGEST_PAUSE)
    return answer


def _tell(tell: Callable[..., object], announcement: Announcement, *more: float) -> None:
    """Tell the store what became of an announcement, which ends by itself otherwise."""
    try:
        tell(announcement, *more)
    except (StoreUnavailable, ScriptError) as error:
        logger.warning("the announcement of %s[%s] is left as it is: %s", announcement.task, announcement.task_id, error)


def _handle(task: Any, execution_key: str, answer: Answered, options: Mapping[str, Any]) -> Any:
    """Return the handle of a trigger that another call has sent, as Celery would have made it for this one."""
    logger.info("%s is not sent, %s is %s for execution %s", task.name, answer.task_id, answer.how, execution_key)
    signals.answered_at_publish.send(sender=task, task_id=answer.task_id, execution_key=execution_key, how=answer.how)
    result = task.AsyncResult(answer.task_id)
    result.ignored = options.get("ignore_result", task.ignore_result)
    parent = task.app.current_worker_task if options.get("add_to_parent", True) else None
    if parent:
        parent.add_trail(result)
    result.is_duplicate = True
    return result
