"""What workers note while they work, in a file for each process: nothing is sent, and nothing is lost however a process ends.

A note takes a few microseconds, alike under every policy, and no call on the store or the broker.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

_DIRECTORY = os.environ.get("WAITING_NOTES")
_file: tuple[int, int] | None = None


def note(kind: str, task_id: str, value: object = "") -> float:
    """Append a note to this process' file, and return its time; only that in a process that is not to note anything.

    Times are of the machine's monotonic clock, so those of several processes compare.
    """
    global _file  # noqa: PLW0603, one for each process, opened after the fork
    now = time.monotonic()
    if _DIRECTORY is None:
        return now
    if _file is None or _file[0] != os.getpid():
        path = Path(_DIRECTORY) / f"{os.getpid()}.notes"
        _file = os.getpid(), os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(_file[1], f"{kind}\t{task_id}\t{now!r}\t{value}\n".encode())
    return now


class Note(NamedTuple):
    """One note of one trigger: when it was made, and what else it says."""

    at: float
    value: str


class Notes:
    """All that has been noted so far. A task id is a family and a number, such as `turn-17`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = defaultdict(int)
        self._notes: dict[tuple[str, str], dict[int, list[Note]]] = defaultdict(lambda: defaultdict(list))

    def refresh(self) -> Notes:
        """Read what is new."""
        for path in self._directory.glob("*.notes"):
            with path.open("rb") as file:
                file.seek(self._read[path])
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] += len(whole)
            for line in whole.decode().splitlines():
                kind, task_id, at, value = line.split("\t")
                family, _, number = task_id.rpartition("-")
                self._notes[kind, family][int(number)].append(Note(float(at), value))
        return self

    def of(self, kind: str, family: str = "turn") -> dict[int, list[Note]]:
        """The notes of one kind, by the trigger's number, as they were read."""
        return self._notes[kind, family]

    def count(self, kind: str, family: str = "turn") -> int:
        """How many notes of one kind there are."""
        return sum(map(len, self.of(kind, family).values()))

    def first(self, kind: str, number: int, family: str = "turn") -> Note:
        """The earliest note of one kind about one trigger."""
        return min(self.of(kind, family)[number])
