"""The stage as the demo sees it: where the server is, and that it goes away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from celery_singleflight.demo.ledger import Ledger

if TYPE_CHECKING:
    from types import TracebackType

    from celery_singleflight.demo.ledger import Entry

__all__ = ("PROCESSES", "WORKERS", "Stage", "StageError")

WORKERS: Final = ("w1", "w2")
PROCESSES: Final = 2
#: Seconds within which the workers must be ready, and what they are on must be cleared away.
_PATIENCE: Final = 20.0


class StageError(Exception):
    """The server or a worker did not start, or ended before its time."""


class Stage:
    """A Valkey server and two workers. They live in a session of their own, so that Ctrl-C is for the demo alone."""

    def __init__(self, *, protection: bool) -> None:
        self._protection = "on" if protection else "off"
        self.url = ""
        self.ledger = Ledger("")

    def __enter__(self) -> Self:
        """Start everything. Raises `StageError` when the server does not start."""
        self._process = subprocess.Popen(  # noqa: S603, no shell, and only what stands here
            [sys.executable, "-m", "celery_singleflight.demo.backstage", self._protection],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            where = self._answer()
        except BaseException:
            self._clear()
            raise
        self.url = where["url"]
        self.ledger = Ledger(Path(where["directory"]) / "ledger")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._clear()

    def wait_until_ready(self) -> None:
        """Return when both workers take messages. Raises `StageError` when they do not in time."""
        missing, give_up_at = set(WORKERS), time.monotonic() + _PATIENCE
        while missing:
            missing -= {entry.worker for entry in self.news() if entry.what == "ready"}
            if time.monotonic() > give_up_at:
                raise StageError(f"not ready within {_PATIENCE:.0f} s: {', '.join(sorted(missing))}")
            time.sleep(0.05)

    def news(self) -> list[Entry]:
        """Return what is new in the ledger. Raises `StageError` when something has ended that should not have."""
        if self._process.poll() is not None:
            raise StageError("the server and the workers are gone")
        entries = self.ledger.news()
        for entry in entries:
            if entry.what == "failed":
                raise StageError(f"worker {entry.worker} has ended by itself")
        return entries

    def kill(self, pid: int) -> None:
        """Kill a process of a worker's pool, and note it."""
        os.kill(pid, signal.SIGKILL)
        self.ledger.write("killed", pid=pid)

    def _answer(self) -> dict[str, str]:
        line = self._process.stdout.readline() if self._process.stdout else b""
        if not line:
            raise StageError("the server and the workers could not be started")
        answer: dict[str, str] = json.loads(line)
        return answer

    def _clear(self) -> None:
        # The end of its input tells the other side to end everything; it would also come if this process were killed.
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait(_PATIENCE)
        if self._process.stdout:
            self._process.stdout.close()
