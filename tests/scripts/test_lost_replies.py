"""A reply that never came is asked for again, a server that forgot the scripts is told them again: the answer is the same."""

from __future__ import annotations

import pytest
from desk import FAR_LOCK, OTHER_LOCK, Desk
from redis.exceptions import ConnectionError as RedisConnectionError

from celery_singleflight.claims import Acquired, Ended, Held, Outcome, Surplus
from celery_singleflight.errors import ScriptError, StoreUnavailable
from celery_singleflight.store import Renewal

RENEWED = Renewal(lost="", stop_by="")


@pytest.fixture(params=["reply lost", "scripts forgotten", "both"])
def disturb(desk, request):
    """Return what disturbs the next call; the test fails unless it did."""
    lost = []

    def disturb():
        if request.param != "reply lost":
            desk.client.script_flush()
        if request.param != "scripts forgotten":
            lost.append(desk.lose_next_reply())

    yield disturb
    assert all(lost)


def test_one_acquisition_although_the_reply_was_lost(desk, disturb):
    claim = desk.claim()
    before = desk.keyspace.now_us()

    disturb()
    acquired = desk.enter(claim)

    assert isinstance(acquired, Acquired)
    assert acquired.attempt == 1
    assert acquired.token >= before
    assert list(desk.scores(claim)) == [claim.owner]
    assert desk.client.get(desk.fence_name(claim)) == str(acquired.token)
    assert desk.execution(claim)["attempt"] == "1"


def test_one_place_is_taken_although_the_reply_was_lost(desk, disturb):
    disturb()
    desk.acquire(desk.claim("t1", limit=2))
    desk.acquire(desk.claim("t2", limit=2))

    assert isinstance(desk.enter(desk.claim("t3", limit=2)), Held)


def test_reentering_is_repeated_with_the_same_lease(desk, disturb):
    outer = desk.claim("t1")
    inner = desk.claim(outer.owner, owner=outer.owner, execution_key="invoice:1", has_trigger=False)
    token = desk.acquire(outer).token

    disturb()
    assert desk.enter(inner) == Acquired(token, inner.run_id, 1, [])


def test_a_takeover_is_repeated_with_the_same_lease(desk, disturb):
    dead, heir = desk.claim(), desk.claim()
    desk.acquire(dead)
    desk.expire(dead)

    disturb()
    assert desk.acquire(heir).attempt == 2
    assert list(desk.scores(heir)) == [heir.owner]


@pytest.mark.parametrize("what", ["lock", "execution", "own"])
def test_contention_is_told_again(desk, disturb, what):
    desk.acquire(desk.claim("t1", execution_key="invoice:1"))
    claims = {
        "lock": desk.claim("t2", copy="c1"),
        "execution": desk.claim("t2", execution_key="invoice:1", lock_key=OTHER_LOCK, copy="c1"),
        "own": desk.claim("t1", execution_key="invoice:1", copy="c1", previous=""),
    }

    disturb()
    held = desk.enter(claims[what])

    assert isinstance(held, Held)
    assert (held.what, held.task_id) == (what, "t1")
    assert desk.trigger(claims[what])["copy"] == "c1"


@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        ({"on_held": "skip"}, Outcome.SKIPPED),
        ({"on_held": "reject"}, Outcome.REJECTED),
        ({"wait": 1.0, "first_ms": "1"}, Outcome.TIMED_OUT),
    ],
    ids=["skip", "reject", "time out"],
)
def test_an_end_by_contention_is_told_again(desk, disturb, how, outcome):
    desk.acquire(desk.claim("holder"))
    claim = desk.claim("t1", **how)

    disturb()
    ended = desk.enter(claim)

    assert (ended.outcome, ended.reason[:2]) == (outcome, ["lock", "holder"])
    desk.settle(claim)
    assert desk.enter(claim) == ended._replace(settled=True)


@pytest.mark.parametrize("task_id", ["leader", "follower"])
def test_a_stored_outcome_is_told_again(desk, disturb, task_id):
    desk.run(desk.claim("leader", execution_key="invoice:1"))
    claim = desk.claim(task_id, execution_key="invoice:1")

    disturb()
    ended = desk.enter(claim)

    assert isinstance(ended, Ended)
    assert (ended.outcome, ended.settled, ended.value.body) == (Outcome.SUCCEEDED, False, b"42")


def test_a_surplus_copy_is_told_again(desk, disturb):
    claim = desk.claim("t1", generation=1)
    desk.acquire(claim)

    disturb()
    assert desk.enter(desk.claim("t1", generation=0)) == Surplus("generation")


@pytest.mark.parametrize("keep", [600.0, 0.0])
@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED])
@pytest.mark.parametrize("execution_key", [None, "invoice:1"], ids=["task id", "execution key"])
def test_a_run_finishes_once_although_the_reply_was_lost(desk, disturb, keep, outcome, execution_key):
    claim = desk.claim(execution_key=execution_key)
    token = desk.acquire(claim).token

    disturb()
    assert desk.finish(claim, token, outcome, keep=keep) is None

    assert desk.enter(desk.claim(execution_key=execution_key)).outcome is outcome


def test_a_refused_finish_is_refused_again(desk, disturb):
    late, heir = desk.claim(), desk.claim()
    token = desk.acquire(late).token
    desk.expire(late)
    desk.acquire(heir)
    before = desk.keyspace.snapshot()

    disturb()
    assert desk.finish(late, token).owner == heir.owner
    assert desk.keyspace.snapshot() == before


def test_leases_are_renewed_although_the_reply_was_lost(desk, disturb):
    claims = [desk.claim(f"t{n}", lock_key=key) for n, key in enumerate((OTHER_LOCK, FAR_LOCK))]
    for claim in claims:
        desk.acquire(claim)
    wanted = [(desk.lease(claim, 1), claim.record, 1000.0) for claim in claims]

    disturb()
    assert desk.store.renew(wanted) == [RENEWED, RENEWED]
    for claim in claims:
        assert desk.scores(claim)[claim.owner] > desk.keyspace.now_ms() + 900_000


def test_leases_are_renewed_one_by_one_when_the_script_is_gone_and_a_reply_was_lost(desk):
    claims = [desk.claim(f"t{n}", lock_key=key) for n, key in enumerate((OTHER_LOCK, FAR_LOCK))]
    for claim in claims:
        desk.acquire(claim)
    desk.client.script_flush()
    lost = desk.lose_next_reply(spare=1)

    assert desk.store.renew([(desk.lease(claim, 1), claim.record, 1000.0) for claim in claims]) == [RENEWED, RENEWED]
    assert lost


@pytest.mark.parametrize("how", [{}, {"generation": 1}, {"forget": True}], ids=str)
def test_a_run_is_abandoned_although_the_reply_was_lost(desk, disturb, how):
    claim = desk.claim()
    desk.acquire(claim)

    disturb()
    desk.abandon(claim, **how)

    assert desk.acquire(desk.claim(generation=1)).attempt == (1 if "forget" in how else 2)


def test_triggers_are_settled_although_the_reply_was_lost(desk, disturb):
    claims = [desk.claim(f"t{n}") for n in range(3)]
    for claim in claims:
        desk.run(claim)

    disturb()
    desk.settle(*claims)

    assert all(desk.enter(claim).settled for claim in claims)


@pytest.mark.parametrize("copy", ["", "c1"], ids=["retry of an overtaken run", "another copy of the message"])
def test_a_lease_is_granted_again_although_another_message_has_come_between(desk, copy):
    late, heir = desk.claim(), desk.claim()
    desk.acquire(late)
    desk.expire(late)
    acquired = desk.acquire(heir)
    if copy:
        assert desk.enter(desk.claim(copy=copy, previous="")).what == "own"
    else:
        desk.abandon(late, generation=1)

    assert desk.enter(heir) == acquired


def test_a_lost_reply_never_answers_the_next_call(desk):
    desk.lose_next_reply()
    first = desk.acquire(desk.claim("t1"))

    second = desk.enter(desk.claim("t2", lock_key=OTHER_LOCK))

    assert isinstance(second, Acquired)
    assert second.token > first.token
    assert second.run_id != first.run_id


def test_a_store_that_never_answers_may_have_granted_the_lease_to_be_given_back(place, desk):
    connections = place.connect()
    cut_off = Desk(type(desk.store)(connections, desk.store.keys), desk.keyspace, connections)
    claim = desk.claim()
    run_once = connections._run_once

    def run_and_never_answer(*arguments):
        run_once(*arguments)
        raise RedisConnectionError("cut")

    connections._run_once = run_and_never_answer
    with pytest.raises(StoreUnavailable, match="the store did not run enter in 3 attempts: cut"):
        cut_off.enter(claim)
    connections.close()

    assert list(desk.scores(claim)) == [claim.owner]
    assert desk.execution(claim)["attempt"] == "1"
    desk.abandon(claim)
    desk.acquire(desk.claim("t2"))


def test_a_script_that_fails_is_not_repeated_but_told(desk, monkeypatch):
    claim = desk.claim()
    desk.client.set(desk.lease_name(claim), "no hash", px=60_000)
    name = "_exchange" if hasattr(desk.connections, "_exchange") else "_run_once"
    real, calls = getattr(desk.connections, name), []

    def counted(*arguments):
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(desk.connections, name, counted)
    with pytest.raises(ScriptError, match="script enter failed: WRONGTYPE"):
        desk.enter(claim)

    assert len(calls) == 1
    desk.client.delete(desk.lease_name(claim))
    desk.acquire(claim)
