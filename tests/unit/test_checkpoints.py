"""`self.checkpoint` and `self.cursor`: an attempt goes on where the one before it got to."""

from __future__ import annotations

import pytest

from celery_singleflight import LeaseLost, PayloadChanged, StepError


@pytest.fixture
def run(place):
    """Send a task, and deliver its message until an attempt ends otherwise than a process that dies; return the result."""

    def run(task, *args, **options):
        result = task.apply_async(args, **options)
        (message,) = place.messages()
        for _ in range(50):
            try:
                place.deliver(message)
            except SystemExit:
                continue
            return result
        raise AssertionError("it never ended")

    return run


@pytest.fixture
def asked(place, monkeypatch):
    """Names of the scripts that were run."""
    names, store = [], place.store
    real = store._run
    monkeypatch.setattr(type(store), "_run", lambda _, script, *named: names.append(script.name) or real(script, *named))
    return names


def test_each_part_is_yielded_once_in_order(place, run):
    def work(self):
        return list(self.checkpoint("abc"))

    assert run(place.task(work, bind=True)).get() == ["a", "b", "c"]


def test_a_later_attempt_goes_on_after_the_last_part_that_was_finished(place, run):
    seen = []

    def work(self):
        for part in self.checkpoint(range(6)):
            seen.append(part)
            if len(seen) in (2, 5):
                raise SystemExit
        return self.execution.attempt

    assert run(place.task(work, bind=True)).get() == 3
    assert seen == [0, 1, 1, 2, 3, 3, 4, 5], "only the parts in which it died are repeated"


def test_the_cursor_moves_with_each_part_or_with_every_so_many_and_at_the_end(place, run, asked):
    for every, moves in {1: 7, 3: 3, 7: 1, 100: 1}.items():
        asked.clear()

        def work(self, every):
            return len(list(self.checkpoint(iter(range(7)), every=every)))

        task = place.task(work, bind=True, name=f"{place.app.main}.every{every}")
        assert run(task, every).get() == 7
        assert asked == ["enter", "read_cursor", *["move_cursor"] * moves, "finish", "forget_steps"]


def test_with_every_the_parts_since_the_last_move_are_repeated(place, run):
    seen = []

    def work(self):
        for part in self.checkpoint(range(5), every=2):
            seen.append(part)
            if len(seen) == 4:
                raise SystemExit

    run(place.task(work, bind=True)).get()
    assert seen == [0, 1, 2, 3, 2, 3, 4]


def test_what_is_finished_is_passed_over_by_a_later_attempt(place, run):
    seen = []

    def work(self):
        seen.extend(self.checkpoint("ab", name="first"))
        seen.extend(self.checkpoint("cd", name="second"))
        if self.execution.attempt == 1:
            raise SystemExit
        return "".join(seen)

    assert run(place.task(work, bind=True)).get() == "abcd"


def test_a_part_at_which_a_body_breaks_off_is_not_done(place, run):
    seen = []

    def work(self):
        for part in self.checkpoint(range(3)):
            seen.append(part)
            if self.execution.attempt == 1 and part == 1:
                break
        if self.execution.attempt == 1:
            raise SystemExit

    run(place.task(work, bind=True)).get()
    assert seen == [0, 1, 1, 2]


def test_two_checkpoints_of_a_run_need_names_of_their_own(place, run):
    def work(self):
        list(self.checkpoint("ab"))
        self.checkpoint("cd")

    with pytest.raises(StepError, match=r"has had a checkpoint named parts already; expected a name of its own"):
        run(place.task(work, bind=True)).get()


@pytest.mark.parametrize("every", [0, -1, 1.5, True, None])
def test_a_wrong_every_is_refused_with_what_was_expected(place, run, every):
    def work(self):
        self.checkpoint("ab", every=every)

    with pytest.raises(StepError, match="checkpoint parts, every: expected a whole number from 1"):
        run(place.task(work, bind=True)).get()


def test_a_run_that_was_overtaken_cannot_move_the_cursor(place):
    seen = []

    def work(self, key):
        try:
            for part in self.checkpoint("abc"):
                seen.append(part)
                if part == "b":
                    place.take_away(place.lock_key(self.name, "k"))
        except LeaseLost as lost:
            seen.append(lost.reason)

    task = place.task(work, bind=True, lock_on=("key",))
    task.apply_async(("k",))
    (message,) = place.messages()
    place.deliver(message)
    assert seen == ["a", "b", "it was taken over"]
    (name,) = place.client.keys("*:steps:*")
    assert place.client.hget(name, "cursor:parts").rpartition("\n")[2] == "1"


def test_a_cursor_stands_where_the_last_attempt_has_put_it(place, run):
    seen = []

    def work(self):
        cursor = self.cursor("page")
        seen.append(cursor.get())
        if self.execution.attempt < 3:
            cursor.set({"after": self.execution.attempt})
            assert cursor.get() == {"after": self.execution.attempt}
            raise SystemExit

    run(place.task(work, bind=True)).get()
    assert seen == [None, {"after": 1}, {"after": 2}]


def test_a_cursor_is_not_moved_to_what_does_not_serialise(place, run):
    def work(self):
        cursor = self.cursor("page")
        cursor.set(1)
        with pytest.raises(StepError, match="cursor page: object does not serialise as json"):
            cursor.set(object())
        return cursor.get()

    assert run(place.task(work, bind=True)).get() == 1


def with_changing_arguments(self, total):
    seen = list(self.checkpoint(range(total))) if self.request.retries else [next(parts := self.checkpoint(range(total)))]
    if not self.request.retries:
        next(parts)
        raise self.retry(args=(total + 2,), countdown=0)
    return seen


def test_other_arguments_in_a_later_attempt_are_an_error_by_default(place):
    task = place.task(with_changing_arguments, bind=True, lock_on=())
    with pytest.raises(PayloadChanged, match=r"checkpoint parts of execution .* with other arguments .* on_change"):
        place.result_of(task.delay(3))


@pytest.mark.parametrize(("on_change", "seen"), [(lambda done: done, [1, 2, 3, 4]), (lambda _: 0, [0, 1, 2, 3, 4])])
def test_on_change_says_from_where_to_go_on(place, on_change, seen):
    def work(self, total):
        parts = self.checkpoint(range(total), on_change=on_change)
        if self.request.retries:
            return list(parts)
        assert [next(parts), next(parts)] == [0, 1]
        raise self.retry(args=(total + 2,), countdown=0)

    assert place.result_of(place.task(work, bind=True, lock_on=()).delay(3)) == seen


def test_a_cursor_under_hold_or_rerun_is_the_same(place, run):
    def work(self):
        cursor = self.cursor("page")
        if cursor.get() is None:
            cursor.set("next")
            raise SystemExit
        return cursor.get()

    assert run(place.task(work, bind=True, uncertain_policy="hold")).get() == "next"
