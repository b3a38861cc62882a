"""The properties that other idempotency layers publish, each a test of its name, with a real worker and a real store."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier

import claims_app
import pytest
from celery import states
from crash_points import arm, deaths, live_overlaps
from nodes import redis_settings, wait_until

from celery_singleflight import PayloadMismatch

CLAIMS = 25


@pytest.fixture(scope="module")
def claimants(start_shared, valkey):
    """A worker of four processes, on a broker that delivers again after an hour."""
    settings = redis_settings(valkey.url, singleflight_lease_ttl=2, broker_transport_options={"visibility_timeout": 3600})
    return start_shared({**settings, "crash_points": True}, app_module=claims_app, workers=1, concurrency=4)


@pytest.fixture
def place(claimants, request):
    request.node.place = claimants
    return claimants


def effects(place, key):
    return len(place.ledger.read(key, "effect"))


def expire(place, key):
    """Let the lease of the claim on this key be over, as its holder's silence would."""
    store = place.store()
    (execution,) = store.scan_iter(f"*:execution:*:claim:{key}", count=1000)
    store.hset(execution, "until_ms", 1)
    (lease,) = (name for name in store.scan_iter("*:lease:*", count=1000) if name.decode().endswith(f'["{key}"]'))
    for owner, line in store.hgetall(lease).items():
        store.hset(lease, owner, b"\n".join([b"1", *line.split(b"\n")[1:]]))


@contextmanager
def expired_claim(place, key):
    """A claim whose process stands still, and whose lease is over; in the end it goes on and completes. Yields its result."""
    first = place.task("claim").delay(key, gate=key)
    (begin,) = wait_until(lambda: place.ledger.read(key, "begin"), 20, "it has claimed")
    os.kill(begin["pid"], signal.SIGSTOP)
    try:
        expire(place, key)
        yield first
    finally:
        os.kill(begin["pid"], signal.SIGCONT)
    wait_until(lambda: place.ledger.read(key, "lost"), 20, "it hears that it has been taken over")
    place.ledger.open(f"{key}-late")


def test_an_expired_claim_is_not_reclaimable_by_another_payload(place, key):
    with expired_claim(place, key) as first:
        other = place.task("claim").delay(key, amount=2, gate=key)
        with pytest.raises(PayloadMismatch):
            other.get(timeout=20)
        same = place.task("claim").delay(key, gate=key)
        assert same.get(timeout=20) == "1 by attempt 2"
        assert effects(place, key) == 1
    assert first.get(timeout=20) == "1 by attempt 2"


def test_a_take_over_gets_a_greater_token(place, key):
    with expired_claim(place, key):
        place.task("claim").delay(key, gate=key).get(timeout=20)
        first, second = (row["token"] for row in place.ledger.read(key, "begin"))
        assert second > first


def test_a_late_completion_is_refused(place, key):
    with expired_claim(place, key) as first:
        assert place.task("claim").delay(key, gate=key).get(timeout=20) == "1 by attempt 2"
    refusal = f"{first.id}] lost"
    wait_until(lambda: refusal in place.logs() and len(place.ledger.read(key, "end")) == 2, 20, "it has come too late")
    assert first.get(timeout=20) == "1 by attempt 2"
    assert place.task("claim").delay(key, gate=key).get(timeout=20) == "1 by attempt 2"


@pytest.mark.parametrize("policy", ["keep", "forget"])
def test_a_terminal_failure_is_kept_or_forgotten_as_set(place, key, policy):
    task = place.task(f"refuse_and_{policy}")
    with pytest.raises(ValueError, match=key):
        task.delay(key).get(timeout=20)
    second = task.delay(key)
    if policy == "keep":
        with pytest.raises(ValueError, match=key):
            second.get(timeout=20)
    else:
        assert second.get(timeout=20) == "not refused"
    assert len(place.ledger.runs(key)) == (1 if policy == "keep" else 2)


def test_a_result_is_answered_after_the_lease_time(place, key):
    task = place.task("claim_with_a_short_lease")
    task.delay(key).get(timeout=20)
    (end,) = place.ledger.read(key, "end")
    wait_until(lambda: time.monotonic() > end["at"] + 2 * task.lease_ttl, what="a lease would be over")
    assert task.delay(key).get(timeout=20) == "1 by attempt 1"
    assert effects(place, key) == 1


def test_a_live_run_outlives_the_retention_of_results(place, key):
    task = place.task("claim_with_a_short_result")
    first = task.delay(key, gate=key)
    (begin,) = wait_until(lambda: place.ledger.read(key, "begin"), 20, "it has claimed")
    wait_until(lambda: time.monotonic() > begin["at"] + task.result_ttl + task.lease_ttl, what="a result would be forgotten")
    second = task.delay(key, gate=key)
    wait_until(lambda: second.state == states.RETRY, 20, "the key is still claimed")
    place.ledger.open(key)
    assert {first.get(timeout=20), second.get(timeout=20)} == {"1 by attempt 1"}
    assert effects(place, key) == 1


@pytest.mark.parametrize("policy", ["requeue", "join"])
def test_of_concurrent_claims_one_wins_and_all_get_equal_answers(place, key, policy):
    task, together = place.task("claim"), Barrier(CLAIMS)

    def publish(_):
        together.wait(20)
        return task.apply_async((key,), {"gate": key}, contention_policy=policy)

    with ThreadPoolExecutor(CLAIMS) as threads:
        results = list(threads.map(publish, range(CLAIMS)))
    wait_until(lambda: [result.state for result in results].count(states.RETRY) == CLAIMS - 1, 20, "all but one wait")
    place.ledger.open(key)
    assert [result.get(timeout=30) for result in results] == ["1 by attempt 1"] * CLAIMS
    assert len(place.ledger.runs(key)) == effects(place, key) == 1


def test_of_concurrent_direct_calls_one_wins_and_all_get_equal_answers(place, key):
    task, together = place.task("claim"), Barrier(CLAIMS)
    place.ledger.open(key)

    def call(_):
        together.wait(20)
        return task(key, gate=key)

    with ThreadPoolExecutor(CLAIMS) as threads:
        answers = list(threads.map(call, range(CLAIMS)))
    assert answers == ["1 by attempt 1"] * CLAIMS
    assert len(place.ledger.runs(key)) == effects(place, key) == 1


FAULTS = [
    ["enter:after"],
    ["body:begin"],
    ["body:end"],
    ["body:begin", "body:end"],
    ["enter:after", "finish:after"],
    ["body:end", "finish:after"],
    ["finish:after"],
    ["result:before"],
    ["settle:before"],
]


def test_there_is_exactly_one_effect_under_injected_faults(place, key):
    task, results, points_of = place.task("settle"), [], {f"{key}-{n}": points for n, points in enumerate(FAULTS)}
    for task_id, points in points_of.items():
        for point in points:
            arm(place.ledger, point, "child", task_id)
        results.append(task.apply_async((task_id,), task_id=task_id))
    for task_id, points in points_of.items():
        wait_until(lambda: len(deaths(place.ledger, task_id)) == len(points), 30, f"{task_id} has died at {points}")  # noqa: B023
        results += [task.delay(task_id) for _ in range(2)]
    assert {result.get(timeout=60) for result in results} == {"settled"}
    for task_id, points in points_of.items():
        assert sorted(death["point"] for death in deaths(place.ledger, task_id)) == sorted(points)
        assert len(place.ledger.read(task_id, "end")) == 1, points
        assert live_overlaps(place.ledger, task_id) == 0
