"""`replace`: the holder is asked to stop, and whoever has asked before is told that its place is taken."""

from __future__ import annotations

import pytest
from desk import OTHER_LOCK
from queue_desk import ids

from celery_singleflight.claims import Acquired, Linger, Outcome, Parked


def replaces(desk, task_id, **how):
    return desk.park(task_id, "replace", **how)


def test_the_holder_hears_at_its_next_renewal_who_replaces_it(desk):
    holder, token = desk.hold(on_held="replace")
    assert desk.renewed(holder, token) == ""

    newer = replaces(desk, "r1")

    assert desk.renewed(holder, token) == "r1"
    assert desk.end(holder, token, Outcome.REPLACED) == ["r1"]
    copy = desk.copy_of(newer)
    token = desk.acquire(copy).token
    assert desk.renewed(copy, token) == "", "it is not asked what the one before it was"
    assert desk.end(copy, token) == []
    desk.check_gone()


def test_whoever_holds_the_lock_key_is_asked_but_for_another_lock_key(desk):
    holder, token = desk.hold()
    elsewhere = desk.hold("elsewhere", lock_key=OTHER_LOCK)
    replaces(desk, "r1")
    assert desk.renewed(holder, token) == "r1"
    assert desk.renewed(*elsewhere) == ""


@pytest.mark.parametrize("way", ["succeeds", "fails", "dies"])
def test_a_holder_that_ends_otherwise_has_its_own_outcome_and_the_newcomer_runs(desk, way):
    holder, token = desk.hold(on_held="replace")
    newer = replaces(desk, "r1")
    if way == "dies":
        desk.expire(holder)
        assert desk.attend() == ["r1"]
    else:
        assert desk.end(holder, token, Outcome.SUCCEEDED if way == "succeeds" else Outcome.FAILED) == ["r1"]
    copy = desk.copy_of(newer)
    assert desk.renewed(copy, desk.acquire(copy).token) == ""


def test_the_outcome_of_the_one_that_stopped_is_replaced(desk):
    holder, token = desk.hold(on_held="replace")
    newer = replaces(desk, "r1")
    desk.end(holder, token, Outcome.REPLACED, body=b"")
    ended = desk.enter(desk.redelivered(holder))
    assert ended.outcome is Outcome.REPLACED
    assert isinstance(desk.come(newer), Acquired)


def test_who_replaces_comes_before_those_in_line(desk):
    holder, token, _ = desk.line_of("w0", "w1")
    replaces(desk, "r1")
    assert desk.line() == ["r1", "w0", "w1"]
    assert desk.end(holder, token, Outcome.REPLACED) == ["r1"]


def test_of_those_who_replace_the_newest_runs_and_the_others_are_replaced(desk):
    holder, token = desk.hold(on_held="replace")
    older = replaces(desk, "r1")

    answer = desk.enter(desk.waits("r2", "replace"))

    assert (answer.how, ids(answer.calls)) == ("line", ["r1"])
    assert desk.line() == ["r2"]
    assert desk.renewed(holder, token) == "r2"
    ended = desk.come(older)
    assert (ended.outcome, ended.reason) == (Outcome.REPLACED, ["replaced", "r2"])
    assert desk.parked() == {"r2"}


def test_who_was_replaced_while_it_waited_comes_again_until_it_has_come(desk):
    desk.hold(on_held="replace")
    older = replaces(desk, "r1")
    desk.lose_next_reply()
    replaces(desk, "r2")
    assert 0.0 < desk.due_in(older) <= 5.0
    desk.overdue(older)

    assert desk.look_at(older) == "r1"
    copy = desk.copy_of(older)
    first, second = desk.enter(copy), desk.enter(copy)
    assert first.outcome is second.outcome is Outcome.REPLACED


def test_who_was_replaced_after_it_was_called_does_not_run(desk):
    holder, token = desk.hold(on_held="replace")
    older = replaces(desk, "r1")
    assert desk.end(holder, token, Outcome.REPLACED) == ["r1"]

    newer = desk.waits("r2", "replace")
    answer = desk.enter(newer)

    assert isinstance(answer, Parked)
    assert sorted(ids(answer.calls)) == ["r1", "r2"]
    assert desk.come(older).outcome is Outcome.REPLACED
    assert isinstance(desk.come(newer), Acquired)


def test_who_is_replaced_in_its_slot_ends_when_it_asks_again(desk):
    desk.hold(on_held="replace")
    desk.make_runs_short()
    older = desk.waits("r1", "replace", linger=0.4)
    assert isinstance(desk.enter(older), Linger)
    desk.enter(desk.waits("r2", "replace"))

    assert desk.enter(older).outcome is Outcome.REPLACED

    assert "lingers" not in desk.pace()
    assert desk.line() == ["r2"]


def test_who_was_called_before_the_newcomer_came_is_asked_to_stop_when_it_runs(desk):
    holder, token, (first,) = desk.line_of("w0")
    desk.end(holder, token)
    newer = replaces(desk, "r1")
    assert desk.line() == ["r1", "w0"]

    copy = desk.copy_of(first)
    token = desk.acquire(copy).token

    assert desk.renewed(copy, token) == "r1"
    assert desk.end(copy, token, Outcome.REPLACED) == ["r1"]
    assert isinstance(desk.come(newer), Acquired)


@pytest.mark.parametrize("way", ["redelivered", "reply lost", "called in vain"])
def test_to_ask_again_replaces_nobody_else(desk, way):
    holder, token = desk.hold(on_held="replace")
    newer = replaces(desk, "r1")
    if way == "called in vain":
        desk.end(holder, token, Outcome.REPLACED)
        other = desk.waits("other")
        desk.client.delete(desk.name("called"))
        desk.intrude("other")
        assert desk.come(newer).how == "line"
        assert other.record.task_id not in desk.parked()
        assert "stop" not in desk.pace()
        return
    answer = desk.enter(desk.redelivered(newer) if way == "redelivered" else newer)
    assert answer.how == ("again" if way == "redelivered" else "line")
    assert desk.line() == ["r1"]
    assert desk.renewed(holder, token) == "r1"


def test_who_replaces_and_is_revoked_leaves_the_line(desk):
    holder, token = desk.hold(on_held="replace")
    newer = replaces(desk, "r1")
    desk.withdraw(newer)
    assert "replaces" not in desk.pace()
    assert desk.end(holder, token) == []
    desk.check_gone()


def test_an_inner_run_of_the_holder_does_not_end_what_it_is_asked(desk):
    holder, token = desk.hold(on_held="replace")
    replaces(desk, "r1")
    inner = desk.claim(holder.owner, owner=holder.owner, execution_key="invoice:1", has_trigger=False)
    inner_token = desk.acquire(inner).token
    assert desk.end(inner, inner_token, hold=None) == []
    assert desk.renewed(holder, token) == "r1"


def test_a_place_that_is_free_is_not_waited_for_by_a_stop(desk):
    desk.hold("h0", limit=2, on_held="replace")
    assert isinstance(desk.enter(desk.waits("r1", "replace", limit=2)), Acquired)
    assert "stop" not in desk.pace()


def test_of_several_holders_the_one_whose_lease_ends_first_is_asked(desk):
    one, first = desk.hold("h0", limit=2, ttl=60.0)
    two, second = desk.hold("h1", limit=2, ttl=20.0)
    replaces(desk, "r1", limit=2)
    assert desk.renewed(one, first) == ""
    assert desk.renewed(two, second) == "r1"
