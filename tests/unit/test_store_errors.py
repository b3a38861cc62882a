"""`store_error_policy`: what a trigger does when the store is away before its body."""

from __future__ import annotations

import pytest
from celery import states

from celery_singleflight import SingleflightError, StoreUnavailable, current_execution, current_lease, headers as header
from celery_singleflight.store import Store


class Away:
    """A store that does not answer: not at all, or after it has done what it was asked for."""

    def __init__(self, monkeypatch):
        self.is_away = True
        self.has_run = False
        real = Store.enter

        def enter(store, claim):
            if self.is_away and self.has_run:
                real(store, claim)
            if self.is_away:
                raise StoreUnavailable("away")
            return real(store, claim)

        monkeypatch.setattr(Store, "enter", enter)


@pytest.fixture
def away(monkeypatch):
    return Away(monkeypatch)


def make(place, **options):
    runs = []

    def work(self, x):
        runs.append(x)
        return x

    return place.task(work, bind=True, **options), runs


def test_by_default_it_waits_as_the_same_copy_until_the_store_is_back(place, away):
    task, runs = make(place)
    result = task.delay(1)
    (message,) = place.messages()
    for waits in (1, 2, 3):
        place.deliver(message)
        (message,) = place.messages()
        assert message.headers[header.WAITS] == waits
        assert {header.COPY, header.PREVIOUS}.isdisjoint(message.headers)
        assert message.headers["retries"] == 0
        assert message.headers["eta"]
        assert result.state == states.RETRY
    assert runs == []

    away.is_away = False
    place.deliver(message)

    assert (runs, result.get(timeout=1)) == ([1], 1)


def test_with_fail_it_fails_and_says_why(place, away):
    task, runs = make(place, store_error_policy="fail")
    result = task.delay(1)
    place.deliver_all()
    with pytest.raises(StoreUnavailable, match="away"):
        result.get(timeout=1)
    assert runs == []


def test_with_run_it_runs_once_without_a_lease_and_says_so(place, away, caplog):
    told = []

    def work(self, x):
        told.append((current_lease(), self.execution.key, self.execution.attempt, current_execution() is self.execution))
        with pytest.raises(StoreUnavailable, match="store_error_policy is 'run'"):
            _ = self.lease
        return x

    task = place.task(work, bind=True, store_error_policy="run")
    result = task.delay(1)
    place.deliver_all()
    assert result.get(timeout=1) == 1
    assert told == [(None, result.id, 1, True)]
    assert f"{task.name}[{result.id}] runs without protection: away" in caplog.messages
    with pytest.raises(SingleflightError):
        _ = task.execution


def test_with_run_a_failure_and_the_tasks_own_before_start_are_as_ever(place, away):
    told = []

    def work(x):
        raise OSError(x)

    task = place.task(work, store_error_policy="run", before_start=lambda self, *args: told.append(args[1]))
    result = task.delay(1)
    place.deliver_all()
    assert result.state == states.FAILURE
    assert [tuple(args) for args in told] == [(1,)]


@pytest.mark.parametrize("policy", ["requeue", "run", "fail"])
def test_what_was_granted_and_never_heard_of_is_given_back(place, away, policy):
    away.has_run = True
    task, _ = make(place, store_error_policy=policy)
    task.delay(1)
    place.deliver(place.messages()[0])
    key = task._binding.lock_key(task.name, (1,), {})
    assert place.holders(key) == []


@pytest.mark.parametrize("policy", ["requeue", "fail"])
def test_eagerly_there_is_nobody_who_would_run_it_later(place, away, policy):
    task, runs = make(place, store_error_policy=policy)
    with pytest.raises(StoreUnavailable):
        task.apply((1,)).get()
    assert (runs, place.messages()) == ([], [])


def test_eagerly_with_run_it_runs(place, away):
    task, runs = make(place, store_error_policy="run")
    assert task.apply((1,)).get() == 1
    assert runs == [1]


def test_a_policy_of_the_settings_is_the_tasks_own_too(make_place, away):
    place = make_place(singleflight_store_error_policy="fail")
    task, _ = make(place)
    result = task.delay(1)
    place.deliver_all()
    assert result.state == states.FAILURE
