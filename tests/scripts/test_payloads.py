"""An explicit execution key stands for one payload: another one is an error, whatever has become of the execution."""

from __future__ import annotations

import pytest
from desk import OTHER_LOCK

from celery_singleflight.claims import Acquired, Encoded, Ended, Held, Outcome, Terms
from celery_singleflight.errors import ExecutionKeyReused, PayloadMismatch

ERROR = Encoded("application/json", "utf-8", b'"an error"')


def asking(desk, task_id, payload, **how):
    return desk.claim(task_id, execution_key="invoice:1", terms=Terms(payload=payload), **how)


@pytest.mark.parametrize("lock_key", [None, OTHER_LOCK], ids=["the same lock key", "another lock key"])
@pytest.mark.parametrize("fate", ["runs", "has succeeded", "has died", "waits for its retry"])
def test_another_payload_is_refused_whatever_has_become_of_the_execution(desk, fate, lock_key):
    first = asking(desk, "t1", "seven")
    token = desk.acquire(first).token
    if fate == "has succeeded":
        desk.finish(first, token)
    elif fate == "has died":
        desk.expire(first)
    elif fate == "waits for its retry":
        desk.abandon(first, generation=1)

    where = {} if lock_key is None else {"lock_key": lock_key}
    with pytest.raises(PayloadMismatch) as refused:
        desk.enter(asking(desk, "t2", "eight", **where))
    assert (refused.value.execution_key, refused.value.task) == ("invoice:1", "shop.bill")
    expected = {"runs": Held, "has succeeded": Ended, "has died": Acquired, "waits for its retry": Acquired}[fate]
    assert isinstance(desk.enter(asking(desk, "t3", "seven", **where)), expected)


def test_after_a_failure_that_is_forgotten_the_key_is_free_for_any_payload(desk):
    first = asking(desk, "t1", "seven")
    desk.run(first, Outcome.FAILED)
    desk.acquire(asking(desk, "t2", "eight"))


def test_a_failure_that_is_kept_keeps_its_payload(desk):
    first = asking(desk, "t1", "seven")
    token = desk.acquire(first).token
    desk.finish(first, token, Outcome.FAILED, keeps_failure=True)
    with pytest.raises(PayloadMismatch):
        desk.enter(asking(desk, "t2", "eight"))
    assert desk.enter(asking(desk, "t3", "seven")).outcome is Outcome.FAILED


def test_the_trigger_itself_may_come_with_another_which_counts_from_then_on(desk):
    first = asking(desk, "t1", "seven")
    desk.acquire(first)
    desk.abandon(first, generation=1)
    desk.acquire(asking(desk, "t1", "eight", generation=1))
    with pytest.raises(PayloadMismatch):
        desk.enter(asking(desk, "t2", "seven"))


@pytest.mark.parametrize(("recorded", "asked"), [("", "seven"), ("seven", "")])
def test_what_cannot_be_compared_is_the_same(desk, recorded, asked):
    desk.run(asking(desk, "t1", recorded))
    assert isinstance(desk.enter(asking(desk, "t2", asked)), Ended)


def test_without_an_explicit_key_nothing_is_compared(desk):
    desk.run(desk.claim("t1", terms=Terms(payload="seven")))
    assert isinstance(desk.enter(desk.claim("t1", terms=Terms(payload="eight"))), Ended)


def test_another_task_is_told_apart_from_another_payload(desk):
    desk.run(asking(desk, "t1", "seven"))
    with pytest.raises(ExecutionKeyReused) as refused:
        desk.enter(asking(desk, "t2", "eight", task="shop.ship"))
    assert type(refused.value) is ExecutionKeyReused


@pytest.mark.parametrize(("task", "what"), [("shop.bill", "payload"), ("shop.ship", "task")])
def test_who_is_refused_has_failed_and_stays_so(desk, task, what):
    first = asking(desk, "t1", "seven")
    token = desk.acquire(first).token
    refused = asking(desk, "t2", "eight", task=task, message=b"m")
    with pytest.raises(ExecutionKeyReused):
        desk.enter(refused)
    desk.finish(first, token, Outcome.FAILED)  # so that the key is free again

    again = desk.enter(asking(desk, "t2", "eight", task=task, message=b"m", owner="another delivery", grace=0.0))
    assert (again.outcome, again.reason, again.settled) == (Outcome.FAILED, [what, "shop.bill"], False)
    desk.settle(refused._replace(owner="another delivery"))
    assert desk.due_in(refused) is None
    assert desk.message(refused) is None
    assert desk.enter(refused).settled


def test_who_was_answered_from_what_is_forgotten_is_refused_too(desk):
    """And keeps the outcome that it was told, which may have been passed on."""
    desk.run(asking(desk, "t1", "seven"))
    answered = asking(desk, "t2", "seven", grace=0.0)
    assert desk.enter(answered).outcome is Outcome.SUCCEEDED
    desk.client.delete(desk.execution_name(answered))
    desk.acquire(asking(desk, "t3", "eight"))
    with pytest.raises(PayloadMismatch):
        desk.enter(answered._replace(owner="another delivery"))
    assert desk.client.hget(desk.store.names(answered.record)["trigger"], "outcome") in ("succeeded", b"succeeded")


def test_who_only_asks_is_refused_and_has_no_outcome(desk):
    desk.run(asking(desk, "t1", "seven"))
    with pytest.raises(PayloadMismatch):
        desk.enter(asking(desk, "t2", "eight", on_held="ask"))
    assert not desk.client.exists(desk.store.names(asking(desk, "t2", "eight").record)["trigger"])


def test_who_is_refused_leaves_the_line_to_those_behind(desk):
    holder, refused, behind = (
        desk.claim("t0"),
        asking(desk, "t2", "eight", on_held="queue", message=b"m"),
        desk.claim("t3", on_held="queue", message=b"m3"),
    )
    token = desk.acquire(holder).token
    assert desk.enter(refused).place == 0
    assert desk.enter(behind).place == 1
    desk.run(asking(desk, "t1", "seven", lock_key=OTHER_LOCK))
    calls = desk.store.finish(desk.lease(holder, token), holder.record, Outcome.FAILED, ERROR, reason="[]", keep=600.0).calls
    assert calls[0].message == b"m"
    assert isinstance(desk.enter(desk.claim("t4")), Held), "its place is kept"

    with pytest.raises(PayloadMismatch):
        desk.enter(refused)

    assert isinstance(desk.enter(behind), Acquired)
