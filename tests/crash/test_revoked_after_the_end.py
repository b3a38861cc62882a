"""A trigger that is revoked while it runs, and ends all the same, has ended: whatever dies before Celery has told it."""

from __future__ import annotations

import pytest
from matrix_place import start_twins
from matrix_twin import Twin
from nodes import wait_until


@pytest.fixture(params=["redis", "rabbitmq"])
def twins(request, start_shared, valkey):
    broker = request.getfixturevalue("rabbitmq") if request.param == "rabbitmq" else None
    with start_twins(start_shared, valkey.url, broker) as place:
        request.node.place = place
        yield place


def test_an_outcome_is_told_though_its_trigger_was_revoked_and_its_process_died_before(twins):
    t = Twin(twins, "protected")
    result = t.die_after_the_end.apply_async((t.key,), link=t.note.si(f"{t.key}-link"))
    t.until_it_runs(result)
    t.revoke(result)
    twins.ledger.open(t.key)
    wait_until(lambda: twins.ledger.read(f"{result.id}-died"), what="its process has died")
    t.until_noted("-link")
    # Not what `result` has heard: Celery 5.6 stores REVOKED at once, and what comes stands over it.
    wait_until(lambda: twins.app.AsyncResult(result.id).state == "SUCCESS", what="its success is told")
    assert twins.app.AsyncResult(result.id).get(timeout=20) == "passed"
    assert t.noted() == 1
