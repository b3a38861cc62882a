"""Whoever makes room calls the next in line: `finish`, `abandon`, `conclude` and `attend`."""

from __future__ import annotations

import pytest
from queue_desk import ids

from celery_singleflight.claims import Acquired, Held, Outcome, Parked, Refused

RESERVED = 2.0
AGAIN = 5.0


def make_room(desk, how, holder, token):
    """Have a holder leave in one of the ways. Returns whom that calls."""
    match how:
        case "finish":
            return desk.end(holder, token)
        case "fail":
            return desk.end(holder, token, Outcome.FAILED)
        case "retry":
            return desk.give_back(holder, generation=1)
        case "die":
            return desk.give_back(holder, again=AGAIN, died=True)
        case "conclude":
            answer = desk.store.conclude(
                holder.owner, holder.record, Outcome.FAILED, reason="[]", keep=600.0, release=True, error=None
            )
            return ids(answer.calls)


WAYS = pytest.mark.parametrize("how", ["finish", "fail", "retry", "die", "conclude"])


@WAYS
def test_who_leaves_calls_the_first_in_line_and_a_place_is_reserved_for_it(desk, how):
    holder, token, (first, _) = desk.line_of("w0", "w1")

    assert make_room(desk, how, holder, token) == ["w0"]

    assert desk.called() == {"w0"}
    left = (desk.client.zscore(desk.name("called"), "w0") - desk.keyspace.now_ms()) / 1000
    assert RESERVED - 1.5 < left <= RESERVED
    assert desk.line() == ["w0", "w1"]
    assert isinstance(desk.come(first), Acquired)
    assert (desk.line(), desk.called()) == (["w1"], set())


@WAYS
def test_whose_message_was_not_published_is_handed_out_soon_because_the_reply_was_lost(desk, how):
    holder, token, (first, _) = desk.line_of("w0", "w1")
    desk.lose_next_reply()
    make_room(desk, how, holder, token)
    assert desk.called() == {"w0"}
    assert 0.0 < desk.due_in(first) <= AGAIN
    desk.overdue(first)

    assert desk.look_at(first) == "w0"

    assert 5.0 < desk.due_in(first) <= 10.0


def test_a_message_that_does_not_come_is_handed_out_again_with_pauses_that_double(desk):
    holder, token, (first,) = desk.line_of("w0")
    desk.end(holder, token)
    pauses = []
    for _ in range(11):
        desk.overdue(first)
        assert desk.look_at(first) == "w0"
        pauses.append(round(desk.due_in(first), -1))
    assert pauses[:5] == [10, 20, 40, 80, 160]
    assert pauses[-1] == 3600
    assert isinstance(desk.come(first), Acquired)


def test_a_late_end_calls_nobody(desk):
    late, token, (first,) = desk.line_of("w0")
    desk.expire(late)
    assert desk.attend() == ["w0"]
    assert isinstance(desk.come(first), Acquired)
    assert isinstance(desk.ending(late, token), Refused)
    assert desk.give_back(late) == []


# Nobody passes


@pytest.mark.parametrize("on_held", ["queue", "coalesce", "replace", "join"])
def test_a_newcomer_does_not_pass_who_is_called(desk, on_held):
    holder, token, (first, _) = desk.line_of("w0", "w1")
    desk.end(holder, token)

    answer = desk.enter(desk.waits("new", on_held, digest="d1"))

    assert isinstance(answer, Parked)
    assert answer.task_id == "w0", "it is told who comes first"
    assert ids(answer.calls) == []
    assert isinstance(desk.come(first), Acquired)


@pytest.mark.parametrize(
    ("on_held", "expected"), [("skip", Outcome.SKIPPED), ("reject", Outcome.REJECTED), ("wait", "lock"), ("ask", "lock")]
)
def test_a_reserved_place_is_taken_for_newcomers_that_do_not_wait_in_the_store(desk, on_held, expected):
    holder, token, _ = desk.line_of("w0")
    desk.end(holder, token)

    answer = desk.enter(desk.claim("new", on_held=on_held))

    assert (answer.what if isinstance(answer, Held) else answer.outcome) == expected
    assert answer.task_id == "w0" if isinstance(answer, Held) else answer.reason[:2] == ["lock", "w0"]


def test_who_is_not_called_yet_does_not_pass_who_is(desk):
    holder, token, (_, second) = desk.line_of("w0", "w1")
    desk.end(holder, token)

    answer = desk.enter(desk.redelivered(second))

    assert (answer.how, answer.place) == ("again", 1)


def test_everyone_runs_in_order_of_arrival(desk):
    holder, token, claims = desk.line_of(*(f"w{n}" for n in range(5)))
    ran, (called,) = [], desk.end(holder, token)
    by_id = {claim.record.task_id: claim for claim in claims}
    while True:
        ran.append(called)
        calls = desk.run_called(by_id[called])
        if not calls:
            break
        (called,) = calls
    assert ran == [f"w{n}" for n in range(5)]
    desk.check_gone()


def test_two_may_be_called_where_two_places_are_free(desk):
    (one, first), (two, second) = desk.hold("h0", limit=2), desk.hold("h1", limit=2)
    waiting = [desk.park(f"w{n}", limit=2) for n in range(3)]
    assert desk.end(one, first) == ["w0"]
    assert desk.end(two, second) == ["w1"]
    assert isinstance(desk.come(waiting[1]), Acquired), "its place does not depend on who was called before"
    assert isinstance(desk.come(waiting[0]), Acquired)
    assert isinstance(desk.come(waiting[2]), Parked)


# Reservations end


def test_who_was_called_and_has_not_come_is_called_once_more_before_the_next(desk):
    holder, token, (first, second) = desk.line_of("w0", "w1")
    desk.end(holder, token)
    desk.let_reservation_lapse(first)

    answer = desk.come(second)

    assert answer.how != "again"
    assert ids(answer.calls) == ["w0"]
    assert desk.attend() == []


def test_when_it_was_called_twice_and_has_not_come_the_next_is_called(desk):
    holder, token, (first, second) = desk.line_of("w0", "w1")
    desk.end(holder, token)
    assert 0.0 < desk.attention_in() <= RESERVED
    assert desk.attend() == []
    desk.let_call_be_missed(first)

    assert desk.attend() == ["w1"]

    assert isinstance(desk.come(second), Acquired)
    assert desk.attend() == []


def test_who_comes_late_runs_if_its_place_is_still_there(desk):
    holder, token, (first, _) = desk.line_of("w0", "w1")
    desk.end(holder, token)
    desk.let_reservation_lapse(first)
    assert isinstance(desk.come(first), Acquired)


def test_who_comes_late_and_finds_its_place_taken_is_first_in_line_again(desk):
    holder, token, (first, second) = desk.line_of("w0", "w1")
    desk.end(holder, token)
    desk.let_call_be_missed(first)
    desk.attend()
    copy = desk.copy_of(second)
    token = desk.acquire(copy).token

    answer = desk.come(first)

    assert (answer.how, answer.place) == ("line", 0)
    assert desk.called() == set()
    assert desk.end(copy, token) == ["w0"]


def test_where_all_in_line_have_missed_their_call_a_newcomer_runs(desk):
    holder, token, (first,) = desk.line_of("w0")
    desk.end(holder, token)
    desk.let_call_be_missed(first)
    assert isinstance(desk.enter(desk.waits("new")), Acquired)


def test_many_who_do_not_come_do_not_keep_others_from_being_called(desk):
    absent = [f"a{n}" for n in range(40)]
    holder, token, claims = desk.line_of(*absent, "present")
    calls = desk.end(holder, token)
    for claim in claims[:-1]:
        assert calls == [claim.record.task_id]
        desk.let_call_be_missed(claim)
        calls = desk.attend()
    assert calls == ["present"]
    assert isinstance(desk.come(claims[-1]), Acquired)


def test_no_more_are_called_at_once_than_a_reply_should_hold(desk):
    holders = [desk.hold(f"h{n}", limit=40) for n in range(40)]
    for n in range(40):
        desk.park(f"w{n}", limit=40)
    desk.client.delete(desk.name("lease"))

    called = desk.attend()

    assert called == [f"w{n}" for n in range(20)]
    assert desk.attend() == [f"w{n}" for n in range(20, 40)]
    assert len(holders) == 40
