"""Steps and cursors in the store: written by the run that owns the execution, by the rules of `finish`, and by nobody else."""

from __future__ import annotations

import pytest
from desk import LOCK, lose_next_reply
from step_desk import FAILED, VALUE, Run

from celery_singleflight.claims import Encoded, Outcome, Record
from celery_singleflight.errors import LeaseLost
from celery_singleflight.keys import KeySpace
from celery_singleflight.progress import Begun, Changed, Done, Uncertain, Undo
from celery_singleflight.store import Store

DAY = 86_400_000
KEYS = pytest.mark.parametrize("execution_key", [None, "invoice:1"], ids=["task id", "execution key"])
ODD = Encoded("application/x", "binary", b"\x00\n\xff\n")
NONE = Encoded("", "", b"")


@KEYS
def test_a_step_is_begun_and_recorded_and_the_next_attempt_finds_it(desk, execution_key):
    first = Run(desk, execution_key=execution_key)
    step = first.step("charge", digest="d1")
    assert first.begin(step) == Begun(1, is_unsure=False)
    assert first.state("charge") == "begun"
    first.record(step, ODD)
    assert first.state("charge") == "done"

    second = first.next()
    assert second.acquired.run_id == first.acquired.run_id
    assert second.begin(second.step("charge", digest="d1")) == Done(ODD, "")
    assert second.begin(second.step("other", digest="d1")) == Begun(1, is_unsure=False)


def test_both_are_the_same_when_they_are_asked_again(desk):
    run = Run(desk)
    step = run.step("charge", undo="m:undo")
    assert run.begin(step) == run.begin(step) == Begun(1, is_unsure=False)
    run.record(step)
    before = desk.keyspace.snapshot()
    run.record(step)
    assert {name: value for name, (value, _) in desk.keyspace.snapshot().items()} == {
        name: value for name, (value, _) in before.items()
    }
    again = run.next()
    unsure = again.step("unsure")
    again.begin(unsure)
    third = again.next()
    step = third.step("unsure")
    assert third.begin(step) == third.begin(step) == Begun(2, is_unsure=True)


def test_a_step_whose_replies_got_lost_is_done_once(desk):
    run = Run(desk)
    lost = lose_next_reply(desk.connections, 0)
    step = run.step("charge", undo="m:undo")
    assert run.begin(step) == Begun(1, is_unsure=False)
    assert lost
    lost = lose_next_reply(desk.connections, 0)
    run.record(step)
    assert lost
    lost = lose_next_reply(desk.connections, 0)
    assert run.undo().name == "charge"
    assert lost
    lost = lose_next_reply(desk.connections, 0)
    assert run.undo(undone="charge") is None
    assert lost
    assert run.state("charge") == "undone"


@KEYS
def test_a_step_that_failed_is_begun_again_for_the_second_time(desk, execution_key):
    run = Run(desk, execution_key=execution_key, unsure_as="hold")
    step = run.step("charge", digest="d1")
    run.begin(step)
    run.record(step, None)
    assert run.state("charge") == "failed"
    assert run.begin(run.step("charge", digest="d2")) == Begun(2, is_unsure=False)


def test_under_hold_a_step_that_was_begun_and_not_recorded_is_uncertain(desk):
    first = Run(desk, unsure_as="hold")
    first.begin(first.step("charge"))
    second = first.next()
    found = second.begin(second.step("charge"))
    assert isinstance(found, Uncertain)
    assert (found.times, found.worker) == (1, "w1@host")
    assert 0 <= found.age < 60


@pytest.mark.parametrize("is_done", [True, False])
def test_other_arguments_are_told(desk, is_done):
    first = Run(desk)
    step = first.step("charge", digest="d1")
    first.begin(step)
    if is_done:
        first.record(step)
    second = first.next()
    assert second.begin(second.step("charge", digest="d2")) == Changed(NONE)
    known = second.begin(second.step("charge"))
    assert isinstance(known, Done if is_done else Begun), "without a digest there is nothing to compare"


def test_a_step_without_its_value_says_why(desk):
    run = Run(desk)
    step = run.step("odd")
    run.begin(step)
    run.record(step, NONE, "object does not\nserialise")
    assert run.begin(run.step("odd")) == Done(NONE, "object does not serialise")


def test_a_step_that_the_store_forgot_is_recorded(desk):
    run = Run(desk)
    step = run.step("charge", digest="d1")
    run.begin(step)
    desk.client.delete(run.name)
    run.record(step)
    assert run.begin(run.step("charge", digest="d1")) == Done(VALUE, "")


def every_write(run):
    """Each that a run can do, none of which may be refused before."""
    begun = run.step("begun", undo="m:undo")
    run.begin(begun)
    store, writer = run.desk.store, run.writer
    return {
        "begin": lambda: run.begin(run.step("late")),
        "record": lambda: run.record(begun),
        "fail": lambda: run.record(begun, None),
        "read": lambda: store.read_cursor(writer, "page", ""),
        "move": lambda: store.move_cursor(writer, "page", "", VALUE),
        "undo": run.undo,
    }


def assert_all_are_refused(run, writes, why):
    before = run.desk.keyspace.snapshot()
    for write in writes.values():
        with pytest.raises(LeaseLost, match=why):
            write()
    assert run.desk.keyspace.snapshot() == before


@KEYS
def test_who_was_overtaken_by_the_next_attempt_writes_nothing(desk, execution_key):
    run = Run(desk, execution_key=execution_key)
    writes = every_write(run)
    run.next()
    assert_all_are_refused(run, writes, "it was taken over")


@KEYS
def test_who_was_overtaken_by_another_trigger_of_the_lock_key_writes_nothing(desk, execution_key):
    run = Run(desk, execution_key=execution_key)
    writes = every_write(run)
    desk.expire(run.claim)
    other = desk.claim("t2")
    desk.acquire(other)
    assert_all_are_refused(run, writes, "it was taken over")
    desk.abandon(other)
    assert_all_are_refused(run, writes, "it was taken over")


@KEYS
@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED])
def test_who_has_ended_writes_nothing_more(desk, execution_key, outcome):
    run = Run(desk, execution_key=execution_key)
    writes = every_write(run)
    run.finish(outcome)
    assert_all_are_refused(run, writes, "the run has ended|it was taken over")


@KEYS
def test_whose_trigger_was_given_an_outcome_writes_nothing(desk, execution_key):
    run = Run(desk, execution_key=execution_key)
    writes = every_write(run)
    desk.conclude(run.claim, release=False)
    assert_all_are_refused(run, writes, "the run has ended")


@KEYS
def test_who_was_late_while_nobody_came_may_write(desk, execution_key):
    run = Run(desk, execution_key=execution_key)
    writes = every_write(run)
    desk.expire(run.claim)
    for write in writes.values():
        write()


def test_who_may_still_finish_after_the_store_forgot_everything_may_write(desk):
    run = Run(desk)
    writes = every_write(run)
    desk.keyspace.clear()
    for write in writes.values():
        write()
    assert desk.keyspace.names() == [run.name]


def test_with_a_lock_limit_an_expired_one_writes_while_a_place_is_free(desk):
    run = Run(desk, limit=2)
    writes = every_write(run)
    desk.expire(run.claim)
    for n in range(2):
        desk.acquire(desk.claim(f"other-{n}", limit=2))
    assert_all_are_refused(run, writes, "it was taken over")


def test_what_an_ended_execution_has_left_does_not_count_for_the_next(desk):
    first = Run(desk, execution_key="invoice:1")
    first.do("charge")
    desk.store.move_cursor(first.writer, "page", "", VALUE)
    first.finish()

    second = Run(desk, desk.claim("t2", execution_key="invoice:1"))
    assert second.acquired.run_id != first.acquired.run_id
    assert desk.store.find_ending(second.claim.record, second.acquired.run_id) is None
    assert desk.store.read_cursor(second.writer, "page", "") is None
    assert second.begin(second.step("charge")) == Begun(1, is_unsure=False)


@pytest.mark.parametrize("what", ["step", "cursor"])
def test_what_a_trigger_with_other_arguments_finds_stays_for_the_one_whose_it_is(desk, what):
    first = Run(desk, execution_key="invoice:1")
    first.do("charge", digest="d1", undo="m:undo")
    desk.store.move_cursor(first.writer, "page", "d1", VALUE)
    desk.expire(first.claim)
    other = Run(desk, desk.claim("t2", execution_key="invoice:1"))
    for _ in range(2):
        if what == "step":
            assert isinstance(other.begin(other.step("charge", digest="d2")), Changed)
        else:
            assert isinstance(desk.store.read_cursor(other.writer, "page", "d2"), Changed)
    assert other.undo() is None
    other.finish()

    again = Run(desk, desk.claim("t1", execution_key="invoice:1"))
    assert again.begin(again.step("charge", digest="d1")) == Done(VALUE, "")
    assert desk.store.read_cursor(again.writer, "page", "d1") == VALUE
    assert again.undo().name == "charge", "and it is undone when that fails"


def test_who_accepts_another_payload_holds_nothing(desk):
    first = Run(desk, execution_key="invoice:1")
    first.do("charge", undo="m:undo")
    desk.store.move_cursor(first.writer, "page", "d1", VALUE)
    desk.expire(first.claim)
    other = Run(desk, desk.claim("t2", execution_key="invoice:1"))
    assert desk.store.read_cursor(other.writer, "page", "d2", accepts=True) == Changed(VALUE)
    assert other.undo().name == "charge"


def test_what_is_held_counts_for_the_next_until_it_goes_on(desk):
    first = Run(desk, execution_key="invoice:1", unsure_as="hold")
    first.do("paid")
    first.begin(first.step("charge"))
    second = first.next()
    assert isinstance(second.begin(second.step("charge")), Uncertain)
    second.finish()

    third = Run(desk, desk.claim("t2", execution_key="invoice:1"), unsure_as="hold")
    assert isinstance(third.begin(third.step("paid")), Done)
    assert isinstance(third.begin(third.step("charge")), Uncertain)
    third.finish()
    anyone = Record(LOCK, "", "invoice:1", has_trigger=False)
    assert desk.store.resolve_step(anyone, "charge", VALUE)[0] == "resolved"

    fourth = Run(desk, desk.claim("t3", execution_key="invoice:1"), unsure_as="hold")
    assert fourth.begin(fourth.step("charge")) == Done(VALUE, "")
    fourth.finish()
    fifth = Run(desk, desk.claim("t4", execution_key="invoice:1"))
    assert fifth.begin(fifth.step("charge")) == Begun(1, is_unsure=False)


@KEYS
@pytest.mark.parametrize("keep", [0.0, 2 * DAY / 1000])
def test_it_is_kept_for_a_day_at_least_and_its_run_record_with_it(desk, execution_key, keep):
    run = Run(desk, desk.claim(execution_key=execution_key, keep=keep), keep=keep)
    run.do("charge")
    wanted = max(DAY, keep * 1000)
    left = desk.keyspace.ttls()
    for name in (run.name, desk.execution_name(run.claim)):
        assert wanted - 60_000 < left[name] <= wanted + 120_000, name


def test_it_lies_beside_the_run_record_in_the_same_slot(desk):
    keys = desk.store.keys
    assert keys.steps("{sf17}:1:trigger:billing:t1") == "{sf17}:1:steps:trigger:billing:t1"
    assert keys.steps("{sf17}:1:execution:billing:t1") == "{sf17}:1:steps:execution:billing:t1"


def test_a_cursor_is_found_where_it_was_moved(desk):
    first = Run(desk)
    store = desk.store
    assert store.read_cursor(first.writer, "page", "d1") is None
    store.move_cursor(first.writer, "page", "d1", ODD)
    store.move_cursor(first.writer, "other", "d1", VALUE)
    second = first.next()
    assert store.read_cursor(second.writer, "page", "d1") == ODD
    assert store.read_cursor(second.writer, "page", "d2") == Changed(ODD)
    assert store.read_cursor(second.writer, "page", "") == ODD
    assert store.read_cursor(second.writer, "other", "d1") == VALUE


# Undoing.


def test_steps_are_undone_the_last_first_and_the_ending_is_written_down_with_the_first(desk):
    run = Run(desk)
    record, run_id = run.claim.record, run.acquired.run_id
    assert desk.store.find_ending(record, run_id) is None
    for name in ("one", "two"):
        run.do(name, undo=f"m:{name}")
    run.do("three")
    assert desk.store.find_ending(record, run_id) == 2

    assert run.undo() == Undo("two", "m:two", is_unsure=False, note="", value=VALUE)
    assert desk.store.find_ending(record, run_id) == FAILED
    assert run.undo(undone="two", failed=True, note="why") == Undo("one", "m:one", is_unsure=False, note="", value=VALUE)
    assert run.undo(undone="one") is None
    assert run.undo() is None
    assert [run.state(name) for name in ("one", "two", "three")] == ["undone", "undo failed", "done"]


def test_without_anything_to_undo_no_ending_is_written_down(desk):
    run = Run(desk)
    run.do("one")
    assert run.undo() is None
    assert desk.store.find_ending(run.claim.record, run.acquired.run_id) == 0


@pytest.mark.parametrize("unsure_as", ["rerun", "hold"])
def test_an_undo_that_was_begun_and_not_recorded_is_told(desk, unsure_as):
    first = Run(desk, unsure_as=unsure_as)
    for name in ("one", "two"):
        first.do(name, undo=f"m:{name}")
    first.undo()
    second = first.next()
    found = second.undo()
    assert (found.name, found.is_unsure) == ("two", True)
    assert found.undo == ("m:two" if unsure_as == "rerun" else "")
    found = second.undo(**({"undone": "two"} if unsure_as == "rerun" else {}))
    assert (found.name, found.undo, found.is_unsure) == ("one", "m:one", False)
    assert second.undo(undone="one") is None
    assert second.state("two") == ("undone" if unsure_as == "rerun" else "undo uncertain")


def test_the_steps_of_another_run_are_not_undone(desk):
    first = Run(desk, execution_key="invoice:1")
    first.do("one", undo="m:one")
    first.finish()
    second = Run(desk, desk.claim("t2", execution_key="invoice:1"))
    assert second.undo() is None
    assert first.state("one") == "done"


# What people say of it.


def test_a_step_is_forgotten_with_all_that_its_run_has_done(desk):
    run = Run(desk)
    run.do("one")
    record = run.claim.record
    assert not desk.store.forget_steps(record, "another run")
    assert desk.store.forget_steps(record, run.acquired.run_id)
    assert not desk.store.forget_steps(record, run.acquired.run_id)
    run.do("one")
    assert desk.store.forget_steps(record)
    assert run.name not in desk.keyspace.names()


def test_a_step_is_resolved_once_its_run_is_dead(desk):
    run = Run(desk)
    run.begin(run.step("charge", undo="m:undo"))
    record = run.claim.record
    assert desk.store.resolve_step(record, "charge", VALUE) == ("running", "w1@host")
    assert desk.store.resolve_step(record, "other", VALUE) == ("certain", "")
    desk.expire(run.claim)
    assert desk.store.resolve_step(record, "charge", VALUE) == ("resolved", "")
    assert desk.store.resolve_step(record, "charge", VALUE) == ("certain", "done")
    assert desk.store.find_ending(record, run.acquired.run_id) == 1, "it is undone if the execution fails"


def test_after_a_failure_that_came_of_it_the_trigger_may_be_sent_again(desk):
    first = Run(desk, desk.claim(message=b"m"), unsure_as="hold")
    first.begin(first.step("charge"))
    desk.expire(first.claim)
    second = Run(desk, desk.claim(message=b"m", copy="c2", previous=""), unsure_as="hold")
    assert isinstance(second.begin(second.step("charge")), Uncertain)
    second.finish()
    desk.settle(second.claim)
    assert desk.store.resolve_step(second.claim.record, "charge", None) == ("resolved", "")

    third = Run(desk, desk.claim(message=b"m"), unsure_as="hold")
    assert third.acquired.run_id == first.acquired.run_id
    assert third.begin(third.step("charge")) == Begun(2, is_unsure=False)


def test_a_failure_that_came_of_something_else_stays(desk):
    run = Run(desk)
    run.begin(run.step("charge"))
    run.finish()
    assert desk.store.resolve_step(run.claim.record, "charge", VALUE) == ("resolved", "")
    assert desk.execution(run.claim)["outcome"] == "failed"


def test_a_step_that_lacks_its_result_can_be_given_one(desk):
    run = Run(desk)
    run.do("odd", NONE)
    record = run.claim.record
    assert desk.store.resolve_step(record, "odd", None) == ("certain", "done")
    assert desk.store.resolve_step(record, "odd", VALUE) == ("resolved", "")
    assert run.begin(run.step("odd")) == Done(VALUE, "")


def test_two_stores_of_other_prefixes_do_not_meet(desk):
    run = Run(desk)
    run.do("one")
    other = Store(desk.connections, KeySpace("other"))
    assert not other.forget_steps(run.claim.record)
