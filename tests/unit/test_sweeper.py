"""A look of the sweeper: what a dead worker has left is published again, and nothing stops the rest."""

from __future__ import annotations

from itertools import count

import pytest
from celery import states
from kombu.utils.imports import symbol_by_name

from celery_singleflight import StoreUnavailable, headers as header, signals, sweeper as module
from celery_singleflight.claims import Acquired, Outcome
from celery_singleflight.departure import Departure
from celery_singleflight.keys import KeySpace
from celery_singleflight.store import Store
from celery_singleflight.sweeper import Sweeper
from celery_singleflight.trigger import Trigger

NORMAL = pytest.approx(1.0, rel=0.21)


@pytest.fixture
def sweeper(place):
    return Sweeper(place.app)


@pytest.fixture(autouse=True)
def _no_turns(monkeypatch):
    """Each look is in an interval of its own."""
    turn, looks = KeySpace.turn, count()
    monkeypatch.setattr(KeySpace, "turn", lambda self, names: f"{turn(self, names)}:{next(looks)}")


@pytest.fixture
def rescued():
    told = []

    def note(**facts):
        told.append({name: value for name, value in facts.items() if name != "signal"})

    signals.rescued.connect(note)
    yield told
    signals.rescued.disconnect(note)


class Shop:
    """Triggers of one task, whose runs die in the middle."""

    def __init__(self, place, **options):
        self.place = place
        self.runs = runs = []

        def work(x):
            runs.append(x)
            return x

        self.task = place.task(work, name="shop.work", **options)

    def request(self, message):
        return symbol_by_name(self.task.Request)(
            message,
            on_ack=lambda *_: None,
            on_reject=lambda *_: None,
            app=self.place.app,
            hostname="w1@test",
            eventer=None,
            task=self.task,
            connection_errors=(),
        )

    def dead(self, x):
        """Publish a trigger, let it enter and die. Returns its result and its names in the store."""
        result = self.task.delay(x)
        (message,) = self.place.messages()
        request = self.request(message)
        trigger = Trigger(self.task, request._context, self.task._binding, request.args, request.kwargs)
        assert isinstance(self.place.store.enter(trigger.claim), Acquired)
        names = self.place.store.names(trigger.claim.record)
        self.place.client.delete(names["lease"])
        self.place.client.hset(names["execution"], "until_ms", 1)
        self.place.client.zadd(names["due"], {result.id: 1 + x})
        return result, names


@pytest.fixture
def shop(place):
    return Shop(place)


def test_what_a_dead_worker_has_left_is_published_again_and_runs(place, sweeper, shop, rescued, caplog):
    result, names = shop.dead(1)

    assert sweeper.look() == NORMAL

    (message,) = place.messages()
    assert (message.headers["id"], message.headers[header.PREVIOUS]) == (result.id, "")
    assert message.headers[header.COPY]
    assert rescued == [{"sender": None, "task_id": result.id, "lock_name": "shop.work", "outcome": "", "times": 1}]
    assert f"{result.id} of shop.work was left by a run that died: published again" in caplog.messages
    place.deliver(message)
    assert (shop.runs, result.get(timeout=1)) == ([1], 1)
    assert place.client.hget(names["trigger"], "attempt") == "2"


def test_what_was_published_is_not_published_again_at_the_next_look(place, sweeper, shop):
    shop.dead(1)
    for _ in range(3):
        sweeper.look()
    assert len(place.messages()) == 1


def test_a_live_run_is_left_alone(place, sweeper, shop):
    _, names = shop.dead(1)
    place.client.hset(names["execution"], "until_ms", 9_999_999_999_999)
    sweeper.look()
    assert place.messages() == []


def test_an_outcome_that_nobody_passed_on_is_published_again_and_answered(place, sweeper, shop, rescued, monkeypatch):
    result = shop.task.delay(1)
    (message,) = place.messages()
    with monkeypatch.context() as cut_off:
        cut_off.setattr(shop.task.backend, "mark_as_done", lambda *_, **__: None)
        cut_off.setattr("celery_singleflight.task.settle", lambda request: None)
        place.deliver(message)
    assert result.state == states.PENDING
    record = shop.task._binding.coordination.store.keys.trigger("shop.work", result.id)
    place.client.hset(record, "ended_ms", 1)
    place.client.zadd(place.store.keys.due("shop.work"), {result.id: 1})

    Sweeper(place.app).look()

    assert [(told["outcome"], told["times"]) for told in rescued] == [("succeeded", 1)]
    place.deliver_all()
    assert (shop.runs, result.get(timeout=1)) == ([1], 1)


# What is bad


def test_a_record_that_cannot_be_read_does_not_keep_the_others_back(place, sweeper, shop, caplog):
    _, bad = shop.dead(1)
    good, _ = shop.dead(2)
    place.client.delete(bad["trigger"])
    place.client.set(bad["trigger"], "no hash", ex=60)

    sweeper.look()

    assert [message.headers["id"] for message in place.messages()] == [good.id]


def test_a_message_that_cannot_be_read_does_not_keep_the_others_back(place, sweeper, shop, rescued, caplog):
    bad, names = shop.dead(1)
    good, _ = shop.dead(2)
    place.client.hset(names["trigger"], "message", "no message")

    assert sweeper.look() == NORMAL

    assert [message.headers["id"] for message in place.messages()] == [good.id]
    assert [told["task_id"] for told in rescued] == [good.id]
    assert f"{bad.id} of shop.work was left by a run that died, and could not be published again" in caplog.messages


def test_a_broker_that_refuses_one_gets_the_others_and_that_one_comes_again(place, sweeper, shop, monkeypatch):
    first, names = shop.dead(1)
    second, _ = shop.dead(2)
    publish, calls = module.publish_again, []

    def refuse_the_first(app, handout):
        calls.append(handout.times)
        if len(calls) == 1:
            raise ConnectionError("refused")
        return publish(app, handout)

    monkeypatch.setattr(module, "publish_again", refuse_the_first)
    sweeper.look()
    assert [message.headers["id"] for message in place.messages()] == [second.id]
    place.client.zadd(names["due"], {first.id: 1})
    sweeper.look()
    assert [message.headers["id"] for message in place.messages()] == [first.id]
    assert calls == [1, 1, 2]


def test_a_receiver_that_fails_breaks_nothing(place, sweeper, shop):
    def fail(**_):
        raise RuntimeError("a receiver of mine")

    for n in range(2):
        shop.dead(n)
    signals.rescued.connect(fail)
    try:
        assert sweeper.look() == NORMAL
    finally:
        signals.rescued.disconnect(fail)
    assert len(place.messages()) == 2


# The store away


def test_while_the_store_is_away_it_looks_ever_less_often_and_rescues_nothing(place, sweeper, shop, monkeypatch, caplog):
    shop.dead(1)
    is_away = [True]
    due = Store.due

    def ask(self, *args, **options):
        if is_away[0]:
            raise StoreUnavailable("away")
        return due(self, *args, **options)

    monkeypatch.setattr(Store, "due", ask)
    pauses = [sweeper.look() for _ in range(6)]
    assert pauses == [pytest.approx(pause, rel=0.21) for pause in (2, 4, 8, 15, 15, 15)]
    assert caplog.messages.count("the sweeper cannot look, and rescues nothing until it can: away") == 6
    assert place.messages() == []

    is_away[0] = False
    assert sweeper.look() == NORMAL
    assert len(place.messages()) == 1


def test_a_store_that_goes_away_in_the_middle_hands_nothing_out(place, sweeper, shop, monkeypatch):
    for n in range(3):
        shop.dead(n)
    monkeypatch.setattr(Store, "rescue", lambda self, record: (_ for _ in ()).throw(StoreUnavailable("away")))
    assert sweeper.look() == pytest.approx(2.0, rel=0.21)
    assert place.messages() == []


def test_what_nobody_foresaw_is_told_and_the_next_look_follows(sweeper, shop, monkeypatch, caplog):
    monkeypatch.setattr(Store, "due", lambda *_, **__: 1 / 0)
    assert sweeper.look() == pytest.approx(2.0, rel=0.21)
    assert "a look of the sweeper failed; the next one follows" in caplog.messages


def test_pauses_differ_so_that_workers_do_not_look_all_at_once(sweeper, shop):
    pauses = {sweeper.look() for _ in range(20)}
    assert len(pauses) > 10
    assert all(0.8 <= pause <= 1.2 for pause in pauses)


# Bounds


def test_a_look_takes_no_longer_than_an_event_loop_can_spare(place, sweeper, shop, clock, monkeypatch):
    for n in range(5):
        shop.dead(n)
    monkeypatch.setattr(module, "time", clock)
    rescue = Store.rescue

    def slow(self, record):
        clock.now += 0.3
        return rescue(self, record)

    monkeypatch.setattr(Store, "rescue", slow)
    sweeper.look()
    assert len(place.messages()) == 2
    sweeper.look()
    sweeper.look()
    assert len(place.messages()) == 3


def test_without_protected_tasks_the_store_is_not_asked(make_place, monkeypatch):
    monkeypatch.setattr(Store, "due", lambda *_, **__: pytest.fail("asked"))
    assert Sweeper(make_place().app).look() == NORMAL


def test_each_lock_name_of_the_app_is_looked_at_and_no_other(place, sweeper, monkeypatch):
    asked = []
    monkeypatch.setattr(Store, "due", lambda self, names, **_: asked.append(list(names)) or [])

    def work():
        pass

    place.task(work, name="shop.a")
    place.task(work, name="shop.b", lock_name="shared")
    place.task(work, name="shop.c", lock_name="shared")
    sweeper.look()
    assert asked == [["shared", "shop.a"]]


# What the main process concludes


@pytest.mark.parametrize("reason", ["terminated", "WorkerLostError('signal 9 (SIGKILL)')", ""])
def test_a_redelivery_of_what_the_main_process_has_concluded_needs_no_answer(place, shop, reason):
    result = shop.task.delay(1)
    (message,) = place.messages()
    request = shop.request(message)
    trigger = Trigger(shop.task, request._context, shop.task._binding, request.args, request.kwargs)
    assert isinstance(place.store.enter(trigger.claim), Acquired)

    Departure(request).conclude(Outcome.REVOKED, reason, is_gone=True)

    place.deliver(message)
    assert (shop.runs, place.messages(), result.state) == ([], [], states.PENDING)
    assert place.holders(trigger.lock_key) == []


def test_a_run_that_the_main_process_gives_back_comes_again(place, sweeper, shop):
    result = shop.task.delay(1)
    (message,) = place.messages()
    request = shop.request(message)
    trigger = Trigger(shop.task, request._context, shop.task._binding, request.args, request.kwargs)
    assert isinstance(place.store.enter(trigger.claim), Acquired)

    Departure(request).give_back(died=True)

    names = place.store.names(trigger.claim.record)
    assert place.holders(trigger.lock_key) == []
    assert place.client.hget(names["trigger"], "died") == "1"
    sweeper.look()
    assert place.messages() == []
    place.client.zadd(names["due"], {result.id: 1})
    sweeper.look()
    place.deliver_all()
    assert (shop.runs, result.get(timeout=1)) == ([1], 1)
