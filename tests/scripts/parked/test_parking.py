"""`enter`, by a trigger whose policy parks it: its message is put by, and it has a place in line."""

from __future__ import annotations

import pytest
from desk import LOCK, OTHER_LOCK, TTL, WORKER
from queue_desk import ids

from celery_singleflight.claims import Acquired, Ended, Held, Outcome, Parked, Surplus

ANY_BYTES = bytes(range(256)) + b"\r\n\x00" + "ünï ☃".encode()
#: Task ids and execution keys that people have.
ODD = pytest.mark.parametrize(
    ("task_id", "execution_key"),
    [("t1", None), ("t1", "invoice:1"), ("t1", "two\nlines\n"), ("ünï : {x} %", 'a "quoted"\\key'), ("x" * 300, "y" * 300)],
)


def test_who_waits_is_told_who_holds_and_how_many_are_before_it(desk):
    desk.hold()
    answers = [desk.enter(desk.waits(f"w{n}")) for n in range(3)]

    assert [(answer.how, answer.place) for answer in answers] == [("line", 0), ("line", 1), ("line", 2)]
    for answer in answers:
        assert (answer.task_id, answer.worker) == ("holder", WORKER)
        assert 0.0 <= answer.age < 5.0
        assert TTL - 5.0 < answer.remaining <= TTL
        assert ids(answer.calls) == []
    assert desk.line() == ["w0", "w1", "w2"]


@ODD
def test_a_message_of_any_bytes_comes_back_as_it_was(desk, task_id, execution_key):
    holder, token = desk.hold()
    claim = desk.waits(task_id, execution_key=execution_key, message=ANY_BYTES, copy="c1")
    assert isinstance(desk.enter(claim), Parked)
    before = desk.keyspace.now_ms()

    (call,) = desk.ending(holder, token).calls

    assert (call.message, call.copy) == (ANY_BYTES, "c1")
    assert before - 5000 < int(call.first_ms) <= before
    copy = desk.copy_of(claim)
    assert isinstance(desk.enter(copy), Acquired)
    desk.check_gone()


@ODD
def test_a_sweeper_finds_who_waits_by_its_name(desk, task_id, execution_key):
    desk.hold()
    claim = desk.park(task_id, execution_key=execution_key, wait=10.0)
    desk.wait_long_ago(claim, 10.0)

    (record,) = desk.sweep()

    assert record.member == claim.record.member
    assert desk.store.rescue(record).message == task_id.encode()


def test_a_trigger_whose_message_the_store_has_not_goes_back_to_the_broker(desk):
    desk.hold()
    answer = desk.enter(desk.waits("w0", message=b""))
    assert isinstance(answer, Held)
    assert answer.what == "lock"


@pytest.mark.parametrize("on_held", ["queue", "coalesce", "replace", "join"])
def test_a_free_lock_key_is_taken_at_once(desk, on_held):
    assert isinstance(desk.enter(desk.waits("t1", on_held)), Acquired)


@pytest.mark.parametrize("on_held", ["queue", "coalesce", "replace", "join"])
def test_a_trigger_that_has_run_before_waits_in_line_under_every_policy(desk, on_held):
    """One that has died in front of the others: its turn had come before theirs."""
    dead = desk.waits("t1", on_held)
    desk.acquire(dead)
    desk.expire(dead)
    desk.hold()
    desk.park("w0")

    answer = desk.enter(desk.redelivered(dead))

    assert (answer.how, answer.place) == ("line", 0)
    assert desk.line() == ["t1", "w0"]
    assert desk.renewed(*desk.hold("other", lock_key=OTHER_LOCK)) == ""
    assert "stop" not in desk.pace()


@pytest.mark.parametrize("on_held", ["queue", "coalesce", "replace", "join"])
def test_to_be_asked_again_for_a_lost_reply_is_to_answer_the_same(desk, on_held):
    desk.hold()
    claim = desk.waits("w0", on_held, digest="d1")
    desk.lose_next_reply()

    answer = desk.enter(claim)

    assert (answer.how, answer.place, answer.task_id) == ("line", 0, "holder")
    assert desk.line() == ["w0"]


def test_a_redelivery_keeps_its_place_and_needs_no_word_to_celery(desk):
    _, _, (first, _) = desk.line_of("w0", "w1")
    ticket = desk.client.zscore(desk.name("line"), "w0")

    answer = desk.enter(desk.redelivered(first))

    assert (answer.how, answer.place) == ("again", 0)
    assert desk.client.zscore(desk.name("line"), "w0") == ticket
    assert desk.line() == ["w0", "w1"]


def test_a_redelivery_after_the_called_copy_is_surplus(desk):
    holder, token, (first,) = desk.line_of("w0")
    assert desk.end(holder, token) == ["w0"]
    assert isinstance(desk.come(first), Acquired)

    assert desk.enter(desk.redelivered(first)) == Surplus("copy")


def test_a_redelivery_may_run_in_the_place_of_the_called_copy(desk):
    holder, token, (first,) = desk.line_of("w0")
    desk.end(holder, token)

    assert isinstance(desk.enter(desk.redelivered(first)), Acquired)

    assert desk.come(first, first_ms="").what == "own"
    desk.check_gone()


def test_of_two_copies_handed_out_one_counts(desk):
    holder, token, (first,) = desk.line_of("w0")
    desk.end(holder, token)
    one, two = desk.copy_of(first), desk.copy_of(first)
    desk.acquire(one)

    assert desk.enter(two) == Surplus("copy")


def test_the_wait_counts_from_the_first_contention_however_often_it_is_called(desk):
    holder, token, (first,) = desk.line_of("w0")
    since = desk.about(first)["first"]
    desk.end(holder, token)
    desk.intrude("intruder")
    copy = desk.copy_of(first)

    assert desk.enter(copy).how == "line"

    assert desk.about(first)["first"] == since
    assert desk.about(first)["copy"] == copy.copy


def test_what_is_known_of_a_trigger_lives_while_it_waits(desk):
    desk.hold()
    claim = desk.park("w0")
    name = desk.trigger_name(claim)
    assert desk.client.pttl(name) > 80_000_000
    assert 40_000 < desk.due_in(claim) <= 43_200
    desk.client.pexpire(name, 60_000)
    desk.overdue(claim)

    assert desk.look_at(claim) is None

    assert desk.client.pttl(name) > 80_000_000
    assert 40_000 < desk.due_in(claim) <= 43_200
    assert desk.line() == ["w0"]


# As long as it may


def test_who_has_waited_too_long_is_handed_out_and_times_out(desk):
    holder, token, (late, _) = desk.line_of("w0", "w1", wait=10.0)
    assert desk.due_in(late) == pytest.approx(10.0, abs=5.0)
    assert desk.look_at(late) is None
    desk.wait_long_ago(late, 10.0)

    assert desk.look_at(late) == "w0"
    ended = desk.come(late)

    assert isinstance(ended, Ended)
    assert ended.outcome is Outcome.TIMED_OUT
    assert ended.reason[:3] == ["lock", "holder", WORKER]
    assert desk.line() == ["w1"]
    assert desk.end(holder, token) == ["w1"]


def test_who_times_out_while_a_place_was_reserved_for_it_leaves_it_to_the_next(desk):
    holder, token, (late, _) = desk.line_of("w0", "w1", wait=10.0)
    desk.end(holder, token)
    desk.intrude("intruder")
    desk.wait_long_ago(late, 10.0)

    assert desk.come(late).outcome is Outcome.TIMED_OUT

    assert (desk.line(), desk.called()) == (["w1"], set())


def test_who_may_run_runs_however_long_it_has_waited(desk):
    holder, token, (late,) = desk.line_of("w0", wait=10.0)
    desk.end(holder, token)
    desk.wait_long_ago(late, 60.0)
    assert isinstance(desk.come(late), Acquired)


@pytest.mark.parametrize(("wait", "expires", "due"), [(20.0, 10.0, 10.0), (10.0, 20.0, 10.0), (None, 10.0, 10.0)])
def test_the_first_to_end_of_wait_and_expiry_is_when_it_is_handed_out(desk, wait, expires, due):
    desk.hold()
    claim = desk.park("w0", wait=wait, expires=expires)
    assert desk.due_in(claim) == pytest.approx(due, abs=5.0)
    desk.wait_long_ago(claim, due)

    assert desk.look_at(claim) == "w0"


def test_who_expired_in_store_is_given_its_outcome_by_celery_and_leaves_the_line(desk):
    holder, token, (expired, _) = desk.line_of("w0", "w1", expires=10.0)

    assert desk.withdraw(expired) == []

    assert desk.line() == ["w1"]
    assert desk.end(holder, token) == ["w1"]


# Its execution


def test_who_waits_for_an_execution_that_succeeds_elsewhere_is_answered_and_lets_the_next_come(desk):
    holder, token = desk.hold()
    claim = desk.park("w0", execution_key="invoice:1")
    desk.park("w1")
    desk.succeed(desk.waits("other", execution_key="invoice:1", lock_key=OTHER_LOCK))
    assert desk.end(holder, token) == ["w0"]

    ended = desk.come(claim)

    assert (ended.outcome, ended.value.body) == (Outcome.SUCCEEDED, b"42")
    assert ids(ended.calls) == ["w1"]
    assert desk.parked() == {"w1"}


def test_who_finds_its_execution_under_way_elsewhere_leaves_the_line_and_the_next_is_called_soon(desk):
    holder, token = desk.hold()
    claim = desk.park("w0", execution_key="invoice:1")
    desk.park("w1")
    desk.acquire(desk.claim("other", execution_key="invoice:1", lock_key=OTHER_LOCK))
    assert desk.end(holder, token) == ["w0"]

    held = desk.come(claim)

    assert (held.what, held.task_id) == ("execution", "other")
    assert desk.parked() == {"w1"}
    assert desk.attention_in() <= 0.0
    assert desk.attend() == ["w1"]


@pytest.mark.parametrize("on_held", ["queue", "coalesce", "join", "replace"])
def test_a_repetition_of_an_execution_that_is_under_way_is_not_parked_whatever_the_policy(desk, on_held):
    desk.hold("first", on_held, execution_key="invoice:1")

    held = desk.enter(desk.waits("second", on_held, execution_key="invoice:1"))

    assert isinstance(held, Held)
    assert (held.what, held.task_id) == ("execution", "first")
    assert desk.parked() == set()


# Nothing stays behind


@pytest.mark.parametrize("how", ["runs", "is revoked", "times out", "is given back unknowing"])
def test_what_is_kept_of_waiting_goes_with_the_last_who_waits(desk, how):
    holder, token, (last,) = desk.line_of("w0", wait=10.0)
    match how:
        case "runs":
            desk.end(holder, token)
            assert isinstance(desk.come(last), Acquired)
        case "is revoked":
            desk.withdraw(last)
        case "times out":
            desk.wait_long_ago(last, 10.0)
            assert desk.come(last).outcome is Outcome.TIMED_OUT
        case "is given back unknowing":
            desk.give_back(last)
    assert desk.parked() == set()
    desk.check_gone()


def test_a_delivery_that_never_heard_that_it_was_parked_takes_its_message_back(desk):
    holder, token, (first, _) = desk.line_of("w0", "w1")

    desk.give_back(first)

    assert desk.line() == ["w1"]
    assert desk.store.parked("w0", [LOCK.name]) == []
    assert desk.end(holder, token) == ["w1"]


def test_a_process_that_died_does_not_take_the_message_from_the_store(desk):
    holder, token, (first,) = desk.line_of("w0")
    desk.give_back(first, again=5.0, died=True)
    assert desk.line() == ["w0"]
    assert desk.end(holder, token) == ["w0"]
