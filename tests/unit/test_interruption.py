"""Interrupting work from another thread: while it is under way, once, and never after its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from math import inf
from pathlib import Path

import pytest
from nodes import wait_until

from celery_singleflight import interruption
from celery_singleflight.errors import LeaseLost
from celery_singleflight.interruption import Stretch, take_signal
from celery_singleflight.keys import LockKey
from celery_singleflight.lease import Holding, Lease, current_lease

LOST = LeaseLost("billing[]", "taken")


@pytest.fixture(autouse=True)
def handler(monkeypatch):
    """Nothing is known of the signal at the start of a test, and it is as it was at the end."""
    before = signal.getsignal(interruption.SIGNAL)
    monkeypatch.setattr(interruption, "_handled_in", 0)
    signal.signal(interruption.SIGNAL, signal.SIG_DFL)
    yield
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {interruption.SIGNAL})
    interruption._wanted.clear()
    signal.signal(interruption.SIGNAL, before)


def in_thread(do):
    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    return thread


def at_a_word(do):
    """Call in another thread, which is there already, when the event that is returned is set."""
    word = threading.Event()
    in_thread(lambda: word.wait(10) and do())
    return word


def work_from(word):
    """Give the word, and work: bytecodes to be interrupted at, for as long as a test can wait."""
    word.set()
    give_up_at = time.monotonic() + 10
    while time.monotonic() < give_up_at:
        time.sleep(0.001)


def is_blocked(thread_id):
    """Whether the kernel has that thread asleep, at several looks."""

    def is_asleep():
        time.sleep(0.02)
        return Path(f"/proc/self/task/{thread_id}/stat").read_text().rpartition(")")[2].split()[0] == "S"

    return all(is_asleep() for _ in range(5))


def block_from(word):
    word.set()
    threading.Event().wait(60)


def answer_of(do):
    """Call in another thread and return the answer."""
    answers = []
    in_thread(lambda: answers.append(do())).join(10)
    return answers[0]


# By a signal, in the main thread


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux tells what a thread does")
def test_a_blocking_call_of_the_main_thread_is_interrupted_at_once():
    take_signal()
    stretch, answers = Stretch(), []
    main_thread = threading.get_native_id()

    def interrupt():
        # A signal that comes between the last bytecode and the call is not noticed before the call returns.
        wait_until(lambda: is_blocked(main_thread), 10, "the main thread blocks")
        answers.append(stretch.interrupt(LOST))

    word = at_a_word(interrupt)
    began = time.monotonic()
    stretch.begin()
    with pytest.raises(LeaseLost) as caught:
        block_from(word)
    stretch.end()
    wait_until(lambda: answers, 10, "the answer")

    assert caught.value is LOST
    assert time.monotonic() - began < 30
    assert answers == [True]


def test_a_signal_that_comes_with_the_end_raises_nothing_after_it():
    take_signal()
    stretch = Stretch()
    stretch.begin()
    signal.pthread_sigmask(signal.SIG_BLOCK, {interruption.SIGNAL})
    assert answer_of(lambda: stretch.interrupt(LOST))
    assert interruption.SIGNAL in signal.sigpending()
    stretch.end()

    signal.pthread_sigmask(signal.SIG_UNBLOCK, {interruption.SIGNAL})

    assert interruption.SIGNAL not in signal.sigpending()
    assert interruption._wanted == []


def test_a_signal_that_nobody_of_ours_sent_raises_nothing():
    take_signal()
    stretch = Stretch()
    stretch.begin()
    os.kill(os.getpid(), interruption.SIGNAL)
    stretch.end()


def test_the_signal_interrupts_the_stretch_that_it_is_meant_for():
    take_signal()
    over, under_way = Stretch(), Stretch()
    over.begin()
    signal.pthread_sigmask(signal.SIG_BLOCK, {interruption.SIGNAL})
    assert answer_of(lambda: over.interrupt(LeaseLost("over[]")))
    over.end()
    under_way.begin()
    assert answer_of(lambda: under_way.interrupt(LOST))
    with pytest.raises(LeaseLost) as caught:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {interruption.SIGNAL})
    under_way.end()
    assert caught.value is LOST


def test_a_handler_of_the_users_own_is_left_alone_and_the_main_thread_is_interrupted_all_the_same():
    told = []
    signal.signal(interruption.SIGNAL, mine := lambda *_: told.append("mine"))
    take_signal()
    stretch = Stretch()
    word = at_a_word(lambda: stretch.interrupt(LOST))
    stretch.begin()
    with pytest.raises(LeaseLost) as caught:
        work_from(word)
    stretch.end()

    assert signal.getsignal(interruption.SIGNAL) is mine
    assert told == []
    assert (caught.value.lock_key, caught.value.reason) == ("billing[]", "taken")


def test_a_handler_that_the_user_has_set_later_is_left_alone_too():
    told = []
    take_signal()
    signal.signal(interruption.SIGNAL, lambda *_: told.append("mine"))
    stretch = Stretch()
    word = at_a_word(lambda: stretch.interrupt(LOST))
    stretch.begin()
    with pytest.raises(LeaseLost):
        work_from(word)
    stretch.end()
    assert told == []


def test_another_thread_does_not_take_the_signal():
    in_thread(take_signal).join(10)
    assert signal.getsignal(interruption.SIGNAL) is signal.SIG_DFL


def test_a_child_takes_the_signal_anew(monkeypatch):
    take_signal()
    assert interruption._handled_in == os.getpid()
    monkeypatch.setattr(interruption.os, "getpid", lambda: 1)
    take_signal()
    assert interruption._handled_in == 1


# In any other thread


class Worker:
    """A thread that works in a stretch until it is interrupted, and notes what it was interrupted by."""

    def __init__(self):
        self.stretch = Stretch()
        self.caught = []
        self.has_begun = threading.Event()
        self.thread = in_thread(self.work)
        assert self.has_begun.wait(10)

    def work(self):
        try:
            self.stretch.begin()
            work_from(self.has_begun)
        except BaseException as error:  # noqa: BLE001, it is what is tested
            self.caught.append(error)
        finally:
            self.stretch.end()


def test_another_thread_is_interrupted_with_the_same_facts():
    worker = Worker()
    assert worker.stretch.interrupt(LOST)
    worker.thread.join(10)

    (caught,) = worker.caught
    assert isinstance(caught, LeaseLost)
    assert (caught.lock_key, caught.reason, caught.args, str(caught)) == ("billing[]", "taken", LOST.args, str(LOST))
    assert type(caught).__name__ == "LeaseLost"


def test_one_thread_is_interrupted_and_the_others_go_on():
    one, other = Worker(), Worker()
    one.stretch.interrupt(LOST)
    one.thread.join(10)
    assert (len(one.caught), other.caught, other.thread.is_alive()) == (1, [], True)
    other.stretch.interrupt(LOST)
    other.thread.join(10)


INTERRUPTED_AND_THEN_TRACED = """
import sys, threading
from celery_singleflight.interruption import Stretch

stretch, has_begun, caught = Stretch(), threading.Event(), []

def work():
    try:
        stretch.begin()
        has_begun.set()
        while True:
            pass
    except RuntimeError as error:
        caught.append(error)
    finally:
        stretch.end()

thread = threading.Thread(target=work)
thread.start()
assert has_begun.wait(10)
stretch.interrupt(RuntimeError("over"))
thread.join()
sys.settrace(lambda *_: None)
(lambda: None)()
print(caught)
"""


def test_a_process_in_which_a_thread_was_interrupted_can_be_traced():
    """By a debugger, by coverage. Where CPython goes on to believe that somebody is to be interrupted, 3.11 never returns."""
    command = [sys.executable, "-c", INTERRUPTED_AND_THEN_TRACED]
    assert subprocess.run(command, timeout=60, check=True, capture_output=True, text=True).stdout == "[RuntimeError('over')]\n"


def test_nothing_is_raised_after_the_end_however_close_to_it_the_interruption_comes():
    escaped, interrupted, rounds = [], [], 300

    def work():
        for _ in range(rounds):
            stretch = Stretch()
            go = threading.Event()

            def interrupt(stretch=stretch, go=go):
                go.wait(10)
                interrupted.append(stretch.interrupt(LOST))

            interrupter = in_thread(interrupt)
            while True:
                try:
                    stretch.begin()
                    go.set()
                    break
                except LeaseLost:
                    break
            while True:
                try:
                    stretch.end()
                    break
                except LeaseLost:
                    continue
            try:
                interrupter.join(10)
                sum(range(100))
            except LeaseLost as error:
                escaped.append(error)

    in_thread(work).join(60)
    assert len(interrupted) == rounds
    assert escaped == []


# Both


@pytest.mark.parametrize("take", [take_signal, lambda: None], ids=["by a signal", "at a bytecode"])
def test_only_what_is_under_way_is_interrupted_and_only_once(take):
    take()
    stretch = Stretch()
    assert not stretch.is_under_way
    assert not answer_of(lambda: stretch.interrupt(LOST))
    answers = []
    word = at_a_word(lambda: answers.extend(stretch.interrupt(LOST) for _ in range(3)))
    stretch.begin()
    assert stretch.is_under_way
    with pytest.raises(LeaseLost):
        work_from(word)
    wait_until(lambda: len(answers) == 3, 10, "three answers")
    stretch.end()
    assert not stretch.is_under_way
    assert answers == [True, False, False]
    assert not answer_of(lambda: stretch.interrupt(LOST))


def make_lease():
    key = LockKey.of("billing", [])
    return Lease(key, owner="me", token=1, limit=1, ttl=30.0, max_hold=inf, requested_at=time.monotonic())


@pytest.mark.parametrize("take", [take_signal, lambda: None], ids=["by a signal", "at a bytecode"])
def test_a_lost_lease_interrupts_the_block_that_holds_it(take):
    take()
    lease = make_lease()
    lease.mark_lost("taken")
    word = at_a_word(lease.interrupt)
    with pytest.raises(LeaseLost) as caught, Holding(lease):
        work_from(word)
    assert (caught.value.lock_key, caught.value.reason) == ("billing[]", "taken")
    assert current_lease() is None


def test_an_inner_block_of_a_lease_does_not_end_the_stretch_of_the_outer_one():
    lease = make_lease()
    word = at_a_word(lease.interrupt)
    with pytest.raises(LeaseLost), Holding(lease):  # noqa: PT012, the inner block is what is tested
        with Holding(lease):
            pass
        work_from(word)


def test_a_lease_that_is_lost_after_its_block_interrupts_nothing():
    take_signal()
    lease = make_lease()
    with Holding(lease):
        pass
    in_thread(lease.interrupt).join(10)
    assert not lease.body.is_under_way
