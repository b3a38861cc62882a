"""Where runs are short the one after the next is called before its time."""

from __future__ import annotations

from queue_desk import ids

from celery_singleflight.claims import Acquired, Parked


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
    assert 700 <= float(desk.pace()["hold_ms"]) < 1000
    assert isinstance(desk.come(first), Acquired)
