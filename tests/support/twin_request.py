"""What a body sees of its request, said in the same words for a plain task and a protected one."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

from celery.worker.request import Request


class NotingRequest(Request):
    """A request whose body also sees how its message was encoded."""

    def __init__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(message, *args, **kwargs)
        encoding = [message.content_type, message.content_encoding]
        self.request_dict["properties"] = {**(self.request_dict.get("properties") or {}), "twin_encoding": encoding}


def bare(name: str) -> str:
    """Return the name of a twin without its kind."""
    return name.rpartition(".")[2]


def facts_of(task: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return what a run can see of its request, without what differs between any two messages: ids, times, processes."""
    request = task.request
    route, properties = request.delivery_info or {}, request.properties or {}
    facts = {
        "task": bare(task.name),
        "args": args,
        "kwargs": kwargs,
        "retries": request.retries,
        "is_root": request.root_id == request.id,
        # A message that was sent again by its own run has itself as parent, as after any retry of Celery's.
        "has_parent": request.parent_id not in (None, request.id),
        "shadow": request.shadow,
        "priority": route.get("priority"),
        "exchange": route.get("exchange"),
        # Through Celery's delay exchanges of quorum queues it comes out with their bits before it, after any countdown.
        "routing_key": re.sub(r"^([01]\.){28}", "", route.get("routing_key") or ""),
        "redelivered": bool(route.get("redelivered")),
        "delivery_mode": properties.get("delivery_mode"),
        "encoding": properties.get("twin_encoding"),
        "compression": getattr(request, "compression", None),
        "time_limits": request.timelimit,
        "expires": _instant(request.expires),
        "stamps": request.stamps,
        "stamped_headers": sorted(request.stamped_headers or ()),
        "headers": _own_headers(request.headers or {}),
        "answers_to": [bool(request.reply_to), request.correlation_id == request.id],
        "group": [bool(request.group), request.group_index],
        "chord": _named(request.chord),
        "chain": [_named(signature) for signature in request.chain or ()],
        "callbacks": [_named(signature) for signature in request.callbacks or ()],
        "errbacks": [_named(signature) for signature in request.errbacks or ()],
        "ignores_result": bool(request.ignore_result),
        "nesting": request.replaced_task_nesting,
    }
    plain: dict[str, Any] = json.loads(json.dumps(facts, default=repr))
    return plain


def _own_headers(headers: dict[str, Any]) -> dict[str, Any]:
    """Return the headers without ours, and without what a broker adds to a message it hands on."""
    return {name: value for name, value in headers.items() if not name.startswith(("singleflight_", "x-"))}


def _named(signature: Any) -> list[Any] | None:
    if not signature:
        return None
    name = signature["task"]
    # What Celery's own tasks are given is full of names and ids; it is seen when those run.
    given = [] if name.startswith("celery.") else [signature.get("args"), signature.get("kwargs")]
    return [bare(name), *given]


def _instant(text: Any) -> str | None:
    if not text:
        return None
    instant = datetime.fromisoformat(text) if isinstance(text, str) else text
    return str(instant.astimezone(UTC))
