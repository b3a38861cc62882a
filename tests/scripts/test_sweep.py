"""`sweep`: what needs attention is named, and nothing else."""

from __future__ import annotations

import json

import pytest
from desk import FAR_LOCK, LOCK, OTHER_LOCK, TTL

from celery_singleflight.claims import Outcome, Record
from celery_singleflight.script import load

SWEEP = load("sweep")
WEEK_MS = 604_800_000


def found(desk, *lock_names, limit=10):
    return desk.store.due(lock_names or ["billing"], limit)


def known_as(claim):
    """How the sweeper knows a trigger: without the lock key, which its record does not need."""
    return claim.record._replace(lock_key=claim.record.lock_key._replace(text=""))


def test_nothing_is_due_where_nothing_is_kept(desk):
    assert found(desk) == []
    assert desk.keyspace.names() == []


def test_a_live_run_is_not_due(desk):
    desk.acquire(desk.claim(message=b"a message"))
    assert found(desk) == []


@pytest.mark.parametrize("execution_key", [None, "invoice:1", "two\nlines", "ünï : {x} %"])
def test_a_run_is_due_when_its_lease_has_ended(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.acquire(claim)
    assert desk.due_in(claim) == pytest.approx(TTL, abs=5.0)
    desk.overdue(claim)

    (record,) = found(desk)

    assert record == known_as(claim)
    assert desk.store.names(record)["trigger"] == desk.trigger_name(claim)
    assert desk.store.names(record)["execution"] == desk.execution_name(claim)
    assert desk.store.names(record)["due"] == desk.due_name(claim)


def test_a_trigger_whose_message_is_not_kept_is_never_due(desk):
    claim = desk.claim()
    desk.acquire(claim)
    desk.expire(claim)
    assert (found(desk), desk.due(claim)) == ([], {})


def test_looking_changes_nothing_but_for_how_long_the_index_lives(desk):
    claim = desk.claim(message=b"a message")
    desk.acquire(claim)
    desk.overdue(claim)
    before = desk.keyspace.snapshot()
    assert before[desk.due_name(claim)][1] == -1, "it goes with its last member"

    first, second = found(desk), found(desk)

    assert first == second == [known_as(claim)]
    after = desk.keyspace.snapshot()
    assert after[desk.due_name(claim)][0] == before[desk.due_name(claim)][0]
    assert {**after, desk.due_name(claim): None} == {**before, desk.due_name(claim): None}
    assert WEEK_MS - 5000 < desk.keyspace.ttls()[desk.due_name(claim)] <= WEEK_MS


def test_an_index_that_is_added_to_goes_on_living_for_its_week(desk):
    first = desk.claim("t1", message=b"1")
    desk.acquire(first)
    found(desk)

    desk.acquire(desk.claim("t2", lock_key=OTHER_LOCK, message=b"2"))

    assert WEEK_MS - 5000 < desk.keyspace.ttls()[desk.due_name(first)] <= WEEK_MS


def test_the_longest_overdue_come_first_and_no_more_than_asked_for(desk):
    claims = [desk.claim(f"t{n}", limit=10, message=b"a message") for n in range(5)]
    for claim in claims:
        desk.acquire(claim)
    for seconds, claim in zip((20, 50, 10, 40, 30), claims, strict=True):
        desk.overdue(claim, seconds)

    assert [record.task_id for record in found(desk, limit=3)] == ["t1", "t3", "t4"]
    assert [record.task_id for record in found(desk)] == ["t1", "t3", "t4", "t0", "t2"]


def test_several_lock_names_are_looked_at_in_one_exchange(desk):
    here, there = desk.claim("t1", message=b"1"), desk.claim("t2", lock_key=FAR_LOCK, message=b"2")
    for claim in (here, there):
        desk.acquire(claim)
        desk.overdue(claim)

    assert found(desk, LOCK.name, "unknown", FAR_LOCK.name) == [known_as(here), known_as(there)]
    desk.client.script_flush()
    assert found(desk, FAR_LOCK.name, LOCK.name) == [known_as(there), known_as(here)]


def test_all_lock_keys_of_a_name_are_in_one_index(desk):
    claims = [desk.claim(f"t{n}", lock_key=key, message=b"a message") for n, key in enumerate((LOCK, OTHER_LOCK))]
    for claim in claims:
        desk.acquire(claim)
        desk.overdue(claim)
    assert {record.task_id for record in found(desk)} == {"t0", "t1"}


def test_a_lock_name_that_cannot_be_looked_at_does_not_hide_the_others(desk, caplog):
    bad, good = desk.claim("t1", message=b"1"), desk.claim("t2", lock_key=FAR_LOCK, message=b"2")
    desk.acquire(good)
    desk.overdue(good)
    desk.client.set(desk.due_name(bad), "no sorted set", px=60_000)

    assert found(desk, LOCK.name, FAR_LOCK.name) == [known_as(good)]
    assert "could not look what is due of billing: script sweep failed: WRONGTYPE" in caplog.text


def test_the_reply_is_a_list_also_when_nothing_is_due(desk):
    raw = desk.connections.run(SWEEP, 1, [desk.due_name(desk.claim()), 10])
    assert SWEEP.reply(raw) == ("due", b"[]")


def test_looking_for_nothing_asks_nothing(desk):
    assert desk.store.due([], 10) == []


def test_members_are_told_as_text(desk):
    claim = desk.claim(execution_key="invoice:1", message=b"a message")
    desk.acquire(claim)
    desk.overdue(claim)

    raw = desk.connections.run(SWEEP, 1, [desk.due_name(claim), 10])

    assert json.loads(SWEEP.reply(raw).members) == ["t1\ninvoice:1"]
    assert Record.of_member("billing", "t1\ninvoice:1") == known_as(claim)


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
