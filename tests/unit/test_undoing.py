"""`compensate=`: when an execution fails for good its steps are undone, the last one first, once each."""

from __future__ import annotations

import pytest
from celery import states
from celery.exceptions import SoftTimeLimitExceeded

from celery_singleflight import (
    LeaseLost,
    PayloadChanged,
    PayloadMismatch,
    SingleflightTask,
    StepError,
    StepUncertain,
    resolve_step,
)
from celery_singleflight.errors import Replaced

#: What was done and undone, in order. Undos are found by name, so they cannot be made in a test.
log: list[str] = []
#: Errors that the undo of a step of that result raises, once.
trouble: dict[str, BaseException] = {}


@pytest.fixture(autouse=True)
def _fresh():
    log.clear()
    trouble.clear()


def do(what):
    log.append(f"do {what}")
    return what


def undo(result):
    log.append(f"undo {result}")
    if result in trouble:
        raise trouble.pop(result)


def saga(self, key="k"):
    """Two steps, then the end that `trouble` has for the body."""
    for what in ("one", "two"):
        self.step(what, do, what, compensate=undo)
    if "body" in trouble:
        log.append("body")
        raise trouble["body"]
    return "done"


def notes_of(place):
    """State and note of each step that the store keeps."""
    (name,) = place.client.keys("*:steps:*")
    lines = {field: line.split("\n") for field, line in place.client.hgetall(name).items()}
    return {field[5:]: (line[0], line[8]) for field, line in lines.items() if field.startswith("step:")}


@pytest.fixture
def attempts(place):
    """Send a task, and deliver its message until an attempt ends otherwise than a process that dies."""

    def attempts(task, *args, at_most=9, **options):
        result = task.apply_async(args, **options)
        (message,) = place.messages()
        for _ in range(at_most):
            try:
                place.deliver(message)
            except SystemExit:
                continue
            return result
        raise AssertionError("it never ended")

    return attempts


def test_a_failure_undoes_what_was_done_the_last_first(place, attempts):
    trouble["body"] = ValueError("too bad")
    result = attempts(place.task(saga, bind=True))
    assert log == ["do one", "do two", "body", "undo two", "undo one"]
    assert isinstance(result.result, ValueError)
    assert notes_of(place) == {"one": ("undone", ""), "two": ("undone", "")}


def test_a_success_undoes_nothing(place, attempts):
    assert attempts(place.task(saga, bind=True)).get() == "done"
    assert log == ["do one", "do two"]


def test_a_retry_undoes_nothing_and_the_failure_after_it_everything(place):
    def work(self):
        self.step("one", do, "one", compensate=undo)
        log.append("body")
        raise self.retry(exc=ValueError("in the end"), countdown=0)

    result = place.task(work, bind=True, max_retries=2).delay()
    with pytest.raises(ValueError, match="in the end"):
        place.result_of(result)
    assert log == ["do one", "body", "body", "body", "undo one"]


def test_a_failure_before_the_first_step_undoes_what_an_earlier_attempt_did(place, attempts):
    def work(self):
        if self.execution.attempt > 1:
            raise ValueError
        self.step("one", do, "one", compensate=undo)
        raise SystemExit

    assert attempts(place.task(work, bind=True)).state == states.FAILURE
    assert log == ["do one", "undo one"]


def test_a_step_without_an_undo_and_one_that_failed_are_not_undone(place, attempts):
    def fail():
        raise ValueError

    def work(self):
        self.step("one", do, "one")
        self.step("two", fail, compensate=undo)

    assert attempts(place.task(work, bind=True)).state == states.FAILURE
    assert log == ["do one"]


def test_an_undo_that_raises_is_logged_and_noted_and_the_others_still_run(place, attempts, caplog):
    trouble.update({"body": ValueError("too bad"), "two": OSError("no way back")})
    result = attempts(place.task(saga, bind=True))
    assert isinstance(result.result, ValueError), "the failure stays"
    assert log == ["do one", "do two", "body", "undo two", "undo one"]
    notes = notes_of(place)
    assert notes["one"] == ("undone", "")
    assert notes["two"][0] == "undo failed"
    assert notes["two"][1].startswith("OSError at test_undoing.py:")
    assert "step two of" in caplog.text
    assert notes["two"][1] in caplog.text
    assert "no way back" not in caplog.text, "an error may hold a user's value"


def test_a_death_between_undos_leaves_the_rest_to_the_next_attempt_which_does_not_call_the_body(place, attempts, monkeypatch):
    trouble["body"] = ValueError("too bad")
    store = type(place.store)
    real = store.undo_step

    def die_once(self, *given, undone="", **more):
        found = real(self, *given, undone=undone, **more)
        if undone == "two":  # it is noted; the undo of the next is not yet called
            monkeypatch.setattr(store, "undo_step", real)
            raise SystemExit
        return found

    monkeypatch.setattr(store, "undo_step", die_once)
    result = attempts(place.task(saga, bind=True))
    assert log == ["do one", "do two", "body", "undo two", "undo one"]
    with pytest.raises(ValueError, match="too bad"):
        result.get()


def test_an_undo_in_which_the_process_dies_is_called_again(place, attempts, caplog):
    trouble.update({"body": ValueError("too bad"), "two": SystemExit()})
    result = attempts(place.task(saga, bind=True))
    assert log == ["do one", "do two", "body", "undo two", "undo two", "undo one"]
    assert isinstance(result.result, ValueError)
    assert "was begun before and not recorded: it is called again" in caplog.text


def test_under_hold_an_undo_in_which_the_process_dies_is_left_alone(place, attempts):
    trouble.update({"body": ValueError("too bad"), "two": SystemExit()})
    result = attempts(place.task(saga, bind=True, uncertain_policy="hold"))
    assert log == ["do one", "do two", "body", "undo two", "undo one"]
    assert isinstance(result.result, ValueError)
    assert notes_of(place) == {"one": ("undone", ""), "two": ("undo uncertain", "")}


def test_a_death_after_the_last_undo_ends_in_the_same_failure(place, attempts, monkeypatch):
    trouble["body"] = ValueError("too bad")

    def die(*_, **__):
        raise SystemExit

    monkeypatch.setattr("celery_singleflight.concluding.finish", die)
    task = place.task(saga, bind=True)
    result = task.delay()
    (message,) = place.messages()
    with pytest.raises(SystemExit):
        place.deliver(message)
    monkeypatch.undo()
    place.deliver(message)
    assert log == ["do one", "do two", "body", "undo two", "undo one"]
    with pytest.raises(ValueError, match="too bad"):
        result.get()


@pytest.mark.parametrize("undone", ["", "two", "one"])
def test_a_soft_time_limit_that_falls_between_undos_stops_none_of_them(place, attempts, monkeypatch, undone):
    trouble["body"] = ValueError("too bad")
    store = type(place.store)
    real = store.undo_step
    limits = iter([SoftTimeLimitExceeded()])

    def late(self, *given, **told):
        if told.get("undone", "") == undone:
            for limit in limits:
                raise limit
        return real(self, *given, **told)

    monkeypatch.setattr(store, "undo_step", late)
    result = attempts(place.task(saga, bind=True))
    assert next(limits, None) is None, "it fell"
    assert log == ["do one", "do two", "body", "undo two", "undo one"]
    assert isinstance(result.result, ValueError)


def test_a_soft_time_limit_that_falls_into_an_undo_is_its_failure(place, attempts):
    trouble.update({"body": ValueError("too bad"), "two": SoftTimeLimitExceeded()})
    assert isinstance(attempts(place.task(saga, bind=True)).result, ValueError)
    assert log == ["do one", "do two", "body", "undo two", "undo one"]
    assert notes_of(place)["two"][0] == "undo failed"


def test_a_step_whose_result_is_not_stored_cannot_be_undone_and_says_so(place, attempts):
    def odd():
        log.append("do odd")
        return object()

    def work(self):
        self.step("one", do, "one", compensate=undo)
        self.step("odd", odd, compensate=undo)

    assert attempts(place.task(work, bind=True)).state == states.FAILURE
    assert log == ["do one", "do odd", "undo one"]
    state, note = notes_of(place)["odd"]
    assert state == "undo failed"
    assert "its result is not stored: object does not serialise as json" in note


def test_an_execution_that_is_held_is_not_undone(place, attempts):
    def once():
        log.append("tried")
        raise SystemExit

    def work(self):
        self.step("one", do, "one", compensate=undo)
        self.step("two", once, compensate=undo)
        raise ValueError("after it was resolved")

    task = place.task(work, bind=True, uncertain_policy="hold")
    result = attempts(task)
    assert isinstance(result.result, StepUncertain)
    assert log == ["do one", "tried"]
    resolve_step(place.app, task.name, "two", task_id=result.id, happened=True, result="two")
    assert attempts(task, task_id=result.id).state == states.FAILURE
    assert log == ["do one", "tried", "undo two", "undo one"], "what was resolved as done is undone too"


def test_under_an_execution_key_a_charge_stands_when_the_step_with_an_undo_was_never_done(place, attempts):
    def ship():
        if trouble:
            raise trouble.pop("ship")
        return do("ship")

    def work(self):
        self.step("charge", do, "charge")
        self.step("ship", ship, compensate=undo)
        return "shipped"

    trouble["ship"] = OSError("no parcel")
    task = place.task(work, bind=True, idempotent_on=lambda: "order:1")
    assert isinstance(attempts(task).result, OSError)
    assert attempts(task).get() == "shipped"
    assert log == ["do charge", "do ship"], "nothing was undone"


def test_under_an_execution_key_all_begins_anew_when_a_step_was_undone(place, attempts):
    trouble["body"] = ValueError("too bad")
    task = place.task(saga, bind=True, idempotent_on=lambda key="k": f"order:{key}")
    assert isinstance(attempts(task).result, ValueError)
    trouble.clear()
    assert attempts(task).get() == "done"
    assert log == ["do one", "do two", "body", "undo two", "undo one", "do one", "do two"]


def test_a_trigger_with_other_arguments_fails_and_the_one_whose_steps_they_are_goes_on(place):
    def work(self, amount):
        self.step("one", do, f"one {amount}", compensate=undo)
        for death in deaths:
            raise death
        self.step("two", do, "two", compensate=undo)
        return amount

    deaths = iter([SystemExit])
    task = place.task(work, bind=True, lock_on=(), idempotent_on=lambda amount: f"the same {amount > 0}")
    first = task.delay(1)
    (message,) = place.messages()
    with pytest.raises(SystemExit):
        place.deliver(message)
    second = task.delay(2)
    place.deliver_all()
    assert isinstance(second.result, PayloadMismatch)
    assert log == ["do one 1"], "nothing of the first trigger's is undone"
    place.deliver(message)
    assert first.get() == 1
    assert log == ["do one 1", "do two"]


def test_a_retry_with_other_arguments_fails_and_is_undone(place):
    def work(self, amount):
        self.step("one", do, f"one {amount}", compensate=undo)
        raise self.retry(args=(amount + 1,), countdown=0)

    with pytest.raises(PayloadChanged):
        place.result_of(place.task(work, bind=True, lock_on=()).delay(1))
    assert log == ["do one 1", "undo one 1"]


def test_a_replaced_run_undoes_what_it_has_done(place, attempts):
    trouble["body"] = Replaced("lock", "another")
    result = attempts(place.task(saga, bind=True))
    assert log == ["do one", "do two", "body", "undo two", "undo one"]
    assert result.state == states.REVOKED


def test_a_run_that_was_overtaken_undoes_nothing(place, attempts):
    def work(self, key):
        self.step("one", do, "one", compensate=undo)
        place.take_away(place.lock_key(self.name, "k"))
        raise ValueError(key)

    attempts(place.task(work, bind=True, lock_on=("key",)), "k")
    assert log == ["do one"]


def test_a_run_that_is_overtaken_within_an_undo_stops_there(place, attempts):
    def work(self, key):
        self.step("one", do, "one", compensate=undo)
        self.step("two", do, key, compensate=undo)
        trouble[key] = LeaseLost(self.lease.lock_key)
        raise ValueError(key)

    attempts(place.task(work, bind=True, lock_on=("key",)), "k")
    assert log == ["do one", "do k", "undo k"]


def test_an_undo_runs_under_the_lease_with_the_execution_at_hand(place, attempts):
    class Refunding(SingleflightTask):
        def refund(self, result):
            self.lease.check()
            log.append(f"refund {result} in attempt {self.execution.attempt} of {self.request.id}")

    def work(self):
        self.step("one", do, "one", compensate=self.refund)
        raise ValueError

    result = attempts(place.task(work, bind=True, base=Refunding))
    assert log == ["do one", f"refund one in attempt 1 of {result.id}"]


def test_another_task_may_be_the_undo(place, attempts):
    def give_back(result):
        log.append(f"task undoes {result}")

    undoing = place.task(give_back, base=SingleflightTask)

    def work(self):
        self.step("one", do, "one", compensate=undoing)
        raise ValueError

    attempts(place.task(work, bind=True))
    assert log == ["do one", "task undoes one"]


@pytest.mark.parametrize("function", [lambda result: result, log.append, "undo", 5])
def test_an_undo_that_another_process_would_not_find_is_refused_before_the_step(place, attempts, function):
    def work(self):
        self.step("one", do, "one", compensate=function)

    result = attempts(place.task(work, bind=True))
    assert isinstance(result.result, StepError)
    assert "expected a function that can be imported, a method of the task, or a task" in str(result.result)
    assert log == []


def test_a_direct_call_that_fails_undoes_what_it_has_done(place):
    trouble["body"] = ValueError("too bad")
    with pytest.raises(ValueError, match="too bad"):
        place.task(saga, bind=True)()
    assert log == ["do one", "do two", "body", "undo two", "undo one"]


def test_an_eager_run_that_fails_undoes_what_it_has_done(place):
    trouble["body"] = ValueError("too bad")
    assert place.task(saga, bind=True).apply().state == states.FAILURE
    assert log == ["do one", "do two", "body", "undo two", "undo one"]
