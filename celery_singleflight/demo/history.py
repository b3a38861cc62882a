"""The ledger told as a story: which bodies ran when, who waits, and what came of each trigger."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from celery_singleflight.demo.ledger import Entry
    from celery_singleflight.demo.scenario import Trigger

__all__ = ("History", "Run", "Wait")


@dataclass(slots=True)
class Run:
    """One attempt to execute a body. Times of the machine's monotonic clock; `inf` while it goes on."""

    trigger: str
    key: str
    worker: str
    pid: int
    began: float
    ended: float = math.inf
    killed: bool = False


@dataclass(slots=True)
class Wait:
    """A trigger that went back to the broker, until it runs or is over."""

    trigger: str
    key: str
    since: float
    until: float = math.inf


class History:
    """What has happened so far. A trigger is known by its task id, and shown by its number."""

    def __init__(self, coming: Iterable[Trigger]) -> None:
        #: What must not overlap, those of one kind together.
        self.keys = _grouped(trigger.key for trigger in coming)
        self.triggers: dict[str, Trigger] = {}
        self.runs: list[Run] = []
        self.waits: list[Wait] = []
        self.effects: Counter[str] = Counter()
        #: Where and when something happened that had happened before.
        self.repeated: list[tuple[str, float]] = []
        self.requeued = 0
        self.ends: Counter[str] = Counter()

    def publish(self, task_id: str, trigger: Trigger) -> None:
        """Note a trigger that was sent."""
        self.triggers[task_id] = trigger

    def take(self, entry: Entry) -> None:
        """Add one line of the ledger."""
        match entry.what:
            case "begin":
                self._end_wait(entry)
                self.runs.append(Run(entry.trigger, entry.key, entry.worker, entry.pid, entry.at))
            case "end" | "killed":
                for run in self.runs:
                    # A process runs one body at a time.
                    if run.pid == entry.pid and run.ended == math.inf:
                        run.ended, run.killed = entry.at, entry.what == "killed"
            case "effect":
                self.effects[entry.unit] += 1
                if self.effects[entry.unit] > 1:
                    self.repeated.append((self.triggers[entry.trigger].key, entry.at))
            case "requeued":
                self.requeued += 1
                if not self._open_waits(entry.trigger):
                    self.waits.append(Wait(entry.trigger, self.triggers[entry.trigger].key, entry.at))
            case "ended":
                self._end_wait(entry)
                self.ends[entry.note] += 1

    def trigger_of(self, entry: Entry) -> str:
        """Return the task id that an entry is about; of a killed process that of its last run."""
        return entry.trigger or next((run.trigger for run in reversed(self.runs) if run.pid == entry.pid), "")

    def name(self, task_id: str) -> str:
        """Return a trigger's number and task, such as `#7 charge`."""
        numbers = {known: number for number, known in enumerate(self.triggers, 1)}
        return f"#{numbers[task_id]} {self.triggers[task_id].task}" if task_id in numbers else "somebody"

    def open_runs(self, key: str) -> list[Run]:
        """Return the bodies that run at this moment."""
        return [run for run in self.runs if run.key == key and run.ended == math.inf]

    def waiting(self, key: str) -> int:
        """Return how many triggers wait at this moment."""
        return sum(1 for wait in self.waits if wait.key == key and wait.until == math.inf)

    def has_died(self, key: str) -> bool:
        """Return whether the last body that began on the key was killed."""
        runs = [run for run in self.runs if run.key == key]
        return bool(runs) and runs[-1].killed

    def overlaps(self) -> int:
        """Return how many bodies began while another of the same key ran."""
        busy_until: dict[str, float] = {}
        overlaps = 0
        for run in sorted(self.runs, key=lambda run: run.began):
            overlaps += run.began < busy_until.get(run.key, 0.0)
            busy_until[run.key] = max(run.ended, busy_until.get(run.key, 0.0))
        return overlaps

    def _open_waits(self, task_id: str) -> list[Wait]:
        return [wait for wait in self.waits if wait.trigger == task_id and wait.until == math.inf]

    def _end_wait(self, entry: Entry) -> None:
        for wait in self._open_waits(entry.trigger):
            wait.until = entry.at


def _grouped(keys: Iterable[str]) -> list[str]:
    distinct = list(dict.fromkeys(keys))
    kinds = list(dict.fromkeys(key.partition(" ")[0] for key in distinct))
    return sorted(distinct, key=lambda key: kinds.index(key.partition(" ")[0]))
