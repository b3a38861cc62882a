"""The benchmarks of waiting: triggers on one key, under the policies of the package and a hand-written lock, in one run.

    python tests/benchmarks/run_waiting.py [--scenario S] [--policy P] [--broker B] [--quick] [--rounds N] [--json FILE]

Scenarios, policies and brokers may be given several times. Starts its own servers and workers; only RabbitMQ has to be there.
Says how each bound of the design is met, and fails only where no clock is asked: when a trigger is lost, or two bodies overlap.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

from bench_environment import end_when_told
from crowd_app import HAND_WRITTEN, POLICIES
from waiting_scenarios import SCENARIOS, Run, WaitingReport

from celery_singleflight.options import OPTIONS

#: Those that the package has.
_POLICIES = [policy for policy in POLICIES if OPTIONS["contention_policy"].check(policy)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="what to measure (all)")
    parser.add_argument("--policy", action="append", choices=[*POLICIES, *HAND_WRITTEN], help=f"({', '.join(_POLICIES)})")
    parser.add_argument("--broker", action="append", choices=("redis", "rabbitmq"), help="(redis)")
    parser.add_argument("--quick", action="store_true", help="tiny numbers: shows that it works, measures nothing")
    parser.add_argument("--count", type=int, help="triggers of each scenario, where its own number is larger")
    parser.add_argument("--rounds", type=int, default=1, help="how often each burst is measured, for a median (1)")
    parser.add_argument("--concurrency", type=int, default=4, help="pool processes of each worker (4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    options = parser.parse_args()
    end_when_told()
    began = time.monotonic()
    report = WaitingReport()
    report.say(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, prefork workers -c {options.concurrency}.")
    if options.rounds > 1:
        report.say(f"Bursts: medians of {options.rounds}, and [95 % interval of the median by bootstrap].")
    if options.quick:
        report.say("Quick: so few that the figures mean nothing.")
    for name in options.scenario or SCENARIOS:
        for broker in options.broker or ["redis"]:
            for policy in options.policy or _POLICIES:
                most = options.count or (4 if options.quick else sys.maxsize)
                run = Run(report, policy, broker, options.concurrency, most, options.rounds, is_quick=options.quick)
                SCENARIOS[name](run)
            if not options.policy:
                SCENARIOS[name].compare(run)
    report.say(f"\n{time.monotonic() - began:.0f} s in all")
    if options.json:
        options.json.write_text(json.dumps(report.sections, indent=1) + "\n")
    return report.broken


if __name__ == "__main__":
    sys.exit(main())
