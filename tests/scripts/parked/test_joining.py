"""`join`: who has the holder's payload takes its result, and runs itself when that fails."""

from __future__ import annotations

import pytest
from desk import OTHER_LOCK

from celery_singleflight.claims import Acquired, Led, Outcome, Parked


def joins(desk, task_id, digest="d1", **how):
    return desk.park(task_id, "join", digest=digest, **how)


def test_who_has_the_payload_of_the_holder_waits_for_its_result(desk):
    holder, token = desk.hold(on_held="join", digest="d1")
    answer = desk.enter(desk.waits("j0", "join", digest="d1"))
    assert (answer.how, answer.task_id) == ("group", "holder")
    assert desk.line() == []

    assert desk.end(holder, token, body=b"the result") == ["j0"]

    copy = desk.copy_of(desk.waits("j0", "join", digest="d1"))
    led = desk.enter(copy)
    assert led == Led("holder")
    ended = desk.store.follow(copy, led.by)
    assert (ended.outcome, ended.ended_as, ended.value.body) == (Outcome.SUCCEEDED, Outcome.SUCCEEDED, b"the result")
    desk.check_gone()


def test_who_has_another_payload_waits_in_line(desk):
    holder, token = desk.hold(on_held="join", digest="d1")
    other = joins(desk, "j0", "d2")
    assert desk.line() == ["j0"]
    assert desk.end(holder, token) == ["j0"]
    assert isinstance(desk.come(other), Acquired)


def test_those_who_wait_with_one_payload_wait_for_one_of_them(desk):
    holder, token = desk.hold(on_held="join", digest="d1")
    first = joins(desk, "j0", "d2")
    joins(desk, "j1", "d3")
    second = desk.waits("j2", "join", digest="d2")
    answer = desk.enter(second)
    assert (answer.how, answer.task_id) == ("group", "j0"), "it is told whose outcome it will get"
    assert desk.line() == ["j0", "j1"]
    assert set(desk.followers()) == {"j2"}

    desk.end(holder, token)
    copy = desk.copy_of(first)
    token = desk.acquire(copy).token
    third = joins(desk, "j3", "d2")

    assert sorted(desk.end(copy, token, body=b"one")) == ["j1", "j2", "j3"]
    for claim in (second, third):
        copy = desk.copy_of(claim)
        assert desk.store.follow(copy, desk.enter(copy).by).value.body == b"one"


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.REVOKED, Outcome.REPLACED])
def test_when_the_holder_has_no_result_one_who_joined_runs_next_for_the_others(desk, outcome):
    holder, token = desk.hold(on_held="join", digest="d1")
    claims = {task_id: joins(desk, task_id) for task_id in ("j0", "j1", "j2")}
    desk.park("w0")

    if outcome is Outcome.REVOKED:
        (called,) = desk.withdraw(holder, outcome, owner=holder.owner, release=True)
    else:
        (called,) = desk.end(holder, token, outcome)

    assert desk.line() == [called, "w0"]
    others = set(claims) - {called}
    assert set(desk.followers()) == others
    handed_out = desk.run_called(claims[called], body=b"its own")
    assert handed_out[:2] == sorted(others)
    for task_id in others:
        copy = desk.copy_of(claims[task_id])
        assert desk.store.follow(copy, desk.enter(copy).by).value.body == b"its own"


@pytest.mark.parametrize("how", ["dies", "retries"])
def test_who_joined_waits_for_the_runs_that_follow_of_the_same_trigger(desk, how):
    holder, _ = desk.hold(on_held="join", digest="d1")
    joined = joins(desk, "j0")
    if how == "dies":
        desk.expire(holder)
        heir = desk.redelivered(holder)
    else:
        assert desk.give_back(holder, generation=1) == []
        heir = desk.redelivered(holder, generation=1)
    assert desk.attend() == []

    token = desk.acquire(heir).token
    assert set(desk.followers()) == {"j0"}
    assert desk.end(heir, token, body=b"at last") == ["j0"]

    copy = desk.copy_of(joined)
    assert desk.store.follow(copy, desk.enter(copy).by).value.body == b"at last"


@pytest.mark.parametrize("generation", [1 << 20, 3 << 20, None], ids=["replaced", "replaced again", "rejected"])
def test_who_joined_runs_itself_when_the_holder_goes_elsewhere(desk, generation):
    holder, _ = desk.hold(on_held="join", digest="d1")
    joined = joins(desk, "j0")

    assert desk.give_back(holder, generation=generation) == ["j0"]

    token = desk.acquire(copy := desk.copy_of(joined)).token
    if generation:
        again = desk.enter(desk.redelivered(holder, generation=generation))
        assert (again.how, again.place) == ("line", 0)
        assert desk.end(copy, token) == ["holder"]


def test_a_holder_that_is_dead_lettered_is_followed_by_who_joined(desk):
    holder, _ = desk.hold(on_held="join", digest="d1", max_deliveries=1)
    joins(desk, "j0")
    desk.expire(holder)

    answer = desk.enter(desk.redelivered(holder))

    assert answer.outcome is Outcome.DEAD_LETTERED
    assert [call.message for call in answer.calls] == [b"j0"]


def test_nobody_joins_a_run_that_has_ended_and_only_keeps_its_place(desk):
    holder, token = desk.hold(on_held="join", digest="d1")
    early = joins(desk, "j0")
    assert desk.end(holder, token, hold=20.0) == ["j0"]

    late = joins(desk, "j1")

    assert desk.line() == ["j1"]
    assert desk.followers() == {}
    assert isinstance(desk.come(early), Led)
    desk.client.delete(desk.name("lease"))
    assert desk.attend() == ["j1"]
    assert isinstance(desk.come(late), Acquired)


@pytest.mark.parametrize("before", [0, 1])
def test_nobody_joins_a_run_that_has_failed_and_whose_process_still_lives(desk, before):
    holder, _ = desk.hold(on_held="join", digest="d1")
    early = [joins(desk, f"j{n}") for n in range(before)]
    assert desk.withdraw(holder, Outcome.FAILED, owner=holder.owner) == []

    late = desk.waits("late", "join", digest="d1")

    assert desk.enter(late).how == "line"
    called = desk.give_back(holder, again=5.0, died=True)
    for claim in (*early, late):
        assert called == [claim.record.task_id]
        called = desk.run_called(claim)


def test_an_inner_run_of_the_holder_has_no_result_for_who_joined(desk):
    holder, token = desk.hold(on_held="join", digest="d1")
    joins(desk, "j0")
    inner = desk.claim(holder.owner, owner=holder.owner, execution_key="invoice:1", has_trigger=False)
    inner_token = desk.acquire(inner).token

    assert desk.end(inner, inner_token, hold=None) == []

    assert set(desk.followers()) == {"j0"}
    assert desk.end(holder, token) == ["j0"]


def test_who_joins_another_task_or_lock_key_does_not(desk):
    desk.hold(on_held="join", digest="d1")
    assert isinstance(desk.enter(desk.waits("j0", "join", digest="d1", lock_key=OTHER_LOCK)), Acquired)
    answer = desk.enter(desk.waits("j1", "join", digest="d1 other.task"))
    assert (answer.how, answer.place) == ("line", 0)


def test_who_joins_one_of_several_holders_waits_for_that_one(desk):
    one, first = desk.hold("h0", on_held="join", digest="d1", limit=2)
    two, second = desk.hold("h1", on_held="join", digest="d2", limit=2)
    joins(desk, "j0", "d2", limit=2)
    assert desk.end(one, first) == []
    assert desk.end(two, second) == ["j0"]


def test_who_waits_long_enough_for_a_result_times_out_and_the_others_go_on(desk):
    holder, token = desk.hold(on_held="join", digest="d1")
    late = joins(desk, "j0", wait=10.0)
    joins(desk, "j1")
    desk.wait_long_ago(late, 10.0)
    assert desk.look_at(late) == "j0"

    assert desk.come(late).outcome is Outcome.TIMED_OUT

    assert desk.line() == []
    assert desk.end(holder, token) == ["j1"]


def test_a_redelivery_of_one_that_joined_goes_on_waiting(desk):
    desk.hold(on_held="join", digest="d1")
    joined = joins(desk, "j0")
    answer = desk.enter(desk.redelivered(joined))
    assert isinstance(answer, Parked)
    assert answer.how == "again"
    assert (desk.line(), set(desk.followers())) == ([], {"j0"})


def test_a_lost_reply_joins_all_the_same(desk):
    desk.hold(on_held="join", digest="d1")
    desk.lose_next_reply()
    assert desk.enter(desk.waits("j0", "join", digest="d1")).how == "group"


def test_the_payload_of_one_that_is_gone_is_waited_for_no_more(desk):
    desk.hold()
    desk.withdraw(joins(desk, "j0"))
    joins(desk, "j1")
    assert desk.line() == ["j1"]
    assert desk.pace()["join:d1"] == "j1"
