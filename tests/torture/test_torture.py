"""The torture run in short, and the judge of it: what breaks the package must be seen."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from nodes import run_to_its_end
from torture_plan import FAULTS, make_plan

RUN = Path(__file__).parent / "run.py"
#: Printed by the run; to be changed when it has shown nothing for long.
SEED = 20261129


def torture(tmp_path, *arguments, timeout=150):
    """Run it; return its exit code and what it said. Whatever happens, nothing of it lives on."""
    command = [sys.executable, str(RUN), "--directory", str(tmp_path / "evidence"), *map(str, arguments)]
    run = run_to_its_end(command, timeout)
    sys.stdout.write(run.stdout)
    return run.returncode, run.stdout


@pytest.mark.timeout(200)
def test_under_every_fault_nothing_is_lost_and_nothing_happens_twice(tmp_path):
    code, said = torture(tmp_path, "--seconds", 42, "--gap", 2.8, "--seed", SEED, "--drain", 60)
    assert f"seed {SEED}" in said
    assert code == 0, "see the violations above; the evidence and the logs of the workers are in the directory it names"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("sabotage", "faults", "drain", "seen"),
    [
        ("no-renewal", "none", 1, "overlap of one key"),
        ("no-sweeper", "kill worker", 10, "lost, |ran again only after"),
        ("same-token", "none", 1, "a token is not greater"),
    ],
)
def test_a_package_that_is_broken_has_a_red_verdict(tmp_path, sabotage, faults, drain, seen):
    how = ("--seconds", 9, "--seed", SEED, "--keys", 12, "--gap", 2.5, "--drain", drain)
    code, said = torture(tmp_path, "--sabotage", sabotage, "--only", faults, *how)
    assert code == 1
    assert re.search(f"VIOLATION.*({seen})", said)


def test_the_same_seed_makes_the_same_plan_and_another_seed_another_one():
    def plan(seed):
        return make_plan(seed, 120.0, list(FAULTS), rate=15.0, keys=40, ttl=2.0, gap=3.5)

    assert plan(1) == plan(1)
    assert plan(1).digest() == plan(1).digest() != plan(2).digest()
    assert {fault.kind for fault in plan(1).faults} == set(FAULTS)
