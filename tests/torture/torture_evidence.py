"""What bodies write for the judge: rows in a file of each process, and a register that refuses smaller fencing tokens.

No store and no broker knows of it. Times are of the machine's monotonic clock, so they compare between processes.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote


class Evidence:
    """Appends rows; one write for each, so a process that is killed leaves only whole ones."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._pid = 0
        self._file = -1
        self._registers: dict[str, int] = {}

    def write(self, what: str, **facts: Any) -> float:
        if self._pid != os.getpid():
            self._pid, self._registers = os.getpid(), {}
            path = self.directory / f"rows-{self._pid}-{time.monotonic_ns()}"
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        at = time.monotonic()
        os.write(self._file, json.dumps({"what": what, "at": at, "pid": self._pid, **facts}).encode() + b"\n")
        return at

    def offer(self, key: str, token: int, run: str, when: str) -> bool:
        """Write to the fenced register of a key: it refuses a token that is smaller than one it has seen."""
        if key not in self._registers:
            path = self.directory / f"register-{quote(key, safe='')}"
            self._registers[key] = os.open(path, os.O_RDWR | os.O_CREAT)
        file = self._registers[key]
        try:
            # Inside, because `LeaseLost` may come as it returns: a lock that stays taken would stop every later body.
            fcntl.flock(file, fcntl.LOCK_EX)
            highest = int(os.pread(file, 32, 0) or b"0")
            taken = token >= highest
            if taken:
                os.pwrite(file, b"%020d" % token, 0)
            self.write("offer", run=run, key=key, token=token, highest=highest, taken=taken, when=when)
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
        return taken


class Reader:
    """Reads the rows of all processes as they come."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._offsets: dict[Path, int] = {}
        self.rows: list[dict[str, Any]] = []
        #: Bodies that have begun and not ended, by run.
        self.live: dict[str, dict[str, Any]] = {}
        #: Those that have their record, and Celery has not sent what follows.
        self.lingering: dict[str, dict[str, Any]] = {}

    def read(self) -> list[dict[str, Any]]:
        """Take in what is new, and return it."""
        new = []
        for path in self._directory.glob("rows-*"):
            offset = self._offsets.get(path, 0)
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._offsets[path] = offset + whole
            new += [json.loads(line) for line in data[:whole].splitlines()]
        new.sort(key=lambda row: row["at"])
        for row in new:
            if row["what"] == "begin":
                self.live[row["run"]] = row
            elif row["what"] == "end":
                self.live.pop(row["run"], None)
            elif row["what"] == "linger":
                self.lingering[row["run"]] = row
            elif row["what"] == "lingered":
                self.lingering.pop(row["run"], None)
        self.rows += new
        return new

    def in_flight(self, pids: set[int]) -> list[int]:
        """Those of the processes with a body in it now."""
        self.read()
        return sorted(pids & {row["pid"] for row in self.live.values()})

    def between(self, pids: set[int]) -> list[int]:
        """Those of the processes that are between the record of an outcome and what follows."""
        self.read()
        return sorted(pids & {row["pid"] for row in self.lingering.values()})
