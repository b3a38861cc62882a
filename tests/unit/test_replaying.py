"""A trigger that is over runs again, and what it says of itself; on a store of its own, delivered as a worker does."""

from __future__ import annotations

import json
import logging
import re

import pytest
from celery import states
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_singleflight import (
    Cause,
    Outcome,
    ReplayRefused,
    StepUncertain,
    StoreUnavailable,
    commands,
    current_execution,
    current_step,
    replay,
    replaying,
    resolve_step,
    signals,
)
from celery_singleflight.claims import Record
from celery_singleflight.coordination import coordination
from celery_singleflight.headers import FORCED, SOURCE
from celery_singleflight.keys import LockKey


class Shop:
    """A task that fails as long as it is told to, and what its bodies have seen."""

    def __init__(self, place, **options):
        self.place = place
        self.broken = True
        self.ran = []
        self.is_done = []

        def work(self_, x, fails=True):
            execution = self_.execution
            self.ran.append((x, execution.attempt, self_.request.retries, execution.is_forced))
            if self.broken and fails:
                raise OSError("broken")
            return f"done {x}"

        def note(value):
            self.is_done.append(value)

        self.task = place.task(work, bind=True, **options)
        self.note = place.task(note)

    def run(self, *args, **options):
        """Let a call come to its end. Returns its id."""
        result = self.task.apply_async(args, **options)
        self.settle()
        return result.id

    def settle(self):
        self.place.deliver_all()
        coordination(self.place.app).heartbeat.flush()

    def replay(self, task_id, **how):
        outcome = replay(self.place.app, task_id, task=self.task.name, **how)
        messages = self.place.messages()
        for message in messages:
            self.place.deliver(message)
        self.settle()
        return outcome, [message for message in messages if message.headers["id"] == task_id]

    def state(self, task_id):
        return self.place.app.AsyncResult(task_id)

    def refused(self, task_id, **how):
        with pytest.raises(ReplayRefused) as caught:
            replay(self.place.app, task_id, **{"task": self.task.name, **how})
        assert self.place.messages() == []
        return caught.value


@pytest.fixture
def shop(place):
    return Shop(place)


@pytest.fixture
def told():
    """What the signal passes."""
    passed = []

    def note(**facts):
        passed.append({name: value for name, value in facts.items() if name not in ("signal", "sender")})

    signals.replayed.connect(note)
    yield passed
    signals.replayed.disconnect(note)


def test_a_failed_trigger_runs_again_under_its_id_and_what_follows_is_sent(shop, told, caplog):
    caplog.set_level(logging.INFO)
    task_id = shop.run(1, link=shop.note.s())
    assert shop.state(task_id).state == "FAILURE"
    shop.broken = False

    outcome, (message,) = shop.replay(task_id)

    assert outcome is Outcome.FAILED
    assert shop.ran == [(1, 1, 0, False), (1, 2, 0, False)]
    assert (shop.state(task_id).state, shop.state(task_id).result) == ("SUCCESS", "done 1")
    assert shop.is_done == ["done 1"]
    assert (message.headers[SOURCE], message.headers[FORCED]) == ("replay", False)
    facts = {"task_id": task_id, "lock_name": shop.task.name, "outcome": Outcome.FAILED, "is_forced": False, "reason": ""}
    assert told == [facts]
    assert f"{shop.task.name}[{task_id}] is replayed, it had ended failed" in caplog.messages


def test_it_can_be_replayed_as_often_as_it_fails(shop):
    task_id = shop.run(1)
    for _ in range(3):
        shop.replay(task_id)
    assert [attempt for _, attempt, _, _ in shop.ran] == [1, 2, 3, 4]


def test_it_has_its_retries_before_it_anew(place):
    shop = Shop(place, autoretry_for=(OSError,), max_retries=2, default_retry_delay=0)
    task_id = shop.run(1)
    shop.replay(task_id)
    assert [retries for _, _, retries, _ in shop.ran] == [0, 1, 2] * 2


def test_a_replay_keeps_the_cause_of_its_trigger(shop):
    causes = []

    def child(self):
        causes.append(self.execution.caused_by)
        raise OSError("broken")

    task = shop.place.task(child, bind=True)

    def parent():
        return task.delay().id, current_execution().run_id

    result = shop.place.task(parent).delay()
    shop.settle()
    child_id, run_id = result.get(timeout=1)
    replay(shop.place.app, child_id, task=task.name)
    shop.settle()
    assert causes == [Cause(result.id, run_id, 1)] * 2


def test_until_it_runs_its_state_is_that_of_a_trigger_that_waits(shop):
    task_id = shop.run(1)
    replay(shop.place.app, task_id, task=shop.task.name)
    assert shop.state(task_id).state == "PENDING"


def test_what_has_succeeded_is_refused_and_by_force_runs_again_and_is_told_so(place, told, caplog):
    shop = Shop(place, keep_message="always")
    task_id = shop.run(1, False)
    refused = shop.refused(task_id)
    assert (refused.why, refused.fact) == ("succeeded", "succeeded")
    assert str(refused) == f"{task_id} is not replayed: it has succeeded, and to run it again needs force and a reason"

    outcome, (message,) = shop.replay(task_id, force=True, reason="the bank lost it")

    assert outcome is Outcome.SUCCEEDED
    assert shop.ran == [(1, 1, 0, False), (1, 1, 0, True)]
    assert message.headers[FORCED] is True
    assert [(facts["is_forced"], facts["reason"]) for facts in told] == [(True, "the bank lost it")]
    (record,) = [r for r in caplog.records if "is replayed by force (the bank lost it)" in r.message]
    assert record.levelno == logging.WARNING


def test_the_result_of_a_forced_replay_takes_the_place_of_the_old_one(place):
    results = iter(["old", "new"])

    def answer():
        return next(results)

    task = place.task(answer, keep_message="always")
    result = task.delay()
    assert place.result_of(result) == "old"
    coordination(place.app).heartbeat.flush()
    replay(place.app, result.id, task=task.name, force=True, reason="wrong")
    assert place.result_of(place.app.AsyncResult(result.id)) == "new"


@pytest.mark.parametrize("reason", ["", "  "])
def test_force_needs_a_reason(shop, reason):
    task_id = shop.run(1)
    assert shop.refused(task_id, force=True, reason=reason).why == "unexplained"


def test_a_success_was_not_kept_by_default_so_force_finds_no_message(shop):
    task_id = shop.run(1, False)
    assert shop.refused(task_id).why == "succeeded"
    assert shop.refused(task_id, force=True, reason="again").why == "bare"


@pytest.mark.parametrize("options", [{"keep_message": "never"}, {"rescue": False}])
def test_what_was_not_kept_is_refused(place, options):
    shop = Shop(place, **options)
    assert shop.refused(shop.run(1)).why == "bare"


def test_a_run_under_way_is_refused_and_says_where_it_is(shop):
    refusals = []

    def slow(self):
        with pytest.raises(ReplayRefused) as caught:
            replay(shop.place.app, self.request.id, task=slow_task.name)
        refusals.append(caught.value)

    slow_task = shop.place.task(slow, bind=True)
    result = slow_task.delay()
    shop.settle()
    (refused,) = refusals
    assert (refused.why, refused.fact, refused.worker) == ("running", result.id, "w1@test")


def test_a_run_with_an_execution_key_is_found_by_its_message(shop):
    refusals = []

    def slow(self, x):
        with pytest.raises(ReplayRefused) as caught:
            replay(shop.place.app, self.request.id, task=slow_task.name)
        refusals.append(caught.value.why)

    slow_task = shop.place.task(slow, bind=True, idempotent_on="slow:{x}")
    slow_task.delay(1)
    shop.settle()
    assert refusals == ["running"]


def test_what_is_replayed_waits_and_is_refused(shop):
    task_id = shop.run(1)
    replay(shop.place.app, task_id, task=shop.task.name)
    with pytest.raises(ReplayRefused, match="it has not ended: it waits, or comes by itself"):
        replay(shop.place.app, task_id, task=shop.task.name)


def test_what_follows_is_sent_before_it_is_replayed(shop):
    result = shop.task.delay(1)
    shop.place.deliver_all()
    heartbeat = coordination(shop.place.app).heartbeat
    marks, heartbeat._settling._settled = heartbeat._settling._settled, []
    assert shop.refused(result.id).why == "ending"
    heartbeat._settling._settled = marks
    heartbeat.flush()
    assert shop.replay(result.id)[0] is Outcome.FAILED


def test_a_trigger_that_nobody_knows_and_a_task_that_is_none_are_refused(shop):
    assert shop.refused("nobody").why == "unknown"
    assert shop.refused("nobody", task="no.such.task").why == "unprotected"
    assert shop.refused("nobody", task="celery.chord_unlock").why == "unprotected"


def test_a_skipped_trigger_runs_when_it_is_replayed(place):
    shop = Shop(place, contention_policy="skip", lock_on=("x",), max_hold=60)
    shop.broken = False
    with place.held_elsewhere(shop.task.name, 1):
        task_id = shop.run(1)
    assert shop.ran == []
    assert shop.replay(task_id)[0] is Outcome.SKIPPED
    assert len(shop.ran) == 1


# Execution keys


@pytest.fixture
def paying(place):
    shop = Shop(place, idempotent_on="pay:{x}", keep_message="always")
    shop.task_id = shop.run(1)
    shop.broken = False
    return shop


def test_the_execution_key_is_told_by_the_message(paying):
    assert paying.replay(paying.task_id)[0] is Outcome.FAILED
    assert paying.state(paying.task_id).result == "done 1"


def test_one_that_is_given_must_be_the_triggers_own(paying):
    refused = paying.refused(paying.task_id, execution_key="pay:2")
    assert (refused.why, refused.fact) == ("foreign", "pay:1")
    assert paying.replay(paying.task_id, execution_key="pay:1")[0] is Outcome.FAILED


def test_an_execution_that_another_trigger_has_completed_answers_it(paying):
    paying.run(1)
    ran = len(paying.ran)
    assert paying.replay(paying.task_id)[0] is Outcome.FAILED
    assert (len(paying.ran), paying.state(paying.task_id).result) == (ran, "done 1")


def test_by_force_it_runs_though_another_trigger_has_completed_its_execution(paying):
    paying.run(1)
    ran = len(paying.ran)
    paying.replay(paying.task_id, force=True, reason="again")
    assert len(paying.ran) == ran + 1
    assert paying.ran[-1][3] is True


def test_a_key_that_was_given_with_the_call_is_found(shop):
    task_id = shop.run(1, execution_key="of the call")
    shop.replay(task_id)
    assert [x for x, *_ in shop.ran] == [1, 1]


# Steps


def test_a_replay_goes_on_behind_the_steps_that_are_done(place):
    done, broken = [], [True]

    def fulfil(self):
        self.step("charge", lambda: done.append("charge"))
        if broken:
            raise OSError("no parcel")
        self.step("parcel", lambda: done.append("parcel"))

    task = place.task(fulfil, bind=True)
    result = task.delay()
    place.deliver_all()
    coordination(place.app).heartbeat.flush()
    broken.clear()
    replay(place.app, result.id, task=task.name)
    place.deliver_all()
    assert done == ["charge", "parcel"]


@pytest.mark.parametrize("failure_policy", ["forget", "keep"])
def test_under_an_explicit_execution_key_too_a_replay_goes_on_behind_the_steps_that_are_done(place, failure_policy):
    keys, broken = [], [True]

    def fulfil(self, order):
        self.step("charge", lambda: keys.append(current_step().key))
        if broken:
            raise OSError("no parcel")

    task = place.task(fulfil, bind=True, idempotent_on="order:{order}", failure_policy=failure_policy)
    result = task.delay(1)
    place.deliver_all()
    coordination(place.app).heartbeat.flush()
    broken.clear()
    replay(place.app, result.id, task=task.name)
    place.deliver_all()
    assert keys == ["order:1/charge"]
    assert result.state == states.SUCCESS


def test_an_uncertain_step_is_resolved_and_then_the_trigger_is_replayed(place):
    done = []

    def charge(self):
        return self.step("charge", lambda: done.append("charge"))

    task = place.task(charge, bind=True, uncertain_policy="hold")
    result = task.delay()
    (message,) = place.messages()
    steps = place.store.keys.steps(place.store.names(Record(LockKey(task.name, ""), result.id, None))["execution"])
    place.client.hset(steps, "held", "step:charge")
    place.client.hset(steps, "step:charge", "begun\nsomebody:1\n1\n1\nw1@test" + "\n" * 7)
    place.deliver(message)
    coordination(place.app).heartbeat.flush()
    with pytest.raises(StepUncertain):
        result.get(timeout=1)

    with pytest.raises(
        ReplayRefused, match="nobody knows whether step charge has happened: find out, and say so with resolve_step"
    ):
        replay(place.app, result.id, task=task.name)
    resolve_step(place.app, task.name, "charge", task_id=result.id, happened=True, result="ch_1")
    assert replay(place.app, result.id, task=task.name) is None
    assert place.result_of(place.app.AsyncResult(result.id)) == "ch_1"
    assert done == []


# What goes wrong around it


def test_a_broker_that_is_away_leaves_it_to_a_sweeper(shop, monkeypatch, caplog):
    task_id = shop.run(1)

    def away(*_):
        raise OSError("no broker")

    with monkeypatch.context() as cut_off:
        cut_off.setattr("celery_singleflight.handoff.publish_again", away)
        assert replay(shop.place.app, task_id, task=shop.task.name) is Outcome.FAILED
    assert "could not be published; a sweeper tries again" in caplog.text
    handout = shop.place.store.rescue(Record(LockKey(shop.task.name, ""), task_id, None))
    assert json.loads(handout.message.partition(b"\n")[0])["headers"][SOURCE] == "replay"


def test_a_result_backend_that_cannot_forget_is_let_be(shop, monkeypatch):
    task_id = shop.run(1)

    def away(_):
        raise NotImplementedError

    monkeypatch.setattr(shop.place.app.backend, "forget", away)
    shop.broken = False
    shop.replay(task_id)
    assert shop.state(task_id).state == "SUCCESS"


def test_a_store_that_is_away_says_so(shop, monkeypatch):
    def away(*_, **__):
        raise StoreUnavailable("away")

    monkeypatch.setattr(type(shop.place.store), "replay", away)
    with pytest.raises(StoreUnavailable):
        replay(shop.place.app, "t1", task=shop.task.name)


@pytest.mark.parametrize("why", replaying._WHY)
def test_every_refusal_has_its_sentence(why):
    assert str(ReplayRefused("t1", why, "a fact", "")).startswith("t1 is not replayed: ")


# The command


def command(place, *words):
    obj = CLIContext(app=place.app, no_color=True, workdir=None)
    return CliRunner().invoke(commands.singleflight, words, obj=obj)


def test_the_command_replays_by_the_id_alone(shop):
    task_id = shop.run(1)
    ran = command(shop.place, "replay", task_id)
    assert (ran.exit_code, ran.output) == (0, f"{task_id} of {shop.task.name}: replayed, it had ended failed\n")
    shop.settle()
    assert len(shop.ran) == 2


def test_the_command_is_refused_with_a_reason_and_an_exit_code(shop):
    task_id = shop.run(1, False)
    ran = command(shop.place, "replay", task_id, "--json")
    assert ran.exit_code == 3
    told = json.loads(ran.stdout)
    assert (told["is_replayed"], told["why"], told["task"]) == (False, "succeeded", shop.task.name)
    assert command(shop.place, "replay", task_id).output == f"Refused: {told['refusal']}\n"
    assert command(shop.place, "replay", task_id, "--force").exit_code == 3


def test_what_was_forced_is_explained(place):
    shop = Shop(place, keep_message="always")
    task_id = shop.run(1, False)
    ran = command(shop.place, "replay", task_id, "--force", "--reason", "the bank lost it", "--json")
    assert json.loads(ran.stdout)["is_forced"] is True
    shop.settle()
    (trigger,) = json.loads(command(shop.place, "explain", task_id, "--json").stdout)["triggers"]
    assert [reason for _, reason in trigger["forced"]] == ["the bank lost it"]
    shown = command(shop.place, "explain", task_id).output
    assert re.search(rf"^{task_id} was replayed by force \d\.\d s ago: the bank lost it$", shown, re.MULTILINE)


def test_the_command_does_not_know_what_the_store_does_not(shop):
    ran = command(shop.place, "replay", "nobody")
    assert ran.exit_code == 1
    assert "expected the id of a trigger that the store remembers, got nobody" in ran.output


def test_a_trigger_of_a_task_that_the_app_has_not_is_told_so(shop, make_place):
    task_id = shop.run(1, False)
    ran = command(make_place(), "replay", task_id)
    assert ran.exit_code == 1
    assert "expected the id of a trigger of this app's tasks" in ran.output
