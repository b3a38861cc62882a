"""The heartbeat: leases are kept for as long as they should, and no longer."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from math import inf

import pytest
import redis
from nodes import wait_until

from celery_singleflight import LeaseLost, StoreUnavailable, interruption, signals
from celery_singleflight.claims import Acquired, Claim, Record
from celery_singleflight.heartbeat import Heartbeat
from celery_singleflight.keys import KeySpace, LockKey
from celery_singleflight.lease import Holding, Lease
from celery_singleflight.servers import connect
from celery_singleflight.store import Renewal, Store


class Books:
    """A store that writes down what it is asked for and answers what it is told to."""

    def __init__(self):
        self.renewals = []
        self.settled = []
        self.answers = {}
        self.meanwhile = lambda: None

    def renew(self, wanted):
        self.meanwhile()
        self.renewals.append([(lease.lock_key, ttl) for lease, _, ttl in wanted])
        return [Renewal(self.answers.get(lease.lock_key, ""), stop_by="") for lease, _, _ in wanted]

    def settle(self, ended):
        self.meanwhile()
        self.settled.append(list(ended))


@pytest.fixture
def books():
    return Books()


@pytest.fixture
def heart(books, clock):
    """A heartbeat that looks when the test says so."""
    heart = Heartbeat(books)
    heart._attend = lambda: None
    heart._watch_deadlines = lambda: None
    return heart


@pytest.fixture
def losses():
    """What the signal `lease_lost` has told."""
    told = []

    def note(sender, lease, reason, **_):
        told.append((lease.lock_key, reason))

    signals.lease_lost.connect(note)
    yield told
    signals.lease_lost.disconnect(note)


def make_lease(clock, name="billing", ttl=30.0, max_hold=inf, owner=""):
    lease = Lease(
        LockKey.of(name, []),
        owner=owner or f"owner of {name}",
        token=1,
        limit=1,
        ttl=ttl,
        max_hold=max_hold,
        requested_at=clock.monotonic(),
    )
    return lease, Record(lease.key, f"task of {name}", None)


def look_on(heart, clock, seconds, step=0.25):
    """Let time pass, with a look each `step` seconds; return when each renewal was asked for, from now."""
    began, asked = clock.now, []
    while clock.now < began + seconds:
        before = len(heart._store.renewals)
        heart._renew()
        if len(heart._store.renewals) > before:
            asked.append(clock.now - began)
        clock.now += step
    return asked


# Renewing


@pytest.mark.parametrize("ttl", [3.0, 9.0, 30.0, 300.0])
def test_a_lease_is_renewed_each_third_of_its_ttl(heart, books, clock, ttl):
    lease, record = make_lease(clock, ttl=ttl)
    heart.keep(lease, record)
    asked = look_on(heart, clock, ttl * 10)
    between = [later - earlier for earlier, later in zip([0.0, *asked], asked, strict=False)]
    assert all(ttl / 3 - heart._pause - 0.26 <= pause <= ttl / 3 for pause in between)
    assert not lease.is_lost
    assert books.renewals == [[("billing[]", ttl)]] * len(asked)


def test_a_lease_that_was_just_taken_is_not_renewed(heart, books, clock):
    heart.keep(*make_lease(clock))
    look_on(heart, clock, 8)
    assert books.renewals == []


def test_a_renewal_counts_from_before_it_was_asked_for(heart, books, clock):
    lease, record = make_lease(clock)
    heart.keep(lease, record)
    clock.now += 10
    asked_at = clock.now

    def slow():
        clock.now += 5

    books.meanwhile = slow
    heart._renew()
    assert lease.expires_at == asked_at + 30


def test_all_that_is_due_is_renewed_in_one_exchange(heart, books, clock):
    for name in ("a", "b", "c"):
        heart.keep(*make_lease(clock, name))
    clock.now += 10
    heart.keep(*make_lease(clock, "young"))
    heart._renew()
    assert books.renewals == [[("a[]", 30.0), ("b[]", 30.0), ("c[]", 30.0)]]


def test_a_short_lease_is_looked_after_as_often_as_it_needs(heart, clock):
    heart.keep(*make_lease(clock, "long"))
    assert heart._pause == 1.0
    heart.keep(*make_lease(clock, "short", ttl=0.6))
    assert heart._pause == pytest.approx(0.2)


def test_what_is_dropped_is_not_renewed(heart, books, clock):
    lease, record = make_lease(clock)
    heart.keep(lease, record)
    heart.drop(lease.owner, record)
    heart.drop(lease.owner, record)
    look_on(heart, clock, 40)
    assert books.renewals == []


# The bound


@pytest.mark.parametrize("max_hold", [31.0, 45.0, 100.0])
def test_a_lease_is_not_renewed_past_its_max_hold(heart, books, clock, losses, max_hold):
    began = clock.now
    lease, record = make_lease(clock, max_hold=max_hold)
    heart.keep(lease, record)
    while not losses:
        heart._renew()
        assert lease.expires_at <= began + max_hold
        clock.now += 0.25
    assert clock.now - began == pytest.approx(max_hold, abs=0.5)
    assert losses == [("billing[]", f"it is as old as its max_hold, {max_hold:g} s")]
    assert all(ttl <= 30 for look in books.renewals for _, ttl in look)
    assert look_on(heart, clock, 60) == []


def test_a_lease_longer_than_its_max_hold_runs_out_by_itself(heart, books, clock, losses):
    heart.keep(*make_lease(clock, ttl=30, max_hold=10))
    look_on(heart, clock, 9)
    assert (books.renewals, losses) == ([], [])
    look_on(heart, clock, 2)
    assert (books.renewals, losses) == ([], [("billing[]", "it is as old as its max_hold, 10 s")])


# Losing


@pytest.mark.parametrize("why", ["expired", "taken"])
def test_what_the_store_calls_lost_is_lost_and_told_once(heart, books, clock, losses, caplog, why):
    lease, record = make_lease(clock)
    other, other_record = make_lease(clock, "other")
    heart.keep(lease, record)
    heart.keep(other, other_record)
    books.answers = {"billing[]": why}
    look_on(heart, clock, 60)
    assert lease.is_lost
    assert lease.remaining == 0
    assert not other.is_lost
    assert losses == [("billing[]", why)]
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == [f"the lease on billing[] is lost: {why}"]
    assert sum(name == "billing[]" for look in books.renewals for name, _ in look) == 1


def test_a_receiver_that_fails_breaks_nothing(heart, books, clock):
    told = []

    def fail(**_):
        raise RuntimeError("a receiver of mine")

    def note(lease, **_):
        told.append(lease.lock_key)

    signals.lease_lost.connect(fail)
    signals.lease_lost.connect(note)
    try:
        for name in ("a", "b", "c"):
            heart.keep(*make_lease(clock, name))
        books.answers = {"a[]": "taken"}
        clock.now += 10
        heart._renew()
    finally:
        signals.lease_lost.disconnect(fail)
        signals.lease_lost.disconnect(note)
    assert told == ["a[]"]
    assert {lease.lock_key: lease.remaining for lease in heart._kept.values()} == {"b[]": 30.0, "c[]": 30.0}


def test_a_store_that_is_away_is_asked_again_until_the_leases_own_deadline(heart, books, clock, losses, caplog):
    lease, record = make_lease(clock)
    heart.keep(lease, record)

    def away():
        tries.append(clock.now)
        raise StoreUnavailable("away")

    tries = []
    books.meanwhile = away
    look_on(heart, clock, 29.5)
    assert len(tries) > 50
    assert (lease.is_lost, losses) == (False, [])
    look_on(heart, clock, 1)
    assert lease.is_lost
    assert losses == [("billing[]", "it could not be renewed before its deadline")]
    before = len(tries)
    look_on(heart, clock, 10)
    assert len(tries) == before
    warnings = [message for message in caplog.messages if message.startswith("could not renew <Lease billing[] token 1, ")]
    assert len(warnings) == before
    assert all(message.endswith(">, trying again: away") for message in warnings)


def test_a_store_that_comes_back_in_time_finds_the_lease_kept(heart, books, clock, losses):
    lease, record = make_lease(clock)
    heart.keep(lease, record)

    def away_for_a_while():
        if clock.now < 1029:
            raise StoreUnavailable("away")

    books.meanwhile = away_for_a_while
    look_on(heart, clock, 60)
    assert (lease.is_lost, losses) == (False, [])


def test_what_is_released_while_it_is_renewed_is_not_lost(heart, books, clock, losses):
    lease, record = make_lease(clock)
    heart.keep(lease, record)
    books.meanwhile = lambda: heart.drop(lease.owner, record)
    books.answers = {"billing[]": "taken"}
    clock.now += 10
    heart._renew()
    assert (lease.is_lost, losses) == (False, [])


def test_the_lease_of_a_triggers_next_run_is_kept_when_the_one_before_it_is_gone(heart, books, clock, losses):
    lease, record = make_lease(clock)
    heart.keep(lease, record)
    clock.now += 10
    again, _ = make_lease(clock, owner="owner of its next run")

    def run_again():
        heart.drop(lease.owner, record)
        heart.keep(again, record)

    books.meanwhile = run_again
    books.answers = {"billing[]": "taken"}
    heart._renew()
    assert list(heart._kept.values()) == [again]
    assert (again.is_lost, losses) == (False, [])


# Settling


def test_what_has_ended_is_settled_in_one_batch(heart, books, clock):
    records = [make_lease(clock, name)[1] for name in ("a", "b", "c")]
    for record in records:
        heart.settle(record, f"owner of {record.task_id}", "failed")
    assert books.settled == []
    heart.flush()
    heart.flush()
    assert books.settled == [[(record, f"owner of {record.task_id}", True, "failed") for record in records]]


def test_a_process_that_leaves_settles_what_is_left(heart, books, clock):
    _, record = make_lease(clock)
    heart.settle(record, "owner", "failed")
    heart.flush()
    heart.flush()
    assert books.settled == [[(record, "owner", True, "failed")]]


def test_a_store_that_is_away_does_not_stop_a_process_from_leaving(heart, books, clock, caplog):
    def away():
        raise StoreUnavailable("away")

    books.meanwhile = away
    heart.settle(make_lease(clock)[1], "owner", "failed")
    heart.flush()
    assert "could not settle 1 triggers, trying again: away" in caplog.messages


# The thread


@pytest.fixture
def beating(books):
    """A heartbeat with its thread, in real time."""
    heart = Heartbeat(books)
    yield heart
    heart._kept.clear()


def heartbeats():
    return [thread for thread in threading.enumerate() if thread.name == "singleflight-heartbeat"]


def test_one_daemon_thread_is_started_by_the_first_lease(beating):
    before = len(heartbeats())
    for name in ("a", "b", "c"):
        beating.keep(*make_lease(time, name))
    assert len(heartbeats()) == before + 1
    assert beating._thread.daemon


def test_the_thread_renews_and_settles(beating, books):
    lease, record = make_lease(time, ttl=1.8)
    beating.keep(lease, record)
    beating.settle(record, "owner", "failed")
    wait_until(lambda: len(books.renewals) >= 3 and books.settled, 15, "three renewals")
    assert not lease.is_lost
    assert books.settled == [[(record, "owner", True, "failed")]]


def test_a_short_lease_after_a_long_one_is_renewed_in_time(beating, books):
    beating.keep(*make_lease(time, "long"))
    short, record = make_lease(time, "short", ttl=1.8)
    beating.keep(short, record)
    wait_until(lambda: books.renewals or short.is_lost, 15, "a renewal")
    assert not short.is_lost


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_died_is_replaced_by_the_next_lease(beating, books):
    def die():
        raise SystemExit

    books.meanwhile = die
    beating.keep(*make_lease(time, "first", ttl=1.8))
    dead = beating._thread
    wait_until(lambda: not dead.is_alive(), 15, "the thread dies")

    books.meanwhile = lambda: None
    beating.keep(*make_lease(time, "second", ttl=1.8))
    assert beating._thread is not dead
    wait_until(lambda: any("second[]" in dict(look) for look in books.renewals), 15, "a renewal")


def test_a_look_that_fails_is_followed_by_the_next(beating, books, caplog):
    def fail_once():
        books.meanwhile = lambda: None
        raise RuntimeError("unexpected")

    books.meanwhile = fail_once
    lease, record = make_lease(time, ttl=2.4)
    beating.keep(lease, record)
    wait_until(lambda: books.renewals, 15, "a renewal after the failure")
    assert "a look of the heartbeat failed; the next one follows" in caplog.messages


def test_a_thread_with_nothing_to_do_sleeps_until_there_is_something(beating, books):
    lease, record = make_lease(time, ttl=0.3)
    beating.keep(lease, record)
    beating.drop(lease.owner, record)
    wait_until(lambda: beating._asleep, 15, "the thread sleeps")
    thread = beating._thread
    beating.keep(*make_lease(time, "second", ttl=1.8))
    wait_until(lambda: books.renewals, 15, "a renewal")
    assert beating._thread is thread


# Deadlines, while the store does not answer


@pytest.fixture
def stuck(books):
    """A store that does not answer before the end of the test."""
    answer, asked = threading.Event(), threading.Event()

    def wait():
        asked.set()
        answer.wait(30)

    books.meanwhile = wait
    yield asked
    answer.set()


def ends_in(seconds, name="billing"):
    """A lease of half a minute that is near its end."""
    lease, record = make_lease(time, name)
    lease.expires_at = time.monotonic() + seconds
    return lease, record


def interrupted(lease):
    """Work under a lease in a thread of its own; return what it is interrupted by, sooner or later."""
    caught, has_begun = [], threading.Event()

    def work():
        try:
            with Holding(lease):
                has_begun.set()
                while not lease.is_lost or not caught:
                    time.sleep(0.001)
        except LeaseLost as error:
            caught.append((error.lock_key, error.reason))

    threading.Thread(target=work, daemon=True).start()
    assert has_begun.wait(10)
    return caught


def test_a_deadline_that_passes_while_the_store_does_not_answer_is_kept(beating, stuck, losses):
    told = []

    def note(lease, remaining, **_):
        told.append((lease.lock_key, remaining))

    lease, record = ends_in(0.5)
    caught = interrupted(lease)
    signals.lease_endangered.connect(note)
    try:
        beating.keep(lease, record)
        beating._wake.set()
        wait_until(lambda: losses and caught, 10, "the loss is told")
    finally:
        signals.lease_endangered.disconnect(note)
    assert stuck.is_set()
    assert time.monotonic() - lease.expires_at < 5
    why = ("billing[]", "it could not be renewed before its deadline")
    assert (losses, caught) == ([why], [why])
    ((name, remaining),) = told
    assert name == "billing[]"
    assert 0 < remaining <= 0.5


def test_a_deadline_is_kept_for_each_lease_and_the_released_ones_are_left_alone(beating, stuck, losses):
    near, later, released = ends_in(0.3, "near"), ends_in(0.6, "later"), ends_in(0.3, "released")
    for lease, record in (near, later, released):
        beating.keep(lease, record)
    beating._wake.set()
    assert stuck.wait(10)
    beating.drop(released[0].owner, released[1])
    wait_until(lambda: len(losses) == 2, 10, "both losses")
    assert [name for name, _ in losses] == ["near[]", "later[]"]


def test_a_lease_that_needs_no_renewal_is_not_watched(beating, books, losses):
    lease, record = ends_in(29)
    beating.keep(lease, record)
    beating._wake.set()
    beating._renew()
    assert books.renewals == []
    assert beating._watch is None
    assert losses == []


def test_the_watch_ends_when_nothing_is_kept(beating, books):
    lease, record = ends_in(5)
    beating.keep(lease, record)
    beating._wake.set()
    wait_until(lambda: beating._watch is not None, 10, "the watch begins")
    beating.drop(lease.owner, record)
    wait_until(lambda: not beating._watch.is_alive(), 10, "the watch ends")
    assert not lease.is_lost


def test_a_deadline_is_kept_however_long_a_call_takes(beating, stuck, losses):
    beating.keep(*ends_in(0.5))
    beating._wake.set()
    assert stuck.wait(10)
    wait_until(lambda: losses, 3, "the loss is told")


def test_a_body_that_blocks_is_interrupted_although_the_first_signal_was_not_noticed(beating, books, monkeypatch):
    before = signal.getsignal(interruption.SIGNAL)
    monkeypatch.setattr(interruption, "_handled_in", 0)
    signal.signal(interruption.SIGNAL, signal.SIG_DFL)
    sent, kill = [], signal.pthread_kill
    monkeypatch.setattr(interruption.signal, "pthread_kill", lambda *args: sent.append(args) or (len(sent) > 1 and kill(*args)))
    lease, record = ends_in(0.3)
    books.answers = {"billing[]": "taken"}
    try:
        interruption.take_signal()
        with pytest.raises(LeaseLost), Holding(lease):  # noqa: PT012
            beating.keep(lease, record)
            beating._wake.set()
            threading.Event().wait(3)
    finally:
        interruption._wanted.clear()
        signal.signal(interruption.SIGNAL, before)


# A real store


@pytest.fixture
def store(valkey):
    connections = connect(f"{valkey.url}/8", {})
    store = Store(connections, KeySpace(f"hb{os.getpid()}"))
    yield store
    connections.close()


def acquire(store, name, ttl=30.0):
    record = Record(LockKey.of(name, []), f"task of {name}", None)
    owner = f"owner of {name} in {os.getpid()}"
    claim = Claim(record, owner, "w1", owner, limit=1, ttl=ttl, keep=60.0, on_held="wait")
    requested_at = time.monotonic()
    entered = store.enter(claim)
    assert isinstance(entered, Acquired), entered
    lease = Lease(record.lock_key, owner=owner, token=entered.token, limit=1, ttl=ttl, max_hold=inf, requested_at=requested_at)
    return lease, record


def in_child(do):
    """Fork, and return what `do` gives in the child, as JSON."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            answer = json.dumps(do())
        except BaseException as error:  # noqa: BLE001, it is the parent that fails
            answer = json.dumps(repr(error))
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = json.load(pipe)
    os.waitpid(pid, 0)
    return answer


def test_a_child_has_a_thread_and_leases_of_its_own(store):
    heart = Heartbeat(store)
    lease, record = acquire(store, "of the parent", ttl=2.4)
    heart.keep(lease, record)
    thread = heart._thread

    def child():
        mine, my_record = acquire(store, "of the child", ttl=2.4)
        heart.keep(mine, my_record)
        first_deadline = mine.expires_at
        wait_until(lambda: mine.expires_at > first_deadline, 15, "a renewal in the child")
        return [heart._thread is not thread, heart._thread.is_alive(), [kept.lock_key for kept in heart._kept.values()]]

    assert in_child(child) == [True, True, ["of the child[]"]]
    deadline = lease.expires_at
    wait_until(lambda: lease.expires_at > deadline or lease.is_lost, 15, "a renewal in the parent")
    assert not lease.is_lost
    assert heart._thread is thread
    heart.drop(lease.owner, record)


def test_what_a_parent_has_to_settle_is_not_settled_by_its_child(heart, books, clock):
    heart.settle(make_lease(clock)[1], "owner of the parent", "failed")

    def child():
        heart.flush()
        heart.settle(make_lease(clock, "another")[1], "owner of the child", "failed")
        heart.flush()
        return [[owner for _, owner, *_ in batch] for batch in books.settled]

    assert in_child(child) == [["owner of the child"]]
    assert [owner for _, owner, *_ in heart._settling._settled] == ["owner of the parent"]


def test_a_lease_that_cannot_be_renewed_does_not_take_others_with_it(store):
    heart = Heartbeat(store)
    heart._attend = lambda: None
    bad, bad_record = acquire(store, "bad")
    good, good_record = acquire(store, "good")
    for lease, record in ((bad, bad_record), (good, good_record)):
        lease.expires_at -= 15
        heart.keep(lease, record)
    names = store.keys.lock(bad.key)
    with redis.Redis(connection_pool=store._connections._pool) as client:
        client.delete(names.lease)
        client.set(names.lease, "of another kind")
    deadline = good.expires_at
    heart._renew()
    assert good.expires_at > deadline
