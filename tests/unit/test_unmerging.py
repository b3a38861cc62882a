"""A merge that comes too late: what was merged runs by itself, and nothing is done twice."""

from __future__ import annotations

import pytest


@pytest.fixture
def shop(place):
    """A task that merges what waits with what comes, and what its body was called with."""
    ran, on_merge = [], []

    def union(waiting, new):
        for act in on_merge:
            act()
        return {"account": new["account"], "items": waiting["items"] + new["items"]}

    def refresh(account, items):
        ran.append(items)

    task = place.task(refresh, lock_on=("account",), lock_name="refresh", contention_policy="coalesce", coalesce_keep=union)
    return place, task, ran, on_merge


def test_what_comes_is_merged_with_what_waits(shop):
    place, task, ran, _ = shop
    with place.held_elsewhere("refresh", "a1") as give_back:
        for item in (1, 2, 3):
            task.delay("a1", items=[item])
            place.deliver_all()
        give_back()
        place.deliver_all()
    assert ran == [[1, 2, 3]]


def test_who_has_merged_with_one_that_has_run_meanwhile_runs_with_its_own_arguments(shop):
    place, task, ran, on_merge = shop
    with place.held_elsewhere("refresh", "a1") as give_back:
        first = task.delay("a1", items=[1])
        place.deliver_all()
        on_merge += [give_back, place.deliver_all]
        second = task.delay("a1", items=[2])
        place.deliver_all()
    assert ran == [[1], [2]]
    assert (first.state, second.state) == ("SUCCESS", "SUCCESS")


def test_who_cannot_merge_a_second_time_waits_with_its_own_arguments(shop):
    place, task, ran, on_merge = shop
    calls = []

    def be_overtaken():
        calls.append(1)
        if len(calls) == 1:
            task.delay("a1", items=[2])
            place.deliver_all()
        elif len(calls) == 3:
            raise ValueError("no more")

    with place.held_elsewhere("refresh", "a1") as give_back:
        task.delay("a1", items=[1])
        place.deliver_all()
        on_merge.append(be_overtaken)
        task.delay("a1", items=[3])
        place.deliver_all()
        give_back()
        place.deliver_all()
    assert sorted(ran) == [[1, 2], [3]]
