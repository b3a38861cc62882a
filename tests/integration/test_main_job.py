"""The main job on two real workers of two processes each, Redis as broker, result backend and store."""

from __future__ import annotations

from itertools import pairwise

import pytest
from celery import Celery
from nodes import redis_settings, wait_until

from celery_singleflight import Contended, Skipped, WaitTimeout


def grows(numbers):
    return all(earlier < later for earlier, later in pairwise(numbers))


def test_sixty_triggers_over_six_keys_all_run_and_none_overlap(place, key):
    keys = [f"{key}-{n}" for n in range(6)]
    results = [place.task("work").delay(keys[n % 6], n, seconds=0.1) for n in range(60)]

    assert [result.get(timeout=60) for result in results] == list(range(60))

    for one in keys:
        assert len(place.ledger.runs(one)) == 10
        assert place.ledger.overlaps(one) == 0
        assert grows(place.ledger.tokens(one)), place.ledger.tokens(one)


def test_a_plain_counter_loses_no_increment(place, key):
    results = [place.task("count_up").delay(key) for _ in range(30)]
    for result in results:
        result.get(timeout=60)
    assert place.ledger.counter(key) == 30


def test_a_body_longer_than_its_lease_is_not_overlapped(start_place, valkey, key):
    place = start_place(redis_settings(valkey.url, singleflight_lease_ttl=2), workers=1)
    first = place.task("work").delay(key, 1, seconds=5)
    wait_until(lambda: place.ledger.runs(key), what="the first body has begun")
    second = place.task("work").apply_async((key, 2), countdown=2.6)
    assert (first.get(timeout=20), second.get(timeout=20)) == (1, 2)
    assert len(place.ledger.runs(key)) == 2
    assert place.ledger.overlaps(key) == 0
    assert grows(place.ledger.tokens(key))


def test_two_hold_a_key_of_limit_two_and_no_third(place, key):
    results = [place.task("limited").delay(key, seconds=0.2) for _ in range(8)]
    for result in results:
        result.get(timeout=60)
    assert place.ledger.most_at_once(key) == 2


@pytest.mark.parametrize("outcome", ["paid", None, 0, "", False, [1, {"a": None}]])
def test_the_same_execution_key_gives_one_effect_and_the_same_result(place, key, outcome):
    pay = place.task("pay")
    first = pay.delay(key, outcome)
    assert first.get(timeout=20) == outcome
    second = pay.delay(key, "something else")
    assert second.get(timeout=20) == outcome
    assert type(second.get()) is type(outcome)
    assert len(place.ledger.runs(key)) == 1


def test_a_failed_execution_may_be_run_again_by_another_trigger(place, key):
    pay = place.task("pay")
    with pytest.raises(ValueError, match="42"):
        pay.delay(key, "fail").get(timeout=20)
    assert pay.delay(key, "paid").get(timeout=20) == "paid"
    assert len(place.ledger.runs(key)) == 2


def test_an_execution_key_given_per_call_is_recognised_under_another_lock_key(place, key):
    work = place.task("work")
    first = work.apply_async((key, 1), execution_key=f"once-{key}")
    assert first.get(timeout=20) == 1
    second = work.apply_async((f"{key}-other", 2), execution_key=f"once-{key}")
    assert second.get(timeout=20) == 1
    assert len(place.ledger.runs(key)) == 1
    assert place.ledger.runs(f"{key}-other") == []


def test_contended_under_skip_gives_the_skip_result_and_names_the_holder(place, key):
    holder = place.task("work").delay(key, gate=key)
    wait_until(lambda: place.ledger.runs(key))
    assert place.task("skip").delay(key, "ran").get(timeout=20) == "skipped"
    with pytest.raises(Skipped) as skipped:
        place.task("skip_raise").delay(key).get(timeout=20)
    assert skipped.value.task_id == holder.id
    assert skipped.value.lock_key == f'protected_app.work["{key}"]'
    place.ledger.open(key)
    holder.get(timeout=20)
    assert place.task("skip").delay(key, "ran").get(timeout=20) == "ran"


def test_contended_under_reject_fails_and_the_errback_runs(place, key):
    holder = place.task("work").delay(key, gate=key)
    wait_until(lambda: place.ledger.runs(key))
    errback = place.task("note_error").s(f"{key}-error")
    rejected = place.task("reject").apply_async((key,), link_error=errback)
    with pytest.raises(Contended) as contended:
        rejected.get(timeout=20)
    assert contended.value.task_id == holder.id
    wait_until(lambda: place.ledger.read(f"{key}-error"), what="the errback has run")
    place.ledger.open(key)
    holder.get(timeout=20)
    assert len(place.ledger.runs(key)) == 1


def test_a_policy_given_per_call_counts(place, key):
    holder = place.task("work").delay(key, gate=key)
    wait_until(lambda: place.ledger.runs(key))
    skipped = place.task("work").apply_async((key, "ran"), contention_policy="skip")
    assert skipped.get(timeout=20) is None
    by_name = place.app.send_task("protected_app.work", (key, "ran"), contention_policy="skip")
    assert by_name.get(timeout=20) is None
    by_set = place.task("work").s(key, "ran").set(contention_policy="skip").delay()
    assert by_set.get(timeout=20) is None
    place.ledger.open(key)
    holder.get(timeout=20)
    assert len(place.ledger.runs(key)) == 1


def test_the_end_of_wait_timeout_fails_the_trigger(place, key):
    holder = place.task("work").delay(key, gate=key)
    wait_until(lambda: place.ledger.runs(key))
    waiting = place.task("work").apply_async((key,), wait_timeout=1.0)
    with pytest.raises(WaitTimeout) as timed_out:
        waiting.get(timeout=20)
    assert timed_out.value.task_id == holder.id
    place.ledger.open(key)
    holder.get(timeout=20)
    assert len(place.ledger.runs(key)) == 1


def test_waiting_shows_as_retry_and_uses_no_retry(place, key):
    holder = place.task("work").delay(key, gate=key)
    wait_until(lambda: place.ledger.runs(key))
    waiting = place.task("retry_itself").s(key, "v").set(contention_policy="requeue")
    shared = place.task("work").apply_async((key, "second"))
    wait_until(lambda: shared.state == "RETRY", what="waiting is visible")
    assert isinstance(shared.result, Contended)
    place.ledger.open(key)
    assert (holder.get(timeout=20), shared.get(timeout=20)) == (None, "second")
    assert waiting.delay().get(timeout=20) == ["v", 1]


@pytest.mark.parametrize("how", ["plain", "arguments"])
def test_a_retry_under_the_lock_succeeds_on_its_second_attempt(place, key, how):
    value, retries = place.task("retry_itself").delay(key, "first", how).get(timeout=20)
    assert retries == 1
    assert value == ("first" if how == "plain" else "changed")
    assert len(place.ledger.runs(key)) == 2
    assert place.ledger.overlaps(key) == 0


def test_autoretry_under_the_lock_succeeds_on_its_second_attempt(place, key):
    assert place.task("retry_by_itself").delay(key).get(timeout=20) == 1
    assert len(place.ledger.runs(key)) == 2


def test_a_narrow_critical_section_shares_the_key_of_a_task(place, key):
    inside = place.task("critical_section").delay(key, gate=key)
    wait_until(lambda: place.ledger.runs(key))
    work = place.task("work").delay(key, "after")
    wait_until(lambda: work.state == "RETRY", what="the task waits for the critical section")
    place.ledger.open(key)
    inside.get(timeout=20)
    assert work.get(timeout=20) == "after"
    assert place.ledger.overlaps(key) == 0


def test_a_trigger_by_name_only_is_excluded_too(place, key):
    holder = place.task("work").delay(key, gate=key)
    wait_until(lambda: place.ledger.runs(key))
    stranger = Celery("stranger", broker=place.app.conf.broker_url, backend=place.app.conf.result_backend, set_as_current=False)
    waiting = stranger.send_task("protected_app.work", (key, "stranger"), queue=place.app.conf.task_default_queue)
    wait_until(lambda: waiting.state == "RETRY", what="a trigger without a stamped key waits")
    place.ledger.open(key)
    holder.get(timeout=20)
    assert waiting.get(timeout=20) == "stranger"
    assert place.ledger.overlaps(key) == 0
