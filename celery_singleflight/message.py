"""The message of a trigger, as the store keeps it for a delivery that dies: packed in the pool, published by a sweeper."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from kombu.utils import json as kombu_json

from celery_singleflight import headers as header
from celery_singleflight.courier import careful_producer

if TYPE_CHECKING:
    from celery import Celery

    from celery_singleflight.claims import Handout

__all__ = ("pack_message", "publish_again", "queues_behind")

_encode: Final = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
#: What one delivery adds to the headers, or what must not come again: a trigger that has entered cannot expire any more.
_OF_A_DELIVERY: Final = {"redelivered", "expires", *header.OF_A_WAIT}


def pack_message(request: Any) -> bytes:
    """Return the message that a request was made from: a line of JSON, then its body as it came.

    Returns b"" where the worker's main process has not handed the message on, as in eager mode.
    """
    properties = request.properties or {}
    message = properties.get(header.MESSAGE)
    if message is None:
        return b""
    headers, body, content_type, content_encoding = message
    route = request.delivery_info or {}
    head = {
        "headers": headers,
        "exchange": route.get("exchange"),
        "routing_key": route.get("routing_key"),
        "priority": route.get("priority"),
        "delivery_mode": properties.get("delivery_mode"),
        "reply_to": request.reply_to,
        "correlation_id": request.correlation_id,
        "content_type": content_type,
        "content_encoding": content_encoding,
    }
    try:
        line = _encode(head)
    except TypeError:  # an AMQP header may be a date
        line = kombu_json.dumps(head)
    return line.encode() + b"\n" + (body.encode() if isinstance(body, str) else bytes(body))


def publish_again(app: Celery, handout: Handout) -> str:
    """Publish a message that the store has handed out, to where it was sent first, as a new copy. Returns its task id.

    Raises what the broker's client raises; `ValueError` when the message cannot be read.
    """
    line, _, body = handout.message.partition(b"\n")
    head = kombu_json.loads(line.decode())
    kept = {
        name: value for name, value in head.pop("headers").items() if name not in _OF_A_DELIVERY and not name.startswith("x-")
    }
    headers = {**kept, header.COPY: uuid4().hex, header.PREVIOUS: handout.copy}
    sent = {name: value for name, value in head.items() if value is not None}
    compression = headers.pop("compression", None)
    if compression:
        sent["compression"] = compression
    with careful_producer(app) as producer:
        producer.publish(body, headers=headers, declare=queues_behind(app, head["exchange"]), retry=False, **sent)
    return str(headers.get("id", ""))


def queues_behind(app: Celery, exchange: str | None) -> list[Any]:
    """Return the queues of the exchange a message came through, to be declared with it.

    A prefork child has not declared them, and on a virtual transport a message to an undeclared topic exchange is lost.
    """
    if not exchange:
        return []
    return [queue for queue in app.amqp.queues.values() if queue.exchange and queue.exchange.name == exchange]
