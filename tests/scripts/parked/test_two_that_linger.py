"""Two that linger for one lock key: the second may take the baton of the first, which is still to come, and gives it back."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest

from celery_singleflight import entering
from celery_singleflight.claims import Acquired, Linger, Parked

#: Seconds that no test waits for.
LONG = 10.0


@pytest.fixture
def short(desk):
    """Runs are short, and somebody holds the lock key. Returns what `end` needs."""
    held = desk.hold()
    desk.make_runs_short()
    return held


def has_baton(desk):
    return desk.client.exists(desk.name("baton")) == 1


def ask_after_baton(desk, claim, seconds=LONG):
    return desk.store.enter_after_baton(claim, seconds, lambda: True)


@pytest.fixture
def two_linger(desk, short):
    """Two that were called ahead wait in their slots, and a place is free: the first one's. Returns how they ask."""
    claims = [desk.park(task_id) for task_id in ("w0", "w1", "w2")]
    assert desk.end(*short) == ["w0", "w1"]
    desk.let_linger_last()
    desk.make_runs_short()
    assert desk.run_called(claims[0]) == ["w2"]
    desk.let_linger_last()
    assert desk.called() == {"w1", "w2"}
    return [desk.copy_of(claim, waits=claim.waits._replace(linger=0.4)) for claim in claims[1:]]


def test_the_second_gives_back_the_baton_of_the_first_that_it_has_taken(desk, two_linger):
    first, second = two_linger
    assert has_baton(desk)

    assert isinstance(ask_after_baton(desk, second), Linger)

    assert desk.line() == ["w1", "w2"]
    assert 0 < desk.client.pttl(desk.name("baton")) <= 2000
    assert isinstance(ask_after_baton(desk, first), Acquired)
    assert not has_baton(desk)


def test_it_gets_its_own_baton_when_the_first_has_run(desk, two_linger):
    first, second = two_linger
    ask_after_baton(desk, second)
    desk.let_linger_last()
    token = ask_after_baton(desk, first).token
    assert isinstance(ask_after_baton(desk, second, 0.01), Linger)
    assert not has_baton(desk), "no place is free"
    desk.let_linger_last()

    assert desk.end(first, token) == []

    assert isinstance(ask_after_baton(desk, second), Acquired)


def test_a_baton_is_not_given_back_beside_the_one_that_is_there(desk, two_linger):
    _, second = two_linger
    desk.take_baton()
    for _ in range(2):
        assert isinstance(desk.enter(second), Linger)
        desk.let_linger_last()
    assert desk.client.llen(desk.name("baton")) == 1


def test_it_is_given_back_by_one_that_lingers_no_more(desk, two_linger):
    _, second = two_linger
    desk.take_baton()
    assert isinstance(desk.enter(second._replace(waits=second.waits._replace(linger=0.0))), Parked)
    assert has_baton(desk)


# As a worker's slot asks


@pytest.fixture
def sleeps(monkeypatch):
    """What is done while a slot waits before it waits for the baton again, and for how many seconds each time."""
    monkeypatch.setattr(entering, "free_slots", lambda: 1)
    found = SimpleNamespace(seconds=[], meanwhile=lambda: None)

    def sleep(seconds):
        found.seconds.append(seconds)
        found.meanwhile()

    monkeypatch.setattr(entering, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    return found


def called_ahead(desk, claim, seconds):
    """A delivery of one that was called ahead."""
    return SimpleNamespace(
        binding=SimpleNamespace(app=None, coordination=SimpleNamespace(store=desk.store)),
        claim=claim,
        called_ahead=seconds,
        first_limit=math.inf,
        lock_key=claim.record.lock_key,
        may_linger=True,
        may_park=False,
        waiting=lambda linger: claim._replace(waits=claim.waits._replace(linger=linger)),
    )


def test_the_first_has_the_lease_while_the_second_waits_a_little(desk, two_linger, sleeps):
    first, second = two_linger
    answers = []

    def first_comes():
        if not answers:
            desk.let_linger_last()
            answers.append(has_baton(desk))
            answers.append(entering.enter(called_ahead(desk, first, 0.3))[0])
            answers.append(has_baton(desk))

    sleeps.meanwhile = first_comes
    late, _ = entering.enter(called_ahead(desk, second, 0.09))

    assert answers[::2] == [True, False], "the first has it"
    assert isinstance(answers[1], Acquired)
    assert isinstance(late, Parked)
    assert sleeps.seconds[:1] == [0.002]
    assert desk.line() == ["w2"]


@pytest.mark.parametrize("why", ["its time would be up", "no slot is free"])
def test_the_first_has_its_baton_though_the_second_may_linger_no_more(desk, two_linger, sleeps, monkeypatch, why):
    first, second = two_linger
    if why == "no slot is free":
        free = iter([1])
        monkeypatch.setattr(entering, "free_slots", lambda: next(free, 0))
    answer, _ = entering.enter(called_ahead(desk, second, 0.4 if why == "its time would be up" else 0.09))

    assert isinstance(answer, Parked)
    assert has_baton(desk)
    assert isinstance(ask_after_baton(desk, first), Acquired)
    assert not has_baton(desk)
