"""A holder that is not the holder any more: its body is interrupted, and nothing of it counts."""

from __future__ import annotations

import crash_app
import pytest
from nodes import redis_settings, wait_until
from proxy import Proxy
from redis import Redis
from test_lost_processes import begun, record_of


def names_of(store, key):
    return [name for name in store.scan_iter("*:lease:*") if name.decode().endswith(f'["{key}"]')]


def lose_lease(place, key):
    """Let the store say that the lease has run out, and nobody holds the key."""
    store = place.store()
    store.delete(*names_of(store, key))


@pytest.fixture(params=["prefork", "threads"])
def place(request, start_place, valkey):
    """One worker, whose leases are renewed each second."""
    config = redis_settings(valkey.url, singleflight_lease_ttl=3)
    return start_place(config, workers=1, concurrency=4, pool=request.param, app_module=crash_app)


def test_a_body_is_interrupted_when_its_lease_is_lost_and_its_trigger_runs_again(place, key):
    result = place.task("hold_on").delay(key, key, "value")
    begun(place, key)
    lose_lease(place, key)
    wait_until(lambda: place.ledger.read(key, "lost"), 5, "the body was interrupted")
    place.ledger.open(key)
    assert result.get(timeout=20) == "value"
    assert len(place.ledger.read(key, "end")) == 1
    tokens = [row["token"] for row in place.ledger.runs(key)]
    assert len(tokens) == 2
    assert tokens[0] < tokens[1]


def test_a_body_that_swallows_it_and_returns_is_refused_and_the_new_holders_result_stands(place, key):
    link = place.task("note").si(f"{key}-link")
    first = place.task("swallow").apply_async((key, key, "of the first"), link=link)
    begun(place, key)
    lose_lease(place, key)
    wait_until(lambda: place.ledger.read(key, "lost"), 5, "the body was interrupted")
    second = place.task("swallow").delay(key, f"{key}-2", "of the second")
    begun(place, key, 2)
    place.ledger.open(f"{key}-late")
    wait_until(lambda: len(place.ledger.read(key, "end")) == 1, 10, "the first has returned")
    wait_until(lambda: "its outcome does not count" in place.logs(), 10)
    assert first.state in ("RETRY", "PENDING", "STARTED")
    place.ledger.open(f"{key}-2")
    assert second.get(timeout=10) == "of the second"
    place.ledger.open(key)
    assert first.get(timeout=20) == "of the first"
    wait_until(lambda: place.ledger.read(f"{key}-link"), 10)
    assert len(place.ledger.read(f"{key}-link")) == 1
    assert record_of(place, first.id)["attempt"] == "2"


def test_the_result_of_an_overtaken_run_is_that_of_the_run_that_took_over(place, key):
    """The same trigger is delivered again and runs, while its first run still believes that it holds the key."""
    result = place.task("swallow").delay(key, key, "value")
    begun(place, key)
    lose_lease(place, key)
    wait_until(lambda: place.ledger.read(key, "lost"), 5)
    store = place.store()
    name = next(store.scan_iter(f"*:trigger:*:{result.id}"))
    due = next(store.scan_iter("*:due:protected_app.work"))
    store.hset(name, "until_ms", 1)
    store.zadd(due, {result.id: 1})
    begun(place, key, 2)
    place.ledger.open(f"{key}-late")
    wait_until(lambda: "its outcome does not count" in place.logs(), 10, "the first run was refused")
    assert not result.ready()
    place.ledger.open(key)
    assert result.get(timeout=20) == "value"
    assert len(place.ledger.runs(key)) == 2


def test_a_holder_that_hears_nothing_stops_at_its_own_deadline(start_place, valkey, key):
    proxy = Proxy("127.0.0.1", valkey.port)
    try:
        config = redis_settings(valkey.url, singleflight_lease_ttl=2, singleflight_url=proxy.url_for(f"{valkey.url}/2"))
        place = start_place(config, workers=1, app_module=crash_app)
        result = place.task("hold_on").delay(key, key, "value")
        begin = begun(place, key)[0]
        proxy.stall()
        lost = wait_until(lambda: place.ledger.read(key, "lost"), 6, "the body was interrupted")[0]
        # The lease was renewed last at most a third of its time before the line went dead.
        assert lost["at"] - begin["at"] < 3.2
        danger = place.ledger.read(f'protected_app.work["{key}"]', "danger")[0]
        assert danger["at"] < lost["at"]
        proxy.resume()
        place.ledger.open(key)
        assert result.get(timeout=30) == "value"
        assert len(place.ledger.runs(key)) == 2
    finally:
        proxy.close()


def test_a_key_stays_taken_for_min_hold_after_a_success(start_place, valkey, key):
    place = start_place(redis_settings(valkey.url), app_module=crash_app)
    results = [place.task("cool_down").delay(key) for _ in range(2)]
    for result in results:
        result.get(timeout=20)
    begins = [row["at"] for row in place.ledger.runs(key)]
    assert begins[1] - begins[0] >= 1.45
    store = Redis.from_url(place.app.conf.singleflight_url)
    assert all(store.pttl(name) < 62_000 for name in names_of(store, key))
