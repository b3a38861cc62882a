"""The ledger: what the bodies of tasks did, in a file that neither the broker nor the store knows of."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ("Entry", "Ledger", "What")

What = Literal[
    "ready",  # a worker takes messages
    "published",  # a trigger was sent to the broker
    "begin",  # a body began
    "about",  # a charge is about to be made
    "effect",  # something happened that must not happen twice
    "end",  # a body ended
    "killed",  # the process was killed
    "requeued",  # a trigger went back to the broker, because `note` holds the key
    "failed",  # a worker has ended by itself
    "ended",  # a trigger was over without a run, with the outcome in `note`
]


@dataclass(frozen=True, slots=True)
class Entry:
    """One line. `at` is of the machine's monotonic clock, so that the lines of all processes compare."""

    what: What
    at: float
    pid: int
    trigger: str = ""
    key: str = ""
    unit: str = ""
    worker: str = ""
    note: str = ""
    seconds: float = 0.0


class Ledger:
    """Appended to by any process, read by the one that shows and judges."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._read = 0

    def write(self, what: What, *, pid: int = 0, **facts: Any) -> None:
        """Append one line; short enough to be written in one piece."""
        entry = Entry(what, time.monotonic(), pid or os.getpid(), **facts)
        with self._path.open("ab", buffering=0) as file:
            file.write(json.dumps(asdict(entry)).encode() + b"\n")

    def news(self) -> list[Entry]:
        """Return the lines that came since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            complete = file.read().rpartition(b"\n")[0]
        self._read += len(complete) + bool(complete)
        return [Entry(**json.loads(line)) for line in complete.splitlines()]
