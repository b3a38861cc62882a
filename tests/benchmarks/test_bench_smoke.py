"""That the benchmarks work, and what they find that is no matter of time. Nothing here may depend on a clock."""

import json
import sys
from pathlib import Path

from nodes import run_to_its_end

HERE = Path(__file__).parent


def test_the_bench_finds_two_script_calls_per_run_and_none_at_publish(tmp_path):
    found = tmp_path / "found.json"
    command = [sys.executable, str(HERE / "run.py"), "--quick", "--json", str(found)]

    bench = run_to_its_end(command, 110)

    assert bench.returncode == 0, bench.stdout
    measured = json.loads(found.read_text())
    assert measured["enter, per run"] == 1
    assert measured["finish, per run"] == 1
    assert measured["renew, abandon and others, per run"] == 0
    assert measured["counted by MONITOR less by INFO commandstats"] == 0
    assert measured["at publish"] == 0


def test_the_profile_of_a_child_names_what_the_package_adds():
    command = [sys.executable, str(HERE / "profile_child.py"), "--tasks", "10", "--lines", "200"]

    profile = run_to_its_end(command, 110)

    assert profile.returncode == 0, profile.stdout
    assert "run_trigger  celery_singleflight/run.py" in profile.stdout
    assert "Lock.acquire" not in profile.stdout
