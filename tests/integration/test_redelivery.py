"""The broker delivers a message again while its run goes on: one run, no copies that stay or multiply."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import redis
from nodes import ValkeyContainer, redis_settings, wait_until


def broker_is_empty(server, queue):
    client = redis.Redis.from_url(f"{server.url}/0")
    return not client.llen(queue) and not client.hlen("unacked") and not client.zcard("unacked_index")


@pytest.fixture
def servers():
    """A broker and a store of the test's own, so that what is left in them can be counted."""
    both = (ValkeyContainer("broker"), ValkeyContainer("store"))
    try:
        for server in both:
            server.ready()
        yield both
    finally:
        for server in both:
            server.teardown()


def script_calls(client):
    return sum(client.info("commandstats").get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval"))


@contextmanager
def impatient(servers, start_place):
    """A place whose broker gives out again, each second, what has not been acknowledged for two."""
    broker, store = servers
    transport = {"visibility_timeout": 2}
    place = start_place(redis_settings(broker.url, singleflight_url=f"{store.url}/0", broker_transport_options=transport))
    over = threading.Event()

    def restore():
        with place.app.connection_for_read() as connection:
            while not over.wait(1):
                connection.default_channel.qos.restore_visible(num=100, interval=1)

    thread = threading.Thread(target=restore)
    thread.start()
    try:
        yield place
    finally:
        over.set()
        thread.join()


def test_a_short_visibility_timeout_gives_one_run_and_leaves_no_copy(servers, start_place, key):
    broker, store = servers
    records = redis.Redis.from_url(f"{store.url}/0")
    with impatient(servers, start_place) as place:
        result = place.task("work").apply_async((key, "done"), {"seconds": 7}, link=place.task("note").si(f"{key}-link"))
        assert result.get(timeout=40) == "done"

        assert "was delivered again while it runs" in place.logs()
        assert script_calls(records) < 55, "the lease is renewed, a copy looks and two sweepers look, each about once a second"
        wait_until(lambda: broker_is_empty(broker, place.app.conf.task_default_queue), 10, "no copy is left in the broker")
        assert place.held_by_workers() == []
    assert len(place.ledger.runs(key)) == 1
    assert len(place.ledger.read(f"{key}-link")) == 1, "the callback was sent once"
    names = list(records.scan_iter("*"))
    assert not [name for name in names if b":lease:" in name]
    assert all(records.pttl(name) > 0 for name in names)


def test_a_cut_rabbitmq_connection_gives_one_run_and_leaves_no_copy(start_place, valkey, rabbitmq, rabbit_proxy, key):
    config = redis_settings(valkey.url, broker_url=rabbit_proxy.url_for(rabbitmq))
    place = start_place(config)
    result = place.task("work").apply_async((key, "done"), {"gate": key})
    wait_until(lambda: place.ledger.runs(key), what="the body has begun")

    rabbit_proxy.cut()

    wait_until(lambda: place.logs().count("received") >= 2, 30, "the message came again")
    place.ledger.open(key)
    assert result.get(timeout=30) == "done"
    wait_until(place.queue_is_empty, 20, "no copy is left in the broker")
    assert len(place.ledger.runs(key)) == 1
    assert place.ledger.overlaps(key) == 0


def test_a_waiting_newcomer_that_is_delivered_twice_runs_once(servers, start_place, key):
    with impatient(servers, start_place) as place:
        holder = place.task("work").delay(key, "holder", gate=key)
        wait_until(lambda: place.ledger.runs(key))
        # Until its countdown is over the broker gives each of them out again every two seconds.
        waiting = [place.task("work").apply_async((key, n), countdown=6) for n in range(5)]
        wait_until(lambda: place.logs().count("is left to another copy") >= 3, 40, "copies of waiting messages were dropped")

        place.ledger.open(key)

        assert holder.get(timeout=20) == "holder"
        assert [result.get(timeout=40) for result in waiting] == list(range(5))
        wait_until(lambda: broker_is_empty(servers[0], place.app.conf.task_default_queue), 15, "no copy is left in the broker")
    assert len(place.ledger.runs(key)) == 6
    assert place.ledger.overlaps(key) == 0
