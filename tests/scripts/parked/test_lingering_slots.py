"""A trigger that waits in its slot: one of a lock key, where runs are short, and nobody is passed by it."""

from __future__ import annotations

from contextlib import suppress

import pytest
from queue_desk import ids

from celery_singleflight import StoreUnavailable
from celery_singleflight.claims import Acquired, Linger, Parked


@pytest.fixture
def short(desk):
    """Runs are short, and somebody holds the lock key. Returns what `end` needs."""
    held = desk.hold()
    desk.make_runs_short()
    return held


def linger(desk, task_id="l0", **how):
    claim = desk.waits(task_id, linger=0.4, **how)
    answer = desk.enter(claim)
    assert isinstance(answer, Linger), answer
    assert ids(answer.calls) == []
    desk.let_linger_last()
    return claim


def has_baton(desk):
    return desk.client.exists(desk.name("baton")) == 1


def ask_after_baton(desk, claim, seconds=5.0):
    return desk.store.enter_after_baton(claim, seconds, lambda: True)


def test_the_first_in_line_may_wait_in_its_slot_for_a_few_runs(desk, short):
    answer = desk.enter(desk.waits("l0", linger=0.4))
    assert answer == Linger(0.09, ticket=answer.ticket, calls=[])
    assert answer.ticket == desk.client.zscore(desk.name("line"), "l0")
    assert desk.line() == ["l0"]
    assert desk.pace()["lingers"] == "l0"


def test_it_waits_no_longer_than_it_wants_to(desk, short):
    assert desk.enter(desk.waits("l0", linger=0.02)).seconds == 0.02


@pytest.mark.parametrize("why", ["runs are long", "no pace is known", "no slot"])
def test_it_is_parked_where_that_is_not_worth_it(desk, why):
    desk.hold()
    if why != "no pace is known":
        desk.make_runs_short(101 if why == "runs are long" else 10)
    answer = desk.enter(desk.waits("l0", linger=0.0 if why == "no slot" else 0.4))
    assert (answer.how, answer.place) == ("line", 0)
    assert "lingers" not in desk.pace()


def test_only_one_waits_in_its_slot(desk, short):
    linger(desk)
    answer = desk.enter(desk.waits("l1", linger=0.4))
    assert (answer.how, answer.place) == ("line", 1)


def test_who_has_others_before_it_does_not(desk, short):
    desk.park("w0")
    assert isinstance(desk.enter(desk.waits("l1", linger=0.4)), Parked)


def test_who_leaves_passes_the_baton_and_it_runs_next(desk, short):
    claim = linger(desk)
    assert not has_baton(desk)

    assert desk.end(*short) == []

    assert isinstance(ask_after_baton(desk, claim), Acquired)
    assert not has_baton(desk)
    assert "lingers" not in desk.pace()
    desk.check_gone()


def test_who_gets_no_baton_asks_all_the_same(desk, short):
    claim = linger(desk)
    answer = ask_after_baton(desk, claim._replace(waits=claim.waits._replace(linger=0.0)), 0.01)
    assert (answer.how, answer.place) == ("line", 0)
    assert "lingers" not in desk.pace()


def test_who_asks_after_the_baton_and_loses_the_reply_asks_again_and_has_the_lease(desk, short):
    claim = linger(desk)
    desk.end(*short)
    desk.lose_next_reply()
    with suppress(StoreUnavailable):
        ask_after_baton(desk, claim)
    assert isinstance(desk.enter(claim), Acquired)
    assert not has_baton(desk)


def test_a_baton_that_nobody_takes_goes_by_itself(desk, short):
    linger(desk)
    desk.end(*short)
    assert 0 < desk.client.pttl(desk.name("baton")) <= 2000
    assert desk.client.llen(desk.name("baton")) == 1
    desk.attend()
    assert desk.client.llen(desk.name("baton")) == 1


def test_nobody_takes_the_place_that_a_lingering_one_waits_for(desk, short):
    linger(desk)
    desk.end(*short)
    assert isinstance(desk.enter(desk.waits("new")), Parked)
    assert desk.enter(desk.claim("asks", on_held="ask")).task_id == "l0"


def test_who_waits_behind_a_lingering_one_is_called_ahead(desk, short):
    linger(desk)
    desk.park("w1")
    assert desk.end(*short) == ["w1"]


def test_who_was_called_ahead_waits_in_its_slot_while_the_first_comes(desk, short):
    first, second = desk.park("w0"), desk.park("w1")
    assert desk.end(*short) == ["w0", "w1"]
    assert not has_baton(desk), "the place is the first one's"
    copy = desk.copy_of(second, waits=second.waits._replace(linger=0.4))
    desk.let_linger_last()
    ahead = desk.copy_of(first)
    token = desk.acquire(ahead).token
    assert not has_baton(desk)
    assert isinstance(ask_after_baton(desk, copy, 0.01), Linger)
    desk.let_linger_last()
    assert not has_baton(desk), "no place is free"
    assert desk.end(ahead, token) == []
    assert isinstance(ask_after_baton(desk, copy), Acquired)


def test_who_has_lingered_in_vain_waits_in_line_and_says_so(desk, short):
    claim = linger(desk)

    answer = desk.enter(claim._replace(waits=claim.waits._replace(linger=0.0)))

    assert (answer.how, answer.place) == ("line", 0)
    assert desk.called() == set()
    assert "lingers" not in desk.pace()
    assert desk.end(*short) == ["l0"]


def test_it_may_ask_again_and_go_on_lingering(desk, short):
    claim = linger(desk)
    assert isinstance(desk.enter(claim), Linger)
    assert desk.line() == ["l0"]


def test_the_message_of_one_that_dies_in_its_slot_is_handed_out(desk, short):
    claim = linger(desk)
    assert 0.0 < desk.due_in(claim) <= 5.1
    desk.let_linger_lapse()
    desk.let_reservation_lapse(claim)
    desk.end(*short)
    desk.overdue(claim)

    assert desk.look_at(claim) == "l0"
    assert isinstance(desk.come(claim), Acquired)


def test_one_that_has_died_in_its_slot_is_called_and_the_next_one_ahead_of_its_turn(desk, short):
    claim = linger(desk)
    desk.park("w1")
    desk.let_linger_lapse()
    desk.let_reservation_lapse(claim)
    assert desk.end(*short) == ["l0", "w1"]
    assert desk.pace()["lingers"] == "w1"
    assert desk.attend() == []


def test_a_lingering_one_that_is_revoked_leaves_nothing(desk, short):
    claim = linger(desk)
    desk.withdraw(claim)
    assert "lingers" not in desk.pace()
    assert desk.end(*short) == []
    assert not has_baton(desk)
    desk.check_gone()


def test_a_lingering_one_whose_place_is_taken_by_a_newer_call_waits_for_that(desk, short):
    desk.enter(desk.waits("l0", "coalesce", linger=0.4, which="newest"))
    newer = desk.waits("l1", "coalesce", linger=0.4, which="newest")

    assert isinstance(desk.enter(newer), Linger)

    assert desk.line() == ["l1"]
    assert desk.pace()["lingers"] == "l1"


def test_to_ask_again_for_a_lost_reply_lingers_too(desk, short):
    desk.lose_next_reply()
    assert isinstance(desk.enter(desk.waits("l0", linger=0.4)), Linger)
    assert desk.line() == ["l0"]
