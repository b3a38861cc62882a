"""The one worker of a broker's matrix, and its queues."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import twin_app
from amqp.exceptions import ChannelError
from nodes import redis_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Name of a queue in the features -> type and routing key of its exchange, and more of the queue.
_QUEUES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "default": ("direct", "default", {}),
    "other": ("direct", "other", {}),
    "topic": ("topic", "work.#", {}),
    "fanout": ("fanout", "", {}),
    "priority": ("direct", "priority", {"x-max-priority": 9}),
}
_ON_RABBITMQ: dict[str, tuple[str, str, dict[str, Any]]] = {"headers": ("headers", "", {})}
#: Celery's delay exchanges find a queue by its routing key.
_OF_QUORUM: dict[str, tuple[str, str, dict[str, Any]]] = {
    "topic": ("topic", "work.#", {"x-queue-type": "quorum"}),
    "second": ("topic", "second.#", {"x-queue-type": "quorum"}),
}


@contextmanager
def start_twins(start: Callable[..., Any], url: str, broker: str | None = None, *, is_quorum: bool = False) -> Iterator[Any]:
    """Start a worker of the twins, with results and store on Redis, and the broker there too unless another is given."""
    mark = f"matrix-{uuid4().hex[:8]}"
    kinds = _OF_QUORUM if is_quorum else {**_QUEUES, **(_ON_RABBITMQ if broker else {})}
    settings = redis_settings(
        url,
        result_extended=True,
        task_serializer="json",
        accept_content=["json", "yaml", "msgpack", "pickle"],
        task_queues={f"{mark}-{name}": _queue(f"{mark}-{name}", *kind) for name, kind in kinds.items()},
        task_default_queue=f"{mark}-{next(iter(kinds))}",
    )
    if broker:
        settings["broker_url"] = broker
    if is_quorum:
        settings["worker_detect_quorum_queues"] = True
    place = start(settings, "-E", app_module=twin_app, workers=1, concurrency=3)
    place.is_quorum = is_quorum
    place.queues = {name: f"{mark}-{name}" for name in kinds}
    #: What features are on a plain task, by their names.
    place.plain = {}
    try:
        yield place
    finally:
        # Results that nobody has waited for to their end: collected later, they would look for a server that is gone.
        for pending in place.app.backend._pending_results:
            pending.clear()
        if broker:
            place.end()  # it would declare them again
            _delete(place)


def messages_left(place: Any) -> int:
    """Return how many messages the broker and the worker have of the place's queues."""
    left = len(place.held_by_workers())
    with place.app.connection_for_read() as connection:
        for name in place.queues.values():
            try:
                left += connection.default_channel.queue_declare(name, passive=True).message_count
            except ChannelError:
                assert connection.transport.driver_type == "redis", name  # where an empty queue is none
    return left


def _queue(name: str, kind: str, routing_key: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "exchange": name,
        "exchange_type": kind,
        "routing_key": routing_key,
        # Queues of a test that was killed go by themselves.
        "queue_arguments": {"x-expires": 3_600_000, **arguments},
        "binding_arguments": {"x-match": "all", "colour": "blue"} if kind == "headers" else {},
    }


def _delete(place: Any) -> None:
    with place.app.connection_for_write() as connection:
        channel = connection.default_channel
        for name in place.queues.values():
            channel.queue_delete(name)
            channel.exchange_delete(name)
