"""A run that died after its body began, as its task sees it: told to the next, held, found out, said by a person."""

from __future__ import annotations

import logging

import pytest
from celery import states
from celery.exceptions import Ignore, Reject, Retry

from celery_singleflight import (
    ExecutionUncertain,
    LeaseLost,
    PayloadMismatch,
    Resolution,
    ResolutionError,
    ResolvedFailed,
    UncertainExecution,
    current_execution,
    current_lease,
    resolve,
    signals,
)
from celery_singleflight.sweeper import Sweeper

charges = []


@pytest.fixture(autouse=True)
def no_charges():
    charges.clear()


def pay(invoice):
    """Charge, and die before it is recorded, once."""
    charges.append(invoice)
    if len(charges) == 1:
        raise SystemExit
    return f"paid {invoice}, {len(charges)}"


def paying(place, **options):
    return place.task(pay, **{"idempotent_on": "invoice:{invoice}", "uncertain_policy": "hold", **options})


def die(place, task, *args):
    """Publish a trigger whose run dies; return its result and its message."""
    result = task.delay(*args)
    (message,) = place.messages()
    with pytest.raises(SystemExit):
        place.deliver(message)
    return result, message


def come_again(place, *results):
    """Deliver what the sweeper would publish again, of the triggers of these results."""
    for result in results:
        for key in place.client.scan_iter("*:due:*"):
            for member in place.client.zrange(key, 0, -1):
                if member.partition("\n")[0] == result.id:
                    place.client.zadd(key, {member: 0})
    for key in place.client.scan_iter("*:sweep:*"):
        place.client.delete(key)
    Sweeper(place.app).look()
    place.deliver_all()


def test_the_next_attempt_is_told_that_an_earlier_one_died(place):
    told = []

    def work():
        told.append(current_execution().is_unsure)
        if len(told) == 1:
            raise SystemExit
        return "done"

    result, message = die(place, place.task(work))
    place.deliver(message)
    assert (result.get(), told) == ("done", [False, True])


@pytest.mark.parametrize("how", ["is interrupted", "has returned"])
@pytest.mark.parametrize(("policy", "told"), [("rerun", [False, True]), ("hold", [False])])
def test_a_run_that_has_lost_its_lease_is_one_of_which_nobody_knows(place, policy, told, how):
    heard = []

    def work(invoice):
        heard.append(current_execution().is_unsure)
        if len(heard) == 1:
            key = current_lease().key
            place.take_away(key)
            if how == "is interrupted":
                raise LeaseLost(key.text)
        return "done"

    task = place.task(work, idempotent_on="invoice:{invoice}", uncertain_policy=policy)
    result = task.delay(7)
    (message,) = place.messages()
    place.deliver(message)
    place.client.delete(*place.client.scan_iter("*:lease:*"))  # the other one has ended
    place.deliver_all()
    assert heard == told
    assert result.state == (states.SUCCESS if policy == "rerun" else states.RETRY)


@pytest.mark.parametrize(("policy", "times"), [("rerun", 2), ("hold", 1)])
def test_a_delivery_that_its_pool_gives_to_another_process_is_one_whose_run_died(place, monkeypatch, policy, times):
    """A pool does so when a process dies before it is known there that it had begun."""
    task = paying(place, uncertain_policy=policy)
    result = task.delay(7)
    (message,) = place.messages()
    request = place.request(message)
    with monkeypatch.context() as killed:
        killed.setattr("celery_singleflight.run._give_back", lambda *_, **__: None)
        with pytest.raises(SystemExit):
            request.execute()
    monkeypatch.setattr("celery_singleflight.trigger.getpid", lambda: -1)
    request.execute()
    assert charges == [7] * times
    assert result.state == (states.SUCCESS if policy == "rerun" else states.RETRY)


def test_under_hold_nobody_runs_it_and_all_get_what_somebody_says(place):
    task = paying(place)
    result, message = die(place, task, 7)
    place.deliver(message)
    later = [task.delay(7) for _ in range(20)]
    place.deliver_all()

    assert charges == [7]
    assert {each.state for each in (result, *later)} == {states.RETRY}
    assert isinstance(result.result, ExecutionUncertain)
    assert (result.result.execution_key, result.result.task_id) == ("invoice:7", result.id)

    assert resolve(place.app, task.name, "succeeded", execution_key="invoice:7", result="charged") == 21
    come_again(place, result, *later)
    assert [each.get(timeout=1) for each in (result, *later)] == ["charged"] * 21
    assert charges == [7]


def test_what_is_to_run_again_runs_once(place):
    task = paying(place)
    result, message = die(place, task, 7)
    place.deliver(message)
    later = task.delay(7)
    place.deliver_all()
    resolve(place.app, task.name, "rerun", execution_key="invoice:7")
    come_again(place, result, later)
    assert charges == [7, 7]
    assert {result.get(timeout=1), later.get(timeout=1)} == {"paid 7, 2"}


def test_a_failure_that_is_found_out_is_the_triggers_own(place):
    task = paying(place)
    result, message = die(place, task, 7)
    place.deliver(message)
    later = task.delay(7)
    place.deliver_all()
    resolve(place.app, task.name, "failed", execution_key="invoice:7", reason="the bank has refused")
    come_again(place, result, later)
    with pytest.raises(ResolvedFailed, match="the bank has refused"):
        result.get(timeout=1)
    assert later.get(timeout=1) == "paid 7, 2"


def test_without_an_execution_key_the_task_id_is_it(place):
    task = paying(place, idempotent_on=None)
    result, message = die(place, task, 7)
    place.deliver(message)
    assert result.state == states.RETRY
    assert resolve(place.app, task.name, "succeeded", task_id=result.id, result="charged") == 1
    come_again(place, result)
    assert result.get(timeout=1) == "charged"


@pytest.mark.parametrize("policy", ["skip", "reject"])
def test_who_never_waits_fails_at_once(place, policy, caplog):
    task = paying(place)
    die(place, task, 7)
    later = task.apply_async((7,), contention_policy=policy)
    with caplog.at_level(logging.ERROR):
        place.deliver_all()
    with pytest.raises(ExecutionUncertain):
        later.get(timeout=1)
    assert charges == [7]
    assert ["does not run, uncertain" in record.getMessage() for record in caplog.records] == [True]


def test_a_direct_call_and_an_eager_one_are_told_at_once(place):
    task = paying(place)
    die(place, task, 7)
    with pytest.raises(ExecutionUncertain):
        task(7)
    with pytest.raises(ExecutionUncertain):
        task.apply((7,), throw=True)
    assert charges == [7]


def test_a_direct_call_that_is_cut_off_leaves_its_execution_uncertain(place):
    task = paying(place)
    with pytest.raises(SystemExit):
        task(7)
    with pytest.raises(ExecutionUncertain):
        task(7)
    resolve(place.app, task.name, "rerun", execution_key="invoice:7")
    assert task(7) == "paid 7, 2"


def test_a_signal_tells_that_somebody_waits_for_word(place):
    heard = []

    def hear(sender, **facts):
        heard.append((sender.name, facts))

    task = paying(place)
    result, message = die(place, task, 7)
    signals.uncertain.connect(hear)
    try:
        place.deliver(message)
    finally:
        signals.uncertain.disconnect(hear)
    ((name, facts),) = heard
    assert name == task.name
    assert facts["task_id"] == facts["died_task_id"] == result.id
    assert facts["execution_key"] == "invoice:7"


def test_a_call_that_asks_for_an_answer_at_publish_gets_the_handle_of_who_waits_for_word(place):
    task = paying(place, answer_at_publish=True)
    first, message = die(place, task, 7)
    place.deliver(message)
    second = task.delay(7)
    assert (second.id, second.is_duplicate, second.state) == (first.id, True, states.RETRY)
    resolve(place.app, task.name, "succeeded", execution_key="invoice:7", result="charged")
    come_again(place, first)
    assert second.get(timeout=1) == "charged"
    assert charges == [7]


def test_once_the_announcement_is_over_such_a_call_waits_for_word_too(place):
    task = paying(place, answer_at_publish=True)
    first, message = die(place, task, 7)
    place.deliver(message)
    for key in place.client.scan_iter("*:announcement:*"):
        place.client.delete(key)
    second = task.delay(7)
    assert (second.id != first.id, second.is_duplicate) == (True, False)
    place.deliver_all()
    resolve(place.app, task.name, "succeeded", execution_key="invoice:7", result="charged")
    come_again(place, first, second)
    assert [first.get(timeout=1), second.get(timeout=1)] == ["charged", "charged"]
    assert charges == [7]


# The reconciler


def reconciled(place, *answers, **options):
    """Return a task whose reconciler gives these answers, one each time, and what it was asked."""
    asked, left = [], iter(answers)

    def ask_bank(execution):
        asked.append(execution)
        answer = next(left)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return paying(place, reconciler=ask_bank, **options), asked


def test_the_reconciler_is_asked_in_place_of_the_body(place):
    task, asked = reconciled(place, Resolution("succeeded", result="found"))
    result, message = die(place, task, 7)
    place.deliver(message)
    assert result.get(timeout=1) == "found"
    assert charges == [7]
    (execution,) = asked
    assert isinstance(execution, UncertainExecution)
    assert (execution.key, execution.task, list(execution.args), execution.task_id) == ("invoice:7", task.name, [7], result.id)
    assert execution.tries == 1
    assert task.delay(7) is not None
    place.deliver_all()
    assert charges == [7]


def test_it_may_let_the_body_run(place):
    task, asked = reconciled(place, Resolution("rerun"))
    result, message = die(place, task, 7)
    place.deliver(message)
    assert result.get(timeout=1) == "paid 7, 2"
    assert len(asked) == 1


def test_one_that_was_taken_over_meanwhile_lets_nothing_run(place):
    def ask_bank(execution):
        (record,) = place.client.scan_iter("*:execution:*")
        place.client.hset(record, "owner", "another")
        return Resolution("rerun")

    task = paying(place, reconciler=ask_bank)
    _, message = die(place, task, 7)
    place.deliver(message)
    assert charges == [7]


def test_it_may_find_a_failure(place):
    task, _ = reconciled(place, Resolution("failed", reason="refused"))
    result, message = die(place, task, 7)
    place.deliver(message)
    with pytest.raises(ResolvedFailed, match="refused"):
        result.get(timeout=1)
    assert charges == [7]


@pytest.mark.parametrize("answer", [None, OSError("the bank is away"), "paid"], ids=["unknown", "raises", "nonsense"])
def test_one_that_has_not_found_out_is_asked_again_by_the_schedule(place, answer, caplog):
    task, asked = reconciled(place, answer, Resolution("succeeded", result="found"), reconcile_delays=(0, 600))
    result, message = die(place, task, 7)
    place.deliver(message)
    assert result.state == states.RETRY
    come_again(place, result)
    assert len(asked) == 1, "not before its time"
    (execution,) = place.client.scan_iter("*:execution:*")
    parts = place.client.hget(execution, "unsure").split("\n")
    parts[5] = "1"
    place.client.hset(execution, "unsure", "\n".join(parts))
    come_again(place, result)
    assert result.get(timeout=1) == "found"
    assert [each.tries for each in asked] == [1, 2]
    assert charges == [7]


@pytest.mark.parametrize(
    ("delays", "what_comes_next"),
    [((0, 600), "at try 1 of 2: it is asked again 600 s after this try"), ((0,), "at try 1 of 1: it is left to a person")],
    ids=["one more try", "the last try"],
)
def test_the_log_says_what_comes_after_a_try_that_has_not_found_out(place, delays, what_comes_next, caplog):
    task, _ = reconciled(place, None, reconcile_delays=delays)
    _, message = die(place, task, 7)
    place.deliver(message)
    said = [record.getMessage() for record in caplog.records if "the reconciler" in record.getMessage()]
    assert said == [f"the reconciler has not found out what became of invoice:7, {what_comes_next}"]


def test_after_its_last_try_it_is_left_to_a_person(place):
    task, asked = reconciled(place, None, reconcile_delays=(0,))
    result, message = die(place, task, 7)
    place.deliver(message)
    come_again(place, result)
    assert (result.state, len(asked)) == (states.RETRY, 1)
    resolve(place.app, task.name, "succeeded", execution_key="invoice:7", result="charged")
    come_again(place, result)
    assert result.get(timeout=1) == "charged"


def test_without_a_broker_in_eager_mode_it_is_asked_at_once(place):
    task, asked = reconciled(place, Resolution("succeeded", result="found"))
    die(place, task, 7)
    assert task.apply((7,)).get() == "found"
    assert len(asked) == 1


# What a person says


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"outcome": "gone", "execution_key": "invoice:7"}, "expected 'succeeded', 'failed' or 'rerun', got 'gone'"),
        ({"outcome": "failed", "execution_key": "invoice:7", "result": 1}, "only one that has succeeded has a result"),
        ({"outcome": "failed"}, "expected either a task_id or an execution_key, got None and None"),
        ({"outcome": "rerun", "execution_key": "invoice:8"}, "the store knows nothing of it"),
        ({"outcome": "succeeded", "execution_key": "invoice:7", "result": object()}, "its result cannot be stored"),
    ],
)
def test_what_cannot_be_said_is_refused(place, how, message):
    task = paying(place)
    die(place, task, 7)
    with pytest.raises(ResolutionError, match=message):
        resolve(place.app, task.name, **how)


def test_an_execution_that_has_ended_is_not_resolved(place):
    task = paying(place)
    charges.append("already")
    task.delay(7)
    place.deliver_all()
    with pytest.raises(ResolutionError, match="it has ended, succeeded"):
        resolve(place.app, task.name, "rerun", execution_key="invoice:7")


@pytest.mark.parametrize("finder", ["its own trigger", "a later one"])
def test_a_failure_that_is_found_out_is_that_of_the_trigger_whose_run_died_whoever_finds_it(place, finder):
    task = paying(place, reconciler=lambda _: Resolution("failed", reason="the bank has refused"), reconcile_delays=(0,))
    result, message = die(place, task, 7)
    later = task.delay(7)
    messages = [message, *place.messages()]
    for each in messages if finder == "its own trigger" else reversed(messages):
        place.deliver(each)
    come_again(place, result, later)

    with pytest.raises(ResolvedFailed, match="the bank has refused"):
        result.get(timeout=1)
    assert later.get(timeout=1) == "paid 7, 2"


# Failures and payloads


def test_under_keep_a_failure_is_the_outcome_of_later_triggers(place):
    def fail(invoice):
        charges.append(invoice)
        raise KeyError(invoice)

    task = place.task(fail, idempotent_on="invoice:{invoice}", failure_policy="keep")
    results = [task.delay(7) for _ in range(3)]
    place.deliver_all()
    for result in results:
        with pytest.raises(KeyError):
            result.get(timeout=1)
    with pytest.raises(KeyError):
        task(7)
    assert charges == [7]


def test_under_keep_the_failure_of_a_direct_call_is_too(place):
    def fail(invoice):
        charges.append(invoice)
        raise KeyError(invoice)

    task = place.task(fail, idempotent_on="invoice:{invoice}", failure_policy="keep")
    for _ in range(2):
        with pytest.raises(KeyError):
            task(7)
    result = task.delay(7)
    place.deliver_all()
    with pytest.raises(KeyError):
        result.get(timeout=1)
    assert charges == [7]


@pytest.mark.parametrize("ending", [Retry("later"), Ignore("not mine"), Reject("not here")])
def test_under_keep_what_a_direct_call_says_to_celery_is_no_failure_of_later_triggers(place, ending):
    def charge(invoice):
        charges.append(invoice)
        if len(charges) == 1:
            raise ending
        return "paid"

    task = place.task(charge, idempotent_on="invoice:{invoice}", failure_policy="keep")
    with pytest.raises(type(ending)):
        task(7)
    result = task.delay(7)
    place.deliver_all()
    assert result.get(timeout=1) == "paid"


def note(invoice, amount):
    charges.append((invoice, amount))
    return amount


def test_a_key_with_another_payload_is_an_error_and_no_hit(place):
    task = place.task(note, idempotent_on="invoice:{invoice}", lock_on=("amount",))
    first, same, other = task.delay(7, 10), task.delay(7, amount=10), task.delay(7, 11)
    place.deliver_all()
    assert (first.get(), same.get()) == (10, 10)
    with pytest.raises(PayloadMismatch):
        other.get(timeout=1)
    assert charges == [(7, 10)]


@pytest.mark.parametrize(("payload_on", "is_same"), [((), True), (("invoice",), True), ("{amount}", False)])
def test_only_the_named_arguments_are_compared(place, payload_on, is_same):
    task = place.task(note, idempotent_on="invoice:{invoice}", payload_on=payload_on)
    task.delay(7, 10)
    other = task.delay(7, 11)
    place.deliver_all()
    assert (other.state == states.SUCCESS) is is_same
    assert charges == [(7, 10)]


def test_a_retry_may_change_the_arguments_of_its_own_trigger(place):
    def work(self, invoice, amount):
        charges.append((invoice, amount))
        if amount < 12:
            raise self.retry(args=(invoice, amount + 1), countdown=0)
        return amount

    task = place.task(work, bind=True, idempotent_on="invoice:{invoice}")
    result = task.delay(7, 10)
    place.deliver_all()
    assert result.get(timeout=1) == 12


def test_arguments_that_have_no_canonical_form_are_not_compared(place):
    def note_one(invoice, thing):
        charges.append(invoice)
        return invoice if thing else None

    task = place.task(note_one, idempotent_on="{invoice}", lock_on=())
    assert (task(7, object()), task(7, object())) == (7, 7)
    assert charges == [7]
