"""What the lines of the ledger say, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from celery_singleflight.demo.history import History
    from celery_singleflight.demo.ledger import Entry

__all__ = ("Line", "narrate")

#: How outcomes of triggers that did not run are told.
_ENDS: Final = {
    "skipped": "is skipped, another run is at it",
    "succeeded": "does not run again: answered from the stored result",
}

_TIMES: Final = {2: "twice", 3: "three times"}


class Line(NamedTuple):
    """One line of the story, at a time of the machine's monotonic clock."""

    at: float
    key: str
    text: str
    style: str


def narrate(entry: Entry, history: History) -> Line | None:
    """Return the line for an entry that the history has taken, or None where there is nothing to tell."""
    told = _told(entry, history)
    if told is None:
        return None
    trigger = history.trigger_of(entry)
    return Line(entry.at, history.triggers[trigger].key if trigger in history.triggers else "", *told)


def _told(entry: Entry, history: History) -> tuple[str, str] | None:
    trigger = history.trigger_of(entry)
    name = history.name(trigger)
    if trigger in history.triggers and entry.what != "killed":
        name = f"{name} ({history.triggers[trigger].source})"
    match entry.what:
        case "begin":
            told = _begin(entry, history, name)
        case "effect" if history.effects[entry.unit] > 1:
            times = history.effects[entry.unit]
            told = f"the {entry.unit} has now happened {_TIMES.get(times, f'{times} times')}", "bold red"
        case "killed":
            told = f"SIGKILL for the process of {name}, just before the money moves", "bold magenta"
        case "requeued":
            holder = "its own dead run" if entry.note == entry.trigger else history.name(entry.note)
            told = f"{name} waits for {holder}, looks again in {entry.seconds:.1f} s", "yellow"
        case "ended":
            told = f"{name} {_ENDS.get(entry.note, f'is over: {entry.note}')}", "cyan"
        case _:
            return None
    return told


def _begin(entry: Entry, history: History, name: str) -> tuple[str, str]:
    others = [run for run in history.open_runs(entry.key) if run.pid != entry.pid]
    if others:
        return f"{name} runs WHILE {history.name(others[0].trigger)} still runs", "bold red"
    again = sum(run.trigger == entry.trigger for run in history.runs) > 1
    return f"{name} runs{' again' if again else ''} on {entry.worker}", "green"
