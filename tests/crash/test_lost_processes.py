"""A pool process dies: its lease is free at once, its trigger runs again, and never beside a body that still lives."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import datetime
from statistics import quantiles

import crash_app
import pytest
from aftermath import due_at
from celery.exceptions import TimeLimitExceeded
from nodes import redis_settings, wait_until

from celery_singleflight import DeadLettered


@pytest.fixture(scope="module")
def crowd(start_shared, valkey):
    """Two workers of four processes, whose leases last far longer than the tests."""
    return start_shared(
        redis_settings(valkey.url, singleflight_lease_ttl=30, broker_transport_options={"visibility_timeout": 3600}),
        concurrency=4,
        app_module=crash_app,
    )


@pytest.fixture
def place(crowd, request):
    request.node.place = crowd
    return crowd


def begun(place, key, count=1):
    return wait_until(lambda: len(rows := place.ledger.runs(key)) >= count and rows, 20, f"{count} runs of {key} began")


def record_of(place, task_id):
    """What the store knows of a trigger."""
    store = place.store()
    name = next(store.scan_iter(f"*:trigger:*:{task_id}"), None)
    return {} if name is None else {field.decode(): value.decode() for field, value in store.hgetall(name).items()}


def lease_of(place, key):
    end, store = f':lease:protected_app.work["{key}"]', place.store()
    found = [name for name in store.scan_iter("*:lease:protected_app.work*") if name.decode().endswith(end)]
    return store.hgetall(found[0]) if found else {}


def is_held(place, key, token):
    return any(str(token).encode() in line for line in lease_of(place, key).values())


def noticed_at(place, pid):
    """When the pool said that the process is gone, on the wall clock."""
    found = re.search(rf"\[(\S+ \S+): ERROR/MainProcess\] Process \S+ pid:{pid} exited", place.logs())
    return found and datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp()


def kill_four(place, keys):
    """Kill four bodies behind which a second trigger waits.

    Returns for each how long after the kill its lease was free, and how long after the pool had noticed.
    """
    first = [place.task("work").delay(each, "first", gate=each) for each in keys]
    runs = {each: begun(place, each)[0] for each in keys}
    assert all(is_held(place, each, run["token"]) for each, run in runs.items())
    second = [place.task("work").delay(each, "second") for each in keys]
    wait_until(lambda: all(f'waits: protected_app.work["{each}"]' in place.logs() for each in keys), 10)
    killed_at, freed_at = time.time(), {}
    for each, run in runs.items():
        os.kill(run["pid"], signal.SIGKILL)
        place.ledger.open(each)

    def look():
        for each, run in runs.items():
            if each not in freed_at and not is_held(place, each, run["token"]):
                freed_at[each] = time.time()
        return len(freed_at) == len(keys)

    wait_until(look, 20, "every lease is free")
    assert [result.get(timeout=30) for result in first + second] == ["first"] * 4 + ["second"] * 4
    noticed = [wait_until(lambda pid=run["pid"]: noticed_at(place, pid), 5) for run in runs.values()]
    return [freed_at[each] - killed_at for each in keys], [freed_at[each] - at for each, at in zip(keys, noticed, strict=True)]


def test_after_twenty_kills_the_lease_is_free_at_once_and_both_triggers_end(place, key):
    after_kill, after_notice = [], []
    for turn in range(5):
        keys = [f"{key}-{turn}-{n}" for n in range(4)]
        of_kill, of_notice = kill_four(place, keys)
        after_kill += of_kill
        after_notice += of_notice
        assert [len(place.ledger.runs(each)) for each in keys] == [3] * 4
    assert quantiles(after_notice, n=20)[-1] <= 1, after_notice
    assert max(after_kill) <= 6, after_kill


@pytest.mark.parametrize("how", ["exit", "_exit", "kill", "segfault"])
def test_a_body_that_takes_its_process_along_runs_again(place, key, how):
    result = place.task("leave_the_process").delay(key, how, times=2)
    assert result.get(timeout=25) == "alive"
    assert len(place.ledger.runs(key)) == 3
    assert record_of(place, result.id)["died"] == "2"


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_trigger_whose_runs_always_die_is_dead_lettered_after_five(place, key, how):
    result = place.task("leave_the_process").apply_async((key, how), link_error=place.task("note_error").s(f"{key}-error"))
    with pytest.raises(DeadLettered, match="5 of its runs died with their process"):
        result.get(timeout=60)
    assert len(place.ledger.runs(key)) == 5
    wait_until(lambda: len(place.ledger.read(f"{key}-error")) == 1, 10, "its errback ran")
    wait_until(lambda: record_of(place, result.id).get("settled"), 5)
    record = record_of(place, result.id)
    assert record["outcome"] == "dead-lettered"
    assert key in record["message"], "somebody will want to see it"
    assert place.task("work").delay(key, "next").get(timeout=10) == "next", "the lock key is free"


def test_with_early_acknowledgement_celerys_failure_is_the_outcome(place, key):
    result = place.task("early").delay(key, key)
    os.kill(begun(place, key)[0]["pid"], signal.SIGKILL)
    with pytest.raises(Exception, match="exited prematurely"):
        result.get(timeout=20)
    wait_until(lambda: record_of(place, result.id).get("outcome") == "failed", 5)
    assert due_at(place, result.id) is None, "its message is kept to be replayed, and nobody publishes it"
    assert place.task("work").delay(key, "next").get(timeout=10) == "next"
    assert len(place.ledger.runs(key)) == 2


def test_after_a_hard_time_limit_the_lease_is_free_only_when_the_process_is_gone(place, key):
    result = place.task("stubborn").delay(key, 20)
    begun(place, key)
    waiting = place.task("work").delay(key, "next")
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=20)
    assert waiting.get(timeout=15) == "next"
    last_sign = max(row["at"] for row in place.ledger.read(key, "still"))
    assert place.ledger.runs(key)[1]["at"] > last_sign, "the body lived on under SIGTERM, and nobody ran beside it"
    record = record_of(place, result.id)
    assert (record["outcome"], record["settled"]) == ("failed", "1")
    assert due_at(place, result.id) is None


def test_a_hard_time_limit_on_a_body_that_lets_go_frees_the_key(place, key):
    result = place.task("limited_in_time").delay(key)
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=20)
    assert place.task("work").delay(key, "next").get(timeout=10) == "next"
    assert record_of(place, result.id)["outcome"] == "failed"
    assert place.ledger.overlaps(key) == 1, "the judge saw one that never ended, and one after it"


@pytest.mark.parametrize("sig", ["SIGTERM", "SIGKILL"])
def test_a_terminated_run_is_revoked_and_its_key_free(place, key, sig):
    result = place.task("work").delay(key, "first", gate=f"never-{key}")
    begun(place, key)
    result.revoke(terminate=True, signal=sig)
    wait_until(lambda: result.state == "REVOKED", 10)
    wait_until(lambda: not lease_of(place, key), 10, "the lease is free")
    assert place.task("work").delay(key, "next").get(timeout=10) == "next"
    record = record_of(place, result.id)
    assert (record["outcome"], record["settled"]) == ("revoked", "1")
    assert due_at(place, result.id) is None


def test_a_trigger_that_is_revoked_while_it_waits_has_that_outcome(place, key):
    holder = place.task("work").delay(key, "first", gate=key)
    begun(place, key)
    waiting = place.task("work").delay(key, "second")
    wait_until(lambda: waiting.state == "RETRY", 10)
    waiting.revoke()
    wait_until(lambda: record_of(place, waiting.id).get("outcome") == "revoked", 15, "its copy was discarded")
    place.ledger.open(key)
    assert holder.get(timeout=10) == "first"
    assert len(place.ledger.runs(key)) == 1
