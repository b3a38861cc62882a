"""Who holds what: blocks that end in any order, contexts that outlive them, children, and leases that are gone."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from contextlib import contextmanager

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from nodes import wait_until

from celery_singleflight import (
    Contended,
    LeaseLost,
    StoreUnavailable,
    coordination,
    current_execution,
    current_lease,
    lock,
)
from celery_singleflight.claims import Record
from celery_singleflight.servers import connect
from celery_singleflight.store import Renewal


def pay(invoice):
    return f"paid {invoice}"


def is_free(place, *names):
    """Whether somebody else may have these locks."""
    for name in names:
        with place.held_elsewhere(name):
            pass
    return True


# Blocks that end in any order


def test_what_is_closed_first_is_held_no_more_and_what_is_still_open_is(place):
    first, second = lock(place.app, "a"), lock(place.app, "b")
    a, b = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)

    assert current_lease() is b
    assert place.holders(a.key) == []
    assert place.holders(b.key) == [b.owner]
    with place.held_elsewhere("a"), pytest.raises(Contended), lock(place.app, "a"):
        pytest.fail("a is somebody else's")
    with lock(place.app, "b") as again:
        assert again is b

    second.__exit__(None, None, None)
    assert current_lease() is None
    assert is_free(place, "a", "b")


def test_three_that_end_in_the_order_in_which_they_began_leave_nothing(place):
    blocks = [lock(place.app, name) for name in "abc"]
    leases = [block.__enter__() for block in blocks]
    for n, block in enumerate(blocks):
        assert current_lease() is leases[2]
        block.__exit__(None, None, None)
        assert [bool(place.holders(lease.key)) for lease in leases] == [False] * (n + 1) + [True] * (2 - n)
    assert current_lease() is None
    with lock(place.app, "d") as lease:
        assert current_lease() is lease
    assert current_lease() is None


def test_a_block_that_entered_a_key_again_holds_it_no_longer_than_its_outermost_holder(place):
    outer, inner = lock(place.app, "a"), lock(place.app, "a")
    lease = outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)

    assert place.holders(lease.key) == []
    assert current_lease() is None
    with place.held_elsewhere("a"), pytest.raises(Contended), lock(place.app, "a"):
        pytest.fail("it was given back")
    with lock(place.app, "a") as new:
        assert new is not lease
    inner.__exit__(None, None, None)
    assert current_lease() is None
    assert is_free(place, "a")


def test_a_block_that_a_body_left_open_is_over_when_its_run_is(place):
    """As a generator does that waits to be collected."""
    seen, left_open = [], []

    def work(self, key):
        seen.append(current_lease())
        if not left_open:
            left_open.append(lock(self.app, self.name, key))
            left_open[0].__enter__()

    task = place.task(work, bind=True, lock_on=("key",), contention_policy="reject")
    task.delay("k")
    place.deliver_all()
    assert current_lease() is None
    with place.held_elsewhere(task.name, "k"):
        with pytest.raises(Contended):
            task("k")
        with pytest.raises(Contended), lock(place.app, task.name, "k"):
            pytest.fail("it is somebody else's")
    task("k")
    assert seen[0] is not seen[1]
    left_open[0].__exit__(None, None, None)


def test_a_lease_that_was_given_back_is_no_lease(place):
    with lock(place.app, "a") as lease:
        lease.check()
    assert lease.is_lost
    assert lease.remaining == 0
    with pytest.raises(LeaseLost) as caught:
        lease.check()
    assert str(caught.value) == "the lease on a[] is lost: it was given back"


# Contexts that outlive a block


def test_a_coroutine_that_outlives_its_parents_block_holds_nothing(place):
    task = place.task(pay, lock_on=(), lock_name="billing", wait_timeout=0)
    seen = {}

    async def child(is_over):
        seen["inside"] = current_lease()
        await is_over.wait()
        seen["after"] = (current_lease(), current_execution())
        with place.held_elsewhere("billing"):
            with pytest.raises(Contended):
                task(1)
            with pytest.raises(Contended), lock(place.app, "billing"):
                pytest.fail("it is somebody else's")
        with lock(place.app, "billing") as own:
            seen["own"] = own

    async def parent():
        is_over = asyncio.Event()
        with lock(place.app, "billing") as lease:
            running = asyncio.create_task(child(is_over))
            await asyncio.sleep(0)
            seen["parent's"] = lease
        is_over.set()
        await running
        return lease

    lease = asyncio.run(parent())
    assert seen["inside"] is lease, "a coroutine of the block is in the block"
    assert seen["after"] == (None, None)
    assert seen["own"] is not lease
    assert is_free(place, "billing")


def test_a_coroutine_that_outlives_the_body_of_a_task_is_not_inside_of_it(place):
    calls, background = [], {}

    def work(self, key, depth):
        calls.append((depth, current_lease().owner))
        if depth == 0:

            async def later(self):
                await background["over"].wait()
                background["lease"] = current_lease()
                self(key, 1)

            background["running"] = asyncio.get_running_loop().create_task(later(self))

    task = place.task(work, bind=True, lock_on=("key",), wait_timeout=0)

    async def main():
        background["over"] = asyncio.Event()
        task("k", 0)
        background["over"].set()
        await background["running"]

    asyncio.run(main())
    assert background["lease"] is None
    assert [depth for depth, _ in calls] == [0, 1]
    assert calls[0][1] != calls[1][1], "the call of the coroutine has a lease of its own"


# Children


def in_child(act):
    """Return what a forked child of this process answers."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        answer = None
        try:
            answer = act()
        except BaseException as error:  # noqa: BLE001, the parent judges
            answer = repr(error)
        finally:
            os.write(write, json.dumps(answer).encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = json.load(pipe)
    os.waitpid(pid, 0)
    return answer


@pytest.fixture
def on_server(place, valkey, monkeypatch):
    """The place, on a server that a child shares."""
    connections = connect(f"{valkey.url}/6", {})
    monkeypatch.setattr(coordination, "connect", lambda *_: connections)
    yield place
    connections.close()


def is_still_held(place, lease):
    """Whether the store says so."""
    return place.store.renew([(lease, Record(lease.key, lease.owner, None), 5.0)]) == [Renewal(lost="", stop_by="")]


def test_a_child_that_is_forked_in_a_block_holds_nothing(on_server):
    app = on_server.app

    def child():
        facts = [current_lease() is None, current_execution() is None]
        try:
            with lock(app, "of a parent"):
                facts.append("entered")
        except Contended:
            facts.append("contended")
        with lock(app, "of a child") as own:
            facts.append(current_lease() is own)
        return facts

    with lock(app, "of a parent") as lease:
        assert in_child(child) == [True, True, "contended", True]
        lease.check()
        assert current_lease() is lease
        assert is_still_held(on_server, lease)


def test_a_child_that_leaves_its_parents_block_gives_nothing_back(on_server):
    app = on_server.app
    block = lock(app, "of a parent")
    lease = block.__enter__()

    def child():
        block.__exit__(None, None, None)
        return "left"

    assert in_child(child) == "left"
    assert is_still_held(on_server, lease)
    block.__exit__(None, None, None)
    with lock(app, "of a parent") as new:
        assert new is not lease


# Leases that are gone


@contextmanager
def told_at_its_end(app, name, **options):
    """A lock whose block hears at its end that the lease was lost."""
    with pytest.raises(LeaseLost), lock(app, name, **options) as lease:
        yield lease


def test_a_key_whose_lease_is_lost_is_not_entered_again(place):
    task = place.task(pay, lock_on=(), lock_name="billing")
    with told_at_its_end(place.app, "billing") as lease:
        place.take_away(lease.key)
        lease.mark_lost("taken")
        with pytest.raises(LeaseLost) as caught, lock(place.app, "billing"):
            pytest.fail("the key is somebody else's")
        assert str(caught.value) == "the lease on billing[] is lost: taken"
        with pytest.raises(LeaseLost):
            task(1)
        with pytest.raises(LeaseLost):
            task.apply((1,), throw=True)
    assert place.holders(lease.key) == ["somebody else"]


def test_a_key_whose_lease_has_run_out_is_not_entered_again(place, clock):
    with told_at_its_end(place.app, "billing", lease_ttl=5, max_hold=5):
        clock.now += 5
        with pytest.raises(LeaseLost, match="max_hold"), lock(place.app, "billing"):
            pytest.fail("its lease has run out")


# A direct call of another execution on a key that is held here


@pytest.mark.parametrize(
    "error", [StoreUnavailable("away"), SoftTimeLimitExceeded(), KeyboardInterrupt()], ids=lambda error: type(error).__name__
)
@pytest.mark.parametrize("is_granted", [True, False], ids=["granted", "not granted"])
def test_a_call_that_cannot_enter_takes_nothing_of_the_outer_lease(place, monkeypatch, error, is_granted):
    task = place.task(pay, lock_on=(), idempotent_on="invoice:{invoice}", lock_name="billing")
    run, asked = place.store._connections.run, []

    def once(script, *arguments):
        asked.append(script.name)
        if asked == ["enter"]:
            if is_granted:
                run(script, *arguments)
            raise error
        return run(script, *arguments)

    with lock(place.app, "billing") as lease:
        monkeypatch.setattr(place.store._connections, "run", once)
        with pytest.raises(type(error)):
            task(1)
        assert place.holders(lease.key) == [lease.owner]
        assert current_lease() is lease
        lease.check()
        with pytest.raises(Contended), place.held_elsewhere("billing"):
            pytest.fail("it is held")
        assert task(1) == "paid 1", "nothing is left of the call that could not enter"
    assert place.holders(lease.key) == []


def test_a_thread_of_a_block_waits_like_anybody_else(place):
    """A body may hand work to threads; they have no part in its lease."""
    entered = []

    def elsewhere():
        with lock(place.app, "billing", wait=10):
            entered.append(threading.get_ident())

    thread = threading.Thread(target=elsewhere)
    with lock(place.app, "billing") as lease:
        thread.start()
        wait_until(lambda: place.client.exists(place.store.keys.lock(lease.key).lease))
        assert entered == []
    thread.join()
    assert entered == [thread.ident]
