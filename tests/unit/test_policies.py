"""How long to wait: decisions that do nothing."""

from __future__ import annotations

from math import inf

import pytest
from celery import Celery
from hypothesis import given, strategies as st

from celery_singleflight.claims import Held
from celery_singleflight.options import OPTIONS
from celery_singleflight.policies import (
    LONGEST_DELAY,
    PARKING,
    blind_delay,
    poll_delay,
    requeue_delay,
    waits_on_contention,
)
from celery_singleflight.waiting import longest_delay


class Least:
    """Chance that always gives the lower bound."""

    def uniform(self, low, high):
        return low


class Most:
    def uniform(self, low, high):
        return high


def held(what="lock", **how):
    facts = {
        "task_id": "t",
        "worker": "w",
        "age": 1.0,
        "remaining": 30.0,
        "hold": 0.0,
        "turn": 0.0,
        "waited": 0.0,
        "first_ms": "1",
    }
    return Held(what=what, **{**facts, **how})


seconds = st.floats(0, 10_000)
counts = st.integers(0, 10_000)
kinds = st.sampled_from(["lock", "execution", "own", "predecessor"])
waiting = st.builds(held, kinds, remaining=seconds, hold=seconds, turn=seconds, tries=counts)


@given(waiting, counts, st.floats(0.1, 60), st.floats(0, 1))
def test_a_countdown_is_never_longer_than_the_longest_and_never_shorter_than_the_least(held, waits, longest, least):
    for chance in (Least(), Most()):
        delay = requeue_delay(held, waits, longest=longest, least=least, chance=chance)
        assert least <= delay <= max(longest * 1.2, least)
        assert delay > 0


@given(waiting, counts)
def test_a_countdown_does_not_get_shorter_with_each_try(held, waits):
    later = held._replace(tries=held.tries + 1)
    assert requeue_delay(held, waits, longest=60, chance=Least()) <= requeue_delay(later, waits + 1, longest=60, chance=Least())


@given(seconds, seconds, counts)
def test_who_is_further_behind_does_not_come_earlier(near, further, tries):
    first, second = (held(turn=turn, tries=tries) for turn in (near, near + further))
    assert requeue_delay(first, 0, longest=60, chance=Least()) <= requeue_delay(second, 0, longest=60, chance=Least())


@pytest.mark.parametrize("turn", [0.05, 3.0, 50.0])
def test_who_waits_comes_a_little_before_its_turn_and_is_spread_by_its_place_rather_than_by_chance(turn):
    for waits in (0, 7):
        earliest, latest = (requeue_delay(held(turn=turn), waits, longest=60, chance=chance) for chance in (Least(), Most()))
        assert 0.9 * turn < earliest < latest < turn


def test_those_too_far_behind_do_not_all_look_again_at_the_same_time():
    assert requeue_delay(held(turn=900.0), 0, longest=60, chance=Least()) == 60.0
    assert requeue_delay(held(turn=900.0), 0, longest=60, chance=Most()) == 72.0


def test_one_whose_turn_it_is_looks_again_at_once():
    assert 0.0 < requeue_delay(held(turn=0.0), 9, longest=60, chance=Most()) < 0.005


def test_a_holder_that_hangs_is_not_polled():
    delays = [requeue_delay(held(tries=tries), 0, longest=60, chance=Least()) for tries in range(1, 12)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]


@pytest.mark.parametrize(
    ("remaining", "longest", "delay"), [(30.0, 60.0, 30.0), (5.0, 60.0, 5.0), (0.0, 60.0, 1.0), (30.0, 7.0, 7.0)]
)
def test_nobody_is_kept_from_looking_when_a_holder_that_hangs_would_have_lost_its_lease(remaining, longest, delay):
    assert requeue_delay(held(remaining=remaining, tries=20), 20, longest=longest, chance=Least()) == delay


@pytest.mark.parametrize(("remaining", "delay"), [(30.0, 8.0), (5.0, 5.0), (0.0, 1.0)])
def test_a_trigger_waits_for_its_own_run_no_longer_than_that_can_live(remaining, delay):
    assert requeue_delay(held("own", remaining=remaining), 3, longest=60, chance=Least()) == delay


def test_without_a_store_the_countdown_doubles_up_to_the_longest():
    assert [blind_delay(waits, longest=60, chance=Least()) for waits in (0, 1, 2, 5, 6, 100)] == [1, 2, 4, 32, 60, 60]


@given(waiting, counts, st.floats(0, 100))
def test_one_that_waits_in_place_never_sleeps_past_its_end(held, tries, left):
    for chance in (Least(), Most()):
        assert 0 <= poll_delay(held, tries, left, chance=chance) <= min(left, 1.2)


def test_one_that_waits_in_place_looks_soon_and_then_less_often():
    delays = [poll_delay(held(), tries, inf, chance=Most()) for tries in range(9)]
    assert delays == sorted(delays)
    assert delays[0] == pytest.approx(0.024)
    assert delays[-1] == pytest.approx(1.2)


def test_a_newcomer_runs_later_under_all_policies_but_skip_and_reject():
    policies = OPTIONS["contention_policy"].expected.replace("'", "").replace(" or ", ", ").split(", ")
    assert [policy for policy in policies if not waits_on_contention(policy)] == ["skip", "reject"]
    assert {"requeue", *PARKING} == {*policies} - {"skip", "reject"}


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({}, LONGEST_DELAY),
        ({"broker_transport_options": {"visibility_timeout": 43200}}, LONGEST_DELAY),
        ({"broker_transport_options": {"visibility_timeout": 20}}, 10.0),
        ({"broker_transport_options": {"visibility_timeout": 2}}, 1.0),
    ],
)
def test_no_countdown_is_taken_for_an_abandoned_message(settings, longest):
    app = Celery(set_as_current=False)
    app.conf.update(settings)
    assert longest_delay(app) == longest
