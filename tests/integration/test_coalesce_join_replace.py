"""Triggers that share a run, and triggers that take the place of one: `coalesce`, `join` and `replace`."""

from __future__ import annotations

import time

import pytest
import waiting_app
from aftermath import record_of
from celery import chain, chord
from celery.exceptions import ChordError, TaskRevokedError, TimeLimitExceeded
from nodes import wait_until
from waiting_room import get_all, held, line, park, park_all, parked, settings_apart, values

from celery_singleflight import Contended, WaitTimeout


@pytest.fixture(scope="module")
def crew(start_shared, valkey):
    """Two workers of three processes; a holder of any policy hears within a second that it is to stop."""
    return start_shared(settings_apart(valkey.url, singleflight_lease_ttl=3), concurrency=3, app_module=waiting_app)


@pytest.fixture
def place(crew, request):
    request.node.place = crew
    return crew


def begun(place, key, count=1):
    return wait_until(lambda: len(rows := place.ledger.runs(key)) >= count and rows, 20, f"{count} runs of {key} began")


def outcomes(place, results):
    """How the store says that each of them has ended."""
    wait_until(lambda: all(record_of(place, result.id).get("settled") for result in results), 15, "all are settled")
    return [record_of(place, result.id)["outcome"] for result in results]


def start_holder(place, task, key, *args, **kwargs):
    """Start a trigger of this task whose body waits at the gate that is named like the key."""
    result = place.task(task).delay(key, *args, gate=key, **kwargs)
    begun(place, key)
    return result


# coalesce


def test_two_hundred_triggers_during_a_run_are_one_run_with_the_newest_arguments(place, key):
    holder = start_holder(place, "newest", key, "holder")
    waiting = [place.task("newest").delay(key, value) for value in range(199)]
    wait_until(lambda: len(parked(place, key)) == 199, 30, "all of them wait")
    waiting.append(park(place, key, place.task("newest").s(key, "newest")))
    assert line(place, key) == [waiting[-1].id]
    place.ledger.open(key)
    assert holder.get(timeout=20) == "holder"
    assert set(get_all(waiting)) == {"newest"}
    assert values(place, key) == ["holder", "newest"]
    assert place.ledger.overlaps(key) == 0
    assert parked(place, key) == set()
    assert outcomes(place, waiting[-2:]) == ["coalesced", "succeeded"]


def test_a_trigger_that_arrives_while_the_follow_up_runs_gets_a_run_of_its_own(place, key):
    holder = start_holder(place, "newest", key, "holder")
    second = park(place, key, place.task("newest").s(key, "second", f"{key}-second"))
    place.ledger.open(key)
    begun(place, key, 2)
    third = park(place, key, place.task("newest").s(key, "third"))
    place.ledger.open(f"{key}-second")
    assert get_all([holder, second, third]) == ["holder", "second", "third"]
    assert values(place, key) == ["holder", "second", "third"]


def test_the_first_arguments_are_kept_where_that_is_asked_for(place, key):
    holder = start_holder(place, "first", key, "holder")
    waiting = park_all(place, key, [place.task("first").s(key, value) for value in range(10)])
    place.ledger.open(key)
    assert [holder.get(timeout=20), *get_all(waiting)] == ["holder", *[0] * 10]
    assert values(place, key) == ["holder", 0]


def test_arguments_are_merged_by_a_function(place, key):
    holder = start_holder(place, "merged", key, 0)
    waiting = [place.task("merged").delay(key, 10**n) for n in range(8)]
    wait_until(lambda: len(parked(place, key)) == 8, 20, "all of them wait")
    place.ledger.open(key)
    assert holder.get(timeout=20) == 0
    assert get_all(waiting) == [11_111_111] * 8
    assert values(place, key) == [0, 11_111_111]


def test_what_cannot_be_merged_waits_by_itself_and_nothing_is_lost(place, key):
    holder = start_holder(place, "merged", key, 0)
    waiting = park_all(place, key, [place.task("merged").s(key, value) for value in (1, "bad", 10, 100)])
    assert line(place, key) == [waiting[3].id, waiting[1].id]
    assert "is not merged with what waits" in place.logs()
    place.ledger.open(key)
    assert holder.get(timeout=20) == 0
    assert get_all(waiting) == [111, "bad", 111, 111]
    assert values(place, key) == [0, 111, "bad"]


def test_when_the_newest_is_revoked_what_was_merged_before_it_is_not_lost(place, key):
    holder = start_holder(place, "merged", key, 0)
    waiting = park_all(place, key, [place.task("merged").s(key, 10**n) for n in range(4)])
    waiting[-1].revoke()
    wait_until(lambda: line(place, key) == [waiting[2].id], 20, "the one before takes its place")
    place.ledger.open(key)
    assert holder.get(timeout=20) == 0
    assert get_all(waiting[:-1]) == [111] * 3
    assert values(place, key) == [0, 111]


def test_tasks_that_share_a_lock_key_are_not_coalesced_with_each_other(place, key):
    holder = start_holder(place, "line", key, 0)
    calls = [("line", 1), ("retry_in_line", 2), ("line", 3), ("retry_in_line", 4)]
    waiting = park_all(place, key, [place.task(name).s(key, value).set(contention_policy="coalesce") for name, value in calls])
    place.ledger.open(key)
    assert holder.get(timeout=20) == 0
    assert get_all(waiting) == [3, 2, 3, 4]
    assert set(values(place, key)) == {0, 2, 3, 4}


def test_a_failed_follow_up_fails_all_that_were_coalesced_into_it(place, key):
    with held(place, key, "protected_app.merged"):
        waiting = park_all(place, key, [place.task("merged").s(key, [value]) for value in (1, 2)])
        doomed = park(place, key, place.task("merged").s(key, [3], f"never-{key}"), time_limit=1)
        waiting.append(doomed)
    for result in waiting:
        with pytest.raises(TimeLimitExceeded):
            result.get(timeout=30)
    assert values(place, key) == [[1, 2, 3]]
    assert outcomes(place, waiting) == ["coalesced", "coalesced", "failed"]


def test_a_delay_waits_for_the_last_of_a_burst(place, key):
    results = []
    for value in range(20):
        results.append(park(place, key, place.task("debounced").s(key, value)))
        last_at = time.monotonic()
    assert not place.ledger.runs(key)
    assert get_all(results) == [19] * 20
    assert values(place, key) == [19]
    assert place.ledger.runs(key)[0]["at"] - last_at > 0.9


def test_a_burst_without_an_end_is_held_back_no_longer_than_the_bound(place, key):
    first_at, results = time.monotonic(), []
    while not place.ledger.runs(key):
        assert time.monotonic() < first_at + 15, "nothing runs while triggers keep coming"
        results.append(place.task("debounced").delay(key, len(results)))
        last = results[-1].id
        wait_until(lambda last=last: last in parked(place, key) or place.ledger.runs(key), 10, "it has arrived")
    assert place.ledger.runs(key)[0]["at"] - first_at >= 1.9
    found = get_all(results)
    assert len(set(found)) <= 2, "one run for the burst, and one for what came after"
    assert len(place.ledger.runs(key)) == len(set(found))


def test_a_delay_may_be_given_per_call(place, key):
    published_at = time.monotonic()
    results = [
        park(place, key, place.task("newest").s(key, value), contention_policy="coalesce", coalesce_delay=0.7)
        for value in range(3)
    ]
    assert get_all(results) == [2, 2, 2]
    assert place.ledger.runs(key)[0]["at"] - published_at >= 0.7


# join


def test_fifty_of_a_chord_with_one_payload_are_one_run_with_fifty_equal_results(place, key):
    task = place.task("joined")
    result = chord([task.si(key, "payload", key) for _ in range(50)])(place.task("identity").s())
    wait_until(lambda: len(parked(place, key)) == 49, 30, "all but one wait for its outcome")
    assert line(place, key) == []
    place.ledger.open(key)
    opened_at = time.monotonic()
    assert result.get(timeout=30) == [["payload", 1]] * 50
    assert time.monotonic() - opened_at < 4, "who is answered calls the next, and nobody waits for a sweeper"
    assert len(place.ledger.runs(key)) == 1
    assert parked(place, key) == set()


def test_one_payload_may_be_spelled_in_several_ways(place, key):
    task = place.task("joined")
    leader = start_holder(place, "joined", key, "payload")
    spelled = [task.s(key, "payload", key), task.s(key=key, gate=key, payload="payload"), task.s(key, "payload", key, 0)]
    joined = park_all(place, key, spelled)
    assert line(place, key) == []
    place.ledger.open(key)
    assert get_all([leader, *joined]) == [["payload", 1]] * 4


def test_those_who_joined_a_run_that_retries_get_its_last_outcome(place, key):
    task = place.task("joined_retry")
    leader = start_holder(place, "joined_retry", key, "payload", failures=1)
    joined = park_all(place, key, [task.s(key, "payload", gate=key, failures=1) for _ in range(5)])
    place.ledger.open(key)
    assert get_all([leader, *joined]) == [["payload", 2]] * 6
    assert len(place.ledger.runs(key)) == 2, "exactly one more"


def test_when_the_leader_fails_for_good_the_next_becomes_the_runner(place, key):
    leader = start_holder(place, "joined", key, "payload", failures=1)
    joined = park_all(place, key, [place.task("joined").s(key, "payload", gate=key, failures=1) for _ in range(5)])
    place.ledger.open(key)
    with pytest.raises(OSError, match="run 1"):
        leader.get(timeout=20)
    assert get_all(joined) == [["payload", 2]] * 5
    assert len(place.ledger.runs(key)) == 2
    assert place.ledger.overlaps(key) == 0


def test_another_payload_waits_in_line_and_is_joined_there(place, key):
    task = place.task("joined")
    leader = start_holder(place, "joined", key, "first")
    others = park_all(place, key, [task.s(key, payload) for payload in ("second", "second", "third", "second")])
    assert line(place, key) == [others[0].id, others[2].id]
    place.ledger.open(key)
    assert leader.get(timeout=20) == ["first", 1]
    assert get_all(others) == [["second", 2], ["second", 2], ["third", 3], ["second", 2]]
    assert place.ledger.overlaps(key) == 0


def test_a_waiting_leader_that_is_revoked_leaves_the_run_to_the_next(place, key):
    holder = start_holder(place, "newest", key, "holder")
    first, second, leader = park_all(place, key, [place.task("newest").s(key, value) for value in (1, 2, 3)])
    leader.revoke()
    wait_until(lambda: leader.id not in parked(place, key), 10, "a sweeper has withdrawn it")
    place.ledger.open(key)
    assert holder.get(timeout=20) == "holder"
    assert get_all([first, second]) == [2, 2]
    with pytest.raises(TaskRevokedError):
        leader.get(timeout=20)
    assert values(place, key) == ["holder", 2]


def test_who_has_joined_may_be_revoked_and_may_wait_no_longer(place, key):
    task = place.task("joined")
    leader = start_holder(place, "joined", key, "payload")
    impatient = park(place, key, task.s(key, "payload", key), wait_timeout=1.0)
    revoked, patient = park_all(place, key, [task.s(key, "payload", key)] * 2)
    revoked.revoke()
    with pytest.raises(WaitTimeout):
        impatient.get(timeout=20)
    with pytest.raises(TaskRevokedError):
        revoked.get(timeout=20)
    place.ledger.open(key)
    assert get_all([leader, patient]) == [["payload", 1]] * 2
    assert len(place.ledger.runs(key)) == 1
    assert outcomes(place, [impatient, revoked, patient]) == ["timed out waiting", "revoked", "succeeded"]


# replace


def assert_revoked(result, match):
    with pytest.raises(TaskRevokedError, match=match):
        result.get(timeout=20)
    assert result.state == "REVOKED"


def assert_fails(counted):
    """The body of a chord fails because of a member that was replaced."""
    wait_until(counted.ready, 20, "the chord has ended")
    assert counted.state == "FAILURE"
    assert isinstance(counted.result, ChordError)
    assert "is replaced by" in str(counted.result)


def test_ten_times_in_a_row_the_newest_replaces_the_one_before(place, key):
    task, note = place.task("replaceable"), place.task("note")
    chains = []
    for value in range(4):  # each is replaced while it runs
        chains.append(chain(task.si(key, value, f"never-{key}"), note.si(f"{key}-{value}")).delay())
        begun(place, key, value + 1)
    for value in range(4, 11):  # most of them while they wait
        gate = key if value == 10 else f"never-{key}"  # one that has not heard yet that it is replaced must not end by itself
        chains.append(chain(task.si(key, value, gate), note.si(f"{key}-{value}")).delay())
        head = chains[-1].parent.id
        wait_until(lambda head=head: head in parked(place, key) or place.app.AsyncResult(head).state != "PENDING", 15)
    place.ledger.open(key)
    chains[-1].get(timeout=20)
    assert chains[-1].parent.get(timeout=10) == 10
    ids = [result.parent.id for result in chains]
    for value, result in enumerate(chains[:-1]):
        replaced_by = "|".join(ids[value + 1 :])
        assert_revoked(result.parent, f"is replaced by ({replaced_by})")
        assert_revoked(result, "is replaced by")
        assert not place.ledger.read(f"{key}-{value}"), "what would have followed does not"
    assert len(place.ledger.read(f"{key}-10")) == 1
    assert values(place, key)[:4] == [0, 1, 2, 3]
    assert values(place, key)[-1] == 10
    assert place.ledger.overlaps(key) == 0
    assert outcomes(place, [result.parent for result in chains]) == ["replaced"] * 10 + ["succeeded"]


def test_a_chord_with_a_replaced_member_ends_in_an_error(place, key):
    task = place.task("replaceable")
    counted = chord([place.task("identity").si(1), task.si(key, "first", f"never-{key}")])(place.task("total").s())
    begun(place, key)
    newcomer = task.delay(key, "second")
    assert_fails(counted)
    assert newcomer.get(timeout=10) == "second"


def test_a_chord_with_a_member_that_is_replaced_in_line_ends_in_an_error(place, key):
    task = place.task("replaceable")
    with held(place, key, "protected_app.replaceable"):
        counted = chord([place.task("identity").si(1), task.si(key, "first")])(place.task("total").s())
        wait_until(lambda: len(parked(place, key)) == 1, 15, "the member waits")
        newcomer = park(place, key, task.s(key, "second"))
        assert_fails(counted)
        assert line(place, key) == [newcomer.id]
    assert newcomer.get(timeout=10) == "second"
    assert values(place, key) == ["second"]


def test_a_body_that_swallows_it_has_its_result_and_the_newcomer_runs_next(place, key):
    holder = start_holder(place, "replaceable", key, "holder", swallows=True)
    newcomer = place.task("replaceable").delay(key, "newcomer")
    assert get_all([holder, newcomer]) == ["swallowed", "newcomer"]
    assert place.ledger.read(key, "replaced")[0]["by"] == newcomer.id
    assert values(place, key) == ["holder", "newcomer"]
    assert place.ledger.overlaps(key) == 0


# per call


def test_a_policy_of_those_that_park_may_be_given_per_call(place, key):
    """For a task whose own policy is `requeue`."""

    def call(key, value, policy, **options):
        return park(place, key, place.task("work").s(key, value), contention_policy=policy, **options)

    keys = {policy: f"{key}-{policy}" for policy in ("queue", "coalesce", "join")}
    holders = {policy: start_holder(place, "work", each, "holder") for policy, each in keys.items()}
    results = {policy: [call(each, value, policy) for value in (1, 1, 2)] for policy, each in keys.items()}
    for each in keys.values():
        place.ledger.open(each)
    assert get_all(list(holders.values())) == ["holder"] * 3
    assert {policy: get_all(answers) for policy, answers in results.items()} == {
        "queue": [1, 1, 2],
        "coalesce": [2, 2, 2],
        "join": [1, 1, 2],
    }
    assert [len(place.ledger.runs(each)) for each in keys.values()] == [4, 2, 3]


def test_replace_may_be_given_per_call(place, key):
    holder = place.task("work").delay(key, "holder", f"never-{key}")
    begun(place, key)
    newcomer = place.task("work").apply_async((key, "newcomer"), contention_policy="replace")
    assert newcomer.get(timeout=20) == "newcomer"
    assert_revoked(holder, "is replaced by")


@pytest.mark.parametrize("task", ["line", "newest", "joined", "replaceable"])
def test_a_task_that_parks_may_be_called_under_another_policy(place, key, task):
    name = "protected_app.work" if task == "line" else f"protected_app.{task}"
    with held(place, key, name):
        rejected = place.task(task).apply_async((key, 1), contention_policy="reject")
        with pytest.raises(Contended):
            rejected.get(timeout=15)
        assert parked(place, key) == set()
    assert not place.ledger.runs(key)
