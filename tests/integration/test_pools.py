"""The pools beside prefork, and workers with processes that live for one task."""

from __future__ import annotations

import pytest
from nodes import redis_settings, wait_until


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_triggers_of_one_key_do_not_overlap_in_this_pool(start_place, valkey, key, pool):
    place = start_place(redis_settings(valkey.url), pool=pool, concurrency=4, workers=2)
    results = [place.task("count_up").delay(key) for _ in range(20)]
    results += [place.task("work").delay(f"{key}-{n % 2}", n, seconds=0.05) for n in range(12)]
    for result in results:
        result.get(timeout=60)
    assert place.ledger.counter(key) == 20
    assert [place.ledger.overlaps(f"{key}-{n}") for n in range(2)] == [0, 0]
    assert len(place.ledger.runs(f"{key}-0")) == 6


def test_threads_of_one_worker_renew_their_leases_together(start_place, valkey, key):
    place = start_place(redis_settings(valkey.url, singleflight_lease_ttl=1), pool="threads", concurrency=4, workers=1)
    long = [place.task("work").delay(f"{key}-{n}", n, seconds=3) for n in range(3)]
    wait_until(lambda: all(place.ledger.runs(f"{key}-{n}") for n in range(3)))
    contending = [place.task("work").apply_async((f"{key}-{n}", n), countdown=1.5) for n in range(3)]
    assert [result.get(timeout=30) for result in long + contending] == [0, 1, 2, 0, 1, 2]
    assert [place.ledger.overlaps(f"{key}-{n}") for n in range(3)] == [0, 0, 0]


def test_a_process_per_task_keeps_its_lease_and_settles_before_it_leaves(start_place, valkey, key):
    place = start_place(redis_settings(valkey.url, singleflight_lease_ttl=1), "--max-tasks-per-child=1", workers=1)
    results = [place.task("work").delay(key, n, seconds=1.5) for n in range(3)]
    assert [result.get(timeout=40) for result in results] == [0, 1, 2]
    assert place.ledger.overlaps(key) == 0
    store = place.store()
    records = [
        name
        for name in store.scan_iter("*:trigger:*")
        if store.hget(name, "outcome") and key.encode() in (store.hget(name, "lock_key") or b"")
    ]
    assert len(records) == 3
    wait_until(lambda: all(store.hget(name, "settled") for name in records), 5, "each was settled")
