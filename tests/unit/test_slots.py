"""Which slots of a worker are free, as its processes see it, and who gets the next one."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from kombu.asynchronous.semaphore import LaxBoundedSemaphore

from celery_singleflight import slots


class Request:
    def __init__(self, name="", *, is_handed_out=False):
        self.name = name
        self.is_handed_out = is_handed_out


class Worker:
    """As much of a worker as the slots know; `given` are the protected requests that are with its pool."""

    def __init__(self, concurrency):
        self.semaphore = LaxBoundedSemaphore(concurrency)
        self.concurrency = concurrency
        self.pool = SimpleNamespace(uses_semaphore=True, num_processes=concurrency)
        self.active = set()
        self.begun = []
        self._quick_acquire = self.semaphore.acquire

    def give(self, request, *, is_protected=True):
        """As Celery does: take a slot, or wait for one."""

        def begin(request):
            self.begun.append(request.name)
            if is_protected:
                slots.count_slots(request)

        self._quick_acquire(begin, request)
        slots.recount_slots()

    def end(self, request):
        slots.leave_slot(request)
        self.semaphore.release()
        slots.recount_slots()


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setattr(slots, "_slots", slots._Slots())
    worker = Worker(3)
    slots.share_slots(worker, worker.active)
    slots.recount_slots()
    return worker


@pytest.fixture
def be(monkeypatch):
    """Be the process of the pool that has this place."""

    def be(index):
        monkeypatch.setattr(slots, "current_process", lambda: SimpleNamespace(index=index))
        slots._slots.pid = 0

    return be


def requests(count):
    """Of a worker that has seen somebody whose turn had come."""
    slots._slots.has_called = True
    return [Request(str(number)) for number in range(count)]


def test_nothing_is_known_of_a_process_that_is_no_workers(monkeypatch):
    monkeypatch.setattr(slots, "_slots", slots._Slots())
    assert (slots.free_slots(), slots.engage(1), slots.recount_slots()) == (0, 0, False)


def test_slots_that_nobody_has_taken_are_free(worker, be):
    first, second, third = requests(3)
    be(0)
    worker.give(first)
    assert slots.free_slots() == 2
    worker.give(second)
    assert slots.free_slots() == 1
    worker.end(first)
    assert slots.free_slots() == 2
    worker.give(third, is_protected=False)
    assert slots.free_slots() == 1


def test_a_slot_with_a_trigger_that_is_about_to_wait_is_as_good_as_free(worker, be):
    for request in (all_of_them := requests(3)):
        worker.give(request)
    be(0)
    slots.engage(1)
    assert slots.free_slots() == 2
    be(1)
    assert slots.free_slots() == 1, "its own slot does not count"
    slots.engage(1)
    assert slots.free_slots() == 1
    be(2)
    assert slots.free_slots() == 0
    worker.end(all_of_them[0])
    assert slots.free_slots() == 1


def test_nobody_is_counted_before_the_first_whose_turn_had_come(worker, be):
    """Whoever waits in no slot need not know, and it would cost each task some time."""
    for request in (Request("a"), Request("b"), called("c")):
        worker.give(request)
    assert [request.name for request in slots._slots.given] == ["c"]
    be(0)
    assert slots.free_slots() == 0


def test_a_slot_with_an_unprotected_task_is_not(worker, be):
    first, *others = requests(3)
    worker.give(first)
    for other in others:
        worker.give(other, is_protected=False)
    be(0)
    assert slots.free_slots() == 0
    slots.engage(1)
    assert slots.free_slots() == 0


def test_what_was_said_before_is_told_to_be_said_again(worker, be):
    be(1)
    assert slots.engage(1) == 0
    assert slots.engage(1) == 1
    assert slots.engage(0) == 1
    assert slots.engage(0) == 0


def test_a_process_that_has_died_with_a_body_leaves_its_place_to_the_next(worker, be):
    for request in requests(3):
        worker.give(request)
    be(0)
    slots.engage(1)
    be(1)
    slots.engage(1)
    be(0)  # another one that has its place
    assert slots.engage(0) == 0
    be(2)
    assert slots.free_slots() == 1


@pytest.mark.parametrize("index", [None, 1024])
def test_a_process_without_a_place_knows_only_of_free_slots(worker, be, index):
    first, *others = requests(3)
    worker.give(first)
    be(index)
    assert slots.engage(1) == 0
    assert slots.free_slots() == 2
    for other in others:
        worker.give(other)
    assert slots.free_slots() == 0


def test_a_child_reads_what_its_parent_has_counted(worker):
    worker.give(Request())
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, str(slots.free_slots()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 10) == b"2"


def test_threads_are_counted_where_they_are(monkeypatch):
    monkeypatch.setattr(slots, "_slots", slots._Slots())
    active = {Request()}
    slots.share_slots(SimpleNamespace(pool=SimpleNamespace(uses_semaphore=False, num_processes=4)), active)
    assert slots.free_slots() == 3
    active |= set(requests(5))
    assert slots.free_slots() == 0


# Who gets the next slot


def called(name):
    return Request(name, is_handed_out=True)


def test_a_trigger_whose_turn_has_come_gets_the_next_slot(worker):
    slots.let_pass(worker)
    begun = requests(3)
    for request in begun:
        worker.give(request)
    for request in [Request("a"), called("b"), Request("c"), called("d"), called("e")]:
        worker.give(request)
    for request in begun:
        worker.end(request)
    assert worker.begun == ["0", "1", "2", "b", "d", "e"], "one before the other as they came"
    for _ in range(2):
        worker.semaphore.release()
    assert worker.begun[-2:] == ["a", "c"]


def test_whoever_waits_for_a_slot_is_passed_a_few_times_and_no_more(worker):
    slots.let_pass(worker)
    for request in requests(3):
        worker.give(request)
    worker.give(Request("a"))
    for number in range(10):
        worker.give(called(f"called {number}"))
        worker.semaphore.release()
    assert worker.begun.index("a") == 3 + slots._PASSED_AT_MOST


def test_it_gets_a_free_slot_as_others_do(worker):
    slots.let_pass(worker)
    worker.give(called("a"))
    assert (worker.begun, worker.semaphore.value, len(worker.semaphore._waiting)) == (["a"], 2, 0)


@pytest.mark.parametrize("semaphore", [None, SimpleNamespace(acquire=None)], ids=["none", "another"])
def test_a_worker_without_such_a_line_is_left_alone(semaphore):
    worker = SimpleNamespace(semaphore=semaphore)
    slots.let_pass(worker)
    assert not hasattr(worker, "_quick_acquire")


# Where its message goes in the broker's queue


def test_beside_a_free_slot_a_message_whose_turn_has_come_always_goes_first(worker, be):
    worker.give(Request())
    be(0)
    slots.engage(1)
    assert [slots.may_go_first() for _ in range(4)] == [True] * 4


def test_where_no_slot_is_free_every_second_goes_first(worker, be):
    for request in requests(3):
        worker.give(request)
    for index in range(3):
        be(index)
        slots.engage(1)
    assert [slots.may_go_first() for _ in range(4)] == [True, False, True, False]


def test_what_the_main_process_calls_always_goes_first(worker, be):
    for request in requests(3):
        worker.give(request)
    be(None)
    assert [slots.may_go_first() for _ in range(3)] == [True] * 3


def test_where_all_threads_are_busy_every_second_goes_first(monkeypatch):
    monkeypatch.setattr(slots, "_slots", slots._Slots())
    active = set(requests(2))
    slots.share_slots(SimpleNamespace(pool=SimpleNamespace(uses_semaphore=False, num_processes=2)), active)
    assert [slots.may_go_first() for _ in range(3)] == [True, False, True]
    active.pop()
    assert [slots.may_go_first() for _ in range(3)] == [True] * 3


def test_outside_of_a_worker_it_always_goes_first(monkeypatch, be):
    monkeypatch.setattr(slots, "_slots", slots._Slots())
    be(None)
    assert [slots.may_go_first() for _ in range(3)] == [True] * 3


def test_in_a_process_that_has_not_inherited_the_count_every_second_goes_first(monkeypatch, be):
    monkeypatch.setattr(slots, "_slots", slots._Slots())
    be(0)
    assert [slots.may_go_first() for _ in range(3)] == [True, False, True]
