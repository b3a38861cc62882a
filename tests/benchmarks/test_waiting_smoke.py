"""That the benchmarks of waiting work, and judge what they see. Nothing here may depend on a clock."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from nodes import run_to_its_end

from celery_singleflight.options import OPTIONS

HERE = Path(__file__).parent
#: Those that the package has.
POLICIES = [policy for policy in ("queue", "requeue") if OPTIONS["contention_policy"].check(policy)]
_JUDGE = "import json, sys; import waiting_order as o; print(json.dumps({}))"


def bench(tmp_path, *arguments):
    """Run the benchmarks of waiting with tiny numbers, and return what each section has found."""
    found = tmp_path / "found.json"
    command = [sys.executable, str(HERE / "run_waiting.py"), "--quick", "--concurrency", "2", "--json", str(found), *arguments]
    run = run_to_its_end(command, 110)
    assert run.returncode == 0, run.stdout
    return json.loads(found.read_text())


def judged(expression):
    """What the judge says, in an interpreter that finds it."""
    command = [sys.executable, "-c", _JUDGE.format(expression)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=30, check=True, cwd=HERE).stdout)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scenario", ["burst", "drain", "waiters", "killed"])
def test_every_trigger_of_a_scenario_runs_alone_and_its_deliveries_are_counted(tmp_path, scenario, policy, request):
    broker = "redis"
    if (scenario, policy) == ("killed", "requeue"):
        # A worker that is killed may take a message of the Redis broker along, and gets back only after a while what it had.
        broker = "rabbitmq"
        request.getfixturevalue(broker)
    sections = bench(tmp_path, "--scenario", scenario, "--policy", policy, "--broker", broker)

    assert sections
    for found in sections.values():
        assert found["triggers lost"] == 0
        assert found["bodies that overlap"] == 0
        assert found["deliveries each"][0] >= 1
        assert found["attempts each, in the pool"][0] >= 1
        assert found["script calls each"][0] >= 2
        assert scenario == "killed" or policy != "queue" or found["pairs out of order by arrival, %"] == [0]


def test_the_hand_written_lock_is_measured_by_the_same_scenario(tmp_path):
    sections = bench(tmp_path, "--scenario", "drain", "--policy", "polling 0.05-0.5 s")

    (found,) = sections.values()
    assert found["triggers lost"] == 0
    assert found["bodies that overlap"] == 0
    assert found["deliveries each"][0] >= 1


@pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
def test_unrelated_tasks_are_timed_while_others_wait(tmp_path, broker, request):
    if broker == "rabbitmq":
        request.getfixturevalue("rabbitmq")
    sections = bench(tmp_path, "--scenario", "unrelated", "--policy", "requeue", "--broker", broker)

    (found,) = sections.values()
    assert found["waiting when the first was published"] == [4]
    assert found["unrelated tasks"] == [4]
    assert 0 < found["latency p50, ms"][0] <= found["latency p95, ms"][0] <= found["latency, the longest, ms"][0]


def test_no_lease_is_left_in_the_store_and_nothing_that_never_expires(tmp_path):
    sections = bench(tmp_path, "--scenario", "memory", "--policy", "requeue")

    assert len(sections) == 2
    for found in sections.values():
        assert found["triggers lost"] == 0
        assert found["keys of kind lease, while they wait"][0] in (1, 4)
        assert found["keys of kind lease, when all have run"] == [0]
        assert found["keys without an expiry, when all have run"] == 0


@pytest.mark.parametrize(
    ("turns", "percent"),
    [
        ([(1, 1, 1), (2, 2, 2), (3, 3, 3)], 0),
        ([(1, 1, 3), (2, 2, 2), (3, 3, 1)], 100),
        ([(1, 1, 2), (2, 2, 1), (3, 3, 3), (4, 4, 4)], 100 / 6),
        ([(1, 3, 2), (2, 4, 1)], 0),  # nobody knows who was first
        ([(1, 3, 2), (2, 4, 1), (5, 6, 0)], 100),
    ],
)
def test_a_pair_is_out_of_order_when_the_one_that_has_certainly_arrived_later_begins_first(turns, percent):
    assert judged(f"o.out_of_order([o.Turn(*turn) for turn in {turns}])") == pytest.approx(percent)


def test_bodies_overlap_when_one_begins_before_all_earlier_ones_have_ended():
    assert judged("o.overlaps([(0, 10), (1, 2), (3, 4), (10, 11)])") == 2
    assert judged("o.overlaps([(2, 3), (0, 1), (1, 2)])") == 0
