"""Who is answered at publish, with what, and who sends a message all the same."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import celery
import pytest
from celery import Celery, chain, chord, group
from celery.beat import ScheduleEntry, Scheduler
from celery.schedules import schedule
from celery.worker import state
from pydantic import BaseModel

from celery_singleflight import (
    ConfigurationError,
    ExecutionKeyReused,
    OptionError,
    PayloadMismatch,
    StoreUnavailable,
    announcing,
    signals,
)
from celery_singleflight.announcements import Announcement
from celery_singleflight.coordination import coordination

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = "singleflight_execution_key"


def pay(invoice, outcome="paid"):
    if outcome == "fail":
        raise ValueError(invoice)
    return outcome


@pytest.fixture
def task(place):
    return place.task(pay, idempotent_on="pay:{invoice}", answer_at_publish=True)


@pytest.fixture
def asked(place, monkeypatch):
    """The names of the scripts that publishers have called."""
    connections, calls = coordination(place.app).publishing_store._connections, []
    real = connections.run
    monkeypatch.setattr(connections, "run", lambda script, *how: calls.append(script.name) or real(script, *how))
    return calls


@pytest.fixture
def away(place, monkeypatch):
    """Publishers do not reach the store; workers do."""

    def run(*_):
        raise StoreUnavailable("it is away")

    monkeypatch.setattr(coordination(place.app).publishing_store._connections, "run", run)


def announced_by_another(place, task_id="another", *, invoice=1, sent=True):
    """A publisher elsewhere has announced a trigger of the task for this invoice."""
    lock_name = f"{place.app.main}.pay"
    said = Announcement(lock_name, f"pay:{invoice}", task_id, lock_name, "")
    assert place.store.announce(said, reserve=60.0) is True
    if sent:
        place.store.confirm(said, 300.0)
    return said


# Who is answered.

PLAIN = {
    "delay": lambda task: task.delay(1),
    "call": lambda task: task.apply_async((1,)),
    "named arguments": lambda task: task.apply_async(kwargs={"invoice": 1}),
    "call with a default given": lambda task: task.delay(1, "paid"),
    "signature": lambda task: task.s(1).delay(),
    "signature, its options": lambda task: task.s(1).set(priority=3).apply_async(),
    "key given": lambda task: task.apply_async((1,), execution_key="pay:1"),
    "key in a signature": lambda task: task.s(1).set(execution_key="pay:1").apply_async(),
    "key in a header": lambda task: task.apply_async((1,), headers={KEY: "pay:1"}),
    "None for what is not given": lambda task: task.apply_async((1,), task_id=None, link=None, chain=None),
    "chain of none": lambda task: task.apply_async((1,), link=[], chain=[]),
    "countdown": lambda task: task.apply_async((1,), countdown=60),
    "expiring": lambda task: task.apply_async((1,), expires=60),
}


@pytest.mark.parametrize("publish", PLAIN.values(), ids=PLAIN)
def test_a_plain_call_gets_the_handle_of_the_first_and_sends_nothing(place, task, publish):
    first = task.delay(1)
    second = publish(task)
    assert second == first
    assert (first.is_duplicate, second.is_duplicate) == (False, True)
    (message,) = place.messages()
    place.deliver(message)
    assert second.get(timeout=1) == "paid"
    third = publish(task)
    assert third == first, "and so it is when it is completed"
    assert third.get(timeout=1) == "paid"
    assert place.messages() == []


def frozen(signature):
    signature.freeze()
    return signature


NOT_PLAIN = {
    "task id": lambda task: task.apply_async((1,), task_id="mine"),
    "task id by position": lambda task: task.apply_async((1,), None, "mine"),
    "link": lambda task: task.apply_async((1,), link=task.si(2)),
    "link_error": lambda task: task.apply_async((1,), link_error=task.si(2)),
    "group": lambda task: group(task.s(1)).apply_async(),
    "chain": lambda task: chain(task.s(1), task.si(2)).apply_async(),
    "chain of one": lambda task: chain(task.s(1)).apply_async(),
    "chord": lambda task: chord([task.s(1)], task.si(2)).apply_async(),
    "frozen signature": lambda task: frozen(task.s(1)).apply_async(),
    "parent": lambda task: task.apply_async((1,), parent_id="another"),
    "root": lambda task: task.apply_async((1,), root_id="another"),
    "group id": lambda task: task.apply_async((1,), group_id="another"),
    "rest of a chain": lambda task: task.apply_async((1,), chain=[task.si(2)]),
    "chord's header": lambda task: task.apply_async((1,), chord=task.si(2)),
    "retry": lambda task: task.apply_async((1,), retries=1),
    "replacement": lambda task: task.apply_async((1,), replaced_task_nesting=1),
    "beat": lambda task: task.apply_async((1,), headers={"celery_beat_task": True}),
    "name only": lambda task: task.app.send_task(task.name, (1,), answer_at_publish=True),
    "another execution": lambda task: task.delay(2),
    "key given": lambda task: task.apply_async((1,), execution_key="another"),
    "told not to": lambda task: task.apply_async((1,), answer_at_publish=False),
}


@pytest.mark.parametrize("publish", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_every_other_call_sends_its_message(place, task, publish):
    first = task.delay(1)
    publish(task)
    sent = [message.headers["id"] for message in place.messages() if message.headers["task"] == task.name]
    assert len(set(sent)) == 2
    assert sent[0] == first.id


def test_what_follows_a_task_is_sent_by_its_tracer_whatever_is_announced(place, task):
    announced_by_another(place, invoice=2)
    chain(task.si(1), task.si(2)).apply_async(link=task.si(2))
    for _ in range(3):
        (message,) = place.messages()
        place.deliver(message)
    assert place.messages() == []


@pytest.mark.skipif(celery.VERSION < (5, 7), reason="this Celery does not mark beat's messages")
def test_beats_ticks_are_sent_with_their_execution_key(place, task):
    scheduler = Scheduler(place.app, lazy=True)
    entry = ScheduleEntry(
        name="pay",
        task=task.name,
        args=(1,),
        schedule=schedule(60),
        options={"execution_key": "tick"},
        last_run_at=datetime.now(UTC),
        app=place.app,
    )
    for _ in range(2):
        scheduler.apply_async(entry, advance=False)
    assert [message.headers[KEY] for message in place.messages()] == ["tick", "tick"]


def test_eager_mode_runs_the_task_each_time(make_place):
    place = make_place(task_always_eager=True)
    task = place.task(pay, idempotent_on="pay:{invoice}", answer_at_publish=True)
    first, second = task.delay(1), task.delay(1)
    assert first.get() == second.get() == "paid"
    assert first.id != second.id


CANVASES = {
    "group": lambda s: group(s(1), s(2)),
    "chord": lambda s: chord([s(1), s(2)], s(3)),
    "chain in a group": lambda s: group(chain(s(1), s(3)), s(2)),
}


@pytest.mark.parametrize("canvas", CANVASES.values(), ids=CANVASES)
def test_each_member_of_a_canvas_carries_an_execution_key_of_its_own(place, canvas):
    task = place.task(pay)
    canvas(lambda n: task.si(n).set(execution_key=f"key-{n}")).apply_async()
    messages = [message for message in place.messages() if message.headers["task"] == task.name]
    assert [message.headers[KEY] for message in messages] == ["key-1", "key-2"]


def test_the_next_of_a_chain_carries_an_execution_key_of_its_own(place):
    task = place.task(pay)
    chain(task.si(1).set(execution_key="key-1"), task.si(2).set(execution_key="key-2")).apply_async()
    for key in ("key-1", "key-2"):
        (message,) = place.messages()
        assert message.headers[KEY] == key
        place.deliver(message)


# Whether it is asked for, and what it costs.


def test_nothing_is_asked_of_the_store_unless_it_is_asked_for(place, asked):
    task = place.task(pay, idempotent_on="pay:{invoice}")
    task.delay(1)
    assert not hasattr(task.delay(1), "is_duplicate")
    assert asked == []
    assert len(place.messages()) == 2


def test_nor_where_the_task_id_is_the_execution_key(place, asked):
    task = place.task(pay, answer_at_publish=True)
    assert task.delay(1) != task.delay(1)
    assert asked == []


def test_it_is_asked_for_by_task_by_setting_or_by_call(make_place):
    by_setting = make_place(singleflight_answer_at_publish=True)
    task = by_setting.task(pay, idempotent_on="pay:{invoice}")
    assert task.delay(1) == task.delay(1)
    by_call = make_place()
    task = by_call.task(pay)
    first, second = (task.apply_async((1,), execution_key="pay:1", answer_at_publish=True) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("wrong", ["yes", 1, "False"])
def test_anything_but_a_truth_value_is_refused(task, wrong):
    with pytest.raises(OptionError, match=r"answer_at_publish: expected True or False, got"):
        task.apply_async((1,), answer_at_publish=wrong)


def test_a_first_call_is_two_exchanges_a_duplicate_one_or_two(place, task, asked):
    task.delay(1)
    assert asked == ["announce", "confirm"]
    task.delay(1)
    assert asked[2:] == ["announce", "announce"], "the second look is at the record of the announced one"
    place.deliver_all()
    task.delay(1)
    assert asked[4:] == ["announce"]


def test_without_a_store_it_says_what_is_expected(make_place):
    place = make_place()
    place.app.conf.singleflight_url = None
    task = place.task(pay, idempotent_on="pay:{invoice}", answer_at_publish=True)
    with pytest.raises(ConfigurationError, match="expected the setting singleflight_url"):
        task.delay(1)


# Who counts.


def test_who_runs_it_is_answered_with(place, asked):
    inner = []

    def work(self, invoice):
        inner.append(self.delay(invoice))

    task = place.task(work, bind=True, idempotent_on="pay:{invoice}", answer_at_publish=True)
    first = task.delay(1)
    place.deliver_all()
    assert inner == [first]
    assert asked[2:] == ["announce"], "the run record says it, not the announcement"


def test_a_failed_execution_is_sent_again(place, task):
    first = task.delay(1, "fail")
    place.deliver_all()
    second = task.delay(1, "paid")
    assert second != first
    assert place.result_of(second) == "paid"


def test_one_that_was_announced_and_skipped_is_sent_again(place):
    task = place.task(
        pay,
        lock_on=(),
        idempotent_on="pay:{invoice}",
        answer_at_publish=True,
        contention_policy="skip",
        skip_result="skipped",
        max_hold=60,
    )
    first = task.delay(1)
    with place.held_elsewhere(task.name):
        assert place.result_of(first) == "skipped"
    second = task.delay(1)
    assert second != first
    assert place.result_of(second) == "paid"


def test_a_direct_call_leaves_no_handle_to_be_answered_with(place, task):
    assert task(1) == "paid"
    result = task.delay(1)
    assert result.is_duplicate is False
    assert place.result_of(result) == "paid"


@pytest.mark.parametrize(
    "held_back",
    [{"countdown": 60}, {"eta": datetime.now(UTC) + timedelta(minutes=1)}, {"expires": 60}],
    ids=["countdown", "eta", "expires"],
)
def test_what_is_held_back_or_may_expire_is_not_announced(place, task, asked, held_back):
    held = task.apply_async((1,), **held_back)
    assert held.is_duplicate is False
    assert asked == ["announce"]
    assert task.delay(1) != held
    assert len(place.messages()) == 2


def test_nor_that_of_a_task_whose_messages_expire(place, asked):
    task = place.task(pay, idempotent_on="pay:{invoice}", answer_at_publish=True, expires=60)
    task.delay(1)
    assert asked == ["announce"]


# Other publishers.


class Naps:
    """A clock that goes on only while a publisher sleeps, and what happens meanwhile."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self.while_asleep: Callable[[], object] = lambda: None

    def monotonic(self) -> float:
        return 1000.0 + sum(self.slept)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.while_asleep()


@pytest.fixture
def naps(monkeypatch):
    naps = Naps()
    monkeypatch.setattr(announcing, "time", naps)
    return naps


def test_one_that_is_about_to_be_sent_is_waited_for(place, task, naps):
    other = announced_by_another(place, sent=False)
    naps.while_asleep = lambda: len(naps.slept) == 3 and place.store.confirm(other, 300.0)
    assert task.delay(1).id == "another"
    assert len(naps.slept) == 3
    assert place.messages() == []


def test_one_that_could_not_be_sent_is_not_waited_for_any_longer(place, task, naps):
    other = announced_by_another(place, sent=False)
    naps.while_asleep = lambda: len(naps.slept) == 2 and place.store.withdraw(other)
    assert task.delay(1).is_duplicate is False
    assert len(naps.slept) == 2
    assert len(place.messages()) == 1
    assert task.delay(1).is_duplicate


def test_one_that_is_never_sent_is_waited_for_two_seconds_at_most(place, task, naps):
    announced_by_another(place, sent=False)
    result = task.delay(1)
    assert sum(naps.slept) == pytest.approx(announcing.RESERVED, abs=0.001)
    assert max(naps.slept) <= 0.05
    assert result.is_duplicate is False
    assert task.delay(1) == result, "it is confirmed all the same"


def test_what_cannot_be_sent_is_taken_back_at_once(place, task, monkeypatch):
    def send(*_, **__):
        raise OSError("the broker is away")

    with monkeypatch.context() as patched:
        patched.setattr(place.app, "send_task", send)
        with pytest.raises(OSError, match="the broker is away"):
            task.delay(1)
    assert place.client.keys() == []
    assert place.result_of(task.delay(1)) == "paid"


def test_a_call_that_does_not_fit_the_task_is_refused_and_leaves_nothing(place, task):
    with pytest.raises(TypeError):
        task.delay(1, 2, 3)
    assert place.client.keys() == []


# A store that is away.


def test_a_publisher_waits_for_the_store_for_less_time_than_a_worker_unless_told_otherwise():
    def patience(**settings):
        app = Celery(set_as_current=False)
        app.conf.update(singleflight_url="redis://nowhere", **settings)
        arguments = coordination(app).publishing_store._connections._pool.connection_kwargs
        return arguments["socket_timeout"], arguments["socket_connect_timeout"]

    assert patience() == (1.0, 0.5)
    assert patience(singleflight_transport_options={"socket_timeout": 0.2}) == (0.2, 0.5)


def test_without_the_store_it_is_sent_and_said(place, task, away, caplog):
    with caplog.at_level(logging.WARNING):
        first, second = task.delay(1), task.delay(1)
    assert first != second
    assert len(place.messages()) == 2
    assert f"{task.name} is published without a look at execution pay:1: it is away" in caplog.messages


@pytest.mark.parametrize(("lost", "can_send"), [("confirm", True), ("withdraw", False)])
def test_what_the_store_is_not_told_ends_by_itself(place, task, monkeypatch, caplog, lost, can_send):
    store = type(coordination(place.app).publishing_store)

    def away(*_):
        raise StoreUnavailable("it is away")

    def send(*_, **__):
        raise OSError("the broker is away")

    monkeypatch.setattr(store, lost, away)
    if can_send:
        task.delay(1)
    else:
        monkeypatch.setattr(place.app, "send_task", send)
        with pytest.raises(OSError, match="the broker"):
            task.delay(1)
    (name,) = place.client.keys("*:announcement:*")
    assert 0 < place.client.pttl(name) <= announcing.RESERVED * 1000
    assert "is left as it is: it is away" in caplog.text


# The key of something else.


def test_the_key_of_another_task_is_an_error_of_the_caller(place):
    one = place.task(pay, name="shop.pay", lock_name="shop", answer_at_publish=True)
    other = place.task(pay, name="shop.ship", lock_name="shop", answer_at_publish=True)
    one.apply_async((1,), execution_key="1")
    with pytest.raises(ExecutionKeyReused, match=r"execution key 1 belongs to the task shop\.pay"):
        other.apply_async((1,), execution_key="1")
    assert len(place.messages()) == 1


def test_another_payload_is_an_error_of_the_caller(place, task):
    task.delay(1, "paid")
    with pytest.raises(PayloadMismatch, match="execution key pay:1 was recorded by"):
        task.delay(1, "refunded")
    assert len(place.messages()) == 1


def test_nothing_is_refused_where_it_is_not_the_caller_who_would_be_told(place, task):
    task.delay(1, "paid")
    task.apply_async((1, "refunded"), parent_id="another")
    assert len(place.messages()) == 2


@pytest.mark.parametrize("error", [LookupError("not here"), TypeError("unfit")], ids=repr)
def test_a_key_function_that_fails_leaves_it_to_the_worker(place, asked, error):
    def key(invoice):
        raise error

    task = place.task(pay, idempotent_on=key, answer_at_publish=True)
    task.delay(1)
    assert asked == []
    assert len(place.messages()) == 1


class Opaque:
    """It has no canonical form."""


def test_arguments_that_cannot_be_compared_are_not(make_place):
    place = make_place(task_serializer="pickle", accept_content=["pickle", "json"])
    task = place.task(pay, idempotent_on="pay:{invoice}", lock_on=("invoice",), answer_at_publish=True)
    assert task.delay(1, Opaque()) == task.delay(1, Opaque())


class Invoice(BaseModel):
    number: int


def number_of(invoice):
    return invoice["number"]


def of_model(invoice: Invoice) -> str:
    return "paid"


def test_the_key_of_a_pydantic_task_is_what_its_worker_makes_of_it(place):
    task = place.task(of_model, pydantic=True, idempotent_on=number_of, answer_at_publish=True)
    first = task.delay({"number": 7})
    place.deliver_all()
    assert task.delay({"number": 7}) == first
    if celery.VERSION >= (5, 7):  # which sends a model by itself
        assert task.delay(Invoice(number=7)) == first
    assert place.messages() == []


# The handle.


def test_a_duplicate_is_told_by_log_and_signal(place, task, caplog):
    told = []

    def receive(sender, signal, **facts):
        told.append((sender.name, facts))

    signals.answered_at_publish.connect(receive, weak=False)
    try:
        with caplog.at_level(logging.INFO):
            first = task.delay(1)
            task.delay(1)
    finally:
        signals.answered_at_publish.disconnect(receive)
    assert told == [(task.name, {"task_id": first.id, "execution_key": "pay:1", "how": "announced"})]
    assert f"{task.name} is not sent, {first.id} is announced for execution pay:1" in caplog.messages


def test_the_handle_is_a_child_of_the_task_that_called(place, task):
    first = task.delay(1)
    children = []

    def work(self):
        task.delay(1)
        task.apply_async((1,), add_to_parent=False)
        children.extend(self.request.children)

    place.task(work, bind=True).delay()
    place.deliver_all()
    assert children == [first]


def test_the_handle_of_a_call_that_ignores_its_result_waits_for_nothing(task):
    task.delay(1)
    assert task.apply_async((1,), ignore_result=True).get() is None


def test_nobody_is_answered_with_a_trigger_that_was_revoked_before_it_began(place, task):
    first = task.delay(1)
    state.revoked.add(first.id)
    try:
        place.deliver_all()
    finally:
        state.revoked.discard(first.id)
    assert first.state == "REVOKED"

    assert not task.delay(1).is_duplicate
