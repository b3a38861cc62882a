"""Between a trigger's outcome and the moment at which Celery has sent what follows it."""

from __future__ import annotations

import threading

import pytest

from celery_singleflight import StoreUnavailable
from celery_singleflight.claims import Record
from celery_singleflight.keys import LockKey
from celery_singleflight.settling import Settling


class Books:
    """A store that writes down what it is told, and may be away for some calls."""

    def __init__(self):
        self.told = []
        self.away = []

    def settle(self, ended):
        ended = [(record.task_id, owner, is_done) for record, owner, is_done, _ in ended]
        if self.away and self.away.pop(0):
            raise StoreUnavailable("away")
        self.told.append(ended)

    def take(self):
        told, self.told = self.told, []
        return told


@pytest.fixture
def books():
    return Books()


@pytest.fixture
def settling(clock):
    return Settling()


def record(task_id):
    return Record(LockKey.of("billing", []), task_id, None)


def test_what_is_done_is_told_once(settling, books):
    settling.begin(record("t1"), "me")
    settling.end(record("t1"), "me", "failed")
    assert settling
    settling.write(books)
    settling.write(books)
    assert books.told == [[("t1", "me", True)]]
    assert not settling


def test_nothing_is_told_where_nothing_ends(settling, books):
    settling.write(books)
    assert books.told == []
    assert not settling


def test_an_ending_that_takes_long_is_told_from_its_second_second_on_for_as_long_as_it_takes(settling, books, clock):
    began = clock.now
    settling.begin(record("t1"), "me")
    told = []
    while clock.now < began + 60:
        settling.write(books)
        told += [(clock.now - began, batch) for batch in books.take()]
        clock.now += 0.5
    assert told[0][0] == 2.0
    assert [seconds for seconds, _ in told] == [2.0 + n / 2 for n in range(len(told))]
    assert all(batch == [("t1", "me", False)] for _, batch in told)
    assert told[-1][0] == 59.5
    settling.end(record("t1"), "me", "failed")
    settling.write(books)
    settling.write(books)
    assert books.take() == [[("t1", "me", True)]]


def test_an_ending_that_never_ends_is_not_believed_for_ever(settling, books, clock):
    settling.begin(record("t1"), "me")
    clock.now += 3599
    settling.write(books)
    assert books.take() == [[("t1", "me", False)]]
    clock.now += 1
    settling.write(books)
    assert books.take() == []


def test_a_thread_that_does_something_else_now_ends_nothing_any_more(settling, books, clock):
    settling.begin(record("t1"), "me")
    settling.forget_thread()
    clock.now += 10
    settling.write(books)
    assert books.told == []
    assert not settling


def test_each_thread_has_an_ending_of_its_own(settling, books, clock):
    settling.begin(record("t1"), "me")
    thread = threading.Thread(target=settling.begin, args=(record("t2"), "other"))
    thread.start()
    thread.join()
    settling.forget_thread()
    clock.now += 10
    settling.write(books)
    assert books.told == [[("t2", "other", False)]]


def test_a_new_ending_of_a_thread_takes_the_place_of_the_one_before(settling, books, clock):
    settling.begin(record("t1"), "me")
    clock.now += 10
    settling.begin(record("t2"), "me")
    settling.write(books)
    assert books.told == []
    clock.now += 2
    settling.write(books)
    assert books.told == [[("t2", "me", False)]]


def test_what_the_store_does_not_take_is_told_again(settling, books, clock, caplog):
    settling.end(record("t1"), "me", "failed")
    settling.end(record("t2"), "me", "failed")
    books.away = [True, True]
    settling.write(books)
    assert settling
    settling.write(books)
    settling.end(record("t3"), "me", "failed")
    settling.write(books)
    assert sorted(books.told[0]) == [("t1", "me", True), ("t2", "me", True), ("t3", "me", True)]
    assert len(books.told) == 1
    assert caplog.messages == ["could not settle 2 triggers, trying again: away"] * 2


def test_an_ending_that_goes_on_is_told_anew_and_not_from_memory(settling, books, clock):
    settling.begin(record("t1"), "me")
    clock.now += 2
    books.away = [True]
    settling.write(books)
    settling.end(record("t1"), "me", "failed")
    settling.write(books)
    assert books.told == [[("t1", "me", True)]]


def test_much_is_told_in_parts_and_what_was_taken_is_not_told_again(settling, books):
    for n in range(1200):
        settling.end(record(f"t{n}"), "me", "failed")
    books.away = [False, True]
    settling.write(books)
    assert [len(batch) for batch in books.take()] == [500]
    settling.write(books)
    rest = books.take()
    assert [len(batch) for batch in rest] == [500, 200]
    assert {task_id for batch in rest for task_id, _, _ in batch} == {f"t{n}" for n in range(500, 1200)}
