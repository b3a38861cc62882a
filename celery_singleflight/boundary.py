"""The tables of the business boundary: what of the package lives in the caller's database, and in the caller's transaction.

Nothing here commits, rolls back or opens a connection. What is written counts when the caller's transaction does.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from kombu.utils import json
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    DateTime,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    and_,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from celery_singleflight.canonical import digest
from celery_singleflight.errors import (
    ConfigurationError,
    ExecutionKeyReused,
    PayloadMismatch,
    SingleflightError,
    StaleToken,
)
from celery_singleflight.keys import bounded
from celery_singleflight.publish import move_call_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery.canvas import Signature
    from sqlalchemy.orm import Session, scoped_session

    from celery_singleflight.task import SingleflightTask

    #: Where the caller's transaction is.
    Transaction = Connection | Session | scoped_session[Any]

__all__ = ("Boundary", "ExecutionRecord")

#: What `bounded` makes of a text is no longer.
_KEY: Final = String(200)
#: Both wait for a transaction that has the same key, and then see what it has committed.
_INSERTS: Final[dict[str, Callable[[Table], Any]]] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}


class Boundary:
    """Three tables, in a `MetaData` of their own or in the caller's, and what a transaction does with them.

    Every method takes a SQLAlchemy `Connection` or `Session` that is in a transaction of the caller's, on PostgreSQL or SQLite.
    """

    def __init__(self, *, prefix: str = "singleflight_", schema: str | None = None, metadata: MetaData | None = None) -> None:
        #: For `create_all`, and for Alembic's `target_metadata`.
        self.metadata = MetaData() if metadata is None else metadata

        def table(name: str, *columns: Column[Any]) -> Table:
            return Table(prefix + name, self.metadata, *columns, schema=schema)

        #: A row is an execution whose effect is committed.
        self.execution = table(
            "execution",
            Column("scope", _KEY, primary_key=True),
            Column("key", _KEY, primary_key=True),
            Column("task", _KEY, nullable=False),
            Column("payload", String(16), nullable=False),
            Column("result", Text, nullable=False),
            Column("created_at", DateTime(timezone=True), nullable=False),
        )
        #: The greatest fencing token that a resource has seen.
        self.fence = table(
            "fence",
            Column("resource", _KEY, primary_key=True),
            Column("token", BigInteger, nullable=False),
            Column("changed_at", DateTime(timezone=True), nullable=False),
        )
        #: A row is a trigger that is still to be published.
        self.outbox = table(
            "outbox",
            Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
            Column("task_id", String(255), nullable=False),
            Column("task", Text, nullable=False),
            Column("message", Text, nullable=False),
            Column("attempts", Integer, nullable=False),
            Column("due_at", DateTime(timezone=True), nullable=False),
            Column("created_at", DateTime(timezone=True), nullable=False),
        )

    def claim(
        self,
        connection: Transaction,
        task: SingleflightTask,
        *,
        resource: str | None = None,
        payload: object = None,
    ) -> ExecutionRecord:
        """Do what a run of a protected task does first in its transaction: check its fence, then record its execution.

        The fence is that of `resource`, by default of the lock key; the execution that of the task's execution key under its
        lock name. Raises as `check_fence` and `record_execution` do, `StoreUnavailable` in a run without a lease, and
        `FencingUnavailable` for a `lock_limit` above 1.
        """
        lease = task.lease
        self.check_fence(connection, lease.lock_key if resource is None else resource, lease.fencing_token)
        return self.record_execution(connection, task.execution.key, scope=lease.key.name, task=str(task.name), payload=payload)

    def record_execution(
        self,
        connection: Transaction,
        key: str,
        *,
        scope: str = "",
        task: str = "",
        payload: object = None,
    ) -> ExecutionRecord:
        """Claim an execution key for this transaction, or find what it has come to; `scope` is what it is unique in.

        While another transaction has claimed it this one waits, as long as the database lets it: if that one rolls back the
        claim is this one's. Raises `ExecutionKeyReused` when the key was recorded by another task, `PayloadMismatch` when it
        was with another payload; `LockKeyError` for a payload that has no canonical form.
        """
        on, table = _connection(connection), self.execution
        scope, key, task, wanted = bounded(scope), bounded(key), bounded(task), digest(payload)
        insert = _INSERTS[on.dialect.name](table)
        values = {"scope": scope, "key": key, "task": task, "payload": wanted, "result": "null", "created_at": _now()}
        take = insert.values(values).on_conflict_do_nothing(index_elements=[table.c.scope, table.c.key]).returning(table.c.key)
        found = select(table.c.task, table.c.payload, table.c.result).where(table.c.scope == scope, table.c.key == key)
        while True:
            if on.execute(take).first() is not None:
                return ExecutionRecord(on, table, scope, key)
            row = on.execute(found).first()
            if row is not None:  # else it was deleted in between
                break
        if row.task != task:
            raise ExecutionKeyReused(key, row.task)
        if row.payload != wanted:
            raise PayloadMismatch(key, row.task)
        return ExecutionRecord(on, table, scope, key, stored=row.result)

    def check_fence(self, connection: Transaction, resource: str, token: int) -> None:
        """Let this transaction write to a resource with its fencing token. Raises `StaleToken` when a greater one has.

        Until this transaction ends, others with a token for the resource wait. Tokens compare within one lock key, so a
        resource is guarded by one.
        """
        on, table, resource = _connection(connection), self.fence, bounded(resource)
        insert = _INSERTS[on.dialect.name](table).values(resource=resource, token=token, changed_at=_now())
        # One statement decides: under READ COMMITTED the condition is asked of the newest committed row, which is then locked.
        advance = insert.on_conflict_do_update(
            index_elements=[table.c.resource],
            set_={"token": insert.excluded.token, "changed_at": insert.excluded.changed_at},
            where=table.c.token <= insert.excluded.token,
        ).returning(table.c.token)
        if on.execute(advance).first() is None:
            seen = on.execute(select(table.c.token).where(table.c.resource == resource)).scalar()
            raise StaleToken(resource, token, seen or 0)

    def send(self, connection: Transaction, signature: Signature) -> str:
        """Put a trigger into the outbox: an `Outbox` publishes it once this transaction has committed. Returns its task id.

        The signature is that of one task, with its options: `pay.si(7).set(queue="slow", execution_key="pay:7")`. Arguments and
        options are kept as JSON. Durations among the options count from the publishing. Raises `TypeError` for what is no
        signature of one task, does not fit the task, or has no JSON form; `OptionError` for a wrong call option.
        """
        on, now = _connection(connection), _now()
        options = _checked(signature)
        task_id = options.pop("task_id", None) or str(uuid4())
        on.execute(
            self.outbox.insert().values(
                task_id=task_id,
                task=signature.task,
                message=json.dumps({"args": list(signature.args), "kwargs": dict(signature.kwargs), "options": options}),
                attempts=0,
                due_at=now,
                created_at=now,
            )
        )
        return str(task_id)


class ExecutionRecord:
    """The record of an execution as one transaction has claimed or found it."""

    __slots__ = ("_connection", "_is_open", "_stored", "_table", "key", "scope")

    def __init__(self, connection: Connection, table: Table, scope: str, key: str, *, stored: str | None = None) -> None:
        self._connection = connection
        self._table = table
        self._stored = stored
        self._is_open = stored is None
        self.scope = scope
        self.key = key

    @property
    def is_done(self) -> bool:
        """Whether a transaction has committed its effect: then `result` is the answer, and nothing is to be done."""
        return self._stored is not None

    @property
    def result(self) -> Any:
        """What that transaction has finished with, None if with nothing. Raises `SingleflightError` unless it is done."""
        if self._stored is None:
            raise SingleflightError(f"execution {self.key} has no result yet: this transaction has claimed it")
        return json.loads(self._stored)

    def finish(self, result: Any) -> Any:
        """Record the result in the same transaction, as JSON, and return it. To be called once, by whoever has claimed it.

        Raises `TypeError` when it has no JSON form. Without a call the result is None.
        """
        if not self._is_open:
            raise SingleflightError(f"execution {self.key} has its result already")
        c = self._table.c
        keep = update(self._table).where(and_(c.scope == self.scope, c.key == self.key)).values(result=json.dumps(result))
        if self._connection.execute(keep).rowcount != 1:
            raise SingleflightError(f"execution {self.key} is not claimed any more: what had claimed it was rolled back")
        self._is_open = False
        return result

    def __repr__(self) -> str:
        return f"<ExecutionRecord {self.key} {'done' if self.is_done else 'claimed'}>"


def _connection(given: Transaction) -> Connection:
    """Return the connection of the caller's transaction. Raises `ConfigurationError` where it has none."""
    connection: Connection = given if isinstance(given, Connection) else given.connection()
    name = connection.dialect.name
    if name not in _INSERTS:
        raise ConfigurationError(f"the database: expected postgresql or sqlite, got {name}")
    commits_by_itself = name == "postgresql" and getattr(connection.connection.dbapi_connection, "autocommit", False) is True
    if commits_by_itself or connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
        raise ConfigurationError("the connection commits each statement by itself, expected one that is in a transaction")
    return connection


def _checked(signature: Signature) -> dict[str, Any]:
    if getattr(signature, "subtask_type", "") is not None:
        kind = getattr(signature, "subtask_type", type(signature).__name__)
        raise TypeError(f"the outbox takes the signature of one task, got a {kind}")
    options = dict(signature.options)
    move_call_options(signature.task, dict(options), strict=True)
    try:
        task = signature.type
    except KeyError:
        return options  # a task of another service
    if task.typing:
        task.__header__(*signature.args, **signature.kwargs)
    return options


def _now() -> datetime:
    return datetime.now(UTC)
