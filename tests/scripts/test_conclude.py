"""`conclude`: a trigger gets its outcome from somebody else than its run, which was killed or is about to be."""

from __future__ import annotations

import pytest
from desk import OTHER_LOCK

from celery_singleflight.claims import Acquired, Encoded, Ended, Outcome, Refused
from celery_singleflight.custody import GRACE
from celery_singleflight.script import load

CONCLUDE = load("conclude")
HOUR = 3600.0
ERROR = Encoded("application/json", "utf-8", b"\x00\xff an error")
KEYS = pytest.mark.parametrize("execution_key", [None, "invoice:1"], ids=["task id", "execution key"])
OUTCOMES = pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.REVOKED])


def ask(desk, claim, outcome="failed"):
    """Return the reply itself."""
    names = desk.store.names(claim.record)
    values = {"owner": claim.owner, "task_id": claim.record.task_id, "outcome": outcome, "reason": '["why"]'}
    values |= {"keep_ms": 600_000, "release": 1, "member": claim.record.member, "patience_ms": "", "keeps": 0}
    values |= {"lock_key": claim.record.lock_key.text, "content_type": "", "content_encoding": "", "body": b""}
    values |= {"execution_as": ""}
    return CONCLUDE.reply(desk.connections.run(CONCLUDE, len(CONCLUDE.keys), CONCLUDE.arguments(names, values)))


def refused_and_nothing_changed(desk, claim, outcome, asked="failed"):
    before = desk.keyspace.snapshot()
    for _ in range(2):
        assert ask(desk, claim, asked) == ("refused", outcome.encode())
    assert desk.keyspace.snapshot() == before


@KEYS
@OUTCOMES
def test_a_running_trigger_is_concluded_settled_and_its_lease_is_free(desk, execution_key, outcome):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.acquire(claim)

    assert desk.conclude(claim, outcome)

    assert desk.scores(claim) == {}
    trigger = desk.trigger(claim)
    assert {name: trigger.get(name) for name in ("owner", "outcome", "settled", "concluded_by", "message")} == {
        "owner": "",
        "outcome": outcome.value,
        "settled": "1",
        "concluded_by": claim.owner,
        "message": None,
    }
    assert desk.due(claim) == {}
    assert desk.rescue(claim) is None
    desk.acquire(desk.claim("t2", execution_key=execution_key))


@KEYS
@OUTCOMES
def test_a_concluded_trigger_does_not_run_again_and_needs_no_answer(desk, execution_key, outcome):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.acquire(claim)
    desk.conclude(claim, outcome)

    for again in (claim, claim._replace(owner="redelivered")):
        ended = desk.enter(again)
        assert isinstance(ended, Ended)
        assert (ended.outcome, ended.settled) == (outcome, True)
    assert (desk.message(claim), desk.due(claim)) == (None, {})


def test_the_reason_is_told_to_whoever_asks(desk):
    claim = desk.claim()
    desk.acquire(claim)
    desk.conclude(claim, reason='["terminated"]')

    assert desk.enter(claim).reason == ["terminated"]


@KEYS
def test_concluding_again_gives_the_same_answer_and_changes_nothing(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.acquire(claim)
    assert ask(desk, claim) == ("concluded", [])
    before = desk.keyspace.snapshot()

    assert ask(desk, claim) == ("concluded", [])
    assert desk.keyspace.snapshot() == before


@KEYS
def test_the_lease_of_a_process_that_may_live_is_released_when_it_is_gone(desk, execution_key):
    claim = desk.claim(execution_key=execution_key)
    desk.acquire(claim)

    assert desk.conclude(claim, release=False)

    assert list(desk.scores(claim)) == [claim.owner]
    assert desk.enter(desk.claim("t2", execution_key=execution_key)).what == ("execution" if execution_key else "lock")
    assert desk.conclude(claim, release=True)
    assert desk.scores(claim) == {}
    desk.acquire(desk.claim("t2", execution_key=execution_key))


@KEYS
@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED])
def test_a_run_that_was_concluded_under_its_feet_is_refused(desk, execution_key, outcome):
    claim = desk.claim(execution_key=execution_key)
    token = desk.acquire(claim).token
    desk.conclude(claim, Outcome.FAILED, release=False)
    before = desk.keyspace.snapshot()

    assert desk.finish(claim, token, outcome) == Refused("", "failed")

    assert desk.keyspace.snapshot() == before
    desk.abandon(claim)
    assert desk.scores(claim) == {}
    assert desk.enter(claim).outcome is Outcome.FAILED


@KEYS
@pytest.mark.parametrize("how", [{}, {"generation": 1}, {"again": 5.0}, {"again": 5.0, "died": True}], ids=str)
def test_giving_back_what_was_concluded_does_not_take_the_outcome_back(desk, execution_key, how):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.acquire(claim)
    desk.conclude(claim, release=False)

    desk.abandon(claim, **how)

    generation = how.get("generation", 0)
    if not generation:
        assert desk.enter(claim._replace(owner="heir")).outcome is Outcome.FAILED
    assert (desk.scores(claim), desk.message(claim), desk.due(claim)) == ({}, None, {})


@KEYS
def test_a_trigger_that_waits_is_concluded_and_waits_no_more(desk, execution_key):
    desk.acquire(desk.claim("holder"))
    waiting = desk.claim("t1", execution_key=execution_key)
    desk.enter(waiting)

    assert desk.conclude(waiting, Outcome.REVOKED)

    again = desk.claim("t1", execution_key=execution_key, copy="c1", previous="")
    assert desk.enter(again).outcome is Outcome.REVOKED


@KEYS
def test_a_dead_run_is_concluded_although_its_lease_has_expired(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.die(claim)

    assert desk.conclude(claim)

    assert desk.enter(claim).outcome is Outcome.FAILED
    assert desk.due(claim) == {}


@KEYS
def test_a_trigger_that_was_given_back_is_concluded(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.acquire(claim)
    desk.abandon(claim, again=5.0, died=True)

    assert desk.conclude(claim)

    assert (desk.due(claim), desk.message(claim)) == ({}, None)
    assert desk.enter(claim).outcome is Outcome.FAILED


@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED])
@KEYS
def test_a_trigger_that_has_ended_keeps_its_outcome(desk, execution_key, outcome):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.run(claim, outcome)

    refused_and_nothing_changed(desk, claim, outcome.value, asked="revoked")
    assert not desk.conclude(claim, Outcome.REVOKED)
    assert not desk.conclude(claim, Outcome.FAILED, error=ERROR)
    assert desk.enter(claim).value.body == b"42"


@KEYS
def test_what_celery_has_done_for_the_same_outcome_settles_it_and_changes_nothing_else(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.run(claim, Outcome.FAILED, reason='["its own"]')
    before = desk.trigger(claim)
    assert before["message"] == "a message"

    assert desk.conclude(claim._replace(owner="another"), Outcome.FAILED)

    assert desk.trigger(claim) == {name: value for name, value in before.items() if name != "message"} | {"settled": "1"}
    assert desk.due(claim) == {}


def test_a_trigger_that_the_store_does_not_know_is_not_concluded(desk):
    refused_and_nothing_changed(desk, desk.claim(execution_key="invoice:1"), "unknown")
    refused_and_nothing_changed(desk, desk.claim(), "unknown")
    assert desk.keyspace.names() == []


@KEYS
def test_a_trigger_that_another_delivery_runs_is_not_concluded(desk, execution_key):
    late, heir = (desk.claim(execution_key=execution_key, message=b"a message") for _ in range(2))
    desk.die(late)
    acquired = desk.acquire(heir)

    refused_and_nothing_changed(desk, late, "")

    assert desk.enter(heir) == acquired
    assert desk.finish(heir, acquired.token) is None


def test_an_execution_that_another_trigger_runs_goes_on(desk):
    late = desk.claim("t1", execution_key="invoice:1")
    heir = desk.claim("t2", execution_key="invoice:1", lock_key=OTHER_LOCK)
    desk.die(late)
    acquired = desk.acquire(heir)

    assert desk.conclude(late)

    assert desk.enter(late).outcome is Outcome.FAILED
    assert desk.enter(heir) == acquired
    assert desk.finish(heir, acquired.token) is None


def test_a_failed_execution_is_free_for_another_trigger(desk):
    claim = desk.claim("t1", execution_key="invoice:1", run_id="run-1")
    desk.acquire(claim)
    desk.conclude(claim)

    answer = desk.acquire(desk.claim("t2", execution_key="invoice:1", run_id="run-2"))

    assert (answer.run_id, answer.attempt) == ("run-2", 1)


@KEYS
def test_the_outcome_is_kept_for_as_long_as_asked(desk, execution_key):
    claim = desk.claim(execution_key=execution_key)
    desk.acquire(claim)

    desk.conclude(claim, keep=2 * HOUR)

    assert 2 * HOUR * 1000 - 5000 < desk.keyspace.ttls()[desk.trigger_name(claim)] <= 2 * HOUR * 1000


def test_concluding_releases_nobody_elses_lease(desk):
    claim, other = desk.claim("t1", limit=2), desk.claim("t2", limit=2)
    desk.acquire(claim)
    acquired = desk.acquire(other)

    desk.conclude(claim)

    assert list(desk.scores(other)) == [other.owner]
    assert desk.enter(other) == acquired


def test_an_outcome_that_is_not_to_be_kept_is_remembered_for_an_hour(desk):
    claim = desk.claim()
    desk.acquire(claim)
    desk.conclude(claim, keep=0.0)
    assert HOUR * 1000 - 5000 < desk.keyspace.ttls()[desk.trigger_name(claim)] <= HOUR * 1000


@KEYS
def test_a_retry_that_the_concluded_run_had_sent_finds_the_trigger_ended(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.acquire(claim)
    desk.conclude(claim)

    retry = desk.claim(execution_key=execution_key, generation=1, message=b"the retry")

    ended = desk.enter(retry)
    assert (ended.outcome, ended.settled) == (Outcome.FAILED, True)
    assert desk.message(retry) is None


# While Celery has still to send what follows


@KEYS
def test_a_conclusion_that_is_being_passed_on_is_in_custody(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=b"a message", grace=GRACE)
    desk.acquire(claim)

    for _ in range(2):
        assert desk.conclude(claim, release=False, error=ERROR)
        assert "settled" not in desk.trigger(claim)
        assert desk.message(claim) == b"a message"
        assert desk.due_in(claim) == pytest.approx(GRACE, abs=1.0)
    assert list(desk.scores(claim)) == [claim.owner]
    assert desk.enter(claim._replace(owner="redelivered")).what == "own"


@KEYS
def test_a_conclusion_that_nobody_passed_on_is_handed_out_and_answered(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.acquire(claim)
    desk.conclude(claim, error=ERROR)
    desk.client.hset(desk.trigger_name(claim), "ended_ms", desk.keyspace.now_ms() - 60_000)

    handout = desk.rescue(claim)

    assert (handout.message, handout.outcome) == (b"a message", "failed")
    ended = desk.enter(desk.claim(execution_key=execution_key, copy="c1", previous=handout.copy, message=b"a copy"))
    assert (ended.outcome, ended.settled, ended.value) == (Outcome.FAILED, False, ERROR)


@KEYS
def test_a_conclusion_is_settled_when_it_is_told_without_an_error(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.acquire(claim)
    desk.conclude(claim, release=False, error=ERROR)
    desk.conclude(claim, release=True, error=ERROR)
    assert (desk.scores(claim), set(desk.due(claim))) == ({}, {claim.record.member})

    for _ in range(2):
        assert desk.conclude(claim, release=False)
        assert (desk.message(claim), desk.due(claim), desk.rescue(claim)) == (None, {}, None)
    assert desk.enter(claim._replace(owner="redelivered")).settled


@KEYS
def test_a_run_that_concludes_itself_settles_as_any_other(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    token = desk.acquire(claim).token
    desk.expire(claim)

    assert desk.conclude(claim, error=ERROR)

    assert desk.finish(claim, token, Outcome.FAILED) is None, "it is its own"
    desk.settle(claim)
    assert (desk.message(claim), desk.due(claim)) == (None, {})


def test_an_execution_stays_under_way_while_its_process_may_live(desk):
    claim = desk.claim("t1", execution_key="invoice:1")
    desk.acquire(claim)
    desk.conclude(claim, release=False, error=ERROR)
    other = desk.claim("t2", execution_key="invoice:1", lock_key=OTHER_LOCK)

    assert not isinstance(desk.enter(other), Acquired)
    desk.conclude(claim, error=ERROR)
    assert isinstance(desk.enter(other), Acquired)


@KEYS
def test_a_retry_that_comes_between_the_words_of_a_conclusion_takes_nothing_of_it_back(desk, execution_key):
    """The body had sent its retry, then came the hard time limit: the main process tells of it three times."""
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    desk.acquire(claim)
    desk.conclude(claim, release=False, error=ERROR)
    retry = desk.claim(execution_key=execution_key, generation=1, message=b"the retry")
    assert desk.enter(retry).outcome is Outcome.FAILED

    desk.conclude(claim, error=ERROR)
    desk.conclude(claim, release=False)

    ended = desk.enter(retry._replace(owner="redelivered"))
    assert (ended.outcome, ended.settled) == (Outcome.FAILED, True)
