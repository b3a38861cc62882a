"""One tenant never gets the result of another: keys have a scope, payloads are compared, and odd keys are just texts."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from celery import states

from celery_singleflight import Contended, PayloadMismatch
from celery_singleflight.keys import LockKey

#: Globs, hash tags, our own separators, look-alikes, and what is too long for a name in the store.
ODD_KEYS = ["*", "?", "[a-z]", "a", "{", "{sf1}", ":", "%3A", "a:b", "a\nb", "a\r\nb", "[]", '["a"]', "\u0430", "\uff41"]
ODD_KEYS += ["\u00e9", "e\u0301", "x" * 10_000, "x" * 10_001, "x" * 199, "x" * 200, " a", "a "]


@pytest.fixture
def runs():
    return []


@pytest.fixture
def read(place, runs):
    """A task whose result is what its tenant owns."""

    def read(tenant, order="1"):
        runs.append(tenant)
        return f"the data of {tenant}"

    return place.task(read, lock_on=("tenant",))


def eagerly(place, task, tenant, key):
    return task.apply((tenant,), execution_key=key, throw=True).get()


def by_message(place, task, tenant, key):
    result = task.apply_async((tenant,), execution_key=key)
    place.deliver_all()
    return result.get(timeout=1)


CALLS = pytest.mark.parametrize("call", [eagerly, by_message])


@CALLS
def test_an_execution_key_of_another_lock_name_is_another_execution(place, read, runs, call):
    other = place.task(read.__wrapped__, name="shop.other", lock_on=("tenant",))
    assert call(place, read, "ann", "report") == "the data of ann"
    assert call(place, other, "bob", "report") == "the data of bob"
    assert call(place, read, "ann", "report") == "the data of ann"
    assert runs == ["ann", "bob"]


@CALLS
def test_an_execution_key_with_another_payload_is_an_error_and_no_hit(place, read, runs, call):
    assert call(place, read, "ann", "report") == "the data of ann"
    with pytest.raises(PayloadMismatch) as caught:
        call(place, read, "bob", "report")
    assert "the data of" not in str(caught.value)
    assert runs == ["ann"]


def test_a_direct_call_with_another_payload_is_an_error_too(place, read, runs):
    task = place.task(read.__wrapped__, name="shop.direct", lock_on=("tenant",), idempotent_on="report of order {order}")
    assert task("ann") == "the data of ann"
    with pytest.raises(PayloadMismatch):
        task("bob")
    assert runs == ["ann"]


def test_another_payload_is_an_error_also_while_the_first_runs(place, runs):
    refused = []

    def read(self, tenant):
        runs.append(tenant)
        if tenant == "ann":
            result = self.apply_async(("bob",), execution_key="report")
            for message in place.messages():
                place.deliver(message)
            refused.append(result)
        return f"the data of {tenant}"

    task = place.task(read, bind=True, lock_on=("tenant",))
    assert by_message(place, task, "ann", "report") == "the data of ann"
    assert [(result.state, type(result.result)) for result in refused] == [(states.FAILURE, PayloadMismatch)]
    assert runs == ["ann"]


def test_each_odd_execution_key_is_an_execution_of_its_own(place, read, runs):
    for key in ODD_KEYS:
        assert by_message(place, read, key, key) == f"the data of {key}"
    assert runs == ODD_KEYS
    for key in ODD_KEYS:
        assert by_message(place, read, key, key) == f"the data of {key}"
    assert runs == ODD_KEYS, "each has its stored result"


def test_each_odd_scope_is_a_lock_key_of_its_own(place, read):
    with ExitStack() as held:
        for tenant in ODD_KEYS:
            held.enter_context(place.held_elsewhere(read.name, tenant))
        for tenant in ODD_KEYS:
            with pytest.raises(Contended):
                read.apply((tenant,), throw=True)
        assert read.apply(("ann",)).get() == "the data of ann"


@pytest.mark.parametrize("task_id", ["a\nb", "\n"])
def test_a_task_id_that_would_read_as_a_task_id_and_an_execution_key_is_refused(place, read, runs, task_id):
    result = read.apply_async(("ann",), task_id=task_id)
    place.deliver_all()
    assert result.state == states.FAILURE
    assert str(result.result) == f"expected a task id without a line break, got {task_id!r}"
    assert runs == []
    assert place.holders(LockKey.of(read.name, ["ann"])) == []
