"""`release`: an operator takes a lease away, by its fencing token."""

from __future__ import annotations

import pytest
from desk import WORKER

from celery_singleflight.claims import Outcome, Refused, Terms

KEYS = pytest.mark.parametrize("execution_key", [None, "invoice:1"], ids=["task id", "execution key"])


def unchanged(desk, ask):
    before = desk.keyspace.snapshot()
    answer = ask()
    assert desk.keyspace.snapshot() == before
    return answer


def test_a_live_holder_is_named_and_left_alone(desk):
    claim = desk.claim(message=b"a message")
    token = desk.acquire(claim).token

    word, worker, age_ms, remaining_ms = unchanged(desk, lambda: desk.release(claim, token))

    assert (word, worker) == ("live", WORKER.encode())
    assert 0 <= age_ms < 5000 < remaining_ms


@pytest.mark.parametrize("how", ["another token", "another trigger", "nobody"])
def test_a_token_that_nobody_has_releases_nothing(desk, how):
    claim = desk.claim()
    token = 1 if how == "nobody" else desk.acquire(claim).token
    asked = {"another token": (claim, token + 1), "another trigger": (desk.claim("t2"), token), "nobody": (claim, token)}[how]

    assert unchanged(desk, lambda: desk.release(*asked, force=True)) == ("other",)


@KEYS
def test_an_expired_holder_is_released_and_its_trigger_comes_up_at_once(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    token = desk.acquire(claim).token
    desk.expire(claim)

    assert desk.release(claim, token) == ("released", b"stored")

    assert desk.scores(claim) == {}
    assert desk.due_in(claim) == pytest.approx(0.0, abs=1.0)
    assert desk.rescue(claim).message == b"a message"


@KEYS
def test_releasing_again_gives_the_same_answer_and_changes_nothing(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    token = desk.acquire(claim).token
    answer = desk.release(claim, token, force=True)
    assert answer == ("released", b"stored")

    assert unchanged(desk, lambda: desk.release(claim, token, force=True)) == answer
    assert unchanged(desk, lambda: desk.release(claim, token)) == answer


def test_without_a_message_nothing_is_said_to_come_again(desk):
    claim = desk.claim()
    token = desk.acquire(claim).token
    assert desk.release(claim, token, force=True) == ("released", b"")
    assert desk.due(claim) == {}


@KEYS
@pytest.mark.parametrize("limit", [1, 2])
def test_nothing_of_a_released_holder_counts_afterwards(desk, execution_key, limit):
    claim = desk.claim(execution_key=execution_key, limit=limit, message=b"a message")
    token = desk.acquire(claim).token
    desk.release(claim, token, force=True)

    assert desk.renew(claim, token) == "taken"
    assert isinstance(unchanged(desk, lambda: desk.finish(claim, token)), Refused)
    heir = desk.claim(execution_key=execution_key, limit=limit)
    assert desk.acquire(heir).token > token + 1


@KEYS
def test_the_process_of_a_released_holder_that_dies_has_died_once(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=b"a message")
    token = desk.acquire(claim).token
    desk.release(claim, token, force=True)
    assert "died" not in desk.trigger(claim)

    for _ in range(2):
        desk.abandon(claim, again=5.0, died=True)
        assert desk.trigger(claim)["died"] == "1"


@KEYS
def test_an_expired_holder_that_is_released_has_died_once(desk, execution_key):
    claim = desk.claim(execution_key=execution_key, message=b"a message", max_deliveries=1)
    token = desk.acquire(claim).token
    desk.expire(claim)
    desk.release(claim, token)
    desk.abandon(claim, again=5.0, died=True)

    assert desk.trigger(claim)["died"] == "1"
    assert desk.enter(claim._replace(owner="heir")).outcome is Outcome.DEAD_LETTERED


def test_other_holders_stay(desk):
    first, second = desk.claim("t1", limit=2), desk.claim("t2", limit=2)
    token = desk.acquire(first).token
    acquired = desk.acquire(second)

    desk.release(first, token, force=True)

    assert list(desk.scores(second)) == [second.owner]
    assert desk.enter(second) == acquired


def test_a_place_that_is_held_after_its_end_is_freed(desk):
    claim = desk.claim()
    token = desk.acquire(claim).token
    desk.finish(claim, token, hold=100.0)

    assert desk.release(claim, token, force=True) == ("released", b"")

    assert desk.enter(desk.claim()).outcome is Outcome.SUCCEEDED
    desk.acquire(desk.claim("t2"))


@KEYS
@pytest.mark.parametrize("is_live", [True, False], ids=["live", "expired"])
@pytest.mark.parametrize("holds", [True, False], ids=["hold", "rerun"])
def test_nobody_knows_what_a_released_run_has_done(desk, execution_key, is_live, holds):
    claim = desk.claim(message=b"the message", execution_key=execution_key, terms=Terms(holds=holds))
    token = desk.acquire(claim).token
    if not is_live:
        desk.expire(claim)
    assert desk.release(claim, token, force=is_live).word == "released"

    answer = desk.enter(claim._replace(owner="again", copy="a copy", previous=""))

    if holds:
        assert (answer.how, answer.task_id, answer.worker) == ("held", "t1", WORKER)
    else:
        assert answer.is_unsure
