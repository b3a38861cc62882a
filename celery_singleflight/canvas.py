"""What becomes of a chain, group or chord around a trigger that is skipped. Nothing in them waits for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import signals
from celery.app.task import Context

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ("in_chord_header", "revoke", "stop_chain")


def in_chord_header(request: Any) -> bool:
    """Whether the end of this task, or of the chain it is in, is awaited by a chord."""
    if request.chord:
        return True
    last = request.chain[0] if request.chain else None
    return last is not None and _is_awaited(last)


def stop_chain(task: Any, reason: str) -> None:
    """End the chain of the current request quietly: what would have followed is marked REVOKED with the reason.

    A chord that waits for the end of the chain is told.
    """
    request = task.request
    for n, signature in enumerate(reversed(request.chain or ()), 1):  # the next first: who waits for the last finds all marked
        for task_id in _task_ids(signature):
            last = Context(_as_request(signature)) if n == len(request.chain) and signature.get("task") else None
            task.backend.mark_as_revoked(task_id, reason, request=last, store_result=True)
    request.chain = None
    request.callbacks = None


def revoke(task: Any, reason: str) -> None:
    """End the current request, and the chain behind it, as Celery does when a task is revoked."""
    request = task.request
    stop_chain(task, reason)
    task.backend.mark_as_revoked(request.id, reason, request=request, store_result=not request.ignore_result)
    signals.task_revoked.send(sender=task, request=request, terminated=False, signum=None, expired=False)


def _as_request(signature: Any) -> dict[str, Any]:
    """Return what a chord asks of the request of one of its members."""
    options = signature.get("options") or {}
    return {
        "id": options.get("task_id"),
        "group": options.get("group_id"),
        "group_index": options.get("group_index"),
        "chord": options.get("chord"),
        "task": signature.get("task"),
    }


def _is_awaited(signature: Any) -> bool:
    """Whether a chord waits for this signature; the last of a chain decides for the whole."""
    while signature:
        if "chord" in (signature.get("options") or {}):
            return True
        kind, kwargs = signature.get("subtask_type"), signature.get("kwargs") or {}
        if kind == "chord":
            signature = kwargs.get("body")
        elif kind == "chain" and kwargs.get("tasks"):
            signature = kwargs["tasks"][-1]
        else:
            return False
    return False


def _task_ids(signature: Any) -> Iterator[str]:
    """Yield the ids of all tasks in a signature that was frozen with its chain."""
    options, kwargs = signature.get("options") or {}, signature.get("kwargs") or {}
    kind = signature.get("subtask_type")
    if kind in ("chain", "group"):
        for inner in kwargs.get("tasks") or ():
            yield from _task_ids(inner)
    elif kind == "chord":
        for part in (kwargs.get("header"), kwargs.get("body")):
            for inner in part if isinstance(part, list | tuple) else (part,):
                if inner:
                    yield from _task_ids(inner)
    if options.get("task_id"):
        yield options["task_id"]
