"""A trigger that waits: what its message carries, and that one copy counts."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest
from amqp.exceptions import MessageNacked
from celery import states

from celery_singleflight import Contended, OptionError, WaitTimeout, run, signals, waiting
from celery_singleflight.claims import Outcome
from celery_singleflight.courier import careful_producer

COPY, PREVIOUS = "singleflight_copy", "singleflight_previous"
WAITS, FIRST_SEEN = "singleflight_waits", "singleflight_first_seen"
PLACE = "singleflight_place"


@pytest.fixture
def runs():
    return []


@pytest.fixture
def task(place, runs):
    def work(self, key, value=None):
        runs.append((key, self.request.retries, self.request.id))
        return value

    return place.task(work, bind=True, lock_on=("key",))


@pytest.fixture
def told():
    """Every signal of the package, in the order in which it was sent."""
    log, receivers = [], []
    for name in signals.__all__:
        signal = getattr(signals, name)

        def note(sender, signal, name=name, **facts):
            log.append((name, sender, facts))

        signal.connect(note)
        receivers.append((signal, note))
    yield log
    for signal, note in receivers:
        signal.disconnect(note)


def contend(place, task, message):
    """Deliver the message while somebody else holds its key; return what goes back to the broker."""
    with place.held_elsewhere(task.name, "k"):
        place.deliver(message)
    (requeued,) = place.messages()
    return requeued


def test_it_goes_back_as_a_new_copy_of_the_same_message(place, task):
    result = task.apply_async(
        ("k",),
        {"value": 5},
        priority=3,
        headers={"mine": 1},
        link=task.si("after"),
        shadow="a name of mine",
        time_limit=60,
        soft_time_limit=50,
        expires=3600,
    )
    (first,) = place.messages()
    first.headers.update({"redelivered": True, "x-death": [{"count": 1}]})
    before = datetime.now(UTC)
    second = contend(place, task, first)

    assert result.state == states.RETRY
    assert isinstance(result.result, Contended)
    assert second.body == first.body
    assert (second.headers[WAITS], second.headers[PREVIOUS]) == (1, "")
    assert len(second.headers[COPY]) == 32
    assert second.headers[FIRST_SEEN].isdigit()
    assert datetime.fromisoformat(second.headers["eta"]) > before
    assert "redelivered" not in second.headers
    assert "x-death" not in second.headers
    same = {"id", "task", "mine", "shadow", "timelimit", "retries", "root_id", "singleflight_key", "singleflight_digest"}
    assert {name: second.headers[name] for name in same} == {name: first.headers[name] for name in same}
    assert second.properties["priority"] == first.properties["priority"]
    assert second.properties["correlation_id"] == first.properties["correlation_id"]

    third = contend(place, task, second)
    assert (third.headers[WAITS], third.headers[PREVIOUS]) == (2, second.headers[COPY])
    assert third.headers[FIRST_SEEN] == second.headers[FIRST_SEEN]


def test_one_that_was_handed_out_and_waits_all_the_same_has_no_turn_any_more(place, task):
    task.delay("k")
    (first,) = place.messages()
    first.headers["singleflight_linger"] = 0
    assert "singleflight_linger" not in contend(place, task, first).headers


def number_of(message):
    epoch, number, *_ = message.headers[PLACE].split(":")
    return epoch, int(number)


def test_it_keeps_its_place_in_the_line_from_one_copy_to_the_next(place, task):
    task.delay("k", 1)
    task.delay("k", 2)
    first, second = place.messages()
    first, second = contend(place, task, first), contend(place, task, second)
    assert [number_of(message)[1] for message in (first, second)] == [1, 2]
    again = contend(place, task, second)
    assert number_of(again) == number_of(second)
    assert number_of(contend(place, task, first)) == number_of(first)


def test_its_countdown_follows_its_place(place, task, told):
    for value in range(5):
        task.delay("k", value)
    with place.held_elsewhere(task.name, "k"):
        for message in place.messages():
            place.deliver(message)
    countdowns = [facts["countdown"] for name, _, facts in told if name == "requeued"]
    assert countdowns[2:] == sorted(countdowns[2:])
    assert countdowns[-1] < 1.0


@pytest.mark.parametrize("ticket", ["x", 5, "", "1:2:3:4:5"], ids=repr)
def test_a_place_of_a_foreign_publisher_means_nothing(place, task, runs, ticket):
    result = task.delay("k", 5)
    (message,) = place.messages()
    message.headers[PLACE] = ticket
    message = contend(place, task, message)
    assert number_of(message)[1] == 1
    place.deliver(message)
    assert result.get(timeout=1) == 5
    assert len(runs) == 1


def test_it_goes_back_in_the_serializer_and_compression_it_came_in(place, task):
    task.apply_async(("k",), serializer="yaml", compression="zlib")
    (first,) = place.messages()
    first.accept = {"application/x-yaml"}
    second = contend(place, task, first)
    assert (second.content_type, second.headers["compression"]) == (first.content_type, first.headers["compression"])


def test_an_older_copy_that_the_broker_delivers_again_runs_nothing_and_waits_no_more(place, task, runs):
    result = task.delay("k", 5)
    (first,) = place.messages()
    second = contend(place, task, first)
    third = contend(place, task, second)
    with place.held_elsewhere(task.name, "k"):
        place.deliver(first)
    place.deliver(first)
    assert (runs, place.messages()) == ([], [])
    place.deliver(third)
    assert len(runs) == 1
    assert result.get(timeout=1) == 5


def test_of_two_copies_of_one_waiting_trigger_only_one_stays(place, task, runs):
    task.delay("k")
    (first,) = place.messages()
    waiting, sizes = [first, first, first], []
    for _ in range(4):
        with place.held_elsewhere(task.name, "k"):
            for message in waiting:
                place.deliver(message)
        waiting = place.messages()
        sizes.append(len(waiting))
    assert sizes[1:] == [1, 1, 1]
    place.deliver(waiting[0])
    assert len(runs) == 1
    assert place.messages() == []


def test_waiting_uses_up_no_retries(place, runs):
    def work(self, key):
        runs.append(self.request.retries)
        if len(runs) == 1:
            raise self.retry(countdown=0)
        return "done"

    task = place.task(work, bind=True, max_retries=1)
    result = task.delay("k")
    (message,) = place.messages()
    for _ in range(5):
        message = contend(place, task, message)
    place.deliver(message)
    (message,) = place.messages()
    for _ in range(5):
        message = contend(place, task, message)
    place.deliver(message)
    assert result.get(timeout=1) == "done"
    assert runs == [0, 1]


def test_one_that_may_not_wait_any_longer_fails_and_says_who_was_in_the_way(place, task, runs, told):
    result = task.apply_async(("k",), wait_timeout=0, link_error=task.si("error"))
    (message,) = place.messages()
    with place.held_elsewhere(task.name, "k"):
        place.deliver(message)
    assert result.state == states.FAILURE
    assert type(result.result) is WaitTimeout
    assert result.result.lock_key == f'{task.name}["k"]'
    assert [facts["outcome"] for name, _, facts in told if name == "trigger_ended"] == [Outcome.TIMED_OUT]
    (errback,) = place.messages()
    assert errback.headers["task"] == task.name
    assert runs == []


def test_a_trigger_that_ended_and_was_settled_is_not_answered_again(place, task, runs):
    result = task.apply_async(("k", 5), link=task.si("after"))
    (message,) = place.messages()
    place.deliver(message)
    (callback,) = place.messages()
    task._binding.coordination.heartbeat.flush()
    place.deliver(message)
    assert place.messages() == []
    assert len(runs) == 1
    assert result.get(timeout=1) == 5
    place.deliver(callback)
    assert runs[1][0] == "after"


def test_an_uncontended_run_is_told_from_its_lease_to_its_end(place, task, told):
    result = task.delay("k", 5)
    place.deliver_all()
    assert [name for name, *_ in told] == ["lease_acquired", "trigger_ended"]
    (_, sender, acquired), (_, also, ended) = told
    assert sender is also is task
    assert acquired["lease"].lock_key == ended["lock_key"] == f'{task.name}["k"]'
    assert acquired["execution"].key == ended["task_id"] == result.id
    assert (ended["outcome"], ended["reason"], ended["ran"]) == (Outcome.SUCCEEDED, "", True)


def test_a_wait_is_told_with_its_holder_and_its_countdown(place, task, told):
    result = task.delay("k")
    (message,) = place.messages()
    with place.held_elsewhere(task.name, "k"):
        place.deliver(message)
    assert [name for name, *_ in told] == ["contended", "requeued"]
    (_, sender, contended), (_, also, requeued) = told
    assert sender is also is task
    assert (contended["lock_key"], contended["task_id"]) == (f'{task.name}["k"]', result.id)
    assert contended["holder_worker"]
    assert contended["remaining"] > 86_000
    assert (requeued["task_id"], requeued["waits"]) == (result.id, 1)
    assert requeued["countdown"] > 0


@pytest.mark.parametrize(
    ("policy", "outcome"), [("skip", Outcome.SKIPPED), ("reject", Outcome.REJECTED)], ids=["skip", "reject"]
)
def test_one_that_does_not_run_is_told_with_its_reason(place, told, policy, outcome):
    def work(key):
        raise AssertionError(key)

    task = place.task(work, contention_policy=policy, max_hold=60)
    task.delay("k")
    with place.held_elsewhere(task.name, "k"):
        place.deliver_all()
    ((name, sender, facts),) = told
    assert (name, sender, facts["outcome"], facts["ran"]) == ("trigger_ended", task, outcome, False)
    assert facts["reason"].startswith(f"{place.lock_key(task.name, 'k')} is held by ")


def test_a_failure_and_an_answer_from_the_store_are_told(place, told):
    def pay(invoice):
        if invoice == 13:
            raise ValueError("no")
        return "paid"

    task = place.task(pay, idempotent_on="invoice:{invoice}")
    for invoice in (13, 42, 42):
        task.delay(invoice)
    place.deliver_all()
    ended = [facts for name, _, facts in told if name == "trigger_ended"]
    assert [(facts["outcome"], facts["reason"], facts["ran"]) for facts in ended] == [
        (Outcome.FAILED, "ValueError(…)", True),
        (Outcome.SUCCEEDED, "", True),
        (Outcome.SUCCEEDED, "answered from the stored outcome of invoice:42", False),
    ]


@pytest.mark.parametrize("name", ["lease_acquired", "contended", "requeued", "trigger_ended"])
def test_a_receiver_that_fails_breaks_nothing(place, task, runs, name):
    def fail(**_):
        raise RuntimeError("a receiver of mine")

    signal = getattr(signals, name)
    signal.connect(fail)
    try:
        result = task.delay("k", 5)
        (message,) = place.messages()
        message = contend(place, task, message)
        place.deliver(message)
    finally:
        signal.disconnect(fail)
    assert result.get(timeout=1) == 5
    assert len(runs) == 1


@pytest.mark.parametrize("waits", ["x", "1", 1.0, None, [1]], ids=repr)
def test_waits_of_a_foreign_publisher_that_are_no_number_fail_the_trigger(place, task, runs, waits):
    result = task.delay("k")
    (message,) = place.messages()
    message.headers[WAITS] = waits
    place.deliver(message)
    assert isinstance(result.result, OptionError)
    assert str(result.result) == f"header singleflight_waits of {task.name}: expected a whole number, got {waits!r}"
    assert (runs, place.messages()) == ([], [])


def test_a_header_of_ours_that_means_nothing_is_logged_and_stops_nothing(place, task, runs, caplog):
    result = task.apply_async(
        ("k", 5), headers={"singleflight_contention_polcy": "skip", "contention_polcy": "skip", "mine": 1}
    )
    (message,) = place.messages()
    with caplog.at_level(logging.WARNING, "celery_singleflight"):
        place.deliver(message)
    assert [record.getMessage() for record in caplog.records] == [
        f"{task.name}[{result.id}] has a header singleflight_contention_polcy, which means nothing here"
    ]
    assert result.get(timeout=1) == 5


def test_a_header_of_ours_that_means_something_is_not_logged(place, task, runs, caplog):
    task.apply_async(("k",), contention_policy="requeue", wait_timeout=60, execution_key="x", link=task.si("after"))
    (message,) = place.messages()
    with caplog.at_level(logging.WARNING, "celery_singleflight"):
        message = contend(place, task, message)
        message = contend(place, task, message)
        place.deliver(message)
    assert len(runs) == 1
    assert caplog.records == []


def test_a_message_that_the_broker_does_not_take_is_tried_again(place, task, monkeypatch):
    """A full queue of RabbitMQ refuses: to give up would acknowledge the trigger and forget it."""
    refusals = []

    @contextmanager
    def refusing(app):
        if not refusals:
            refusals.append("nacked")
            raise MessageNacked
        with careful_producer(app) as producer:
            yield producer

    monkeypatch.setattr(waiting, "careful_producer", refusing)
    monkeypatch.setattr(waiting, "_BROKER_PAUSE", 0.0)
    result = task.delay("k")
    (first,) = place.messages()

    second = contend(place, task, first)

    assert refusals == ["nacked"]
    assert second.headers[PREVIOUS] == ""
    assert result.state == states.RETRY


def test_a_process_that_stood_still_until_its_lease_had_ended_does_not_begin_the_body(place, task, runs, monkeypatch):
    """The store gives a lease to who lingers as the baton comes, also where nobody is there to take it."""
    task.delay("k")
    (first,) = place.messages()
    enter = run.enter

    def enter_long_ago(trigger):
        entered, requested_at = enter(trigger)
        return entered, requested_at - trigger.claim.ttl

    with monkeypatch.context() as stopped:
        stopped.setattr(run, "enter", enter_long_ago)
        place.deliver(first)
    assert runs == []
    (second,) = place.messages()
    place.deliver(second)
    assert len(runs) == 1
