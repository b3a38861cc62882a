"""Under `queue` triggers wait in the store, in line, and whoever releases the lock key calls the next."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from uuid import uuid4

import pytest
import waiting_app
from aftermath import delete_queue, messages_with, queue_on_rabbitmq, record_of
from celery import chain, chord
from celery.canvas import StampingVisitor
from celery.exceptions import TaskRevokedError
from nodes import wait_until
from waiting_room import attention_at, deliveries, get_all, held, line, park, park_all, parked, settings_apart, values

from celery_singleflight import WaitTimeout, lock

ROUTES = {
    name: {"exchange": name, "exchange_type": kind, "routing_key": routing_key}
    for name, kind, routing_key in (("aside", "direct", "aside"), ("topics", "topic", "work.#"))
}


class Stamp(StampingVisitor):
    def on_signature(self, sig, **headers):
        return {"mark": "blue"}


def with_queues(config):
    """The place's own queue, and two to be routed to."""
    own, mark = f"q-{uuid4().hex[:8]}", uuid4().hex[:8]
    queues = {f"{name}-{mark}": {**route, "exchange": f"{name}-{mark}"} for name, route in ROUTES.items()}
    queues[f"aside-{mark}"]["routing_key"] = f"aside-{mark}"
    queues[own] = {"exchange": own, "routing_key": own}
    return {**config, "task_default_queue": own, "task_queues": queues, "accept_content": ["json", "yaml", "pickle"]}


@pytest.fixture(scope="module")
def crew(start_shared, valkey):
    """Two workers of two processes, whose leases last longer than the tests."""
    config = with_queues(settings_apart(valkey.url, singleflight_lease_ttl=30))
    return start_shared(config, app_module=waiting_app)


@pytest.fixture
def place(crew, request):
    request.node.place = crew
    return crew


def in_line(place, key, count, **more):
    return [place.task("line").s(key, value, **more) for value in range(count)]


def assert_all_ran_in_order(place, key, results):
    count = len(results)
    assert get_all(results) == list(range(count))
    assert values(place, key) == list(range(count))
    assert place.ledger.overlaps(key) == 0
    assert parked(place, key) == set()


def assert_few_deliveries(place, key, results):
    """Where runs are short the next are called ahead of time, which may be in vain five times a second: there is no slot."""
    runs = place.ledger.runs(key)
    counts = [deliveries(place, result) for result in results]
    assert max(counts) <= 3
    assert sum(counts) <= 2 * len(results) + 2 + 10 * (runs[-1]["at"] - runs[0]["at"])


def test_those_who_wait_run_in_order_of_arrival(place, key):
    with held(place, key):
        results = park_all(place, key, in_line(place, key, 8, seconds=0.11))
        assert line(place, key) == [result.id for result in results]
        assert {result.state for result in results} == {"RETRY"}
    assert_all_ran_in_order(place, key, results)
    assert {deliveries(place, result) for result in results} == {2}


def test_nothing_is_delivered_while_the_key_is_held(place, key):
    with held(place, key, lease_ttl=1.5):
        results = park_all(place, key, in_line(place, key, 5))
        first_look = attention_at(place, key)
        wait_until(lambda: attention_at(place, key) > first_look + 1000, 15, "sweepers have looked at the line, and again")
        assert [deliveries(place, result) for result in results] == [1] * 5
    assert_all_ran_in_order(place, key, results)


def test_short_runs_keep_the_order(place, key):
    with held(place, key):
        results = park_all(place, key, in_line(place, key, 40, seconds=0.01))
    assert_all_ran_in_order(place, key, results)
    assert_few_deliveries(place, key, results)


def test_who_arrives_when_the_key_is_free_does_not_pass_those_in_line(place, key):
    with held(place, key):
        first = park_all(place, key, in_line(place, key, 10, seconds=0.02))
    last = place.task("line").delay(key, 10)
    assert_all_ran_in_order(place, key, [*first, last])


def publish_facts(place, key, gate, **more):
    signature = place.task("facts_in_line").s(key, gate)
    signature.stamp(Stamp())
    return signature.apply_async(
        shadow="shade",
        priority=3,
        headers={"custom": "kept"},
        time_limit=300,
        soft_time_limit=200,
        expires=datetime.now(UTC) + timedelta(hours=1),
        link=place.task("note").si(f"{key}-link"),
        serializer="pickle",
        compression="zlib",
        **more,
    )


def assert_it_arrives_as_it_was_sent(place, key, **route):
    place.ledger.open(f"{key}-open")
    expected = publish_facts(place, key, f"{key}-open", **route).get(timeout=30)
    with held(place, key, "protected_app.facts_in_line"):
        waited = publish_facts(place, key, f"{key}-open", **route)
        wait_until(lambda: waited.id in parked(place, key), 20, "it waits")
    facts = waited.get(timeout=30)
    assert facts == expected
    assert (facts["custom"], facts["stamps"], facts["priority"], facts["compression"]) == (
        "kept",
        {"mark": "blue"},
        3,
        "application/x-gzip",
    )
    assert facts["content_type"] == "application/x-python-serialize"
    wait_until(lambda: len(place.ledger.read(f"{key}-link")) == 2, 15, "both callbacks have run, once each")
    return facts


@pytest.mark.parametrize("route", ["default", *ROUTES])
def test_a_trigger_that_was_parked_arrives_as_it_was_sent(place, key, route):
    name = next((name for name in place.app.conf.task_queues if name.startswith(route)), None)
    where = {} if name is None else {"queue": name}
    if route == "topics":
        where["routing_key"] = "work.some.part"
    facts = assert_it_arrives_as_it_was_sent(place, key, **where)
    if name is not None:
        assert facts["routing_key"] == (where.get("routing_key") or name)


def test_chain_and_chord_go_on_when_a_member_was_parked(place, key):
    task, identity, total = place.task("line"), place.task("identity"), place.task("total")
    with held(place, key):
        chained = chain(task.si(key, 1), identity.s(), task.si(key, 2)).delay()
        wait_until(lambda: chained.parent.parent.id in parked(place, key), 15, "the first of the chain waits")
        counted = chord([task.si(key, value) for value in (3, 4, 5)])(total.s())
        wait_until(lambda: len(parked(place, key)) == 4, 15, "the members of the chord wait")
    assert chained.get(timeout=30) == 2
    assert counted.get(timeout=30) == 12
    assert sorted(values(place, key)) == [1, 2, 3, 4, 5]


def test_what_expires_in_line_is_revoked_and_is_in_nobodys_way(place, key):
    with held(place, key):
        expiring = park(place, key, place.task("line").s(key, "late"), expires=1.5)
        last = park(place, key, place.task("line").s(key, "last"))
        wait_until(lambda: expiring.state == "REVOKED", 15, "it has expired")
        assert line(place, key) == [last.id]
    assert last.get(timeout=20) == "last"
    assert values(place, key) == ["last"]
    assert record_of(place, expiring.id)["outcome"] == "revoked"


def test_the_end_of_wait_timeout_in_line_fails_the_trigger(place, key):
    errback = place.task("note_error").s(f"{key}-error")
    with held(place, key):
        impatient = park(place, key, place.task("line").s(key, "late"), wait_timeout=1.5, link_error=errback)
        last = park(place, key, place.task("line").s(key, "last"))
        with pytest.raises(WaitTimeout, match="at the end of wait_timeout"):
            impatient.get(timeout=20)
        assert line(place, key) == [last.id]
    wait_until(lambda: place.ledger.read(f"{key}-error"), 10, "the errback ran")
    assert last.get(timeout=20) == "last"
    assert values(place, key) == ["last"]
    assert record_of(place, impatient.id)["outcome"] == "timed out waiting"


def test_what_is_revoked_in_line_leaves_it(place, key):
    with held(place, key):
        first, revoked, last = park_all(place, key, in_line(place, key, 3))
        revoked.revoke()
        wait_until(lambda: revoked.id not in parked(place, key), 5, "a sweeper has withdrawn it")
        with pytest.raises(TaskRevokedError):
            revoked.get(timeout=10)
        assert line(place, key) == [first.id, last.id]
    assert get_all([first, last]) == [0, 2]
    assert values(place, key) == [0, 2]
    assert record_of(place, revoked.id)["outcome"] == "revoked"


def test_whose_turn_has_come_goes_before_what_the_broker_and_the_worker_have(start_place, valkey, key):
    """Its message comes to the front of the queue, and of those that the worker has and that wait for a slot."""
    config = settings_apart(valkey.url, singleflight_lease_ttl=30, worker_prefetch_multiplier=4)
    place = start_place(config, app_module=waiting_app, workers=1)
    with held(place, key):
        waiting = park_all(place, key, in_line(place, key, 2))
        backlog = [place.task("long").delay(f"{key}-backlog", 0.1) for _ in range(60)]
        wait_until(lambda: place.logs().count("protected_app.long") >= 8, 20, "the worker has taken what it may have")
    assert get_all(waiting) == [0, 1]
    assert len(place.ledger.runs(f"{key}-backlog")) < 40, "those that were there before it still wait"
    get_all(backlog)
    assert values(place, key) == [0, 1]


@pytest.mark.parametrize("count", [1, 2])
def test_lines_that_have_all_slots_leave_a_share_to_other_tasks(start_place, valkey, key, count):
    """Each run calls the next before its slot is free: what goes first each time would keep all others waiting to its end."""
    config = settings_apart(valkey.url, singleflight_lease_ttl=30)
    place = start_place(config, app_module=waiting_app, workers=1, concurrency=count)
    keys, waiting = [f"{key}-{n}" for n in range(count)], []
    with ExitStack() as block:
        for each in keys:
            block.enter_context(held(place, each))
            first = place.task("line").s(each, 0, gate=key)
            others = [place.task("line").s(each, value, seconds=0.12) for value in range(1, 15)]
            waiting += park_all(place, each, [first, *others])
    wait_until(lambda: all(place.ledger.runs(each) for each in keys), 15, "all slots are taken")
    other = place.task("long").delay(f"{key}-other")
    place.ledger.open(key)
    other.get(timeout=20)
    began = place.ledger.runs(f"{key}-other")[0]["at"]
    before = [row for each in keys for row in place.ledger.runs(each) if row["at"] < began]
    assert len(before) < 9 * count, "those in line have not all run before it"
    assert get_all(waiting) == list(range(15)) * count
    assert all(values(place, each) == list(range(15)) for each in keys)


def test_a_holder_that_is_terminated_makes_room_for_the_next(place, key):
    holder = place.task("line").delay(key, "holder", f"never-{key}")
    wait_until(lambda: place.ledger.runs(key), 15, "it runs")
    waiting = park_all(place, key, in_line(place, key, 2))
    holder.revoke(terminate=True, signal="SIGKILL")
    assert get_all(waiting, 20) == [0, 1], "nobody waits for its lease of thirty seconds"
    assert values(place, key) == ["holder", 0, 1]
    assert record_of(place, holder.id)["outcome"] == "revoked"


def test_a_revoke_outlives_all_workers_that_heard_it(start_place, valkey, key):
    place = start_place(settings_apart(valkey.url), workers=1, app_module=waiting_app)
    with held(place, key):
        revoked, last = park_all(place, key, in_line(place, key, 2))
        revoked.revoke()
        wait_until(lambda: record_of(place, revoked.id).get("outcome") == "revoked", 10, "the sweeper has withdrawn it")
        place.workers[0].container.kill()
        place.workers[0].container.restart()
        with pytest.raises(TaskRevokedError):
            revoked.get(timeout=20)
        wait_until(lambda: record_of(place, revoked.id).get("settled"), 30)
    assert last.get(timeout=20) == 1
    assert values(place, key) == [1]


def test_a_retry_of_the_body_waits_behind_those_in_line(place, key):
    retries = place.task("retry_in_line").delay(key, "retries", key)
    wait_until(lambda: place.ledger.runs(key), 15, "it runs")
    waiting = park_all(place, key, in_line(place, key, 3))
    place.ledger.open(key)
    assert get_all([retries, *waiting]) == ["retries", 0, 1, 2]
    assert values(place, key) == ["retries", 0, 1, 2, "retries"]
    assert place.ledger.overlaps(key) == 0


def test_a_parked_trigger_that_is_delivered_again_keeps_its_place_and_runs_once(place, key):
    with held(place, key):
        twice, last = park_all(place, key, in_line(place, key, 2))
        place.task("line").apply_async((key, 0), task_id=twice.id)
        wait_until(lambda: f"[{twice.id}] was delivered again while it waits" in place.logs(), 15, "the copy is dropped")
        assert line(place, key) == [twice.id, last.id]
    assert_all_ran_in_order(place, key, [twice, last])


def test_tasks_of_one_lock_name_keep_their_own_policies(place, key):
    with held(place, key):
        first = park(place, key, place.task("line").s(key, "first"))
        requeued = place.task("work").delay(key, "requeued")
        wait_until(lambda: f"[{requeued.id}] waits" in place.logs(), 15, "it goes back to the broker")
        assert place.task("skip").delay(key).get(timeout=15) == "skipped"
        second = park(place, key, place.task("line").s(key, "second"))
        assert line(place, key) == [first.id, second.id]
    assert get_all([first, second, requeued]) == ["first", "second", "requeued"]
    assert place.ledger.overlaps(key) == 0
    assert len(place.ledger.runs(key)) == 3


def test_two_of_a_line_hold_a_key_of_limit_two_and_no_third(place, key):
    task = place.task("two_lines")
    holders = [task.delay(key, n, key) for n in range(2)]
    wait_until(lambda: len(place.ledger.runs(key)) == 2, 15, "both places are taken")
    waiting = park_all(place, key, [task.s(key, n, seconds=0.1) for n in range(2, 10)])
    place.ledger.open(key)
    assert get_all(holders + waiting) == list(range(10))
    assert place.ledger.most_at_once(key) == 2
    order = values(place, key)[2:]
    assert all(abs(n - place_in_order) <= 1 for place_in_order, n in enumerate(order, 2)), "two enter together"


def test_a_lock_that_ends_calls_the_next_and_one_that_waits_passes_nobody(place, key):
    with held(place, key):
        waiting = park_all(place, key, in_line(place, key, 3, seconds=0.05))
        taken = threading.Event()

        def take():
            with lock(place.app, "protected_app.work", key, wait=30) as lease:
                place.ledger.write(key, "begin", run="lock", token=lease.fencing_token, value="lock")
                taken.set()
                place.ledger.write(key, "end", run="lock")

        thread = threading.Thread(target=take)
        thread.start()
    assert get_all(waiting, 15) == [0, 1, 2]
    assert taken.wait(15)
    thread.join()
    assert values(place, key) == [0, 1, 2, "lock"]
    assert place.ledger.overlaps(key) == 0


def test_a_direct_call_calls_the_next(place, key):
    done = []
    thread = threading.Thread(target=lambda: done.append(place.task("line")(key, "direct", key)))
    thread.start()
    wait_until(lambda: place.ledger.runs(key), 10, "the direct call runs")
    waiting = park_all(place, key, in_line(place, key, 2))
    place.ledger.open(key)
    assert get_all(waiting, 15) == [0, 1], "nobody waits for its lease of thirty seconds"
    thread.join(10)
    assert done == ["direct"]
    assert values(place, key) == ["direct", 0, 1]


def test_min_hold_keeps_a_line_apart(place, key):
    with held(place, key, "protected_app.cool_line"):
        results = park_all(place, key, [place.task("cool_line").s(key, n) for n in range(4)])
    assert_all_ran_in_order(place, key, results)
    begun = [row["at"] for row in place.ledger.runs(key)]
    assert all(later - earlier >= 0.75 for earlier, later in pairwise(begun)), begun
    assert max(deliveries(place, result) for result in results) == 2


@pytest.mark.parametrize(("pool", "workers"), [("threads", 1), ("solo", 2)])
def test_a_line_is_served_in_order_in_this_pool(start_place, valkey, key, pool, workers):
    config = settings_apart(valkey.url, singleflight_lease_ttl=30)
    place = start_place(config, pool=pool, concurrency=4, workers=workers, app_module=waiting_app)
    with held(place, key):
        results = park_all(place, key, in_line(place, key, 20, seconds=0.01))
    assert_all_ran_in_order(place, key, results)
    assert_few_deliveries(place, key, results)


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_a_line_on_rabbitmq_is_served_in_order_and_arrives_as_it_was_sent(start_place, valkey, rabbitmq, key, kind):
    config = settings_apart(valkey.url, singleflight_lease_ttl=30, accept_content=["json", "yaml", "pickle"])
    place = start_place({**config, **queue_on_rabbitmq(rabbitmq, kind)}, workers=1, app_module=waiting_app)
    try:
        with held(place, key):
            results = park_all(place, key, in_line(place, key, 20, seconds=0.01))
        assert_all_ran_in_order(place, key, results)
        assert_few_deliveries(place, key, results)
        assert_it_arrives_as_it_was_sent(place, f"{key}-facts")
        wait_until(lambda: messages_with(place, "") == 0, 20, "nothing is left in the broker")
    finally:
        place.end()
        delete_queue(place)
