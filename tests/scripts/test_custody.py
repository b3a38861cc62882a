"""`enter`, as far as the message goes: the store has it while nobody else would bring it again."""

from __future__ import annotations

import pytest
from desk import OTHER_LOCK, TTL

from celery_singleflight.claims import Encoded, Held, Outcome, Surplus
from celery_singleflight.custody import GRACE

BODY = b'{"a": 1}\n\x00\xff a body of any bytes \r\n'
KEYS = pytest.mark.parametrize("execution_key", [None, "invoice:1"], ids=["task id", "execution key"])
DAY_MS = 86_400_000


@KEYS
def test_the_message_of_a_run_is_kept_and_looked_at_when_its_lease_ends(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=BODY)

    acquired = desk.acquire(claim)

    assert desk.message(claim) == BODY
    (ends,) = desk.scores(claim).values()
    assert desk.due(claim) == {claim.record.member: ends}
    before = desk.keyspace.snapshot()
    assert desk.enter(claim) == acquired
    assert desk.keyspace.snapshot() == before


@KEYS
def test_a_message_is_kept_for_a_day_at_least(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=BODY, keep=1.0)
    desk.acquire(claim)
    assert desk.keyspace.ttls()[desk.trigger_name(claim)] > DAY_MS - 5000


@KEYS
def test_a_run_without_a_message_is_not_looked_at(desk, execution_key):
    claim = desk.claim(execution_key=execution_key)
    desk.acquire(claim)
    assert (desk.message(claim), desk.due(claim)) == (None, {})


@KEYS
def test_the_message_of_the_next_run_takes_the_place_of_the_one_before(desk, execution_key):
    dead, heir = desk.claim(execution_key=execution_key, message=b"1"), desk.claim(execution_key=execution_key, message=b"2")
    desk.die(dead)

    desk.acquire(heir)

    assert desk.message(heir) == b"2"
    assert desk.due_in(heir) == pytest.approx(TTL, abs=5.0)


@KEYS
def test_a_retry_keeps_its_own_message(desk, execution_key):
    first = desk.claim(execution_key=execution_key, message=b"first")
    retry = desk.claim(execution_key=execution_key, generation=1, message=b"retry")
    desk.acquire(first)
    desk.abandon(first, generation=1)
    desk.acquire(retry)
    assert (desk.message(retry), set(desk.due(retry))) == (b"retry", {retry.record.member})


@KEYS
@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED])
def test_the_message_of_a_finished_run_is_kept_until_it_is_settled(desk, execution_key, outcome):
    claim = desk.claim(execution_key=execution_key, message=BODY)
    desk.run(claim, outcome)

    assert (desk.message(claim), set(desk.due(claim))) == (BODY, {claim.record.member})
    desk.settle(claim)
    assert (desk.message(claim), desk.due(claim)) == (None, {})


# Newcomers


@pytest.mark.parametrize("what", ["lock", "execution"])
def test_a_newcomer_that_goes_back_to_the_broker_is_not_in_the_stores_custody(desk, what):
    desk.acquire(desk.claim("holder", execution_key="invoice:1"))
    how = {"lock": {}, "execution": {"execution_key": "invoice:1", "lock_key": OTHER_LOCK}}[what]
    claim = desk.claim("t1", message=BODY, **how)

    for _ in range(2):
        assert desk.enter(claim).what == what
        assert (desk.message(claim), desk.due(claim)) == (None, {})


@KEYS
def test_a_trigger_that_was_given_back_and_then_meets_a_holder_is_the_brokers(desk, execution_key):
    claim = desk.claim("t1", execution_key=execution_key, message=BODY)
    desk.acquire(claim)
    desk.abandon(claim, again=GRACE)
    desk.acquire(desk.claim("holder"))
    desk.client.hset(desk.trigger_name(claim), "handouts", 3)

    assert desk.enter(claim._replace(owner="redelivered")).what == "lock"

    assert (desk.message(claim), desk.due(claim)) == (None, {})
    assert "handouts" not in desk.trigger(claim)


@KEYS
def test_a_dead_trigger_that_meets_a_holder_is_the_brokers(desk, execution_key):
    dead = desk.claim("t1", execution_key=execution_key, message=BODY)
    desk.die(dead)
    desk.acquire(desk.claim("holder"))

    assert desk.enter(dead._replace(owner="redelivered")).what == "lock"

    assert (desk.message(dead), desk.due(dead)) == (None, {})


def test_who_only_asks_takes_no_message_away(desk):
    dead = desk.claim("t1", message=BODY)
    desk.die(dead)
    desk.acquire(desk.claim("holder"))
    before = desk.keyspace.snapshot()

    assert desk.enter(dead._replace(owner="redelivered", on_held="ask")).what == "lock"

    assert desk.keyspace.snapshot() == before


@pytest.mark.parametrize("on_held", ["wait", "skip", "reject"])
@KEYS
def test_a_copy_that_meets_its_own_run_leaves_that_runs_message_alone(desk, execution_key, on_held):
    claim = desk.claim(execution_key=execution_key, message=b"of the run")
    desk.acquire(claim)
    due = desk.due(claim)

    for generation, what in ((0, "own"), (1, "predecessor")):
        copy = desk.claim(execution_key=execution_key, message=b"of the copy", generation=generation, on_held=on_held)
        assert desk.enter(copy).what == what
        assert (desk.message(claim), desk.due(claim)) == (b"of the run", due)


def test_a_surplus_copy_leaves_the_message_alone(desk):
    claim = desk.claim(message=b"of the run", generation=1)
    desk.acquire(claim)
    before = desk.keyspace.snapshot()

    assert desk.enter(desk.claim(message=b"of the copy")) == Surplus("generation")

    assert desk.keyspace.snapshot() == before


# Outcomes that have still to be passed on


@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        ({"on_held": "skip"}, Outcome.SKIPPED),
        ({"on_held": "reject"}, Outcome.REJECTED),
        ({"wait": 1.0, "first_ms": "1"}, Outcome.TIMED_OUT),
    ],
    ids=["skip", "reject", "time out"],
)
@KEYS
def test_a_trigger_that_does_not_run_is_in_custody_until_it_is_settled(desk, execution_key, how, outcome):
    desk.acquire(desk.claim("holder"))
    claim = desk.claim("t1", execution_key=execution_key, message=BODY, grace=GRACE, **how)

    for _ in range(2):
        assert desk.enter(claim).outcome is outcome
        assert desk.message(claim) == BODY
        assert desk.due_in(claim) == pytest.approx(GRACE, abs=1.0)
    assert desk.keyspace.ttls()[desk.trigger_name(claim)] > DAY_MS - 5000
    desk.settle(claim)
    assert (desk.message(claim), desk.due(claim)) == (None, {})
    assert desk.enter(claim).settled
    assert (desk.message(claim), desk.due(claim)) == (None, {})


def test_an_answer_from_an_execution_is_in_custody_until_it_is_settled(desk):
    desk.run(desk.claim("leader", execution_key="invoice:1"))
    follower = desk.claim("follower", execution_key="invoice:1", message=BODY, grace=GRACE)

    assert desk.enter(follower).outcome is Outcome.SUCCEEDED

    assert (desk.message(follower), list(desk.due(follower))) == (BODY, ["follower\ninvoice:1"])
    assert desk.due_in(follower) == pytest.approx(GRACE, abs=1.0)
    desk.settle(follower)
    assert (desk.message(follower), desk.due(follower)) == (None, {})


@KEYS
@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED])
def test_whoever_answers_for_a_dead_delivery_is_in_custody_instead(desk, execution_key, outcome):
    first = desk.claim(execution_key=execution_key, message=b"first")
    second = desk.claim(execution_key=execution_key, message=b"second", grace=GRACE)
    desk.run(first, outcome)
    assert isinstance(desk.enter(second), Held)
    assert desk.message(first) == b"first"
    desk.client.hset(desk.trigger_name(first), "ended_ms", desk.keyspace.now_ms() - 60_000)

    assert desk.enter(second).outcome is outcome

    assert desk.message(second) == b"second"
    assert desk.due_in(second) == pytest.approx(GRACE, abs=1.0)
    desk.settle(first)
    assert desk.message(second) == b"second"
    desk.settle(second)
    assert (desk.message(second), desk.due(second)) == (None, {})


@KEYS
def test_a_settled_trigger_takes_no_message_into_custody_again(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=BODY)
    desk.run(claim)
    desk.settle(claim)

    assert desk.enter(desk.claim(execution_key=execution_key, message=BODY)).settled

    assert (desk.message(claim), desk.due(claim)) == (None, {})


@KEYS
def test_handouts_are_counted_anew_once_the_trigger_has_entered(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=BODY)
    desk.die(claim)
    assert [desk.rescue(claim).times for _ in range(2)] == [1, 2]

    heir = claim._replace(owner="heir")
    desk.die(heir)

    assert desk.rescue(claim).times == 1


@pytest.mark.parametrize(
    "execution_key",
    [None, "invoice:1"],
    ids=["task id", "execution key"],
)
@pytest.mark.parametrize("how", [{}, {"again": 60.0, "died": True}], ids=str)
def test_giving_back_what_was_concluded_leaves_it_in_custody_until_it_is_settled(desk, execution_key, how):
    """After a hard time limit: Celery stores the failure, and the process that is about to be killed gives back."""
    claim = desk.claim(execution_key=execution_key, message=BODY)
    desk.acquire(claim)
    desk.conclude(claim, release=False, error=Encoded("", "", b"an error"))

    desk.abandon(claim, **how)

    assert desk.message(claim) == BODY
    assert desk.due_in(claim) == pytest.approx(GRACE, abs=1.0)
    assert "died" not in desk.trigger(claim)
