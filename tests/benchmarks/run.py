"""The benchmarks: protected tasks beside plain Celery and beside a redis-py Lock in the body, as ratios of one run.

    python tests/benchmarks/run.py [--quick] [--pairs N] [--tasks N] [--concurrency N] [--json FILE]

Starts its own server and workers. Says how each bound of the design is met, and fails only where no clock is asked: when a
run makes other script calls than its two, or a publish makes one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_app import VARIANTS
from bench_environment import ValkeyContainer, end_when_told
from bench_import import added_by_import
from bench_publish import added_at_publish, asked_at_publish
from bench_statistics import estimate
from bench_worker import WorkerBench

from celery_singleflight.script import load

if TYPE_CHECKING:
    from collections.abc import Sequence

#: What the design asks for.
LEAST_THROUGHPUT = 0.95
MOST_CHILD_CPU = 1.0
MOST_AT_PUBLISH = 30.0
MOST_MILLISECONDS = 50.0
MOST_MEBIBYTES = 3.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny numbers: shows that it works, measures nothing")
    parser.add_argument("--pairs", type=int, help="how many rounds of plain, protected and lock (10)")
    parser.add_argument("--tasks", type=int, help="tasks of each variant in a round (2500)")
    parser.add_argument("--concurrency", type=int, default=2, help="pool children of the worker (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured, each round")
    options = parser.parse_args()
    pairs = options.pairs or (1 if options.quick else 10)
    tasks = options.tasks or (40 if options.quick else 2500)
    repeats = 2 if options.quick else 15
    end_when_told()
    began = time.monotonic()
    report = Report()
    server = ValkeyContainer()
    try:
        server.ready()
        report.say(
            f"Python {platform.python_version()}, {os.cpu_count()} CPUs: {pairs} rounds of {tasks} tasks that do nothing, "
            f"each variant in turn\non one prefork worker -c {options.concurrency}, messages published first. "
            "Medians, and [95 % interval of the median by bootstrap]."
        )
        if options.quick:
            report.say("Quick: so few that the times mean nothing.")
        _workers(report, WorkerBench(server, tasks, options.concurrency), pairs)
        _publish(report, server.url, repeats * 20)
    finally:
        server.teardown()
    _imports(report, repeats)
    report.say(f"\n{time.monotonic() - began:.0f} s in all")
    if options.json:
        options.json.write_text(json.dumps(report.measured, indent=1) + "\n")
    return report.broken


class Report:
    """Prints as it goes, and keeps what was measured."""

    def __init__(self) -> None:
        self.measured: dict[str, Any] = {}
        self.broken = 0

    def title(self, text: str) -> None:
        self.say(f"\n{text}")

    def say(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def line(self, name: str, values: Sequence[float], bound: str = "") -> None:
        """Print a median with its interval, and whether it keeps its bound."""
        self.measured[name] = list(values)
        found = estimate(values)
        if bound:
            bound = f"   wanted {bound}: {answer(within(found.median, bound))}"
        self.say(f"  {name:48}{found}{bound}")

    def fact(self, name: str, value: float, wanted: float | None = None) -> None:
        """Print what does not depend on time, so that another value than the wanted one is an error."""
        self.measured[name] = value
        self.broken |= wanted not in (None, value)
        self.say(f"  {name:48}{value:8.3g}" + ("" if wanted is None else f"   wanted {wanted:g}: {answer(value == wanted)}"))


def answer(kept: bool) -> str:
    return "yes" if kept else "NO"


def within(value: float, bound: str) -> bool:
    sign, _, limit = bound.partition(" ")
    return value >= float(limit) if sign == ">=" else value <= float(limit)


def _workers(report: Report, bench: WorkerBench, pairs: int) -> None:
    rounds = list(bench.rounds(pairs))
    by = {variant: [drained[variant] for drained in rounds] for variant in VARIANTS}

    report.title("Throughput of the worker, from the first task to the last")
    for variant in VARIANTS:
        report.line(f"{variant}, tasks/s", [drain.per_second for drain in by[variant]])
    for variant, bound in (("protected", f">= {LEAST_THROUGHPUT}"), ("lock", "")):
        ratios = [own.per_second / plain.per_second for own, plain in zip(by[variant], by["plain"], strict=True)]
        report.line(f"{variant} / plain", ratios, bound)
    report.line("part of the machine that others took", [drain.others for drained in rounds for drain in drained.values()])

    report.title("CPU time per task, µs")
    for variant in VARIANTS:
        report.line(f"{variant}, pool child", [drain.child_cpu for drain in by[variant]])
    added = {
        variant: [own.child_cpu - plain.child_cpu for own, plain in zip(by[variant], by["plain"], strict=True)]
        for variant in ("protected", "lock")
    }
    for variant, values in added.items():
        report.line(f"added in the pool child by {variant}", values)
    ratios = [ours / theirs for ours, theirs in zip(added["protected"], added["lock"], strict=True)]
    report.line("added, protected / lock", ratios, f"<= {MOST_CHILD_CPU}")
    for place in ("main", "server"):
        for variant in VARIANTS:
            report.line(f"{variant}, {place}", [getattr(drain, f"{place}_cpu") for drain in by[variant]])

    report.title("Script calls")
    found = [file.name for file in (files("celery_singleflight") / "scripts").iterdir()]
    scripts = {load(name[:-4]).sha: name[:-4] for name in found if name.endswith(".lua")}
    calls, drained = bench.calls_by_script(scripts)
    report.fact("enter, per run", calls["enter"] / drained.tasks, 1)
    report.fact("finish, per run", calls["finish"] / drained.tasks, 1)
    report.fact("renew, abandon and others, per run", (calls["renew"] + calls["abandon"] + calls["others"]) / drained.tasks, 0)
    report.fact("counted by MONITOR less by INFO commandstats", sum(calls.values()) - drained.script_calls, 0)
    report.fact("at publish", bench.at_publish["protected"], 0)
    report.fact("settle, in batches, per second", calls["settle"] / drained.seconds)
    report.fact("by Celery itself, in all", calls["Celery's own"])


def _publish(report: Report, url: str, batches: int) -> None:
    report.title("Time of apply_async, µs")
    base, added = added_at_publish(url, batches)
    report.line("plain", base)
    report.line("added by protected", added, f"<= {MOST_AT_PUBLISH}")
    for what, values in asked_at_publish(url, max(batches // 4, 1)).items():
        report.line(f"with answer_at_publish, {what}", values)


def _imports(report: Report, times: int) -> None:
    report.title("import celery_singleflight, in a new process")
    for base, bounds in (("a worker on Redis", (MOST_MILLISECONDS, MOST_MEBIBYTES)), ("Celery without redis-py", None)):
        imports = added_by_import(base, times)
        for what, values, n in (("ms", [i.milliseconds for i in imports], 0), ("MiB", [i.mebibytes for i in imports], 1)):
            report.line(f"{what}, on top of {base}", values, f"<= {bounds[n]}" if bounds else "")


if __name__ == "__main__":
    sys.exit(main())
