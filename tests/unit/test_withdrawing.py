"""What waits in the store and is revoked: the sweeper of every worker withdraws it, and the next one comes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery.worker import state

from celery_singleflight.sweeper import Sweeper, SweeperStep


@pytest.fixture
def revoke():
    """Revoke an id, as a worker that is told to does."""
    before = set(state.revoked.as_dict())
    yield state.revoked.add
    for task_id in set(state.revoked.as_dict()) - before:
        state.revoked.discard(task_id)


def test_when_a_called_one_is_revoked_the_next_is_called_at_once(place, revoke):
    ran = []

    def charge(number):
        ran.append(number)

    task = place.task(charge, lock_on=(), lock_name="charge", contention_policy="queue")
    with place.held_elsewhere("charge") as give_back:
        first, _ = task.delay(1), task.delay(2)
        place.deliver_all()
        give_back()
        (called,) = place.messages()
        assert called.headers["id"] == first.id
        revoke(first.id)

        Sweeper(place.app).look()

        ids = {message.headers["id"]: message for message in place.messages()}
        assert len(ids) == 2, "the revoked one once more, and the next"
        for message in ids.values():
            place.deliver(message)
    assert ran == [2]
    assert first.state == "REVOKED"


def test_a_worker_that_goes_withdraws_what_it_was_told_to_revoke_since_its_last_look(place, revoke, monkeypatch):
    ran = []

    def charge(number):
        ran.append(number)

    task = place.task(charge, lock_on=(), lock_name="charge", contention_policy="queue")
    step = SweeperStep(SimpleNamespace(app=place.app))
    monkeypatch.setattr(state, "should_stop", 0)
    with place.held_elsewhere("charge"):
        result = task.delay(1)
        place.deliver_all()
        revoke(result.id)
        step.stop(step)
        state.revoked.discard(result.id)  # as a worker that starts anew
    place.deliver_all()
    assert ran == []
    assert place.store.parked(result.id, ["charge"]) == []


def test_one_that_cannot_be_withdrawn_does_not_keep_the_others(place, revoke, caplog):
    def charge(number):
        return number

    task = place.task(charge, lock_on=(), lock_name="charge", contention_policy="queue")
    with place.held_elsewhere("charge"):
        results = [task.delay(number) for number in range(3)]
        place.deliver_all()
        broken = results[1]
        place.client.hset(place.store.keys.trigger("charge", broken.id), "owner", "somebody")
        for result in results:
            revoke(result.id)
        Sweeper(place.app).look()
        assert [result for result in results if place.store.parked(result.id, ["charge"])] == [broken]
    assert f"{broken.id} of charge cannot be revoked" in caplog.text
    assert "running without an end" in caplog.text
