"""The scenarios of waiting, each with the bounds that the design has for it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from statistics import quantiles
from typing import TYPE_CHECKING, Any, NamedTuple

from run import Report, answer, within
from waiting_crowd import crowd, held_still, killed, unrelated
from waiting_drain import Drained, drain, median_of
from waiting_memory import Kept, on_many_keys, on_one_key
from waiting_place import place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from waiting_place import Place


class Bounds(NamedTuple):
    """What the design asks of a drain; empty where it asks for nothing."""

    makespan: str = ""
    deliveries: str = ""
    script_calls: str = ""
    by_publish: str = ""
    by_arrival: str = ""


_NONE = Bounds()
_IN_LINE = Bounds(deliveries="<= 2", script_calls="<= 4", by_publish="<= 1", by_arrival="<= 0")
_BURST = {
    ("queue", 0.01): _IN_LINE._replace(makespan="<= 1.2"),
    ("queue", 0.05): _IN_LINE._replace(makespan="<= 1.06"),
}
_DRAIN = {
    "queue": Bounds(deliveries="<= 2", by_arrival="<= 0"),
    "requeue": Bounds(deliveries="<= 4", makespan="<= 1.5"),
}
_CROWD = {"queue": Bounds(deliveries="<= 3", by_arrival="<= 0")}
_MOST_LATENCY = "<= 50"
_MOST_MEMORY = "<= 1.1"
#: What stays until it expires: outcomes, the last fencing tokens, recent hold times, who has swept last.
_STAYS = ("trigger", "execution", "fence", "pace", "sweep")
_LABELS = {
    "makespan": "makespan / ideal",
    "by_publish": "pairs out of order by publish, %",
    "by_arrival": "pairs out of order by arrival, %",
    "deliveries": "deliveries each",
    "attempts": "attempts each, in the pool",
    "script_calls": "script calls each",
    "commands": "commands each, those of scripts included",
    "main_cpu": "CPU of the main process each, ms",
    "children_cpu": "CPU of the pool each, ms",
}


def _digits(value: float) -> int:
    return 0 if value == int(value) else 3 if abs(value) < 10 else 1


class WaitingReport(Report):
    """Keeps what was measured by section too, since every scenario has the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.sections: dict[str, dict[str, Any]] = {}

    def title(self, text: str) -> None:
        super().title(text)
        self.measured = self.sections.setdefault(text, {})

    def line(self, name: str, values: Sequence[float], bound: str = "") -> None:
        """Print one value as it is: it has no interval."""
        if len(values) > 1:
            super().line(name, values, bound)
            return
        self.measured[name] = list(values)
        asked = f"   wanted {bound}: {answer(within(values[0], bound))}" if bound else ""
        self.say(f"  {name:48}{values[0]:10.{_digits(values[0])}f}{asked}")

    def drained(self, found: dict[str, list[float]], bounds: Bounds = _NONE, *, leave_out: Sequence[str] = ()) -> None:
        for name, label in _LABELS.items():
            if name not in leave_out:
                self.line(label, found[name], getattr(bounds, name, ""))
        self.fact("triggers lost", max(found["lost"]), 0)
        self.fact("bodies that overlap", max(found["overlaps"]), 0)


@dataclass(frozen=True)
class Run:
    """How a scenario is to be run: under which policy, on which broker, with how many triggers at most."""

    report: WaitingReport
    policy: str
    broker: str
    concurrency: int
    most: int
    rounds: int
    is_quick: bool

    def place(self, **how: Any) -> AbstractContextManager[Place]:
        return place(self.policy, self.broker, **how)

    def count(self, wanted: int) -> int:
        return min(wanted, self.most)

    def title(self, what: str) -> None:
        self.report.title(f"{what}: {self.policy}, {self.broker}")


class Scenario:
    """Measures under the policy of a run; `compare` does the same for the hand-written lock of that name."""

    def __init__(self, measure: Callable[[Run], None], hand_written: str | None = None) -> None:
        self._measure = measure
        self._hand_written = hand_written

    def __call__(self, run: Run) -> None:
        self._measure(run)

    def compare(self, run: Run) -> None:
        if self._hand_written:
            self._measure(replace(run, policy=self._hand_written))


def _drain(run: Run, count: int, seconds: float, *, publish_first: bool) -> Drained:
    with run.place() as where:
        return drain(where, count, seconds, concurrency=run.concurrency, publish_first=publish_first)


def _burst(run: Run) -> None:
    count = run.count(150)
    for seconds in (0.01, 0.05):
        for publish_first in (True, False):
            when = "published first, then the worker started" if publish_first else "published to a warm worker"
            run.title(f"{count} x {seconds * 1000:.0f} ms on one key, {when}")
            measured = median_of(run.rounds, lambda: _drain(run, count, seconds, publish_first=publish_first))  # noqa: B023, at once
            run.report.drained(measured, _BURST.get((run.policy, seconds), _NONE))


def _long_drain(run: Run) -> None:
    count = run.count(2000)
    run.title(f"{count} x 10 ms on one key, published first, then the worker started")
    measured = median_of(1, lambda: _drain(run, count, 0.01, publish_first=True))
    run.report.drained(measured, _DRAIN.get(run.policy, _NONE))
    with run.place() as where:
        still = held_still(where, count, 0.5 if run.is_quick else 5.0, concurrency=run.concurrency)
    bound = "<= 0" if run.policy == "queue" else ""
    run.report.line("waiting, while the key is held", [still.arrived])
    run.report.line(f"their deliveries within {still.seconds:.1f} s", [still.deliveries], bound)


def _unrelated(run: Run) -> None:
    count = run.count(3000)
    with run.place() as where:
        found = unrelated(where, count, 4 if run.is_quick else 60, concurrency=run.concurrency)
    run.title(f"An unrelated task behind {count} that wait on one key")
    cuts = quantiles(found.latencies, n=20, method="inclusive") if len(found.latencies) > 1 else found.latencies * 20
    bound = "" if run.policy not in ("queue", "requeue") else _MOST_LATENCY
    run.report.line("waiting when the first was published", [found.arrived])
    run.report.line("unrelated tasks", [len(found.latencies)])
    run.report.line("latency p50, ms", [cuts[9]], bound)
    run.report.line("latency p95, ms", [cuts[18]], bound)
    run.report.line("latency, the longest, ms", [max(found.latencies)], bound)
    run.report.line("deliveries of those that wait, per second", [found.deliveries_per_second])


def _crowd(run: Run) -> None:
    some, count = run.count(2000), run.count(10_000)
    some = min(some, max(count // 5, 1))
    with run.place() as where:
        found = crowd(where, some, count, 0.001, concurrency=run.concurrency)
    run.title(f"{count} that wait on one key, then drained at 1 ms")
    bound = _MOST_MEMORY if run.policy == "queue" else ""
    for whose in ("worker", "main"):  # the whole worker, and its main process alone
        before, with_some, with_all = (getattr(memory, whose) for memory in found[:3])
        asked = bound if whose == "worker" else ""
        run.report.line(f"{whose}, memory before, MiB", [before])
        run.report.line(f"{whose}, memory with {some} waiting / before", [with_some / before], asked)
        run.report.line(f"{whose}, memory with {count} waiting / before", [with_all / before], asked)
        run.report.line(f"{whose}, memory with {count} waiting / with {some}", [with_all / with_some], asked)
    _report_one(run, found.drained, _CROWD.get(run.policy, _NONE))


def _killed(run: Run) -> None:
    count = run.count(10_000)
    # However often a trigger's run dies, it is not given up: nothing is to be lost.
    settings: dict[str, Any] = {"singleflight_max_deliveries": 1000}
    if run.broker == "redis":  # so that what a dead worker had prefetched goes on soon
        settings["broker_transport_options"] = {"visibility_timeout": 5}
    seconds, kills = (0.5, 4) if run.is_quick else (0.001, sys.maxsize)
    with run.place(singleflight_lease_ttl=5, **settings) as where:
        # The one that holds the key until all wait takes a process of its own.
        found = killed(where, count, seconds, kills, concurrency=max(run.concurrency // 2, 2))
    run.title(f"{count} on one key at {seconds * 1000:.0f} ms, two workers, one process or worker killed each second")
    run.report.line("processes of the pool killed", [found.children])
    run.report.line("workers killed", [found.workers])
    run.report.line("bodies that ended, per trigger", [found.drained.runs])
    _report_one(run, found.drained, _NONE)


def _report_one(run: Run, drained: Drained, bounds: Bounds) -> None:
    found = {name: [value] for name, value in drained._asdict().items()}
    run.report.drained(found, bounds, leave_out=("main_cpu", "children_cpu"))


def _memory(run: Run) -> None:
    count = run.count(1000)
    for what, measure in (("on one key", on_one_key), ("on as many keys", on_many_keys)):
        with run.place(store_apart=True) as where:
            kept = measure(where, count, concurrency=run.concurrency)
        run.title(f"Memory of the store with {count} that wait {what}, apart from the broker")
        _report_kept(run.report, kept)


def _report_kept(report: WaitingReport, kept: Kept) -> None:
    report.line("bytes of a key that is held", [kept.bytes_per_key])
    report.line("bytes of a trigger that waits", [kept.bytes_per_waiter])
    for kind in sorted({*kept.waiting, *kept.after}):
        report.line(f"keys of kind {kind}, while they wait", [kept.waiting.get(kind, 0)])
        report.line(f"keys of kind {kind}, when all have run", [kept.after.get(kind, 0)], "" if kind in _STAYS else "<= 0")
    report.fact("keys without an expiry, when all have run", kept.without_expiry, 0)
    report.fact("triggers lost", kept.lost, 0)


SCENARIOS = {
    "burst": Scenario(_burst, "polling 0.05-0.5 s"),
    "drain": Scenario(_long_drain, "polling 1-2 s"),
    "unrelated": Scenario(_unrelated, "polling 1-2 s"),
    "waiters": Scenario(_crowd),
    "killed": Scenario(_killed),
    "memory": Scenario(_memory),
}
