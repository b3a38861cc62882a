"""`settle`: what follows a trigger has been sent, so a further copy of its message needs no answer."""

from __future__ import annotations

import pytest
from desk import FAR_LOCK, OTHER_LOCK

from celery_singleflight.claims import Outcome
from celery_singleflight.custody import GRACE, Settled
from celery_singleflight.script import load

SETTLE = load("settle")
KEYS = pytest.mark.parametrize("execution_key", [None, "invoice:1"], ids=["task id", "execution key"])


def settled(desk, claim):
    """Ask as the trigger's own owner would, so that the answer changes nothing."""
    return desk.enter(claim).settled


def test_the_owner_that_ended_a_trigger_settles_it(desk):
    claim = desk.claim()
    desk.run(claim)
    assert not settled(desk, claim)

    desk.settle(claim)

    assert settled(desk, claim)


def test_settling_again_changes_nothing(desk):
    claim = desk.claim()
    desk.run(claim)
    desk.settle(claim)
    before = desk.keyspace.snapshot()

    desk.settle(claim)
    assert desk.keyspace.snapshot() == before


def test_another_owner_does_not_settle_a_trigger(desk):
    claim = desk.claim()
    desk.run(claim)
    before = desk.keyspace.snapshot()

    desk.settle(desk.claim(), desk.claim(owner=""))
    assert desk.keyspace.snapshot() == before


def test_a_trigger_is_settled_by_the_delivery_that_was_answered_last(desk):
    first, second = desk.claim(), desk.claim()
    desk.run(first)
    assert desk.enter(second).outcome is Outcome.SUCCEEDED

    desk.settle(first)
    assert not settled(desk, second)
    desk.settle(second)
    assert settled(desk, second)


def test_a_skipped_trigger_is_settled_too(desk):
    desk.acquire(desk.claim("holder"))
    skipped = desk.claim("t1", on_held="skip")
    assert desk.enter(skipped).outcome is Outcome.SKIPPED

    desk.settle(skipped)
    assert settled(desk, skipped)


def test_a_running_trigger_cannot_be_settled(desk):
    claim = desk.claim()
    acquired = desk.acquire(claim)

    desk.settle(claim)
    desk.finish(claim, acquired.token)

    assert not settled(desk, claim)


def test_settling_a_trigger_that_the_store_forgot_creates_nothing(desk):
    desk.settle(desk.claim(), desk.claim("t2", owner=""))
    assert desk.keyspace.names() == []


def test_settling_does_not_keep_an_outcome_for_longer(desk):
    claim = desk.claim()
    desk.run(claim, keep=100.0)
    (_, before) = desk.keyspace.snapshot()[desk.trigger_name(claim)]

    desk.settle(claim)

    assert desk.keyspace.snapshot()[desk.trigger_name(claim)][1] == before


def test_many_triggers_of_several_lock_names_are_settled_at_once(desk):
    claims = [desk.claim(f"t{n}", lock_key=key) for n in range(10) for key in (OTHER_LOCK, FAR_LOCK)]
    for claim in claims:
        desk.run(claim)
    stranger = desk.claim("stranger")
    desk.run(stranger)

    desk.settle(*claims, stranger._replace(owner="somebody"))

    assert all(settled(desk, claim) for claim in claims)
    assert not settled(desk, stranger)


def test_settling_nothing_asks_nothing(desk):
    desk.settle()
    assert desk.keyspace.names() == []


def test_the_reply_counts_those_that_the_given_owners_had_ended(desk):
    mine, other = desk.claim("t1"), desk.claim("t2")
    desk.run(mine)
    desk.run(other)
    places = [name for claim in (mine, other, desk.claim("t3")) for name in (desk.trigger_name(claim), desk.due_name(claim))]

    told = ((mine.owner, "t1"), ("somebody", "t2"), ("nobody", "t3"))
    facts = [fact for owner, member in told for fact in (owner, member, "", "failed")]
    raw = desk.connections.run(SETTLE, len(places), [*places, *facts])

    assert SETTLE.reply(raw) == ("settled", 1)


@KEYS
def test_the_message_of_a_settled_trigger_is_kept_no_longer(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.run(claim)
    assert (desk.message(claim), set(desk.due(claim))) == (b"a message", {claim.record.member})

    desk.settle(claim)

    assert (desk.message(claim), desk.due(claim)) == (None, {})
    assert desk.due_name(claim) not in desk.keyspace.names(), "it goes with its last member"
    assert desk.rescue(claim) is None


def test_the_messages_of_other_triggers_are_kept(desk):
    claim, other = desk.claim("t1", message=b"1"), desk.claim("t2", message=b"2")
    desk.run(claim)
    desk.run(other)

    desk.settle(claim, other._replace(owner="somebody"))

    assert (desk.message(other), set(desk.due(claim))) == (b"2", {"t2"})


# While Celery is still sending


@KEYS
def test_an_ending_that_goes_on_is_left_alone_for_longer(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=b"a message", grace=GRACE)
    desk.run(claim)
    desk.client.hset(desk.trigger_name(claim), "ended_ms", desk.keyspace.now_ms() - 4000)
    desk.overdue(claim)

    desk.settle(claim, is_done=False)

    assert desk.due_in(claim) == pytest.approx(GRACE, abs=1.0)
    assert desk.keyspace.now_ms() - int(desk.trigger(claim)["ended_ms"]) < 1000
    assert desk.rescue(claim) is None
    assert desk.message(claim) == b"a message"
    assert not settled(desk, claim)
    assert desk.enter(desk.claim(execution_key=execution_key, grace=GRACE)).what == "own"


def test_an_ending_that_goes_on_can_be_told_again_and_is_settled_in_the_end(desk):
    claim = desk.claim(message=b"a message")
    desk.run(claim)
    desk.settle(claim, is_done=False)
    desk.settle(claim, is_done=False)
    assert set(desk.due(claim)) == {"t1"}

    desk.settle(claim)

    assert (desk.message(claim), desk.due(claim), settled(desk, claim)) == (None, {}, True)


def test_an_ending_that_nobody_is_to_look_at_is_not_put_into_the_index(desk):
    claim = desk.claim()
    desk.run(claim)

    desk.settle(claim, is_done=False)

    assert desk.due(claim) == {}
    assert not settled(desk, claim)


def test_another_owner_does_not_put_off_the_look_at_a_trigger(desk):
    claim, heir = desk.claim(message=b"1"), desk.claim(message=b"2")
    desk.run(claim)
    assert desk.enter(heir).outcome is Outcome.SUCCEEDED
    before = desk.keyspace.snapshot()

    desk.settle(claim, is_done=False)

    assert desk.keyspace.snapshot() == before


def test_done_and_going_on_are_told_in_one_exchange(desk):
    done, going_on = desk.claim("t1", message=b"1"), desk.claim("t2", lock_key=FAR_LOCK, message=b"2")
    desk.run(done)
    desk.run(going_on)

    desk.store.settle([(done.record, done.owner, True), (going_on.record, going_on.owner, False)])

    assert (desk.due(done), set(desk.due(going_on))) == ({}, {"t2"})
    assert desk.due_in(going_on) == pytest.approx(GRACE, abs=1.0)


# Dead letters


@KEYS
def test_the_message_of_a_dead_letter_is_kept_for_whoever_wants_to_see_it(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=b"a message", max_deliveries=1)
    desk.die(claim)
    heir = claim._replace(owner="heir")
    assert desk.enter(heir).outcome is Outcome.DEAD_LETTERED

    desk.settle(heir)

    assert (desk.message(heir), desk.due(heir)) == (b"a message", {})
    assert settled(desk, heir)
    assert desk.rescue(heir) is None


# What is kept for a replay


@KEYS
@pytest.mark.parametrize(
    ("keeps", "outcome", "is_kept"),
    [
        ("failed", Outcome.FAILED, True),
        ("failed", Outcome.REPLACED, True),
        ("failed", Outcome.SUCCEEDED, False),
        ("always", Outcome.SUCCEEDED, True),
        ("always", Outcome.FAILED, True),
        ("never", Outcome.FAILED, False),
        ("never", Outcome.SUCCEEDED, False),
    ],
)
def test_a_message_is_kept_for_a_replay_as_the_task_says(desk, execution_key, keeps, outcome, is_kept):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.run(claim, outcome)

    desk.store.settle([Settled(claim.record, claim.owner, is_done=True, keeps=keeps)])

    assert (desk.message(claim), settled(desk, claim)) == (b"a message" if is_kept else None, True)
    assert desk.due(claim) == {}


@KEYS
def test_a_kept_message_is_not_handed_out_though_something_has_it_looked_at(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.run(claim, Outcome.FAILED)
    desk.store.settle([Settled(claim.record, claim.owner, is_done=True, keeps="failed")])
    desk.client.zadd(desk.due_name(claim), {claim.record.member: 1})

    assert desk.rescue(claim) is None
    assert desk.enter(claim._replace(owner="again")).settled
    assert (desk.message(claim), desk.due(claim)) == (b"a message", {})


@pytest.mark.parametrize("keeps", [True, False])
def test_the_message_of_a_run_that_was_concluded_is_kept_if_the_task_says_so(desk, keeps):
    claim = desk.claim(message=b"a message")
    desk.acquire(claim)

    assert desk.conclude(claim, keeps=keeps)

    assert (desk.message(claim), settled(desk, claim)) == (b"a message" if keeps else None, True)
    assert desk.due(claim) == {}
