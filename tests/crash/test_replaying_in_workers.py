"""A trigger that is over is replayed in real workers: once, with all that follows it, whoever dies in between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import crash_app
import pytest
from aftermath import due_at, let_patience_end, record_of
from crash_points import arm, deaths
from nodes import SUPPORT, redis_settings, wait_until

from celery_singleflight import Outcome, ReplayRefused, replay

FORMAT = (
    "%(message)s|%(singleflight_execution_key)s|%(singleflight_attempt)s|%(singleflight_run_id)s|%(singleflight_lock_key)s|"
)


@pytest.fixture(scope="module")
def crew(start_shared, valkey):
    more = {"singleflight_log_context": True, "worker_task_log_format": FORMAT}
    return start_shared(redis_settings(valkey.url, **more), workers=1, app_module=crash_app)


@pytest.fixture
def place(crew, request):
    request.node.place = crew
    return crew


def settled(place, task_id):
    wait_until(lambda: record_of(place, task_id).get("settled"), 20, f"{task_id} is settled")
    return record_of(place, task_id)["outcome"]


def again(place, task_id, name="mended", **how):
    return replay(place.app, task_id, task=place.task(name).name, **how)


def result_of(place, task_id):
    """What Celery has of it once it has succeeded; not what a result has heard that knows of a failure."""
    wait_until(lambda: place.app.AsyncResult(task_id).state == "SUCCESS", 20, f"{task_id} has succeeded")
    return place.app.AsyncResult(task_id).result


def failed(place, key, name="mended", **options):
    """The id of a trigger that has failed, of which all is sent. What it failed of is mended then."""
    task_id = place.task(name).apply_async((key,), **options).id
    assert settled(place, task_id) == "failed"
    place.ledger.open(key)
    return task_id


def test_a_failed_trigger_in_a_chain_is_replayed_when_its_cause_is_mended_and_the_rest_of_the_chain_runs(place, key):
    chain = place.task("mended").si(key) | place.task("tail").s(key)
    result = chain.apply_async()
    assert settled(place, result.parent.id) == "failed"
    assert place.ledger.runs(f"{key}-tail") == []
    place.ledger.open(key)

    assert again(place, result.parent.id) is Outcome.FAILED

    assert result_of(place, result.id)[1] == "tail"
    run_id = result_of(place, result.parent.id)
    assert [(row["attempt"], row["forced"]) for row in place.ledger.runs(key)] == [(1, False), (2, False)]
    assert len(place.ledger.runs(f"{key}-tail")) == 1
    wait_until(lambda: place.ledger.read(f"{key}-effect"), what="what the body has published runs")
    (effect,) = place.ledger.read(f"{key}-effect")
    assert effect["cause"] == [result.parent.id, run_id, 2]
    for attempt in (1, 2):
        assert f'mending {key}|{result.parent.id}|{attempt}|{run_id}|protected_app.mended["{key}"]|' in place.logs()


def test_what_has_succeeded_is_refused_and_by_force_runs_once_more(place, key):
    place.ledger.open(key)
    task_id = place.task("mended").delay(key).id
    first = result_of(place, task_id)
    assert settled(place, task_id) == "succeeded"
    with pytest.raises(ReplayRefused, match="it has succeeded, and to run it again needs force and a reason"):
        again(place, task_id)
    assert due_at(place, task_id) is None

    assert again(place, task_id, force=True, reason="the bank lost it") is Outcome.SUCCEEDED

    assert result_of(place, task_id) != first, "another run, whose result takes the place of the first one's"
    assert [row["forced"] for row in place.ledger.runs(key)] == [False, True]
    ((_, reason),) = json.loads(record_of(place, task_id)["forced"])
    assert reason == "the bank lost it"


def test_of_five_replays_at_the_same_time_one_runs(place, key):
    task_id = failed(place, key)
    start, answers = threading.Barrier(5), []

    def try_it():
        start.wait()
        try:
            answers.append(again(place, task_id))
        except ReplayRefused as refused:
            answers.append(refused.why)

    threads = [threading.Thread(target=try_it) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert answers.count(Outcome.FAILED) == 1
    assert set(answers) - {Outcome.FAILED} <= {"waiting", "running", "ending", "succeeded"}
    result_of(place, task_id)
    assert settled(place, task_id) == "succeeded"
    assert len(place.ledger.runs(key)) == 2


@pytest.mark.parametrize("point", ["replay:before-publish", "replay:after-publish"])
def test_whoever_replays_dies_and_the_trigger_runs_once_all_the_same(place, key, point):
    task_id = failed(place, key, task_id=key)
    arm(place.ledger, point, "child", key)
    code = "import sys, crash_app, celery_singleflight as s; s.replay(crash_app.app, sys.argv[1], task='protected_app.mended')"
    names = ("broker_url", "result_backend", "singleflight_url", "singleflight_key_prefix", "task_default_queue")
    config = {name: place.app.conf[name] for name in names} | {"crash_points": True}
    environment = {
        **os.environ,
        "CELERY_TEST_CONFIG": json.dumps(config),
        "TEST_LEDGER": str(place.ledger.directory),
        "PYTHONPATH": str(SUPPORT),
    }
    ran = subprocess.run([sys.executable, "-c", code, key], env=environment, check=False, timeout=30)
    assert (ran.returncode, len(deaths(place.ledger, key))) == (-9, 1)
    if point == "replay:before-publish":
        assert "outcome" not in record_of(place, task_id)
        assert due_at(place, task_id) < 5.1, "it comes up by itself"
        let_patience_end(place, task_id)

    result_of(place, task_id)
    assert settled(place, task_id) == "succeeded"
    assert len(place.ledger.runs(key)) == 2


def test_a_replay_whose_execution_another_trigger_has_completed_is_answered_with_that_result(place, key):
    task_id = failed(place, key, "mended_by_key")
    other = place.task("mended_by_key").delay(key)
    result = result_of(place, other.id)

    assert again(place, task_id, "mended_by_key") is Outcome.FAILED

    assert result_of(place, task_id) == result
    assert len(place.ledger.runs(key)) == 2
