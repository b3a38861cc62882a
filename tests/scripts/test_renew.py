"""`renew`: a lease is kept, and never brought back."""

from __future__ import annotations

import pytest
from desk import FAR_LOCK, OTHER_LOCK

from celery_singleflight.claims import Held
from celery_singleflight.store import Renewal


def test_a_live_lease_is_renewed_from_now_on(desk):
    claim = desk.claim(execution_key="invoice:1", ttl=10.0)
    token = desk.acquire(claim).token
    before = desk.keyspace.now_ms()

    assert desk.renew(claim, token, 1000.0) == ""

    ends = desk.scores(claim)[claim.owner]
    assert before <= ends - 1_000_000 <= desk.keyspace.now_ms()
    assert desk.execution(claim)["until_ms"] == f"{ends:.0f}"
    left = desk.keyspace.ttls()
    for name in (desk.lease_name(claim), desk.execution_name(claim)):
        assert left[name] > 1_000_000, name


def test_a_renewed_lease_keeps_its_token_and_its_holders_facts(desk):
    claim = desk.claim()
    acquired = desk.acquire(claim)
    holders = desk.holders(claim)

    assert desk.renew(claim, acquired.token) == ""

    assert desk.holders(claim) == holders
    assert desk.enter(claim) == acquired


def test_an_expired_lease_is_lost_and_stays_expired(desk):
    claim = desk.claim()
    desk.acquire(claim)
    desk.expire(claim)
    before = desk.keyspace.snapshot()

    assert desk.renew(claim) == "expired"
    assert desk.keyspace.snapshot() == before
    desk.acquire(desk.claim("t2"))


@pytest.mark.parametrize("heir", ["t1", "t2"], ids=["redelivery", "other trigger"])
def test_a_lease_that_was_taken_over_is_lost(desk, heir):
    claim = desk.claim("t1")
    desk.acquire(claim)
    desk.expire(claim)
    desk.acquire(desk.claim(heir))
    before = desk.keyspace.snapshot()

    assert desk.renew(claim) == "taken"
    assert desk.keyspace.snapshot() == before


def test_a_live_lease_whose_execution_another_owner_has_is_lost(desk):
    claim = desk.claim("t1", execution_key="invoice:1")
    heir = desk.claim("t2", execution_key="invoice:1", lock_key=OTHER_LOCK)
    desk.acquire(claim)
    desk.client.hset(desk.execution_name(claim), "until_ms", 1)
    desk.acquire(heir)
    before = desk.keyspace.snapshot()

    assert desk.renew(claim) == "taken"
    assert desk.keyspace.snapshot() == before


@pytest.mark.parametrize("how", ["finish", "abandon", "flush", "never had it"])
def test_renewing_never_creates_anything(desk, how):
    claim = desk.claim()
    if how != "never had it":
        token = desk.acquire(claim).token
    if how == "finish":
        desk.finish(claim, token)
    elif how == "abandon":
        desk.abandon(claim)
    elif how == "flush":
        desk.keyspace.clear()
    before = desk.keyspace.snapshot()

    assert desk.renew(claim) == "taken"
    assert desk.keyspace.snapshot() == before


def test_renewing_a_lease_whose_record_is_gone_does_not_bring_the_record_back(desk):
    claim = desk.claim()
    desk.acquire(claim)
    desk.client.delete(desk.execution_name(claim))

    assert desk.renew(claim) == ""
    assert not desk.client.exists(desk.execution_name(claim))


def test_a_short_renewal_does_not_cut_what_another_holder_needs(desk):
    long, short = desk.claim("t1", limit=2, ttl=1000.0), desk.claim("t2", limit=2, ttl=10.0)
    desk.acquire(long)
    desk.acquire(short)

    assert desk.renew(short, ttl=1.0) == ""

    left = desk.keyspace.ttls()
    assert left[desk.lease_name(long)] > 1_000_000
    assert desk.scores(long)[long.owner] > desk.keyspace.now_ms() + 900_000


def test_renewing_one_holder_leaves_the_other_expired(desk):
    live, dead = desk.claim("t1", limit=2), desk.claim("t2", limit=2)
    desk.acquire(live)
    desk.acquire(dead)
    desk.expire(dead)

    assert desk.renew(live) == ""
    assert list(desk.keyspace.live(desk.lease_name(live))) == [live.owner]


def test_several_leases_are_renewed_at_once_and_answered_in_order(desk):
    kept = desk.claim("t1")
    expired = desk.claim("t2", lock_key=OTHER_LOCK)
    unknown = desk.claim("t3", lock_key=FAR_LOCK)
    desk.acquire(kept)
    desk.acquire(expired)
    desk.expire(expired)
    wanted = [(desk.lease(claim, 1), claim.record, 30.0) for claim in (unknown, kept, expired, kept)]

    answers = [Renewal(lost=why, stop_by="") for why in ("taken", "", "expired", "")]
    assert desk.store.renew(wanted) == answers
    desk.client.script_flush()
    assert desk.store.renew(wanted) == answers


def test_renewing_nothing_asks_nothing(desk):
    assert desk.store.renew([]) == []


def test_a_renewed_lease_still_keeps_others_out_after_its_first_time(desk):
    claim = desk.claim("t1", ttl=30.0)
    desk.acquire(claim)
    desk.renew(claim, ttl=1000.0)

    held = desk.enter(desk.claim("t2"))

    assert isinstance(held, Held)
    assert held.remaining > 900.0
