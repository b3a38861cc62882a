"""A trigger is settled once Celery has stored its result and sent what follows, whatever handlers its task brings along."""

from __future__ import annotations

import pytest
from celery import Task, states
from celery.exceptions import Ignore, Reject
from nodes import wait_until

from celery_singleflight import SingleflightTask
from celery_singleflight.claims import Record
from celery_singleflight.heartbeat import Heartbeat


def echo(x):
    return x


def fail(x):
    raise OSError(x)


@pytest.fixture
def settled(monkeypatch, place):
    """(Task id, its state in Celery's results) of each trigger at the moment it was settled, once for each time."""
    log, settle = [], Heartbeat.settle

    def note(self, record, *told):
        log.append((record.task_id, place.app.AsyncResult(record.task_id).state))
        settle(self, record, *told)

    monkeypatch.setattr(Heartbeat, "settle", note)
    return log


def test_it_is_settled_when_its_result_is_stored_and_its_callback_is_sent(place, settled, monkeypatch):
    waiting = []
    settle = Heartbeat.settle
    monkeypatch.setattr(
        Heartbeat, "settle", lambda self, *trigger: (waiting.append(len(place.messages())), settle(self, *trigger))
    )
    callback = place.task(echo, base=Task, name="shop.callback")
    result = place.task(echo, name="shop.work").apply_async((1,), link=callback.s())
    place.deliver(place.messages()[0])
    assert settled == [(result.id, states.SUCCESS)]
    assert waiting == [1]


def test_a_run_that_failed_is_settled_too(place, settled):
    result = place.task(fail).delay(1)
    place.deliver_all()
    assert settled == [(result.id, states.FAILURE)]


@pytest.mark.parametrize(
    ("options", "state"),
    [
        ({"contention_policy": "skip", "max_hold": 60}, states.SUCCESS),
        ({"contention_policy": "reject"}, states.FAILURE),
        ({"wait_timeout": 0}, states.FAILURE),
    ],
    ids=["skipped", "rejected", "timed out"],
)
def test_a_trigger_that_ends_without_a_run_is_settled(place, settled, options, state):
    task = place.task(echo, **options)
    result = task.delay(1)
    with place.held_elsewhere(task.name, 1):
        place.deliver_all()
    assert settled == [(result.id, state)]


def test_a_duplicate_that_gets_a_stored_outcome_is_settled_as_a_trigger_of_its_own(place, settled):
    task = place.task(echo)
    first, second = (task.apply_async((1,), execution_key="once") for _ in range(2))
    place.deliver_all()
    assert settled == [(first.id, states.SUCCESS), (second.id, states.SUCCESS)]


def test_a_run_whose_result_celery_could_not_store_is_not_settled(place, settled, monkeypatch):
    def away(*_, **__):
        raise RuntimeError("no backend")

    task = place.task(echo)
    task.delay(1)
    (message,) = place.messages()
    monkeypatch.setattr(task.backend, "mark_as_done", away)
    with pytest.warns(RuntimeWarning, match="no backend"):
        place.deliver(message)
    assert settled == []


# What is not over


def ignored(self, x):
    raise Ignore("not now")


def rejected(self, x):
    raise Reject("not here", requeue=False)


def retried(self, x):
    if self.request.retries == 0:
        raise self.retry(countdown=0)
    return x


def replaced(self, x):
    if not self.request.replaced_task_nesting:
        raise self.replace(self.s(x))
    return x


@pytest.mark.parametrize("body", [ignored, rejected])
def test_what_has_no_outcome_is_not_settled(place, settled, body):
    told = []

    class Base(SingleflightTask):
        abstract = True

        def after_return(self, *args):
            told.append(args)

    place.task(body, base=Base, bind=True).delay(1)
    place.deliver_all()
    assert told == []
    assert settled == []


@pytest.mark.parametrize("body", [retried, replaced])
def test_what_goes_on_in_another_message_is_settled_with_that(place, settled, body):
    result = place.task(body, bind=True).delay(1)
    place.deliver(place.messages()[0])
    assert settled == []
    place.deliver_all()
    assert settled == [(result.id, states.SUCCESS)]


def test_what_waits_is_settled_when_it_has_run(place, settled):
    task = place.task(echo)
    result = task.delay(1)
    with place.held_elsewhere(task.name, 1):
        place.deliver(place.messages()[0])
    assert settled == []
    place.deliver_all()
    assert settled == [(result.id, states.SUCCESS)]


# The task's own after_return


def returning_classes():
    """Tasks that are each other's bases, new each time because binding changes them, with what each notes; and what has."""
    log = []

    class WithoutSuper(SingleflightTask):
        name = "settling.without_super"

        def after_return(self, status, retval, task_id, args, kwargs, einfo):
            log.append((f"own {status}", task_id))

        def run(self, error=None):
            if error:
                raise OSError(error)

    class WithSuper(WithoutSuper):
        name = "settling.with_super"

        def after_return(self, *args):
            super().after_return(*args)
            log.append(("derived", args[2]))

    class WithSuperOfOurs(SingleflightTask):
        name = "settling.with_super_of_ours"
        run = WithoutSuper.run

        def after_return(self, *args):
            super().after_return(*args)
            super().after_return(*args)
            log.append(("own", args[2]))

    class Raising(WithoutSuper):
        name = "settling.raising"

        def after_return(self, *args):
            log.append(("raises", args[2]))
            raise LookupError("of the handler")

    class RaisingInSuper(Raising):
        name = "settling.raising_in_super"

        def after_return(self, *args):
            super().after_return(*args)
            log.append(("not reached", args[2]))

    class Inherited(WithoutSuper):
        name = "settling.inherited"

    class Celerys(WithoutSuper):
        name = "settling.celerys"
        after_return = Task.after_return

    class Mixed:
        def after_return(self, *args):
            log.append(("mixed in", args[2]))

    class WithMixed(Mixed, WithoutSuper):
        name = "settling.with_mixed"

    class OfPlainTask(Task):
        abstract = True

        def after_return(self, *args):
            log.append(("of a plain task", args[2]))

    class WithPlainTaskFirst(OfPlainTask, SingleflightTask):
        name = "settling.with_plain_task_first"
        run = WithoutSuper.run

    expected = {
        WithoutSuper: ["own {}"],
        WithSuper: ["own {}", "derived"],
        WithSuperOfOurs: ["own"],
        Raising: ["raises"],
        RaisingInSuper: ["raises"],
        Inherited: ["own {}"],
        Celerys: [],
        WithMixed: ["mixed in"],
        WithPlainTaskFirst: ["of a plain task"],
    }
    return expected, log


@pytest.mark.parametrize(
    ("args", "state"), [((), states.SUCCESS), (("no",), states.FAILURE)], ids=["a run that succeeds", "a run that fails"]
)
@pytest.mark.parametrize("order", [list, lambda classes: [*reversed(classes)]], ids=["bases first", "bases last"])
@pytest.mark.filterwarnings("ignore:Exception raised outside body:RuntimeWarning")  # Celery before 5.7 of a handler's error
def test_a_task_with_an_after_return_of_its_own_is_settled_once_and_keeps_it(place, settled, order, args, state):
    expected, log = returning_classes()
    for cls in order(list(expected)):
        place.app.register_task(cls())
    place.app.finalize()
    for cls, whats in expected.items():
        log.clear()
        settled.clear()
        result = place.app.tasks[cls.name].apply_async(args)
        place.deliver_all()
        assert settled == [(result.id, state)], cls
        assert log == [(what.format(state), result.id) for what in whats], cls


def test_an_after_return_is_inherited_by_a_task_made_of_a_function(place, settled):
    expected, log = returning_classes()
    result = place.task(echo, base=next(iter(expected))).delay(1)
    place.deliver_all()
    assert log == [("own SUCCESS", result.id)]
    assert settled == [(result.id, states.SUCCESS)]


def test_a_handler_that_is_given_as_an_option_is_settled(place, settled):
    told = []
    result = place.task(echo, after_return=lambda self, *args: told.append((self.name, args[2])), name="shop.work").delay(1)
    place.deliver_all()
    assert told == [("shop.work", result.id)]
    assert settled == [(result.id, states.SUCCESS)]


def test_a_run_inside_of_an_after_return_does_not_settle_the_one_around_it(place, settled):
    """The request that is settled is the one that returns."""
    inner = place.task(echo, name="shop.inner")
    before = []

    class Base(SingleflightTask):
        abstract = True

        def after_return(self, *args):
            inner.apply((1,)).get(disable_sync_subtasks=False)
            before.extend(task_id for task_id, _ in settled)

    result = place.task(echo, base=Base, name="shop.outer").delay(1)
    place.deliver_all()
    assert result.id not in before
    assert len(before) == 1
    assert [task_id for task_id, _ in settled] == [*before, result.id]


def test_a_copy_of_a_settled_message_sends_its_callbacks_no_second_time(place):
    expected, _ = returning_classes()
    callback = place.task(echo, base=Task, name="shop.callback")
    task = place.task(echo, base=next(iter(expected)), name="shop.work")
    result = task.apply_async((1,), link=callback.s())
    (message,) = place.messages()
    place.deliver(message)
    assert [sent.headers["task"] for sent in place.messages()] == ["shop.callback"]

    record = place.store.names(Record(place.lock_key("shop.work", 1), result.id, None))["trigger"]
    wait_until(lambda: place.client.hget(record, "settled"), 5, "it is settled")
    place.deliver(message)
    assert place.messages() == []


def test_an_after_return_that_comes_after_ours_is_called(place, settled):
    told = []

    class OfPlainTask(Task):
        abstract = True

        def after_return(self, *args):
            told.append(args[2])

    class Base(SingleflightTask, OfPlainTask):
        abstract = True

    result = place.task(echo, base=Base).delay(1)
    place.deliver_all()
    assert settled == [(result.id, states.SUCCESS)]
    assert told == [result.id]


@pytest.mark.filterwarnings("ignore:Exception raised outside body:RuntimeWarning")
@pytest.mark.parametrize(("kind", "arguments"), [(staticmethod, 6), (classmethod, 7)])
def test_an_after_return_that_is_no_plain_method_is_called_as_celery_does(place, settled, kind, arguments):
    told = []

    class Base(SingleflightTask):
        abstract = True
        after_return = kind(lambda *args: told.append((len(args), args[-4])))

    result = place.task(echo, base=Base).delay(1)
    place.deliver_all()
    assert settled == [(result.id, states.SUCCESS)]
    assert told == [(arguments, result.id)]
