"""An execution whose run died after its body began: told to the next, or held until somebody knows."""

from __future__ import annotations

import pytest
from desk import OTHER_LOCK

from celery_singleflight.claims import Acquired, Died, Doubt, Encoded, Ended, Held, Outcome, Refused, Terms
from celery_singleflight.errors import PayloadMismatch

HOLDS = Terms(holds=True)
KEYS = pytest.mark.parametrize("execution_key", [None, "invoice:1"], ids=["task id", "execution key"])
ERROR = Encoded("application/json", "utf-8", b'"an error"')
PAID = Encoded("application/json", "utf-8", b'"paid"')
DAY, HOUR = 86400.0, 3600.0


def claim_of(desk, task_id="t1", *, terms=HOLDS, **how):
    return desk.claim(task_id, terms=terms, message=how.pop("message", b"the message"), **how)


def again(claim, **how):
    """Return the same copy, delivered once more."""
    return claim._replace(**{"owner": f"{claim.owner} again", **how})


def died(desk, claim, *, found_by="main process"):
    """Let the run of a claim die; the worker's main process finds it, or nobody does before its lease ends."""
    desk.acquire(claim)
    if found_by == "main process":
        desk.store.abandon(claim.owner, claim.record, again=5.0, died=True)
    else:
        desk.die(claim)


def resolve(desk, claim, outcome, value=PAID, *, keeps_failure=False, owner="", keep=600.0):
    return desk.store.resolve(
        claim.record, outcome, value, owner=owner, reason='["resolved","said so"]', keep=keep, keeps_failure=keeps_failure
    )


def handed_out(desk):
    """Return the ids of the triggers that the sweeper publishes again, in order."""
    return sorted(record.task_id for record in desk.sweep() if desk.store.rescue(record) is not None)


def pass_time(desk, seconds):
    """Put back by so much all times in the store that an uncertain execution goes by."""
    ms = int(seconds * 1000)
    for name in desk.keyspace.names():
        kind = name.split(":")[2]
        if kind == "due":
            for member, score in desk.client.zrange(name, 0, -1, withscores=True):
                desk.client.zadd(name, {member: score - ms})
        elif kind in ("trigger", "execution"):
            record = {text_of(field): text_of(value) for field, value in desk.client.hgetall(name).items()}
            for field in ("awaiting", "waits_since"):
                if field in record:
                    desk.client.hset(name, field, int(record[field]) - ms)
            if "unsure" in record:
                parts = record["unsure"].split("\n")
                for n in (0, 4, 5):
                    parts[n] = str(int(parts[n]) - ms) if parts[n] else ""
                desk.client.hset(name, "unsure", "\n".join(parts))


def text_of(value):
    return value.decode() if isinstance(value, bytes) else value


@KEYS
@pytest.mark.parametrize("found_by", ["main process", "nobody"])
def test_under_rerun_the_next_is_told_and_runs(desk, execution_key, found_by):
    claim = claim_of(desk, terms=Terms(), execution_key=execution_key)
    died(desk, claim, found_by=found_by)

    second = desk.acquire(again(claim))
    assert (second.is_unsure, second.find_out, second.attempt) == (True, None, 2)
    # It goes on to be told until the execution ends: the second may retry, and the third has not heard of it.
    desk.abandon(again(claim), generation=1)
    third = desk.acquire(claim_of(desk, terms=Terms(), execution_key=execution_key, generation=1))
    assert third.is_unsure


@KEYS
@pytest.mark.parametrize("attempt", [1, 2])
def test_a_delivery_that_its_pool_gives_to_another_process_is_known_by_that(desk, execution_key, attempt):
    first = claim_of(desk, execution_key=execution_key, terms=Terms())
    if attempt == 2:
        died(desk, first)
        first = again(first, run_id="another run")
    before = desk.acquire(first)
    assert desk.enter(first) == before, "asked again by the same process"
    second = first._replace(run_id="in another process")
    assert desk.enter(second) == Died()
    desk.store.abandon(second.owner, second.record, again=5.0, died=True, cut_off=True)
    entered = desk.acquire(second)
    assert entered.is_unsure
    assert entered.attempt == attempt + 1
    assert entered.run_id == before.run_id
    assert entered.token > before.token
    assert desk.enter(second) == entered


def test_a_death_that_is_found_twice_leaves_the_next_try_as_it_is(desk):
    first = claim_of(desk, execution_key="invoice:1", terms=Terms(holds=True, delays=(600.0,)))
    died(desk, first, found_by="nobody before its lease ends")
    assert desk.enter(again(first)).how == "held"
    (execution,) = (name for name in desk.keyspace.names() if name.split(":")[2] == "execution")
    before = desk.client.hget(execution, "unsure")
    desk.store.abandon(first.owner, first.record, again=5.0, died=True, cut_off=True)
    assert desk.client.hget(execution, "unsure") == before


def test_a_run_that_retries_or_fails_leaves_no_doubt(desk):
    claim = claim_of(desk, execution_key="invoice:1")
    desk.acquire(claim)
    desk.abandon(claim, generation=1)
    assert not desk.acquire(claim_of(desk, execution_key="invoice:1", generation=1)).is_unsure


def test_the_death_of_a_run_that_had_sent_its_retry_leaves_no_doubt(desk):
    claim = claim_of(desk, execution_key="invoice:1")
    desk.acquire(claim)
    desk.die(claim)
    assert not desk.acquire(claim_of(desk, execution_key="invoice:1", generation=1)).is_unsure


@KEYS
@pytest.mark.parametrize("found_by", ["main process", "nobody"])
def test_a_retry_that_comes_is_how_a_dead_run_went_on(desk, execution_key, found_by):
    claim = claim_of(desk, execution_key=execution_key)
    died(desk, claim, found_by=found_by)
    assert not desk.acquire(claim_of(desk, execution_key=execution_key, generation=1)).is_unsure


@KEYS
def test_the_death_after_a_retry_was_noted_leaves_no_doubt(desk, execution_key):
    claim = claim_of(desk, execution_key=execution_key)
    desk.acquire(claim)
    desk.abandon(claim, generation=1)
    desk.abandon(claim, again=5.0, died=True)
    assert not desk.acquire(claim_of(desk, execution_key=execution_key, generation=1)).is_unsure


@KEYS
def test_a_body_that_was_cut_off_is_uncertain_also_when_its_worker_was_told_to_go(desk, execution_key):
    claim = claim_of(desk, execution_key=execution_key)
    desk.acquire(claim)
    desk.abandon(claim, again=5.0, cut_off=True)
    assert desk.enter(again(claim)).how == "held"


def test_an_interrupted_run_that_was_taken_for_dead_leaves_the_doubt(desk):
    own, later = claim_of(desk, execution_key="invoice:1"), claim_of(desk, "t2", execution_key="invoice:1")
    desk.acquire(own)
    desk.die(own)
    assert desk.enter(later).how == "held"
    desk.abandon(own, cut_off=True)
    assert desk.enter(later._replace(owner="again", copy="new", previous="")).how == "held"
    assert handed_out(desk) == []


@KEYS
@pytest.mark.parametrize("found_by", ["main process", "nobody"])
def test_under_hold_its_own_trigger_waits_in_the_store(desk, execution_key, found_by):
    claim = claim_of(desk, execution_key=execution_key)
    died(desk, claim, found_by=found_by)

    answer = desk.enter(again(claim))

    assert answer == Doubt("held", "t1", "worker@host", answer.age, [])
    assert desk.enter(again(claim, owner="a third")).how == "again"
    assert handed_out(desk) == []
    desk.acquire(desk.claim("t9"))  # the lock key is free


def test_under_hold_later_triggers_of_the_execution_wait_whatever_their_lock_key(desk):
    died(desk, claim_of(desk, execution_key="invoice:1"))
    for n, lock_key in enumerate([OTHER_LOCK, desk.claim().record.lock_key]):
        later = claim_of(desk, f"later {n}", execution_key="invoice:1", lock_key=lock_key)
        assert desk.enter(later) == Doubt("held", "t1", "worker@host", pytest.approx(0, abs=5), [])
    assert isinstance(desk.enter(claim_of(desk, "t2", execution_key="invoice:2")), Acquired)


@pytest.mark.parametrize("on_held", ["skip", "reject"])
def test_who_never_waits_ends_as_uncertain(desk, on_held):
    died(desk, claim_of(desk, execution_key="invoice:1"))
    answer = desk.enter(claim_of(desk, "t2", execution_key="invoice:1", on_held=on_held))
    assert isinstance(answer, Ended)
    assert (answer.outcome, answer.reason[:3]) == (Outcome.UNCERTAIN, ["uncertain", "t1", "worker@host"])


def test_who_only_asks_is_told(desk):
    died(desk, claim_of(desk, execution_key="invoice:1"))
    answer = desk.enter(claim_of(desk, "t2", execution_key="invoice:1", on_held="ask", has_trigger=False, message=b""))
    assert answer.how == "told"


def test_a_trigger_whose_message_the_store_does_not_keep_goes_back_to_the_broker(desk):
    died(desk, claim_of(desk, execution_key="invoice:1"))
    answer = desk.enter(claim_of(desk, "t2", execution_key="invoice:1", message=b""))
    assert isinstance(answer, Held)
    assert (answer.what, answer.task_id, answer.is_own) == ("uncertain", "t1", False)


def test_a_wait_that_has_lasted_too_long_ends_as_uncertain_and_the_execution_stays_so(desk):
    own = claim_of(desk, execution_key="invoice:1")
    died(desk, own)
    desk.enter(again(own))
    waiting = claim_of(desk, "t2", execution_key="invoice:1", wait=60.0)
    assert desk.enter(waiting).how == "held"

    pass_time(desk, 61.0)
    assert handed_out(desk) == ["t2"]
    handout_copy = again(waiting, copy="a copy", previous="")
    assert desk.enter(handout_copy).outcome is Outcome.UNCERTAIN
    assert desk.enter(claim_of(desk, "t3", execution_key="invoice:1")).how == "held"


@pytest.mark.parametrize("outcome", ["succeeded", "failed", "rerun"])
def test_what_is_said_goes_to_all_who_wait(desk, outcome):
    own, later = claim_of(desk, execution_key="invoice:1"), claim_of(desk, "t2", execution_key="invoice:1")
    died(desk, own)
    desk.enter(again(own))
    desk.enter(later)

    word = resolve(
        desk, own, outcome, PAID if outcome == "succeeded" else ERROR if outcome == "failed" else Encoded("", "", b"")
    )

    assert word == ("resolved", "2")
    assert handed_out(desk) == ["t1", "t2"]
    first, second = (desk.enter(again(claim, copy="new", previous="")) for claim in (own, later))
    if outcome == "succeeded":
        assert (first.outcome, first.value) == (second.outcome, second.value) == (Outcome.SUCCEEDED, PAID)
    elif outcome == "failed":
        assert (first.outcome, first.value) == (Outcome.FAILED, ERROR)
        assert isinstance(second, Acquired), "under forget another trigger may run it again"
        assert not second.is_unsure
    else:
        assert (first.attempt, first.is_unsure) == (2, False)
        assert isinstance(second, Held)


def test_a_failure_that_is_kept_is_told_to_all(desk):
    own, later = claim_of(desk, execution_key="invoice:1"), claim_of(desk, "t2", execution_key="invoice:1")
    died(desk, own)
    desk.enter(later)
    assert resolve(desk, own, "failed", ERROR, keeps_failure=True)[0] == "resolved"
    for claim in (again(own), again(later, copy="new", previous="")):
        answer = desk.enter(claim)
        assert (answer.outcome, answer.value) == (Outcome.FAILED, ERROR)


def test_without_an_execution_key_the_trigger_itself_gets_what_is_said(desk):
    own = claim_of(desk)
    died(desk, own)
    desk.enter(again(own))
    assert resolve(desk, own, "succeeded") == ("resolved", "1")
    assert handed_out(desk) == ["t1"]
    answer = desk.enter(again(own, copy="new", previous=""))
    assert (answer.outcome, answer.settled, answer.value) == (Outcome.SUCCEEDED, False, PAID)


def test_what_is_not_uncertain_cannot_be_resolved(desk):
    claim = claim_of(desk, execution_key="invoice:1")
    assert resolve(desk, claim, "rerun") == ("unknown", "")
    token = desk.acquire(claim).token
    assert resolve(desk, claim, "rerun") == ("running", "worker@host")
    assert resolve(desk, claim_of(desk, "t2", execution_key="invoice:1"), "rerun") == ("other", "t1")
    desk.finish(claim, token)
    assert resolve(desk, claim, "rerun") == ("ended", "succeeded")


def test_a_run_whose_lease_has_ended_can_be_resolved_before_anybody_has_noticed(desk):
    claim = claim_of(desk, execution_key="invoice:1", terms=Terms())
    died(desk, claim, found_by="nobody")
    assert resolve(desk, claim, "succeeded")[0] == "resolved"
    assert desk.enter(again(claim)).value == PAID


def test_a_run_that_was_taken_for_dead_still_finishes_and_is_the_answer(desk):
    own, later = claim_of(desk, execution_key="invoice:1"), claim_of(desk, "t2", execution_key="invoice:1")
    token = desk.acquire(own).token
    desk.die(own)
    assert desk.enter(later).how == "held"

    assert desk.finish(own, token, body=b"late") is None

    assert handed_out(desk)[-1:] == ["t2"]
    assert desk.enter(again(later, copy="new", previous="")).value.body == b"late"


def test_it_does_not_once_somebody_has_said_what_it_has_done(desk):
    own = claim_of(desk, execution_key="invoice:1")
    token = desk.acquire(own).token
    desk.die(own)
    desk.enter(claim_of(desk, "t2", execution_key="invoice:1"))
    resolve(desk, own, "rerun")
    assert isinstance(desk.finish(own, token), Refused)


def test_a_run_that_was_taken_for_dead_may_retry(desk):
    own, later = claim_of(desk, execution_key="invoice:1"), claim_of(desk, "t2", execution_key="invoice:1")
    desk.acquire(own)
    desk.die(own)
    assert desk.enter(later).how == "held"

    desk.abandon(own, generation=1)

    assert handed_out(desk) == ["t2"]
    assert not desk.acquire(claim_of(desk, execution_key="invoice:1", generation=1)).is_unsure


RECONCILED = Terms(holds=True, delays=(0.0, 10.0))


def test_the_first_who_comes_finds_out_under_the_lease(desk):
    own = claim_of(desk, execution_key="invoice:1", terms=RECONCILED)
    died(desk, own)
    later = claim_of(desk, "t2", execution_key="invoice:1", terms=RECONCILED)

    answer = desk.acquire(later)

    assert answer.find_out is not None
    assert answer.find_out[:2] == ("t1", "worker@host")
    assert answer.find_out.tries == 1
    told = desk.acquire(later)
    assert told.find_out is not None
    assert told._replace(find_out=told.find_out._replace(age=answer.find_out.age)) == answer, "asked again, it is told the same"
    third = claim_of(desk, "t3", execution_key="invoice:1", terms=RECONCILED, lock_key=OTHER_LOCK)
    assert desk.enter(third).how == "held", "one finds out, the others wait"
    desk.finish(later, answer.token, body=b"found")
    assert handed_out(desk)[-1:] == ["t3"]
    assert desk.enter(again(third, copy="new", previous="")).value.body == b"found"


def test_who_has_not_found_out_waits_and_tries_again_by_the_schedule(desk):
    own = claim_of(desk, execution_key="invoice:1", terms=RECONCILED)
    died(desk, own)
    trying = again(own)
    desk.acquire(trying)
    desk.store.abandon(trying.owner, trying.record, again=5.0, cut_off=True)

    assert desk.enter(again(own, owner="asks again")).how == "held"
    later = claim_of(desk, "t2", execution_key="invoice:1", terms=RECONCILED)
    assert desk.enter(later).how == "held"
    assert handed_out(desk) == []
    pass_time(desk, 10.1)
    assert handed_out(desk) == ["t1"], "one tries, the others wait"
    second = desk.acquire(again(own, owner="tries again", copy="new", previous=""))
    assert (second.find_out.task_id, second.find_out.tries) == ("t1", 2)
    desk.store.abandon("tries again", own.record, again=5.0, cut_off=True)
    assert desk.enter(again(own, owner="asks for ever", copy="new")).how == "held"
    pass_time(desk, DAY / 4)
    assert handed_out(desk) == [], "the schedule is over"


@pytest.mark.parametrize("on_held", ["skip", "reject"])
@pytest.mark.parametrize("how", ["gives up", "dies"])
def test_who_never_waits_ends_as_uncertain_also_when_it_has_tried_to_find_out(desk, on_held, how):
    own = claim_of(desk, execution_key="invoice:1", terms=RECONCILED)
    died(desk, own)
    trying = claim_of(desk, "t2", execution_key="invoice:1", terms=RECONCILED, on_held=on_held)
    assert desk.acquire(trying).find_out is not None
    desk.store.abandon(trying.owner, trying.record, again=5.0, cut_off=how == "gives up", died=how == "dies")

    assert desk.enter(again(trying)).outcome is Outcome.UNCERTAIN
    assert desk.enter(again(own, on_held=on_held)).how == "held", "whose run it was waits, whatever its policy"


def test_another_tries_when_the_one_that_was_to_is_gone(desk):
    own = claim_of(desk, execution_key="invoice:1", terms=Terms(holds=True, delays=(30.0,)))
    died(desk, own)
    desk.enter(again(own))
    desk.enter(claim_of(desk, "t2", execution_key="invoice:1", terms=own.terms))
    desk.conclude(again(own), Outcome.REVOKED)

    pass_time(desk, 41.0)
    assert "t2" in handed_out(desk)
    found = desk.acquire(claim_of(desk, "t2", execution_key="invoice:1", terms=own.terms, copy="new", previous="")).find_out
    assert found is not None


def test_a_reconciler_that_dies_has_tried_and_leaves_the_doubt(desk):
    own = claim_of(desk, execution_key="invoice:1", terms=RECONCILED)
    died(desk, own)
    trying = again(own)
    desk.acquire(trying)
    desk.die(trying)

    assert desk.enter(again(own, owner="a third")).how == "held"
    pass_time(desk, 10.1)
    answer = desk.acquire(again(own, owner="a fourth"))
    assert answer.find_out is not None
    assert (answer.find_out.tries, answer.find_out.task_id) == (2, "t1")


def test_the_finder_lets_it_run_again_under_its_own_lease(desk):
    own = claim_of(desk, execution_key="invoice:1", terms=RECONCILED)
    died(desk, own)
    trying, later = again(own), claim_of(desk, "t2", execution_key="invoice:1", terms=RECONCILED)
    token = desk.acquire(trying).token
    desk.enter(later)

    assert resolve(desk, own, "rerun", Encoded("", "", b""), owner=trying.owner) == ("resolved", "1")

    assert isinstance(desk.enter(again(later, copy="new", previous="")), Held)
    assert desk.finish(trying, token, body=b"run again") is None
    assert desk.enter(again(later, copy="new", previous="")).value.body == b"run again"


def test_the_hard_time_limit_of_a_run_leaves_its_execution_uncertain(desk):
    own = claim_of(desk, execution_key="invoice:1")
    desk.acquire(own)
    assert desk.conclude(own, error=ERROR, execution_as="hold")
    assert desk.enter(again(own, owner="late")).outcome is Outcome.FAILED
    assert desk.enter(claim_of(desk, "t2", execution_key="invoice:1")).how == "held"


def test_under_rerun_it_is_told_to_the_next_trigger(desk):
    own = claim_of(desk, execution_key="invoice:1", terms=Terms())
    desk.acquire(own)
    assert desk.conclude(own, error=ERROR, execution_as="unsure")
    assert desk.acquire(claim_of(desk, "t2", execution_key="invoice:1", terms=Terms())).is_unsure


def test_too_many_deaths_end_the_trigger_and_leave_its_execution_uncertain(desk):
    own = claim_of(desk, execution_key="invoice:1", max_deliveries=1)
    died(desk, own)
    assert desk.enter(again(own)).outcome is Outcome.DEAD_LETTERED
    assert desk.enter(claim_of(desk, "t2", execution_key="invoice:1")).how == "held"


def test_a_revoked_trigger_waits_no_longer(desk):
    own = claim_of(desk)
    died(desk, own)
    desk.enter(again(own))
    (record,) = desk.store.parked("t1", ["billing"])
    assert record == own.record
    assert desk.conclude(again(own, owner="the sweeper"), Outcome.REVOKED, error=ERROR)
    assert desk.enter(again(own, owner="late")).outcome is Outcome.REVOKED


def test_a_revoked_trigger_is_not_counted_among_those_who_wait(desk):
    own, later = claim_of(desk, execution_key="invoice:1"), claim_of(desk, "t2", execution_key="invoice:1")
    died(desk, own)
    desk.enter(again(own))
    desk.enter(later)
    desk.conclude(again(later, owner="the sweeper"), Outcome.REVOKED, error=ERROR)
    assert resolve(desk, own, "succeeded") == ("resolved", "1")


def test_what_works_in_steps_runs_again_and_holds_step_by_step(desk):
    own = claim_of(desk, execution_key="invoice:1")
    run_id = desk.acquire(own).run_id
    steps = desk.store.names(own.record)["steps"]
    desk.client.hset(steps, "run", run_id)
    desk.client.expire(steps, 60)
    desk.store.abandon(own.owner, own.record, again=5.0, died=True)
    assert desk.acquire(again(own)).is_unsure


def test_who_waits_in_line_leaves_it_for_those_behind(desk):
    first, own = desk.claim("t0", on_held="queue", message=b"m"), claim_of(desk, execution_key="invoice:1")
    died(desk, own)
    token = desk.acquire(first).token
    # It cannot wait in line for a lock key while its execution is uncertain, so it was parked before that was known.
    assert desk.enter(claim_of(desk, "t2", execution_key="invoice:1", on_held="queue")).how == "held"
    behind = desk.claim("t3", on_held="queue", message=b"m")
    assert desk.enter(behind).place == 0
    calls = desk.store.finish(desk.lease(first, token), first.record, Outcome.SUCCEEDED, PAID, reason="[]", keep=600.0).calls
    assert [call.message for call in calls] == [b"m"]
    assert isinstance(desk.enter(again(behind)), Acquired)


def test_the_record_of_an_uncertain_execution_outlives_its_result_ttl(desk):
    claim = claim_of(desk, execution_key="invoice:1", keep=1.0)
    desk.acquire(claim)
    execution = desk.store.names(claim.record)["execution"]
    assert desk.client.pttl(execution) > 29 * DAY * 1000, "also where nobody finds it"
    desk.die(claim)
    desk.client.pexpire(execution, 60_000)
    desk.enter(claim_of(desk, "t2", execution_key="invoice:1"))
    assert desk.client.pttl(execution) > 29 * DAY * 1000


@KEYS
@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
def test_what_is_said_holds_for_the_trigger_however_late_it_asks(desk, execution_key, outcome):
    own = claim_of(desk, execution_key=execution_key, keep=1.0)
    died(desk, own)
    desk.enter(again(own))
    resolve(desk, own, outcome, keep=1.0, keeps_failure=True)
    assert desk.client.pttl(desk.trigger_name(own)) > 0.9 * DAY * 1000
    if execution_key:
        desk.client.delete(desk.execution_name(own))  # as its time to live does
    answer = desk.enter(again(own, copy="new", previous=""))
    assert (answer.outcome, answer.value) == (outcome, PAID)


@pytest.mark.parametrize("by", ["a person", "a late finish"])
def test_an_outcome_that_others_have_waited_for_is_there_when_they_ask(desk, by):
    own = claim_of(desk, execution_key="invoice:1", keep=1.0)
    token = desk.acquire(own).token
    desk.expire(own)
    desk.enter(claim_of(desk, "t2", execution_key="invoice:1", keep=1.0))
    if by == "a person":
        resolve(desk, own, "succeeded", keep=1.0)
    else:
        assert desk.finish(own, token, keep=1.0) is None
    assert desk.client.pttl(desk.execution_name(own)) > HOUR * 1000 - 60_000


def test_one_that_waits_and_has_another_payload_by_then_fails_once(desk):
    own = claim_of(desk, execution_key="invoice:1", terms=HOLDS._replace(payload="A"))
    died(desk, own)
    waiting = claim_of(desk, "t2", execution_key="invoice:1", terms=own.terms)
    desk.enter(waiting)
    resolve(desk, own, "failed", ERROR)
    desk.acquire(claim_of(desk, "t3", execution_key="invoice:1", terms=HOLDS._replace(payload="B")))
    assert handed_out(desk) == ["t2"]

    later = again(waiting, copy="new", previous="")
    with pytest.raises(PayloadMismatch):
        desk.enter(later)

    desk.settle(later)
    assert desk.due_in(waiting) is None
    assert desk.message(waiting) is None


@pytest.mark.parametrize("on_held", ["skip", "reject"])
def test_one_that_has_run_after_another_had_died_is_no_newcomer(desk, on_held):
    """Its own run has died too: what it has done must not be forgotten with a skip."""
    first, second = (desk.claim(name, execution_key="invoice:1", on_held=on_held) for name in ("t1", "t2"))
    for each in (first, second):
        desk.acquire(each)
        desk.expire(each)
    desk.acquire(desk.claim("holder"))
    for each in (first, second):
        answer = desk.enter(each._replace(owner=f"another of {each.record.task_id}"))
        assert isinstance(answer, Held if each is second else Held | Ended)
    assert desk.enter(second).what == "lock"


def test_the_death_of_a_process_that_had_given_back_says_nothing_of_the_run_that_has_begun_since(desk):
    own, later = claim_of(desk, execution_key="invoice:1"), claim_of(desk, "t2", execution_key="invoice:1")
    desk.acquire(own)
    desk.abandon(own)
    desk.acquire(later)
    desk.abandon(own, again=5.0, died=True)
    desk.abandon(later)
    assert not desk.acquire(claim_of(desk, "t3", execution_key="invoice:1")).is_unsure


def test_thousands_who_wait_are_all_told(desk):
    own = claim_of(desk, execution_key="invoice:1")
    died(desk, own)
    for n in range(2100):
        desk.enter(claim_of(desk, f"w{n}", execution_key="invoice:1"))
    assert resolve(desk, own, "succeeded") == ("resolved", "2100")
    assert len([record for record in desk.sweep(limit=3000) if record.task_id != "t1"]) == 2100


def test_the_record_tells_where_the_trigger_came_from(desk):
    claim = claim_of(desk, terms=Terms(source="beat", scheduled="2026-01-01T00:00:00", is_redelivered=True))
    desk.acquire(claim)
    assert desk.client.hget(desk.store.names(claim.record)["execution"], "origin") in (
        "beat\n2026-01-01T00:00:00\n1",
        b"beat\n2026-01-01T00:00:00\n1",
    )
