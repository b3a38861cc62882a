"""`settle`: what follows a trigger has been sent, so a further copy of its message needs no answer."""

from __future__ import annotations

from desk import FAR_LOCK, OTHER_LOCK

from celery_singleflight.claims import Outcome
from celery_singleflight.script import load

SETTLE = load("settle")


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
    triggers = [desk.trigger_name(claim) for claim in (mine, other, desk.claim("t3"))]

    raw = desk.connections.run(SETTLE, 3, [*triggers, mine.owner, "somebody", "nobody"])

    assert SETTLE.reply(raw) == ("settled", 1)
