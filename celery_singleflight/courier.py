"""Publishing what must not get lost: a message that the broker has not confirmed is not sent.

RabbitMQ confirms only where it is asked to, and Celery does not ask by default: a message that was written into a connection
that breaks is lost, while the one it continues is acknowledged on another. A Redis confirms each command by its reply.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery import Celery

__all__ = ("careful_producer",)


#: Seconds without a sign from the broker after which a connection is given up.
_PATIENCE: Final = 10.0


class _Courier:
    """A connection of this process on which every publish is confirmed. Used by one thread at a time."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._pid = 0
        self._producer: Any = None

    @contextmanager
    def producing(self, app: Celery) -> Iterator[Any]:
        with self._guard:
            if self._producer is None or self._pid != os.getpid():
                self._pid = os.getpid()
                options = {"read_timeout": _PATIENCE, "write_timeout": _PATIENCE, **(app.conf.broker_transport_options or {})}
                connection = app.connection_for_write(transport_options={**options, "confirm_publish": True})
                self._producer = app.amqp.Producer(connection)
            try:
                yield self._producer
            except BaseException:
                # Whatever it was, an unread confirmation must not be taken for that of the next message.
                producer, self._producer = self._producer, None
                producer.connection.collect()
                raise


_couriers: Final[WeakKeyDictionary[Celery, _Courier]] = WeakKeyDictionary()


@contextmanager
def careful_producer(app: Celery) -> Iterator[Any]:
    """Yield a kombu producer whose `publish` returns only when the broker has the message.

    Publishing raises `amqp.exceptions.MessageNacked` when RabbitMQ does not take it, as a full queue may.
    """
    if app.producer_pool.connections.connection.transport.driver_type != "amqp":
        with app.producer_pool.acquire(block=True) as producer:
            yield producer
        return
    with _couriers.setdefault(app, _Courier()).producing(app) as producer:
        yield producer
