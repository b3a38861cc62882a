"""The judge, by evidence made for it: each violation is seen, and what is allowed is not one."""

from __future__ import annotations

from datetime import datetime

import pytest
from torture_faults import Struck
from torture_judge import Expected, Judge


class Evidence:
    """Rows as bodies write them, on two processes that may hold one key."""

    def __init__(self):
        self.rows = []

    def body(self, run, begin, end, *, token=1, pid=1, task_id="a", effect=None, recorded=True, error="", execution=None):
        unit = {"lock": "work", "key": "k", "kind": "work", "id": task_id, "execution": execution or task_id, "token": token}
        self.row("begin", begin, pid, run=run, **unit)
        if effect is not None:
            self.row("effect", effect, pid, run=run)
        if end is not None:
            self.row("end", end, pid, run=run, error=error)
            if recorded:
                self.row("ended", end + 0.001, pid, run=run, id=task_id, ran=True, outcome="succeeded")
        return self

    def offer(self, run, at, token, taken, when="end"):
        return self.row("offer", at, 1, run=run, key="work/k", token=token, taken=taken, when=when, highest=99)

    def row(self, what, at, pid, **facts):
        self.rows.append({"what": what, "at": at, "pid": pid, **facts})
        return self

    def verdict(self, *struck, value="r1", ids=("a",), logs=""):
        expected = [Expected(task_id, "work", 0.0, task_id) for task_id in ids]
        states = dict.fromkeys(ids, ("SUCCESS", value)) if value else {}
        records = {task_id: {"outcome": "succeeded"} for task_id in ids}
        return Judge(self.rows, expected, struck, states, records, ttl=2.0, logs=logs).verdict()


@pytest.fixture
def evidence():
    return Evidence()


def test_one_run_with_its_record_is_good(evidence):
    assert evidence.body("r1", 1, 2, effect=1.5).verdict().is_good


def test_a_trigger_without_an_outcome_is_lost(evidence):
    verdict = evidence.body("r1", 1, 2).verdict(value=None)
    assert sum(line.lost for line in verdict.lines.values()) == 1
    assert not verdict.is_good


def test_of_messages_on_their_way_to_a_worker_as_many_may_be_lost_as_workers_were_killed(evidence):
    kill = Struck("kill worker", 1.0, 2.0, killed={9: 1.0})
    assert evidence.verdict(kill, value=None).is_good
    assert not evidence.verdict(kill, value=None, ids=("a", "b")).is_good
    assert not evidence.verdict(value=None).is_good
    at_one = datetime.fromtimestamp(1).astimezone().strftime("[%Y-%m-%d %H:%M:%S,000: INFO/MainProcess] Task work[a]")
    assert evidence.verdict(kill, value=None, logs=f"{at_one} retry: Retry in 1s").is_good
    assert not evidence.verdict(kill, value=None, logs=f"{at_one} received").is_good


def test_what_a_run_has_said_may_be_recorded_though_its_process_was_killed_before_it_heard_so(evidence):
    evidence.body("r1", 1, 2, recorded=False, pid=7)
    killed_at_once = Struck("kill child", 3.0, 3.0, killed={7: 3.0})
    killed_later = Struck("kill child", 6.9, 6.9, killed={7: 6.9})
    stall = Struck("long stall", 1.9, 7.0)
    assert evidence.verdict(killed_at_once).is_good
    assert evidence.verdict(Struck("kill worker", 1.99, 5.0, killed={7: 1.999})).is_good, "and dead only a moment later"
    assert not evidence.verdict(killed_later).is_good
    assert evidence.verdict(killed_later, stall).is_good, "nothing got through to the store and back"
    assert not evidence.verdict(stall).is_good


@pytest.mark.parametrize(("count", "is_good"), [(19, True), (20, False)])
def test_the_median_of_recoveries_counts_from_twenty_on(evidence, count, is_good):
    kills = []
    for n in range(count):
        at = 10.0 * n
        evidence.body(f"dead{n}", at + 1, None, token=2 * n + 1, pid=100 + n, task_id=f"t{n}")
        evidence.body(f"r{n}", at + 5, at + 6, token=2 * n + 2, task_id=f"t{n}")
        kills.append(Struck("kill child", at + 2, at + 2, killed={100 + n: at + 2}))
    expected = [Expected(f"t{n}", "work", 10.0 * n, f"t{n}") for n in range(count)]
    states = {f"t{n}": ("SUCCESS", f"r{n}") for n in range(count)}
    records = {f"t{n}": {"outcome": "succeeded"} for n in range(count)}
    verdict = Judge(evidence.rows, expected, kills, states, records, ttl=2.0, logs="").verdict()
    assert len(verdict.lines["kill child"].recoveries) == count
    assert verdict.is_good == is_good


def test_two_bodies_at_once_are_an_overlap(evidence):
    verdict = evidence.body("r1", 1, 3).body("r2", 2, 4, token=2, pid=2, task_id="b").verdict(ids=("a",))
    assert any("overlap of one key" in violation for violation in verdict.violations)


def test_a_body_that_stood_still_may_be_passed_and_its_late_effect_is_listed_apart(evidence):
    evidence.body("r2", 1, 6.1, effect=6.05, recorded=False).body("r1", 4, 5, token=2, pid=2, effect=4.5)
    verdict = evidence.verdict(Struck("stop child", 1.5, 6.0, stopped={1: (1.5, 6.0)}))
    assert verdict.is_good
    assert sum(line.overlaps_allowed for line in verdict.lines.values()) == 1
    assert sum(line.second_allowed for line in verdict.lines.values()) == 1


def test_one_that_goes_on_long_after_it_stood_still_is_an_overlap(evidence):
    evidence.body("r2", 1, 9, recorded=False).body("r1", 4, 5, token=2, pid=2)
    assert not evidence.verdict(Struck("stop child", 1.5, 6.0, stopped={1: (1.5, 6.0)})).is_good


def test_after_a_flush_an_overlap_is_allowed_until_the_next_renewal_and_no_longer(evidence):
    flush = Struck("flushall", 1.5, 1.5, forgot=1.5)
    evidence.body("r1", 1, 2.2).body("r2", 2, 3, token=2, pid=2, task_id="b")
    assert evidence.verdict(flush).is_good
    evidence.body("r3", 20, 29, token=3, task_id="c").body("r4", 25, 26, token=4, pid=2, task_id="d")
    assert not evidence.verdict(flush, Struck("flushall", 21, 21, forgot=21)).is_good


def test_an_effect_after_a_durable_record_is_a_second_one(evidence):
    evidence.body("r1", 1, 2, effect=1.5).body("r2", 3, 4, token=2, effect=3.5, task_id="b", execution="a")
    verdict = evidence.verdict()
    assert sum(line.second_effects for line in verdict.lines.values()) == 1


def test_a_run_after_a_death_is_a_rerun_and_one_without_is_a_violation(evidence):
    evidence.body("r2", 1, None, effect=1.5, pid=7).body("r1", 4, 5, token=2, effect=4.5)
    verdict = evidence.verdict(Struck("kill child", 2.0, 2.0, killed={7: 2.0}))
    assert verdict.is_good
    line = verdict.lines["kill child"]
    assert (line.reruns, line.deaths, line.recoveries) == (1, 1, [2.0])
    assert any("without a death" in violation for violation in evidence.verdict().violations)


def test_a_recovery_that_takes_too_long_is_late_unless_something_was_in_the_way(evidence):
    evidence.body("r2", 1, None, pid=7).body("r1", 12, 13, token=2)
    kill = Struck("kill worker", 2.0, 4.0, killed={7: 2.0})
    assert evidence.verdict(kill).lines["kill worker"].late == 1
    assert evidence.verdict(kill, Struck("long stall", 3.0, 9.0)).lines["kill worker"].late == 0


def test_a_write_with_a_token_that_is_not_the_newest_must_be_refused(evidence):
    evidence.body("r1", 1, 2).body("r2", 3, 4, token=2, task_id="b")
    assert evidence.offer("r1", 5, token=1, taken=False).verdict().is_good
    assert not evidence.offer("r1", 6, token=1, taken=True).verdict().is_good


def test_a_new_holder_whose_token_is_refused_is_a_violation(evidence):
    evidence.body("r1", 1, 2).body("r2", 3, 4, token=2, task_id="b").offer("r2", 3.01, token=2, taken=False, when="begin")
    assert any("is not greater" in violation for violation in evidence.verdict().violations)


def test_the_result_must_be_of_the_run_that_counts(evidence):
    evidence.body("r1", 1, 2).body("r2", 3, 4, token=2, recorded=False)
    assert any("does not count" in violation for violation in evidence.verdict(value="r2").violations)
    assert any("no run of it" in violation for violation in evidence.verdict(value="r9").violations)


def test_an_effect_is_listed_apart_when_its_run_was_forgotten_and_passed_and_had_not_heard_it_yet(evidence):
    flush = Struck("flushall", 1.5, 1.5, forgot=1.5)
    evidence.body("r2", 1, 2.4, effect=2.3, recorded=False).body("r1", 1.8, 2, token=2, pid=2, effect=1.9)
    verdict = evidence.verdict(flush)
    assert verdict.is_good
    assert sum(line.second_allowed for line in verdict.lines.values()) == 1


def test_an_effect_of_a_run_that_was_forgotten_and_should_have_heard_it_long_ago_is_a_second_one(evidence):
    flush = Struck("flushall", 1.5, 1.5, forgot=1.5)
    evidence.body("r2", 1, 9, effect=8.5, recorded=False).body("r1", 1.8, 2, token=2, pid=2, effect=1.9)
    assert any("second effect" in violation for violation in evidence.verdict(flush).violations)
