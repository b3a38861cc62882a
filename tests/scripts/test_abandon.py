"""`abandon`: a run ends without an outcome."""

from __future__ import annotations

import pytest
from desk import OTHER_LOCK, TTL

from celery_singleflight.claims import Outcome, Surplus

KEYS = pytest.mark.parametrize("execution_key", [None, "invoice:1"], ids=["task id", "execution key"])


@KEYS
def test_an_abandoned_lease_is_free_and_its_trigger_runs_again(desk, execution_key):
    claim = desk.claim("t1", execution_key=execution_key)
    desk.acquire(claim)

    desk.abandon(claim)

    assert desk.scores(claim) == {}
    assert {"owner", "until_ms", "since_ms", "fence", "outcome"}.isdisjoint(desk.execution(claim))
    other = desk.claim("t2")
    desk.acquire(other)
    desk.abandon(other)
    assert desk.acquire(desk.claim("t1", execution_key=execution_key)).attempt == 2


@KEYS
@pytest.mark.parametrize("how", [{}, {"generation": 3}, {"forget": True}, {"hold": None}], ids=str)
def test_abandoning_again_changes_nothing(desk, execution_key, how):
    claim = desk.claim(execution_key=execution_key)
    desk.acquire(claim)
    desk.abandon(claim, **how)
    before = desk.keyspace.snapshot()

    desk.abandon(claim, **how)
    assert desk.keyspace.snapshot() == before


def test_abandoning_what_was_never_held_creates_nothing(desk):
    desk.abandon(desk.claim(execution_key="invoice:1"), generation=1)
    desk.abandon(desk.claim())
    assert desk.keyspace.names() == []


@KEYS
@pytest.mark.parametrize("heir", ["t1", "t2"], ids=["redelivery", "other trigger"])
def test_a_late_abandon_does_not_free_the_next_holders_lease(desk, execution_key, heir):
    late, holder = desk.claim("t1", execution_key=execution_key), desk.claim(heir, execution_key=execution_key)
    desk.acquire(late)
    desk.expire(late)
    acquired = desk.acquire(holder)
    before = desk.keyspace.snapshot()

    desk.abandon(late)

    after = desk.keyspace.snapshot()
    for name in (desk.lease_name(holder), desk.execution_name(holder), desk.trigger_name(holder)):
        assert after[name] == before[name]
    assert desk.enter(holder) == acquired


def test_the_other_holders_keep_their_leases(desk):
    first, second = desk.claim("t1", limit=2), desk.claim("t2", limit=2)
    desk.acquire(first)
    acquired = desk.acquire(second)

    desk.abandon(first)

    assert list(desk.scores(second)) == [second.owner]
    assert desk.enter(second) == acquired


def test_a_late_abandon_does_not_end_an_execution_under_way_behind_another_lock_key(desk):
    late = desk.claim("t1", execution_key="invoice:1")
    holder = desk.claim("t2", execution_key="invoice:1", lock_key=OTHER_LOCK)
    desk.acquire(late)
    desk.expire(late)
    acquired = desk.acquire(holder)

    desk.abandon(late)

    assert desk.scores(late) == {}
    assert desk.enter(holder) == acquired


@KEYS
@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED])
@pytest.mark.parametrize("how", [{}, {"generation": 1}], ids=str)
def test_abandoning_after_the_end_does_not_take_the_outcome_back(desk, execution_key, outcome, how):
    claim = desk.claim(execution_key=execution_key)
    desk.run(claim, outcome)

    desk.abandon(claim, **how)

    assert desk.trigger(claim)["outcome"] == outcome.value
    assert desk.scores(claim) == {}


def test_forgetting_after_the_end_does_not_take_the_outcome_back(desk):
    claim = desk.claim("call", execution_key="invoice:1", has_trigger=False)
    desk.run(claim)

    desk.abandon(claim, forget=True)

    assert desk.enter(desk.claim("t2", execution_key="invoice:1")).outcome is Outcome.SUCCEEDED


@KEYS
def test_a_retry_makes_the_older_copies_of_its_message_surplus(desk, execution_key):
    first = desk.claim(execution_key=execution_key, copy="c1", previous="")
    retry = desk.claim(execution_key=execution_key, copy="c1", previous="", generation=1)
    desk.acquire(first)

    desk.abandon(first, generation=1)

    assert desk.enter(first) == Surplus("generation")
    assert desk.enter(desk.claim(execution_key=execution_key, copy="c2", previous="c1")) == Surplus("generation")
    assert desk.acquire(retry).attempt == 2


def test_a_retry_counts_whatever_copies_there_were_before_it(desk):
    first = desk.claim(copy="c1", previous="")
    desk.acquire(first)
    desk.abandon(first, generation=1)

    desk.acquire(desk.claim(copy="c7", previous="c6", generation=1))


def test_a_generation_never_goes_back(desk):
    claim = desk.claim(generation=5)
    desk.acquire(claim)

    desk.abandon(claim, generation=2)

    assert desk.trigger(claim)["generation"] == "5"
    assert desk.trigger(claim)["copy"] == ""
    assert desk.enter(desk.claim(generation=4)) == Surplus("generation")


def test_a_generation_of_a_trigger_that_the_store_forgot_is_not_recorded(desk):
    claim = desk.claim()
    desk.acquire(claim)
    desk.keyspace.clear()

    desk.abandon(claim, generation=1)

    assert desk.keyspace.names() == []


def test_forgetting_leaves_nothing_but_the_counter_of_the_tokens(desk):
    claim = desk.claim("call")
    desk.acquire(claim)

    desk.abandon(claim, forget=True)

    assert desk.keyspace.names() == [desk.fence_name(claim)]


def test_forgetting_a_run_with_an_execution_key_leaves_nothing_but_the_counter_of_the_tokens(desk):
    claim = desk.claim("call", execution_key="invoice:1", has_trigger=False)
    desk.acquire(claim)

    desk.abandon(claim, forget=True)

    assert desk.keyspace.names() == [desk.fence_name(claim)]


def test_forgetting_does_not_reach_the_run_that_took_over(desk):
    late = desk.claim("call", execution_key="invoice:1", has_trigger=False)
    heir = desk.claim("t2", execution_key="invoice:1")
    desk.acquire(late)
    desk.expire(late)
    acquired = desk.acquire(heir)

    desk.abandon(late, forget=True)

    assert desk.enter(heir) == acquired


def test_a_lease_that_an_outer_holder_goes_on_with_is_not_released(desk):
    outer = desk.claim("t1")
    inner = desk.claim(outer.owner, owner=outer.owner, execution_key="invoice:1", has_trigger=False)
    acquired = desk.acquire(outer)
    desk.acquire(inner)

    desk.abandon(inner, forget=True, hold=None)

    assert not desk.client.exists(desk.execution_name(inner))
    assert desk.enter(outer) == acquired
    assert desk.enter(desk.claim("t2")).what == "lock"


# What becomes of the message


@KEYS
@pytest.mark.parametrize("how", [{}, {"generation": 1}, {"forget": True}], ids=str)
def test_a_message_that_is_the_brokers_from_now_on_is_kept_no_longer(desk, execution_key, how):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.acquire(claim)

    for _ in range(2):
        desk.abandon(claim, **how)
        assert (desk.message(claim), desk.due(claim)) == (None, {})
    assert desk.rescue(claim) is None


@KEYS
@pytest.mark.parametrize("died", [False, True])
def test_a_message_that_may_come_again_is_published_when_it_does_not(desk, execution_key, died):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.acquire(claim)

    desk.abandon(claim, again=5.0, died=died)

    assert desk.message(claim) == b"a message"
    assert desk.due_in(claim) == pytest.approx(5.0, abs=1.0)
    handout = desk.rescue(claim)
    assert (handout.message, handout.outcome, handout.times) == (b"a message", "", 1)


@KEYS
def test_giving_back_again_does_not_put_off_the_look(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.acquire(claim)
    desk.abandon(claim, again=5.0)
    before = desk.keyspace.snapshot()

    desk.abandon(claim, again=500.0)

    assert desk.keyspace.snapshot() == before


def test_a_message_that_came_again_is_in_the_custody_of_its_next_run(desk):
    first, second = desk.claim(message=b"first"), desk.claim(message=b"second")
    desk.acquire(first)
    desk.abandon(first, again=5.0)
    desk.acquire(second)
    before = desk.keyspace.snapshot()

    desk.abandon(first, again=0.0, died=True)
    desk.abandon(first)

    assert desk.keyspace.snapshot() == before
    assert desk.message(second) == b"second"
    assert desk.due_in(second) == pytest.approx(TTL, abs=5.0)


def test_without_a_message_there_is_nothing_to_publish(desk):
    claim = desk.claim()
    desk.acquire(claim)

    desk.abandon(claim, again=5.0)

    assert desk.due(claim) == {}


def test_a_run_that_was_overtaken_does_not_touch_the_message(desk):
    late, heir = desk.claim(message=b"1"), desk.claim(message=b"2")
    desk.die(late)
    desk.acquire(heir)
    due = desk.due(heir)

    for how in ({}, {"again": 0.0}, {"again": 0.0, "died": True}):
        desk.abandon(late, **how)

    assert (desk.message(heir), desk.due(heir)) == (b"2", due)


# How the run ended


@KEYS
def test_the_process_that_gives_back_and_then_dies_has_died_once(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.acquire(claim)
    desk.abandon(claim, again=5.0)
    assert (desk.trigger(claim).get("died"), desk.trigger(claim)["left_by"]) == (None, claim.owner)

    for _ in range(3):
        desk.abandon(claim, again=5.0, died=True)
        assert desk.trigger(claim)["died"] == "1"
    assert "left_by" not in desk.trigger(claim)


@KEYS
def test_a_death_is_counted_once_however_often_it_is_told(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.acquire(claim)

    for _ in range(3):
        desk.abandon(claim, again=5.0, died=True)

    assert desk.trigger(claim)["died"] == "1"
    assert desk.scores(claim) == {}


@KEYS
def test_a_death_of_somebody_else_is_not_counted(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.acquire(claim)
    stranger = claim._replace(owner="somebody")

    desk.abandon(stranger, again=5.0, died=True)

    assert "died" not in desk.trigger(claim)
    desk.abandon(claim, again=5.0)
    desk.abandon(stranger, again=5.0, died=True)
    assert "died" not in desk.trigger(claim)


@KEYS
def test_who_left_is_forgotten_when_the_trigger_enters_again(desk, execution_key):
    first, second = (desk.claim(execution_key=execution_key, message=b"a message") for _ in range(2))
    desk.acquire(first)
    desk.abandon(first, again=5.0)
    desk.acquire(second)
    assert "left_by" not in desk.trigger(second)

    desk.abandon(first, again=5.0, died=True)

    assert "died" not in desk.trigger(second)


@KEYS
@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED])
def test_a_process_that_dies_after_the_end_of_its_run_is_no_death_of_the_run(desk, execution_key, outcome):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.run(claim, outcome)

    desk.abandon(claim, again=5.0, died=True)

    assert "died" not in desk.trigger(claim)
    assert desk.message(claim) == b"a message"
    assert desk.due_in(claim) == pytest.approx(TTL, abs=5.0)


def test_dying_creates_nothing_for_a_trigger_that_the_store_forgot(desk):
    for execution_key in (None, "invoice:1"):
        desk.abandon(desk.claim(execution_key=execution_key, message=b"a message"), again=5.0, died=True)
    assert desk.keyspace.names() == []


@KEYS
def test_a_retry_begins_a_new_count(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.acquire(claim)
    desk.abandon(claim, again=5.0, died=True)
    again = claim._replace(owner="again")
    desk.acquire(again)

    desk.abandon(again, generation=1)

    assert "died" not in desk.trigger(claim)


def test_a_trigger_that_is_forgotten_stays_so(desk):
    claim = desk.claim(execution_key="invoice:1")
    desk.acquire(claim)
    trigger = desk.store.names(claim.record)["trigger"]
    desk.client.delete(trigger)
    desk.abandon(claim)
    assert not desk.client.exists(trigger)
