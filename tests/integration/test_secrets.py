"""Nothing of arguments and results gets into what the package logs, signals and shows, whatever becomes of a trigger."""

from __future__ import annotations

import pytest
import secrets_app
from celery.exceptions import TaskRevokedError
from nodes import redis_settings, wait_until
from redis import Redis
from secrets_app import POLICIES, SECRET

from celery_singleflight import Contended, DeadLettered, LockKeyError, resolve
from celery_singleflight.inspection import inspecting


@pytest.fixture(scope="module")
def crew(start_shared, valkey):
    return start_shared(redis_settings(valkey.url, singleflight_lease_ttl=1), app_module=secrets_app, concurrency=3)


@pytest.fixture
def place(crew, request):
    """Two workers; what they log and signal is looked through after each test."""
    request.node.place = crew
    yield crew
    told = ours(crew)
    assert told
    assert SECRET not in told
    assert SECRET not in str(crew.ledger.read("signals"))


def ours(place):
    """What the package has logged at INFO and above."""
    return (place.ledger.directory / "ours.log").read_text(encoding="utf-8")


def says(place, *texts):
    wait_until(lambda: all(text in ours(place) for text in texts), 20, f"the log says {texts}")


def begun(place, gate):
    return wait_until(lambda: place.ledger.read(gate, "begin"), 20, f"the run of {gate} began")[0]


def shown(place, *keys):
    """What an operator is shown."""
    with inspecting(place.app) as inspection:
        return repr([inspection.locks(limit=100), *(inspection.explain(key, limit=100) for key in keys)])


def in_the_backend(place, *results):
    backend = Redis.from_url(place.app.conf.result_backend)
    return [backend.get(f"celery-task-meta-{result.id}").decode() for result in results]


@pytest.mark.parametrize("policy", POLICIES)
def test_contention_shows_a_digest_of_the_arguments(place, key, policy):
    task = place.task(f"hold_{policy}")
    holder = task.delay(SECRET, key)
    begun(place, key)
    other = task.delay(SECRET, key)
    lock_key = task._binding.lock_key(task.name, (SECRET, key), {}).text
    assert lock_key.startswith(f"{task.name}(")
    if policy in ("skip", "reject"):
        says(place, f"{task.name}[{other.id}] does not run")
    else:
        says(place, f"{task.name}[{other.id}] waits: {lock_key} is held by {holder.id}")
        wait_until(lambda: other.state == "RETRY", 10, "it shows as waiting")
        assert SECRET not in in_the_backend(place, other)[0]
    assert SECRET not in shown(place, holder.id, lock_key)
    if policy == "replace":
        with pytest.raises(TaskRevokedError):
            holder.get(timeout=20)
        place.ledger.open(key)
    else:
        place.ledger.open(key)
        assert holder.get(timeout=20) == SECRET
    if policy == "reject":
        with pytest.raises(Contended):
            other.get(timeout=20)
    else:
        assert other.get(timeout=20) == (None if policy == "skip" else SECRET)
    assert SECRET not in shown(place, holder.id, lock_key)


def test_a_merge_that_fails_is_told_without_what_was_to_be_merged(place, key):
    results = [place.task("merge").delay(SECRET, key)]
    begun(place, key)
    for _ in range(2):
        results.append(place.task("merge").delay(SECRET, key))
        says(place, f"[{results[-1].id}] waits")
    says(place, "is not merged with what waits, and waits by itself: ValueError at secrets_app.py:")
    place.ledger.open(key)
    assert [result.get(timeout=20) for result in results] == [SECRET] * 3


def test_retries_and_failures_are_told_by_their_type(place):
    assert place.task("retry").delay(SECRET).get(timeout=20) == SECRET
    failed = place.task("fail").delay(SECRET)
    with pytest.raises(ValueError, match=SECRET):
        failed.get(timeout=20)
    says(place, "is not undone, secrets_app:undo raised: ValueError at secrets_app.py:")
    wait_until(lambda: "ValueError(…)" in shown(place, failed.id), 10)
    assert SECRET not in shown(place, failed.id)
    assert any("ValueError(…)" in row["facts"] for row in place.ledger.read("signals", "trigger_ended"))


def test_a_key_that_cannot_be_made_is_told_without_the_arguments(place):
    with pytest.raises(LockKeyError) as caught:
        place.task("no_key").delay(SECRET).get(timeout=20)
    assert "the function failed, so the task does not run: LookupError at secrets_app.py:" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_what_is_too_large_or_does_not_serialise_is_told_by_its_type_and_size(place):
    assert place.task("large").delay(SECRET).get(timeout=20) == SECRET * 1000
    with pytest.raises(Exception, match="serializable"):
        place.task("odd").delay(SECRET).get(timeout=20)
    says(
        place,
        "has succeeded, but its result is not stored: its stored form has 16002 bytes, result_limit is 1000",
        "has succeeded, but its result is not stored: dict does not serialise as json: ",
    )
    parts, refusal = place.task("steps").delay(SECRET).get(timeout=20)
    assert parts == [SECRET, SECRET]
    assert refusal == "cursor page: its stored form has 16002 bytes, result_limit is 1000"


def test_a_dead_letter_is_told_without_its_message(place):
    result = place.task("die").delay(SECRET)
    with pytest.raises(DeadLettered):
        result.get(timeout=30)
    says(place, f"{result.id}] does not run, dead-lettered")
    assert SECRET not in shown(place, result.id)


def test_a_reconciler_that_fails_is_told_without_what_it_was_asked_of(place):
    task = place.task("unsure")
    result = task.delay(SECRET)
    says(place, f"the reconciler of {task.name} has failed for {result.id}: LookupError at secrets_app.py:")
    assert SECRET not in shown(place, result.id)
    resolve(place.app, task.name, "succeeded", task_id=result.id, result=SECRET)
    assert result.get(timeout=20) == SECRET


def test_a_rescue_is_told_without_the_message_it_publishes(place, key):
    task = place.task("hold_requeue")
    result = task.delay(SECRET, key)
    pid = begun(place, key)["pid"]
    worker = next(worker for worker in place.workers if pid in worker.container.children())
    worker.kill()
    says(place, f"{result.id} of {task.name} was left by a run that died: published again")
    place.ledger.open(key)
    assert result.get(timeout=30) == SECRET
