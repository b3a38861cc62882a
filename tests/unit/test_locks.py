"""`lock`: a lock key held without a task, for scripts and narrow critical sections."""

from __future__ import annotations

import contextvars
import math

import pytest

from celery_singleflight import Contended, FencingUnavailable, LeaseLost, StoreUnavailable, current_lease, lock


def work(key, value=None):
    return value


def lose(place, lease):
    """Let somebody else take the key, and the holder learn of it."""
    place.take_away(lease.key)
    lease.mark_lost("taken")


def test_a_lock_is_held_in_its_block_and_given_back_after_it(place):
    with lock(place.app, "billing", "acct", 7) as lease:
        assert lease.lock_key == 'billing["acct",7]'
        assert place.holders(lease.key) == [lease.owner]
        assert not lease.is_lost
        assert repr(lease) == f'<Lease billing["acct",7] token {lease.fencing_token}, 30.0 s left>'
    assert place.holders(lease.key) == []


def test_a_lock_does_not_wait_unless_it_is_told_to(place, clock):
    with place.held_elsewhere("billing", 7):
        with pytest.raises(Contended) as caught, lock(place.app, "billing", 7):
            pytest.fail("the key is held by somebody else")
        assert clock.slept == []
        assert str(caught.value).startswith("billing[7] is held by ")
        with pytest.raises(Contended), lock(place.app, "billing", 7, wait=2.5):
            pytest.fail("the key is held by somebody else")
        assert sum(clock.slept) == pytest.approx(2.5)


def test_a_lock_waits_for_as_long_as_it_takes(place, clock):
    with place.held_elsewhere("billing", 7) as give_back:
        clock.while_asleep = lambda: give_back() if sum(clock.slept) > 300 else None
        with lock(place.app, "billing", 7, wait=math.inf) as lease:
            assert place.holders(lease.key) == [lease.owner]


def test_a_lock_is_given_back_when_its_block_fails(place):
    for error in (ValueError, KeyboardInterrupt, SystemExit, GeneratorExit):
        with pytest.raises(error), lock(place.app, "billing") as lease:
            raise error
        assert place.holders(lease.key) == []
        assert current_lease() is None


def test_a_block_whose_lock_was_lost_is_told_at_its_end(place):
    with pytest.raises(LeaseLost) as caught, lock(place.app, "billing") as lease:
        lose(place, lease)
    assert str(caught.value) == "the lease on billing[] is lost: taken"
    assert place.holders(lease.key) == ["somebody else"]


def test_a_block_that_ran_past_its_lease_is_told_at_its_end(place, clock):
    with pytest.raises(LeaseLost) as caught, lock(place.app, "billing", lease_ttl=5, max_hold=5):
        clock.now += 5
    assert str(caught.value) == "the lease on billing[] is lost: it is as old as its max_hold, 5 s"


def test_the_error_of_a_block_is_not_hidden_by_the_loss_of_its_lock(place):
    def block(lease):
        lose(place, lease)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), lock(place.app, "billing") as lease:
        block(lease)


def test_a_lock_lets_in_as_many_as_its_limit(place):
    with (
        place.held_elsewhere("billing"),
        lock(place.app, "billing", lock_limit=2) as lease,
        pytest.raises(Contended),
        place.held_elsewhere("billing"),
    ):
        pytest.fail("there is no place left")
    with pytest.raises(FencingUnavailable):
        _ = lease.fencing_token


def test_a_locks_lease_is_as_long_as_it_or_the_app_says(make_place):
    with lock(make_place().app, "a") as lease:
        assert lease.ttl == 30.0
    place = make_place(singleflight_lease_ttl=12)
    with lock(place.app, "a") as lease:
        assert lease.ttl == 12
        assert 11 < place.client.pttl(place.store.keys.lock(lease.key).lease) / 1000 - 60 <= 12
    with lock(place.app, "a", lease_ttl=3) as lease:
        assert lease.ttl == 3


def test_a_lock_excludes_the_task_of_its_name_and_scope(place, clock):
    task = place.task(work, lock_name="billing", lock_on=("key",), contention_policy="reject")
    with place.held_elsewhere("billing", "k"):
        with pytest.raises(Contended):
            task("k")
        assert task("other", 5) == 5

    def inside(key):
        with pytest.raises(Contended), place.held_elsewhere("billing", key):
            pytest.fail("the task holds this key")

    place.task(inside, lock_name="billing", lock_on=("key",))("k")


def test_tasks_of_one_lock_name_exclude_each_other(place):
    one = place.task(work, name="shop.one", lock_name="billing", lock_on=("key",))
    seen = []

    def other(value, key):
        context = contextvars.Context()
        with pytest.raises(Contended) as caught:
            context.run(one.apply, ("k",), throw=True)
        seen.append(caught.value.lock_key)

    place.task(other, lock_name="billing", lock_on="{key}")(1, "k")
    assert seen == ['billing["k"]']


def test_a_store_that_is_away_is_said_and_nothing_runs(place, monkeypatch):
    bodies = []

    def pay(key):
        bodies.append(key)

    task = place.task(pay)

    def away(*_):
        raise StoreUnavailable("the store is away")

    monkeypatch.setattr(place.store._connections, "run", away)
    with pytest.raises(StoreUnavailable):
        task("k")
    with pytest.raises(StoreUnavailable), lock(place.app, "billing"):
        pytest.fail("there is no store")
    assert bodies == []
