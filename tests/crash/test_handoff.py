"""Whoever has to call the next dies, or cannot: who waits in the store runs all the same, once, and in its order."""

from __future__ import annotations

import socket
import threading
from urllib.parse import urlsplit

import pytest
import waiting_app
from aftermath import (
    assert_nothing_is_left,
    delete_queue,
    kill_worker,
    let_patience_end,
    let_the_broker_give_out_again,
    messages_with,
    queue_on_rabbitmq,
    record_of,
    revive,
    wait_for_workers,
)
from crash_points import arm, deaths, live_overlaps
from nodes import ValkeyContainer, wait_until
from proxy import Proxy
from redis import Redis
from test_lost_processes import begun
from test_store_trouble import Server
from waiting_room import (
    get_all,
    held,
    line,
    messages_in_custody,
    name_of,
    park,
    park_all,
    parked,
    remember_short_runs,
    settings_apart,
    values,
)

DIES = ["child", "worker"]


@pytest.fixture(scope="module")
def crew(start_shared, valkey):
    """Two workers with a slot to spare that die where they are told to; their broker gives nothing out again within an hour."""
    server = ValkeyContainer()
    try:
        server.ready()
        more = {"broker_url": f"{server.url}/0", "broker_transport_options": {"visibility_timeout": 3600}}
        config = settings_apart(valkey.url, singleflight_lease_ttl=2, crash_points=True, **more)
        yield start_shared(config, workers=2, concurrency=3, app_module=waiting_app)
    finally:
        server.teardown()


@pytest.fixture
def place(crew, request):
    request.node.place = crew
    revive(crew)
    wait_for_workers(crew, 2)
    return crew


def in_line(place, key, *numbers, **more):
    return [place.task("line").s(key, value, **more) for value in numbers]


def wait_for_death(place, task_id, how):
    """Wait until it has died; a worker too, so that it does not take along what is published next."""
    wait_until(lambda: deaths(place.ledger, task_id), 20, "it has died")
    if how == "worker":
        wait_until(lambda: any(worker.container.status == "exited" for worker in place.workers), 10, "a worker is dead")


def assert_all_ran_once(place, key, results, expected, *, in_order=True):
    assert get_all(results) == expected
    ran = values(place, key)
    assert (ran if in_order else sorted(ran, key=expected.index)) == expected
    for result in results:
        let_patience_end(place, result.id)
        assert_nothing_is_left(place, result.id, key)
    assert parked(place, key) == set()
    # An hour later the broker gives out again what a dead worker had: there is nothing to do.
    let_the_broker_give_out_again(place, key)
    wait_until(lambda: messages_with(place, key) == 0, 20, "the broker has no message")
    assert values(place, key) == ran
    assert live_overlaps(place.ledger, key) == 0


@pytest.mark.parametrize("how", DIES)
@pytest.mark.parametrize("point", ["call:before-publish", "call:after-publish"])
def test_who_has_to_call_the_next_dies(place, key, point, how):
    holder = place.task("line").delay(key, "holder", key)
    begun(place, key)
    waiting = park_all(place, key, in_line(place, key, 1, 2, 3))
    arm(place.ledger, point, how, waiting[0].id)
    place.ledger.open(key)
    wait_for_death(place, waiting[0].id, how)
    let_patience_end(place, holder.id)
    # What has been published may be taken by the worker that dies: then it runs again when its lease has ended, behind others.
    in_order = (point, how) != ("call:after-publish", "worker")
    assert_all_ran_once(place, key, [holder, *waiting], ["holder", 1, 2, 3], in_order=in_order)


@pytest.mark.parametrize("how", DIES)
def test_who_has_just_been_parked_dies_with_its_process(place, key, how):
    arm(place.ledger, "park:after", how, f"{key}-1")
    with held(place, key):
        first = park(place, key, place.task("line").s(key, 1), task_id=f"{key}-1")
        wait_for_death(place, first.id, how)
        waiting = park_all(place, key, in_line(place, key, 2, 3))
        assert line(place, key) == [first.id, *[result.id for result in waiting]]
    assert_all_ran_once(place, key, [first, *waiting], [1, 2, 3])
    assert "died" not in record_of(place, first.id), "no body has run"


@pytest.mark.parametrize("how", DIES)
def test_who_lingers_dies(place, key, how):
    with held(place, key):
        before = park(place, key, place.task("line").s(key, 0))
    assert before.get(timeout=20) == 0
    arm(place.ledger, "linger:begin", how, f"{key}-1")
    with held(place, key):
        remember_short_runs(place, key)
        first = park(place, key, place.task("line").s(key, 1), task_id=f"{key}-1")
        wait_for_death(place, first.id, how)
        waiting = park_all(place, key, in_line(place, key, 2, 3))
    assert_all_ran_once(place, key, [before, first, *waiting], [0, 1, 2, 3])


def lingers(place, key):
    """Who waits in its slot for a lock key, or has done."""
    member = place.store().hget(name_of(place, "pace", key) or "", "lingers")
    return member and member.decode()


def linger_until_granted(place, key, number):
    """Let a trigger wait in its slot while the lock key is held, and give that back. Returns its result."""
    with held(place, key):
        remember_short_runs(place, key)
        result = place.task("line").s(key, number).apply_async(task_id=f"{key}-{number}")
        wait_until(lambda: lingers(place, key) == result.id, 20, "it lingers")
    wait_until(lambda: deaths(place.ledger, result.id) or number in values(place, key), 20, "it has the lease")
    return result


@pytest.mark.parametrize("how", DIES)
def test_who_has_the_lease_with_the_baton_dies_before_its_body(place, key, how):
    with held(place, key):
        results = [park(place, key, place.task("line").s(key, 0))]
    assert results[0].get(timeout=20) == 0
    # Where this machine is so slow that the slot was given up before, another trigger is to die.
    for number in range(1, 11):
        arm(place.ledger, "linger:granted", how, f"{key}-{number}")
        results.append(linger_until_granted(place, key, number))
        if deaths(place.ledger, results[-1].id):
            break
        results[-1].get(timeout=20)
    wait_for_death(place, results[-1].id, how)
    assert results[-1].get(timeout=40) == number
    results.append(place.task("line").delay(key, "next"))
    assert_all_ran_once(place, key, results, [*range(number + 1), "next"])


@pytest.mark.parametrize("how", DIES)
def test_who_gets_the_outcome_of_another_dies_before_it_is_sent(place, key, how):
    leader = place.task("joined").delay(key, "payload", key)
    begun(place, key)
    joined = park_all(place, key, [place.task("joined").s(key, "payload", key) for _ in range(3)])
    arm(place.ledger, "follow:after", how, joined[0].id)
    place.ledger.open(key)
    wait_for_death(place, joined[0].id, how)
    if how == "worker":
        let_patience_end(place, joined[0].id)
    assert get_all([leader, *joined]) == [["payload", 1]] * 4
    for result in joined:
        assert_nothing_is_left(place, result.id, key)
    let_the_broker_give_out_again(place, key)
    wait_until(lambda: messages_with(place, key) == 0, 20, "the broker has no message")
    assert len(place.ledger.runs(key)) == 1


def test_a_holder_that_dies_with_its_worker_runs_again_before_those_in_line(place, key):
    """But for those who were called by then, ahead of their turn where runs are short."""
    holder = place.task("line").delay(key, "holder", key)
    pid = begun(place, key)[0]["pid"]
    waiting = park_all(place, key, in_line(place, key, *range(6)))
    kill_worker(place, pid)
    place.ledger.open(key)
    assert get_all([holder, *waiting]) == ["holder", *range(6)]
    ran = values(place, key)
    assert ran.index("holder", 1) <= 3
    assert [value for value in ran if value != "holder"] == list(range(6))
    assert live_overlaps(place.ledger, key) == 0


class Door(Proxy):
    """A proxy that can be shut: what went through it is cut, and nothing new is let in until it is open again."""

    def shut(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def reopen(self, port):
        self._listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, daemon=True).start()


def test_a_call_is_published_when_the_broker_is_back(start_place, valkey, rabbitmq, key):
    parts = urlsplit(rabbitmq)
    door = Door(parts.hostname, parts.port)
    config = {**queue_on_rabbitmq(rabbitmq, "classic"), "broker_url": door.url_for(rabbitmq), "crash_points": True}
    place = start_place(settings_apart(valkey.url, **config), workers=1, app_module=waiting_app)
    try:
        holder = place.task("line").delay(key, "holder", key)
        begun(place, key)
        waiting = park_all(place, key, in_line(place, key, 1, 2, 3))
        arm(place.ledger, "call:before-publish", "pause", waiting[0].id)
        place.ledger.open(key)
        wait_until(lambda: place.ledger.read(waiting[0].id, "paused"), 15, "the next is to be called")
        port = door.port
        door.shut()
        place.ledger.open(f"resume-{waiting[0].id}")
        wait_until(lambda: "the message of a waiting trigger could not be published" in place.logs(), 20)
        door.reopen(port)
        assert get_all([holder, *waiting]) == ["holder", 1, 2, 3]
        assert values(place, key) == ["holder", 1, 2, 3]
        assert place.ledger.overlaps(key) == 0
        wait_until(lambda: messages_with(place, key) == 0, 20, "nothing is left in the broker")
    finally:
        place.end()
        delete_queue(place)
        door.close()


@pytest.fixture
def beside_a_store(start_place, valkey):
    """A worker whose store is a server of its own, with its data on disk; the broker and the results are elsewhere."""
    store = Server()
    try:
        store.ready()
        config = settings_apart(valkey.url, singleflight_url=f"{store.url}/0", singleflight_lease_ttl=5)
        yield start_place(config, workers=1, app_module=waiting_app), store
    finally:
        store.teardown()


def test_a_store_that_restarts_with_its_data_knows_who_waits(beside_a_store, key):
    place, store = beside_a_store
    holder = place.task("line").delay(key, "holder", key)
    begun(place, key)
    waiting = [place.task("line").delay(key, value) for value in range(50)]
    wait_until(lambda: len(parked(place, key)) == 50, 30, "fifty wait")
    order = line(place, key)
    store.stop()
    store.begin_again()
    assert line(place, key) == order
    place.ledger.open(key)
    assert get_all([holder, *waiting]) == ["holder", *range(50)]
    assert [row["task_id"] for row in place.ledger.runs(key)] == [holder.id, *order]
    assert place.ledger.overlaps(key) == 0


def test_a_store_that_forgets_everything_loses_who_waited_and_nobody_else(beside_a_store, key):
    place, store = beside_a_store
    holder = place.task("line").delay(key, "holder", key)
    begun(place, key)
    lost = park_all(place, key, in_line(place, key, 1, 2, 3))
    assert len(messages_in_custody(place, key)) == 3
    with Redis(port=store.port) as client:
        client.flushall()
    place.ledger.open(key)
    assert holder.get(timeout=30) == "holder"
    assert place.task("line").delay(key, "next").get(timeout=20) == "next", "the key is free"
    wait_until(lambda: messages_with(place, key) == 0, 20, "neither has the broker a message")
    assert {result.state for result in lost} == {"RETRY"}
    assert set(values(place, key)) == {"holder", "next"}
