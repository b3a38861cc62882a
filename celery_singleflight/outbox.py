"""The outbox: triggers that were committed with the business data, published by the sweepers of the workers.

A message is published while the transaction that claims its row is open, and the row goes when that commits. Who dies between
publishes the message again, under the same task id: a protected task takes it for the repetition that it is.
"""

from __future__ import annotations

import logging
import os
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from celery.canvas import Signature
from kombu.exceptions import OperationalError
from kombu.utils import json
from sqlalchemy import delete, false, func, select, true, update
from sqlalchemy.engine import Engine
from sqlalchemy.exc import SQLAlchemyError

from celery_singleflight.courier import careful_producer
from celery_singleflight.discretion import log_error
from celery_singleflight.looks import look_also

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery import Celery
    from sqlalchemy import Connection, Row

    from celery_singleflight.boundary import Boundary

__all__ = ("Outbox",)

logger = logging.getLogger(__name__)

#: Rows that one look claims, at most.
_AT_ONCE: Final = 50
#: Seconds after which the rest of them is left to the next look: an event loop has other things to do.
_LONGEST_LOOK: Final = 0.5
#: Milliseconds that one statement may take, and that the database waits for a process that stands still with rows claimed.
_LONGEST_STATEMENT: Final = 500
_LONGEST_SILENCE: Final = 5000
#: Seconds between two looks at most, while the database or the broker is away.
_LONGEST_PAUSE: Final = 15.0
#: Seconds until a row is tried again that cannot be published, at most.
_LONGEST_DELAY: Final = 3600.0


class _BrokerAway(Exception):
    """Nothing can be published now, whatever it is."""


class Outbox:
    """Has every worker of the app publish what `Boundary.send` has put into the outbox.

    `engine` is an engine, or a function that makes one. It is first asked for by a worker's main process, and connections are
    opened of its own, so that no process that forks has part in them.
    """

    def __init__(self, app: Celery, boundary: Boundary, engine: Engine | Callable[[], Engine]) -> None:
        self._table = boundary.outbox
        self._source = engine
        self._own: tuple[int, Engine] | None = None
        self._failures = 0
        self._not_before = 0.0
        look_also(app, self.look)

    def look(self, app: Celery) -> None:
        """Publish what is committed and due. Raises nothing; while database or broker is away it looks less and less often."""
        if time.monotonic() < self._not_before:
            return
        try:
            self._sweep(app)
        except (_BrokerAway, SQLAlchemyError) as error:
            self._wait_longer()
            logger.warning("the outbox publishes nothing until it can: %s", str(error).partition("\n")[0])
        except Exception:
            self._wait_longer()
            logger.exception("a look into the outbox failed; the next one follows")
        else:
            self._failures = 0

    def _wait_longer(self) -> None:
        self._failures += 1
        self._not_before = time.monotonic() + min(2.0**self._failures, _LONGEST_PAUSE)

    def _sweep(self, app: Celery) -> None:
        give_up_at = time.monotonic() + _LONGEST_LOOK
        table, away = self._table, None
        with self._engine().begin() as connection:
            _hurry(connection)
            sent = []
            for row in self._claimed(connection):
                try:
                    _publish(app, row)
                except _BrokerAway as error:
                    away = error
                    break
                except Exception as error:  # noqa: BLE001, the others must not wait for it
                    log_error(
                        logger, f"{row.task_id} of {row.task} in the outbox cannot be published; it is tried again", error
                    )
                    self._postpone(connection, row)
                else:
                    sent.append(row.id)
                if time.monotonic() > give_up_at:
                    break
            if sent:
                connection.execute(delete(table).where(table.c.id.in_(sent)))
        if away is not None:
            raise away

    def _claimed(self, connection: Connection) -> list[Row[Any]]:
        """Return rows that are due, in the order in which they were written, and nobody else's before this transaction ends."""
        c = self._table.c
        due = select(c.id).where(c.due_at <= datetime.now(UTC)).limit(1)
        if connection.dialect.name == "sqlite":
            if connection.execute(due).first() is None:
                return []
            # It has one lock for all, taken by the first that writes, though it be nothing.
            connection.execute(update(self._table).where(false()).values(attempts=0))
        rows = select(c.id, c.task_id, c.task, c.message, c.attempts).where(c.due_at <= datetime.now(UTC))
        return list(connection.execute(rows.order_by(c.id).limit(_AT_ONCE).with_for_update(skip_locked=True)))

    def _postpone(self, connection: Connection, row: Row[Any]) -> None:
        attempts = row.attempts + 1
        due_at = datetime.now(UTC) + timedelta(seconds=min(2.0 ** min(attempts, 20), _LONGEST_DELAY))
        table = self._table
        connection.execute(update(table).where(table.c.id == row.id).values(attempts=attempts, due_at=due_at))

    def _engine(self) -> Engine:
        """Return an engine of this process. Its pool is not the caller's, which processes that fork later may share."""
        if self._own is None or self._own[0] != os.getpid():
            given = self._source if isinstance(self._source, Engine) else self._source()
            options = dict(given.get_execution_options())
            if given.dialect.name == "postgresql":
                options["isolation_level"] = "READ COMMITTED"
            engine = Engine(
                given.pool.recreate(),
                given.dialect,
                given.url,
                execution_options=options,
                hide_parameters=given.hide_parameters,
            )
            self._own = os.getpid(), engine
        return self._own[1]


def _hurry(connection: Connection) -> None:
    """Let nothing of this transaction take long, nor its locks outlast a process that stands still."""
    if connection.dialect.name == "postgresql":
        limits = {"statement_timeout": _LONGEST_STATEMENT, "idle_in_transaction_session_timeout": _LONGEST_SILENCE}
        connection.execute(select(*(func.set_config(name, str(value), true()) for name, value in limits.items())))
    elif connection.dialect.name == "sqlite":
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {_LONGEST_STATEMENT}")


def _publish(app: Celery, row: Row[Any]) -> None:
    """Publish one trigger. Raises `_BrokerAway`, or what is wrong with this one."""
    call = json.loads(row.message)
    signature = Signature.from_dict({"task": row.task, "subtask_type": None, "immutable": False, **call}, app=app)
    try:
        with careful_producer(app) as producer:
            signature.apply_async(task_id=row.task_id, producer=producer, retry=False)
    except (OperationalError, *app.connection_for_write().recoverable_connection_errors) as error:
        raise _BrokerAway(f"the broker does not take {row.task_id}: {error!r}") from error
