"""What a sweeper asks of those who wait: `attend`, `rescue` with what it recalls, `find`, and `conclude` for the revoked."""

from __future__ import annotations

import pytest
from desk import FAR_LOCK, LOCK, OTHER_LOCK
from queue_desk import ids

from celery_singleflight.claims import Acquired, Outcome, Record, Surplus

NAMES = [LOCK.name, FAR_LOCK.name]


def test_a_lock_key_that_nobody_waits_for_needs_no_attention(desk):
    assert desk.attend() == []
    assert desk.keyspace.names() == []


def test_attention_that_fails_does_not_come_first_for_ever(desk):
    desk.line_of("w0")
    desk.client.zadd(desk.name("due"), {f"\n{LOCK.text}": 0})
    desk.attend()
    assert desk.attention_in() > 1.0


def test_attention_for_one_lock_key_is_none_for_another(desk):
    holder, _, _ = desk.line_of("w0")
    desk.hold("other", lock_key=OTHER_LOCK)
    desk.park("w1", lock_key=OTHER_LOCK)
    desk.expire(holder)
    assert desk.attend(OTHER_LOCK) == []
    assert desk.attend(LOCK) == ["w0"]


def test_two_sweepers_call_one(desk):
    holder, _, _ = desk.line_of("w0", "w1")
    desk.expire(holder)
    assert (desk.attend(), desk.attend()) == (["w0"], [])


def test_who_has_come_by_another_lock_key_is_waited_for_no_more(desk):
    holder, token, (claim, _) = desk.line_of("w0", "w1")
    elsewhere = claim._replace(record=claim.record._replace(lock_key=OTHER_LOCK))
    run = desk.copy_of(claim, record=elsewhere.record)
    desk.end(run, desk.acquire(run).token)
    desk.settle(run)
    assert desk.end(holder, token) == ["w0"], "its place is still there"
    desk.let_reservation_lapse(claim)
    assert desk.look_at(claim) is None
    assert desk.due_in(claim) is None

    assert desk.attend() == ["w1"]

    assert desk.parked() == {"w1"}


# Recalled


def test_who_waits_in_peace_is_left_in_peace(desk):
    _, _, (claim,) = desk.line_of("w0", wait=100.0)
    desk.client.zadd(desk.due_name(claim), {"w0": desk.keyspace.now_ms() - 1})
    assert desk.look_at(claim) is None
    assert desk.due_in(claim) == pytest.approx(100.0, abs=5.0)


def test_who_is_due_but_waits_no_more_is_due_no_more(desk):
    _, _, (claim,) = desk.line_of("w0")
    desk.client.hdel(desk.name("parked"), "w0")
    desk.client.delete(desk.name("line"))
    assert desk.look_at(claim) is None
    assert desk.due_in(claim) is None
    assert desk.store.parked("w0", NAMES) == []


def test_a_lost_reply_of_a_recall_costs_a_pause(desk):
    holder, token, (claim,) = desk.line_of("w0")
    desk.end(holder, token)
    desk.overdue(claim)
    desk.lose_next_reply()
    assert desk.look_at(claim) == "w0"
    assert desk.due_in(claim) > 5.0


def test_what_is_handed_out_again_counts_once(desk):
    holder, token, (claim,) = desk.line_of("w0")
    desk.end(holder, token)
    desk.overdue(claim)
    desk.look_at(claim)
    one, two = desk.copy_of(claim), desk.copy_of(claim)
    assert isinstance(desk.enter(one), Acquired)
    assert desk.enter(two) == Surplus("copy")


# Found


@pytest.mark.parametrize("execution_key", [None, "invoice:1", "two\nlines"])
def test_who_waits_is_found_by_its_id_under_whatever_lock_name(desk, execution_key):
    desk.hold(lock_key=FAR_LOCK)
    claim = desk.park("w0", lock_key=FAR_LOCK, execution_key=execution_key)
    assert desk.store.parked("w0", NAMES) == [claim.record]


def test_who_does_not_wait_is_not_found(desk):
    holder, token, (claim,) = desk.line_of("w0")
    assert desk.store.parked("holder", NAMES) == []
    assert desk.store.parked("unknown", NAMES) == []
    assert desk.store.parked("w0", []) == []
    desk.end(holder, token)
    desk.acquire(desk.copy_of(claim))
    assert desk.store.parked("w0", NAMES) == []


def test_who_has_its_outcome_is_not_found(desk):
    _, _, (claim,) = desk.line_of("w0")
    desk.withdraw(claim)
    assert desk.store.parked("w0", NAMES) == []


# Revoked


@pytest.mark.parametrize("execution_key", [None, "invoice:1"])
def test_who_waits_and_is_revoked_is_published_once_more_for_celery_to_say_so(desk, execution_key):
    holder, token = desk.hold()
    claim = desk.park("w0", execution_key=execution_key)
    desk.withdraw(claim)
    assert desk.line() == []
    assert desk.due_in(claim) <= 0.0

    handout = desk.store.rescue(claim.record)

    assert (handout.message, handout.copy, handout.outcome) == (b"w0", "", "revoked")
    ended = desk.enter(desk.copy_of(claim))
    assert (ended.outcome, ended.settled) == (Outcome.REVOKED, False)
    assert desk.end(holder, token) == []


def test_a_lost_reply_revokes_once(desk):
    _, _, (claim, _) = desk.line_of("w0", "w1")
    desk.lose_next_reply()
    assert desk.withdraw(claim, owner="o1") == []
    assert desk.line() == ["w1"]
    assert desk.message(claim) == b"w0"


def test_who_was_called_and_is_revoked_leaves_its_place_to_the_next(desk):
    holder, token, (first, second) = desk.line_of("w0", "w1")
    desk.end(holder, token)

    assert desk.withdraw(first) == ["w1"]

    assert desk.called() == {"w1"}
    assert desk.come(first).outcome is Outcome.REVOKED
    assert isinstance(desk.come(second), Acquired)


def test_celery_settles_what_it_has_revoked_itself(desk):
    _, _, (claim,) = desk.line_of("w0")
    answer = desk.store.conclude(
        "o1", claim.record, Outcome.REVOKED, reason='["expired"]', keep=600.0, release=True, error=None
    )
    assert ids(answer.calls) == []
    assert desk.parked() == set()
    assert desk.message(claim) is None
    assert desk.due_in(claim) is None
    assert desk.enter(desk.redelivered(claim)).settled


def test_one_that_runs_is_not_revoked_by_a_sweeper_that_comes_too_late(desk):
    holder, token, (claim,) = desk.line_of("w0")
    desk.end(holder, token)
    copy = desk.copy_of(claim)
    token = desk.acquire(copy).token
    answer = desk.store.conclude("o1", claim.record, Outcome.REVOKED, reason="[]", keep=600.0, release=False)
    assert answer == ""
    assert desk.end(copy, token) == []


def test_what_nobody_knows_is_not_revoked_and_those_who_wait_are_looked_after(desk):
    desk.line_of("w0")
    answer = desk.store.conclude("o1", Record(LOCK, "unknown", None), Outcome.REVOKED, reason="[]", keep=600.0, release=False)
    assert answer == "unknown"
    assert desk.attention_in() <= 0.0
    assert desk.attend() == []
