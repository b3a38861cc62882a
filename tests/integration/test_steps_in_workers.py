"""Steps in real workers of every pool, over retries and further triggers, and in a process that is none."""

from __future__ import annotations

import pytest
import steps_app
from celery.exceptions import SoftTimeLimitExceeded
from nodes import redis_settings, wait_until


@pytest.fixture(scope="module", params=["prefork", "threads", "solo"])
def pool(request, start_shared, valkey):
    """A worker of that pool."""
    return start_shared(redis_settings(valkey.url), app_module=steps_app, workers=1, pool=request.param)


@pytest.fixture(scope="module")
def prefork(start_shared, valkey):
    return start_shared(redis_settings(valkey.url), app_module=steps_app, workers=1)


def names(place, key, what="effect"):
    return [row["name"] for row in place.ledger.read(key, what)]


def kept(place, execution):
    return list(place.store().scan_iter(f"*:steps:*{execution}", count=1000))


def test_a_task_that_retries_does_its_steps_once(pool, key):
    result = pool.task("three").delay(key, then="retry")
    attempt, run_id = result.get(timeout=20)
    assert attempt == 3
    assert names(pool, key) == ["one", "two", "three"]
    assert [(row["attempt"], row["run"]) for row in pool.ledger.read(key, "begin")] == [(n, run_id) for n in (1, 2, 3)]
    wait_until(lambda: kept(pool, result.id) == [], 5, "what it has done is forgotten")


def test_a_task_that_fails_undoes_its_steps(pool, key):
    with pytest.raises(ValueError, match=key):
        pool.task("three").delay(key, then="fail").get(timeout=20)
    assert names(pool, key, "undo") == ["three", "two", "one"]


def test_parts_are_done_once_and_all(pool, key):
    assert pool.task("parts").delay(key, 50, every=7).get(timeout=20) == 1
    assert [row["part"] for row in pool.ledger.read(key, "part")] == list(range(50))


def test_after_a_failure_another_trigger_with_the_execution_key_does_it_all_anew(prefork, key):
    task = prefork.task("three_by_key")
    with pytest.raises(ValueError, match=key):
        task.delay(key, then="fail").get(timeout=20)
    _, run_id = task.delay(key).get(timeout=20)
    assert names(prefork, key) == ["one", "two", "three"] * 2
    first, second = (row["run"] for row in prefork.ledger.read(key, "begin"))
    assert first != second == run_id
    assert task.delay(key).get(timeout=20) == [1, run_id], "and a third gets its result"


def test_the_soft_time_limit_leaves_the_step_it_fell_into_and_undoes_those_that_are_done(prefork, key):
    result = prefork.task("too_slow").delay(key)
    with pytest.raises(SoftTimeLimitExceeded):
        result.get(timeout=20)
    assert names(prefork, key, "undo") == ["one"]
    (name,) = kept(prefork, result.id)
    states = {field: line.partition(b"\n")[0] for field, line in prefork.store().hgetall(name).items()}
    assert (states[b"step:one"], states[b"step:slow"]) == (b"undone", b"begun")


def test_a_direct_call_in_a_script_has_steps(prefork, key):
    before = len(kept(prefork, ""))
    attempt, _ = prefork.task("three")(key)
    assert attempt == 1
    assert names(prefork, key) == ["one", "two", "three"]
    assert len(kept(prefork, "")) == before
