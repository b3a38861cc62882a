"""`enter`, when the trigger is over or another copy of its message is the one that counts."""

from __future__ import annotations

import pytest
from desk import OTHER_LOCK

from celery_singleflight.claims import Encoded, Ended, Held, Outcome, Surplus
from celery_singleflight.errors import ExecutionKeyReused

BODIES = pytest.mark.parametrize(
    "body",
    [b"null", b"0", b'""', b"false", b"", bytes(range(256))],
    ids=["None", "0", "empty text", "False", "nothing", "every byte"],
)
ENDED_BY = {"skip": Outcome.SKIPPED, "reject": Outcome.REJECTED}
KEYS = pytest.mark.parametrize("execution_key", [None, "invoice:1"], ids=["task id", "execution key"])
RAN = pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED])


def ended(outcome, body=b"42", *, settled=False, reason=()):
    return Ended(outcome, settled, list(reason), Encoded("application/json", "utf-8", body), ended_as=outcome, calls=[])


@KEYS
@BODIES
def test_a_trigger_that_succeeded_is_answered_with_its_stored_value(desk, execution_key, body):
    desk.run(desk.claim(execution_key=execution_key), body=body)

    assert desk.enter(desk.claim(execution_key=execution_key)) == ended(Outcome.SUCCEEDED, body)


@KEYS
@RAN
def test_an_ended_trigger_stays_ended_and_says_whether_it_is_settled(desk, execution_key, outcome):
    first = desk.claim(execution_key=execution_key)
    desk.run(first, outcome, reason='["it says why"]')
    again = desk.claim(execution_key=execution_key)

    assert desk.enter(again) == ended(outcome, reason=["it says why"])
    desk.settle(first)  # too late: the trigger is the answered delivery's to settle
    assert desk.enter(again) == ended(outcome, reason=["it says why"])
    desk.settle(again)
    assert desk.enter(desk.claim(execution_key=execution_key)) == ended(outcome, settled=True, reason=["it says why"])


@KEYS
@RAN
@pytest.mark.parametrize("on_held", ["wait", "skip", "reject"])
def test_a_delivery_that_has_just_ended_its_trigger_is_given_time_to_send_what_follows(desk, execution_key, outcome, on_held):
    desk.run(desk.claim(execution_key=execution_key), outcome)
    again = desk.claim(execution_key=execution_key, copy="c1", previous="", on_held=on_held, wait=0.0, first_ms="1", grace=60.0)

    held = desk.enter(again)

    assert isinstance(held, Held)
    assert (held.what, held.task_id, held.worker, held.turn, held.first_ms) == ("own", "t1", "", 0.0, "1")
    assert 0.0 <= held.age < 5.0
    assert held.age + held.remaining == pytest.approx(60.0)
    assert desk.trigger(again)["copy"] == "c1"
    assert desk.trigger(again)["outcome"] == outcome.value


@KEYS
@RAN
def test_the_time_to_send_what_follows_is_over_after_a_while(desk, execution_key, outcome):
    claim = desk.claim(execution_key=execution_key)
    desk.run(claim, outcome)
    desk.client.hset(desk.trigger_name(claim), "ended_ms", desk.keyspace.now_ms() - 60_000)

    assert desk.enter(desk.claim(execution_key=execution_key, grace=60.0)) == ended(outcome)


@KEYS
@RAN
def test_what_follows_a_settled_trigger_has_been_sent_and_needs_no_time(desk, execution_key, outcome):
    claim = desk.claim(execution_key=execution_key)
    desk.run(claim, outcome)
    desk.settle(claim)

    assert desk.enter(desk.claim(execution_key=execution_key, grace=60.0)) == ended(outcome, settled=True)


@KEYS
@RAN
def test_the_delivery_that_has_ended_its_trigger_is_told_at_once(desk, execution_key, outcome):
    claim = desk.claim(execution_key=execution_key, grace=60.0)
    desk.run(claim, outcome)

    assert desk.enter(claim) == ended(outcome)


@pytest.mark.parametrize(("on_held", "outcome"), [("skip", Outcome.SKIPPED), ("reject", Outcome.REJECTED)])
def test_a_delivery_that_was_told_not_to_run_is_given_time_too(desk, on_held, outcome):
    desk.acquire(desk.claim("holder"))
    assert desk.enter(desk.claim("t1", on_held=on_held)).outcome is outcome

    assert desk.enter(desk.claim("t1", on_held=on_held, grace=60.0)).what == "own"
    assert desk.enter(desk.claim("t1", on_held=on_held, grace=0.0)).outcome is outcome


def test_another_trigger_of_a_completed_execution_is_answered_at_once(desk):
    desk.run(desk.claim("leader", execution_key="invoice:1"))
    follower = desk.claim("follower", execution_key="invoice:1", grace=60.0)

    assert desk.enter(follower).outcome is Outcome.SUCCEEDED
    assert desk.enter(follower).outcome is Outcome.SUCCEEDED
    assert desk.enter(desk.claim("follower", execution_key="invoice:1", grace=60.0)).what == "own"


def test_a_trigger_whose_value_could_not_be_stored_is_answered_without_a_content_type(desk):
    claim = desk.claim()
    acquired = desk.acquire(claim)
    nothing = Encoded("", "", b"")
    desk.store.finish(
        desk.lease(claim, acquired.token),
        claim.record,
        Outcome.SUCCEEDED,
        nothing,
        reason='["why"]',
        keep=600.0,
    )

    assert desk.enter(desk.claim()) == ended(Outcome.SUCCEEDED, reason=["why"])._replace(value=nothing)


@BODIES
@pytest.mark.parametrize("lock_key", [None, OTHER_LOCK], ids=["same lock key", "other lock key"])
def test_another_trigger_of_a_completed_execution_is_answered_with_its_value(desk, lock_key, body):
    where = {"lock_key": lock_key} if lock_key else {}
    desk.run(desk.claim("leader", execution_key="invoice:1"), body=body)
    follower = desk.claim("follower", execution_key="invoice:1", **where)

    answer = desk.enter(follower)

    assert answer == ended(Outcome.SUCCEEDED, body, reason=["answered", "leader"])
    assert desk.enter(follower) == answer
    desk.settle(follower)
    assert desk.enter(follower) == answer._replace(settled=True)
    third = desk.enter(desk.claim("third", execution_key="invoice:1", **where))
    assert third == answer


def test_an_answer_takes_neither_lease_nor_token(desk):
    leader = desk.claim("leader", execution_key="invoice:1")
    token = desk.run(leader).token

    desk.enter(desk.claim("follower", execution_key="invoice:1"))

    assert desk.scores(leader) == {}
    assert desk.client.get(desk.fence_name(leader)) == str(token)


def test_a_completed_execution_answers_while_its_lock_key_is_held(desk):
    desk.run(desk.claim("leader", execution_key="invoice:1"))
    desk.acquire(desk.claim("another", execution_key="invoice:2"))

    assert desk.enter(desk.claim("follower", execution_key="invoice:1", on_held="skip")).outcome is Outcome.SUCCEEDED


def test_with_nothing_to_be_kept_an_answered_trigger_is_remembered_for_an_hour(desk):
    desk.run(desk.claim("leader", execution_key="invoice:1"))
    follower = desk.claim("follower", execution_key="invoice:1", keep=0.0)

    assert desk.enter(follower).outcome is Outcome.SUCCEEDED
    assert 3_595_000 < desk.keyspace.ttls()[desk.trigger_name(follower)] <= 3_600_000


def test_a_failed_execution_is_run_again_by_another_trigger(desk):
    failed = desk.claim("t1", execution_key="invoice:1", run_id="run-1")
    desk.run(failed, Outcome.FAILED)

    answer = desk.acquire(desk.claim("t2", execution_key="invoice:1", run_id="run-2"))

    assert (answer.run_id, answer.attempt) == ("run-2", 1)


def test_a_failed_trigger_does_not_run_again_after_another_has_succeeded_with_its_execution_key(desk):
    desk.run(desk.claim("t1", execution_key="invoice:1"), Outcome.FAILED, body=b"error")
    desk.run(desk.claim("t2", execution_key="invoice:1"))

    assert desk.enter(desk.claim("t1", execution_key="invoice:1")) == ended(Outcome.FAILED, b"error")


def test_a_trigger_that_is_still_to_be_answered_runs_again_when_the_value_is_kept_no_longer(desk):
    leader, follower = desk.claim("leader", execution_key="invoice:1"), desk.claim("follower", execution_key="invoice:1")
    desk.run(leader)
    assert isinstance(desk.enter(follower), Ended)
    desk.client.delete(desk.execution_name(leader))

    token = desk.acquire(follower).token

    assert desk.trigger(follower) == {"generation": "0", "copy": "", "has_run": "1", "group": str(token)}


def test_a_trigger_that_was_answered_is_over_also_when_the_value_is_kept_no_longer(desk):
    leader, follower = desk.claim("leader", execution_key="invoice:1"), desk.claim("follower", execution_key="invoice:1")
    desk.run(leader)
    desk.enter(follower)
    desk.settle(follower)
    desk.client.delete(desk.execution_name(leader))

    again = desk.enter(follower._replace(owner="redelivered"))

    assert (again.outcome, again.settled) == (Outcome.SUCCEEDED, True)


@pytest.mark.parametrize("on_held", ["skip", "reject"])
def test_the_answer_of_an_execution_that_is_kept_no_longer_is_not_settled_for_the_next_outcome(desk, on_held):
    leader, claim = desk.claim("leader", execution_key="invoice:1"), desk.claim("t1", execution_key="invoice:1")
    desk.run(leader)
    desk.enter(claim)
    desk.client.delete(desk.execution_name(leader))
    desk.acquire(desk.claim("t2", execution_key="invoice:1"))
    again = desk.claim("t1", execution_key="invoice:1", on_held=on_held)

    answers = [desk.enter(again), desk.enter(again)]

    assert [answer.settled for answer in answers] == [False, False]


def test_another_trigger_with_the_default_execution_key_is_not_answered(desk):
    desk.run(desk.claim("t1"))
    desk.acquire(desk.claim("t2"))


@RAN
@KEYS
def test_a_message_of_a_later_generation_does_not_run_an_ended_trigger_again(desk, outcome, execution_key):
    """A run that has sent its retry and died is run again, and ends the trigger before the retry comes."""
    claim = desk.claim(execution_key=execution_key, message=b"first")
    desk.run(claim, outcome)
    desk.settle(claim)

    ended = desk.enter(desk.claim(generation=1, execution_key=execution_key, message=b"retry"))

    assert (ended.outcome, ended.settled, ended.value.body) == (outcome, True, b"42")
    assert desk.message(claim) is None


def test_a_retry_of_an_execution_that_has_succeeded_is_answered_from_it(desk):
    claim = desk.claim(execution_key="invoice:1", message=b"first")
    desk.run(claim)
    desk.settle(claim)

    assert desk.enter(desk.claim(generation=1, execution_key="invoice:1")).value.body == b"42"


def test_an_execution_key_belongs_to_the_task_that_used_it_first(desk):
    claim = desk.claim("t1", execution_key="invoice:1", task="shop.bill")
    token = desk.acquire(claim).token
    for name in ("t2", "t4"):
        other = desk.claim(name, execution_key="invoice:1", task="shop.ship")
        before = desk.client.hgetall(desk.execution_name(claim))
        with pytest.raises(ExecutionKeyReused, match=r"shop\.bill"):
            desk.enter(other)
        assert desk.client.hgetall(desk.execution_name(claim)) == before
        answer = desk.enter(other)  # when the reply was lost
        assert (answer.outcome, answer.reason) == (Outcome.FAILED, ["task", "shop.bill"])
        desk.finish(claim, token)
    desk.acquire(desk.claim("t3", task="shop.ship"))


@pytest.mark.parametrize("on_held", ["skip", "reject"])
@KEYS
def test_a_trigger_that_was_cut_off_waits_whatever_the_policy(desk, on_held, execution_key):
    claim = desk.claim("t1", execution_key=execution_key, on_held=on_held, wait=60.0, message=b"a message")
    desk.acquire(claim)
    desk.abandon(claim, again=5.0, died=True)
    desk.acquire(desk.claim("holder"))

    assert desk.enter(claim._replace(owner="redelivered")).what == "lock"
    assert desk.enter(desk.claim("t2", execution_key=execution_key, on_held=on_held)).outcome in ENDED_BY.values()


def test_a_lease_that_a_dead_run_of_the_trigger_has_left_is_its_own(desk):
    claim = desk.claim("t1", on_held="skip")
    desk.acquire(claim)
    desk.client.hdel(desk.execution_name(claim), "owner")

    assert desk.enter(desk.claim("t1", on_held="ask")).what == "lock"
    assert desk.enter(claim._replace(owner="redelivered")).what == "own"
    assert desk.enter(claim._replace(owner="retried", generation=1)).what == "predecessor"


def test_a_message_from_before_a_retry_is_surplus(desk):
    first = desk.claim(generation=0)
    desk.acquire(first)
    desk.abandon(first, generation=1)
    before = desk.keyspace.snapshot()

    assert desk.enter(desk.claim(generation=0)) == Surplus("generation")
    assert desk.keyspace.snapshot() == before
    desk.acquire(desk.claim(generation=1))


def test_a_message_from_before_a_retry_is_surplus_although_the_retry_has_never_been_abandoned_for(desk):
    desk.acquire(desk.claim("holder"))
    assert isinstance(desk.enter(desk.claim("t1", generation=1)), Held)

    assert desk.enter(desk.claim("t1", generation=0)) == Surplus("generation")


def test_of_the_copies_of_a_waiting_message_only_the_newest_counts(desk):
    desk.acquire(desk.claim("holder"))
    first = desk.claim("t1")
    second = desk.claim("t1", copy="c2", previous="")
    third = desk.claim("t1", copy="c3", previous="c2")
    stray = desk.claim("t1", copy="c9", previous="c8")

    assert isinstance(desk.enter(first), Held)
    assert isinstance(desk.enter(first), Held), "a redelivery of the copy that counts is no other copy"
    assert desk.enter(third) == Surplus("copy"), "made from a copy that was never seen"
    assert isinstance(desk.enter(second), Held)
    assert desk.enter(first) == Surplus("copy")
    assert isinstance(desk.enter(second), Held)
    assert isinstance(desk.enter(third), Held)
    before = desk.keyspace.snapshot()
    assert [desk.enter(claim) for claim in (first, second, stray)] == [Surplus("copy")] * 3
    assert desk.keyspace.snapshot() == before


def test_a_later_generation_counts_whatever_copy_was_the_last_one(desk):
    desk.acquire(desk.claim("holder"))
    assert isinstance(desk.enter(desk.claim("t1", copy="c1", previous="c0")), Held)

    assert isinstance(desk.enter(desk.claim("t1", copy="c7", previous="c6", generation=1)), Held)
    assert desk.enter(desk.claim("t1", copy="c2", previous="c1", generation=1)) == Surplus("copy")


def test_a_surplus_copy_of_an_ended_trigger_is_not_answered(desk):
    desk.run(desk.claim("t1", copy="c1", previous=""))

    assert desk.enter(desk.claim("t1")) == Surplus("copy")
    assert desk.enter(desk.claim("t1", copy="c1", previous="")).outcome is Outcome.SUCCEEDED
