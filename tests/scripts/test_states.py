"""The states of a run record: what is not in the table changes nothing, and the transitions that no walk comes by are made."""

from __future__ import annotations

from itertools import product

import pytest
from queue_desk import QueueDesk
from record_states import FIELDS, NOT_WALKED, state_of
from step_desk import VALUE, Run

from celery_singleflight.claims import Acquired, Doubt, Ended, Finished, Held, Led, Outcome, Terms
from celery_singleflight.custody import Settled
from celery_singleflight.errors import ScriptError
from celery_singleflight.keys import KeySpace
from celery_singleflight.script import Script
from celery_singleflight.store import Store

HOLDS = Terms(holds=True)
#: Asks of `states` what it says, without a record.
ASK = Script(
    "ask",
    """
-- Uses time, states.
-- ARGV[1] known   "1"
-- ARGV[2] owner   "-" for none
-- ARGV[3] ends    "-" for none, else in how many ms
-- ARGV[4] unsure  "-" for none
-- ARGV[5] outcome "-" for none
-- Returns {"state", name}
local function given(value)
  return value ~= '-' and value
end
return {'state', state_of(known == '1', given(owner), given(ends) and now + ends, given(unsure), given(outcome))}
""",
)


@pytest.fixture
def desk(place, watch, open_connections):
    """A store that is emptied behind each scene, whatever waits in it."""
    place.keyspace.clear()
    yield QueueDesk(Store(watch, KeySpace("sf")), place.keyspace, open_connections)
    place.keyspace.clear()


def trigger_of(desk, task_id="t1", *, key=None, **how):
    return desk.claim(task_id, message=b"the message", execution_key=key, **how)


def again(claim, **how):
    """The same copy, delivered once more."""
    return claim._replace(**{"owner": f"{claim.owner} again", **how})


def ended(desk, claim):
    """Return how the trigger ends when it asks."""
    answer = desk.enter(claim)
    assert isinstance(answer, Ended), answer
    return answer.outcome


def impatient(claim):
    """The next delivery of a trigger that has waited for as long as it may."""
    return again(claim, wait=0.0)


def overdue(desk, **how):
    """A run whose lease has ended, and of which nobody has heard. Returns its claim and its token."""
    claim = trigger_of(desk, **how)
    token = desk.acquire(claim).token
    desk.expire(claim)
    return claim, token


def uncertain(desk, **how):
    """The same, and another delivery has found it, and waits for word."""
    claim, token = overdue(desk, terms=HOLDS, **how)
    assert isinstance(desk.enter(again(claim)), Doubt)
    return claim, token


def found_dead(desk, **how):
    """A run whose process the worker's main process has found dead."""
    claim = trigger_of(desk, **how)
    desk.acquire(claim)
    desk.store.abandon(claim.owner, claim.record, again=5.0, died=True)
    return claim


def given_back_after_a_death(desk, **how):
    """A trigger that was given back, and whose deaths were counted before anybody noted what they leave uncertain."""
    claim = trigger_of(desk, **how)
    desk.acquire(claim)
    desk.abandon(claim, again=5.0)
    desk.client.hset(desk.trigger_name(claim), "died", 1)
    return claim


def held_by_another(desk):
    desk.acquire(desk.claim("holder"))


def ended_uncertain(desk):
    claim, _ = overdue(desk, terms=HOLDS)
    assert ended(desk, impatient(claim)) == Outcome.UNCERTAIN
    return claim


def resolve(desk, claim, outcome):
    how = {"owner": "", "reason": '["resolved","said so"]', "keep": 600.0, "keeps_failure": False}
    assert desk.store.resolve(claim.record, outcome, VALUE, **how)[0] == "resolved"


def finish_late(state, outcome, **how):
    def scene(desk):
        claim, token = state(desk, **how)
        assert desk.finish(claim, token, outcome) is None

    return scene


def revoke(state):
    def scene(desk):
        claim, _ = state(desk)
        assert desk.conclude(claim, Outcome.REVOKED)

    return scene


def running(desk):
    claim = trigger_of(desk)
    return claim, desk.acquire(claim).token


def turned_away(outcome, on_held, *, waits_first):
    def scene(desk):
        held_by_another(desk)
        claim = trigger_of(desk)
        if waits_first:
            assert isinstance(desk.enter(claim), Held)
        assert ended(desk, again(claim, on_held=on_held)) == outcome

    return scene


def another_does_not_wait_for_word(desk):
    uncertain(desk, key="k")
    assert ended(desk, trigger_of(desk, "t2", key="k", terms=HOLDS, on_held="skip")) == Outcome.UNCERTAIN


def another_waits_for_word_for_as_long_as_it_may(desk):
    uncertain(desk, key="k")
    other = trigger_of(desk, "t2", key="k", terms=HOLDS)
    assert isinstance(desk.enter(other), Doubt)
    assert ended(desk, impatient(other)) == Outcome.UNCERTAIN


def it_waits_for_word_for_as_long_as_it_may(desk):
    claim, _ = uncertain(desk)
    assert ended(desk, impatient(claim)) == Outcome.UNCERTAIN


def somebody_says_of(state, outcome):
    return lambda desk: resolve(desk, state(desk), outcome)


def a_late_run_gives_back(desk):
    claim, _ = overdue(desk)
    desk.abandon(claim)


def it_has_given_back_and_is_found_dead(desk):
    claim, _ = running(desk)
    desk.store.abandon(claim.owner, claim.record, again=5.0)
    desk.store.abandon(claim.owner, claim.record, again=5.0, died=True)


def too_many_have_died(state, **how):
    def scene(desk):
        claim = state(desk, **how)
        assert ended(desk, again(claim, max_deliveries=1)) == Outcome.DEAD_LETTERED

    return scene


def the_store_forgets_a_run_that_stops(desk):
    claim, token = running(desk)
    desk.client.delete(desk.trigger_name(claim), desk.lease_name(claim))
    assert desk.finish(claim, token, Outcome.REPLACED) is None


def follower(desk, kind="coalesce"):
    """One that was handed out, for the outcome of another. Returns its delivery, by whom it is led, and that one."""
    holder, token = desk.hold(on_held=kind, digest="d1")
    leader = holder
    if kind == "coalesce":
        leader = desk.park("first", kind, which="first")
    claim = desk.park("f0", kind, which="first" if kind == "coalesce" else "", digest="" if kind == "coalesce" else "d1")
    desk.end(holder, token)
    if kind == "coalesce":
        desk.run_called(leader)
    copy = desk.copy_of(claim)
    answer = desk.enter(copy)
    assert isinstance(answer, Led), answer
    return copy, answer.by, leader


def the_store_forgets_one_that_follows(desk):
    claim, by, _ = follower(desk)
    desk.client.delete(desk.trigger_name(claim))
    assert desk.store.follow(claim, by).outcome == Outcome.COALESCED


def the_store_forgets_whom_it_has_followed(desk, kind="coalesce"):
    claim, by, leader = follower(desk, kind)
    assert desk.store.follow(claim, by) is not None
    desk.client.delete(desk.trigger_name(leader))
    assert desk.store.follow(claim, by) is None


def the_store_forgets_the_execution_that_has_answered(desk):
    desk.run(trigger_of(desk, key="k"))
    other = trigger_of(desk, "t2", key="k")
    assert ended(desk, other) == Outcome.SUCCEEDED
    desk.client.delete(desk.execution_name(other))
    assert isinstance(desk.enter(again(other)), Acquired)


def a_kept_failure_answers(desk):
    claim = trigger_of(desk, key="k")
    token = desk.acquire(claim).token
    how = {"reason": "[]", "keep": 600.0, "keeps_failure": True}
    assert isinstance(desk.store.finish(desk.lease(claim, token), claim.record, Outcome.FAILED, VALUE, **how), Finished)
    assert ended(desk, trigger_of(desk, "t2", key="k")) == Outcome.FAILED
    return claim


def somebody_says_of_a_step_that_it_did_not_happen(desk):
    first = Run(desk, trigger_of(desk), unsure_as="hold")
    first.begin(first.step("charge"))
    second = first.next()
    second.begin(second.step("charge"))
    second.finish()
    assert desk.store.resolve_step(second.claim.record, "charge", None)[0] == "resolved"


def the_lock_is_held_for_longer_than_it_may_wait(state):
    def scene(desk):
        claim = state(desk)
        held_by_another(desk)
        assert ended(desk, impatient(claim)) == Outcome.TIMED_OUT

    return scene


def replayed(outcome, *, is_unsure=False):
    """Of a trigger that had ended in any way, and was settled."""

    def scene(desk):
        claim = trigger_of(desk)
        desk.run(claim, Outcome.FAILED)
        replay(desk, claim, outcome=outcome, **({"unsure": "1\no\n[]\n0\n1\n\n\n"} if is_unsure else {}))

    return scene


def replay(desk, claim, **fields):
    desk.store.settle([Settled(claim.record, claim.owner, is_done=True, keeps="always")])
    if fields:
        desk.client.hset(desk.trigger_name(claim), mapping=fields)
    how = {"force": True, "reason": "as asked for", "holds": False}
    seen = desk.store.replay(claim.record, "a replay", **how).seen.decode()
    told = {"seen": seen, "message": b"a message", "generation": 1 << 20}
    assert desk.store.replay(claim.record, "a replay", **how, **told).word == "replayed"


def the_execution_that_has_succeeded_is_replayed(desk):
    claim = trigger_of(desk, key="k")
    desk.run(claim)
    replay(desk, claim)


def the_execution_whose_failure_was_kept_is_replayed(desk):
    replay(desk, a_kept_failure_answers(desk))


SCENES = {
    **{
        f"{outcome} > waiting": replayed(outcome)
        for outcome in ("skipped", "rejected", "replaced", "timed out waiting", "dead-lettered", "revoked")
    },
    **{
        f"{state} > uncertain": replayed(state.removeprefix("ended "), is_unsure=True)
        for state in ("ended uncertain", "failed", "timed out waiting", "dead-lettered", "revoked")
    },
    "succeeded > new": the_execution_that_has_succeeded_is_replayed,
    "failed > new": the_execution_whose_failure_was_kept_is_replayed,
    "new > ended uncertain": another_does_not_wait_for_word,
    "waiting > ended uncertain": another_waits_for_word_for_as_long_as_it_may,
    "overdue > ended uncertain": ended_uncertain,
    "overdue > uncertain": uncertain,
    "uncertain > ended uncertain": it_waits_for_word_for_as_long_as_it_may,
    "uncertain > waiting": somebody_says_of(found_dead, "rerun"),
    "ended uncertain > succeeded": somebody_says_of(ended_uncertain, "succeeded"),
    "ended uncertain > failed": somebody_says_of(ended_uncertain, "failed"),
    "ended uncertain > waiting": somebody_says_of(ended_uncertain, "rerun"),
    "overdue > succeeded": finish_late(overdue, Outcome.SUCCEEDED),
    "overdue > failed": finish_late(overdue, Outcome.FAILED),
    "overdue > replaced": finish_late(overdue, Outcome.REPLACED),
    "overdue > new": finish_late(overdue, Outcome.FAILED, key="k"),
    "overdue > waiting": a_late_run_gives_back,
    "uncertain > succeeded": finish_late(uncertain, Outcome.SUCCEEDED),
    "uncertain > failed": finish_late(uncertain, Outcome.FAILED),
    "uncertain > replaced": finish_late(uncertain, Outcome.REPLACED),
    "uncertain > new": finish_late(uncertain, Outcome.FAILED, key="k"),
    "waiting > uncertain": it_has_given_back_and_is_found_dead,
    "running > revoked": revoke(running),
    "overdue > revoked": revoke(overdue),
    "uncertain > revoked": revoke(uncertain),
    "waiting > dead-lettered": too_many_have_died(given_back_after_a_death),
    "waiting > new": too_many_have_died(given_back_after_a_death, key="k"),
    "new > replaced": the_store_forgets_a_run_that_stops,
    "new > coalesced": the_store_forgets_one_that_follows,
    "coalesced > waiting": the_store_forgets_whom_it_has_followed,
    "succeeded > waiting": the_store_forgets_the_execution_that_has_answered,
    "new > rejected": turned_away(Outcome.REJECTED, "reject", waits_first=False),
    "waiting > rejected": turned_away(Outcome.REJECTED, "reject", waits_first=True),
    "waiting > skipped": turned_away(Outcome.SKIPPED, "skip", waits_first=True),
    "new > failed": a_kept_failure_answers,
    "failed > waiting": somebody_says_of_a_step_that_it_did_not_happen,
    "new > timed out waiting": the_lock_is_held_for_longer_than_it_may_wait(trigger_of),
    "overdue > timed out waiting": the_lock_is_held_for_longer_than_it_may_wait(lambda desk: overdue(desk)[0]),
    "uncertain > timed out waiting": the_lock_is_held_for_longer_than_it_may_wait(found_dead),
    "overdue > dead-lettered": too_many_have_died(lambda desk: overdue(desk)[0]),
    "uncertain > dead-lettered": too_many_have_died(found_dead),
}


@pytest.mark.parametrize("transition", SCENES)
def test_what_the_walks_do_not_come_by_is_made(desk, watch, transition):
    SCENES[transition](desk)
    assert tuple(transition.split(" > ")) in watch.seen


def test_every_transition_that_the_walks_need_not_come_by_has_its_scene():
    assert sorted(SCENES) == sorted(" > ".join(one) for some in NOT_WALKED.values() for one in some)


def test_a_state_is_what_its_fields_say(desk):
    now = 1_000_000
    names = ("run", "owner", "until_ms", "unsure", "outcome")
    for facts in product("1-", ("-", "", "o"), ("-", "-5000", "5000"), "d-", ("-", "failed", "uncertain", "odd")):
        told = dict(zip(names, (None if fact == "-" else fact for fact in facts), strict=True))
        if told["until_ms"]:
            told["until_ms"] = str(now + int(told["until_ms"]))
        named = dict(zip(ASK.values, facts, strict=True))
        reply = ASK.reply(desk.connections.run(ASK, 0, ASK.arguments({}, named)))
        assert reply.name.decode() == state_of([told.get(name) for name in FIELDS], now), facts


def to_be_finished(desk):
    claim, token = running(desk)
    return claim, lambda: desk.finish(claim, token)


def to_be_entered(desk):
    claim, _ = running(desk)
    return claim, lambda: desk.enter(again(claim))


def to_be_given_back(desk):
    claim, _ = running(desk)
    return claim, lambda: desk.abandon(claim)


def to_be_revoked(desk):
    claim, _ = running(desk)
    return claim, lambda: desk.conclude(claim, Outcome.REVOKED)


def to_be_released(desk):
    claim, token = running(desk)
    return claim, lambda: desk.release(claim, token, force=True)


def to_be_resolved(desk):
    claim = found_dead(desk)
    return claim, lambda: resolve(desk, claim, "succeeded")


def to_follow(desk):
    claim, by, _ = follower(desk)
    return claim, lambda: desk.store.follow(claim, by)


def to_have_its_step_resolved(desk):
    first = Run(desk, trigger_of(desk), unsure_as="hold")
    first.begin(first.step("charge"))
    second = first.next()
    second.begin(second.step("charge"))
    second.finish()
    return second.claim, lambda: desk.store.resolve_step(second.claim.record, "charge", None)


@pytest.mark.parametrize(
    "prepare",
    [
        to_be_entered,
        to_be_finished,
        to_be_given_back,
        to_be_revoked,
        to_be_released,
        to_be_resolved,
        to_follow,
        to_have_its_step_resolved,
    ],
)
def test_a_script_that_finds_an_impossible_record_says_so_and_changes_nothing(desk, prepare):
    claim, act = prepare(desk)
    name = desk.trigger_name(claim)
    desk.client.hsetnx(name, "owner", "somebody")
    if not desk.client.hget(name, "owner"):
        desk.client.hset(name, "owner", "somebody")
    desk.client.hdel(name, "until_ms")
    before = desk.keyspace.snapshot()
    with pytest.raises(ScriptError, match=r"a run record (that )?is \".*running.*\".*: nothing is changed"):
        act()
    assert desk.keyspace.snapshot() == before


def test_an_outcome_that_no_script_gives_is_no_answer(desk):
    claim = trigger_of(desk)
    desk.run(claim)
    desk.client.hset(desk.trigger_name(claim), "outcome", "vanished")
    before = desk.keyspace.snapshot()
    with pytest.raises(ScriptError, match='a run record is "vanished", which none can be'):
        desk.enter(again(claim))
    assert desk.keyspace.snapshot() == before


@pytest.mark.parametrize("length", [10, 199, 200, 1000])
def test_the_whole_of_an_execution_key_is_in_its_record_or_in_the_name_of_that(desk, length):
    key = "invoice:\n" + "ä" * (length - 9)
    claim = trigger_of(desk, key=key)
    desk.acquire(claim)
    name, record = desk.execution_name(claim), desk.execution(claim)
    assert record.get("execution_key", key) == key
    assert name.endswith(f":{key}") or "execution_key" in record


def test_where_the_last_run_came_from_is_not_where_an_earlier_one_did(desk):
    claim = trigger_of(desk, terms=Terms(source="beat", is_redelivered=True))
    desk.acquire(claim)
    assert desk.execution(claim)["origin"] == "beat\n\n1"
    desk.abandon(claim)
    desk.acquire(again(claim, terms=Terms()))
    assert desk.execution(claim)["origin"] == ""
