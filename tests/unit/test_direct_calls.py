"""A task called like a function: it waits in place, and what is held here already is entered again."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest
from celery import Celery
from celery.app import trace

from celery_singleflight import (
    Contended,
    FencingUnavailable,
    LeaseLost,
    SingleflightError,
    current_execution,
    current_lease,
    lock,
)
from celery_singleflight.keys import LockKey


def work(key, value=None):
    return value


def key_of(task, *scope):
    binding = task._binding
    return binding.lock_key(task.name, scope, {}) if binding.options.lock_on is None else LockKey.of(task.name, scope)


# Waiting in place


def test_a_free_key_is_not_waited_for(place, clock):
    task = place.task(work, lock_on=("key",))
    assert task("k", 5) == 5
    assert clock.slept == []
    assert place.holders(key_of(task, "k")) == []


def test_it_waits_until_the_key_is_free(place, clock):
    task = place.task(work, lock_on=("key",))
    with place.held_elsewhere(task.name, "k") as give_back:
        clock.while_asleep = lambda: give_back() if len(clock.slept) == 10 else None
        assert task("k", 5) == 5
    assert len(clock.slept) == 10


def test_it_waits_for_the_wait_timeout_and_then_says_who_is_in_the_way(place, clock):
    task = place.task(work, lock_on=("key",), wait_timeout=10)
    with place.held_elsewhere(task.name, "k"), pytest.raises(Contended) as caught:
        task("k")
    assert sum(clock.slept) == pytest.approx(10)
    assert len(clock.slept) < 30
    assert caught.value.lock_key == f'{task.name}["k"]'
    assert caught.value.worker
    assert 86_000 < caught.value.remaining <= 86_400


def test_it_looks_again_at_the_very_end_of_its_wait(place, clock):
    task = place.task(work, lock_on=("key",), wait_timeout=10)
    with place.held_elsewhere(task.name, "k") as give_back:
        clock.while_asleep = lambda: give_back() if sum(clock.slept) >= 10 - 1e-9 else None
        assert task("k", 5) == 5


@pytest.mark.parametrize("policy", ["skip", "reject"])
def test_one_that_would_not_wait_as_a_message_does_not_wait(place, clock, policy):
    task = place.task(work, lock_on=("key",), contention_policy=policy, skip_result="skipped", max_hold=60)
    with place.held_elsewhere(task.name, "k"), pytest.raises(Contended):
        task("k")
    assert clock.slept == []


def test_a_wait_timeout_of_zero_does_not_wait(place, clock):
    task = place.task(work, lock_on=("key",), wait_timeout=0)
    with place.held_elsewhere(task.name, "k"), pytest.raises(Contended):
        task("k")
    assert clock.slept == []


def test_pauses_grow_and_stay_short(place, clock):
    task = place.task(work, lock_on=("key",), wait_timeout=60)
    with place.held_elsewhere(task.name, "k"), pytest.raises(Contended):
        task("k")
    assert clock.slept[0] < 0.03
    assert 0.5 < max(clock.slept) <= 1.2


def test_the_body_of_one_that_gave_up_has_not_run_and_nothing_is_left(place, clock):
    bodies = []

    def pay(key):
        bodies.append(key)

    task = place.task(pay, wait_timeout=1, idempotent_on="pay:{key}")
    with place.held_elsewhere(task.name, "k"):
        before = sorted(place.client.keys())
        with pytest.raises(Contended):
            task("k")
        assert sorted(place.client.keys()) == before
    assert bodies == []


# The body


def test_the_lease_ends_with_the_body_whatever_it_raises(place):
    def fail(error):
        raise error

    task = place.task(fail, lock_on=())
    for error in (ValueError("no"), KeyboardInterrupt(), SystemExit(1)):
        with pytest.raises(type(error)):
            task(error)
        assert place.holders(key_of(task)) == []


def test_nothing_is_remembered_of_a_call_without_an_execution_key(place):
    task = place.task(work, lock_on=("key",))
    task("k")
    names = place.store.keys.lock(key_of(task, "k"))
    assert place.client.keys() == [names.fence]


def test_a_lease_that_was_lost_is_said_at_the_end(place):
    def slow(key):
        lease = current_lease()
        place.take_away(lease.key)
        lease.mark_lost("taken")
        return "late"

    task = place.task(slow)
    with pytest.raises(LeaseLost) as caught:
        task("k")
    assert str(caught.value) == f"the lease on {place.lock_key(task.name, 'k')} is lost: taken"
    assert place.holders(key_of(task, "k")) == ["somebody else"]


def test_a_result_whose_lease_was_lost_is_not_stored(place):
    def pay(key):
        place.take_away(current_lease().key)
        return "late"

    task = place.task(pay, idempotent_on="pay:{key}")
    with pytest.raises(LeaseLost) as caught:
        task("k")
    assert str(caught.value) == f"the lease on {place.lock_key(task.name, 'k')} is lost: it was taken over while the body ran"
    assert place.client.hget(place.store.keys.execution(task.name, "pay:k"), "outcome") is None


@pytest.mark.parametrize("value", [None, 0, "", False, [1, {"a": None}]])
def test_an_execution_runs_once_and_answers_again(place, value):
    runs = []

    def pay(invoice):
        runs.append((current_execution().key, current_execution().attempt))
        return value

    task = place.task(pay, idempotent_on="invoice:{invoice}")
    assert [task(42), task(42)] == [value, value]
    assert runs == [("invoice:42", 1)]
    assert place.result_of(task.delay(42)) == value
    assert len(runs) == 1


def test_an_execution_that_failed_here_may_be_run_again(place):
    runs = []

    def pay(invoice):
        runs.append(invoice)
        if len(runs) == 1:
            raise OSError("once")
        return "paid"

    task = place.task(pay, idempotent_on="invoice:{invoice}")
    with pytest.raises(OSError, match="once"):
        task(42)
    assert task(42) == "paid"


def test_an_execution_is_known_across_the_lock_keys_of_its_name(place):
    runs = []

    def pay(invoice, account):
        runs.append(account)
        return account

    task = place.task(pay, lock_on=("account",), idempotent_on="invoice:{invoice}", payload_on=("invoice",))
    assert (task(42, "a"), task(42, "b")) == ("a", "a")


# Re-entrance


@pytest.fixture(params=[False, True], ids=["plain", "worker"])
def in_worker(request):
    """Celery's worker lets the first call of a task go without a request of its own."""
    if request.param:
        trace.setup_worker_optimizations(Celery(set_as_current=False))
    yield request.param
    trace.reset_worker_optimizations(Celery(set_as_current=False))


@pytest.mark.parametrize(
    "call",
    [
        lambda place, task: task("k", 3),
        lambda place, task: task.apply(("k", 3)).get(),
        lambda place, task: place.result_of(task.delay("k", 3)),
    ],
    ids=["direct", "eager", "message"],
)
def test_a_task_that_calls_itself_enters_its_key_again(place, in_worker, call):
    tokens = []

    def countdown(self, key, n):
        tokens.append((self.lease.fencing_token, self.lease.owner))
        if n:
            self(key, n - 1)
        assert place.holders(self.lease.key) == [self.lease.owner]
        return f"done {n}"

    task = place.task(countdown, bind=True, lock_on=("key",))
    assert call(place, task) == "done 3"
    assert len(tokens) == 4
    assert len(set(tokens)) == 1
    assert place.holders(key_of(task, "k")) == []


def test_only_the_outermost_gives_the_key_back(place):
    task = place.task(work, lock_on=("key",))
    with lock(place.app, task.name, "k") as outer:
        with lock(place.app, task.name, "k") as inner:
            assert inner is outer
        assert place.holders(outer.key) == [outer.owner]
        task("k")
        assert place.holders(outer.key) == [outer.owner]
        with pytest.raises(ZeroDivisionError), lock(place.app, task.name, "k"):
            raise ZeroDivisionError
        assert place.holders(outer.key) == [outer.owner]
        assert current_lease() is outer
    assert place.holders(outer.key) == []


def test_a_key_is_entered_again_over_another_one(place):
    with lock(place.app, "a") as a, lock(place.app, "b") as b, lock(place.app, "a") as again:
        assert again is a
        assert current_lease() is a
        assert b is not a
    assert place.holders(a.key) == place.holders(b.key) == []


def test_a_lock_inside_of_the_task_on_its_own_key_is_entered_again(place):
    def outer(self, key):
        with lock(self.app, self.name, key) as lease:
            assert lease is self.lease
        return place.holders(self.lease.key)

    task = place.task(outer, bind=True, lock_on=("key",))
    assert len(task("k")) == 1
    assert len(place.result_of(task.delay("k"))) == 1


def test_another_execution_on_a_key_that_is_held_here_runs_under_its_lease_and_is_recorded(place):
    runs = []

    def pay(self, invoice):
        runs.append((invoice, self.execution.key, self.lease.owner, self.lease.fencing_token))
        if invoice == 1:
            assert self(2) == "paid 2"
            assert place.holders(self.lease.key) == [self.lease.owner]
            assert self(2) == "paid 2"
            assert self.execution.key == "invoice:1"
        return f"paid {invoice}"

    task = place.task(pay, bind=True, lock_on=(), idempotent_on="invoice:{invoice}")
    assert task(1) == "paid 1"
    assert [(invoice, key) for invoice, key, *_ in runs] == [(1, "invoice:1"), (2, "invoice:2")]
    assert runs[0][2:] == runs[1][2:]
    assert place.holders(key_of(task)) == []
    assert task(2) == "paid 2"
    assert len(runs) == 2


def test_an_inner_failure_gives_nothing_of_the_outer_back(place):
    def pay(self, invoice):
        if invoice == 1:
            with pytest.raises(OSError, match="no"):
                self(2)
            assert place.holders(self.lease.key) == [self.lease.owner]
            self.lease.check()
            return "paid"
        raise OSError("no")

    task = place.task(pay, bind=True, lock_on=(), idempotent_on="invoice:{invoice}")
    assert task(1) == "paid"
    assert place.holders(key_of(task)) == []


def test_another_thread_is_another_context(place):
    task = place.task(work, lock_on=("key",), wait_timeout=0)
    seen = []

    def elsewhere():
        seen.append(current_lease())
        try:
            task("k")
        except Contended as error:
            seen.append(error)

    with lock(place.app, task.name, "k"):
        thread = threading.Thread(target=lambda: contextvars.Context().run(elsewhere))
        thread.start()
        thread.join()
    assert seen[0] is None
    assert isinstance(seen[1], Contended)


def test_a_thread_that_got_a_copy_of_the_context_got_no_lease(place):
    seen = {}

    def look(task):
        seen["lease"], seen["execution"] = current_lease(), current_execution()
        for name in ("lease", "execution"):
            try:
                getattr(task, name)
            except SingleflightError as error:
                seen[f"task's {name}"] = str(error)
        try:
            task("k")
        except Contended as error:
            seen["call"] = error.lock_key
        with lock(task.app, "other") as own:
            seen["own"] = current_lease() is own
        seen["after its own"] = current_lease()

    def outer(self, key):
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(look, self))
        thread.start()
        thread.join()
        assert not context.run(lambda: current_lease() is None)  # the context has it; it was the thread that had not
        return self.lease is current_lease()

    task = place.task(outer, bind=True, lock_on=("key",), wait_timeout=0)
    assert task("k") is True
    assert seen == {
        "lease": None,
        "execution": None,
        "task's lease": f"{task.name} has a lease only while its body runs, in the thread that runs it",
        "task's execution": f"{task.name} has an execution only while its body runs, in the thread that runs it",
        "call": f'{task.name}["k"]',
        "own": True,
        "after its own": None,
    }


def test_a_coroutines_thread_got_no_lease(place):
    """As `asyncio.to_thread` does, which copies the context by itself."""
    with lock(place.app, "billing") as lease:
        assert asyncio.run(asyncio.to_thread(current_lease)) is None
        assert current_lease() is lease


def test_threads_take_turns(place):
    inside, most, runs = [0], [0], []
    entered = threading.Barrier(4)

    def busy(key):
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        threading.Event().wait(0.005)
        inside[0] -= 1
        runs.append(key)

    task = place.task(busy, lock_on=("key",))

    def call():
        entered.wait()
        task("k")

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most[0], len(runs)) == (1, 4)


# map, starmap, chunks


def test_each_item_of_a_map_is_protected(place):
    keys = []

    def twice(key):
        keys.append(current_lease().lock_key)
        return key * 2

    task = place.task(twice, contention_policy="reject")
    assert place.result_of(task.map([1, 2, 3]).delay()) == [2, 4, 6]
    assert keys == [place.lock_key(task.name, n).text for n in (1, 2, 3)]
    with place.held_elsewhere(task.name, 2), pytest.raises(Contended):
        place.app.tasks["celery.map"](task.s(), [1, 2, 3])
    assert keys[3:] == [place.lock_key(task.name, 1).text]


@pytest.mark.parametrize("how", ["starmap", "chunks"])
def test_each_item_of_a_starmap_and_of_chunks_is_protected(place, clock, how):
    task = place.task(work, lock_on=("key",), wait_timeout=5)
    items = [("a", 1), ("b", 2)]
    canvas = task.starmap(items) if how == "starmap" else task.chunks(items, 1)
    expected = [1, 2] if how == "starmap" else [[1], [2]]
    with place.held_elsewhere(task.name, "b") as give_back:
        clock.while_asleep = give_back
        assert place.result_of(canvas.apply_async()) == expected
    assert len(clock.slept) == 1


# What is held here


def test_outside_of_a_run_there_is_no_lease_and_no_execution(place):
    task = place.task(work)
    assert (current_lease(), current_execution()) == (None, None)
    with pytest.raises(SingleflightError) as caught:
        _ = task.lease
    assert str(caught.value) == f"{task.name} has a lease only while its body runs, in the thread that runs it"
    with pytest.raises(SingleflightError) as caught:
        _ = task.execution
    assert str(caught.value) == f"{task.name} has an execution only while its body runs, in the thread that runs it"


def test_a_lease_of_another_task_is_not_this_ones(place):
    other = place.task(work, name="shop.other")

    def outer(self):
        with pytest.raises(SingleflightError, match=r"shop\.other has a lease only while its body runs"):
            _ = other.lease
        return "done"

    assert place.task(outer, bind=True)() == "done"


def test_a_lock_has_a_lease_and_no_execution(place):
    with lock(place.app, "billing", 7) as lease:
        assert current_lease() is lease
        assert current_execution() is None

    def inside():
        with lock(place.app, "billing", 7) as lease:
            assert current_lease() is lease
            return current_execution().key

    assert place.task(inside, idempotent_on=lambda: "x")() == "x"


def test_a_lease_and_an_execution_are_those_of_the_innermost_run(place):
    seen = []

    def inner(key):
        seen.append((current_lease().lock_key, current_execution().key))

    inner_task = place.task(inner, idempotent_on="inner:{key}")

    def outer(self, key):
        inner_task(key)
        seen.append((current_lease().lock_key, current_execution().key))
        assert (self.lease, self.execution) == (current_lease(), current_execution())

    outer_task = place.task(outer, bind=True, idempotent_on="outer:{key}")
    outer_task(1)
    keys = [place.lock_key(task.name, 1).text for task in (inner_task, outer_task)]
    assert seen == [(keys[0], "inner:1"), (keys[1], "outer:1")]


def test_there_is_no_fencing_token_where_holders_would_fence_each_other_out(place):
    def fenced(self):
        return self.lease.fencing_token

    task = place.task(fenced, name="shop.fenced", bind=True, lock_limit=2)
    with pytest.raises(FencingUnavailable) as caught:
        task()
    assert str(caught.value) == (
        "shop.fenced[] has a lock_limit above 1: its holders would fence each other out, so there is no fencing token to ask "
        "for"
    )


def test_fencing_tokens_grow_from_call_to_call(place):
    def fenced(self):
        return self.lease.fencing_token

    task = place.task(fenced, bind=True)
    tokens = [task() for _ in range(5)]
    assert tokens == sorted(set(tokens))


def test_what_was_asked_for_when_the_wait_was_interrupted_is_given_back(place, monkeypatch):
    """The script may have run though its reply never came."""
    run = place.store._connections.run
    task = place.task(work, lock_on=("key",))
    calls = []

    def once(*arguments):
        calls.append(arguments[0].name)
        answer = run(*arguments)
        if calls == ["enter"]:
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(place.store._connections, "run", once)
    with pytest.raises(KeyboardInterrupt):
        task("k")
    assert calls == ["enter", "abandon"]
    assert place.holders(key_of(task, "k")) == []
