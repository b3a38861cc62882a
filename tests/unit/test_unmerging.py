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


@pytest.mark.parametrize(("how", "expected"), [("by name", [{"a": 1, "b": 2}]), ("by parameter", [{"a": 1}, {"b": 2}])])
def test_of_open_arguments_each_is_merged_by_its_name_and_none_is_lost(place, how, expected):
    ran = []

    def union(waiting, new):
        if how == "by name":
            return {**waiting, **new}
        return {**new, "parts": {**waiting["parts"], **new["parts"]}}

    def refresh(account, **parts):
        ran.append(parts)

    task = place.task(refresh, lock_on=("account",), lock_name="refresh", contention_policy="coalesce", coalesce_keep=union)
    with place.held_elsewhere("refresh", "a1") as give_back:
        task.delay("a1", a=1)
        place.deliver_all()
        task.delay("a1", b=2)
        place.deliver_all()
        give_back()
        place.deliver_all()
    assert sorted(ran, key=repr) == expected


def test_who_has_an_argument_without_a_canonical_form_joins_nobody_and_runs(make_place):
    place, ran = make_place(accept_content=["json", "pickle"]), []

    def report(account, what):
        ran.append(account)

    task = place.task(report, lock_on=("account",), lock_name="report", contention_policy="join")
    with place.held_elsewhere("report", "a1") as give_back:
        for _ in range(2):
            task.apply_async(("a1", object()), serializer="pickle")
            place.deliver_all()
        give_back()
        place.deliver_all()
    assert ran == ["a1", "a1"]
