"""`finish` and `abandon` with a time to hold: the place stays taken, by nobody, and frees itself."""

from __future__ import annotations

import pytest
from desk import OTHER_LOCK, TTL, WORKER

from celery_singleflight.claims import Acquired, Held, Outcome, Refused

HOLD = 100.0


@pytest.fixture(params=["finish", "abandon"])
def end(desk, request):
    """Return what ends a run and holds its place."""

    def end(claim, token, hold=HOLD):
        if request.param == "finish":
            assert desk.finish(claim, token, hold=hold) is None
        else:
            desk.abandon(claim, generation=1, hold=hold)

    return end


def age(desk, claim, seconds):
    """Let the lease have been acquired that long ago."""
    name, line = desk.lease_name(claim), desk.client.hget(desk.lease_name(claim), claim.owner)
    ends, since, *rest = line.split("\n")
    desk.client.hset(name, claim.owner, "\n".join([ends, str(int(since) - round(seconds * 1000)), *rest]))


def let_pass(desk, claim):
    """Let the time to hold be over."""
    name = desk.lease_name(claim)
    for owner, line in desk.client.hgetall(name).items():
        desk.client.hset(name, owner, "\n".join(["1", *line.split("\n")[1:]]))


def test_the_place_stays_taken_from_the_acquisition_on_by_nobody(desk, end):
    claim = desk.claim()
    token = desk.acquire(claim).token
    (facts,) = desk.holders(claim).values()
    since = int(facts[0])
    assert (facts[1:3], facts[-1]) == ([str(token), WORKER], "t1")

    end(claim, token)

    assert desk.scores(claim) == {f"{claim.owner} ended": since + HOLD * 1000}
    nobody_joins_it = [*facts[:3], "", "", facts[-1]]
    assert desk.holders(claim) == {f"{claim.owner} ended": nobody_joins_it}
    held = desk.enter(desk.claim("t2"))
    assert isinstance(held, Held)
    assert (held.what, held.task_id, held.worker) == ("lock", "t1", WORKER)
    assert held.remaining == pytest.approx(HOLD, abs=5.0)


def test_the_place_frees_itself(desk, end):
    claim = desk.claim()
    token = desk.acquire(claim).token
    end(claim, token)
    let_pass(desk, claim)

    answer = desk.acquire(desk.claim("t2"))

    assert answer.token > token
    assert list(desk.scores(claim)) != [f"{claim.owner} ended"]


def test_what_was_held_for_long_enough_is_free_at_once(desk, end):
    claim = desk.claim()
    token = desk.acquire(claim).token
    age(desk, claim, HOLD + 1)

    end(claim, token)

    assert desk.scores(claim) == {}
    desk.acquire(desk.claim("t2"))


def test_only_the_rest_of_the_time_is_held(desk, end):
    claim = desk.claim()
    token = desk.acquire(claim).token
    age(desk, claim, HOLD - 10)

    end(claim, token)

    assert desk.enter(desk.claim("t2")).remaining == pytest.approx(10.0, abs=5.0)


def test_a_renewal_in_flight_cannot_extend_it(desk, end):
    claim = desk.claim()
    token = desk.acquire(claim).token
    end(claim, token)
    before = desk.keyspace.snapshot()

    assert desk.renew(claim, token, 1000.0) == "taken"

    assert desk.keyspace.snapshot() == before


def test_ending_again_does_not_hold_it_for_longer(desk, end):
    claim = desk.claim()
    token = desk.acquire(claim).token
    end(claim, token)
    before = desk.keyspace.snapshot()

    end(claim, token, hold=HOLD * 10)
    end(claim, token, hold=0.0)

    assert desk.keyspace.snapshot() == before


def test_its_key_outlives_the_hold_and_goes_by_itself(desk, end):
    claim = desk.claim(ttl=1.0)
    token = desk.acquire(claim).token

    end(claim, token)

    assert HOLD * 1000 < desk.keyspace.ttls()[desk.lease_name(claim)] <= HOLD * 1000 + 60_000


def test_a_short_hold_does_not_cut_what_another_holder_needs(desk, end):
    other, claim = desk.claim("t1", limit=2, ttl=1000.0), desk.claim("t2", limit=2)
    desk.acquire(other)
    token = desk.acquire(claim).token

    end(claim, token)

    assert desk.keyspace.ttls()[desk.lease_name(other)] > 1_000_000
    assert set(desk.scores(other)) == {other.owner, f"{claim.owner} ended"}


def test_a_held_place_counts_against_the_limit(desk, end):
    claim = desk.claim("t1", limit=2)
    token = desk.acquire(claim).token
    end(claim, token)

    assert isinstance(desk.enter(desk.claim("t2", limit=2)), Acquired)
    assert desk.enter(desk.claim("t3", limit=2)).what == "lock"


def test_other_lock_keys_are_free(desk, end):
    claim = desk.claim()
    end(claim, desk.acquire(claim).token)
    desk.acquire(desk.claim("t2", lock_key=OTHER_LOCK))


def test_an_expired_lease_that_nobody_took_is_held_for_the_rest_too(desk, end):
    claim = desk.claim()
    token = desk.acquire(claim).token
    desk.expire(claim)

    end(claim, token)

    assert desk.enter(desk.claim("t2")).remaining == pytest.approx(HOLD, abs=5.0)


def test_a_run_whose_place_was_taken_holds_nothing(desk):
    late, heir = desk.claim("t1"), desk.claim("t2")
    token = desk.acquire(late).token
    desk.expire(late)
    desk.acquire(heir)

    assert desk.finish(late, token, hold=HOLD) == Refused("", "")
    desk.abandon(late, hold=HOLD)

    assert list(desk.scores(heir)) == [heir.owner]


def test_an_outer_holder_goes_on_whatever_the_hold(desk):
    outer = desk.claim("t1")
    inner = desk.claim(outer.owner, owner=outer.owner, execution_key="invoice:1", has_trigger=False)
    token = desk.acquire(outer).token
    desk.acquire(inner)
    scores = desk.scores(outer)

    assert desk.finish(inner, token, hold=None) is None
    desk.abandon(inner, forget=True, hold=None)

    assert desk.scores(outer) == scores
    assert desk.renew(outer, token) == ""


def test_a_trigger_of_its_own_is_answered_while_its_place_is_held(desk):
    claim = desk.claim()
    desk.run(claim, hold=HOLD)
    assert desk.enter(desk.claim()).outcome is Outcome.SUCCEEDED


def test_a_retry_waits_for_the_place_that_its_own_run_has_left(desk):
    claim = desk.claim(message=b"first")
    desk.acquire(claim)
    desk.abandon(claim, generation=1, hold=HOLD)

    assert desk.enter(desk.claim(generation=1, message=b"retry")).what == "own", "its own run has left it so"
    assert (desk.message(claim), desk.due(claim)) == (None, {})


def test_a_finisher_that_asks_again_is_not_told_that_it_holds(desk):
    claim = desk.claim()
    token = desk.acquire(claim).token
    assert desk.finish(claim, token, hold=HOLD) is None

    assert desk.enter(claim).outcome is Outcome.SUCCEEDED
    assert desk.renew(claim, token) == "taken"
    assert TTL < HOLD
