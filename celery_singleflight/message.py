"""The message of a trigger, as the store keeps it for a delivery that dies: packed in the pool, published by a sweeper."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from kombu.serialization import dumps, loads, registry
from kombu.utils import json as kombu_json

from celery_singleflight import headers as header
from celery_singleflight.courier import careful_producer, swift_producer

if TYPE_CHECKING:
    from celery import Celery

    from celery_singleflight.claims import Handout

__all__ = (
    "arguments_in",
    "headers_in",
    "mark_message",
    "pack_message",
    "publish_again",
    "queues_behind",
    "replace_arguments",
    "route_of",
)

_encode: Final = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
#: How the exchange of kombu's native delayed delivery is called, and what a routing key begins with that went through it.
_DELAYED: Final = "celery_delayed_delivery"
_DELAY: Final = re.compile(r"^(?:[01]\.)+")
#: What one delivery adds to the headers, or what has come to pass.
_OF_A_DELIVERY: Final = {"redelivered", "eta", *header.OF_A_WAIT}


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
    return _packed(head, body.encode() if isinstance(body, str) else bytes(body))


def _packed(head: dict[str, Any], body: bytes) -> bytes:
    try:
        line = _encode(head)
    except TypeError:  # an AMQP header may be a date
        line = kombu_json.dumps(head)
    return line.encode() + b"\n" + body


def headers_in(message: bytes) -> dict[str, Any]:
    """Return the headers of a message as `pack_message` made it."""
    headers: dict[str, Any] = kombu_json.loads(message.partition(b"\n")[0].decode())["headers"]
    return headers


def mark_message(message: bytes, marks: dict[str, Any]) -> bytes:
    """Return the message with these headers in place of what it has of them."""
    line, _, body = message.partition(b"\n")
    head = kombu_json.loads(line.decode())
    return _packed({**head, "headers": {**head["headers"], **marks}}, body)


def arguments_in(message: bytes) -> tuple[Any, Any]:
    """Return the arguments of a call, by position and by name, from its message as `pack_message` made it.

    Raises what kombu raises for a body that cannot be read.
    """
    line, _, body = message.partition(b"\n")
    head = kombu_json.loads(line.decode())
    args, kwargs, _ = loads(body, head["content_type"], head["content_encoding"], accept=[head["content_type"]])
    return args, kwargs


def replace_arguments(request: Any, kwargs: dict[str, Any], marks: dict[str, Any]) -> None:
    """Give a delivery other arguments, in the request and in the message that the store may keep; `marks` are headers of it."""
    headers, body, content_type, content_encoding = request.properties[header.MESSAGE]
    _, _, embed = loads(body, content_type, content_encoding, accept=[content_type])
    content_type, content_encoding, body = dumps(([], kwargs, embed), serializer=registry.type_to_name[content_type])
    message = ({**headers, **marks}, body, content_type, content_encoding)
    request.properties = {**request.properties, header.MESSAGE: message}
    request.args, request.kwargs = [], kwargs


def publish_again(app: Celery, handout: Handout, *, is_called: bool = True, at_end: bool = False) -> str:
    """Publish a message that the store has handed out, to where it was sent first, as a new copy. Returns its task id.

    Where it is called, its turn has come: it goes before what the worker has and, but for `at_end`, before what the broker has,
    where they let it.

    Raises what the broker's client raises; `ValueError` when the message cannot be read.
    """
    line, _, body = handout.message.partition(b"\n")
    head = kombu_json.loads(line.decode())
    kept = {
        name: value for name, value in head.pop("headers").items() if name not in _OF_A_DELIVERY and not name.startswith("x-")
    }
    headers = {**kept, "eta": None, header.COPY: uuid4().hex, header.PREVIOUS: handout.copy}
    if handout.first_ms:
        headers |= {header.FIRST_SEEN: handout.first_ms, header.WAITS: 1}
    else:
        headers["expires"] = None  # what has entered cannot expire any more
    if is_called:
        headers[header.LINGER] = handout.linger
    # Without a priority kombu gives it one.
    sent = {name: value for name, value in head.items() if value is not None or name == "priority"}
    compression = headers.pop("compression", None)
    if compression:
        sent["compression"] = compression
    with (careful_producer if at_end else swift_producer)(app) as producer:
        producer.publish(body, headers=headers, declare=queues_behind(app, head["exchange"]), retry=False, **sent)
    return str(headers.get("id", ""))


def route_of(app: Celery, request: Any) -> dict[str, Any]:
    """Return the options by which a delivery's message goes to where it was sent first, as Celery's router takes them.

    Without its queue the router adds the default one, by which a countdown on quorum queues goes; and what has waited there
    comes through an exchange of its own, with the bits of its countdown before its routing key.
    """
    info = request.delivery_info or {}
    exchange, routing_key = info.get("exchange") or "", info.get("routing_key") or ""
    queues = queues_behind(app, exchange)
    if exchange.endswith(_DELAYED):
        routing_key = _DELAY.sub("", routing_key)
        queues = [queue for queue in app.amqp.queues.values() if queue.exchange and queue.routing_key == routing_key]
    if not queues:
        return {}
    queue = next((queue for queue in queues if queue.routing_key == routing_key), queues[0])
    return {"exchange": queue.exchange.name, "routing_key": routing_key, "queue": queue.name, "declare": queues}


def queues_behind(app: Celery, exchange: str | None) -> list[Any]:
    """Return the queues of the exchange a message came through, to be declared with it.

    A prefork child has not declared them, and on a virtual transport a message to an undeclared topic exchange is lost.
    """
    if not exchange:
        return []
    return [queue for queue in app.amqp.queues.values() if queue.exchange and queue.exchange.name == exchange]
