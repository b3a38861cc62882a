"""The demo from its beginning to its end."""

from __future__ import annotations

import signal
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from celery import Celery
from celery.utils import uuid
from rich.padding import Padding
from rich.text import Text

from celery_singleflight.demo.history import History
from celery_singleflight.demo.narration import narrate
from celery_singleflight.demo.report import exit_code, judge, report
from celery_singleflight.demo.scenario import burst
from celery_singleflight.demo.screen import make_console, open_screen
from celery_singleflight.demo.stage import PROCESSES, WORKERS, Stage, StageError

if TYPE_CHECKING:
    from rich.console import Console

    from celery_singleflight.demo.scenario import Trigger
    from celery_singleflight.demo.screen import Screen

__all__ = ("perform",)

#: Seconds after the start of the burst at which what has no result yet counts as lost.
_LIMIT: Final = 18.0
#: Seconds in which a copy that is left over somewhere would show itself, once every trigger has its result.
_AFTERMATH: Final = 1.0
_TICK: Final = 0.08


def perform(*, seed: int, protection: bool) -> int:
    """Run the demo and return its exit code.

    0 when it ran to its end and, with protection, nothing overlapped, happened twice or was lost; 1 otherwise; 130 and 143
    when it was interrupted or terminated. Nothing that it started is left in any case.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    console = make_console()
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return _perform(console, seed, protection=protection)
    except StageError as error:
        console.print(f"The demo cannot go on: {error}.", style="red")
        return 1
    except KeyboardInterrupt:
        console.print(" Interrupted: everything that the demo started ends with it.")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _perform(console: Console, seed: int, *, protection: bool) -> int:
    _introduce(console, seed, protection=protection)
    with Stage(protection=protection) as stage:
        play = _Play(stage, burst(seed), protection=protection)
        stage.wait_until_ready()
        unresolved = play.run(console)
    verdict = judge(play.history, unresolved)
    console.print(report(verdict, protection=protection))
    return exit_code(verdict, protection=protection)


class _Play:
    def __init__(self, stage: Stage, triggers: list[Trigger], *, protection: bool) -> None:
        self.history = History(triggers)
        self._coming = deque(triggers)
        self._stage = stage
        self._protection = protection
        # Two apps, because one that publishes and reads results subscribes to each, and would miss the server at its end.
        self._publisher = Celery("passers-by", broker=stage.url, set_as_current=False)
        self._reader = Celery("passers-by", backend=stage.url, set_as_current=False)
        self._unresolved: list[str] = []
        self._to_kill = ""

    def run(self, console: Console) -> list[str]:
        """Fire the triggers at their times and show what happens; return the task ids without a result at the end."""
        started = time.monotonic()
        screen = open_screen(console, started)
        coming, end = self._coming, started + _LIMIT
        try:
            while (now := time.monotonic()) < end:
                while coming and started + coming[0].at <= now:
                    self._publish(coming.popleft())
                self._look(screen)
                if not coming and self._unresolved:
                    self._ask_for_results()
                    if not self._unresolved:
                        end = min(end, time.monotonic() + _AFTERMATH)
                time.sleep(_TICK)
        finally:
            screen.close(self.history)
            self._publisher.close()
        return self._unresolved

    def _publish(self, trigger: Trigger) -> None:
        task_id = uuid()
        self.history.publish(task_id, trigger)
        options = {"execution_key": trigger.execution_key} if self._protection and trigger.execution_key else {}
        self._unresolved.append(task_id)
        self._publisher.send_task(f"shop.{trigger.task}", kwargs=trigger.kwargs, task_id=task_id, **options)
        if trigger.stalls:
            self._to_kill = task_id

    def _look(self, screen: Screen) -> None:
        for entry in self._stage.news():
            self.history.take(entry)
            line = narrate(entry, self.history)
            if line:
                screen.tell(line)
            if entry.what == "about" and entry.trigger == self._to_kill:
                self._to_kill = ""
                self._stage.kill(entry.pid)
        screen.show(self.history)

    def _ask_for_results(self) -> None:
        self._unresolved = [task_id for task_id in self._unresolved if not self._reader.AsyncResult(task_id).ready()]


def _introduce(console: Console, seed: int, *, protection: bool) -> None:
    tasks = Text("protected tasks", "bold green") if protection else Text("plain tasks, no protection", "bold red")
    story = (
        f"{len(WORKERS)} prefork workers of {PROCESSES} processes, an embedded Valkey, seed {seed}. Now come ticks of two "
        "beats at once, double clicks, redelivered webhooks, and a SIGKILL in the middle of a charge."
    )
    console.print(Text(" celery-singleflight demo: ", "bold").append(tasks))
    console.print(Padding(Text(story, "bright_black"), (0, 1, 1, 1)))
