"""`enter`, when somebody is in the way."""

from __future__ import annotations

import pytest
from desk import OTHER_LOCK, TTL, WORKER

from celery_singleflight.claims import Ended, Held, Outcome

#: What makes a second trigger meet the lock, or an execution that is under way behind another lock key.
INTO_THE_LOCK = {"holder": {}, "newcomer": {}}
INTO_THE_EXECUTION = {
    "holder": {"execution_key": "invoice:1"},
    "newcomer": {"execution_key": "invoice:1", "lock_key": OTHER_LOCK},
}
CONTENTIONS = pytest.mark.parametrize(
    ("what", "how"), [("lock", INTO_THE_LOCK), ("execution", INTO_THE_EXECUTION)], ids=["lock", "execution"]
)


def meet(desk, how, **newcomer):
    """Return the holder's claim and one that meets it."""
    holder = desk.claim("holder", **how["holder"])
    desk.acquire(holder)
    return holder, desk.claim("newcomer", **how["newcomer"], **newcomer)


@CONTENTIONS
def test_a_waiting_trigger_is_told_who_holds_and_for_how_long(desk, what, how):
    _, claim = meet(desk, how)
    before = desk.keyspace.now_ms()

    held = desk.enter(claim)

    assert isinstance(held, Held)
    assert (held.what, held.task_id, held.worker) == (what, "holder", WORKER)
    assert 0.0 <= held.age < 5.0
    assert TTL - 5.0 < held.remaining <= TTL
    assert held.hold == 0.0
    assert 0.0 <= held.turn <= 0.2
    assert held.waited == 0.0
    assert before <= int(held.first_ms) <= desk.keyspace.now_ms()


@CONTENTIONS
def test_a_waiting_trigger_is_known_by_its_copy_and_has_no_outcome(desk, what, how):
    _, claim = meet(desk, how, copy="c1", generation=3)

    assert desk.enter(claim).what == what

    assert desk.trigger(claim) == {"generation": "3", "copy": "c1"}


@CONTENTIONS
@pytest.mark.parametrize(
    ("on_held", "outcome"), [("skip", Outcome.SKIPPED), ("reject", Outcome.REJECTED)], ids=["skip", "reject"]
)
def test_a_trigger_that_does_not_wait_ends_with_a_reason_and_stays_ended(desk, what, how, on_held, outcome):
    holder, claim = meet(desk, how, on_held=on_held)

    ended = desk.enter(claim)

    assert isinstance(ended, Ended)
    assert (ended.outcome, ended.settled) == (outcome, False)
    assert ended.reason[:3] == [what, "holder", WORKER]
    age_ms, remaining_ms = ended.reason[3:]
    assert 0 <= age_ms < 5000
    assert TTL * 1000 - 5000 < remaining_ms <= TTL * 1000
    assert desk.enter(claim) == ended
    desk.abandon(holder)
    assert desk.enter(claim) == ended
    assert desk.enter(desk.claim("newcomer", **how["newcomer"])) == ended


@CONTENTIONS
def test_who_only_asks_leaves_no_trace(desk, what, how):
    _, claim = meet(desk, how, on_held="ask", wait=0.0)
    before = desk.keyspace.snapshot()

    held = desk.enter(claim)

    assert (held.what, held.task_id, held.turn) == (what, "holder", 0.0)
    assert desk.keyspace.snapshot() == before


@pytest.mark.parametrize("on_held", ["wait", "skip", "reject", "ask"])
@pytest.mark.parametrize("execution_key", [None, "invoice:1"], ids=["task id", "execution key"])
def test_a_redelivery_of_the_running_trigger_is_no_newcomer_under_any_policy(desk, on_held, execution_key):
    claim = desk.claim("t1", execution_key=execution_key)
    acquired = desk.acquire(claim)
    again = desk.claim("t1", execution_key=execution_key, on_held=on_held, wait=0.0, first_ms="1")

    held = desk.enter(again)

    assert isinstance(held, Held)
    assert (held.what, held.task_id, held.worker) == ("own", "t1", WORKER)
    assert held.turn == 0.0
    assert "outcome" not in desk.trigger(claim)
    assert desk.finish(claim, acquired.token) is None


def test_the_running_trigger_is_its_own_behind_another_lock_key_too(desk):
    desk.acquire(desk.claim("t1", execution_key="invoice:1"))

    held = desk.enter(desk.claim("t1", execution_key="invoice:1", lock_key=OTHER_LOCK, on_held="skip"))

    assert held.what == "own"


@pytest.mark.parametrize("on_held", ["wait", "skip", "reject", "ask"])
@pytest.mark.parametrize("execution_key", [None, "invoice:1"], ids=["task id", "execution key"])
def test_a_retry_waits_for_the_run_that_has_sent_it_under_any_policy(desk, on_held, execution_key):
    running = desk.claim("t1", execution_key=execution_key)
    retry = desk.claim("t1", execution_key=execution_key, generation=1, on_held=on_held, wait=0.0, first_ms="1")
    desk.acquire(running)

    held = desk.enter(retry)

    assert (held.what, held.task_id, held.worker, held.turn) == ("predecessor", "t1", WORKER, 0.0)
    assert "outcome" not in desk.trigger(running)
    desk.abandon(running, generation=1)
    assert desk.acquire(retry).attempt == 2
    assert desk.enter(desk.claim("t1", execution_key=execution_key, generation=1)).what == "own"
    assert desk.enter(desk.claim("t1", execution_key=execution_key, generation=2)).what == "predecessor"


@CONTENTIONS
def test_a_trigger_that_has_waited_long_enough_times_out(desk, what, how):
    holder, claim = meet(desk, how, wait=5.0)
    now = desk.keyspace.now_ms()
    late = claim._replace(first_ms=str(now - 5000))
    in_time = claim._replace(first_ms=str(now - 2000))

    waits, ended = desk.enter(in_time), desk.enter(late)

    assert isinstance(waits, Held)
    assert 2.0 <= waits.waited < 5.0
    assert waits.first_ms == in_time.first_ms
    assert (ended.outcome, ended.settled) == (Outcome.TIMED_OUT, False)
    assert ended.reason[:3] == [what, "holder", WORKER]
    assert desk.enter(late) == ended
    desk.abandon(holder)
    assert desk.enter(late) == ended


def test_a_trigger_with_no_time_to_wait_times_out_at_its_first_contention(desk):
    _, claim = meet(desk, INTO_THE_LOCK, wait=0.0)
    assert desk.enter(claim).outcome is Outcome.TIMED_OUT


def test_a_trigger_without_a_bound_waits_however_long_it_has_waited(desk):
    _, claim = meet(desk, INTO_THE_LOCK, wait=None, first_ms="1")
    assert isinstance(desk.enter(claim), Held)


def test_a_free_lock_key_is_acquired_even_after_the_time_to_wait(desk):
    desk.acquire(desk.claim(wait=0.0, first_ms="1"))


def test_the_pace_of_a_lock_key_is_only_kept_while_somebody_waits(desk):
    holder, claim = meet(desk, INTO_THE_LOCK)
    name = desk.pace_name(holder)
    assert not desk.client.exists(name)

    desk.enter(claim)

    assert 590_000 < desk.client.pttl(name) <= 600_000
