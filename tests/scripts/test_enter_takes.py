"""`enter`, when the lease is free for the taking."""

from __future__ import annotations

import pytest
from desk import FAR_LOCK, LOCK, OTHER_LOCK, TTL, WORKER

from celery_singleflight.claims import Acquired, Held


def test_a_free_lock_key_is_acquired_and_says_whose_it_is(desk):
    claim = desk.claim("t1", run_id="run-1")
    before = desk.keyspace.now_us()

    answer = desk.enter(claim)

    after = desk.keyspace.now_us()
    assert answer == Acquired(answer.token, "run-1", 1, [])
    assert before <= answer.token <= after
    ends = desk.scores(claim)[claim.owner]
    assert before // 1000 <= ends - TTL * 1000 <= after // 1000
    since, token, worker, group, digest, task_id = desk.holders(claim)[claim.owner]
    assert (task_id, worker, token) == ("t1", WORKER, str(answer.token))
    assert (group, digest) == (token, ""), "those who wait for its outcome are known by its token"
    assert before // 1000 <= int(since) <= after // 1000
    assert desk.execution(claim) == {
        "owner": claim.owner,
        "until_ms": f"{ends:.0f}",
        "since_ms": since,
        "fence": str(answer.token),
        "run": "run-1",
        "attempt": "1",
        "task_id": "t1",
        "worker": WORKER,
        "lock_key": LOCK.text,
        "run_generation": "0",
        "generation": "0",
        "copy": "",
        "group": group,
    }


def test_asking_again_with_the_same_owner_gives_the_same_lease(desk):
    claim = desk.claim()
    first = desk.acquire(claim)
    before = desk.keyspace.snapshot()

    assert desk.enter(claim) == first
    assert desk.keyspace.snapshot() == before


def test_the_next_delivery_of_a_trigger_continues_its_run_with_the_next_attempt(desk):
    first = desk.claim(run_id="run-1")
    token = desk.acquire(first).token
    desk.abandon(first)

    second = desk.acquire(desk.claim(run_id="run-2"))

    assert (second.run_id, second.attempt) == ("run-1", 2)
    assert second.token > token


def test_an_expired_lease_is_taken_over_by_a_redelivery_of_its_trigger(desk):
    dead, heir = desk.claim(run_id="run-1"), desk.claim(run_id="run-2")
    token = desk.acquire(dead).token
    desk.expire(dead)

    answer = desk.acquire(heir)

    assert (answer.run_id, answer.attempt) == ("run-1", 2)
    assert answer.token > token
    assert list(desk.scores(heir)) == [heir.owner]
    assert desk.execution(heir)["owner"] == heir.owner


def test_an_expired_lease_is_taken_over_by_another_trigger(desk):
    dead, heir = desk.claim("t1"), desk.claim("t2")
    token = desk.acquire(dead).token
    desk.expire(dead)

    answer = desk.acquire(heir)

    assert (answer.run_id, answer.attempt) == (heir.run_id, 1)
    assert answer.token > token
    assert list(desk.scores(heir)) == [heir.owner]


def test_an_expired_execution_is_taken_over_under_another_lock_key(desk):
    dead = desk.claim("t1", execution_key="invoice:1", run_id="run-1")
    heir = desk.claim("t2", execution_key="invoice:1", lock_key=OTHER_LOCK)
    desk.acquire(dead)
    desk.expire(dead)

    answer = desk.acquire(heir)

    assert (answer.run_id, answer.attempt) == ("run-1", 2)
    assert desk.execution(heir)["owner"] == heir.owner
    assert desk.execution(heir)["lock_key"] == OTHER_LOCK.text


def test_an_owner_that_asks_again_after_its_lease_expired_gets_a_new_lease(desk):
    claim = desk.claim()
    first = desk.acquire(claim)
    desk.expire(claim)

    second = desk.acquire(claim)

    assert second.token > first.token
    assert second.attempt == 2
    assert list(desk.scores(claim)) == [claim.owner]


def test_two_lock_keys_do_not_meet(desk):
    desk.acquire(desk.claim("t1"))
    desk.acquire(desk.claim("t2", lock_key=OTHER_LOCK))


def test_one_execution_key_under_two_lock_names_is_two_executions(desk):
    desk.acquire(desk.claim("t1", execution_key="invoice:1"))
    desk.acquire(desk.claim("t2", execution_key="invoice:1", lock_key=FAR_LOCK))


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_lock_limit_admits_as_many_holders_and_no_more(desk, limit):
    holders = [desk.claim(f"t{n}", limit=limit) for n in range(limit)]
    tokens = [desk.acquire(claim).token for claim in holders]

    late = desk.enter(desk.claim("late", limit=limit))

    assert tokens == sorted(set(tokens))
    assert isinstance(late, Held)
    assert late.what == "lock"
    assert set(desk.keyspace.live(desk.lease_name(holders[0]))) == {claim.owner for claim in holders}


def test_the_one_whose_lease_ends_first_is_named_as_the_holder(desk):
    desk.acquire(desk.claim("long", limit=2, ttl=1000.0))
    desk.acquire(desk.claim("short", limit=2, ttl=100.0))

    held = desk.enter(desk.claim("late", limit=2))

    assert held.task_id == "short"
    assert 90.0 < held.remaining <= 100.0


def test_an_expired_holder_makes_room_and_the_live_ones_stay(desk):
    dead, live, heir = desk.claim("t1", limit=2), desk.claim("t2", limit=2), desk.claim("t3", limit=2)
    desk.acquire(dead)
    desk.acquire(live)
    desk.expire(dead)

    desk.acquire(heir)

    assert set(desk.scores(heir)) == {live.owner, heir.owner}
    assert isinstance(desk.enter(desk.claim("t4", limit=2)), Held)


def test_a_lowered_limit_waits_until_enough_holders_have_left(desk):
    first, second = desk.claim("t1", limit=2), desk.claim("t2", limit=2)
    desk.acquire(first)
    desk.acquire(second)
    desk.abandon(first)

    assert isinstance(desk.enter(desk.claim("t3", limit=1)), Held)
    desk.abandon(second)
    desk.acquire(desk.claim("t3", limit=1))


def test_a_raised_limit_admits_at_once(desk):
    desk.acquire(desk.claim("t1", limit=1))
    assert isinstance(desk.enter(desk.claim("t2", limit=1)), Held)
    desk.acquire(desk.claim("t2", limit=2))


def test_an_owner_enters_again_for_another_execution_under_the_lease_that_it_has(desk):
    outer = desk.claim("t1", ttl=30.0)
    inner = desk.claim(
        outer.owner, owner=outer.owner, execution_key="invoice:1", has_trigger=False, run_id="inner run", ttl=90.0
    )
    first = desk.acquire(outer)
    scores, holders = desk.scores(outer), desk.holders(outer)

    second = desk.enter(inner)

    assert second == Acquired(first.token, "inner run", 1, [])
    assert desk.scores(outer) == scores
    assert desk.holders(outer) == holders
    assert desk.execution(inner)["until_ms"] == f"{scores[outer.owner]:.0f}"
    assert desk.execution(inner)["since_ms"] == desk.execution(outer)["since_ms"]
    assert desk.enter(inner) == second
    assert desk.enter(desk.claim("t2")).what == "lock"


def test_an_expired_owner_does_not_reenter_but_asks_like_anybody(desk):
    outer, heir = desk.claim("t1"), desk.claim("t2")
    inner = desk.claim(outer.owner, owner=outer.owner, execution_key="invoice:1", has_trigger=False)
    desk.acquire(outer)
    desk.expire(outer)
    desk.acquire(heir)

    held = desk.enter(inner)

    assert (held.what, held.task_id) == ("lock", "t2")


def test_every_key_of_a_run_lives_longer_than_its_lease_and_goes_by_itself(desk):
    claim = desk.claim(execution_key="invoice:1", ttl=30.0, keep=600.0)
    desk.acquire(claim)

    left = desk.keyspace.ttls()

    bounds = {
        desk.lease_name(claim): 90_000,
        desk.fence_name(claim): 86_400_000,
        desk.execution_name(claim): 690_000,
        desk.trigger_name(claim): 3_600_000,
    }
    assert left.keys() == bounds.keys()
    for name, bound in bounds.items():
        assert bound - 5000 < left[name] <= bound, name


def test_a_short_lease_does_not_cut_what_a_longer_one_needs(desk):
    desk.acquire(desk.claim("t1", limit=2, ttl=1000.0))
    short = desk.claim("t2", limit=2, ttl=1.0)
    desk.acquire(short)

    left = desk.keyspace.ttls()

    assert left[desk.lease_name(short)] > 1_000_000
