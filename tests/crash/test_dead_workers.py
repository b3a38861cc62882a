"""A whole worker dies, stands still or is told to go: what it held runs on another one, and happens once."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import crash_app
import pytest
from aftermath import (
    assert_nothing_is_left,
    delete_queue,
    due_at,
    is_on_redis,
    kill_child,
    kill_worker,
    let_the_broker_give_out_again,
    live_lines,
    messages_with,
    queue_on_rabbitmq,
    record_of,
    revive,
    wait_for_workers,
    worker_of,
)
from celery.exceptions import TimeLimitExceeded
from crash_points import arm, deaths, live_overlaps
from nodes import ValkeyContainer, redis_settings, wait_until
from test_lost_processes import begun

BROKERS = ["redis", "rabbitmq classic", "rabbitmq quorum"]


@pytest.fixture
def settings_on(request, valkey):
    """Settings for a broker: on Redis one of the test's own, whose visibility timeout is an hour."""
    with contextlib.ExitStack() as at_end:

        def settings(broker, **more):
            if broker == "redis":
                server = ValkeyContainer()
                at_end.callback(server.teardown)
                server.ready()
                more |= {"broker_url": f"{server.url}/0", "broker_transport_options": {"visibility_timeout": 3600}}
            else:
                more |= queue_on_rabbitmq(request.getfixturevalue("rabbitmq"), broker.partition(" ")[2])
            return redis_settings(valkey.url, **more)

        yield settings


@pytest.fixture
def start(start_place, settings_on):
    """Start workers of the crash app on a broker; nothing stays in one that is not the test's own."""
    places = []

    def start(broker, *arguments, workers=2, concurrency=2, **settings):
        config = settings_on(broker, **settings)
        places.append(start_place(config, *arguments, workers=workers, concurrency=concurrency, app_module=crash_app))
        return places[-1]

    yield start
    for place in places:
        place.end()
        delete_queue(place)


def assert_once(place, result, key, *, link):
    """The trigger is over, an hour later too: the broker's own delivery finds nothing to do."""
    wait_until(lambda: place.ledger.read(f"{key}-link"), 15, "the callback ran")
    assert_nothing_is_left(place, result.id, key)
    runs, value = len(place.ledger.runs(key)), result.get(timeout=5)
    let_the_broker_give_out_again(place, key if is_on_redis(place) else "")
    wait_until(lambda: messages_with(place, result.id) == 0, 20, "no message of it is left")
    assert len(place.ledger.runs(key)) == runs
    assert result.get(timeout=5) == value
    assert len(place.ledger.read(f"{key}-link")) == link
    assert live_overlaps(place.ledger, key) == 0


@pytest.mark.parametrize("broker", BROKERS)
def test_a_killed_workers_trigger_runs_again_within_seven_seconds(start, key, broker, record_property):
    place = start(broker, singleflight_lease_ttl=5)
    link = place.task("note").si(f"{key}-link")
    result = place.task("work").apply_async((key, "value", key), link=link)
    killed_at = kill_worker(place, begun(place, key)[0]["pid"])
    again = begun(place, key, 2)[1]
    record_property("seconds", again["at"] - killed_at)
    assert again["at"] - killed_at <= 7, "the lease of five seconds, a look each second, and the way there"
    place.ledger.open(key)
    assert result.get(timeout=15) == "value"
    assert_once(place, result, key, link=1)
    assert len(place.ledger.runs(key)) == 2


@pytest.mark.parametrize("broker", ["redis", "rabbitmq classic"])
@pytest.mark.parametrize("returns", [False, True], ids=["in its body", "when it returns"])
def test_a_child_that_stood_still_past_its_lease_is_refused(start, key, broker, returns):
    place = start(broker, singleflight_lease_ttl=2)
    link = place.task("note").si(f"{key}-link")
    result = place.task("which_run").apply_async((key, key), link=link)
    first = begun(place, key)[0]["pid"]
    os.kill(first, signal.SIGSTOP)
    try:
        second = begun(place, key, 2)[1]
        assert second["pid"] != first
        if returns:
            place.ledger.open(f"{key}-1")
    finally:
        os.kill(first, signal.SIGCONT)
    wait_until(lambda: "its outcome does not count" in place.logs(), 15, "the first run is refused")
    assert not result.ready()
    place.ledger.open(f"{key}-2")
    assert result.get(timeout=20) == 2
    wait_until(lambda: place.ledger.read(f"{key}-link"), 15, "the callback ran")
    assert_nothing_is_left(place, result.id, key)
    wait_until(lambda: messages_with(place, result.id) == 0, 20, "no message of it is left")
    assert result.get(timeout=5) == 2
    assert len(place.ledger.read(f"{key}-link")) == 1
    assert len(place.ledger.runs(key)) == 2


@pytest.mark.parametrize("arguments", ["--max-tasks-per-child=1", "--autoscale=4,1"])
def test_a_pool_that_changes_its_processes_loses_nothing_and_doubles_nothing(start, key, arguments):
    place = start("redis", arguments, workers=1, concurrency=4, singleflight_lease_ttl=10)
    keys = [f"{key}-{n}" for n in range(3)]
    held = [place.task("work").delay(each, "held", each) for each in keys]
    pids = [begun(place, each)[0]["pid"] for each in keys]
    queued = [place.task("work").delay(each, n) for each in keys for n in range(3)]
    for each, pid in zip(keys, pids, strict=True):
        kill_child(place, pid)
        place.ledger.open(each)
    assert [result.get(timeout=60) for result in held] == ["held"] * 3
    assert [result.get(timeout=60) for result in queued] == [0, 1, 2] * 3
    for each in keys:
        assert len(place.ledger.runs(each)) == 5
        assert live_overlaps(place.ledger, each) == 0
    for result in held + queued:
        assert_nothing_is_left(place, result.id, "")
    wait_until(lambda: messages_with(place, key) == 0, 20, "the broker has no message")
    assert "published again" not in place.logs(), "the processes that left settled what they had done"


@pytest.mark.parametrize("broker", BROKERS)
def test_a_warm_shutdown_lets_the_run_end_and_gives_back_what_waits(start, key, broker):
    place = start(broker, workers=1, singleflight_lease_ttl=30)
    holder = place.task("work").delay(key, "holder", key)
    begun(place, key)
    waiting = place.task("work").delay(key, "waiting")
    wait_until(lambda: waiting.state == "RETRY", 15, "the second trigger waits")
    container = place.workers[0].container
    os.kill(container.pid, signal.SIGTERM)
    wait_until(lambda: "Warm shutdown" in place.logs(), 10)
    place.ledger.open(key)
    assert holder.get(timeout=15) == "holder"
    container.process.wait(20)
    assert record_of(place, holder.id)["settled"] == "1", "before the worker went"
    assert not live_lines(place, key)
    revive(place)
    assert waiting.get(timeout=40) == "waiting"
    assert [len(place.ledger.runs(key)), place.ledger.overlaps(key)] == [2, 0]
    assert "died" not in record_of(place, holder.id)


@pytest.mark.parametrize("broker", BROKERS)
@pytest.mark.parametrize(("how", "patience"), [("cold", 0), ("soft", 2)])
def test_a_shutdown_that_cancels_gives_back_what_is_held_at_once(start, key, broker, how, patience):
    place = start(broker, singleflight_lease_ttl=30, worker_soft_shutdown_timeout=patience)
    link = place.task("note").si(f"{key}-link")
    result = place.task("work").apply_async((key, "value", key), link=link)
    pid = begun(place, key)[0]["pid"]
    container, told_at = worker_of(place, pid).container, time.monotonic()
    os.kill(container.pid, signal.SIGQUIT)
    again = begun(place, key, 2)[1]
    assert again["at"] - told_at < 12, "nobody waits for a lease of thirty seconds"
    assert again["at"] - told_at >= patience
    place.ledger.open(key)
    assert result.get(timeout=15) == "value"
    wait_until(lambda: container.status == "exited", 30, f"the {how} shutdown is over")
    assert_nothing_is_left(place, result.id, key)
    record = record_of(place, result.id)
    assert "died" not in record, "a worker that is told to go is no fault of the task"
    assert len(place.ledger.runs(key)) == 2
    assert len(place.ledger.read(f"{key}-link")) == 1


@pytest.mark.parametrize("broker", ["redis", "rabbitmq classic"])
def test_without_rescue_the_broker_alone_delivers_again(start, key, broker):
    place = start(broker, singleflight_lease_ttl=1)
    result = place.task("unrescued").delay(key, key)
    pid = begun(place, key)[0]["pid"]
    assert "message" not in record_of(place, result.id)
    assert due_at(place, result.id) is None
    kill_worker(place, pid)
    if is_on_redis(place):
        wait_until(lambda: not live_lines(place, key), 10, "the lease has ended")
        over = time.monotonic() + 3
        wait_until(lambda: time.monotonic() > over or len(place.ledger.runs(key)) > 1, 10)
        assert len(place.ledger.runs(key)) == 1, "no sweeper knows of it"
        assert let_the_broker_give_out_again(place, result.id) == 1
    begun(place, key, 2)
    place.ledger.open(key)
    result.get(timeout=20)
    wait_until(lambda: messages_with(place, result.id) == 0, 20, "no message of it is left")
    assert len(place.ledger.runs(key)) == 2


def test_a_worker_that_dies_just_after_a_hard_time_limit_leaves_a_failure(start, key):
    """The outcome is recorded, and Celery has not stored it: somebody else does, and the errback runs."""
    place = start("redis", singleflight_lease_ttl=2, crash_points=True)
    arm(place.ledger, "conclude:after", "worker", key)
    errback = place.task("note_error").s(f"{key}-error")
    result = place.task("limited_in_time").apply_async((key,), task_id=key, link_error=errback)
    wait_until(lambda: deaths(place.ledger, key), 20, "the main process is dead")
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=30)
    wait_until(lambda: place.ledger.read(f"{key}-error"), 10, "the errback ran")
    assert_nothing_is_left(place, key, key)
    assert len(place.ledger.runs(key)) == 1
    wait_for_workers(place, 1)
