"""A trigger that has run before is no newcomer: its retries, what a dead worker left, and what the broker delivers twice."""

from __future__ import annotations

import json
import os
import signal

import pytest
import redis
from aftermath import record_of
from nodes import redis_settings, wait_until

from celery_singleflight import Contended, lock


def waits_for(result):
    """Wait until the trigger waits for somebody else's lease."""
    wait_until(lambda: result.state == "RETRY" and isinstance(result.result, Contended), 20, "it waits")


def test_a_retry_under_skip_is_not_skipped_by_its_own_first_attempt(place, key):
    results = [place.task("skip_or_retry").delay(f"{key}-{n}") for n in range(10)]
    assert [result.get(timeout=30) for result in results] == [2] * 10
    for n in range(10):
        assert [row["part"] for row in place.ledger.runs(f"{key}-{n}")] == [1, 2]
        assert place.ledger.overlaps(f"{key}-{n}") == 0


def test_a_retry_under_skip_waits_for_another_triggers_lease(place, key):
    result = place.task("skip_or_retry").delay(key, countdown=1)
    wait_until(lambda: place.ledger.read(key, "end"), what="the first attempt has ended")
    with lock(place.app, "protected_app.work", key, wait=10):
        waits_for(result)
        newcomer = place.task("skip").delay(key)
        assert newcomer.get(timeout=20) == "skipped"
    assert result.get(timeout=30) == 2
    assert [row["part"] for row in place.ledger.runs(key)] == [1, 2]


def test_a_trigger_under_skip_whose_worker_died_waits_for_another_triggers_lease(start_place, valkey, key):
    place = start_place(redis_settings(valkey.url, singleflight_lease_ttl=2), workers=1)
    (worker,) = place.workers
    result = place.task("skip").delay(key, "done", gate=key)
    wait_until(lambda: place.ledger.runs(key), what="the body has begun")
    os.killpg(worker.container.pid, signal.SIGKILL)
    worker.container.process.wait(10)

    with lock(place.app, "protected_app.work", key, wait=20):
        worker.restart()
        waits_for(result)
    place.ledger.open(key)
    assert result.get(timeout=30) == "done"
    assert [row["task_id"] for row in place.ledger.runs(key)] == [result.id] * 2


def nothing_waits(place, result):
    """Wait until no worker has a message of the trigger any more."""

    def held():
        return result.id in json.dumps(place.held_by_workers(), default=str)

    queue, broker = place.app.conf.task_default_queue, redis.Redis.from_url(place.app.conf.broker_url)
    wait_until(lambda: not broker.llen(queue) and not held(), 30, "no copy of it waits")


@pytest.mark.parametrize("ttl", [0, 1])
@pytest.mark.parametrize("kept_by", ["task_id", "execution_key"])
def test_a_message_that_comes_again_after_its_end_runs_nothing_however_short_its_result_is_kept(place, key, kept_by, ttl):
    broker = redis.Redis.from_url(place.app.conf.broker_url)
    queue = place.app.conf.task_default_queue
    task = place.task(f"forget_{kept_by}_{ttl}")
    result = task.apply_async((key, key), link=place.task("note").si(f"{key}-link"))
    wait_until(lambda: place.ledger.runs(key), what="the body has begun")
    # What the broker would give out again: it is not acknowledged yet.
    (message,) = [json.loads(value)[0] for value in broker.hvals("unacked") if result.id.encode() in value]

    def comes_again():
        seen = place.logs().count(f"[{result.id}] received")
        broker.lpush(queue, json.dumps(message))
        wait_until(lambda: place.logs().count(f"[{result.id}] received") > seen, what="it has come again")

    comes_again()
    place.ledger.open(key)
    assert result.get(timeout=20) == "done"
    comes_again()
    store = place.store()
    wait_until(lambda: not list(store.scan_iter(f"*:execution:*once:{key}")), 10, "the execution is forgotten")
    for is_settled in (False, True):  # while Celery may be sending what follows, and when it has done so
        if is_settled:
            wait_until(lambda: record_of(place, result.id).get("settled"), 15, "what follows was sent")
        comes_again()
        nothing_waits(place, result)
    assert len(place.ledger.runs(key)) == 1
    assert len(place.ledger.read(f"{key}-link")) == 1
