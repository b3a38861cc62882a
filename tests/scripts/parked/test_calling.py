"""Whoever makes room calls the next in line: `finish`, `abandon`, `conclude` and `attend`."""

from __future__ import annotations

import pytest
from desk import LOCK, TTL
from queue_desk import ids

from celery_singleflight.claims import Acquired, Ended, Held, Outcome, Parked, Refused

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


def test_when_a_reservation_has_lapsed_the_next_is_called(desk):
    holder, token, (first, second) = desk.line_of("w0", "w1")
    desk.end(holder, token)
    assert 0.0 < desk.attention_in() <= RESERVED
    assert desk.attend() == []
    desk.let_reservation_lapse(first)

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
    desk.let_reservation_lapse(first)
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
    desk.let_reservation_lapse(first)
    assert isinstance(desk.enter(desk.waits("new")), Acquired)


def test_many_who_do_not_come_do_not_keep_others_from_being_called(desk):
    absent = [f"a{n}" for n in range(40)]
    holder, token, claims = desk.line_of(*absent, "present")
    calls = desk.end(holder, token)
    for claim in claims[:-1]:
        assert calls == [claim.record.task_id]
        desk.let_reservation_lapse(claim)
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


# Called ahead


def test_where_runs_are_short_the_one_after_the_next_is_called_too(desk):
    holder, token, (first, second, _) = desk.line_of("w0", "w1", "w2")
    desk.make_runs_short()

    assert desk.end(holder, token) == ["w0", "w1"]

    assert isinstance(desk.come(second), Parked), "nobody passes who is called first"
    assert desk.called() == {"w0"}
    assert isinstance(desk.come(first), Acquired)


def test_who_was_called_too_early_is_not_called_again_until_there_is_a_place(desk):
    holder, token, (first, second) = desk.line_of("w0", "w1")
    desk.make_runs_short()
    desk.end(holder, token)
    copy = desk.copy_of(first)
    token = desk.acquire(copy).token
    answer = desk.come(second)
    assert (answer.how, ids(answer.calls)) == ("line", [])
    assert desk.attend() == []

    assert desk.end(copy, token) == ["w1"]


def test_nobody_is_called_ahead_for_a_second_where_no_slot_was_free(desk):
    holder, token, (first, second, _) = desk.line_of("w0", "w1", "w2")
    desk.make_runs_short()
    desk.end(holder, token)
    copy = desk.copy_of(first)
    token = desk.acquire(copy).token
    assert isinstance(desk.come(second), Parked)
    assert float(desk.pace()["no_slot_until"]) > desk.keyspace.now_ms()

    assert desk.end(copy, token) == ["w1"]


def test_the_pace_follows_the_last_runs(desk):
    holder, token, (first,) = desk.line_of("w0")
    desk.make_runs_short(1000)
    desk.end(holder, token)
    assert 700 <= int(desk.pace()["hold_ms"]) < 1000
    assert isinstance(desk.come(first), Acquired)


# Nobody leaves


def test_a_holder_that_dies_is_noticed_when_its_lease_ends(desk):
    holder, _, (first,) = desk.line_of("w0")
    assert TTL - 5.0 < desk.attention_in() <= TTL + 0.1
    assert desk.attend() == []
    desk.expire(holder)

    assert desk.attend() == ["w0"]
    assert isinstance(desk.come(first), Acquired)


def test_a_holder_that_renews_is_looked_at_when_its_new_lease_ends(desk):
    holder, token, _ = desk.line_of("w0")
    assert desk.renewed(holder._replace(ttl=1000.0), token) == ""
    assert desk.attend() == []
    assert 900.0 < desk.attention_in() <= 1000.1


def test_a_place_that_is_held_for_a_while_is_given_on_afterwards(desk):
    holder, token, (first,) = desk.line_of("w0")
    assert desk.end(holder, token, hold=20.0) == []
    assert 15.0 < desk.attention_in() <= 20.1
    assert isinstance(desk.come(first), Parked)
    assert desk.attend() == []
    desk.client.delete(desk.name("lease"))

    assert desk.attend() == ["w0"]


def test_a_holder_released_by_an_operator_is_followed_soon(desk):
    holder, token, _ = desk.line_of("w0")
    assert desk.evict(holder, token) == "released"
    assert desk.attention_in() <= 0.0
    assert desk.attend() == ["w0"]


def test_an_inner_run_of_the_holder_makes_no_room(desk):
    holder, _, _ = desk.line_of("w0")
    inner = desk.claim(holder.owner, owner=holder.owner, execution_key="invoice:1", has_trigger=False)
    token = desk.acquire(inner).token
    assert desk.end(inner, token, hold=None) == []
    assert desk.called() == set()


def test_an_attendant_that_dies_before_it_publishes_loses_nobody(desk):
    holder, _, (first,) = desk.line_of("w0")
    desk.expire(holder)
    desk.lose_next_reply()
    assert desk.attend() == []
    desk.overdue(first)
    assert desk.look_at(first) == "w0"


def test_a_sweeper_knows_the_lock_key_that_needs_it(desk):
    holder, _, _ = desk.line_of("w0")
    desk.expire(holder)
    desk.client.zadd(desk.name("due"), {f"\n{LOCK.text}": desk.keyspace.now_ms() - 1})

    (record,) = desk.sweep()

    assert (record.task_id, record.execution_key) == ("", LOCK.text)
    assert ids(desk.store.attend(LOCK)) == ["w0"]


def test_a_skipped_newcomer_calls_whom_it_finds_uncalled(desk):
    holder, _, _ = desk.line_of("w0")
    desk.expire(holder)

    answer = desk.enter(desk.claim("new", on_held="skip"))

    assert isinstance(answer, Ended)
    assert ids(answer.calls) == ["w0"]
