"""Databases of the caller's, as fixtures: PostgreSQL in a schema of the test's own, and SQLite in a file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from sqlalchemy import Column, Engine, Integer, MetaData, Table, Text, create_engine, func, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from celery_singleflight.sql import Boundary

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class Database:
    """A database with the tables of a boundary, and one of the business: whatever is paid is a row."""

    url: str
    schema: str | None = None
    #: Seconds for which a writer of SQLite waits for another one.
    patience: float = 30.0

    @cached_property
    def engine(self) -> Engine:
        """Without a pool, so that each transaction of a test is a connection, and none is left at its end."""
        arguments = {"timeout": self.patience} if self.url.startswith("sqlite") else {"connect_timeout": 5}
        return create_engine(self.url, poolclass=NullPool, connect_args=arguments)

    @cached_property
    def boundary(self) -> Boundary:
        return Boundary(schema=self.schema)

    @cached_property
    def payment(self) -> Table:
        columns = Column("id", Integer, primary_key=True), Column("key", Text), Column("value", Integer)
        return Table("payment", MetaData(), *columns, schema=self.schema)

    def create(self) -> None:
        self.boundary.metadata.create_all(self.engine)
        self.payment.metadata.create_all(self.engine)

    def pay(self, connection: Any, key: str, value: int) -> None:
        """The effect."""
        connection.execute(self.payment.insert().values(key=key, value=value))

    def payments(self, key: str) -> list[int]:
        """The effects that are committed, in order."""
        table = self.payment
        with self.engine.connect() as connection:
            return list(connection.execute(select(table.c.value).where(table.c.key == key).order_by(table.c.id)).scalars())

    def count(self, table: Table) -> int:
        with self.engine.connect() as connection:
            return connection.execute(select(func.count()).select_from(table)).scalar_one()

    def waiting(self) -> int:
        """How many sessions of a PostgreSQL wait for another's lock on a table of this schema."""
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE :schema"
        with self.engine.connect() as connection:
            return int(connection.execute(text(waits), {"schema": f"%{self.schema}%"}).scalar_one())


def need_postgresql() -> str:
    """Return the URL of a PostgreSQL that answers; skip with a reason where there is none, fail where there must be one."""
    url = os.environ.get("TEST_POSTGRESQL_URL", "postgresql+psycopg://postgres@127.0.0.1:5432/test")
    try:
        create_engine(url, poolclass=NullPool, connect_args={"connect_timeout": 2}).connect().close()
    except OperationalError as error:
        message = f"PostgreSQL does not answer at its URL: {error!r}"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return url


@pytest.fixture(scope="session")
def postgresql_url() -> str:
    return need_postgresql()


@pytest.fixture
def postgresql(postgresql_url) -> Iterator[Database]:
    """A schema of the test's own, gone with all that is in it when the test is over."""
    database = Database(postgresql_url, schema=f"sf_{uuid4().hex[:12]}")
    with database.engine.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {database.schema}"))
    try:
        database.create()
        yield database
    finally:
        with database.engine.begin() as connection:
            connection.execute(text("SET LOCAL lock_timeout = '10s'"))
            connection.execute(text(f"DROP SCHEMA {database.schema} CASCADE"))


@pytest.fixture
def sqlite(tmp_path) -> Database:
    database = Database(f"sqlite:///{tmp_path / 'business.db'}")
    database.create()
    return database


@pytest.fixture(params=["postgresql", "sqlite"])
def database(request) -> Database:
    """Each database in turn."""
    return request.getfixturevalue(request.param)
