"""What an operator is told of executions whose run died and of which nobody knows what it has done.

As in `findings`, the names of the fields are the keys of the JSON documents, and durations are in seconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ("Origin", "Resolved", "Uncertain", "Uncertainty", "why_uncertain", "why_waits_for_word")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a trigger came from."""

    source: str
    #: The time for which it was scheduled, None for at once.
    scheduled: str | None
    is_redelivered: bool

    @classmethod
    def of_record(cls, run: Mapping[str, Any]) -> Origin | None:
        """Read it from the record of a run; None as long as there was none."""
        if not run["attempt"]:
            return None
        source, scheduled, again = (run["origin"] or "call\n\n").split("\n")
        return cls(source, scheduled or None, bool(again))


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """An execution whose run died after its body began, and of which nobody knows what it has done."""

    lock_name: str
    #: None where the record does not tell it, and several tasks of the app have the lock name, or none has.
    task: str | None
    #: None where the task id is the key.
    execution_key: str | None
    #: Of the run that died: its trigger and its worker.
    task_id: str
    worker: str
    #: Since that was found; before anybody has, since its lease ended.
    age: float
    #: How many triggers wait in the store until somebody knows.
    waiting: int
    #: How often somebody has tried to find out, and when the next one does: negative when it is overdue, None when none will or
    #: nobody has come yet who knows.
    tries: int
    next_try: float | None
    #: The worker that is finding out just now.
    asked_by: str | None

    @classmethod
    def of_record(
        cls,
        run: Mapping[str, Any],
        now: int,
        *,
        lock_name: str,
        task: str | None,
        execution_key: str | None,
    ) -> Uncertainty | None:
        """Read the record of an execution, at that store time in ms; None when no run of it has died, or somebody knows.

        Who waits for word is to be counted by the caller.
        """
        if run["outcome"] not in (None, "", "uncertain"):
            return None
        since, _, who, tries, _, next_ms, by, _ = (run["unsure"] or "\n" * 7).split("\n", 7)
        until = int(run["until_ms"] or 0)
        is_live = bool(run["owner"]) and until > now
        if is_live and not (since and by == run["owner"]):
            return None
        # One that has sent its retry has said how it goes on.
        has_died = run["owner"] and not is_live and int(run["generation"] or 0) <= int(run["run_generation"] or 0)
        if not since and not has_died:
            return None
        task_id, worker = json.loads(who) if who else (run["task_id"], run["worker"])
        return cls(
            lock_name,
            task,
            execution_key,
            task_id or "",
            worker or "",
            max(now - int(since or until), 0) / 1000,
            0,
            int(tries or 0),
            None if not next_ms or is_live else (int(next_ms) - now) / 1000,
            run["worker"] or "" if is_live else None,
        )


@dataclass(frozen=True, slots=True)
class Uncertain:
    """What `uncertain` answers. `left_out` is how many executions were beyond the limit."""

    executions: list[Uncertainty]
    left_out: int


@dataclass(frozen=True, slots=True)
class Resolved:
    """What `resolve` answers; `why` is "resolved", or says in one sentence why not."""

    is_resolved: bool
    why: str
    #: The execution is that of the explicit key, else of the task id.
    execution_key: str | None
    task_id: str | None
    task: str
    outcome: str
    #: How many triggers ask again.
    waiting: int


def why_uncertain(doubt: Uncertainty) -> str:
    """Say in one sentence what nobody knows, and what is to be done about it."""
    run = f"the run of {doubt.task_id or 'unknown'} on {doubt.worker or 'unknown'}, which died {doubt.age:.1f} s ago"
    if doubt.asked_by is not None:
        return f"{doubt.asked_by or 'a worker'} is finding out, at try {doubt.tries}, what {run}, has done"
    key = f"{doubt.task_id} --task-id" if doubt.execution_key is None else quote(doubt.execution_key)
    return (
        f"nobody knows what {run}, has done; {_wait(doubt.waiting)}; {_tried(doubt)}. "
        f"Who knows says so: celery -A proj singleflight resolve {key} succeeded|failed|rerun"
    )


def why_waits_for_word(doubt: Uncertainty | None, next_attention: float | None) -> str:
    """Say in one sentence why a trigger waits whose message the store has until somebody knows."""
    if doubt:
        return f"it waits for word, and the store has its message: {why_uncertain(doubt)}"
    when = "by now" if (next_attention or 0) <= 0 else f"in {next_attention:.1f} s"
    return f"somebody knows what it has waited for; the sweeper of a worker is to publish it again {when}"


def _wait(number: int) -> str:
    if number == 0:
        return "no trigger waits for word"
    return "1 trigger waits for word" if number == 1 else f"{number} triggers wait for word"


def _tried(doubt: Uncertainty) -> str:
    tried = {0: "nobody has tried to find out", 1: "it was tried once to find out"}
    said = tried.get(doubt.tries, f"it was tried {doubt.tries} times to find out")
    if doubt.next_try is None:
        return said
    return f"{said}, the next is due" if doubt.next_try <= 0 else f"{said}, the next is in {doubt.next_try:.1f} s"
