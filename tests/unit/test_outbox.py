"""The outbox: what is committed is published, in the order in which it was written, by one of those who look."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from celery import Celery, chain, group
from kombu.exceptions import OperationalError as BrokerAway
from nodes import wait_until
from sqlalchemy import create_engine, event, select, text
from sqlalchemy.orm import Session

from celery_singleflight import OptionError, outbox
from celery_singleflight.coordination import coordination
from celery_singleflight.looks import look_also
from celery_singleflight.sql import Outbox
from celery_singleflight.sweeper import Sweeper


@pytest.fixture
def shop(place):
    """An app with a protected task."""

    def work(x, y=0):
        return x + y

    place.work = place.task(work)
    return place


@pytest.fixture
def box(shop, database):
    """The outbox of that app, in each database in turn."""
    return Outbox(shop.app, database.boundary, lambda: database.engine)


def put(database, *signatures):
    with database.engine.begin() as connection:
        return [database.boundary.send(connection, signature) for signature in signatures]


def published(place):
    return [(message.headers["id"], message.payload[0]) for message in place.messages()]


def test_what_is_committed_is_published_once_in_order(shop, box, database):
    ids = put(database, *(shop.work.si(n) for n in range(3)))
    box.look(shop.app)
    box.look(shop.app)
    assert published(shop) == [(ids[n], [n]) for n in range(3)]
    assert database.count(database.boundary.outbox) == 0


def test_what_is_rolled_back_is_never_published(shop, box, database):
    with database.engine.connect() as connection:
        database.boundary.send(connection, shop.work.si(1))
        connection.rollback()
    box.look(shop.app)
    assert published(shop) == []


def test_what_is_not_committed_yet_is_not_published_and_keeps_nobody_waiting(shop, postgresql):
    look = Outbox(shop.app, postgresql.boundary, lambda: postgresql.engine).look
    with postgresql.engine.connect() as connection:
        postgresql.boundary.send(connection, shop.work.si(1))
        (later,) = put(postgresql, shop.work.si(2))
        look(shop.app)
        assert published(shop) == [(later, [2])]
        connection.commit()
    look(shop.app)
    assert [args for _, args in published(shop)] == [[1]]


def test_a_session_may_send(shop, box, database):
    with Session(database.engine) as session, session.begin():
        task_id = database.boundary.send(session, shop.work.si(1))
    box.look(shop.app)
    assert published(shop) == [(task_id, [1])]


def test_arguments_and_options_arrive(shop, box, database):
    at = datetime(2026, 11, 29, 12, tzinfo=UTC)
    call = shop.work.s(1, y=2).set(
        task_id="mine", execution_key="pay:1", priority=3, headers={"custom": "c"}, expires=60, link=shop.work.si(at)
    )
    assert put(database, call) == ["mine"]
    box.look(shop.app)
    (message,) = shop.messages()
    args, kwargs, embed = message.payload
    assert (args, kwargs) == ([1], {"y": 2})
    assert message.headers["id"] == message.headers["root_id"] == "mine"
    assert message.headers["singleflight_execution_key"] == "pay:1"
    assert message.headers["singleflight_key"] == shop.lock_key(shop.work.name, 1, 2).text
    assert message.headers["custom"] == "c"
    assert message.properties["priority"] == 3
    assert datetime.fromisoformat(message.headers["expires"]) > datetime.now(UTC) + timedelta(seconds=30)
    assert embed["callbacks"][0]["task"] == shop.work.name


def test_a_queue_and_a_task_of_another_service_are_taken_as_they_are(shop, box, database):
    put(database, shop.app.signature("elsewhere.work", args=(1,), queue="elsewhere"))
    box.look(shop.app)
    with shop.app.connection_for_read() as connection:
        message = connection.SimpleQueue("elsewhere").get(block=False)
    assert message.headers["task"] == "elsewhere.work"


def test_what_can_never_be_published_is_refused_where_it_is_sent(shop, database):
    with database.engine.connect() as connection:
        for wrong, error, says in (
            (chain(shop.work.si(1), shop.work.si(2)), TypeError, "one task, got a chain"),
            (group(shop.work.si(1)), TypeError, "one task, got a group"),
            (shop.work, TypeError, "signature of one task"),
            (shop.work.si(), TypeError, "x"),
            (shop.work.si(object()), TypeError, "object"),
            (shop.work.si(1).set(exection_key="k"), OptionError, "did you mean execution_key"),
            (shop.work.si(1).set(execution_key=5), OptionError, "expected a text"),
        ):
            with pytest.raises(error, match=says):
                database.boundary.send(connection, wrong)
        connection.commit()
    assert database.count(database.boundary.outbox) == 0


def test_a_process_that_dies_between_publish_and_delete_leaves_the_row(shop, box, database, monkeypatch):
    (task_id,) = put(database, shop.work.si(1))
    publish = outbox._publish

    def publish_and_die(*args):
        publish(*args)
        raise SystemExit

    monkeypatch.setattr(outbox, "_publish", publish_and_die)
    with pytest.raises(SystemExit):
        box.look(shop.app)
    monkeypatch.setattr(outbox, "_publish", publish)
    assert database.count(database.boundary.outbox) == 1
    box.look(shop.app)
    assert database.count(database.boundary.outbox) == 0
    assert published(shop) == [(task_id, [1])] * 2


def test_a_message_that_was_published_twice_runs_once(place, database, monkeypatch):
    runs = []

    def work(x):
        runs.append(x)
        return x

    task = place.task(work)
    box = Outbox(place.app, database.boundary, lambda: database.engine)
    (task_id,) = put(database, task.si(1))
    publish = outbox._publish
    monkeypatch.setattr(outbox, "_publish", lambda *args: [publish(*args), publish(*args)])
    box.look(place.app)
    messages = place.messages()
    assert [message.headers["id"] for message in messages] == [task_id] * 2
    for message in messages:
        place.deliver(message)
        coordination(place.app).heartbeat.flush()
    assert runs == [1]
    assert place.messages() == []
    assert place.app.AsyncResult(task_id).get(timeout=1) == 1


class Stopped:
    """A look of another worker that stands still behind its first publish, with its rows claimed."""

    def __init__(self, shop, database, monkeypatch, engine=None):
        self.box = Outbox(shop.app, database.boundary, engine or database.engine)
        self._reached, self._goes_on, publish = threading.Event(), threading.Event(), outbox._publish
        me = threading.get_ident()

        def stop(app, row):
            publish(app, row)
            if threading.get_ident() != me and not self._reached.is_set():
                self._reached.set()
                assert self._goes_on.wait(20)

        monkeypatch.setattr(outbox, "_publish", stop)
        self._threads = ThreadPoolExecutor(1)
        self._look = self._threads.submit(self.box.look, shop.app)
        assert self._reached.wait(10)

    def go_on(self):
        self._goes_on.set()
        self._look.result(10)
        self._threads.shutdown()


def test_two_that_look_at_once_publish_each_row_once(shop, box, database, monkeypatch):
    ids = put(database, *(shop.work.si(n) for n in range(3)))
    stopped = Stopped(shop, database, monkeypatch)
    box.look(shop.app)
    stopped.go_on()
    Outbox(shop.app, database.boundary, lambda: database.engine).look(shop.app)
    assert sorted(task_id for task_id, _ in published(shop)) == sorted(ids)
    assert database.count(database.boundary.outbox) == 0


def test_who_looks_does_not_wait_for_the_rows_of_another(shop, postgresql, monkeypatch):
    monkeypatch.setattr(outbox, "_AT_ONCE", 2)
    put(postgresql, *(shop.work.si(n) for n in range(3)))
    stopped = Stopped(shop, postgresql, monkeypatch)
    Outbox(shop.app, postgresql.boundary, lambda: postgresql.engine).look(shop.app)
    assert [args for _, args in published(shop)] == [[0], [2]]
    stopped.go_on()
    assert [args for _, args in published(shop)] == [[1]]


def test_rows_of_a_process_that_stands_still_are_another_s_after_a_while(shop, postgresql, monkeypatch, caplog):
    monkeypatch.setattr(outbox, "_LONGEST_SILENCE", 500)
    (task_id,) = put(postgresql, shop.work.si(1))
    stopped = Stopped(shop, postgresql, monkeypatch)
    box = Outbox(shop.app, postgresql.boundary, lambda: postgresql.engine)

    def is_empty():
        box.look(shop.app)
        return postgresql.count(postgresql.boundary.outbox) == 0

    wait_until(is_empty, 10, "another one publishes the row")
    stopped.go_on()
    assert "the outbox publishes nothing until it can" in caplog.text, "the one that stood still has lost its transaction"
    sent = [each for each, _ in published(shop)]
    # More than twice where the other one, too, was silent for that long on a busy machine.
    assert len(sent) >= 2, "sent by both"
    assert set(sent) == {task_id}, "one trigger"


def test_a_row_that_cannot_be_published_keeps_no_other_and_is_tried_again_later_and_later(
    shop, box, database, monkeypatch, caplog
):
    publish = outbox._publish

    def refuse_the_first(app, row):
        if row.task_id == first:
            raise ValueError("no such thing")
        publish(app, row)

    first, second = put(database, shop.work.si(1), shop.work.si(2))
    table = database.boundary.outbox
    monkeypatch.setattr(outbox, "_publish", refuse_the_first)
    pauses = []
    for _ in range(3):
        box.look(shop.app)
        with database.engine.begin() as connection:
            row = connection.execute(select(table)).one()
            due_at = row.due_at if row.due_at.tzinfo else row.due_at.replace(tzinfo=UTC)
            pauses.append((due_at - datetime.now(UTC)).total_seconds())
            box.look(shop.app)  # it is not due
            connection.execute(table.update().values(due_at=datetime.now(UTC)))
    assert [round(pause) for pause in pauses] == [2, 4, 8]
    assert caplog.text.count("cannot be published") == 3
    assert published(shop) == [(second, [2])]
    monkeypatch.setattr(outbox, "_publish", publish)
    box.look(shop.app)
    assert published(shop) == [(first, [1])]


@pytest.fixture
def clock(monkeypatch):
    class Time:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock = Time()
    monkeypatch.setattr(outbox, "time", clock)
    return clock


def test_while_the_broker_is_away_what_went_is_gone_the_rest_stays_and_the_looks_get_rarer(
    shop, box, database, monkeypatch, caplog, clock
):
    first, second = put(database, shop.work.si(1), shop.work.si(2))
    send, calls = shop.app.amqp.send_task_message, []

    def refuse_the_second(producer, name, message, **options):
        calls.append(message.headers["id"])
        if message.headers["id"] == second:
            raise BrokerAway("away")
        return send(producer, name, message, **options)

    monkeypatch.setattr(shop.app.amqp, "send_task_message", refuse_the_second)
    for _ in range(70):
        box.look(shop.app)
        clock.now += 0.5
    assert calls == [first] + [second] * 5, "at 0, 2, 6, 14 and 29 s"
    assert published(shop) == [(first, [1])]
    assert database.count(database.boundary.outbox) == 1
    assert "the broker does not take" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(outbox, "time", clock)
    clock.now += 15
    box.look(shop.app)
    assert published(shop) == [(second, [2])]


def test_a_look_ends_when_it_has_lasted_long_enough_and_the_next_goes_on(shop, box, database, monkeypatch, clock):
    put(database, *(shop.work.si(n) for n in range(3)))
    publish = outbox._publish

    def publish_slowly(*args):
        publish(*args)
        clock.now += 0.3

    monkeypatch.setattr(outbox, "_publish", publish_slowly)
    box.look(shop.app)
    assert [args for _, args in published(shop)] == [[0], [1]]
    box.look(shop.app)
    assert [args for _, args in published(shop)] == [[2]]


def test_a_database_that_is_away_is_told_and_raises_nothing(place, database, caplog):
    box = Outbox(place.app, database.boundary, lambda: create_engine("postgresql+psycopg://postgres@127.0.0.1:1/nothing"))
    box.look(place.app)
    assert "the outbox publishes nothing until it can" in caplog.text
    assert len(caplog.records) == 1
    assert "\n" not in caplog.records[0].getMessage()


def test_whatever_goes_wrong_raises_nothing(place, database, caplog):
    def make():
        raise KeyError("a setting")

    Outbox(place.app, database.boundary, make).look(place.app)
    assert "a look into the outbox failed" in caplog.text


def test_a_lock_on_the_table_stops_a_look_within_its_half_second(shop, postgresql, caplog):
    put(postgresql, shop.work.si(1))
    box = Outbox(shop.app, postgresql.boundary, lambda: postgresql.engine)
    with postgresql.engine.connect() as connection:
        connection.execute(text(f"LOCK TABLE {postgresql.boundary.outbox.fullname} IN ACCESS EXCLUSIVE MODE"))
        box.look(shop.app)
    assert "statement timeout" in caplog.text
    assert published(shop) == []


# Engines and forks.


def test_a_given_engine_keeps_its_pool_for_itself(shop, postgresql):
    engine = create_engine(postgresql.url)
    box = Outbox(shop.app, postgresql.boundary, engine)
    put(postgresql, shop.work.si(1))
    box.look(shop.app)
    assert len(published(shop)) == 1
    assert engine.pool.checkedin() == engine.pool.checkedout() == 0, "no connection that a process that forks would inherit"
    _, own = box._own
    assert own.pool.checkedin() == 1
    own.dispose()


def test_an_engine_that_commits_each_statement_claims_rows_all_the_same(shop, postgresql, monkeypatch):
    (task_id,) = put(postgresql, shop.work.si(1))
    stopped = Stopped(shop, postgresql, monkeypatch, create_engine(postgresql.url, isolation_level="AUTOCOMMIT"))
    Outbox(shop.app, postgresql.boundary, postgresql.engine).look(shop.app)
    stopped.go_on()
    assert published(shop) == [(task_id, [1])]
    stopped.box._own[1].dispose()


def test_what_was_set_up_for_an_engine_holds_for_the_outbox_too(shop, database):
    engine = create_engine(database.url)
    connects = []
    event.listen(engine, "connect", lambda *_: connects.append(1))
    box = Outbox(shop.app, database.boundary, engine)
    put(database, shop.work.si(1))
    box.look(shop.app)
    assert len(published(shop)) == len(connects) == 1
    box._own[1].dispose()


def test_an_engine_is_made_at_the_first_look_and_by_each_process_for_itself(shop, database, monkeypatch):
    made = []

    def make():
        made.append(os.getpid())
        return database.engine

    box = Outbox(shop.app, database.boundary, make)
    assert made == []
    box.look(shop.app)
    box.look(shop.app)
    assert len(made) == 1
    monkeypatch.setattr(os, "getpid", lambda: -1)
    box.look(shop.app)
    assert made[1:] == [-1]


# The sweeper.


def test_the_sweeper_looks_into_the_outbox(shop, box, database):
    (task_id,) = put(database, shop.work.si(1))
    Sweeper(shop.app).look()
    assert published(shop) == [(task_id, [1])]


def test_the_sweeper_of_an_app_without_protected_tasks_looks_too():
    app, seen = Celery(set_as_current=False), []
    look_also(app, seen.append)
    Sweeper(app).look()
    assert seen == [app]


def test_the_sweeper_looks_into_the_outbox_while_the_store_is_away(shop, box, database, monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    (task_id,) = put(database, shop.work.si(1))

    def away(*_, **__):
        raise ValueError("whatever")

    monkeypatch.setattr("celery_singleflight.store.Store.due", away)
    Sweeper(shop.app).look()
    assert "a look of the sweeper failed" in caplog.text
    assert published(shop) == [(task_id, [1])]
