"""Which run a log line and a message come from."""

from __future__ import annotations

import logging
import threading

import pytest
from celery.signals import after_setup_logger, after_setup_task_logger

from celery_singleflight import Cause, OptionError, SingleflightError, current_execution, hooks, lock, logs
from celery_singleflight.headers import CAUSED_BY

logger = logging.getLogger("shop.books")
ATTRIBUTES = ("run_id", "execution_key", "task_id", "attempt", "lock_key")
NOWHERE = ("", "", "", 0, "")


def nothing():
    pass


class Lines(logging.Handler):
    """Keeps what is logged, as the attributes of its records tell it."""

    def __init__(self):
        super().__init__()
        self.told = []

    def emit(self, record):
        self.told.append(tuple(getattr(record, f"singleflight_{name}") for name in ATTRIBUTES))


@pytest.fixture
def lines():
    handler = Lines()
    logs.add_run_filter([handler])
    logging.getLogger("shop").addHandler(handler)
    yield handler.told
    logging.getLogger("shop").removeHandler(handler)


def run(place, task, *args, **options):
    result = task.apply_async(args, **options)
    return place.result_of(result), result.id


def test_every_line_of_a_body_says_which_run_it_is_of(place, lines):
    def pay(self, invoice):
        logger.warning("paying %s", invoice)
        return self.execution.run_id

    task = place.task(pay, bind=True, lock_on=("invoice",), idempotent_on="pay:{invoice}")
    run_id, task_id = run(place, task, 7)
    assert lines == [(run_id, "pay:7", task_id, 1, f"{task.name}[7]")]


def test_a_line_from_outside_of_a_run_has_the_attributes_too(lines):
    logger.warning("nothing runs")
    assert lines == [NOWHERE]


def test_a_lock_outside_of_a_task_is_told_and_is_no_run(place, lines):
    with lock(place.app, "billing", 5):
        logger.warning("holding")
    assert lines == [("", "", "", 0, "billing[5]")]


def test_a_thread_of_a_body_is_outside_of_the_run(place, lines):
    def pay(self):
        thread = threading.Thread(target=logger.warning, args=("from a thread",))
        thread.start()
        thread.join()

    run(place, place.task(pay, bind=True))
    assert lines == [NOWHERE]


def test_a_retry_is_another_attempt_of_the_same_run(place, lines):
    def pay(self):
        logger.warning("trying")
        if self.request.retries == 0:
            raise self.retry(countdown=0)

    run(place, place.task(pay, bind=True))
    first, second = lines
    assert first[:3] == second[:3]
    assert (first[3], second[3]) == (1, 2)


def test_a_handler_gets_one_filter_however_often_it_is_asked_for():
    handler = logging.NullHandler()
    for _ in range(2):
        logs.add_run_filter([handler])
    assert [type(known) for known in handler.filters] == [logs.RunFilter]


@pytest.mark.parametrize("wanted", [True, False, None])
def test_a_worker_completes_celerys_handlers_where_the_app_wants_it(make_place, monkeypatch, wanted):
    place = make_place() if wanted is None else make_place(singleflight_log_context=wanted)
    monkeypatch.setattr("celery_singleflight.slots.share_slots", lambda *_: None)
    place.task(nothing)
    one, other = logging.NullHandler(), logging.NullHandler()
    try:
        hooks.equip_worker(type("Worker", (), {"app": place.app, "time_limit": None}))
        for signal, handler in ((after_setup_logger, one), (after_setup_task_logger, other)):
            signal.send(sender=None, logger=type("Logger", (), {"handlers": [handler]}))
    finally:
        for signal in (after_setup_logger, after_setup_task_logger):
            signal.disconnect(dispatch_uid="singleflight.complete_logger")
    assert [len(handler.filters) for handler in (one, other)] == [int(bool(wanted))] * 2


def test_a_setting_that_is_no_answer_is_refused(make_place):
    place = make_place(singleflight_log_context="yes")
    with pytest.raises(OptionError, match="setting singleflight_log_context: expected True or False, got 'yes'"):
        place.task(nothing)


# Who has published a trigger


@pytest.fixture
def causes(place):
    """The causes that a task finds, by the argument it is called with."""
    found = {}

    def child(self, name, retries=0):
        found.setdefault(name, []).append(self.execution.caused_by)
        if self.request.retries < retries:
            raise self.retry(countdown=0)

    place.child = place.task(child, bind=True)
    return found


def test_a_trigger_that_a_body_publishes_knows_the_run(place, causes):
    def parent(self):
        place.child.delay("call")
        place.child.s("signature").apply_async()
        place.app.send_task(place.child.name, ("name",))
        return self.execution.run_id

    run_id, _ = run(place, place.task(parent, bind=True), execution_key="parent")
    assert causes == {name: [Cause("parent", run_id, 1)] for name in ("call", "signature", "name")}


def test_a_trigger_that_nobodys_body_publishes_has_no_cause(place, causes):
    run(place, place.child, "call")
    with lock(place.app, "billing", 5):
        run(place, place.child, "beside a lock")
    assert causes == {"call": [None], "beside a lock": [None]}


def test_a_retry_keeps_its_own_cause(place, causes):
    def parent():
        place.child.delay("retried", retries=2)
        return current_execution().run_id

    run_id, task_id = run(place, place.task(parent))
    assert causes == {"retried": [Cause(task_id, run_id, 1)] * 3}


def test_a_replacement_keeps_the_cause_of_what_it_replaces(place, causes):
    def middle(self):
        raise self.replace(place.child.s("replacement"))

    task = place.task(middle, bind=True)

    def parent():
        task.delay()
        return current_execution().run_id

    run_id, task_id = run(place, place.task(parent))
    assert causes == {"replacement": [Cause(task_id, run_id, 1)]}


def test_headers_that_a_body_copies_do_not_hand_on_an_older_cause(place, causes):
    def middle(self):
        place.child.apply_async(("copied",), headers=dict(self.request.headers))
        return self.execution.run_id

    task = place.task(middle, bind=True)

    def parent():
        return task.delay().id

    middle_id, _ = run(place, place.task(parent))
    (cause,) = causes["copied"]
    assert cause.execution_key == middle_id


def test_what_a_direct_call_publishes_comes_from_the_execution_of_that_call(place, causes):
    def inner(self):
        place.child.delay("inner")
        return self.execution.run_id

    run_id = place.task(inner, bind=True)()
    place.deliver_all()
    assert [cause.run_id for cause in causes["inner"]] == [run_id]


def test_links_and_the_rest_of_a_chain_are_published_outside_of_the_body(place, causes):
    def parent():
        pass

    task = place.task(parent)
    (task.si().set(link=place.child.si("link")) | place.child.si("tail")).apply_async()
    place.deliver_all()
    assert causes == {"link": [None], "tail": [None]}


@pytest.mark.parametrize("header", ["text", {}, {"execution_key": "k", "run_id": "r", "attempt": "no number"}, 7])
def test_a_header_that_cannot_be_read_is_no_cause(place, causes, header):
    place.child.apply_async(("foreign",), headers={CAUSED_BY: header})
    place.deliver_all()
    assert causes == {"foreign": [None]}


def test_an_unprotected_task_finds_the_cause_in_its_headers(place):
    found = []

    def note(self):
        found.append(self.request.headers[CAUSED_BY])

    plain = place.task(note, bind=True, base=place.app.Task)

    def parent(self):
        plain.delay()
        return self.execution.run_id

    run_id, task_id = run(place, place.task(parent, bind=True))
    assert found == [{"execution_key": task_id, "run_id": run_id, "attempt": 1}]


def test_outside_of_a_body_there_is_no_execution_to_ask(place):
    with pytest.raises(SingleflightError):
        _ = place.task(nothing).execution
