"""`enter`, when runs of a trigger die: it is told apart from one that ends, and at last it is dead-lettered."""

from __future__ import annotations

import pytest
from desk import OTHER_LOCK, WORKER

from celery_singleflight.claims import Acquired, Ended, Held, Outcome

KEYS = pytest.mark.parametrize("execution_key", [None, "invoice:1"], ids=["task id", "execution key"])
MESSAGE = b"a message"
#: Both kinds of record, and both ways in which a death is found.
DEATHS = pytest.mark.parametrize(
    ("execution_key", "noticed"),
    [
        pytest.param(None, True, id="task id, the pool notices"),
        pytest.param(None, False, id="task id, the lease runs out"),
        pytest.param("invoice:1", True, id="execution key, the pool notices"),
        pytest.param("invoice:1", False, id="execution key, the lease runs out"),
    ],
)


def die(desk, how, owner, *, noticed, **facts):
    """One run that dies: the pool notices it and gives back, or the lease runs out. Returns what entering said."""
    claim = desk.claim(owner=owner, message=MESSAGE, **{**how, **facts})
    answer = desk.enter(claim)
    if isinstance(answer, Acquired):
        if noticed:
            desk.abandon(claim, again=5.0, died=True)
        else:
            desk.expire(claim)
    return answer


@DEATHS
@pytest.mark.parametrize("most", [2, 5])
def test_a_trigger_whose_runs_die_so_often_is_dead_lettered(desk, execution_key, noticed, most):
    how = {"execution_key": execution_key, "max_deliveries": most}

    answers = [die(desk, how, f"owner{n}", noticed=noticed) for n in range(most)]
    ended = die(desk, how, "last", noticed=noticed)

    assert [answer.attempt for answer in answers] == list(range(1, most + 1))
    assert isinstance(ended, Ended)
    assert (ended.outcome, ended.settled) == (Outcome.DEAD_LETTERED, False)
    assert ended.reason[:2] == ["died", "t1"]
    assert ended.reason[3] == most


@KEYS
def test_the_worker_of_the_last_run_is_named(desk, execution_key):
    how = {"execution_key": execution_key, "max_deliveries": 1}
    die(desk, how, "owner", noticed=False)

    assert die(desk, how, "last", noticed=False).reason == ["died", "t1", WORKER, 1, 0]


@KEYS
def test_deaths_of_both_kinds_count_together(desk, execution_key):
    how = {"execution_key": execution_key, "max_deliveries": 4}
    kinds = [True, False, False, True]
    for n, noticed in enumerate(kinds):
        assert isinstance(die(desk, how, f"owner{n}", noticed=noticed), Acquired)

    assert die(desk, how, "last", noticed=True).outcome is Outcome.DEAD_LETTERED


@KEYS
def test_a_dead_letter_is_told_again_and_stays_ended(desk, execution_key):
    how = {"execution_key": execution_key, "max_deliveries": 1}
    die(desk, how, "owner", noticed=False)
    last = desk.claim(owner="last", message=MESSAGE, **how)

    ended = desk.enter(last)

    assert desk.enter(last) == ended
    assert desk.enter(desk.claim(owner="later", message=MESSAGE, **how)) == ended
    assert last.owner not in desk.scores(last)
    retry = desk.enter(desk.claim(owner="retry", generation=1, message=MESSAGE, **how))
    assert retry.outcome is Outcome.DEAD_LETTERED, "also for a retry that one of its runs had sent"


@KEYS
def test_a_dead_letter_is_in_custody_until_it_is_told_and_its_message_is_kept(desk, execution_key):
    how = {"execution_key": execution_key, "max_deliveries": 1}
    die(desk, how, "owner", noticed=True)
    last = desk.claim(owner="last", message=MESSAGE, grace=5.0, **how)
    desk.enter(last)

    assert (desk.message(last), desk.due_in(last)) == (MESSAGE, pytest.approx(5.0, abs=1.0))
    desk.settle(last)
    assert (desk.message(last), desk.due(last)) == (MESSAGE, {})
    assert desk.enter(desk.claim(owner="later", **how)).settled


def test_a_dead_lettered_trigger_leaves_its_execution_to_others(desk):
    how = {"execution_key": "invoice:1", "max_deliveries": 1}
    die(desk, how, "owner", noticed=False)
    assert die(desk, how, "last", noticed=False).outcome is Outcome.DEAD_LETTERED

    answer = desk.acquire(desk.claim("t2", run_id="run-2", **how))

    assert (answer.run_id, answer.attempt) == ("run-2", 1)


def test_the_death_of_another_triggers_run_does_not_count(desk):
    die(desk, {"execution_key": "invoice:1"}, "owner", noticed=False)

    answer = desk.enter(desk.claim("t2", execution_key="invoice:1", lock_key=OTHER_LOCK, max_deliveries=1))

    assert isinstance(answer, Acquired)


def test_a_dead_letter_does_not_end_an_execution_that_another_trigger_runs(desk):
    how = {"execution_key": "invoice:1", "max_deliveries": 1}
    die(desk, how, "owner", noticed=True)
    heir = desk.claim("t2", execution_key="invoice:1", lock_key=OTHER_LOCK)
    acquired = desk.acquire(heir)

    assert isinstance(die(desk, how, "last", noticed=True), Held)

    desk.abandon(heir)
    assert die(desk, how, "last", noticed=True).outcome is Outcome.DEAD_LETTERED
    assert desk.acquire(heir._replace(owner="again")).run_id == acquired.run_id


@KEYS
def test_a_run_that_is_given_back_without_dying_does_not_count(desk, execution_key):
    for n in range(5):
        claim = desk.claim(owner=f"owner{n}", execution_key=execution_key, max_deliveries=1, message=MESSAGE)
        assert isinstance(desk.enter(claim), Acquired)
        desk.abandon(claim, again=5.0)


@KEYS
def test_waiting_does_not_count(desk, execution_key):
    holder = desk.claim("holder")
    desk.acquire(holder)
    for n in range(5):
        claim = desk.claim("t1", owner=f"owner{n}", execution_key=execution_key, max_deliveries=1, message=MESSAGE)
        assert isinstance(desk.enter(claim), Held)
    desk.abandon(holder)
    assert isinstance(desk.enter(claim), Acquired)


@DEATHS
def test_each_generation_has_a_count_of_its_own(desk, execution_key, noticed):
    how = {"execution_key": execution_key, "max_deliveries": 2}
    die(desk, how, "owner0", noticed=noticed)
    last = desk.claim(owner="owner1", message=MESSAGE, **how)
    desk.acquire(last)
    desk.abandon(last, generation=1)

    answers = [die(desk, how, f"retry{n}", noticed=noticed, generation=1) for n in range(2)]

    assert [isinstance(answer, Acquired) for answer in answers] == [True, True]
    assert die(desk, how, "last", noticed=noticed, generation=1).outcome is Outcome.DEAD_LETTERED


@KEYS
@pytest.mark.parametrize("noticed", [True, False], ids=["the pool notices", "the lease runs out"])
def test_a_generation_counts_anew_also_when_its_predecessor_died_after_it_had_sent_it(desk, execution_key, noticed):
    how = {"execution_key": execution_key, "max_deliveries": 3}
    for n in range(2):
        die(desk, how, f"owner{n}", noticed=noticed)
    assert isinstance(die(desk, how, "its retry is sent", noticed=False), Acquired)

    answers = [die(desk, how, f"retry{n}", noticed=noticed, generation=1) for n in range(3)]

    assert [isinstance(answer, Acquired) for answer in answers] == [True, True, True]
    assert die(desk, how, "last", noticed=noticed, generation=1).outcome is Outcome.DEAD_LETTERED


@KEYS
def test_without_a_bound_a_trigger_runs_again_however_often_it_dies(desk, execution_key):
    for n in range(10):
        assert isinstance(die(desk, {"execution_key": execution_key}, f"owner{n}", noticed=n % 2), Acquired)


@KEYS
def test_a_reply_that_was_lost_is_no_death(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, max_deliveries=1, message=MESSAGE)
    acquired = desk.acquire(claim)
    assert desk.enter(claim) == acquired
    assert desk.enter(claim._replace(owner="redelivered")).what == "own"
    assert "died" not in desk.trigger(claim)


@KEYS
def test_a_dead_letter_is_rescued_when_nobody_has_told_it(desk, execution_key):
    how = {"execution_key": execution_key, "max_deliveries": 1}
    die(desk, how, "owner", noticed=False)
    last = desk.claim(owner="last", message=MESSAGE, **how)
    desk.enter(last)
    desk.client.hset(desk.trigger_name(last), "ended_ms", 1)

    handout = desk.rescue(last)

    assert (handout.message, handout.outcome, handout.times) == (MESSAGE, "dead-lettered", 1)
    copy = desk.claim(owner="copy", copy="c1", previous=handout.copy, message=MESSAGE, **how)
    assert desk.enter(copy).outcome is Outcome.DEAD_LETTERED


@KEYS
def test_a_generation_that_has_to_wait_first_counts_anew_too(desk, execution_key):
    how = {"execution_key": execution_key, "max_deliveries": 3, "message": MESSAGE}
    for n in range(2):
        die(desk, {"execution_key": execution_key, "max_deliveries": 3}, f"owner{n}", noticed=False)
    last = desk.claim(owner="its retry is sent", **how)
    desk.acquire(last)
    retry = desk.claim(owner="retry", generation=1, **how)
    assert desk.enter(retry).what == "predecessor"
    desk.expire(last)

    assert isinstance(desk.enter(retry), Acquired)

    assert desk.trigger(retry).get("died", "0") == "0"
