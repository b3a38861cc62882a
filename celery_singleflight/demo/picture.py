"""The picture: a time line for each key, who is on it, and how many of what there have been."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from celery_singleflight.demo.stage import PROCESSES, WORKERS

if TYPE_CHECKING:
    from rich.console import Console

    from celery_singleflight.demo.history import History, Run

__all__ = ("KEY_WIDTH", "picture")

#: Seconds that the time line shows at least.
_SPAN: Final = 12.0
#: Columns of the key, of what happens on it, and of what is around them.
KEY_WIDTH: Final = 13
_STATE_WIDTH: Final = 28
_MARGINS: Final = 6

_QUIET: Final = "bright_black"
_GOOD: Final = "green"
_WAITING: Final = "yellow"
_DEAD: Final = "bold magenta"
_BAD: Final = "bold white on red"


def picture(history: History, console: Console, started: float, now: float, *, final: bool = False) -> Group:
    """Return the picture at this time; the final one tells what there was on each key instead of what is."""
    width = max(console.width - KEY_WIDTH - _STATE_WIDTH - _MARGINS, 20)
    strips = Strips(history, started, now, width, ascii_only=console.options.ascii_only)
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(width=KEY_WIDTH, style="bold", no_wrap=True)
    table.add_column(width=width, no_wrap=True)
    table.add_column(width=_STATE_WIDTH, no_wrap=True)
    for key in history.keys:
        state = _summary(history, key) if final else _state(history, key, now)
        table.add_row(key, strips.of(key), state)
    return Group(table, strips.legend(), *(() if final else (Text(), *_counters(history))))


class Strips:
    """Makes time lines of so many cells each."""

    def __init__(self, history: History, started: float, now: float, width: int, *, ascii_only: bool) -> None:
        self._history = history
        self._started = started
        self._width = width
        self._seconds = max(_SPAN, now - started) / width
        self._past = min(width, math.ceil((now - started) / self._seconds))
        self._bars, self._cross, self._dot = ("#=", "x", ".") if ascii_only else ("█▓", "✗", "·")

    def of(self, key: str) -> Text:
        """Return the time line of a key."""
        runs = [run for run in self._history.runs if run.key == key]
        waits = [wait for wait in self._history.waits if wait.key == key]
        repeated = [at for where, at in self._history.repeated if where == key]
        strip = Text()
        for n in range(self._past):
            begin = self._started + n * self._seconds
            end = begin + self._seconds
            here = [run for run in runs if run.began < end and run.ended > begin]
            at_once = _at_once(here, begin)
            if any(run.killed and run.ended < end for run in here):
                strip.append(self._cross, _DEAD)
            elif any(begin <= at < end for at in repeated):
                strip.append("!", _BAD)
            elif at_once > 1:
                strip.append(str(min(at_once, 9)), _BAD)
            elif here:
                strip.append(self._bars[runs.index(here[-1]) % 2], _GOOD)
            else:
                waited_for = any(wait.since < end and wait.until > begin for wait in waits)
                strip.append(self._dot, _WAITING if waited_for else _QUIET)
        return strip

    def legend(self) -> Text:
        """Return what the cells mean; how two bodies at once look only once there were any."""
        legend = Text(" " * (KEY_WIDTH + 3), _QUIET)
        legend.append(self._bars, _GOOD).append(" runs   ")
        legend.append(self._dot, _WAITING).append(" waits   ")
        legend.append(self._cross, _DEAD).append(" killed   ")
        if self._history.overlaps():
            legend.append("2", _BAD).append(" at once   ")
        if self._history.repeated:
            legend.append("!", _BAD).append(" happened again")
        return legend


def _at_once(runs: list[Run], begin: float) -> int:
    """Return how many of these ran at the same moment, at most, from `begin` on."""
    moments = [max(run.began, begin) for run in runs]
    return max((sum(run.began <= moment < run.ended for run in runs) for moment in moments), default=0)


def _state(history: History, key: str, now: float) -> Text:
    runs, waiting = history.open_runs(key), history.waiting(key)
    state = Text()
    if len(runs) > 1:
        state.append(f"{len(runs)} at once!", "bold red")
    elif runs:
        state.append(f"{history.name(runs[0].trigger)} {runs[0].worker} {max(now - runs[0].began, 0.0):.1f} s", _GOOD)
    elif waiting and history.has_died(key):
        state.append("a dead run's lease", _DEAD)
    elif not waiting:
        state.append("free", _QUIET)
    if waiting:
        state.append(f"{', ' if state else ''}{waiting} wait{'s' if waiting == 1 else ''}", _WAITING)
    return state


def _summary(history: History, key: str) -> Text:
    triggers = sum(trigger.key == key for trigger in history.triggers.values())
    runs = [run for run in history.runs if run.key == key]
    killed = sum(run.killed for run in runs)
    return Text(
        f"{triggers} triggers, {len(runs)} run{'' if len(runs) == 1 else 's'}" + (f", {killed} killed" if killed else "")
    )


def _counters(history: History) -> tuple[Text, Text]:
    busy = sum(run.ended == math.inf for run in history.runs)
    waiting = sum(wait.until == math.inf for wait in history.waits)
    fine = Text(f" {busy} of {len(WORKERS) * PROCESSES} processes busy", no_wrap=True, overflow="ellipsis")
    for number, what in (
        (len(history.triggers), "triggers"),
        (waiting, "waiting"),
        (history.ends["skipped"], "skipped"),
        (history.ends["succeeded"], "answered"),
    ):
        fine.append(f"   {number} {what}")
    bad = Text()
    for number, what in ((history.overlaps(), "overlaps"), (len(history.repeated), "double effects")):
        bad.append(f" {number} {what}  ", "bold red" if number else "bold green")
    return fine, bad
