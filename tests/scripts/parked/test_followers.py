"""`follow`: a trigger gets the outcome of another, and Celery is told for each that it has one."""

from __future__ import annotations

import pytest
from desk import KEEP, OTHER_LOCK
from queue_desk import ids

from celery_singleflight.claims import Acquired, Encoded, Ended, Held, Led, Outcome, Terms
from celery_singleflight.errors import PayloadMismatch

#: With an explicit execution key the leader's value is kept apart from its trigger.
KEYS = pytest.mark.parametrize("execution_key", [None, "invoice:1", "two\nlines"], ids=["task id", "explicit", "lines"])


def group(desk, count=1, kind="join", **leader):
    """A holder whose outcome so many wait for. Returns it, its token and the others."""
    holder, token = desk.hold("leader", kind, digest="d1", **leader)
    if kind == "join":
        return holder, token, [desk.park(f"f{n}", "join", digest="d1") for n in range(count)]
    first = desk.park("first", "coalesce", which="first")
    others = [desk.park(f"f{n}", "coalesce", which="first") for n in range(count)]
    desk.end(holder, token)
    copy = desk.copy_of(first)
    return copy, desk.acquire(copy).token, others


def led(desk, claim):
    """The delivery of one that was handed out, and by whom it is led."""
    copy = desk.copy_of(claim)
    answer = desk.enter(copy)
    assert isinstance(answer, Led), answer
    return copy, answer.by


def follow(desk, claim):
    copy, by = led(desk, claim)
    return copy, desk.store.follow(copy, by)


@KEYS
@pytest.mark.parametrize("keep", [KEEP, 1.0])
def test_a_result_is_given_however_short_its_execution_is_kept(desk, execution_key, keep):
    holder, token, (follower,) = group(desk, execution_key=execution_key)
    desk.end(holder, token, body=b"the result", keep=keep)
    if execution_key:
        assert led(desk, follower)[1] == f"leader\n{execution_key}"
    if execution_key and keep == 1.0:
        desk.client.delete(desk.execution_name(holder))

    _, ended = follow(desk, follower)

    assert isinstance(ended, Ended)
    assert (ended.outcome, ended.settled, ended.value.body) == (Outcome.SUCCEEDED, False, b"the result")


@KEYS
def test_a_failure_is_given_to_who_was_coalesced_into_it(desk, execution_key):
    holder, token = desk.hold()
    runs = desk.park("first", "coalesce", which="first", execution_key=execution_key)
    follower = desk.park("f0", "coalesce", which="first")
    desk.end(holder, token)
    assert desk.run_called(runs, Outcome.FAILED, body=b"the error") == ["f0"]

    _, ended = follow(desk, follower)

    assert (ended.outcome, ended.ended_as, ended.value.body) == (Outcome.COALESCED, Outcome.FAILED, b"the error")


def test_who_was_answered_from_its_execution_leads_too(desk):
    holder, token = desk.hold()
    runs = desk.park("first", "coalesce", which="first", execution_key="invoice:1")
    follower = desk.park("f0", "coalesce", which="first")
    desk.end(holder, token)
    other = desk.waits("other", execution_key="invoice:1", lock_key=runs.record.lock_key._replace(text='billing["acct_2"]'))
    desk.succeed(other)

    answer = desk.come(runs)

    assert (answer.outcome, ids(answer.calls)) == (Outcome.SUCCEEDED, ["f0"])
    _, ended = follow(desk, follower)
    assert (ended.outcome, ended.value.body) == (Outcome.COALESCED, b"42")


@pytest.mark.parametrize("waits", [True, False], ids=["from the line", "from the broker"])
def test_a_leader_that_retries_and_is_answered_from_its_execution_leads_too(desk, waits):
    holder, _, (follower,) = group(desk, execution_key="invoice:1")
    desk.give_back(holder, generation=1)
    retry = desk.redelivered(holder, generation=1)
    if waits:
        other, token = desk.hold("other")
        assert desk.enter(retry).how == "line"
        assert desk.end(other, token)[:1] == ["leader"]
        retry = desk.copy_of(retry)
    elsewhere = holder.record.lock_key._replace(text='billing["acct_2"]')
    desk.succeed(desk.waits("third", execution_key="invoice:1", lock_key=elsewhere))

    answer = desk.enter(retry)

    assert (answer.outcome, ids(answer.calls)) == (Outcome.SUCCEEDED, ["f0"])
    assert follow(desk, follower)[1].value.body == b"42"


@pytest.mark.parametrize("kind", ["join", "coalesce"])
def test_many_are_handed_out_a_few_at_once_and_each_hands_out_two_more(desk, kind):
    holder, token, followers = group(desk, 30, kind)
    waiting = {claim.record.task_id: claim for claim in followers}
    out = desk.end(holder, token)
    assert len(out) == 8
    rounds = 0
    while out:
        rounds += 1
        _, ended = follow(desk, waiting.pop(out.pop(0)))
        calls = ids(ended.calls)
        assert len(calls) == min(2, len(waiting) - len(out))
        out += calls
    assert (rounds, waiting) == (30, {})
    desk.check_gone()


def test_a_sweeper_hands_out_those_whose_turn_got_lost(desk):
    holder, token, followers = group(desk, 30)
    out = desk.end(holder, token)
    assert 0.0 < desk.attention_in() <= 2.0
    out += desk.attend()
    assert len(out) == 28
    out += desk.attend()
    assert sorted(out) == sorted(claim.record.task_id for claim in followers)
    assert desk.attend() == []


def test_one_that_was_handed_out_and_does_not_come_is_handed_out_again(desk):
    holder, token, (follower,) = group(desk)
    desk.lose_next_reply()
    assert desk.end(holder, token) == []
    assert 0.0 < desk.due_in(follower) <= 5.0
    desk.overdue(follower)

    assert desk.look_at(follower) == "f0"

    assert follow(desk, follower)[1].outcome is Outcome.SUCCEEDED


# Once


def test_a_lost_reply_gives_the_same_outcome_again(desk):
    holder, token, (follower,) = group(desk)
    desk.end(holder, token)
    copy, by = led(desk, follower)
    desk.lose_next_reply()
    ended = desk.store.follow(copy, by)
    assert (ended.outcome, ended.settled, ended.value.body) == (Outcome.SUCCEEDED, False, b"42")


def test_of_two_deliveries_that_ask_at_once_one_gets_it(desk):
    holder, token, (follower,) = group(desk)
    desk.end(holder, token)
    (one, by), (two, _) = led(desk, follower), led(desk, follower)
    grace = {"grace": 5.0}
    one, two = one._replace(**grace), two._replace(**grace)
    assert desk.store.follow(one, by).outcome is Outcome.SUCCEEDED

    assert desk.store.follow(two, by) is None

    answer = desk.enter(one._replace(owner="third"))
    assert isinstance(answer, Held)
    assert answer.what == "own"
    assert desk.store.follow(one, by).outcome is Outcome.SUCCEEDED


def test_another_delivery_gets_it_when_the_first_has_died_with_it(desk):
    holder, token, (follower,) = group(desk)
    desk.end(holder, token)
    copy, _ = follow(desk, follower)
    assert desk.message(follower) == b"f0", "until Celery has sent what follows"

    heir = desk.redelivered(copy)
    answer = desk.enter(heir)
    assert answer == Led("leader")
    assert desk.store.follow(heir, answer.by).value.body == b"42"

    desk.settle(heir)
    assert desk.message(follower) is None
    assert desk.enter(desk.redelivered(copy)).settled


# Nobody knows any more


def test_who_is_led_by_one_that_nobody_knows_any_more_is_a_newcomer_again(desk):
    holder, token, (follower,) = group(desk)
    desk.end(holder, token)
    copy, by = led(desk, follower)
    desk.client.delete(desk.trigger_name(holder))

    assert desk.store.follow(copy, by) is None

    assert isinstance(desk.enter(copy), Acquired)
    desk.check_gone()


def test_who_finds_its_leader_unknown_leaves_those_who_are_next_to_a_sweeper(desk):
    holder, token, (follower,) = group(desk)
    desk.park("w0")
    assert sorted(desk.end(holder, token)) == ["f0", "w0"]
    copy, by = led(desk, follower)
    desk.park("w1")
    desk.client.delete(desk.trigger_name(holder))

    assert desk.store.follow(copy, by) is None

    assert desk.attention_in() <= 0.0
    desk.let_call_be_missed(desk.waits("w0"))
    assert desk.attend() == ["w1"]


def test_whoever_joined_does_not_get_a_failure_though_others_of_the_group_do(desk):
    holder, token = desk.hold()
    runs = desk.park("runs", "coalesce", which="first", digest="d1")
    coalesced = desk.park("a0", "coalesce", which="first", digest="d1")
    desk.end(holder, token)
    copy = desk.copy_of(runs)
    token = desk.acquire(copy).token
    joined = desk.park("j0", "join", digest="d1")
    assert desk.end(copy, token, Outcome.FAILED) == ["a0", "j0"]

    delivery, by = led(desk, joined)
    assert desk.store.follow(delivery, by) is None
    assert isinstance(desk.enter(delivery), Acquired)
    assert follow(desk, coalesced)[1].ended_as is Outcome.FAILED


# Nobody leads any more


def test_who_follows_one_that_never_ends_runs_itself_after_half_a_day(desk):
    holder, _, (follower, _) = group(desk, 2)
    desk.overdue(follower)
    assert desk.look_at(follower) is None
    assert desk.line() == [], "the leader holds the lock key"
    desk.give_back(holder, generation=1)
    desk.overdue(follower)

    assert desk.look_at(follower) is None

    assert desk.line() == ["f0"]
    assert desk.attend() == ["f0"]
    assert desk.run_called(follower) == ["f1"]


def test_who_follows_is_left_alone_while_its_leader_may_be_in_line(desk):
    holder, token = desk.hold()
    desk.park("first", "coalesce", which="first")
    follower = desk.park("f0", "coalesce", which="first")
    desk.overdue(follower)
    assert desk.look_at(follower) is None
    assert (desk.line(), set(desk.followers())) == (["first"], {"f0"})
    assert desk.end(holder, token) == ["first"]


@KEYS
@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
def test_what_is_said_of_a_leader_that_died_goes_on_to_those_who_follow_it(desk, execution_key, outcome):
    leader, _, (follower,) = group(desk, execution_key=execution_key, terms=Terms(holds=True))
    desk.store.abandon(leader.owner, leader.record, again=5.0, died=True)
    assert desk.enter(desk.redelivered(leader)).how == "held"
    said = Encoded("application/json", "utf-8", b"as was said")
    desk.store.resolve(leader.record, outcome, said, owner="", reason='["resolved"]', keep=KEEP, keeps_failure=False)

    ended = desk.come(leader)

    assert (ended.outcome, ids(ended.calls)) == (outcome, ["f0"])
    if outcome == "succeeded":
        assert follow(desk, follower)[1].value == said
    else:
        assert isinstance(desk.come(follower), Acquired), "it has joined one that failed, and runs itself"


def test_one_that_may_not_use_its_execution_key_leaves_those_who_follow_it_to_one_of_them(desk):
    holder, token = desk.hold()
    first = desk.park("first", "join", digest="d1", execution_key="invoice:1", terms=Terms(payload="A"))
    follower = desk.park("f0", "join", digest="d1")
    foreign = desk.waits("t9", execution_key="invoice:1", terms=Terms(payload="B"), lock_key=OTHER_LOCK)
    foreign_token = desk.acquire(foreign).token
    assert desk.end(holder, token) == ["first"]

    with pytest.raises(PayloadMismatch):
        desk.come(first)

    assert (desk.line(), desk.followers(), desk.attend()) == (["f0"], {}, ["f0"])
    desk.run_called(follower)
    desk.end(foreign, foreign_token)


def test_one_that_has_its_outcome_gets_that_though_its_execution_key_stands_for_something_else_by_then(desk):
    own = desk.waits("t1", execution_key="invoice:1", terms=Terms(payload="A"))
    desk.end(own, desk.acquire(own).token, Outcome.FAILED, body=b"an error")
    foreign = desk.waits("t2", execution_key="invoice:1", terms=Terms(payload="B"))
    token = desk.acquire(foreign).token

    ended = desk.enter(desk.redelivered(own))

    assert (ended.outcome, ended.value.body) == (Outcome.FAILED, b"an error")
    desk.end(foreign, token)


# Withdrawn


@pytest.mark.parametrize("when", ["while it follows", "when it is handed out"])
def test_one_that_is_revoked_leaves_the_others_with_their_leader(desk, when):
    holder, token, (first, second) = group(desk, 2)
    if when == "when it is handed out":
        desk.end(holder, token)
    desk.withdraw(first)
    if when == "while it follows":
        assert desk.end(holder, token) == ["f1"]

    ended = desk.come(first)

    assert ended.outcome is Outcome.REVOKED
    assert follow(desk, second)[1].outcome is Outcome.SUCCEEDED
    desk.check_gone()


def test_the_last_one_that_is_revoked_takes_all_that_is_kept_of_waiting_with_it(desk):
    _, _, (follower,) = group(desk)
    desk.withdraw(follower)
    assert desk.attention_in() is None
    desk.check_gone()
