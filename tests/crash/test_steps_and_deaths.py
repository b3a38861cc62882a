"""A process dies between and within steps, parts and undos: what is done is not done again, and all ends."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest
import steps_app
from aftermath import kill_child, kill_worker
from nodes import redis_settings, wait_until
from steps_app import arm

from celery_singleflight import StepUncertain, resolve_step


@pytest.fixture(scope="module")
def crowd(start_shared, valkey):
    """Two workers of two processes, on a broker that delivers again after an hour."""
    settings = redis_settings(valkey.url, singleflight_lease_ttl=4, broker_transport_options={"visibility_timeout": 3600})
    return start_shared(settings, app_module=steps_app)


@pytest.fixture
def place(crowd, request):
    request.node.place = crowd
    return crowd


def effects(place, key):
    return [row["name"] for row in place.ledger.read(key, "effect")]


def undone(place, key):
    return [row["name"] for row in place.ledger.read(key, "undo")]


def steps_left(place, key_or_id):
    """The states of the steps that the store keeps of an execution."""
    store = place.store()
    names = list(store.scan_iter(f"*:steps:*:{key_or_id}", count=1000))
    lines = store.hgetall(names[0]) if names else {}
    return {name.decode()[5:]: line.decode().partition("\n")[0] for name, line in lines.items() if name.startswith(b"step:")}


@pytest.mark.parametrize("name", ["three", "three_by_key"])
def test_a_death_after_the_first_of_three_effects_does_not_repeat_it_and_the_rest_is_done(place, key, name):
    result = place.task(name).delay(key, dies_after="one")
    attempt, run_id = result.get(timeout=30)
    assert attempt == 2
    assert effects(place, key) == ["one", "two", "three"]
    assert [row["attempt"] for row in place.ledger.read(key, "effect")] == [1, 2, 2]
    assert [row["run"] for row in place.ledger.read(key, "begin")] == [run_id, run_id], "the run id ties both attempts together"
    assert wait_until(lambda: steps_left(place, result.id if name == "three" else f"three:{key}") == {}, 10)


def test_another_worker_goes_on_with_the_steps_of_a_dead_one(start_place, valkey, key):
    place = start_place(
        redis_settings(valkey.url, singleflight_lease_ttl=2, broker_transport_options={"visibility_timeout": 3600}),
        app_module=steps_app,
        concurrency=1,
    )
    result = place.task("parts").delay(key, 300)
    wait_until(lambda: len(place.ledger.read(key, "part")) >= 100, 20, "a hundred parts")
    first = place.ledger.read(key, "part")[0]["pid"]
    kill_worker(place, first)
    assert result.get(timeout=30) == 2
    times = Counter(row["part"] for row in place.ledger.read(key, "part"))
    assert sorted(times) == list(range(300))
    assert sum(times.values()) <= 301


def test_a_step_in_which_the_process_died_is_done_again_under_the_same_key(place, key):
    result = place.task("three").delay(key, dies_in="two")
    assert result.get(timeout=30)[0] == 2
    assert effects(place, key) == ["one", "two", "two", "three"]
    first, second = (row for row in place.ledger.read(key, "effect") if row["name"] == "two")
    assert first["step"] == second["step"] == f"{result.id}/two", "a provider that knows the key does it once"


def test_under_hold_a_step_in_which_the_process_died_waits_until_it_is_resolved(place, key):
    result = place.task("three_held").delay(key, dies_in="two")
    with pytest.raises(StepUncertain, match=f"step two of execution {result.id} was begun by"):
        result.get(timeout=30)
    assert effects(place, key) == ["one", "two"]
    assert undone(place, key) == [], "it is held, and has not failed"

    name = "protected_app.three_held"
    resolve_step(place.app, name, "two", task_id=result.id, happened=True, result={"key": key, "name": "two"})
    result.forget()
    again = place.task("three_held").apply_async((key,), {"dies_in": "two"}, task_id=result.id)
    assert again.get(timeout=30)[0] == 3
    assert effects(place, key) == ["one", "two", "three"]


def test_under_hold_a_trigger_that_retries_goes_on_once_it_is_resolved(place, key):
    result = place.task("three_held_patiently").delay(key, dies_in="two")
    wait_until(lambda: len(place.ledger.read(key, "begin")) >= 3, 30, "the death, and two looks")
    assert effects(place, key) == ["one", "two"]
    wait_until(lambda: _resolved(place, result.id), 10, "no run is at it")
    assert result.get(timeout=30)[0] >= 3
    assert effects(place, key) == ["one", "two", "two", "three"]


def _resolved(place, task_id):
    resolve_step(place.app, "protected_app.three_held_patiently", "two", task_id=task_id, happened=False)
    return True


def test_a_death_between_two_undos_leaves_the_rest_to_the_next_attempt(place, key):
    arm(place.ledger, key, "two", "die between")
    failing = place.task("three").s(key, then="fail").set(link_error=place.task("note_error").s(f"{key}-error"))
    result = failing.apply_async()
    with pytest.raises(ValueError, match=key):
        result.get(timeout=30)
    wait_until(lambda: place.ledger.read(f"{key}-error"), 10, "its errback ran")
    assert undone(place, key) == ["three", "two", "one"], "once each"
    assert len({row["pid"] for row in place.ledger.read(key, "undo")}) == 2, "in two processes"
    assert len(place.ledger.read(key, "begin")) == 1, "the attempt that goes on undoing does not call the body"
    assert effects(place, key) == ["one", "two", "three"]
    assert steps_left(place, result.id) == {"one": "undone", "two": "undone", "three": "undone"}


def test_an_undo_in_which_the_process_died_is_called_again(place, key):
    arm(place.ledger, key, "two", "die")
    result = place.task("three").delay(key, then="fail")
    with pytest.raises(ValueError, match=key):
        result.get(timeout=30)
    assert undone(place, key) == ["three", "two", "two", "one"]
    assert len(place.ledger.read(key, "begin")) == 1


def test_under_hold_an_undo_in_which_the_process_died_is_left_alone(place, key):
    arm(place.ledger, key, "two", "die")
    result = place.task("three_held").delay(key, then="fail")
    with pytest.raises(ValueError, match=key):
        result.get(timeout=30)
    assert undone(place, key) == ["three", "two", "one"]
    assert steps_left(place, result.id) == {"one": "undone", "two": "undo uncertain", "three": "undone"}


def test_what_an_earlier_attempt_did_is_undone_too(place, key):
    result = place.task("three").delay(key, dies_after="two", then="fail")
    with pytest.raises(ValueError, match=key):
        result.get(timeout=30)
    assert effects(place, key) == ["one", "two", "three"]
    assert undone(place, key) == ["three", "two", "one"]


def test_an_undo_that_raises_does_not_keep_the_others_from_running(place, key):
    arm(place.ledger, key, "two", "no way back")
    result = place.task("three").delay(key, then="fail")
    with pytest.raises(ValueError, match=key):
        result.get(timeout=30)
    assert undone(place, key) == ["three", "two", "one"]
    assert steps_left(place, result.id) == {"one": "undone", "two": "undo failed", "three": "undone"}


@pytest.mark.timeout(240)
def test_a_thousand_parts_are_done_once_each_though_the_process_is_killed_twenty_times(place, key, record_property):
    result = place.task("parts").delay(key, 1000)
    killed: list[int] = []
    while len(killed) < 20:
        enough = 45 * (len(killed) + 1)
        rows = wait_until(
            lambda enough=enough: len(rows := place.ledger.read(key, "part")) >= enough and rows, 30, f"{enough} parts"
        )
        pid = rows[-1]["pid"]
        assert pid not in killed
        kill_child(place, pid)
        killed.append(pid)
    assert result.get(timeout=60) == 21
    rows = place.ledger.read(key, "part")
    times = Counter(row["part"] for row in rows)
    assert sorted(times) == list(range(1000)), "each part is done"
    repeats = sum(times.values()) - 1000
    record_property("repeats", repeats)
    assert repeats <= 20, "at most the one in which it was killed"
    last_of = {row["attempt"]: row["part"] for row in rows}
    again = [part for part, count in times.items() if count > 1]
    assert set(again) <= {last_of[attempt] for attempt in range(1, 21)}, "only parts in which a process died are repeated"
    assert [row["part"] for row in rows] == sorted(row["part"] for row in rows), "in their order"


def test_a_fenced_out_worker_can_neither_move_the_cursor_nor_record_a_step(start_place, valkey, key):
    place = start_place(redis_settings(valkey.url, singleflight_lease_ttl=2), app_module=steps_app, concurrency=1)
    result = place.task("fenced_out").delay(key, key)
    first = wait_until(lambda: place.ledger.read(key, "begin"), 15)[0]
    os.kill(first["pid"], signal.SIGSTOP)
    try:
        second = wait_until(lambda: place.ledger.read(key, "begin")[1:], 20, "another worker has taken over")[0]
        assert (second["attempt"], second["page"]) == (2, "first")
    finally:
        os.kill(first["pid"], signal.SIGCONT)
    refused = wait_until(lambda: len(rows := place.ledger.read(key, "refused")) == 2 and rows, 20, "the first was refused")
    assert [(row["name"], row["attempt"]) for row in refused] == [("page", 1), ("step", 1)]
    assert effects(place, key) == []
    place.ledger.open(f"{key}-2")
    assert result.get(timeout=20) == [2, "page of 2"]
    assert [row["attempt"] for row in place.ledger.read(key, "effect")] == [2]
