"""The how-to of uncertain outcomes is executed, and its tables say what happens."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from celery import states
from sqlalchemy import select
from sqlalchemy.orm import Session

from celery_singleflight import ExecutionUncertain, PayloadMismatch, ResolvedFailed
from celery_singleflight.sweeper import Sweeper

DOCUMENT = Path(__file__).parents[2] / "docs/how-to/uncertain-outcomes.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


class Bank:
    """A provider: it charges, and the process dies before that is recorded, so many times."""

    def __init__(self):
        self.charges = []
        self.deaths = 0
        self.is_refusing = False

    def find(self, idempotency_key):
        return next((f"ch_{n}" for n, (key, _) in enumerate(self.charges, 1) if key == idempotency_key), None)

    def charge(self, account_id, cents, idempotency_key):
        if self.is_refusing:
            raise ValueError("refused")
        self.charges.append((idempotency_key, cents))
        self.die()
        return f"ch_{len(self.charges)}"

    def die(self):
        if self.deaths:
            self.deaths -= 1
            raise SystemExit


@pytest.fixture
def page(place, sqlite, monkeypatch):
    """What the page defines, as a module with an app, a bank and a database of the test's own."""
    page = ModuleType("uncertain_outcomes_page")
    monkeypatch.setitem(sys.modules, page.__name__, page)
    monkeypatch.setattr(place.app, "task", partial(place.app.task, shared=False))  # the apps of other tests have no part in it
    page.app = place.app
    page.bank = Bank()
    page.add_up = lambda tenant_id, day: 5
    page.DATABASE_URL = sqlite.url
    for block in BLOCKS:
        exec(compile(block, DOCUMENT.name, "exec", dont_inherit=True), vars(page))
    place.app.finalize()
    yield page
    page.engine.dispose()


def let_run_die(place, page):
    """Deliver the one message that waits to a process that dies when it has charged. Return the message."""
    (message,) = place.messages()
    page.bank.deaths = 1
    with pytest.raises(SystemExit):
        place.deliver(message)
    return message


def died(place, page, task, *args, **options):
    """Publish a trigger whose run dies when it has charged, and deliver its message once more. Return its result."""
    result = task.apply_async(args, **options)
    place.deliver(let_run_die(place, page))
    return result


def let_all_come(place):
    """Let the sweeper publish all that waits in the store, and run what comes of it."""
    for key in place.client.scan_iter("*:due:*"):
        for member in place.client.zrange(key, 0, -1):
            place.client.zadd(key, {member: 0})
    for key in place.client.scan_iter("*:sweep:*"):
        place.client.delete(key)
    Sweeper(place.app).look()
    place.deliver_all()


def pass_minutes(place, minutes):
    """Let the death of each run in doubt have been found so long ago, and its next try be due."""
    for key in place.client.scan_iter("*:execution:*"):
        lines = place.client.hget(key, "unsure").split("\n")
        lines[0], lines[5] = str(int(lines[0]) - 60_000 * minutes), "1"
        place.client.hset(key, "unsure", "\n".join(lines))


def test_a_rerun_asks_the_bank_before_it_charges(place, page):
    result = died(place, page, page.charge, "a", "o1", 5)
    assert result.get(timeout=1) == "ch_1"
    assert page.bank.charges == [("charge:o1", 5)]


# What is said


def held(place, page):
    """Return the trigger whose run died, and two later ones: all of them wait."""
    first = died(place, page, page.transfer, "a", "o1", 5)
    results = [first, *(page.transfer.delay("a", "o1", 5) for _ in range(2))]
    place.deliver_all()
    assert [result.state for result in results] == [states.RETRY] * 3
    return results


def test_what_has_succeeded_is_the_result_of_all(place, page):
    results = held(place, page)
    assert page.bank_has_done_it("o1", "ch_1") == 3
    let_all_come(place)
    assert [result.get(timeout=1) for result in results] == ["ch_1"] * 3
    assert len(page.bank.charges) == 1


def test_what_has_failed_is_the_failure_of_its_trigger_and_another_runs(place, page):
    first, *later = held(place, page)
    page.bank_has_refused("o1")
    let_all_come(place)
    with pytest.raises(ResolvedFailed, match="the account was closed"):
        first.get(timeout=1)
    assert [result.get(timeout=1) for result in later] == ["ch_2"] * 2
    assert len(page.bank.charges) == 2


def test_what_is_to_run_again_runs_once_for_all(place, page):
    results = held(place, page)
    page.bank_knows_nothing("o1")
    let_all_come(place)
    assert [result.get(timeout=1) for result in results] == ["ch_2"] * 3
    assert len(page.bank.charges) == 2


# Who is told what

LATER = [
    *((policy, states.RETRY) for policy in ("requeue", "queue", "coalesce", "join", "replace")),
    *((policy, states.FAILURE) for policy in ("skip", "reject")),
]


@pytest.mark.parametrize(("policy", "state"), LATER)
def test_who_is_told_what(place, page, policy, state):
    first = died(place, page, page.transfer, "a", "o1", 5)
    later = page.transfer.apply_async(("a", "o1", 5), contention_policy=policy)
    place.deliver_all()
    assert (first.state, later.state) == (states.RETRY, state)
    assert isinstance(later.result, ExecutionUncertain)
    assert len(page.bank.charges) == 1


@pytest.mark.parametrize("policy", ["requeue", "skip"])
def test_under_rerun_who_comes_later_runs_and_is_told(place, page, policy):
    first = page.charge.delay("a", "o1", 5)
    message = let_run_die(place, page)
    later = page.charge.apply_async(("a", "o1", 5), contention_policy=policy)
    place.deliver_all()
    assert later.get(timeout=1) == "ch_1"
    place.deliver(message)
    assert first.get(timeout=1) == "ch_1"
    assert len(page.bank.charges) == 1


def test_a_direct_call_and_an_eager_one_are_told_at_once(place, page):
    died(place, page, page.transfer, "a", "o1", 5)
    with pytest.raises(ExecutionUncertain):
        page.transfer("a", "o1", 5)
    with pytest.raises(ExecutionUncertain):
        page.transfer.apply(("a", "o1", 5), throw=True)


def test_the_trigger_whose_run_died_waits_also_under_skip(place, page):
    result = died(place, page, page.transfer, "a", "o1", 5, contention_policy="skip")
    assert result.state == states.RETRY


def test_other_executions_of_the_lock_key_run(place, page):
    died(place, page, page.transfer, "a", "o1", 5)
    assert place.result_of(page.transfer.delay("a", "o2", 6)) == "ch_2"


# Reconcilers


def test_a_charge_that_the_bank_has_is_not_made_again(place, page):
    assert died(place, page, page.pay_out, "a", "o1", 5).get(timeout=1) == "ch_1"
    assert page.bank.charges == [("payout:o1", 5)]


def test_one_that_it_has_not_got_is_made_when_a_minute_has_passed(place, page):
    result = page.pay_out.delay("a", "o1", 5)
    message = let_run_die(place, page)
    page.bank.charges.clear()  # the request got lost
    place.deliver(message)
    assert (result.state, page.bank.charges) == (states.RETRY, [])
    let_all_come(place)
    assert (result.state, page.bank.charges) == (states.RETRY, []), "not before its time"
    pass_minutes(place, 2)
    let_all_come(place)
    assert result.get(timeout=1) == "ch_1"
    assert page.bank.charges == [("payout:o1", 5)]


@pytest.mark.parametrize("dies", ["after the commit", "before the commit"])
def test_what_is_committed_is_found_in_the_database(place, page, dies):
    add_up, added = page.add_up, []

    def add(*args):
        added.append(args)
        if dies == "before the commit":
            page.bank.die()
        return add_up(*args)

    class DyingSession(Session):
        def close(self):
            super().close()
            page.bank.die()

    page.add_up = add
    if dies == "after the commit":
        page.Session = DyingSession
    result = died(place, page, page.settle, "t", "2026-11-29")
    assert result.get(timeout=1) == {"cents": 5}
    assert len(added) == (1 if dies == "after the commit" else 2)
    with Session(page.engine) as session:
        assert list(session.scalars(select(page.Settlement.cents))) == [5]


# Failures and payloads


def test_a_refused_card_is_the_answer_to_later_triggers(place, page):
    page.bank.is_refusing = True
    first = page.charge_once.delay("a", "o1", 5)
    place.deliver_all()
    page.bank.is_refusing = False
    later = page.charge_once.delay("a", "o1", 5, clicked_by="somebody else")
    place.deliver_all()
    for result in (first, later):
        with pytest.raises(ValueError, match="refused"):
            result.get(timeout=1)
    assert page.bank.charges == []


def test_the_same_key_with_another_amount_is_refused_and_with_another_click_is_not(place, page):
    assert place.result_of(page.charge_once.delay("a", "o1", 5)) == "ch_1"
    assert place.result_of(page.charge_once.delay("a", "o1", 5, clicked_by="somebody else")) == "ch_1"
    with pytest.raises(PayloadMismatch):
        place.result_of(page.charge_once.delay("a", "o1", 6))
    assert len(page.bank.charges) == 1
