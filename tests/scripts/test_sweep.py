"""`sweep`: what needs attention is named, and nothing else."""

from __future__ import annotations

import json

import pytest
from desk import FAR_LOCK, LOCK, OTHER_LOCK, TTL

from celery_singleflight.claims import Outcome, Record
from celery_singleflight.keys import LockKey
from celery_singleflight.script import load

SWEEP = load("sweep")
WEEK_MS = 604_800_000


def known_as(claim):
    """How the sweeper knows a trigger: without the lock key, which its record does not need."""
    return claim.record._replace(lock_key=claim.record.lock_key._replace(text=""))


def test_nothing_is_due_where_nothing_is_kept(desk):
    assert desk.sweep() == []
    assert [name.split(":")[2] for name in desk.keyspace.names()] == ["sweep"]


def test_a_live_run_is_not_due(desk):
    desk.acquire(desk.claim(message=b"a message"))
    assert desk.sweep() == []


@pytest.mark.parametrize("execution_key", [None, "invoice:1", "two\nlines", "ünï : {x} %"])
def test_a_run_is_due_when_its_lease_has_ended(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.acquire(claim)
    assert desk.due_in(claim) == pytest.approx(TTL, abs=5.0)
    desk.overdue(claim)

    (record,) = desk.sweep()

    assert record == known_as(claim)
    assert desk.store.names(record)["trigger"] == desk.trigger_name(claim)
    assert desk.store.names(record)["execution"] == desk.execution_name(claim)
    assert desk.store.names(record)["due"] == desk.due_name(claim)


def test_a_trigger_whose_message_is_not_kept_is_never_due(desk):
    claim = desk.claim()
    desk.acquire(claim)
    desk.expire(claim)
    assert (desk.sweep(), desk.due(claim)) == ([], {})


def test_looking_changes_nothing_but_for_how_long_the_index_lives(desk):
    claim = desk.claim(message=b"a message")
    desk.acquire(claim)
    desk.overdue(claim)
    before = desk.keyspace.snapshot()
    assert before[desk.due_name(claim)][1] == -1, "it goes with its last member"

    first, second = desk.sweep(), desk.sweep()

    assert first == second == [known_as(claim)]
    after = desk.keyspace.snapshot()
    assert after[desk.due_name(claim)][0] == before[desk.due_name(claim)][0]
    (turn,) = after.keys() - before.keys()
    assert {name: value for name, value in after.items() if name not in (turn, desk.due_name(claim))} == {
        name: value for name, value in before.items() if name != desk.due_name(claim)
    }
    assert WEEK_MS - 5000 < desk.keyspace.ttls()[desk.due_name(claim)] <= WEEK_MS


def test_in_one_interval_one_sweeper_looks(desk):
    claim = desk.claim(message=b"a message")
    desk.acquire(claim)
    desk.overdue(claim)
    assert desk.sweep() == [known_as(claim)]

    assert desk.store.due(["billing"], limit=10, interval=60.0) == []
    assert desk.sweep() == [known_as(claim)]


def test_sweepers_of_other_lock_names_do_not_wait_for_each_other(desk):
    here, there = desk.claim("t1", message=b"1"), desk.claim("t2", lock_key=FAR_LOCK, message=b"2")
    for claim in (here, there):
        desk.acquire(claim)
        desk.overdue(claim)

    assert [desk.store.due([name], limit=10, interval=60.0) for name in (LOCK.name, FAR_LOCK.name)] == [
        [known_as(here)],
        [known_as(there)],
    ]


def test_an_index_that_is_added_to_goes_on_living_for_its_week(desk):
    first = desk.claim("t1", message=b"1")
    desk.acquire(first)
    desk.sweep()

    desk.acquire(desk.claim("t2", lock_key=OTHER_LOCK, message=b"2"))

    assert WEEK_MS - 5000 < desk.keyspace.ttls()[desk.due_name(first)] <= WEEK_MS


def test_the_longest_overdue_come_first_and_no_more_than_asked_for(desk):
    claims = [desk.claim(f"t{n}", limit=10, message=b"a message") for n in range(5)]
    for claim in claims:
        desk.acquire(claim)
    for seconds, claim in zip((20, 50, 10, 40, 30), claims, strict=True):
        desk.overdue(claim, seconds)

    assert [record.task_id for record in desk.sweep(limit=3)] == ["t1", "t3", "t4"]
    assert [record.task_id for record in desk.sweep()] == ["t1", "t3", "t4", "t0", "t2"]


def test_several_lock_names_are_looked_at_at_once(desk):
    here, there = desk.claim("t1", message=b"1"), desk.claim("t2", lock_key=FAR_LOCK, message=b"2")
    for claim in (here, there):
        desk.acquire(claim)
        desk.overdue(claim)

    found = desk.sweep(LOCK.name, "unknown", FAR_LOCK.name)

    assert sorted(found) == sorted([known_as(here), known_as(there)])
    desk.client.script_flush()
    assert sorted(desk.sweep(FAR_LOCK.name, LOCK.name)) == sorted(found)


def test_all_lock_keys_of_a_name_are_in_one_index(desk):
    claims = [desk.claim(f"t{n}", lock_key=key, message=b"a message") for n, key in enumerate((LOCK, OTHER_LOCK))]
    for claim in claims:
        desk.acquire(claim)
        desk.overdue(claim)
    assert {record.task_id for record in desk.sweep()} == {"t0", "t1"}


def test_the_reply_is_a_list_for_each_set_also_when_nothing_is_due(desk):
    claim = desk.claim(execution_key="invoice:1", message=b"a message")
    desk.acquire(claim)
    desk.overdue(claim)
    due = desk.due_name(claim)
    places = [f"{due}:turn", due, f"{due}:other"]

    raw = desk.connections.run(SWEEP, 3, [*places, 60_000, 10])

    assert json.loads(SWEEP.reply(raw).members) == [["t1\ninvoice:1"], []]
    assert Record.of_member(LockKey("billing", ""), "t1\ninvoice:1") == known_as(claim)
    word, left_ms = SWEEP.reply(desk.connections.run(SWEEP, 3, [*places, 60_000, 10]))
    assert (word, 55_000 < left_ms <= 60_000) == ("wait", True)
    desk.client.delete(places[0])


def test_looking_for_nothing_asks_nothing(desk):
    assert desk.sweep(*()) == []
    assert desk.store.due([], limit=10, interval=60.0) == []


# From where it comes to where it goes


@pytest.mark.parametrize("gone", ["settled", "concluded", "rescued", "given back to the broker", "forgotten"])
def test_the_index_goes_with_its_last_member(desk, gone):
    claim = desk.claim(message=b"a message")
    token = desk.acquire(claim).token
    assert desk.due_name(claim) in desk.keyspace.names()
    match gone:
        case "settled":
            desk.finish(claim, token)
            assert set(desk.due(claim)) == {"t1"}
            desk.settle(claim)
        case "concluded":
            desk.conclude(claim)
        case "rescued":
            desk.client.delete(desk.trigger_name(claim))
            assert desk.rescue(claim) is None
        case "given back to the broker":
            desk.abandon(claim, generation=1)
        case "forgotten":
            desk.abandon(claim, forget=True)

    assert desk.due_name(claim) not in desk.keyspace.names()


def test_an_outcome_that_is_not_settled_is_due_after_its_grace(desk):
    claim = desk.claim(message=b"a message")
    desk.run(claim)
    assert desk.enter(desk.claim(message=b"a copy", grace=5.0)).what == "own"
    heir = desk.claim(message=b"a copy")
    assert desk.enter(heir).outcome is Outcome.SUCCEEDED
    assert desk.due_in(heir) == pytest.approx(0.0, abs=1.0)
