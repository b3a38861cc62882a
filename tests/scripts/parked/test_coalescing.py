"""`coalesce`: at most one waits; the others get its outcome."""

from __future__ import annotations

import pytest
from queue_desk import ids

from celery_singleflight.claims import Acquired, Ended, Led, Merge, Outcome, Parked


def coalesced(desk, task_id, which="newest", **how):
    """Have a trigger parked, or coalesced."""
    return desk.park(task_id, "coalesce", which=which, **how)


def follow(desk, claim):
    """Let one that was handed out come, and get its outcome."""
    copy = desk.copy_of(claim)
    led = desk.enter(copy)
    assert isinstance(led, Led), led
    return desk.store.follow(copy, led.by)


# Whose arguments


def test_the_newest_waits_in_the_place_of_those_before_it(desk):
    desk.hold()
    desk.park("w0")
    for n in range(3):
        coalesced(desk, f"c{n}")
    desk.park("w1")
    coalesced(desk, "c3")

    assert desk.line() == ["w0", "c3", "w1"]
    assert set(desk.followers()) == {"c0", "c1", "c2"}
    assert len(set(desk.followers().values())) == 1


def test_the_first_waits_and_the_others_follow(desk):
    desk.hold()
    coalesced(desk, "c0", "first")

    answer = desk.enter(desk.waits("c1", "coalesce", which="first"))

    assert (answer.how, answer.task_id) == ("group", "c0")
    assert desk.line() == ["c0"]
    assert set(desk.followers()) == {"c1"}


@pytest.mark.parametrize("which", ["newest", "first"])
@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED])
def test_all_get_the_outcome_of_the_one_that_runs(desk, which, outcome):
    holder, token = desk.hold()
    claims = [coalesced(desk, f"c{n}", which) for n in range(4)]
    runs = claims[-1] if which == "newest" else claims[0]
    claims.remove(runs)
    (called,) = desk.end(holder, token)
    assert called == runs.record.task_id

    handed_out = desk.run_called(runs, outcome, body=b"the body")

    assert sorted(handed_out) == sorted(claim.record.task_id for claim in claims)
    for claim in claims:
        ended = follow(desk, claim)
        assert (ended.outcome, ended.ended_as, ended.value.body) == (Outcome.COALESCED, outcome, b"the body")
    desk.check_gone()


def test_who_comes_while_it_runs_is_not_lost_and_waits_for_the_next_run(desk):
    holder, token = desk.hold()
    first = coalesced(desk, "c0")
    desk.end(holder, token)
    copy = desk.copy_of(first)
    token = desk.acquire(copy).token

    late = coalesced(desk, "c1")

    assert desk.end(copy, token) == ["c1"]
    assert isinstance(desk.come(late), Acquired)


def test_a_call_that_takes_the_place_of_a_called_one_runs_at_once(desk):
    holder, token = desk.hold()
    older = coalesced(desk, "c0")
    desk.end(holder, token)

    newer = desk.waits("c1", "coalesce", which="newest")
    token = desk.acquire(newer).token

    assert desk.come(older).how == "again"
    assert desk.end(newer, token) == ["c0"]
    assert follow(desk, older).outcome is Outcome.COALESCED


def test_a_lost_reply_does_not_make_it_take_its_own_place(desk):
    desk.hold()
    coalesced(desk, "c0")
    desk.lose_next_reply()

    coalesced(desk, "c1")

    assert (desk.line(), set(desk.followers())) == (["c1"], {"c0"})


@pytest.mark.parametrize("which", ["newest", "first", "merged"])
def test_another_task_under_the_same_lock_key_is_not_coalesced_with_what_waits(desk, which):
    holder, token = desk.hold()
    first = coalesced(desk, "a0", which, digest="task a")

    other = coalesced(desk, "b0", which, digest="task b")

    assert (desk.line(), desk.followers()) == (["a0", "b0"], {})
    assert desk.end(holder, token) == ["a0"]
    assert desk.run_called(first) == ["b0"]
    assert isinstance(desk.come(other), Acquired)


def test_who_has_merged_with_one_that_has_gone_is_not_merged_with_that_of_another_task(desk):
    desk.hold()
    first = coalesced(desk, "a0", "merged", digest="task a")
    slow = desk.waits("a1", "coalesce", which="merged", digest="task a")
    asked = desk.enter(slow)
    desk.withdraw(first)
    coalesced(desk, "b0", "merged", digest="task b")

    waits = slow.waits._replace(merged_with=asked.by, merged_copy=asked.copy)
    answer = desk.enter(slow._replace(message=b"a0+a1", waits=waits))

    assert answer == Merge("", "", b"")
    assert isinstance(desk.enter(slow), Parked)
    assert desk.line() == ["b0", "a1"]


@pytest.mark.parametrize("outcome", [Outcome.REVOKED, Outcome.FAILED])
def test_one_whose_place_was_taken_may_end_by_itself_and_the_others_go_on(desk, outcome):
    holder, token = desk.hold()
    first, second, third = (coalesced(desk, f"c{n}") for n in range(3))

    desk.withdraw(second, outcome)

    assert desk.line() == ["c2"], "who has the outcome of another makes nobody run"
    assert set(desk.followers()) == {"c0"}
    desk.end(holder, token)
    assert desk.run_called(third) == ["c0"]
    assert follow(desk, first).ended_as is Outcome.SUCCEEDED


def test_when_the_one_that_waits_is_revoked_the_next_runs_for_the_others(desk):
    holder, token = desk.hold()
    first, second, third = (coalesced(desk, f"c{n}") for n in range(3))

    assert desk.withdraw(third) == []

    assert (desk.line(), set(desk.followers())) == (["c1"], {"c0"})
    assert desk.end(holder, token) == ["c1"]
    assert desk.run_called(second) == ["c0"]
    assert follow(desk, first).value.body == b"42"


@pytest.mark.parametrize("which", ["newest", "first"])
def test_when_the_one_that_waits_is_revoked_the_arguments_are_those_that_count_of_the_rest(desk, which):
    desk.hold()
    claims = [coalesced(desk, task_id, which) for task_id in ("c4", "c1", "c3", "c0", "c2")]
    for claim in reversed(claims) if which == "newest" else claims:
        assert desk.line() == [claim.record.task_id]
        desk.withdraw(claim)


# A merge


def test_who_merges_is_given_the_message_that_waits(desk):
    desk.hold()
    coalesced(desk, "c0", "merged", copy="k0")
    assert desk.enter(desk.waits("c1", "coalesce", which="merged")) == Merge("c0", "k0", b"c0")
    assert desk.line() == ["c0"]


def merged(desk, task_id, by, **how):
    """Have a trigger parked with the arguments of the one that waits."""
    claim = desk.waits(task_id, "coalesce", which="merged", **how)
    asked = desk.enter(claim)
    assert isinstance(asked, Merge), asked
    assert asked.by == by
    waits = claim.waits._replace(merged_with=asked.by, merged_copy=asked.copy)
    claim = claim._replace(message=asked.message + b"+" + claim.message, waits=waits)
    return claim, desk.enter(claim)


@pytest.mark.parametrize("execution_key", [None, "two\nlines"])
def test_what_is_merged_takes_the_place_of_what_waited(desk, execution_key):
    holder, token = desk.hold()
    first = coalesced(desk, "c0", "merged", execution_key=execution_key)

    _, answer = merged(desk, "c1", by=first.record.member)

    assert (answer.how, answer.place) == ("line", 0)
    assert desk.line() == ["c1"]
    assert desk.end(holder, token) == ["c0+c1"]


def test_when_what_is_merged_is_revoked_no_arguments_of_the_others_are_lost(desk):
    holder, token = desk.hold()
    coalesced(desk, "c9", "merged")
    merged(desk, "c5", by="c9")
    newest, _ = merged(desk, "c7", by="c5")

    desk.withdraw(newest)

    assert desk.end(holder, token) == ["c9+c5"]


def test_who_merges_too_late_is_given_what_waits_now(desk):
    desk.hold()
    coalesced(desk, "c0", "merged")
    slow = desk.waits("c2", "coalesce", which="merged")
    asked = desk.enter(slow)
    merged(desk, "c1", by="c0")

    again = desk.enter(slow._replace(waits=slow.waits._replace(merged_with=asked.by, merged_copy=asked.copy)))

    assert again == Merge("c1", "", b"c0+c1")


@pytest.mark.parametrize("state", ["runs", "has ended"])
def test_who_has_merged_with_one_that_runs_now_is_told_to_take_its_own_arguments_again(desk, state):
    holder, token = desk.hold()
    first = coalesced(desk, "c0", "merged")
    slow = desk.waits("c1", "coalesce", which="merged")
    asked = desk.enter(slow)
    desk.end(holder, token)
    copy = desk.copy_of(first)
    token = desk.acquire(copy).token
    if state == "has ended":
        desk.end(copy, token)

    waits = slow.waits._replace(merged_with=asked.by, merged_copy=asked.copy)
    answer = desk.enter(slow._replace(message=b"c0+c1", waits=waits))

    assert answer == Merge("", "", b"")
    assert isinstance(desk.enter(slow), Parked if state == "runs" else Acquired)


def test_a_redelivery_of_a_merged_one_neither_runs_nor_takes_the_place_of_what_is_merged(desk):
    holder, token = desk.hold()
    coalesced(desk, "c0", "merged")
    claim, _ = merged(desk, "c1", by="c0")
    original = desk.redelivered(desk.waits("c1", "coalesce", which="merged"))
    assert desk.enter(original).how == "again"
    assert desk.end(holder, token) == ["c0+c1"]

    assert desk.enter(original).how == "again"

    assert isinstance(desk.come(claim), Acquired)


# A delay


def delayed(desk, task_id, which="newest", **how):
    how = {"delay": 20.0, "within": 60.0, **how}
    return coalesced(desk, task_id, which, **how)


def ripe_in(desk):
    return (int(desk.pace()["ripe_ms"]) - desk.keyspace.now_ms()) / 1000


def test_a_delay_holds_back_though_nobody_is_in_the_way(desk):
    claim = delayed(desk, "c0")
    assert ripe_in(desk) == pytest.approx(20.0, abs=5.0)
    assert desk.attend() == []
    assert isinstance(desk.enter(desk.redelivered(claim)), Parked)
    desk.ripen()

    assert desk.attend() == ["c0"]

    assert isinstance(desk.come(claim), Acquired)
    desk.check_gone()


@pytest.mark.parametrize("which", ["newest", "first"])
def test_each_further_call_makes_the_delay_begin_anew_but_not_beyond_all(desk, which):
    delayed(desk, "c0", which)
    since = desk.keyspace.now_ms() - 30_000
    desk.client.hset(desk.name("pace"), mapping={"since_ms": since, "ripe_ms": since + 20_000})
    delayed(desk, "c1", which)
    assert ripe_in(desk) == pytest.approx(20.0, abs=5.0)
    desk.client.hset(desk.name("pace"), mapping={"since_ms": since - 20_000})
    delayed(desk, "c2", which)
    assert ripe_in(desk) == pytest.approx(10.0, abs=5.0)
    assert len(desk.line()) == 1


def test_a_sweeper_looks_when_the_delay_is_over(desk):
    delayed(desk, "c0", delay=1.0)
    assert 0.0 < desk.attention_in() <= 1.0


def test_who_is_held_back_holds_nobody_else_back(desk):
    held_back = delayed(desk, "c0")
    token = desk.acquire(newcomer := desk.waits("new")).token
    waiting = desk.park("w1")
    assert desk.end(newcomer, token) == ["w1"]
    copy = desk.copy_of(waiting)
    token = desk.acquire(copy).token
    assert isinstance(desk.enter(desk.claim("skips", on_held="skip")), Ended)
    assert desk.end(copy, token) == []
    assert desk.line() == [held_back.record.task_id]
    desk.succeed(desk.claim("asks", on_held="ask"))


def test_who_is_held_back_waits_for_its_turn_when_the_delay_is_over(desk):
    holder, token = desk.hold()
    claim = delayed(desk, "c0")
    desk.ripen()
    assert desk.attend() == []
    assert desk.end(holder, token) == ["c0"]
    assert isinstance(desk.come(claim), Acquired)


def test_the_delay_of_one_that_is_gone_is_not_that_of_the_next(desk):
    desk.withdraw(delayed(desk, "c0"))
    assert not {"gathers", "since_ms", "ripe_ms"} & set(desk.pace())
    assert ids(desk.acquire(desk.waits("c1", "coalesce", which="newest")).calls) == []
