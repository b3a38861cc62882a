"""Which delivery of a trigger Celery finds by its id in a worker that has had several, for instance to terminate its run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery.exceptions import Ignore, Retry
from celery.utils.imports import symbol_by_name
from celery.worker import state


@pytest.fixture
def arrive(place):
    """Have the message of a trigger arrive in this worker, however often."""

    def work():
        """Is not run here."""

    task = place.task(work, lock_on=())
    result = task.delay()
    (message,) = place.messages()

    def arrive():
        request = symbol_by_name(task.Request)(
            message,
            on_ack=lambda *_: None,
            on_reject=lambda *_: None,
            app=place.app,
            hostname="w1@test",
            eventer=None,
            task=task,
            connection_errors=(),
        )
        state.task_reserved(request)
        return request

    yield arrive
    state.requests.pop(result.id, None)


def is_over(request, error):
    request.on_failure(SimpleNamespace(exception=error, traceback=""))


def test_when_one_has_waited_and_is_over_the_one_that_runs_is_found(arrive):
    waited = arrive()
    runs = arrive()
    state.task_accepted(runs)
    is_over(waited, Retry("waits"))
    assert state.requests[runs.id] is runs
    is_over(runs, Retry("waits again"))
    assert runs.id not in state.requests


def test_when_a_copy_is_dropped_the_one_that_runs_is_found(arrive):
    runs = arrive()
    state.task_accepted(runs)
    for _ in range(3):
        is_over(arrive(), Ignore())
        assert state.requests[runs.id] is runs
    is_over(runs, Ignore())
    assert runs.id not in state.requests


def test_one_that_is_over_is_not_found_again(arrive):
    first = arrive()
    second = arrive()
    is_over(first, Ignore())
    is_over(second, Ignore())
    assert second.id not in state.requests


def test_a_terminate_reaches_the_run_after_a_copy_was_dropped(arrive):
    killed = []
    runs = arrive()
    runs.on_accepted(4711, 0.0)
    is_over(arrive(), Ignore())
    pool = SimpleNamespace(terminate_job=lambda pid, signum: killed.append(pid))
    state.requests[runs.id].terminate(pool, signal="KILL")
    assert killed == [4711]
