"""Where runs are short the next in line waits in its slot for the hand-off: for a moment, one per key, in nobody's way."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import waiting_app
from nodes import wait_until
from waiting_app import LINGERING
from waiting_room import get_all, held, park, park_all, remember_short_runs, settings_apart, values


@pytest.fixture
def start(start_place, valkey):
    def start(**how):
        config = settings_apart(valkey.url, singleflight_lease_ttl=30, watches_lingering=True)
        return start_place(config, app_module=waiting_app, **how)

    return start


def short_runs(place, key, count, seconds=0.02):
    return [place.task("line").s(key, value, seconds=seconds) for value in range(count)]


def lingerings(place, key):
    """Each time a slot lingered for a key: its first and its last row, in order."""
    ends = {row["run"]: row for row in place.ledger.read(LINGERING, "end")}
    begins = [row for row in place.ledger.read(LINGERING, "begin") if row["lock_key"].endswith(f'["{key}"]')]
    return [(row, ends[row["run"]]) for row in begins if row["run"] in ends]


def test_one_of_a_key_lingers_and_only_beside_a_free_slot(start, key):
    place = start(workers=2, concurrency=3)
    keys = [f"{key}-{n}" for n in range(2)]
    results = {}
    for each in keys:
        with held(place, each):
            results[each] = park_all(place, each, short_runs(place, each, 40))
    for each in keys:
        assert get_all(results[each]) == list(range(40))
        assert values(place, each) == list(range(40)), "whoever lingers passes nobody"
        assert place.ledger.overlaps(each) == 0
        seen = lingerings(place, each)
        assert seen, "somebody has lingered"
        assert all(begin["free"] >= 1 for begin, _ in seen)
        for (first, end), (second, _) in pairwise(seen):
            if second["at"] < min(end["at"], first["at"] + first["left"]):
                next_run = next(row for row in place.ledger.runs(each) if row["at"] > second["at"])
                both = {first["task_id"], second["task_id"]}
                assert next_run["task_id"] in both, "one at a time, beside one whose place is free"


def test_lingering_takes_no_more_than_a_tenth_of_a_time_limit(start, key):
    place = start(workers=2, concurrency=3)
    with held(place, key):
        results = park_all(place, key, [run.set(soft_time_limit=0.5) for run in short_runs(place, key, 40)])
    assert get_all(results) == list(range(40))
    seen = lingerings(place, key)
    assert seen, "somebody has lingered"
    assert all(begin["left"] <= 0.05 for begin, _ in seen)


def test_an_unrelated_task_starts_at_once_beside_a_contended_key(start, key):
    place = start(workers=1, concurrency=2)
    with held(place, key):
        results = park_all(place, key, short_runs(place, key, 80))
    wait_until(lambda: place.ledger.runs(key), 10, "the line moves")
    beside = 0
    for n in range(10):
        unrelated = place.task("long").delay(f"{key}-{n}")
        published_at = time.monotonic()
        begun = wait_until(lambda other=f"{key}-{n}": place.ledger.runs(other), 10, "the unrelated task runs")[0]
        meanwhile = [row for row in place.ledger.runs(key) if published_at < row["at"] < begun["at"]]
        assert len(meanwhile) <= 4, "it has waited for a slot, not for the line"
        unrelated.get(timeout=10)
        if len(place.ledger.read(key, "end")) == len(results):
            break
        beside += 1
    assert beside, "the line was there"
    assert get_all(results) == list(range(80))
    assert values(place, key) == list(range(80))


@pytest.mark.parametrize(("pool", "concurrency"), [("solo", 4), ("threads", 2), ("threads", 4)])
def test_in_this_pool_nobody_lingers_in_the_last_slot(start, key, pool, concurrency):
    place = start(workers=1, pool=pool, concurrency=concurrency)
    with held(place, key):
        results = park_all(place, key, short_runs(place, key, 30))
    assert get_all(results) == list(range(30))
    assert values(place, key) == list(range(30))
    seen = lingerings(place, key)
    if pool == "solo":
        assert not seen
    elif concurrency > 2:
        assert seen, "somebody has lingered"
    assert all(begin["free"] >= 1 for begin, _ in seen)


def test_tasks_that_need_the_slot_end_the_lingering(start, key):
    place = start(workers=1, concurrency=2)
    with held(place, key):
        before = park(place, key, place.task("line").s(key))
    before.get(timeout=20)
    for turn in range(10):
        if flood_ends_a_lingering(place, key, turn):
            return
    pytest.fail("no flood came in time while somebody lingered")


def flood_ends_a_lingering(place, key, turn):
    """Let a trigger linger for a holder that does not let go, and let long tasks come. Returns whether they came in time."""
    floods = [f"{key}-{turn}-{n}" for n in range(2)]
    with held(place, key):
        remember_short_runs(place, key)
        result = park(place, key, place.task("line").s(key, turn))
        for each in floods:
            place.task("long").delay(each, 0.5)
        wait_until(lambda: all(place.ledger.read(each, "end") for each in floods), 20, "the long tasks have run")
        begin, end = next((rows for rows in lingerings(place, key) if rows[0]["task_id"] == result.id), (None, None))
    assert result.get(timeout=20) == turn
    if begin is None:  # the main process had not noted yet that the slot beside it is free
        return False
    first, second = sorted(place.ledger.runs(each)[0]["at"] for each in floods)
    if first > begin["at"] + begin["left"] - 0.15:
        return False
    assert end["left"] > 0.05, "it went before its time was over"
    assert end["free"] == 0
    assert second < min(place.ledger.read(each, "end")[0]["at"] for each in floods), "both slots were theirs"
    return True
