"""`self.step`: done once over all attempts of an execution, its result at hand in the later ones."""

from __future__ import annotations

import pickle

import pytest
from celery import states
from celery.exceptions import SoftTimeLimitExceeded

from celery_singleflight import (
    LeaseLost,
    PayloadChanged,
    PayloadMismatch,
    SingleflightError,
    StepError,
    StepResultUnavailable,
    StepUncertain,
    StoreUnavailable,
    current_step,
    forget_steps,
    replay,
    resolve_step,
)
from celery_singleflight.coordination import coordination
from celery_singleflight.inspection import inspecting


class Effects:
    """What has been done, in order."""

    def __init__(self):
        self.done = []

    def __call__(self, what, result=None):
        self.done.append(what)
        return result


@pytest.fixture
def effects():
    return Effects()


@pytest.fixture
def run(place):
    """Send a task, and deliver its message so often; an attempt may end with SystemExit, as that of a process that dies."""

    def run(task, *args, attempts=1, **options):
        result = task.apply_async(args, **options)
        (message,) = place.messages()
        for _ in range(attempts - 1):
            with pytest.raises(SystemExit):
                place.deliver(message)
        place.deliver(message)
        return result

    return run


def nothing():
    """A body."""


def steps_of(place):
    """The states of the steps that the store keeps."""
    (name,) = place.client.keys("*:steps:*")
    lines = place.client.hgetall(name)
    return {field[5:]: line.partition("\n")[0] for field, line in lines.items() if field.startswith("step:")}


def test_a_step_returns_what_its_function_returns(place, run, effects):
    def work(self):
        return self.step("one", effects, "one", result=(1, 2))

    assert run(place.task(work, bind=True)).get() == [1, 2]
    assert effects.done == ["one"]


def test_the_next_attempt_gets_the_stored_result_and_does_not_do_it_again(place, run, effects):
    def work(self):
        first = self.step("first", effects, "first", result={"id": 7})
        if self.execution.attempt == 1:
            raise SystemExit
        return first, self.step("second", effects, "second", result=None), self.execution.attempt

    assert run(place.task(work, bind=True), attempts=2).get() == [{"id": 7}, None, 2]
    assert effects.done == ["first", "second"]


@pytest.mark.parametrize("value", [None, 0, "", False, [], {}])
def test_a_result_that_is_nothing_is_a_result(place, run, effects, value):
    def work(self):
        found = self.step("once", effects, "once", result=value)
        if self.execution.attempt == 1:
            raise SystemExit
        return [found]

    assert run(place.task(work, bind=True), attempts=2).get() == [value]
    assert effects.done == ["once"]


def test_an_own_retry_is_a_later_attempt(place, effects):
    def work(self):
        done = self.step("once", effects, "once", result=self.request.retries)
        if self.request.retries == 0:
            raise self.retry(countdown=0)
        return done

    assert place.result_of(place.task(work, bind=True).delay()) == 0
    assert effects.done == ["once"]


def test_what_an_execution_has_done_is_forgotten_when_it_has_succeeded(place, run, effects):
    def work(self):
        self.step("once", effects, "once")

    run(place.task(work, bind=True)).get()
    assert place.client.keys("*:steps:*") == []


@pytest.mark.parametrize("error", [StoreUnavailable("away"), SoftTimeLimitExceeded()])
def test_a_success_whose_steps_cannot_be_forgotten_is_one_all_the_same(place, run, effects, monkeypatch, error):
    def work(self):
        return self.step("once", effects, "once", result=1)

    def fail(*_):
        raise error

    monkeypatch.setattr(type(place.store), "forget_steps", fail)
    assert run(place.task(work, bind=True)).get() == 1
    (name,) = place.client.keys("*:steps:*")
    assert place.client.ttl(name) > 86_000, "it expires"


def test_a_run_without_steps_asks_the_store_nothing_more(place, run, monkeypatch):
    asked = []
    store = place.store
    real = store._run
    monkeypatch.setattr(type(store), "_run", lambda _, script, *named: asked.append(script.name) or real(script, *named))

    run(place.task(nothing))
    assert asked == ["enter", "finish"]


def test_a_step_costs_a_call_to_begin_and_one_to_record(place, run, effects, monkeypatch):
    def work(self):
        self.step("one", effects, "one")
        self.step("two", effects, "two")

    asked = []
    store = place.store
    real = store._run
    monkeypatch.setattr(type(store), "_run", lambda _, script, *named: asked.append(script.name) or real(script, *named))
    run(place.task(work, bind=True))
    assert asked == ["enter", *["begin_step", "record_step"] * 2, "finish", "forget_steps"]


# Names.


def test_a_step_within_a_step_has_the_names_of_both(place, run, effects):
    def outer(task):
        effects("outer")
        task.step("inner", effects, "inner")
        if task.execution.attempt == 1:
            raise SystemExit

    def work(self):
        self.step("outer", outer, self)
        self.step("inner", effects, "another inner")
        return sorted(steps_of(place))

    assert run(place.task(work, bind=True), attempts=2).get() == ["inner", "outer", "outer/inner"]
    assert effects.done == ["outer", "inner", "outer", "another inner"]


def test_a_separator_in_a_name_cannot_be_taken_for_nesting(place, run, effects):
    def work(self):
        self.step("a/b", effects, "a/b")
        self.step("a", self.step, "b", effects, "b in a")

    run(place.task(work, bind=True)).get()
    assert effects.done == ["a/b", "b in a"]


def test_the_same_name_twice_in_a_run_is_an_error_that_says_what_was_expected(place, run, effects):
    def work(self):
        for part in range(2):
            self.step("mail", effects, part)

    with pytest.raises(StepError, match=r"has had a step named mail already; expected a name of its own .* 'mail\[1\]'"):
        run(place.task(work, bind=True)).get()
    assert effects.done == [0]


@pytest.mark.parametrize("name", ["", " ", None, 5])
def test_a_step_needs_a_name(place, run, effects, name):
    def work(self):
        self.step(name, effects, "x")

    with pytest.raises(StepError, match="expected a name for the step"):
        run(place.task(work, bind=True)).get()
    assert effects.done == []


def test_arguments_of_any_name_reach_the_function(place, run):
    def work(self):
        return self.step("once", lambda **given: given, name="x", function="y", self=1)

    assert run(place.task(work, bind=True)).get() == {"name": "x", "function": "y", "self": 1}


# Failures and interruptions.


def test_a_step_that_raises_may_be_tried_again_in_the_same_run(place, run, effects):
    def fail_once():
        effects("tried")
        if len(effects.done) == 1:
            raise ValueError("once")
        return current_step().attempt

    def work(self):
        with pytest.raises(ValueError, match="once"):
            self.step("once", fail_once)
        assert steps_of(place) == {"once": "failed"}
        return self.step("once", fail_once)

    assert run(place.task(work, bind=True)).get() == 2
    assert effects.done == ["tried", "tried"]


@pytest.mark.parametrize("interruption", [SystemExit, KeyboardInterrupt, SoftTimeLimitExceeded, LeaseLost])
def test_an_interrupted_step_stays_begun(place, run, interruption):
    def interrupted():
        raise interruption

    def work(self):
        with pytest.raises(interruption):
            self.step("once", interrupted)
        return steps_of(place)

    assert run(place.task(work, bind=True)).get() == {"once": "begun"}


def test_an_uncertain_step_is_done_again_and_can_tell(place, run, effects, caplog):
    seen = []

    def once():
        seen.append(current_step())
        if len(seen) == 1:
            raise SystemExit
        return "done"

    def work(self):
        return self.step("charge", once), self.request.id

    done, task_id = run(place.task(work, bind=True), attempts=2).get()
    assert done == "done"
    assert [(step.name, step.key, step.attempt, step.is_unsure) for step in seen] == [
        ("charge", f"{task_id}/charge", 1, False),
        ("charge", f"{task_id}/charge", 2, True),
    ]
    assert "step charge of" in caplog.text
    assert "is done again, for the 2. time" in caplog.text
    assert current_step() is None


def dying(effects, name="charge"):
    """A body whose first attempt dies in the step."""

    def once():
        effects("tried")
        if len(effects.done) == 1:
            raise SystemExit
        return "done"

    def work(self, key="k"):
        return [self.step(name, once), key]

    return work


def test_under_hold_an_uncertain_step_raises_until_it_is_resolved(place, run, effects):
    task = place.task(dying(effects), bind=True, uncertain_policy="hold")
    result = run(task, attempts=2)
    with pytest.raises(
        StepUncertain, match=r"step charge of execution .* was begun by w1@test .* say so with resolve_step"
    ) as held:
        result.get()
    assert (held.value.step, held.value.execution_key, held.value.attempt) == ("charge", result.id, 1)
    assert effects.done == ["tried"]

    resolve_step(place.app, task.name, "charge", task_id=result.id, happened=True, result="it was charged")
    again = task.apply_async(task_id=result.id)
    place.deliver_all()
    assert again.get(timeout=1) == ["it was charged", "k"]
    assert effects.done == ["tried"]


def test_a_step_that_did_not_happen_is_done(place, run, effects):
    task = place.task(dying(effects), bind=True, uncertain_policy="hold")
    result = run(task, attempts=2)
    resolve_step(place.app, task.name, "charge", task_id=result.id, happened=False)
    again = task.apply_async(task_id=result.id)
    place.deliver_all()
    assert again.get(timeout=1) == ["done", "k"]
    assert effects.done == ["tried", "tried"]


@pytest.mark.parametrize("happened", [True, False])
def test_with_an_explicit_key_a_later_trigger_goes_on(place, run, effects, happened):
    task = place.task(dying(effects), bind=True, uncertain_policy="hold", idempotent_on="pay:{key}")
    assert run(task, "k", attempts=2).state == states.FAILURE
    assert run(task, "k").state == states.FAILURE, "it is held for other triggers too"
    assert effects.done == ["tried"]

    resolve_step(place.app, task.name, "charge", execution_key="pay:k", happened=happened, result="charged")
    assert run(task, "k").get() == ["charged" if happened else "done", "k"]
    assert effects.done == ["tried"] * (1 if happened else 2)
    assert place.client.keys("*:steps:*") == []


def test_under_hold_the_retries_of_a_trigger_meet_it_until_it_is_resolved(place, run, effects):
    task = place.task(
        dying(effects),
        bind=True,
        uncertain_policy="hold",
        autoretry_for=(StepUncertain,),
        default_retry_delay=0,
        max_retries=None,
    )
    result = run(task, attempts=2)
    for _ in range(3):
        (message,) = place.messages()
        place.deliver(message)
    assert effects.done == ["tried"]
    resolve_step(place.app, task.name, "charge", task_id=result.id, happened=True, result="charged")
    assert place.result_of(result) == ["charged", "k"]


def test_only_an_uncertain_step_can_be_resolved(place, run, effects):
    def work(self):
        self.step("done", effects, "done")
        with pytest.raises(StepError, match=f"step now of execution {self.request.id} of .*: w1@test is at it"):
            self.step("now", resolve_step, self.app, self.name, "now", task_id=self.request.id, happened=True)
        for name, what in {"done": "it is done", "never": "there is none"}.items():
            with pytest.raises(StepError, match=f"expected one that was begun and not recorded; {what}"):
                resolve_step(self.app, self.name, name, task_id=self.request.id, happened=True)
        with pytest.raises(StepError, match="its result cannot be stored"):
            resolve_step(self.app, self.name, "done", task_id=self.request.id, happened=True, result=object())
        return "checked"

    task = place.task(work, bind=True)
    assert run(task).get() == "checked"
    with pytest.raises(StepError, match="expected either a task_id or an execution_key"):
        resolve_step(place.app, task.name, "done", happened=True)


def test_a_result_that_does_not_serialise_is_an_error_and_the_step_is_done(place, run, effects):
    def work(self):
        with pytest.raises(
            StepResultUnavailable, match=r"step odd .* will not be done again, but its result is not stored: object"
        ):
            self.step("odd", effects, "odd", result=object())
        assert steps_of(place) == {"odd": "done"}
        if self.execution.attempt == 1:
            raise SystemExit
        return "checked"

    assert run(place.task(work, bind=True), attempts=2).get() == "checked"
    assert effects.done == ["odd"]


def test_a_step_without_its_result_can_be_given_one(place, run, effects):
    def work(self):
        if self.execution.attempt > 1:
            resolve_step(self.app, self.name, "odd", task_id=self.request.id, happened=True, result="even")
        try:
            return self.step("odd", effects, "odd", result=object())
        except StepResultUnavailable:
            raise SystemExit from None

    assert run(place.task(work, bind=True), attempts=2).get() == "even"
    assert effects.done == ["odd"]


# Whose steps they are.


def test_a_run_that_was_overtaken_cannot_begin_or_record_a_step(place, effects):
    refused = []

    def work(self, key):
        def overtaken():
            place.take_away(place.lock_key(self.name, "k"))
            return effects("done")

        for name, function in {"first": overtaken, "second": effects}.items():
            try:
                self.step(name, function)
            except LeaseLost as lost:
                refused.append(lost.reason)
                continue
        assert steps_of(place) == {"first": "begun"}
        return "checked"

    task = place.task(work, bind=True, lock_on=("key",))
    task.apply_async(("k",))
    (message,) = place.messages()
    place.deliver(message)
    assert refused == ["it was taken over", "it was taken over"]
    assert effects.done == ["done"]


def test_other_arguments_in_a_later_attempt_are_an_error(place, effects):
    def work(self, amount):
        self.step("charge", effects, amount)
        raise self.retry(args=(amount + 1,), countdown=0)

    task = place.task(work, bind=True, lock_on=())
    with pytest.raises(
        PayloadChanged, match=r"step charge of execution .* with other arguments .* begin anew after forget_steps"
    ):
        place.result_of(task.delay(1))
    assert effects.done == [1]


def test_the_same_arguments_given_by_name_are_the_same(place, effects):
    def work(self, amount, currency="EUR"):
        self.step("charge", effects, amount)
        if self.request.retries == 0:
            raise self.retry(args=(), kwargs={"currency": "EUR", "amount": amount}, countdown=0)
        return "done"

    assert place.result_of(place.task(work, bind=True).delay(1)) == "done"
    assert effects.done == [1]


def test_what_is_forgotten_begins_anew(place, run, effects):
    def work(self):
        self.step("once", effects, self.execution.attempt)
        if self.execution.attempt == 1:
            assert forget_steps(self.app, self.name, task_id=self.request.id)
            assert not forget_steps(self.app, self.name, task_id=self.request.id)
            raise SystemExit

    run(place.task(work, bind=True), attempts=2)
    assert effects.done == [1, 2]


@pytest.mark.parametrize("failure_policy", ["forget", "keep"])
def test_after_a_failure_what_was_done_under_an_execution_key_is_not_done_again(place, run, effects, failure_policy):
    def work(self, key):
        self.step("charge", effects, self.request.id)
        if len(attempts) < 2:
            attempts.append(self.execution.run_id)
            raise ValueError(key)
        return self.execution.run_id

    attempts = []
    task = place.task(work, bind=True, idempotent_on="pay:{key}", failure_policy=failure_policy)
    first = run(task, "k")
    assert first.state == states.FAILURE
    if failure_policy == "forget":
        assert run(task, "k").state == states.FAILURE
        assert run(task, "k").get() == attempts[0]
        assert set(attempts) == {attempts[0]}
        assert run(task, "k").get() == attempts[0], "which is the result"
    else:
        assert run(task, "k").state == states.FAILURE
        coordination(place.app).heartbeat.flush()
        replay(place.app, first.id, task=task.name, execution_key="pay:k")
        place.deliver_all()
        assert attempts == [attempts[0]] * 2
    assert effects.done == [first.id]


@pytest.mark.parametrize("answers", [[SoftTimeLimitExceeded()], [SoftTimeLimitExceeded(), StoreUnavailable("away")]])
def test_a_time_limit_that_falls_in_before_the_steps_are_known_ends_none_of_them(place, run, effects, monkeypatch, answers):
    def work(self, key):
        self.step("charge", effects, key)
        if not attempts:
            attempts.append(key)
            raise ValueError(key)
        return "done"

    def find_ending(*asked):
        if answers:
            raise answers.pop(0)
        return real(*asked)

    attempts = []
    task = place.task(work, bind=True, idempotent_on="pay:{key}")
    assert isinstance(run(task, "k").result, ValueError)
    answers = list(answers)
    real = type(place.store).find_ending
    monkeypatch.setattr(type(place.store), "find_ending", find_ending)
    assert isinstance(run(task, "k").result, SoftTimeLimitExceeded)
    assert run(task, "k").get() == "done"
    assert effects.done == ["k"]


def test_a_direct_call_goes_on_behind_what_another_has_done(place, effects):
    def work(self, key):
        self.step("charge", effects, key)
        if len(effects.done) == 1 and not attempts:
            attempts.append(key)
            raise ValueError(key)
        return "done"

    attempts = []
    task = place.task(work, bind=True, idempotent_on="pay:{key}")
    with pytest.raises(ValueError, match="k"):
        task("k")
    with inspecting(place.app) as inspection:
        found = inspection.explain("pay:k", is_execution_key=True, limit=1)
    assert found.triggers[0].state == "left"
    assert "the next trigger with its execution key goes on from there" in found.why
    assert task("k") == "done"
    assert effects.done == ["k"]


def test_after_a_failure_other_arguments_do_not_go_on_with_it(place, run, effects):
    def work(self, key, amount):
        self.step("charge", effects, amount)
        raise ValueError(key)

    task = place.task(work, bind=True, idempotent_on="pay:{key}")
    assert isinstance(run(task, "k", 1).result, ValueError)
    assert isinstance(run(task, "k", 2).result, PayloadMismatch)
    assert effects.done == [1]


@pytest.mark.parametrize("kind", ["step", "step with an undo", "cursor"])
def test_after_a_retry_that_failed_of_its_other_arguments_those_that_something_was_done_with_go_on(place, effects, kind):
    def work(self, key, amount):
        if kind == "cursor":
            cursor = self.cursor("page")
            if cursor.get() is None:
                effects(amount)
                cursor.set(amount)
        else:
            self.step("charge", effects, amount, compensate=nothing if kind == "step with an undo" else None)
        if not attempts:
            attempts.append(amount)
            raise self.retry(args=(key, amount + 1), countdown=0)
        return "done"

    attempts = []
    task = place.task(work, bind=True, idempotent_on="pay:{key}")
    results = []
    for amount in (1, 2, 1):
        results.append(task.delay("k", amount))
        place.deliver_all()
    assert [type(result.result) for result in results] == [PayloadChanged, PayloadMismatch, str]
    assert effects.done == [1]


def test_other_arguments_begin_anew_once_what_a_failure_has_left_is_forgotten(place, run, effects):
    def work(self, key, amount):
        self.step("charge", effects, amount)
        if amount < 2:
            raise ValueError(key)
        return amount

    task = place.task(work, bind=True, idempotent_on="pay:{key}")
    assert isinstance(run(task, "k", 1).result, ValueError)
    assert forget_steps(place.app, task.name, execution_key="pay:k")
    assert run(task, "k", 2).get() == 2
    assert isinstance(run(task, "k", 1).result, PayloadMismatch), "a result answers for its own arguments only"
    assert effects.done == [1, 2]


def test_what_is_forgotten_during_a_run_leaves_its_execution_to_its_arguments(place, run, effects):
    def work(self, key, amount, fails):
        self.step("charge", effects, amount)
        assert forget_steps(self.app, self.name, execution_key=self.execution.key)
        if fails:
            raise ValueError(key)
        return amount

    task = place.task(work, bind=True, idempotent_on="pay:{key}", payload_on=("amount",))
    assert isinstance(run(task, "k", 1, True).result, ValueError)
    assert isinstance(run(task, "k", 2, False).result, PayloadMismatch)
    assert run(task, "k", 1, False).get() == 1
    assert isinstance(run(task, "k", 2, False).result, PayloadMismatch)
    assert effects.done == [1, 1]


# Without a message.


def test_eager_runs_have_steps_and_their_retries_go_on(place, effects):
    def work(self):
        self.step("once", effects, "once")
        if self.request.retries == 0:
            raise self.retry()
        return "done"

    assert place.task(work, bind=True).apply().get() == "done"
    assert effects.done == ["once"]


def test_direct_calls_have_steps(place, effects):
    def work(self):
        return self.step("once", effects, "once", result=1)

    assert place.task(work, bind=True)() == 1
    assert effects.done == ["once"]
    assert place.client.keys("*:steps:*") == []


def test_a_task_called_within_anothers_run_has_steps_of_its_own_name(place, run, effects):
    def inner(self, key):
        return self.step("once", effects, "inner", result="inner")

    def outer(self, key):
        return [self.step("once", effects, "outer", result="outer"), inner_task(key)]

    inner_task = place.task(inner, bind=True, lock_on=("key",), lock_name="shared")
    assert run(place.task(outer, bind=True, lock_on=("key",), lock_name="shared"), "k").get() == ["outer", "inner"]
    assert effects.done == ["outer", "inner"]


def test_outside_of_a_run_there_are_no_steps(place, effects):
    task = place.task(nothing)
    for use in (lambda: task.step("once", effects, "x"), lambda: task.cursor("c"), lambda: task.checkpoint([])):
        with pytest.raises(SingleflightError, match="has a lease only while its body runs, in the thread that runs it"):
            use()
    assert effects.done == []


def test_a_run_without_its_store_has_no_steps(place, run, effects, monkeypatch):
    def work(self):
        with pytest.raises(StoreUnavailable, match="runs without a lease"):
            self.step("once", effects, "x")
        return "checked"

    def away(*_):
        raise StoreUnavailable("away")

    monkeypatch.setattr(type(place.store), "enter", away)
    assert run(place.task(work, bind=True, store_error_policy="run")).get() == "checked"
    assert effects.done == []


def test_a_step_is_recorded_when_the_store_is_back(place, run, effects, monkeypatch):
    def work(self):
        return self.step("once", effects, "once", result=1)

    away = iter([StoreUnavailable("away")] * 2)
    store = type(place.store)
    for name in ("begin_step", "record_step"):
        real = getattr(store, name)

        def flaky(self, *given, real=real):
            for error in away:
                raise error
            return real(self, *given)

        monkeypatch.setattr(store, name, flaky)
    monkeypatch.setattr("celery_singleflight.steps._PAUSE", 0.0)
    assert run(place.task(work, bind=True)).get() == 1
    assert effects.done == ["once"]


@pytest.mark.parametrize(
    ("at", "done", "state"), [("begin_step", [], "failed"), ("record_step", ["once"], "done")], ids=["begin", "record"]
)
def test_an_interruption_that_falls_into_a_write_comes_after_it(place, run, effects, monkeypatch, at, done, state):
    def work(self):
        with pytest.raises(SoftTimeLimitExceeded):
            self.step("once", effects, "once")
        return steps_of(place)

    limits, store = iter([SoftTimeLimitExceeded()]), type(place.store)
    real = getattr(store, at)

    def late(self, *given):
        for limit in limits:
            raise limit
        return real(self, *given)

    monkeypatch.setattr(store, at, late)
    assert run(place.task(work, bind=True)).get() == {"once": state}
    assert effects.done == done


@pytest.mark.parametrize(
    ("error", "what", "hint"),
    [
        (
            StepUncertain("invoice:42", "charge", 2, "w1@host", 3.21),
            "step charge of execution invoice:42 was begun by w1@host 3.2 s ago and not recorded",
            "find out whether it happened, and say so with resolve_step",
        ),
        (
            StepResultUnavailable("invoice:42", "charge", "too odd"),
            "step charge of execution invoice:42 is done and will not be done again, but its result is not stored: too odd",
            "have it return what can be stored, or give it its result with resolve_step",
        ),
        (
            PayloadChanged("invoice:42", "step charge"),
            "step charge of execution invoice:42 was reached with other arguments of the task",
            "give other arguments an execution key of their own, give a checkpoint or cursor an on_change, or begin anew",
        ),
        (StepError("expected something else"), "expected something else", ""),
    ],
)
def test_an_error_of_steps_says_what_to_do_and_survives_pickling(error, what, hint):
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.args, vars(again)) == (type(error), error.args, vars(error))
    assert str(again) == str(error)
    assert what in str(error)
    assert hint in str(error)
    assert isinstance(error, SingleflightError)
