"""Features of Celery, as rows of the matrix: results, states, and calls without a message."""

from __future__ import annotations

from uuid import uuid4

import celery
import pytest
import twin_app
from celery import chain, chord, group
from matrix_ends import end_of, ends_of
from matrix_feature import CONTENDED, UNCONTENDED, Section
from nodes import wait_until

from celery_singleflight import Contended

RESULTS = Section("Results")


@RESULTS(holds=("echo",), waiting=8)
def values(t):
    """Values: `None`, `0`, `""`, `False`, numbers, texts, lists, mappings."""
    sent = [None, 0, "", False, 1.5, "text", [1, [2]], {"a": {"b": None}}]
    return ends_of(*[t.echo.delay(value) for value in sent])


@RESULTS(holds=("add",))
def success_hooks(t):
    """Hooks of a success."""
    result = t.add.delay(1, 2)
    return end_of(result), t.hooks(result, 3)


@RESULTS(holds=("fail",))
def failure_hooks(t):
    """A failure, and its hooks."""
    result = t.fail.delay()
    return end_of(result), t.hooks(result, 3)


@RESULTS(holds=("fail_as_expected",))
def expected_failure(t):
    """`throws`."""
    return end_of(t.fail_as_expected.delay())


def _left_as_it_was(t, result):
    hooks = t.hooks(result, 1)
    wait_until(lambda: not t.is_for_a_pool(result), 20, "it has ended")
    # Nothing is stored of it, so that RETRY stands if it has waited before.
    return hooks, result.state == ("RETRY" if t.is_contended else "PENDING")


@RESULTS(
    holds=("ignore",),
    says={(None, CONTENDED): "same; the state stays RETRY, which its wait has stored, as after a retry of Celery's"},
)
def ignored(t):
    """`raise Ignore`."""
    return _left_as_it_was(t, t.ignore.delay())


@RESULTS(holds=("reject",))
def rejected(t):
    """`raise Reject(requeue=False)`."""
    result = t.reject.delay()
    # Celery stores nothing of it before 5.7.
    return end_of(result) if celery.VERSION >= (5, 7) else _left_as_it_was(t, result)


@RESULTS(holds=("not_serialisable",))
def result_that_does_not_serialise(t):
    """A result that does not serialise."""
    end = end_of(t.not_serialisable.delay())
    return end["state"], end["value"].partition(":")[0]


@RESULTS(holds=("forget_result",))
def ignore_result(t):
    """`ignore_result` of the task."""
    result = t.forget_result.delay(t.key)
    t.until_noted()
    t.hooks(result, 3)
    return result.state


@RESULTS(
    holds=("add",),
    old_defects={(None, CONTENDED): "its result is stored, as after a retry of Celery's"},
)
def ignore_result_per_call(t):
    """`ignore_result` of a call."""
    result = t.add.apply_async((1,), ignore_result=True)
    t.hooks(result, 3)
    return result.state


@RESULTS(holds=("add",))
def result_extended(t):
    """`result_extended`."""
    result = t.add.apply_async((1,), {"b": 2})
    result.get(timeout=20)
    return result.args, result.kwargs, result.name.partition(".")[2], result.queue, result.retries


@RESULTS(holds=("announce_state",))
def own_state(t):
    """`update_state`."""
    return end_of(t.announce_state.delay())


@RESULTS(holds=("add",))
def given_task_id(t):
    """`task_id` of the caller."""
    task_id = uuid4().hex
    return t.add.apply_async((1, 2), task_id=task_id).get(timeout=20), t.place.app.AsyncResult(task_id).get(timeout=5)


@RESULTS(
    holds=("add",),
    waiting=2,
    absent={("rabbitmq", None): "Celery itself cannot send it: a header of AMQP cannot be a `UUID`"},
    old_celery="its own result backend cannot take the id",
)
def given_task_id_as_an_object(t):
    """`task_id` that is a `UUID`, also in a chain."""
    first, last = uuid4(), uuid4()
    t.add.apply_async((1, 2), task_id=first)
    chain(t.add.si(1, 1).set(task_id=uuid4()), t.double.s().set(task_id=last)).delay()
    # Looked for rather than waited for: Celery does not know the id of the message that tells it by the one that was given.
    found = [t.place.app.AsyncResult(str(task_id)) for task_id in (first, last)]
    wait_until(lambda: all(result.successful() for result in found), 20, "both have ended")
    return [(result.state, result.result) for result in found]


@RESULTS(holds=("call_another",))
def call_of_another_task(t):
    """A body that calls another task directly."""
    return end_of(t.call_another.delay(4))


@RESULTS(holds=("add",), in_place=True, says={(None, CONTENDED): "same; the call waits in its place in the worker"})
def call_of_another_task_whose_key_is_held(t):
    """A body that calls another task directly, whose key is held."""
    return end_of(t.call_another.delay(4))


@RESULTS(holds=("spawn",))
def a_task_that_publishes(t):
    """A body that publishes another task: `children`."""
    result = t.spawn.delay()
    child = t.place.app.AsyncResult(result.get(timeout=20))
    return child.get(timeout=20), [r.id for r in result.children] == [child.id]


@RESULTS(holds=("order",), waiting=2)
def pydantic_models(t):
    """`pydantic=True`."""
    model = twin_app.Order(number=1, items=["a"])
    # Celery sends models since 5.7; before, the caller dumps them.
    sent = model if celery.VERSION >= (5, 7) else model.model_dump()
    return ends_of(t.order.delay(sent), t.order.delay({"number": 5}))


@RESULTS(
    compares_requests=False,
    says={(None, UNCONTENDED): "same; `before_start` is not called, because nothing runs"},
    absent={(None, CONTENDED): "refused before a lock key is asked for"},
)
def wrong_arguments(t):
    """Arguments that the task does not take, refused by the caller or by the worker."""
    with pytest.raises(TypeError):
        t.add.delay()
    return end_of(t.place.app.send_task(t.add.name, ()))["state"]


WITHOUT_MESSAGE = Section("Without a message")


def _contended_at_once(t):
    result = t.add.apply((1, 2))
    assert result.state == "FAILURE"
    assert isinstance(result.result, Contended)
    t.let_go()
    assert t.add.apply((1, 2)).get() == 3


@WITHOUT_MESSAGE(
    holds=("add",),
    waiting=None,
    in_contention=_contended_at_once,
    says={(None, CONTENDED): "fails with `Contended` at once: nobody would run it later"},
)
def eager(t):
    """`apply()`: success, retry, autoretry, failure."""
    results = [t.add.apply((1, 2)), t.retry_twice.apply(), t.autoretry.apply(), t.fail.apply()]
    return [(result.state, repr(result.result)) for result in results]


def _always_eager_contended(t):
    with t.always_eager():
        assert isinstance(t.add.delay(1, 2).result, Contended)
        t.let_go()
        assert chain(t.add.s(1, 2), t.double.s()).delay().get() == 6


@WITHOUT_MESSAGE(
    holds=("add",),
    waiting=None,
    in_contention=_always_eager_contended,
    says={(None, CONTENDED): "fails with `Contended` at once: nobody would run it later"},
)
def always_eager(t):
    """`task_always_eager`: a call, a chain, a group, a chord."""
    with t.always_eager():
        results = [
            t.add.delay(1, 2),
            chain(t.add.s(1, 2), t.double.s()).delay(),
            group(t.add.s(n, 1) for n in range(3)).delay(),
            chord([t.add.s(1, 1), t.add.s(2, 2)])(t.total.s()),
        ]
        return [result.get() for result in results]


@WITHOUT_MESSAGE(holds=("add",), waiting=None, absent={(None, CONTENDED): "the same calls as without a given id"})
def eager_task_id_as_an_object(t):
    """`apply(task_id=…)` with a `UUID`."""
    task_id = uuid4()
    results = [t.add.apply((1, 2), task_id=task_id), t.retry_twice.apply(task_id=uuid4()), t.fail.apply(task_id=uuid4())]
    return results[0].id == task_id, [(result.state, repr(result.result)) for result in results]


@WITHOUT_MESSAGE(holds=("add",), in_place=True, says={(None, CONTENDED): "same; waits in its place"})
def direct_call(t):
    """A direct call, `task(…)`."""
    return t.add(1, b=2)
