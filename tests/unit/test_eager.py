"""`apply()` and `task_always_eager`: the same rules, and nobody there who would run it later."""

from __future__ import annotations

import pytest
from celery import Task, chain, chord, group, states

from celery_singleflight import (
    Contended,
    LeaseLost,
    SingleflightTask,
    Skipped,
    WaitTimeout,
    current_execution,
    current_lease,
    lock,
)


def work(key, value=None):
    assert current_lease().remaining > 0
    return value


@pytest.fixture(params=["apply", "always_eager"])
def eager(request, make_place):
    """A place, and how its tasks are called."""
    place = make_place(task_always_eager=request.param == "always_eager", task_store_eager_result=False)

    def call(task, *args, **options):
        return getattr(task, "apply" if request.param == "apply" else "apply_async")(args, **options)

    place.call = call
    return place


@pytest.mark.parametrize("value", [None, 0, "", False, [1], "x"])
def test_a_task_runs_under_its_lease_and_gives_it_back(eager, value):
    task = eager.task(work, lock_on=("key",))
    result = eager.call(task, "k", value)
    assert (result.state, result.get()) == (states.SUCCESS, value)
    assert eager.holders(eager.lock_key(task.name, "k")) == []
    assert eager.messages() == []


def test_contention_raises_at_once_when_it_would_have_to_wait(eager, clock):
    task = eager.task(work, lock_on=("key",), wait_timeout=3600)
    with eager.held_elsewhere(task.name, "k"):
        result = eager.call(task, "k")
        assert result.state == states.FAILURE
        assert type(result.result) is Contended
        with pytest.raises(Contended, match=r"\['k'\]|\[\"k\"\] is held by "):
            result.get()
    assert clock.slept == []
    assert eager.messages() == []


def test_a_rejected_one_raises(eager):
    task = eager.task(work, lock_on=("key",), contention_policy="reject")
    with eager.held_elsewhere(task.name, "k"), pytest.raises(Contended):
        eager.call(task, "k").get()


@pytest.mark.parametrize("skip_as", ["continue", "stop"])
def test_a_skipped_one_gives_its_skip_result(eager, skip_as):
    task = eager.task(
        work, lock_on=("key",), contention_policy="skip", skip_as=skip_as, skip_result={"skipped": True}, max_hold=60
    )
    with eager.held_elsewhere(task.name, "k"):
        assert eager.call(task, "k", 5).get() == {"skipped": True}
    assert eager.call(task, "k", 5).get() == 5


def test_a_skipped_one_may_raise(eager):
    task = eager.task(work, lock_on=("key",), contention_policy="skip", skip_as="raise", max_hold=60)
    with eager.held_elsewhere(task.name, "k"), pytest.raises(Skipped):
        eager.call(task, "k").get()


def test_an_option_of_the_call_wins(eager):
    task = eager.task(work, lock_on=("key",), skip_result="skipped")
    with eager.held_elsewhere(task.name, "k"):
        assert eager.call(task, "k", contention_policy="skip").get() == "skipped"
        with pytest.raises(Contended) as caught:
            eager.call(task, "k", contention_policy="requeue", wait_timeout=0).get()
        assert not isinstance(caught.value, WaitTimeout)


def test_an_error_of_the_body_is_its_result_and_the_lease_is_given_back(eager):
    def fail(key):
        raise OSError("no")

    task = eager.task(fail)
    with pytest.raises(OSError, match="no"):
        eager.call(task, "k").get()
    assert eager.holders(eager.lock_key(task.name, "k")) == []


def test_errors_propagate_where_the_app_says_so(make_place):
    place = make_place(task_always_eager=True, task_eager_propagates=True)
    task = place.task(work, lock_on=("key",))
    with place.held_elsewhere(task.name, "k"), pytest.raises(Contended):
        task.delay("k")


@pytest.mark.parametrize("value", [None, 0, "", False, [1]])
def test_an_execution_key_runs_once_and_its_result_is_given_again(eager, value):
    runs = []

    def pay(invoice, value):
        runs.append(invoice)
        return value

    task = eager.task(pay, idempotent_on="invoice:{invoice}", payload_on=())
    assert [eager.call(task, 42, value).get(), eager.call(task, 42, "other").get()] == [value, value]
    assert runs == [42]
    assert eager.call(task, 43, value, execution_key="invoice:42").get() == value
    assert runs == [42]
    eager.call(task, 43, value)
    assert runs == [42, 43]


def test_a_failed_execution_may_be_run_again(eager):
    runs = []

    def pay(invoice):
        runs.append(current_execution().attempt)
        if len(runs) == 1:
            raise OSError("once")
        return "paid"

    task = eager.task(pay, idempotent_on="invoice:{invoice}")
    assert eager.call(task, 42).state == states.FAILURE
    assert eager.call(task, 42).get() == "paid"
    assert len(runs) == 2


def test_a_retry_runs_again_under_a_new_lease(eager):
    seen = []

    def flaky(self, key):
        seen.append((self.request.retries, self.lease.fencing_token, self.execution.attempt, self.execution.run_id))
        if self.request.retries < 2:
            raise self.retry(countdown=0)
        return "done"

    task = eager.task(flaky, bind=True)
    assert eager.call(task, "k").get() == "done"
    assert [retries for retries, *_ in seen] == [0, 1, 2]
    assert seen[0][1] < seen[1][1] < seen[2][1]


def test_a_retry_of_itself_with_other_arguments_has_their_key(eager):
    seen = []

    def flaky(self, key):
        seen.append(self.lease.lock_key)
        if self.request.retries == 0:
            raise self.retry(args=("other",), countdown=0)
        return key

    task = eager.task(flaky, bind=True)
    assert eager.call(task, "k").get() == "other"
    assert seen == [eager.lock_key(task.name, key).text for key in ("k", "other")]


def test_autoretry_runs_again(eager):
    runs = []

    def flaky(key):
        runs.append(key)
        if len(runs) == 1:
            raise OSError("once")
        return "done"

    task = eager.task(flaky, autoretry_for=(OSError,), default_retry_delay=0)
    assert eager.call(task, "k").get() == "done"
    assert len(runs) == 2


@pytest.mark.parametrize(
    "base",
    [
        Task,
        SingleflightTask,
    ],
)
def test_a_task_that_replaces_itself_ends_with_the_result_of_its_replacement(place, base):
    def count_down(self, n):
        return self.replace(self.app.tasks[self.name].s(n - 1)) if n else "done"

    assert place.task(count_down, bind=True, base=base).apply((2,)).get() == "done"


def test_what_one_task_calls_of_another_has_a_lease_of_its_own(eager):
    def tell(key):
        return current_lease().lock_key

    inner = eager.task(tell)

    def outer(key):
        before = current_lease().lock_key
        inside = eager.call(inner, key).get(disable_sync_subtasks=False)
        assert current_lease().lock_key == before
        return [before, inside]

    task = eager.task(outer)
    assert eager.call(task, "k").get() == [eager.lock_key(name, "k").text for name in (task.name, inner.name)]


def test_a_key_that_is_held_here_is_entered_again(eager):
    task = eager.task(work, lock_on=("key",))
    with lock(eager.app, task.name, "k") as lease:
        assert eager.call(task, "k", 5).get() == 5
        lease.check()
        assert len(eager.holders(lease.key)) == 1


def test_a_lease_that_was_lost_shows_in_the_result(eager):
    def slow(key):
        eager.take_away(current_lease().key)
        return "late"

    task = eager.task(slow)
    with pytest.raises(LeaseLost) as caught:
        eager.call(task, "k").get()
    assert str(caught.value) == f"the lease on {eager.lock_key(task.name, 'k')} is lost: it was taken over"


def test_a_canvas_of_eager_tasks_is_that_of_plain_ones(eager):
    task = eager.task(work, lock_on=("key",))

    def total(values):
        return sum(values)

    add = eager.task(total, base=eager.app.Task)
    apply = "apply_async" if eager.app.conf.task_always_eager else "apply"
    assert getattr(chain(task.si("a", 1), task.si("b", 2)), apply)().get() == 2
    assert getattr(group(task.si("a", 1), task.si("b", 2)), apply)().get() == [1, 2]
    assert getattr(chord([task.si("a", 1), task.si("b", 2)], add.s()), apply)().get() == 3


def test_a_skipped_member_does_not_stop_an_eager_canvas(eager):
    task = eager.task(work, lock_on=("key",), contention_policy="skip", skip_result=0, max_hold=60)

    def total(values):
        return sum(values)

    add = eager.task(total, base=eager.app.Task)
    apply = "apply_async" if eager.app.conf.task_always_eager else "apply"
    with eager.held_elsewhere(task.name, "a"):
        assert getattr(chain(task.si("a", 1), task.si("b", 2)), apply)().get() == 2
        assert getattr(chord([task.si("a", 1), task.si("b", 2)], add.s()), apply)().get() == 2
