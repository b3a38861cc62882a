"""A process dies or stands still around a transaction of the caller's: one effect, no late write, each trigger published."""

from __future__ import annotations

import os
import signal

import pytest
import sql_app
from aftermath import assert_nothing_is_left, delete_queue, kill_child, messages_with, queue_on_rabbitmq
from crash_points import arm, deaths
from nodes import redis_settings, wait_until
from test_lost_processes import begun


@pytest.fixture
def start(start_place, valkey):
    """Start workers whose bodies write to a database."""

    def start(database, *, workers=2, concurrency=2, **settings):
        settings = {"singleflight_lease_ttl": 2, "crash_points": True, **settings, **sql_app.sql_settings(database)}
        return start_place(redis_settings(valkey.url, **settings), workers=workers, concurrency=concurrency, app_module=sql_app)

    return start


def publications(place, task_id):
    return place.ledger.read(task_id, "published")


@pytest.mark.parametrize("how", ["child", "worker"])
def test_a_death_between_commit_and_finish_costs_a_run_and_no_effect(start, database, key, how):
    place = start(database)
    arm(place.ledger, "body:end", how, key)
    result = place.task("charge").apply_async((key, 42), task_id=key)
    wait_until(lambda: deaths(place.ledger, key), 20, "it dies behind its commit")
    assert database.payments(key) == [42]
    assert result.get(timeout=30) == {"value": 42, "attempt": 1}, "the answer of the run whose effect is committed"
    assert len(place.ledger.runs(key)) == 2
    assert database.payments(key) == [42]
    assert_nothing_is_left(place, key, key)


def test_a_death_inside_of_the_transaction_leaves_nothing_and_the_next_run_does_it(start, postgresql, key):
    place = start(postgresql, workers=1)
    with postgresql.engine.connect() as blocker:
        # The run's own fence row is taken, so that it stands in its transaction.
        postgresql.boundary.check_fence(blocker, f'protected_app.charge["{key}"]', 1)
        result = place.task("charge").apply_async((key, 42), task_id=key)
        pid = begun(place, key)[0]["pid"]
        wait_until(postgresql.waiting, 10, "the run waits in its transaction")
        kill_child(place, pid)
        blocker.rollback()
    assert result.get(timeout=30) == {"value": 42, "attempt": 2}
    assert postgresql.payments(key) == [42]


def test_a_child_that_stood_still_past_its_lease_is_refused_by_the_fence(start, database, key):
    place = start(database)
    result = place.task("write_late").apply_async((key, key))
    first = begun(place, key)[0]
    os.kill(first["pid"], signal.SIGSTOP)
    try:
        second = begun(place, key, 2)[1]
        assert second["pid"] != first["pid"]
        place.ledger.open(f"{key}-2")
        assert result.get(timeout=20) == 2
        assert database.payments(key) == [2]
    finally:
        os.kill(first["pid"], signal.SIGCONT)
    (refused,) = wait_until(lambda: place.ledger.read(key, "refused"), 15, "the late write is refused")
    assert (refused["token"], refused["seen"], refused["pid"]) == (first["token"], second["token"], first["pid"])
    assert database.payments(key) == [2]
    assert_nothing_is_left(place, result.id, key)
    assert result.get(timeout=5) == 2


def test_what_is_committed_is_published_once_and_what_is_rolled_back_never(start, database, key):
    place = start(database)
    order = place.task("order")
    rolled_back = order.delay(f"{key}-no", fails=True)
    with pytest.raises(KeyError):
        rolled_back.get(timeout=20)
    order.delay(f"{key}-yes").get(timeout=20)
    assert place.app.AsyncResult(f"{key}-yes-next").get(timeout=20) == "next"
    wait_until(lambda: database.count(database.boundary.outbox) == 0, 10, "the outbox is empty")
    assert len(publications(place, f"{key}-yes-next")) == 1
    assert len(place.ledger.runs(f"{key}-yes-next")) == 1
    assert publications(place, f"{key}-no-next") == []
    assert database.payments(f"{key}-no") == []


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_what_is_committed_arrives_through_rabbitmq(start, postgresql, rabbitmq, key, kind):
    place = start(postgresql, workers=1, **queue_on_rabbitmq(rabbitmq, kind))
    try:
        place.task("order").delay(key).get(timeout=20)
        assert place.app.AsyncResult(f"{key}-next").get(timeout=20) == "next"
        wait_until(lambda: postgresql.count(postgresql.boundary.outbox) == 0, 10, "the outbox is empty")
        assert len(publications(place, f"{key}-next")) == 1
    finally:
        place.end()
        delete_queue(place)


def test_a_worker_dies_between_publish_and_delete_and_the_trigger_runs_once(start, database, key):
    place = start(database)
    (place.ledger.directory / f"crash-outbox-{key}").touch()
    with database.engine.begin() as connection:
        database.boundary.send(connection, place.task("work").si(key, "value").set(task_id=key))
    wait_until(lambda: deaths(place.ledger, key), 20, "a worker dies behind its publish")
    assert place.app.AsyncResult(key).get(timeout=20) == "value"
    wait_until(lambda: len(publications(place, key)) == 2, 20, "the other publishes it again")
    wait_until(lambda: database.count(database.boundary.outbox) == 0, 10, "the outbox is empty")
    assert_nothing_is_left(place, key, key)
    wait_until(lambda: messages_with(place, key) == 0, 20, "the broker has no message of it")
    assert len(place.ledger.runs(key)) == 1


def test_two_workers_that_sweep_one_outbox_publish_each_trigger_once(start, database, key):
    place = start(database)
    ids = [f"{key}-{n}" for n in range(120)]
    with database.engine.begin() as connection:
        for each in ids:
            database.boundary.send(connection, place.task("note").si(each).set(task_id=each))
    wait_until(lambda: database.count(database.boundary.outbox) == 0, 30, "the outbox is empty")
    wait_until(lambda: all(place.ledger.read(each, "note") for each in ids), 30, "each has run")
    assert [len(publications(place, each)) for each in ids] == [1] * len(ids)
    assert [len(place.ledger.read(each, "note")) for each in ids] == [1] * len(ids)
