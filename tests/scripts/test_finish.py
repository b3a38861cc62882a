"""`finish`: the outcome of a run is recorded by the one who owns it, once."""

from __future__ import annotations

import pytest
from desk import OTHER_LOCK

from celery_singleflight.claims import Acquired, Ended, Held, Outcome, Refused

HOUR = 3600.0
RAN = pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED])
KEYS = pytest.mark.parametrize("execution_key", [None, "invoice:1"], ids=["task id", "execution key"])


def refused_and_nothing_changed(desk, claim, token, outcome=Outcome.SUCCEEDED):
    before = desk.keyspace.snapshot()
    refused = desk.finish(claim, token, outcome, b"late")
    assert isinstance(refused, Refused)
    assert desk.keyspace.snapshot() == before
    return refused


@RAN
def test_a_finished_run_is_recorded_and_its_lease_is_free(desk, outcome):
    claim = desk.claim(run_id="run-1")
    token = desk.acquire(claim).token

    assert desk.finish(claim, token, outcome, b"\x00\xff42", reason='["so"]') is None

    assert desk.scores(claim) == {}
    record = desk.execution(claim)
    assert record["owner"] == ""
    assert {name: record[name] for name in ("outcome", "reason", "by", "content_type", "content_encoding", "body")} == {
        "outcome": outcome.value,
        "reason": '["so"]',
        "by": claim.owner,
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "body": "\x00\udcff42",
    }
    assert (record["run"], record["attempt"], record["fence"]) == ("run-1", "1", str(token))
    desk.acquire(desk.claim("t2"))


@KEYS
@RAN
def test_a_finished_run_finishes_again_without_a_change(desk, outcome, execution_key):
    claim = desk.claim(execution_key=execution_key)
    token = desk.acquire(claim).token
    assert desk.finish(claim, token, outcome) is None
    before = desk.keyspace.snapshot()

    assert desk.finish(claim, token, outcome) is None
    assert desk.keyspace.snapshot() == before


@KEYS
def test_an_outcome_is_kept_for_as_long_as_asked(desk, execution_key):
    claim = desk.claim(execution_key=execution_key)
    token = desk.acquire(claim).token

    desk.finish(claim, token, keep=2 * HOUR)

    left = desk.keyspace.ttls()
    for name in (desk.execution_name(claim), desk.trigger_name(claim)):
        assert 2 * HOUR * 1000 - 5000 < left[name] <= 2 * HOUR * 1000


@KEYS
@RAN
def test_an_outcome_that_is_not_to_be_kept_is_remembered_for_an_hour_with_its_trigger_only(desk, outcome, execution_key):
    claim = desk.claim(execution_key=execution_key)
    token = desk.acquire(claim).token

    for _ in range(2):
        assert desk.finish(claim, token, outcome, keep=0.0) is None
        assert desk.keyspace.names() == sorted([desk.fence_name(claim), desk.trigger_name(claim)])
    assert HOUR * 1000 - 5000 < desk.keyspace.ttls()[desk.trigger_name(claim)] <= HOUR * 1000
    again = desk.enter(desk.claim(execution_key=execution_key))
    assert (again.outcome, again.settled, again.value.body) == (outcome, False, b"42")
    other = desk.claim("t2", execution_key=execution_key)
    assert isinstance(desk.enter(other), Acquired)


@KEYS
@RAN
def test_an_expired_run_finishes_when_nobody_came(desk, outcome, execution_key):
    claim = desk.claim(execution_key=execution_key)
    token = desk.acquire(claim).token
    desk.expire(claim)

    assert desk.finish(claim, token, outcome) is None
    assert desk.enter(desk.claim(execution_key=execution_key)).outcome is outcome


@KEYS
@RAN
def test_a_run_finishes_after_the_store_forgot_everything(desk, outcome, execution_key):
    claim = desk.claim(execution_key=execution_key)
    token = desk.acquire(claim).token
    desk.keyspace.clear()

    assert desk.finish(claim, token, outcome) is None
    assert desk.enter(desk.claim(execution_key=execution_key)).outcome is outcome
    assert desk.scores(claim) == {}


def test_a_run_finishes_after_its_lease_was_evicted(desk):
    claim = desk.claim()
    token = desk.acquire(claim).token
    desk.client.delete(desk.lease_name(claim))

    assert desk.finish(claim, token) is None


def test_a_run_is_refused_after_the_store_forgot_it_and_another_came(desk):
    claim = desk.claim("t1")
    token = desk.acquire(claim).token
    desk.keyspace.clear()
    desk.acquire(desk.claim("t2"))

    assert refused_and_nothing_changed(desk, claim, token) == Refused("", "")


@RAN
def test_an_expired_run_is_refused_while_another_trigger_holds_its_lock_key(desk, outcome):
    late, heir = desk.claim("t1"), desk.claim("t2")
    token = desk.acquire(late).token
    desk.expire(late)
    acquired = desk.acquire(heir)

    assert refused_and_nothing_changed(desk, late, token, outcome) == Refused("", "")
    assert desk.finish(heir, acquired.token) is None


@pytest.mark.parametrize("left_by", ["finish", "abandon"])
def test_an_expired_run_is_refused_when_another_trigger_has_been_and_gone(desk, left_by):
    late, heir = desk.claim("t1"), desk.claim("t2")
    token = desk.acquire(late).token
    desk.expire(late)
    acquired = desk.acquire(heir)
    if left_by == "finish":
        desk.finish(heir, acquired.token)
    else:
        desk.abandon(heir, forget=True)

    assert refused_and_nothing_changed(desk, late, token) == Refused("", "")


@KEYS
@RAN
def test_an_expired_run_is_refused_while_a_redelivery_of_its_trigger_runs(desk, outcome, execution_key):
    late, heir = desk.claim(execution_key=execution_key), desk.claim(execution_key=execution_key)
    token = desk.acquire(late).token
    desk.expire(late)
    acquired = desk.acquire(heir)

    assert refused_and_nothing_changed(desk, late, token, outcome) == Refused(heir.owner, "")
    assert desk.finish(heir, acquired.token) is None


@KEYS
def test_an_expired_run_is_refused_when_another_owner_has_finished_it(desk, execution_key):
    late, heir = desk.claim(execution_key=execution_key), desk.claim(execution_key=execution_key)
    token = desk.acquire(late).token
    desk.expire(late)
    desk.run(heir, body=b"first")

    assert refused_and_nothing_changed(desk, late, token) == Refused(heir.owner, "succeeded")
    assert desk.enter(desk.claim(execution_key=execution_key)).value.body == b"first"


def test_an_expired_run_is_refused_when_its_execution_is_under_way_behind_another_lock_key(desk):
    late = desk.claim("t1", execution_key="invoice:1")
    heir = desk.claim("t2", execution_key="invoice:1", lock_key=OTHER_LOCK)
    token = desk.acquire(late).token
    desk.expire(late)
    acquired = desk.acquire(heir)

    assert refused_and_nothing_changed(desk, late, token) == Refused(heir.owner, "")
    assert desk.finish(heir, acquired.token) is None
    assert refused_and_nothing_changed(desk, late, token) == Refused(heir.owner, "succeeded")


@pytest.mark.parametrize("left_by", ["failure", "abandon"])
def test_an_expired_run_is_refused_when_its_execution_was_run_behind_another_lock_key_without_a_success(desk, left_by):
    late = desk.claim("t1", execution_key="invoice:1")
    heir = desk.claim("t2", execution_key="invoice:1", lock_key=OTHER_LOCK)
    token = desk.acquire(late).token
    desk.expire(late)
    acquired = desk.acquire(heir)
    if left_by == "failure":
        desk.finish(heir, acquired.token, Outcome.FAILED)
    else:
        desk.abandon(heir, generation=1)

    refused_and_nothing_changed(desk, late, token)


@KEYS
def test_an_expired_run_under_a_limit_is_refused_when_a_redelivery_has_sent_a_retry(desk, execution_key):
    late, heir = (desk.claim("t1", execution_key=execution_key, limit=2) for _ in range(2))
    token = desk.acquire(late).token
    desk.expire(late)
    desk.acquire(heir)
    desk.abandon(heir, generation=1)

    refused_and_nothing_changed(desk, late, token)


def test_an_expired_run_under_a_limit_is_refused_when_a_redelivery_has_failed(desk):
    late, heir = (desk.claim("t1", execution_key="invoice:1", limit=2) for _ in range(2))
    token = desk.acquire(late).token
    desk.expire(late)
    desk.run(heir, Outcome.FAILED)

    assert refused_and_nothing_changed(desk, late, token).outcome == "failed"


@pytest.mark.parametrize(
    ("execution_key", "outcome"),
    [
        (None, Outcome.SUCCEEDED),
        (None, Outcome.FAILED),
        ("invoice:1", Outcome.SUCCEEDED),
        ("invoice:1", Outcome.FAILED),
    ],
)
def test_a_repeated_finish_is_refused_once_another_delivery_was_answered(desk, execution_key, outcome):
    first, second = (desk.claim(execution_key=execution_key) for _ in range(2))
    token = desk.run(first, outcome).token
    assert desk.enter(second).outcome is outcome

    assert refused_and_nothing_changed(desk, first, token, outcome).outcome == outcome.value


def test_an_expired_run_under_a_limit_is_refused_when_every_place_is_taken(desk):
    late = desk.claim("t1", limit=2)
    token = desk.acquire(late).token
    desk.expire(late)
    for n in range(2):
        desk.acquire(desk.claim(f"heir{n}", limit=2))

    assert refused_and_nothing_changed(desk, late, token) == Refused("", "")


def test_an_expired_run_under_a_limit_finishes_while_a_place_is_free(desk):
    late, other = desk.claim("t1", limit=2), desk.claim("t2", limit=2)
    token = desk.acquire(late).token
    desk.expire(late)
    desk.acquire(other)

    assert desk.finish(late, token) is None
    assert list(desk.scores(late)) == [other.owner]


def test_a_failure_forgets_an_explicit_execution_but_is_the_triggers_own_outcome(desk):
    claim = desk.claim("t1", execution_key="invoice:1")
    token = desk.acquire(claim).token

    assert desk.finish(claim, token, Outcome.FAILED, b"error") is None

    assert not desk.client.exists(desk.execution_name(claim))
    own = desk.enter(desk.claim("t1", execution_key="invoice:1"))
    assert isinstance(own, Ended)
    assert (own.outcome, own.value.body) == (Outcome.FAILED, b"error")
    assert isinstance(desk.enter(desk.claim("t2", execution_key="invoice:1")), Acquired)


def test_a_lease_that_an_outer_holder_goes_on_with_is_not_released(desk):
    outer = desk.claim("t1")
    inner = desk.claim(outer.owner, owner=outer.owner, execution_key="invoice:1", has_trigger=False)
    token = desk.acquire(outer).token
    desk.acquire(inner)
    scores, holders = desk.scores(outer), desk.holders(outer)

    assert desk.finish(inner, token, hold=None) is None

    assert desk.scores(outer) == scores
    assert desk.holders(outer) == holders
    assert desk.enter(desk.claim("t2", execution_key="invoice:1")).outcome is Outcome.SUCCEEDED
    assert desk.enter(desk.claim("t2", execution_key="invoice:2")).what == "lock"
    assert desk.finish(outer, token) is None
    desk.acquire(desk.claim("t2", execution_key="invoice:2"))


def test_the_other_holders_keep_their_leases(desk):
    first, second = desk.claim("t1", limit=2), desk.claim("t2", limit=2)
    token = desk.acquire(first).token
    desk.acquire(second)

    desk.finish(first, token)

    assert list(desk.scores(second)) == [second.owner]


def test_the_recent_hold_time_is_learned_while_somebody_waits(desk):
    def held_for(seconds):
        claim = desk.claim()
        desk.client.delete(desk.trigger_name(claim))
        token = desk.acquire(claim).token
        assert isinstance(desk.enter(desk.claim("waiter")), Held)
        desk.client.hset(desk.execution_name(claim), "since_ms", desk.keyspace.now_ms() - seconds * 1000)
        desk.finish(claim, token)
        return float(desk.client.hget(desk.pace_name(claim), "hold_ms"))

    assert held_for(10) == pytest.approx(10_000, abs=2000)
    assert held_for(20) == pytest.approx(0.7 * 10_000 + 0.3 * 20_000, abs=2000)


def test_nothing_is_learned_of_a_lock_key_for_which_nobody_waits(desk):
    claim = desk.claim()
    desk.run(claim)
    assert not desk.client.exists(desk.pace_name(claim))
