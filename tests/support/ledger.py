"""The judge outside: what tasks did, written to a file that no store or broker knows of."""

from __future__ import annotations

import json
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any


class Ledger:
    """Lines of JSON, appended by any process. Times are of the machine's monotonic clock, so they compare."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.path = self.directory / "ledger"

    def write(self, key: str, what: str, **facts: Any) -> None:
        line = json.dumps({"key": key, "what": what, "at": time.monotonic(), "pid": os.getpid(), **facts}) + "\n"
        with self.path.open("a") as file:
            file.write(line)

    def read(self, key: str, what: str | None = None) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        rows = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [row for row in rows if row["key"] == key and what in (None, row["what"])]

    def runs(self, key: str) -> list[dict[str, Any]]:
        """Bodies that began, in order."""
        return sorted(self.read(key, "begin"), key=lambda row: row["at"])

    def overlaps(self, key: str) -> int:
        """How many bodies began while another of the same key had begun and not ended."""
        intervals = []
        ends = {row["run"]: row["at"] for row in self.read(key, "end")}
        for row in self.runs(key):
            intervals.append((row["at"], ends.get(row["run"], float("inf"))))
        return sum(1 for (_, end), (begin, _) in pairwise(intervals) if begin < end)

    def tokens(self, key: str) -> list[int]:
        """Fencing tokens in the order in which their holders wrote."""
        return [row["token"] for row in self.read(key, "end")]

    # A gate is a file: a body waits until the test opens it.

    def open(self, gate: str) -> None:
        (self.directory / f"gate-{gate}").touch()

    def pass_gate(self, gate: str, timeout: float = 30.0) -> None:
        deadline = time.monotonic() + timeout
        while not (self.directory / f"gate-{gate}").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"gate {gate} was not opened")
            time.sleep(0.01)
