"""`replay`: a trigger that is over runs again, once, and nothing that was sent before counts any more."""

from __future__ import annotations

import json

import pytest
from desk import LOCK, NOBODY_NEXT, lose_next_reply
from step_desk import Run

from celery_singleflight.claims import Acquired, Encoded, Ended, Held, Outcome, Surplus, Terms, Waits
from celery_singleflight.custody import Settled
from celery_singleflight.progress import Begun, Done

KEYS = pytest.mark.parametrize("execution_key", [None, "invoice:1"], ids=["task id", "execution key"])
#: The generation of a replay's message, whose forerunner was of the first.
GENERATION = 1 << 20
DAY = 86_400_000


def over(desk, outcome=Outcome.FAILED, keeps="always", **how):
    """A trigger that has ended, and all that follows is sent."""
    claim = desk.claim(message=b"a message", **how)
    desk.run(claim, outcome)
    settle(desk, claim, keeps)
    return claim


def settle(desk, claim, keeps="always"):
    desk.store.settle([Settled(claim.record, claim.owner, is_done=True, keeps=keeps)])


def ask(desk, claim, mark="a replay", *, force=False, **how):
    return desk.store.replay(claim.record, mark, force=force, reason="as asked for", holds=claim.terms.holds, **how)


def replay(desk, claim, mark="a replay", *, force=False):
    told = ask(desk, claim, mark, force=force)
    assert told.word == "recorded", told
    told = {"seen": told.seen.decode(), "message": b"message of the replay", "generation": GENERATION}
    return ask(desk, claim, mark, force=force, **told).word


def copy_of(claim, **how):
    """A delivery of the message that the replay has published."""
    facts = {"owner": "replay", "copy": "copy 1", "previous": "", "generation": GENERATION, "message": b"message of the replay"}
    return claim._replace(**{**facts, **how})


def entered(desk, claim, **how):
    return desk.enter(copy_of(claim, **how))


@KEYS
@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.REPLACED])
def test_what_did_not_succeed_runs_again_and_its_new_outcome_counts(desk, outcome, execution_key):
    claim = over(desk, outcome, execution_key=execution_key)

    assert replay(desk, claim) == "replayed"
    answer = entered(desk, claim)

    assert isinstance(answer, Acquired)
    assert desk.finish(copy_of(claim), answer.token) is None
    assert entered(desk, claim, owner="later").outcome is Outcome.SUCCEEDED


@pytest.mark.parametrize("policy", ["skip", "reject"])
def test_a_trigger_that_was_turned_away_is_no_newcomer_when_it_is_replayed(desk, policy):
    holder, claim = desk.claim("t0"), desk.claim(message=b"a message", on_held=policy)
    desk.acquire(holder)
    assert isinstance(desk.enter(claim), Ended)
    settle(desk, claim)

    assert replay(desk, claim) == "replayed"

    assert isinstance(entered(desk, claim), Held)


def test_a_dead_letter_has_its_deaths_before_it_anew(desk):
    claim = desk.claim(message=b"a message", max_deliveries=1)
    desk.die(claim)
    assert desk.enter(claim._replace(owner="heir")).outcome is Outcome.DEAD_LETTERED
    settle(desk, claim._replace(owner="heir"))

    assert replay(desk, claim) == "replayed"

    assert isinstance(entered(desk, claim), Acquired)
    assert "died" not in desk.trigger(claim)


def test_asking_changes_nothing(desk):
    claim = over(desk)
    before = desk.keyspace.snapshot()
    told = ask(desk, claim)
    assert (told.word, told.outcome, told.message) == ("recorded", b"failed", b"a message")
    assert desk.keyspace.snapshot() == before


@KEYS
def test_of_two_replays_the_second_finds_it_under_way(desk, execution_key):
    claim = over(desk, execution_key=execution_key)
    told = [ask(desk, claim, mark) for mark in ("one", "other")]
    marked = {"seen": told[0].seen.decode(), "message": b"message of the replay", "generation": GENERATION}

    assert ask(desk, claim, "one", **marked).word == "replayed"
    assert ask(desk, claim, "other", **marked) == ("waiting", b"message of the replay")


def test_an_outcome_that_is_another_one_meanwhile_is_told_anew(desk):
    claim = over(desk)
    seen = ask(desk, claim, "slow").seen.decode()
    replay(desk, claim, "quick")
    token = entered(desk, claim).token
    assert desk.finish(copy_of(claim), token, Outcome.FAILED) is None
    settle(desk, copy_of(claim))

    told = ask(desk, claim, "slow", seen=seen, message=b"too late", generation=GENERATION)

    assert (told.word, told.message, int(told.generation)) == ("recorded", b"message of the replay", GENERATION)


def test_a_replay_whose_reply_got_lost_is_one(desk):
    claim = over(desk)
    lost = lose_next_reply(desk.connections, spare=1)
    assert replay(desk, claim, force=True) == "replayed"
    assert lost
    assert len(json.loads(desk.trigger(claim)["forced"])) == 1


@KEYS
def test_whoever_replays_may_die_and_a_sweeper_has_the_message(desk, execution_key):
    claim = over(desk, execution_key=execution_key)
    replay(desk, claim)

    assert desk.due_in(claim) == pytest.approx(5.0, abs=1.0)
    desk.overdue(claim)
    assert desk.sweep() == [claim.record._replace(lock_key=claim.record.lock_key._replace(text=""))]
    handout = desk.rescue(claim)
    assert (handout.message, handout.copy, handout.outcome) == (b"message of the replay", "", "")


def test_of_the_copies_of_a_replay_and_of_what_came_before_it_one_counts(desk):
    claim = over(desk)
    replay(desk, claim)
    assert isinstance(desk.enter(claim._replace(owner="redelivered")), Surplus)
    token = entered(desk, claim).token
    assert entered(desk, claim, owner="swept", copy="copy 2") == Surplus("copy")
    assert desk.finish(copy_of(claim), token) is None
    assert isinstance(desk.enter(claim._replace(owner="redelivered")), Surplus)


def test_the_record_and_the_message_live_for_a_day_while_nobody_comes(desk):
    claim = over(desk)
    replay(desk, claim)
    _, until_ms = desk.keyspace.snapshot()[desk.trigger_name(claim)]
    assert until_ms - desk.keyspace.now_ms() == pytest.approx(DAY, abs=5000)


# Who has succeeded


@KEYS
def test_what_has_succeeded_runs_again_by_force_as_another_run_and_that_is_recorded(desk, execution_key):
    claim = over(desk, Outcome.SUCCEEDED, execution_key=execution_key)
    before = desk.keyspace.snapshot()
    assert ask(desk, claim) == ("succeeded", b"succeeded")
    assert desk.keyspace.snapshot() == before

    assert replay(desk, claim, force=True) == "replayed"
    answer = entered(desk, claim, run_id="another run")

    assert (answer.run_id, answer.attempt) == ("another run", 1)
    ((at, reason),) = json.loads(desk.trigger(claim)["forced"])
    assert (desk.keyspace.now_ms() - at < 5000, reason) == (True, "as asked for")
    assert desk.finish(copy_of(claim), answer.token, Outcome.FAILED) is None
    settle(desk, copy_of(claim))
    replay(desk, claim, "once more", force=True)
    assert len(json.loads(desk.trigger(claim)["forced"])) == 2


def test_without_force_an_execution_that_another_trigger_has_completed_answers_the_replay(desk):
    claim = over(desk, execution_key="invoice:1")
    desk.run(desk.claim("t2", execution_key="invoice:1"), body=b"43")

    assert replay(desk, claim) == "replayed"
    answer = entered(desk, claim)

    assert (answer.outcome, answer.value.body) == (Outcome.SUCCEEDED, b"43")


def test_by_force_an_execution_that_another_trigger_has_completed_runs_again(desk):
    claim = over(desk, execution_key="invoice:1")
    desk.run(desk.claim("t2", execution_key="invoice:1"), body=b"43")

    assert replay(desk, claim, force=True) == "replayed"

    assert isinstance(entered(desk, claim), Acquired)


def test_not_even_by_force_while_another_trigger_runs_the_execution(desk):
    claim = over(desk, execution_key="invoice:1")
    desk.acquire(desk.claim("t2", execution_key="invoice:1"))
    assert ask(desk, claim, force=True) == ("running", b"t2", b"worker@host")


def test_a_trigger_that_waits_in_the_store_is_waiting(desk):
    desk.acquire(desk.claim("t0"))
    claim = desk.claim(message=b"a message", on_held="queue")
    desk.enter(claim)
    assert ask(desk, claim).word == "waiting"


# What it has done


@pytest.mark.parametrize("force", [True, False])
def test_a_replay_goes_on_behind_the_steps_that_are_done(desk, force):
    run = Run(desk, desk.claim(message=b"a message"))
    run.do("charge")
    run.finish()
    settle(desk, run.claim)

    replay(desk, run.claim, force=force)
    again = Run(desk, copy_of(run.claim))

    assert (again.acquired.run_id, again.acquired.attempt) == (run.acquired.run_id, 2)
    assert isinstance(again.begin(again.step("charge")), Done)


def test_a_replay_does_what_was_undone_anew(desk):
    run = Run(desk, desk.claim(message=b"a message"))
    run.do("charge", undo="m:undo")
    run.undo()
    run.undo(undone="charge")
    run.finish()
    settle(desk, run.claim)

    replay(desk, run.claim)
    again = Run(desk, copy_of(run.claim, run_id="another run"))

    assert (again.acquired.run_id, again.acquired.attempt) == ("another run", 1)
    assert again.begin(again.step("charge", undo="m:undo")) == Begun(1, is_unsure=False)


def held(desk, execution_key=None):
    run = Run(desk, desk.claim(message=b"a message", execution_key=execution_key), unsure_as="hold")
    run.begin(run.step("charge"))
    desk.expire(run.claim)
    second = Run(desk, run.claim._replace(owner="second"), unsure_as="hold")
    second.begin(second.step("charge"))
    second.finish()
    settle(desk, second.claim)
    return second


@KEYS
def test_a_step_of_which_nobody_knows_is_to_be_resolved_before(desk, execution_key):
    run = held(desk, execution_key)
    assert ask(desk, run.claim) == ("uncertain", b"charge")

    assert desk.store.resolve_step(run.claim.record, "charge", None)[0] == "resolved"

    assert replay(desk, run.claim) == "replayed"
    assert isinstance(entered(desk, run.claim), Acquired)


def test_a_resolved_step_does_not_have_the_kept_message_published_by_itself(desk):
    run = held(desk)
    desk.store.resolve_step(run.claim.record, "charge", None)
    assert desk.due(run.claim) == {}
    assert ask(desk, run.claim)[1:] == (b"::", b"", b"a message", b"")


def test_by_force_it_runs_again_and_the_step_is_held_as_before(desk):
    run = held(desk)
    replay(desk, run.claim, force=True)
    again = Run(desk, copy_of(run.claim), unsure_as="hold")
    assert type(again.begin(again.step("charge"))).__name__ == "Uncertain"


def dead_letter(desk, **how):
    """A trigger whose only run has died in its body."""
    claim = desk.claim(message=b"a message", max_deliveries=1, **how)
    desk.acquire(claim)
    desk.store.abandon(claim.owner, claim.record, again=5.0, died=True)
    assert desk.enter(claim._replace(owner="heir")).outcome is Outcome.DEAD_LETTERED
    settle(desk, claim._replace(owner="heir"))
    return claim


@KEYS
def test_a_body_of_which_nobody_knows_what_it_has_done_is_to_be_resolved_before(desk, execution_key):
    claim = dead_letter(desk, execution_key=execution_key, terms=Terms(holds=True))
    assert ask(desk, claim) == ("uncertain", b"")

    assert replay(desk, claim, force=True) == "replayed"

    assert "unsure" not in desk.execution(claim)
    assert isinstance(entered(desk, claim), Acquired)


@KEYS
def test_under_rerun_a_dead_letter_is_replayed_without_force(desk, execution_key):
    claim = dead_letter(desk, execution_key=execution_key)
    assert replay(desk, claim) == "replayed"
    assert isinstance(entered(desk, claim), Acquired)


def test_who_waits_for_a_word_asks_again_when_the_execution_is_forced(desk):
    claim = dead_letter(desk, execution_key="invoice:1", terms=Terms(holds=True))
    waiting = desk.claim("t2", execution_key="invoice:1", message=b"t2", terms=Terms(holds=True))
    assert type(desk.enter(waiting)).__name__ == "Doubt"

    replay(desk, claim, force=True)

    assert desk.due_in(waiting) <= 0


def test_a_failure_that_is_kept_does_not_answer_the_replay_of_its_own_trigger(desk):
    claim = desk.claim(message=b"a message", execution_key="invoice:1")
    token = desk.acquire(claim).token
    error = Encoded("application/json", "utf-8", b"{}")
    how = {"reason": "[]", "keep": 600.0, "keeps_failure": True}
    assert desk.store.finish(desk.lease(claim, token), claim.record, Outcome.FAILED, error, **how) == NOBODY_NEXT
    settle(desk, claim)
    assert isinstance(desk.enter(desk.claim("t2", execution_key="invoice:1")), Ended)

    assert replay(desk, claim) == "replayed"

    assert isinstance(entered(desk, claim), Acquired)


def test_a_lock_key_that_is_held_is_waited_for(desk):
    claim = over(desk)
    desk.acquire(desk.claim("t2", lock_key=LOCK))
    assert replay(desk, claim) == "replayed"
    assert entered(desk, claim).what == "lock"


def test_a_message_that_is_not_to_be_kept_while_it_runs_leaves_the_store_with_the_replay(desk):
    desk.acquire(desk.claim("t0"))
    claim = desk.claim(message=b"a message", on_held="queue", waits=Waits(keeps=False))
    desk.enter(claim)
    desk.conclude(claim, Outcome.REVOKED, keeps=True)
    assert desk.message(claim) == b"a message"
    desk.client.delete(desk.lease_name(claim))

    assert replay(desk, claim) == "replayed"
    assert "parked" not in desk.trigger(claim), "it waits in no line any more"

    assert isinstance(entered(desk, claim), Acquired)
    assert (desk.message(claim), desk.due(claim)) == (None, {})


@KEYS
def test_under_hold_a_trigger_that_was_revoked_after_its_run_had_died_is_resolved_before_it_is_replayed(desk, execution_key):
    claim = desk.claim(message=b"a message", terms=Terms(holds=True), execution_key=execution_key)
    desk.die(claim)
    late = claim._replace(owner="delivered again")
    assert desk.conclude(late, Outcome.REVOKED, release=False, execution_as="hold", keeps=True)
    assert ask(desk, claim).word == "uncertain"

    said = desk.store.resolve(
        claim.record, "rerun", Encoded("", "", b""), owner="", reason="[]", keep=600.0, keeps_failure=False
    )

    assert said == ("resolved", "0")
    assert desk.trigger(claim)["outcome"] == "revoked", "it is replayed by a replay alone"
    assert replay(desk, claim) == "replayed"
    assert isinstance(entered(desk, claim), Acquired)


@KEYS
def test_under_hold_a_trigger_whose_run_was_cut_off_by_its_time_limit_is_resolved_first(desk, execution_key):
    claim = desk.claim(message=b"a message", terms=Terms(holds=True), execution_key=execution_key)
    desk.acquire(claim)
    desk.conclude(claim, error=Encoded("application/json", "utf-8", b"1"), execution_as="hold", patience=5.0)
    desk.conclude(claim, execution_as="hold", keeps=True)
    assert ask(desk, claim).word == "uncertain"


def test_under_hold_a_dead_letter_is_resolved_first(desk):
    claim = desk.claim(message=b"a message", terms=Terms(holds=True), max_deliveries=1)
    desk.acquire(claim)
    desk.abandon(claim, again=5.0, died=True)
    late = claim._replace(owner="delivered again")
    assert desk.enter(late).outcome is Outcome.DEAD_LETTERED
    settle(desk, late)
    assert ask(desk, claim).word == "uncertain"

    for outcome, word in (("succeeded", "ended"), ("rerun", "resolved")):
        said = desk.store.resolve(
            claim.record, outcome, Encoded("", "", b""), owner="", reason="[]", keep=600.0, keeps_failure=False
        )
        assert said[0] == word
    assert replay(desk, claim) == "replayed"


def test_who_forces_a_replay_says_so_also_of_another_run_whose_death_nobody_has_noticed(desk):
    claim = over(desk, execution_key="invoice:1", terms=Terms(holds=True))
    desk.die(desk.claim("t2", execution_key="invoice:1", terms=claim.terms))
    assert ask(desk, claim).word == "uncertain"
    assert replay(desk, claim, force=True) == "replayed"
    assert isinstance(entered(desk, claim), Acquired)
