"""How a trigger uses its slot to wait for its turn: when it waits, for how long, and when it asks."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from celery_singleflight import StoreUnavailable, entering
from celery_singleflight.claims import Acquired, Linger, Parked

ACQUIRED = Acquired(1, "run", 1)
PARKED = Parked("line", "holder", "worker", 0.0, 0.0, 0, 1)


class Asked:
    """A store that answers in turn, a worker with so many free slots, and all that was asked of them."""

    def __init__(self, *answers, free=1, **facts):
        self.log, self.answers, self.free, self.now = [], list(answers), free, 1000.0
        self.trigger = SimpleNamespace(
            binding=SimpleNamespace(app=None, coordination=SimpleNamespace(store=self)),
            claim=SimpleNamespace(ttl=30.0),
            called_ahead=0.0,
            first_limit=math.inf,
            lock_key="billing",
            may_linger=True,
            may_park=True,
            waiting=lambda linger: linger,
        )
        for name, value in facts.items():
            setattr(self.trigger, name, value)

    def sleep(self, seconds):
        self.log.append(("sleep", seconds))
        self.now += seconds

    def enter(self, linger):
        self.log.append("enter lingering" if linger else "enter")
        return self.answers.pop(0)

    def enter_after_baton(self, linger, seconds, goes_on):
        self.log.append(("wait", pytest.approx(seconds)))
        answer = self.answers.pop(0)
        if answer == "nobody brings it":
            self.now += seconds
            answer = self.answers.pop(0)
        if answer == "goes on?":
            self.free = 0
            return None if not goes_on() else pytest.fail("somebody needs the slot")
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def ask(monkeypatch):
    """Let a trigger ask for its lease. Returns the answer, and all that was done for it."""

    def ask(*answers, **facts):
        asked = Asked(*answers, **facts)
        monkeypatch.setattr(entering, "free_slots", lambda: asked.free)
        monkeypatch.setattr(entering, "engage", lambda now: asked.log.append("engaged" if now else "idle") or 0)
        monkeypatch.setattr(entering, "prepare", lambda app: asked.log.append("connect"))
        monkeypatch.setattr(entering, "hand_on", lambda app, calls: asked.log.extend(calls))
        monkeypatch.setattr(entering, "time", SimpleNamespace(sleep=asked.sleep, monotonic=lambda: asked.now))
        answer, _ = entering.enter(asked.trigger)
        assert asked.answers == []
        return answer, asked.log

    return ask


def waited(seconds):
    return ["engaged", ("wait", seconds), "idle"]


def test_one_that_is_let_wait_waits_at_once_and_asks_with_the_baton(ask):
    answer, log = ask(Linger(0.09, 1, ["a call"]), ACQUIRED)
    assert answer == ACQUIRED
    assert log == ["enter lingering", "a call", *waited(0.09), "connect"]


def test_one_that_was_called_ahead_waits_before_it_asks(ask):
    answer, log = ask(ACQUIRED, called_ahead=0.2)
    assert answer == ACQUIRED
    assert log == [*waited(0.2), "connect"]


def test_one_that_has_had_the_baton_of_another_gives_that_one_time_before_it_waits_again(ask):
    answer, log = ask(*[Linger(0.09, 1)] * 6, ACQUIRED, called_ahead=0.2)
    assert answer == ACQUIRED
    sleeps = [0.002, 0.004, 0.008, 0.016, 0.032, 0.09]
    assert log == [*waited(0.2), *[step for seconds in sleeps for step in (("sleep", seconds), *waited(0.09))], "connect"]


@pytest.mark.parametrize("facts", [{"free": 0}, {"may_linger": False}], ids=str)
def test_where_no_slot_is_free_it_asks_and_does_not_wait(ask, facts):
    answer, log = ask(PARKED, called_ahead=0.2, **facts)
    assert answer == PARKED
    assert log == ["enter", "connect"]


def test_one_whose_slot_is_needed_asks_and_waits_no_more(ask):
    answer, log = ask("goes on?", PARKED, called_ahead=0.2)
    assert answer == PARKED
    assert log == [*waited(0.2), "enter", "connect"]


def test_one_whose_store_lets_it_not_wait_asks_and_waits_no_more(ask):
    answer, log = ask(StoreUnavailable("away"), PARKED, called_ahead=0.2)
    assert answer == PARKED
    assert log == [*waited(0.2), "enter", "connect"]


def test_one_that_has_lingered_for_its_time_waits_no_more(ask):
    answer, log = ask("nobody brings it", Linger(0.09, 1), PARKED, called_ahead=0.2)
    assert answer == PARKED
    assert log == [*waited(0.2), ("sleep", 0.002), "enter", "connect"]
