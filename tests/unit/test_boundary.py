"""The tables in the caller's transaction: one effect for each execution, no late writer, on PostgreSQL and on SQLite."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from nodes import wait_until
from sqlalchemy import Column, Integer, MetaData, Table, create_engine, event, inspect, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from celery_singleflight import (
    ConfigurationError,
    ExecutionKeyReused,
    FencingUnavailable,
    PayloadMismatch,
    SingleflightError,
    StaleToken,
    StoreUnavailable,
)
from celery_singleflight.sql import Boundary


def run_once(database, key, value, **more):
    """What a body does: one effect, or the answer of whoever had it."""
    with database.engine.begin() as connection:
        execution = database.boundary.record_execution(connection, key, **more)
        if execution.is_done:
            return execution.result
        database.pay(connection, key, value)
        return execution.finish(value)


# Executions.


def test_a_committed_execution_answers_with_its_result(database):
    assert run_once(database, "k", 1) == 1
    assert run_once(database, "k", 2) == 1
    assert database.payments("k") == [1]


@pytest.mark.parametrize(
    "value", [None, 0, "", False, {"a": [1, None]}, Decimal("1.10"), datetime(2026, 11, 29, 12, tzinfo=UTC)], ids=repr
)
def test_any_json_value_is_a_result(database, value):
    for expected_done in (False, True):
        with database.engine.begin() as connection:
            execution = database.boundary.record_execution(connection, "k")
            assert execution.is_done is expected_done
            if not expected_done:
                assert execution.finish(value) == value
    assert execution.result == value
    assert type(execution.result) is type(value)


def test_an_effect_that_was_finished_with_nothing_has_the_result_none(database):
    with database.engine.begin() as connection:
        assert not database.boundary.record_execution(connection, "k").is_done
    with database.engine.begin() as connection:
        execution = database.boundary.record_execution(connection, "k")
        assert (execution.is_done, execution.result) == (True, None)


def test_a_rolled_back_transaction_frees_the_key(database):
    def fail():
        with database.engine.begin() as connection:
            database.boundary.record_execution(connection, "k").finish(1)
            database.pay(connection, "k", 1)
            raise KeyError("after the effect")

    with pytest.raises(KeyError):
        fail()
    assert database.count(database.boundary.execution) == 0
    assert run_once(database, "k", 2) == 2
    assert database.payments("k") == [2]


def test_of_twentyfive_claims_of_one_key_one_wins_and_all_have_its_result(database):
    start = threading.Barrier(25)

    def claim(number):
        start.wait(10)
        return run_once(database, "k", number)

    with ThreadPoolExecutor(25) as threads:
        results = list(threads.map(claim, range(25)))
    assert len(set(results)) == 1
    assert database.payments("k") == [results[0]]


@pytest.mark.parametrize("ends", ["commits", "rolls back"])
def test_a_second_transaction_waits_for_the_end_of_the_first(postgresql, ends):
    with ThreadPoolExecutor(1) as threads, postgresql.engine.connect() as first:
        execution = postgresql.boundary.record_execution(first, "k")
        postgresql.pay(first, "k", 1)
        execution.finish(1)
        second = threads.submit(run_once, postgresql, "k", 2)
        wait_until(postgresql.waiting, 10, "the second waits for the first")
        assert not second.done()
        first.commit() if ends == "commits" else first.rollback()
        assert second.result(10) == (1 if ends == "commits" else 2)
    assert postgresql.payments("k") == [1 if ends == "commits" else 2]


def test_a_wait_for_a_claim_in_flight_is_no_answer_and_can_be_bounded(postgresql):
    with postgresql.engine.connect() as first, postgresql.engine.connect() as second:
        postgresql.boundary.record_execution(first, "k", payload=1)
        second.execute(text("SET LOCAL lock_timeout = '50ms'"))
        with pytest.raises(OperationalError, match="lock timeout"):
            postgresql.boundary.record_execution(second, "k", payload=2)
        second.rollback()
        first.commit()
        with pytest.raises(PayloadMismatch):
            postgresql.boundary.record_execution(second, "k", payload=2)


def test_a_key_whose_row_is_deleted_just_then_is_claimed(database):
    run_once(database, "k", 1)
    with database.engine.begin() as connection:
        taken = []

        @event.listens_for(connection, "before_cursor_execute")
        def delete(_, cursor, statement, *__):
            if statement.startswith("SELECT") and not taken:
                taken.append(statement)
                connection.execute(database.boundary.execution.delete())

        assert not database.boundary.record_execution(connection, "k").is_done
        assert taken


def test_another_payload_is_refused_and_the_same_one_in_another_order_is_not(database):
    assert run_once(database, "k", 1, payload={"cents": 5, "to": "a"}) == 1
    assert run_once(database, "k", 2, payload={"to": "a", "cents": 5}) == 1
    with pytest.raises(PayloadMismatch) as refused:
        run_once(database, "k", 3, payload={"to": "b", "cents": 5})
    assert isinstance(refused.value, ExecutionKeyReused)
    assert database.payments("k") == [1]


def test_another_task_is_refused(database):
    run_once(database, "k", 1, task="shop.pay")
    with pytest.raises(ExecutionKeyReused) as refused:
        run_once(database, "k", 2, task="shop.refund")
    assert refused.value.args == ("k", "shop.pay")
    assert not isinstance(refused.value, PayloadMismatch)


def test_a_key_is_unique_in_its_scope(database):
    assert run_once(database, "k", 1, scope="pay") == 1
    assert run_once(database, "k", 2, scope="refund") == 2


def test_long_keys_are_told_apart_by_their_ends(database):
    long = "x" * 3000
    assert run_once(database, f"{long}1", 1, scope=long, task=long) == 1
    assert run_once(database, f"{long}2", 2, scope=long, task=long) == 2
    assert run_once(database, f"{long}1", 3, scope=long, task=long) == 1


def test_a_used_up_record_refuses_use(database):
    with database.engine.begin() as connection:
        execution = database.boundary.record_execution(connection, "k")
        with pytest.raises(SingleflightError, match="no result yet"):
            _ = execution.result
        execution.finish(1)
        with pytest.raises(SingleflightError, match="result already"):
            execution.finish(2)
    with database.engine.begin() as connection, pytest.raises(SingleflightError, match="result already"):
        database.boundary.record_execution(connection, "k").finish(3)
    assert run_once(database, "k", 4) == 1


def test_a_claim_that_went_with_a_savepoint_cannot_be_finished(postgresql):
    with postgresql.engine.begin() as connection:
        savepoint = connection.begin_nested()
        execution = postgresql.boundary.record_execution(connection, "k")
        savepoint.rollback()
        with pytest.raises(SingleflightError, match="not claimed any more"):
            execution.finish(1)


def test_a_result_without_a_json_form_leaves_nothing(database):
    def finish_with_an_object():
        with database.engine.begin() as connection:
            execution = database.boundary.record_execution(connection, "k")
            database.pay(connection, "k", 1)
            execution.finish(object())

    with pytest.raises(TypeError):
        finish_with_an_object()
    assert database.count(database.boundary.execution) == 0
    assert database.payments("k") == []


@pytest.mark.parametrize("kind", ["session", "scoped session"])
def test_a_session_is_taken_with_what_it_has_pending(database, kind):
    class Entity:
        pass

    from sqlalchemy.orm import registry  # noqa: PLC0415, for this test only

    registry().map_imperatively(Entity, database.payment)
    make = sessionmaker(database.engine)
    with make() if kind == "session" else scoped_session(make)() as session, session.begin():
        execution = database.boundary.record_execution(session, "k")
        database.boundary.check_fence(session, "r", 1)
        entity = Entity()
        entity.key, entity.value = "k", 7
        session.add(entity)
        assert execution.finish(7) == 7
    assert run_once(database, "k", 8) == 7
    assert database.payments("k") == [7]


# Fences.


def write(database, resource, token, value):
    with database.engine.begin() as connection:
        database.boundary.check_fence(connection, resource, token)
        database.pay(connection, resource, value)


def test_a_smaller_token_is_refused_and_an_equal_one_is_not(database):
    greatest = 2**53
    write(database, "r", greatest - 1, 1)
    write(database, "r", greatest - 1, 2)
    write(database, "r", greatest, 3)
    with pytest.raises(StaleToken) as refused:
        write(database, "r", greatest - 1, 4)
    assert refused.value.args == ("r", greatest - 1, greatest)
    write(database, "another", 1, 5)
    assert database.payments("r") == [1, 2, 3]


def test_a_token_of_a_rolled_back_transaction_was_not_seen(database):
    with database.engine.connect() as connection:
        database.boundary.check_fence(connection, "r", 9)
        connection.rollback()
    write(database, "r", 5, 1)
    assert database.payments("r") == [1]


def test_a_late_writer_that_waited_is_judged_by_what_was_committed_meanwhile(postgresql):
    write(postgresql, "r", 1, 1)
    with ThreadPoolExecutor(1) as threads, postgresql.engine.connect() as newer:
        postgresql.boundary.check_fence(newer, "r", 3)
        late = threads.submit(write, postgresql, "r", 2, 2)
        wait_until(postgresql.waiting, 10, "the late writer waits")
        postgresql.pay(newer, "r", 3)
        newer.commit()
        assert isinstance(late.exception(10), StaleToken)
    assert postgresql.payments("r") == [1, 3]


def test_under_concurrency_the_values_of_committed_writes_never_go_back(database):
    tokens = [token for token in range(1, 16) for _ in range(2)]

    def attempt(token):
        try:
            write(database, "r", token, token)
        except StaleToken as stale:
            return stale.seen > token
        return True

    with ThreadPoolExecutor(15) as threads:
        assert all(threads.map(attempt, reversed(tokens)))
    written = database.payments("r")
    assert written == sorted(written)
    assert written[-1] == 15


# A protected task.


def test_claim_takes_key_token_and_lock_name_of_the_run(database, place):
    def pay(self, account, cents):
        with Session(database.engine) as session, session.begin():
            execution = database.boundary.claim(session, self, payload=cents)
            if execution.is_done:
                return execution.result
            database.pay(session.connection(), account, cents)
            return execution.finish({"cents": cents, "token": self.lease.fencing_token})

    task = place.task(pay, bind=True, lock_on=("account",), idempotent_on="pay:{account}", lock_name="accounts")
    first = task.apply(("a", 5)).get()
    place.client.flushall()  # the store forgets, the database does not
    assert task.apply(("a", 5)).get() == first
    assert database.payments("a") == [5]
    with database.engine.connect() as connection:
        assert connection.execute(select(database.boundary.execution)).one()[:3] == ("accounts", "pay:a", task.name)
        resource, token, _ = connection.execute(select(database.boundary.fence)).one()
    assert resource == 'accounts["a"]'
    assert token > first["token"]
    place.client.flushall()
    with pytest.raises(PayloadMismatch):
        task.apply(("a", 6)).get()


def test_claim_refuses_a_run_that_nothing_fences(database, place):
    def work(self):
        with database.engine.begin() as connection:
            database.boundary.claim(connection, self)

    with pytest.raises(FencingUnavailable):
        place.task(work, bind=True, lock_limit=2).apply().get()
    assert database.count(database.boundary.execution) == 0


def test_claim_refuses_a_run_without_a_lease(database, make_place, monkeypatch):
    place = make_place()

    def work(self):
        with database.engine.begin() as connection:
            database.boundary.claim(connection, self)

    task = place.task(work, bind=True, store_error_policy="run")

    def away(*_):
        raise StoreUnavailable("away")

    monkeypatch.setattr("celery_singleflight.store.Store.enter", away)
    with pytest.raises(StoreUnavailable):
        task.apply().get()
    assert database.count(database.boundary.execution) == 0


# The tables.


def migrations(database, metadata):
    with database.engine.connect() as connection:
        options = {
            "compare_type": True,
            "compare_server_default": True,
            "include_schemas": database.schema is not None,
            "include_name": lambda name, kind, _: name == database.schema if kind == "schema" else name != "payment",
        }
        return compare_metadata(MigrationContext.configure(connection, opts=options), metadata)


def test_alembic_finds_nothing_to_do_where_the_metadata_is_included(database):
    assert migrations(database, database.boundary.metadata) == []
    assert len(migrations(database, MetaData())) == 3, "it does look"


def test_names_are_the_callers_and_so_is_the_metadata(database):
    metadata = MetaData(naming_convention={"pk": "pk_%(table_name)s"})
    Table("business", metadata, Column("id", Integer, primary_key=True), schema=database.schema)
    boundary = Boundary(prefix="sf_", schema=database.schema, metadata=metadata)
    boundary.metadata.create_all(database.engine)
    names = set(inspect(database.engine).get_table_names(schema=database.schema))
    assert {"business", "sf_execution", "sf_fence", "sf_outbox"} <= names
    both = migrations(database, metadata)
    assert {change[0] for change in both} == {"remove_table"}, "of the other boundary, which this metadata does not have"


def test_a_connection_that_commits_each_statement_is_refused(database):
    engine = database.engine.execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection, pytest.raises(ConfigurationError, match="commits each statement"):
        database.boundary.record_execution(connection, "k")
    assert database.count(database.boundary.execution) == 0


def test_an_engine_that_commits_each_statement_is_refused(postgresql):
    engine = create_engine(postgresql.url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection, pytest.raises(ConfigurationError, match="commits each statement"):
        postgresql.boundary.check_fence(connection, "r", 1)
    engine.dispose()


def test_another_database_is_refused(sqlite, monkeypatch):
    with sqlite.engine.connect() as connection:
        monkeypatch.setattr(connection.dialect, "name", "oracle")
        with pytest.raises(ConfigurationError, match="expected postgresql or sqlite, got oracle"):
            sqlite.boundary.check_fence(connection, "r", 1)


def test_the_core_does_not_know_of_sqlalchemy():
    code = "import sys, celery_singleflight.commands, celery_singleflight.sweeper; print('sqlalchemy' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout == "False\n"
