"""Publishing what must not get lost: a message that the broker has not confirmed is not sent.

RabbitMQ confirms only where it is asked to, and Celery does not ask by default: a message that was written into a connection
that breaks is lost, while the one it continues is acknowledged on another. A Redis confirms each command by its reply.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakSet

from kombu.utils.json import dumps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery import Celery

__all__ = ("careful_producer", "has_front", "prepare", "swift_producer")

logger = logging.getLogger(__name__)

#: What of kombu's channel to a Redis is needed to put a message to the front of a queue.
_INSIDE: Final = ("_get_message_priority", "_put", "_q_for_pri", "conn_or_acquire")
#: Seconds without a sign from the broker after which a connection is given up.
_PATIENCE: Final = 10.0


class _Courier:
    """A connection of this process on which every publish is confirmed. Used by one thread at a time."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._producer: Any = None

    @contextmanager
    def producing(self, app: Celery) -> Iterator[Any]:
        with self._guard:
            if self._producer is None:
                self._producer = app.amqp.Producer(self._connection(app))
            try:
                yield self._producer
            except BaseException:
                # Whatever it was, an unread confirmation must not be taken for that of the next message.
                producer, self._producer = self._producer, None
                producer.connection.collect()
                raise

    def _connection(self, app: Celery) -> Any:
        options = {"read_timeout": _PATIENCE, "write_timeout": _PATIENCE, **(app.conf.broker_transport_options or {})}
        return app.connection_for_write(transport_options={**options, "confirm_publish": True})


class _Express(_Courier):
    """A connection of this process to a Redis broker, on which a message goes to the front of its queue."""

    def _connection(self, app: Celery) -> Any:
        connection = app.connection_for_write()
        # Whoever fails over to another broker gets an ordinary connection to that one.
        connection.transport_cls = _to_the_front(connection.get_transport_cls())
        return connection


@cache
def _to_the_front(transport: Any) -> Any:
    """Return a kombu transport for Redis, like this one, that puts a message where the next one is taken from.

    That is inside of kombu. One that has it no more is left as it is.
    """
    if not all(hasattr(transport.Channel, name) for name in _INSIDE):
        return transport

    class Channel(transport.Channel):  # type: ignore[misc]
        def _put(self, queue: str, message: Any, **options: Any) -> None:
            if getattr(self, "_expires", None):  # kombu puts it there and gives the queue another while to live
                super()._put(queue, message, **options)
                return
            name = self._q_for_pri(queue, self._get_message_priority(message, reverse=False))
            with self.conn_or_acquire() as client:
                client.rpush(name, dumps(message))

    class Transport(transport):  # type: ignore[misc]
        pass

    Transport.Channel = Channel
    return Transport


_couriers: Final[WeakKeyDictionary[Celery, _Courier]] = WeakKeyDictionary()
_expresses: Final[WeakKeyDictionary[Celery, _Express]] = WeakKeyDictionary()
#: The apps that have begun to connect ahead.
_prepared: Final[WeakSet[Celery]] = WeakSet()


def _begin_anew() -> None:
    """Leave to a forked parent what is its own."""
    _couriers.clear()
    _expresses.clear()
    _prepared.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


@contextmanager
def careful_producer(app: Celery) -> Iterator[Any]:
    """Yield a kombu producer whose `publish` returns only when the broker has the message.

    Publishing raises `amqp.exceptions.MessageNacked` when RabbitMQ does not take it, as a full queue may.
    """
    if _driver(app) != "amqp":
        with app.producer_pool.acquire(block=True) as producer:
            yield producer
        return
    with _couriers.setdefault(app, _Courier()).producing(app) as producer:
        yield producer


@contextmanager
def swift_producer(app: Celery) -> Iterator[Any]:
    """Yield a careful producer for what has waited its turn: on a Redis broker it goes before all that is in its queue.

    RabbitMQ has nothing of the kind.
    """
    if not has_front(app):
        with careful_producer(app) as producer:
            yield producer
        return
    with _expresses.setdefault(app, _Express()).producing(app) as producer:
        yield producer


def has_front(app: Celery) -> bool:
    """Whether what a `swift_producer` of the app publishes goes before what was published earlier."""
    transport: Any = type(app.producer_pool.connections.connection.transport)
    return transport.driver_type == "redis" and _to_the_front(transport) is not transport


def prepare(app: Celery) -> None:
    """Begin to connect to the broker for a later `swift_producer`, once in a process: it takes longer than a short run."""
    if app not in _prepared:
        _prepared.add(app)
        threading.Thread(target=_connect, args=(app,), name="singleflight-courier", daemon=True).start()


def _connect(app: Celery) -> None:
    try:
        with swift_producer(app) as producer:
            producer.channel  # noqa: B018, it is opened when it is asked for
    except Exception as error:  # noqa: BLE001, whatever a client raises; who has something to publish finds out
        logger.info("no connection to the broker yet: %s", error)


def _driver(app: Celery) -> str:
    return str(app.producer_pool.connections.connection.transport.driver_type)
