"""How long a lease may last and a trigger may wait: what ends there ends once, and nobody else is kept from running."""

from __future__ import annotations

from uuid import uuid4

import pytest
import redis
from nodes import WorkerContainer, redis_settings, wait_until

from celery_singleflight import MaxHoldExceeded, NestedLeaseLost, WaitTimeout


def fails_once(place, result, key):
    """The error of a run that was cut off, whose errback has run once."""
    with pytest.raises(Exception, match="max_hold") as caught:
        result.get(timeout=30)
    assert result.state == "FAILURE"
    wait_until(lambda: place.ledger.read(f"{key}-error"), what="the errback has run")
    return caught.value


def publish(place, name, key, seconds):
    return place.task(name).apply_async((key, seconds), link_error=place.task("note_error").s(f"{key}-error"))


def nothing_is_left(place, *results):
    """Wait until neither the store nor the broker has a message of these triggers."""
    store = place.store()
    ids = tuple(result.id.encode() for result in results)

    def due():
        members = [member for name in store.scan_iter("*:due:*") for member in store.zrange(name, 0, -1)]
        return [member for member in members if member.startswith(ids)]

    wait_until(lambda: not due(), 20, "the triggers are settled")
    broker = redis.Redis.from_url(place.app.conf.broker_url)

    def undone():
        return broker.llen(place.app.conf.task_default_queue) or place.held_by_workers()

    wait_until(lambda: not undone(), 20, "no message is left in the broker")


def test_a_body_whose_inner_lock_outlives_its_hold_fails_once(place, key):
    result = publish(place, "outlive_inner_lock", key, 20)
    error = fails_once(place, result, key)
    assert type(error) is NestedLeaseLost
    assert error.lock_key == f'inner["{key}"]'
    nothing_is_left(place, result)
    assert len(place.ledger.runs(key)) == 1
    assert len(place.ledger.read(f"{key}-error")) == 1


def test_a_body_that_outlives_its_max_hold_fails_once_and_the_next_one_runs(place, key):
    result = publish(place, "outlive_max_hold", key, 20)
    wait_until(lambda: place.ledger.runs(key))
    waiting = publish(place, "outlive_max_hold", key, 0)

    error = fails_once(place, result, key)
    assert type(error) is MaxHoldExceeded
    assert (error.lock_key, error.max_hold) == (f'protected_app.outlive_max_hold["{key}"]', 1.0)
    assert waiting.get(timeout=20) == "done"
    nothing_is_left(place, result, waiting)
    assert [row["task_id"] for row in place.ledger.runs(key)] == [result.id, waiting.id]
    assert len(place.ledger.read(f"{key}-error")) == 1


def test_four_that_outlive_their_max_hold_run_once_each(place, key):
    results = [publish(place, "outlive_max_hold", key, 20) for _ in range(4)]
    for result in results:
        assert type(fails_once(place, result, key)) is MaxHoldExceeded
    wait_until(lambda: len(place.ledger.read(f"{key}-error")) == 4, what="each errback has run")
    nothing_is_left(place, *results)
    assert sorted(row["task_id"] for row in place.ledger.runs(key)) == sorted(result.id for result in results)
    assert len(place.ledger.read(f"{key}-error")) == 4


def test_a_time_limit_of_the_workers_command_line_bounds_a_lease(start_place, valkey, key):
    place = start_place(redis_settings(valkey.url), "--time-limit=7", workers=1)
    assert place.task("max_hold").delay(key).get(timeout=20) == 17
    limited = place.task("max_hold").apply_async((key,), time_limit=30)
    assert limited.get(timeout=20) == 40, "the limit of a call comes first"


def test_a_wait_on_a_quorum_queue_ends(start_place, valkey, rabbitmq, key):
    name = f"q-{uuid4().hex[:8]}"
    exchange = {"exchange": f"x-{name}", "exchange_type": "topic"}  # Celery delays natively on topic exchanges only
    queue = {**exchange, "routing_key": "work.#", "queue_arguments": {"x-queue-type": "quorum"}}
    settings = redis_settings(
        valkey.url,
        broker_url=rabbitmq,
        task_default_queue=name,
        task_queues={name: queue},
        task_default_exchange=exchange["exchange"],
        task_default_exchange_type="topic",
        task_default_routing_key="work.some",
        worker_detect_quorum_queues=True,
    )
    place = start_place(settings, workers=1)
    holder = place.task("work").delay(key, "holder", gate=key)
    wait_until(lambda: place.ledger.runs(key))

    waiting = place.task("work").apply_async((key, "waiting"), wait_timeout=0.5)  # below what native delays can count

    with pytest.raises(WaitTimeout) as caught:
        waiting.get(timeout=20)
    assert caught.value.task_id == holder.id
    place.ledger.open(key)
    assert holder.get(timeout=20) == "holder"
    assert len(place.ledger.runs(key)) == 1


def test_a_worker_of_protected_tasks_without_a_store_does_not_start(tmp_path):
    settings = {"broker_url": "memory://", "result_backend": "cache+memory://"}
    worker = WorkerContainer("storeless", settings, env={"TEST_LEDGER": str(tmp_path)}, pool="solo")
    try:
        wait_until(lambda: worker.status == "exited", 30, "the worker has gone")
        logs = worker.logs()
    finally:
        worker.teardown()
    assert worker.process.returncode != 0
    assert " ready." not in logs
    assert (
        "there is no store for leases: neither result_backend nor broker_url is a Redis URL; expected the setting "
        "singleflight_url, a URL such as redis://host:6379/0"
    ) in logs
