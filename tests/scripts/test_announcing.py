"""`announce`, `confirm`, `withdraw`: what publishers tell each other of an execution, and what a run record says instead."""

from __future__ import annotations

from uuid import uuid4

import pytest
from desk import OTHER_LOCK

from celery_singleflight.announcements import Announcement, Answered, Busy
from celery_singleflight.claims import Encoded, Outcome, Terms
from celery_singleflight.errors import ExecutionKeyReused, PayloadMismatch

KEY = "invoice:1"
RESERVE, KEEP = 2.0, 300.0


def call(task_id=None, *, task="shop.bill", payload="digest", execution_key=KEY):
    """What a publisher says of the trigger that it would send."""
    return Announcement("billing", execution_key, task_id or uuid4().hex, task, payload)


def ask(desk, announcement, reserve=RESERVE):
    return desk.store.announce(announcement, reserve=reserve)


def sent(desk, announcement):
    """A publisher has reserved, published and confirmed."""
    assert ask(desk, announcement) is True
    assert desk.store.confirm(announcement, KEEP)
    return announcement


def running(desk, task_id, **how):
    claim = desk.claim(task_id, execution_key=KEY, **how)
    return claim, desk.acquire(claim).token


def test_who_asks_first_is_waited_for_and_nobody_is_answered_yet(desk):
    first = call()
    assert ask(desk, first) is True

    answer = ask(desk, call())
    assert isinstance(answer, Busy)
    assert 0 < answer.seconds <= RESERVE


def test_who_asks_again_because_the_reply_was_lost_is_still_the_first(desk):
    first = call()
    lost = desk.lose_next_reply()
    assert ask(desk, first) is True
    assert lost


def test_another_execution_key_is_another_matter(desk):
    ask(desk, call())
    assert ask(desk, call(execution_key="invoice:2")) is True


def test_a_publisher_that_died_before_it_published_is_waited_for_no_longer_than_it_asked_for(desk):
    first = call()
    ask(desk, first)
    (name,) = desk.keyspace.names()
    assert 0 < desk.client.pttl(name) <= RESERVE * 1000
    desk.client.delete(name)  # as that time does

    assert ask(desk, call()) is True


def test_a_confirmed_one_answers_others_for_as_long_as_asked(desk):
    first = sent(desk, call())

    assert ask(desk, call()) == Answered(first.task_id, "announced")
    (name,) = desk.keyspace.names()
    assert RESERVE * 1000 < desk.client.pttl(name) <= KEEP * 1000


def test_confirming_again_because_the_reply_was_lost_changes_nothing(desk):
    first = call()
    ask(desk, first)
    lost = desk.lose_next_reply()
    assert desk.store.confirm(first, KEEP)
    assert lost
    assert ask(desk, call()) == Answered(first.task_id, "announced")


def test_one_that_is_confirmed_late_answers_if_no_other_does(desk):
    late, other = call(), call()
    assert desk.store.confirm(late, KEEP), "its reservation has run out since"
    assert ask(desk, other) == Answered(late.task_id, "announced")


def test_one_that_is_confirmed_late_comes_before_one_that_is_not_sent_yet(desk):
    late, other = call(), call()
    ask(desk, other)
    assert desk.store.confirm(late, KEEP)
    assert not desk.store.confirm(other, KEEP), "that one was sent first"
    assert ask(desk, call()) == Answered(late.task_id, "announced")


def test_what_could_not_be_sent_is_taken_back_at_once(desk):
    first = call()
    ask(desk, first)
    desk.store.withdraw(first)
    assert desk.keyspace.names() == []
    assert ask(desk, call()) is True


def test_nobody_takes_back_what_another_has_announced(desk):
    first = sent(desk, call())
    desk.store.withdraw(call())
    assert ask(desk, call()) == Answered(first.task_id, "announced")


def test_who_is_not_to_be_announced_waits_for_nobody_and_leaves_no_trace(desk):
    assert ask(desk, call(), reserve=0.0) is False
    assert desk.keyspace.names() == []
    ask(desk, call())
    before = desk.keyspace.snapshot()
    assert ask(desk, call(), reserve=0.0) is False
    assert desk.keyspace.snapshot() == before


def test_who_is_not_to_be_announced_is_answered_like_anybody(desk):
    first = sent(desk, call())
    assert ask(desk, call(), reserve=0.0) == Answered(first.task_id, "announced")


# What the run record says comes first.


def test_a_running_execution_answers_with_who_runs_it(desk):
    sent(desk, call("announced"))
    running(desk, "runner")
    assert ask(desk, call()) == Answered("runner", "running")


def test_so_it_does_under_another_lock_key_of_the_lock_name(desk):
    running(desk, "runner", lock_key=OTHER_LOCK)
    assert ask(desk, call()) == Answered("runner", "running")


def test_a_completed_execution_answers_with_who_ran_it(desk):
    claim, token = running(desk, "runner")
    assert desk.finish(claim, token) is None
    sent_since = call()
    desk.store.confirm(sent_since, KEEP)
    assert ask(desk, call()) == Answered("runner", "completed")


@pytest.mark.parametrize("completed", [True, False])
def test_a_direct_call_answers_nobody_because_celery_has_no_result_of_it(desk, completed):
    claim, token = running(desk, "direct", worker="host", has_trigger=False)
    if completed:
        desk.finish(claim, token)
    assert ask(desk, call()) is False


def test_a_failed_execution_is_published_again(desk):
    first = sent(desk, call())
    claim, token = running(desk, first.task_id)
    assert desk.finish(claim, token, Outcome.FAILED) is None
    second = call()
    assert ask(desk, second) is True
    assert desk.store.confirm(second, KEEP)
    assert ask(desk, call()) == Answered(second.task_id, "announced")


def test_a_failure_that_is_kept_answers(desk):
    claim, token = running(desk, "runner")
    value = Encoded("application/json", "utf-8", b"{}")
    kept = {"reason": "[]", "keep": 600.0, "keeps_failure": True}
    desk.store.finish(desk.lease(claim, token), claim.record, Outcome.FAILED, value, **kept)
    assert ask(desk, call()) == Answered("runner", "completed")


def test_an_execution_of_which_nobody_knows_what_it_has_done_answers_nobody(desk):
    claim, _ = running(desk, "runner", message=b"a message", terms=Terms(holds=True))
    desk.abandon(claim, again=5.0, died=True)
    assert ask(desk, call()) is True


def test_an_announced_one_that_was_skipped_stands_in_nobodys_way(desk):
    desk.acquire(desk.claim("holder"))
    first = sent(desk, call())
    desk.enter(desk.claim(first.task_id, execution_key=KEY, on_held="skip"))
    assert ask(desk, call()) is True


def test_an_announced_one_that_waits_answers(desk):
    desk.acquire(desk.claim("holder"))
    first = sent(desk, call())
    desk.enter(desk.claim(first.task_id, execution_key=KEY))
    assert ask(desk, call()) == Answered(first.task_id, "announced")


def test_a_run_whose_lease_has_run_out_answers_nobody(desk):
    desk.die(desk.claim("dead", execution_key=KEY))
    assert ask(desk, call()) is True


def test_a_run_that_goes_on_with_a_retry_is_still_the_announced_one(desk):
    first = sent(desk, call())
    claim, _ = running(desk, first.task_id)
    desk.abandon(claim, generation=1)
    assert ask(desk, call()) == Answered(first.task_id, "announced")


# Whoever uses the key of something else is told.


@pytest.mark.parametrize("state", ["announced", "running", "completed"])
def test_the_key_of_another_task_is_refused(desk, state):
    if state == "announced":
        sent(desk, call())
    else:
        claim, token = running(desk, "runner")
        if state == "completed":
            desk.finish(claim, token)
    with pytest.raises(ExecutionKeyReused) as caught:
        ask(desk, call(task="shop.ship"))
    assert type(caught.value) is ExecutionKeyReused
    assert (caught.value.execution_key, caught.value.task) == (KEY, "shop.bill")


@pytest.mark.parametrize("state", ["announced", "running", "completed"])
def test_another_payload_is_refused_where_both_are_known(desk, state):
    if state == "announced":
        sent(desk, call())
    else:
        claim, token = running(desk, "runner")
        desk.client.hset(desk.execution_name(claim), "payload", "digest")
        if state == "completed":
            desk.finish(claim, token)
    with pytest.raises(PayloadMismatch):
        ask(desk, call(payload="another"))
    assert isinstance(ask(desk, call(payload="")), Answered)


def test_a_record_without_a_payload_is_not_compared(desk):
    running(desk, "runner")
    assert ask(desk, call()) == Answered("runner", "running")


def test_one_that_is_not_sent_yet_refuses_nobody(desk):
    ask(desk, call())
    assert isinstance(ask(desk, call(task="shop.ship", payload="another")), Busy)


def test_announced_ones_that_change_under_the_look_are_not_looked_at_for_ever(desk, monkeypatch):
    sent(desk, call("first"))
    real, changes = desk.store._run, []

    def change(*how):
        reply = real(*how)
        if reply.word == "announced":
            changes.append(reply.task_id)
            desk.store.withdraw(call(reply.task_id.decode()))
            desk.store.confirm(call(f"next-{len(changes)}"), KEEP)
        return reply

    monkeypatch.setattr(type(desk.store), "_run", lambda _, *how: change(*how))
    assert ask(desk, call()) is False
    assert len(changes) == 3


@pytest.mark.parametrize("said", ["succeeded", "failed"])
def test_nobody_is_answered_with_a_trigger_that_ended_otherwise_than_its_execution(desk, said):
    claim, _ = running(desk, "t1", terms=Terms(holds=True), message=b"a message", max_deliveries=1)
    desk.abandon(claim, again=5.0, died=True)
    assert desk.enter(claim._replace(owner="again")).outcome is Outcome.DEAD_LETTERED
    value = Encoded("application/json", "utf-8", b"1")
    desk.store.resolve(claim.record, said, value, owner="", reason="[]", keep=600.0, keeps_failure=True)

    assert ask(desk, call()) is False, "it is sent, and the worker answers it"


def test_who_is_resolved_itself_answers(desk):
    claim, _ = running(desk, "t1", terms=Terms(holds=True), message=b"a message")
    desk.abandon(claim, again=5.0, died=True)
    value = Encoded("application/json", "utf-8", b"1")
    desk.store.resolve(claim.record, "succeeded", value, owner="", reason="[]", keep=600.0, keeps_failure=False)

    assert ask(desk, call()) == Answered("t1", "completed")
