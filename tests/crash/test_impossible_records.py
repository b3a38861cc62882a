"""A run record in a state that it cannot be in: nothing goes on from there, nothing is forgotten, and a person is told."""

from __future__ import annotations

import pytest
from celery import states
from nodes import wait_until
from test_lost_processes import begun

from celery_singleflight import ScriptError
from celery_singleflight.keys import LockKey

LOCK_NAME = "protected_app.work"


class Edited:
    """The record of a trigger, as somebody has made it who should not have."""

    def __init__(self, place, task_id, key):
        self._store = place.store()
        keys = place.app.tasks[LOCK_NAME]._binding.coordination.store.keys
        self._name = keys.trigger(LOCK_NAME, task_id)
        self._lease = keys.lock(LockKey.of(LOCK_NAME, [key])).lease

    def put(self, **fields):
        self._store.hset(self._name, mapping=fields)

    def take(self, *fields):
        assert self._store.hdel(self._name, *fields) == len(fields)

    def read(self):
        return self._store.hgetall(self._name)

    def remove(self):
        """What a person does who has looked at it."""
        self._store.delete(self._name, self._lease)


@pytest.mark.parametrize("fields", [{"outcome": "vanished"}, {"owner": "somebody"}], ids=["outcome", "owner"])
def test_a_trigger_whose_record_no_script_has_written_so_goes_back_until_somebody_has_repaired_it(place, key, fields):
    record = Edited(place, key, key)
    record.put(generation=0, **fields)
    before = record.read()
    result = place.task("work").apply_async((key, "value"), task_id=key)
    wait_until(lambda: result.state == states.RETRY, 10, "it went back")
    assert isinstance(result.result, ScriptError)
    assert f"{LOCK_NAME}[{key}] waits" in place.logs()
    assert place.ledger.runs(key) == []
    assert record.read() == before, "nothing is changed"

    record.remove()
    assert result.get(timeout=20) == "value"
    assert len(place.ledger.runs(key)) == 1


def test_an_outcome_that_cannot_be_recorded_is_told_and_its_trigger_goes_back(place, key):
    record = Edited(place, key, key)
    result = place.task("work").apply_async((key, "value", key), task_id=key)
    begun(place, key)
    record.take("until_ms")
    place.ledger.open(key)
    said = f"the outcome 'succeeded' of {LockKey.of(LOCK_NAME, [key])} is not recorded"
    wait_until(lambda: said in place.logs(), 10, "somebody is told")
    assert "running without an end" in place.logs()
    assert result.state != states.SUCCESS, "what is not recorded does not count"
    assert b"outcome" not in record.read()

    record.remove()
    assert result.get(timeout=20) == "value"
    assert len(place.ledger.runs(key)) == 2
