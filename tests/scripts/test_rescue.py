"""`rescue`: a message is handed out when nobody works on its trigger, and each time the next look is put off."""

from __future__ import annotations

import pytest
from desk import OTHER_LOCK, TTL

from celery_singleflight.claims import Acquired, Handout, Held, Outcome, Surplus
from celery_singleflight.custody import GRACE
from celery_singleflight.script import load

RESCUE = load("rescue")
BODY = b'{"a": 1}\n\x00\xff a body of any bytes \r\n'
KEYS = pytest.mark.parametrize("execution_key", [None, "invoice:1"], ids=["task id", "execution key"])


def dead(desk, **how):
    """A trigger whose run has died."""
    claim = desk.claim(message=BODY, **how)
    desk.die(claim)
    return claim


def end_long_ago(desk, claim, seconds=60):
    desk.client.hset(desk.trigger_name(claim), "ended_ms", desk.keyspace.now_ms() - seconds * 1000)


def ask(desk, claim):
    """Return the reply itself."""
    names = desk.store.names(claim.record)
    values = {"member": claim.record.member, "task_id": claim.record.task_id, "patience_ms": 5000, "pause_ms": 10_000}
    return RESCUE.reply(desk.connections.run(RESCUE, len(RESCUE.keys), RESCUE.arguments(names, values)))


# Not now, or not at all


@KEYS
def test_a_live_run_is_left_alone_until_its_lease_ends(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=BODY)
    token = desk.acquire(claim).token
    desk.renew(claim, token, 1000.0)
    assert desk.due_in(claim) == pytest.approx(TTL, abs=5.0), "a renewal does not touch the index"
    desk.overdue(claim)

    assert [ask(desk, claim), ask(desk, claim)] == [("later",), ("later",)]

    assert desk.due_in(claim) == pytest.approx(1000.0, abs=5.0)
    assert "handouts" not in desk.trigger(claim)


@KEYS
@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED])
def test_an_outcome_that_is_being_passed_on_is_left_alone_for_its_patience(desk, execution_key, outcome):
    claim = desk.claim(execution_key=execution_key, message=BODY)
    desk.run(claim, outcome)
    desk.overdue(claim)

    assert [ask(desk, claim), ask(desk, claim)] == [("later",), ("later",)]

    assert desk.due_in(claim) == pytest.approx(GRACE, abs=1.0)


@KEYS
@pytest.mark.parametrize("how", ["settled", "no message", "unknown", "concluded", "the broker's"])
def test_where_there_is_nothing_to_rescue_nobody_looks_again(desk, execution_key, how):
    claim = desk.claim(execution_key=execution_key, message=BODY)
    if how != "unknown":
        token = desk.acquire(claim).token
    match how:
        case "settled":
            desk.finish(claim, token)
            desk.settle(claim)
        case "no message":
            desk.client.hdel(desk.trigger_name(claim), "message")
        case "concluded":
            desk.conclude(claim)
        case "the broker's":
            desk.abandon(claim, generation=1)
    desk.client.zadd(desk.due_name(claim), {claim.record.member: 1, "another": 2})

    assert [ask(desk, claim), ask(desk, claim)] == [("gone",), ("gone",)]

    assert desk.due(claim) == {"another": 2.0}
    desk.client.delete(desk.due_name(claim))


# Handing out


@KEYS
def test_the_message_of_a_dead_run_is_handed_out_as_it_came(desk, execution_key):
    claim = dead(desk, execution_key=execution_key, copy="c1", previous="")

    handout = desk.rescue(claim)

    assert handout == Handout(BODY, "c1", "", 1)
    assert desk.message(claim) == BODY


@KEYS
@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED])
def test_the_message_of_an_outcome_that_nobody_passed_on_is_handed_out(desk, execution_key, outcome):
    claim = desk.claim(execution_key=execution_key, message=BODY)
    desk.run(claim, outcome)
    end_long_ago(desk, claim)

    assert desk.rescue(claim) == Handout(BODY, "", outcome.value, 1)


@pytest.mark.parametrize(("on_held", "outcome"), [("skip", "skipped"), ("reject", "rejected")])
def test_the_message_of_a_trigger_that_did_not_run_is_handed_out_when_nobody_told(desk, on_held, outcome):
    desk.acquire(desk.claim("holder"))
    claim = desk.claim(on_held=on_held, message=BODY)
    desk.enter(claim)
    end_long_ago(desk, claim)

    assert desk.rescue(claim) == Handout(BODY, "", outcome, 1)


def test_a_run_that_was_given_back_is_handed_out_when_its_time_has_come(desk):
    claim = desk.claim(message=BODY)
    desk.acquire(claim)
    desk.abandon(claim, again=GRACE)
    assert desk.due_in(claim) == pytest.approx(GRACE, abs=1.0)

    assert desk.rescue(claim) == Handout(BODY, "", "", 1)


@KEYS
def test_each_time_the_next_look_is_put_off_for_twice_as_long_up_to_an_hour(desk, execution_key):
    claim = dead(desk, execution_key=execution_key)
    pauses, times = [], []
    for _ in range(12):
        times.append(desk.rescue(claim).times)
        pauses.append(desk.due_in(claim))

    assert times == list(range(1, 13))
    assert pauses == pytest.approx([min(10.0 * 2**n, 3600.0) for n in range(12)], abs=2.0)


def test_the_pause_stays_an_hour_however_often_it_was_handed_out(desk):
    claim = dead(desk)
    desk.client.hset(desk.trigger_name(claim), "handouts", 100_000)

    assert desk.rescue(claim).times == 100_001
    assert desk.due_in(claim) == pytest.approx(3600.0, abs=2.0)


def test_what_was_handed_out_is_not_found_by_the_next_sweeper(desk):
    claim = dead(desk)
    desk.overdue(claim)
    assert len(desk.sweep()) == 1

    desk.rescue(claim)

    assert desk.sweep() == []


def test_an_execution_that_another_trigger_runs_does_not_keep_a_message_back(desk):
    claim = dead(desk, task_id="t1", execution_key="invoice:1")
    desk.acquire(desk.claim("t2", execution_key="invoice:1", lock_key=OTHER_LOCK))

    assert desk.rescue(claim).times == 1


@KEYS
def test_only_its_execution_key_tells_two_records_of_one_task_id_apart(desk, execution_key):
    claim = dead(desk, execution_key=execution_key)
    record = claim.record._replace(lock_key=claim.record.lock_key._replace(text=""))

    assert desk.store.rescue(record) == Handout(BODY, "", "", 1)


# Coming back


@KEYS
def test_of_a_handed_out_copy_and_a_redelivery_the_first_runs_and_the_other_does_not(desk, execution_key):
    claim = dead(desk, execution_key=execution_key)
    handout = desk.rescue(claim)
    copy = desk.claim(execution_key=execution_key, copy="c1", previous=handout.copy, message=BODY)
    redelivered = desk.claim(execution_key=execution_key, message=BODY)

    assert isinstance(desk.enter(copy), Acquired)

    assert desk.enter(redelivered) == Surplus("copy")


@KEYS
def test_of_two_copies_handed_out_one_after_the_other_one_runs(desk, execution_key):
    claim = dead(desk, execution_key=execution_key)
    copies = [
        desk.claim(execution_key=execution_key, copy=f"c{n}", previous=desk.rescue(claim).copy, message=BODY) for n in range(3)
    ]

    answers = [desk.enter(copies[n]) for n in (1, 0, 2)]

    assert isinstance(answers[0], Acquired)
    assert answers[1:] == [Surplus("copy")] * 2
    assert desk.finish(copies[1], answers[0].token) is None
    assert [desk.enter(copies[n]) for n in (0, 2)] == [Surplus("copy")] * 2


def test_a_copy_that_comes_while_a_redelivery_runs_waits_for_its_end_and_finds_it_done(desk):
    claim = dead(desk)
    handout = desk.rescue(claim)
    redelivered = desk.claim(message=BODY, grace=GRACE)
    token = desk.acquire(redelivered).token
    copy = desk.claim(copy="c1", previous=handout.copy, message=BODY, grace=GRACE)

    held = desk.enter(copy)

    assert isinstance(held, Held)
    assert held.what == "own"
    desk.finish(redelivered, token)
    assert desk.enter(copy).what == "own"
    desk.settle(redelivered)
    assert desk.enter(copy).settled


@KEYS
def test_entering_begins_a_new_count_of_handouts(desk, execution_key):
    claim = dead(desk, execution_key=execution_key)
    for _ in range(3):
        handout = desk.rescue(claim)
    copy = desk.claim(execution_key=execution_key, copy="c1", previous=handout.copy, message=BODY)
    desk.die(copy)

    assert "handouts" not in desk.trigger(claim)
    assert desk.rescue(claim) == Handout(BODY, "c1", "", 1)


def test_entering_begins_a_new_count_of_handouts_though_the_store_forgot_which_message_counts(desk):
    claim = desk.claim(execution_key="invoice:1", message=BODY)
    token = desk.acquire(claim).token
    desk.keyspace.clear()
    desk.finish(claim, token)
    desk.enter(claim)
    end_long_ago(desk, claim)
    assert desk.rescue(claim) == Handout(BODY, "", "succeeded", 1)
    desk.client.delete(desk.execution_name(claim))

    desk.acquire(claim)

    assert "handouts" not in desk.trigger(claim)


def test_a_handed_out_copy_that_is_answered_is_settled_and_comes_no_more(desk):
    claim = desk.claim(message=BODY)
    desk.run(claim)
    end_long_ago(desk, claim)
    copy = desk.claim(copy="c1", previous=desk.rescue(claim).copy, message=b"the copy", grace=GRACE)

    assert desk.enter(copy).outcome is Outcome.SUCCEEDED

    assert desk.due_in(copy) == pytest.approx(GRACE, abs=1.0)
    assert desk.message(copy) == b"the copy"
    desk.settle(copy)
    assert (desk.rescue(claim), desk.due(claim)) == (None, {})
    assert desk.enter(desk.claim(copy="c2", previous="", grace=GRACE)).settled


def test_a_handed_out_copy_that_meets_a_held_lock_key_is_the_brokers(desk):
    claim = dead(desk)
    handout = desk.rescue(claim)
    desk.acquire(desk.claim("t2"))

    assert desk.enter(desk.claim(copy="c1", previous=handout.copy, message=BODY)).what == "lock"

    assert (desk.message(claim), desk.due(claim)) == (None, {})
    assert "handouts" not in desk.trigger(claim)
