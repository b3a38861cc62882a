"""`min_hold`: a lock key stays taken after a success, and after nothing else. And the values that its neighbours take."""

from __future__ import annotations

import pytest
from celery import states

from celery_singleflight import Contended
from celery_singleflight.options import OPTIONS, read_options

HOLD = 100.0


def echo(x, how="ok"):
    if how == "fail":
        raise OSError(how)
    return x


def key_of(task, *args):
    return task._binding.lock_key(task.name, args, {})


def test_after_a_success_the_next_one_waits(place):
    task = place.task(echo, lock_on=("x",), min_hold=HOLD)
    first, second = task.delay(1), task.delay(1)
    for message in place.messages():
        place.deliver(message)
    assert first.get(timeout=1) == 1
    assert second.state == states.RETRY
    assert [owner.endswith(" ended") for owner in place.holders(key_of(task, 1))] == [True]


def test_after_a_failure_the_next_one_runs(place):
    task = place.task(echo, lock_on=("x",), min_hold=HOLD)
    failed, second = task.delay(1, how="fail"), task.delay(1)
    for message in place.messages():
        place.deliver(message)
    assert (failed.state, second.state) == (states.FAILURE, states.SUCCESS)


def test_a_retry_does_not_wait_for_it(place):
    def work(self):
        if self.request.retries == 0:
            raise self.retry(countdown=0)
        return self.request.retries

    task = place.task(work, bind=True, min_hold=HOLD)
    result = task.delay()
    place.deliver_all(rounds=2 + 1)
    assert result.get(timeout=1) == 1


def test_a_direct_call_holds_it_too_when_it_succeeds(place):
    task = place.task(echo, lock_on=("x",), min_hold=HOLD, wait_timeout=0)
    with pytest.raises(OSError, match="fail"):
        task(1, how="fail")
    assert task(1) == 1
    with pytest.raises(Contended):
        task(1)
    assert task(2) == 2


def test_a_nested_call_leaves_the_lease_to_the_outer_one(place):
    def outer(x):
        assert inner(x) == x
        assert [owner for owner in place.holders(key_of(inner, x)) if owner.endswith(" ended")] == []
        return inner(x)

    inner = place.task(echo, lock_on=("x",), lock_name="shared", min_hold=HOLD, name="shop.inner")
    task = place.task(outer, lock_name="shared", lock_on=("x",))
    assert place.result_of(task.delay(1)) == 1
    assert place.holders(key_of(task, 1)) == []


@pytest.mark.parametrize(
    ("name", "default", "values"),
    [
        ("min_hold", 0.0, {0: 0.0, 0.5: 0.5, 604_800: 604_800.0}),
        ("rescue", True, {True: True, False: False}),
        ("max_deliveries", 5, {1: 1, 1000: 1000}),
        ("keep_message", "failed", {word: word for word in ("failed", "always", "never")}),
        ("store_error_policy", "requeue", {word: word for word in ("requeue", "fail", "run")}),
    ],
)
def test_good_values_are_taken_from_the_task_and_from_the_settings(name, default, values):
    assert getattr(read_options("shop.settle", lambda _: None, {}), name) == default
    for given, taken in values.items():
        found = getattr(read_options("shop.settle", {name: given}.get, {}), name)
        assert (found, type(found)) == (taken, type(taken))
        assert getattr(read_options("shop.settle", lambda _: None, {OPTIONS[name].setting: given}), name) == taken
