"""A line whose holder has gone without a word, or keeps its place."""

from __future__ import annotations

from desk import LOCK, TTL
from queue_desk import ids

from celery_singleflight.claims import Acquired, Ended, Parked


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


def test_nobody_is_called_ahead_where_places_are_held_for_a_while(desk):
    holder, token, _ = desk.line_of("w0", "w1")
    desk.make_runs_short()
    assert desk.end(holder, token, hold=20.0) == []
    assert float(desk.pace()["hold_ms"]) > 6000


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
