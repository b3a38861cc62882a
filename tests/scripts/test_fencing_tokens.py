"""Fencing tokens: each is greater than any before it on the lock key, and arrives exactly as it was made."""

from __future__ import annotations

import pytest
from desk import OTHER_LOCK

from celery_singleflight.claims import Refused

DAY_MS = 86_400_000


def test_tokens_grow_with_each_acquisition_also_of_one_task(desk):
    tokens = []
    for _ in range(20):
        claim = desk.claim("t1")
        tokens.append(desk.acquire(claim).token)
        desk.abandon(claim)
    assert tokens == sorted(set(tokens))


def test_tokens_grow_over_the_expiry_of_a_lease(desk):
    tokens = []
    for n in range(5):
        claim = desk.claim(f"t{n}")
        tokens.append(desk.acquire(claim).token)
        desk.expire(claim)
    assert tokens == sorted(set(tokens))


def test_tokens_grow_over_the_loss_of_the_counter(desk):
    first, second = desk.claim("t1"), desk.claim("t2")
    token = desk.run(first).token
    assert desk.client.delete(desk.fence_name(first)) == 1

    assert desk.acquire(second).token > token


def test_tokens_grow_over_the_loss_of_everything(desk):
    token = desk.acquire(desk.claim("t1")).token
    desk.keyspace.clear()

    assert desk.acquire(desk.claim("t1")).token > token


def test_tokens_grow_by_one_while_the_servers_clock_is_behind_the_last_one(desk):
    # As after a failover to a server whose clock is a day late.
    first = desk.claim("t1")
    ahead = desk.keyspace.now_us() + 86_400_000_000
    desk.client.set(desk.fence_name(first), ahead, px=DAY_MS)

    tokens = [desk.run(desk.claim(f"t{n}")).token for n in range(3)]

    assert tokens == [ahead + 1, ahead + 2, ahead + 3]


def test_tokens_follow_the_servers_clock_again_once_it_has_caught_up(desk):
    claim = desk.claim("t1")
    before = desk.keyspace.now_us()
    desk.client.set(desk.fence_name(claim), before - 5, px=DAY_MS)

    assert before <= desk.acquire(claim).token <= desk.keyspace.now_us()


@pytest.mark.parametrize("last", [2**53 - 3, 2**53 - 2, 9_007_199_254_740_000, 9_000_000_000_000_000])
def test_a_token_near_the_greatest_exact_number_is_the_same_everywhere(desk, last):
    claim = desk.claim("t1", execution_key="invoice:1")
    desk.client.set(desk.fence_name(claim), last, px=DAY_MS)

    token = desk.acquire(claim).token

    assert token == last + 1
    assert desk.client.get(desk.fence_name(claim)) == str(token)
    assert desk.execution(claim)["fence"] == str(token)
    assert desk.holders(claim)[claim.owner][1] == str(token)
    assert desk.enter(claim).token == token
    inner = desk.claim(claim.owner, owner=claim.owner, execution_key="invoice:2", has_trigger=False)
    assert desk.acquire(inner).token == token


def test_two_neighbouring_tokens_near_the_greatest_exact_number_are_told_apart(desk):
    old, new = desk.claim("t1"), desk.claim("t2")
    desk.client.set(desk.fence_name(old), 2**53 - 4, px=DAY_MS)
    token = desk.acquire(old).token
    desk.expire(old)
    assert desk.run(new).token == token + 1 == 2**53 - 2

    assert desk.finish(old, token) == Refused("", "")


def test_the_counter_outlives_the_run_but_not_a_day_of_rest(desk):
    claim = desk.claim()
    desk.run(claim)
    assert DAY_MS - 5000 < desk.client.pttl(desk.fence_name(claim)) <= DAY_MS


def test_lock_keys_have_counters_of_their_own(desk):
    ahead = desk.keyspace.now_us() + 86_400_000_000
    here, there = desk.claim("t1"), desk.claim("t2", lock_key=OTHER_LOCK)
    desk.client.set(desk.fence_name(here), ahead, px=DAY_MS)

    assert desk.acquire(here).token == ahead + 1
    assert desk.acquire(there).token < ahead
