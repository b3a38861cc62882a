"""The judge outside: what tasks did, written to a file that no store or broker knows of."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class Ledger:
    """Lines of JSON, appended by any process. Times are of the machine's monotonic clock, so they compare."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.path = self.directory / "ledger"
        self._guard = threading.Lock()
        self._end = 0
        self._rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)

    def write(self, key: str, what: str, **facts: Any) -> None:
        line = json.dumps({"key": key, "what": what, "at": time.monotonic(), "pid": os.getpid(), **facts})
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            # In one go, so that the lines of several processes do not mix. The line of one that is killed meanwhile may be
            # cut short: the next one does not go on with it.
            os.write(file, f"\n{line}\n".encode())
        finally:
            os.close(file)

    def read(self, key: str, what: str | None = None) -> list[dict[str, Any]]:
        """What was written of a key, in order."""
        return self._known(("key", key)) if what is None else [row for row in self._known(("key", key)) if row["what"] == what]

    def rows(self, what: str) -> list[dict[str, Any]]:
        """What was written of this kind, whatever its key, in order."""
        return self._known(("what", what))

    def _known(self, index: tuple[str, str]) -> list[dict[str, Any]]:
        with self._guard:
            for row in self._news():
                for name in ("key", "what"):
                    self._rows[name, row[name]].append(row)
            return list(self._rows.get(index, ()))

    def _news(self) -> Iterator[dict[str, Any]]:
        """What was written since the last look. Who writes may be in the midst of a line, which is left to the next look."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._end)
                news = file.read()
        except FileNotFoundError:
            return
        whole = news[: news.rfind(b"\n") + 1]
        self._end += len(whole)
        for line in filter(None, whole.split(b"\n")):
            with suppress(json.JSONDecodeError):  # cut short by the death of its process
                yield json.loads(line)

    def runs(self, key: str) -> list[dict[str, Any]]:
        """Bodies that began, in order."""
        return sorted(self.read(key, "begin"), key=lambda row: row["at"])

    def overlaps(self, key: str) -> int:
        """How many bodies began while another of the same key had begun and not ended."""
        ends = {row["run"]: row["at"] for row in self.read(key, "end")}
        overlaps, busy_until = 0, 0.0
        for row in self.runs(key):
            overlaps += row["at"] < busy_until
            busy_until = max(busy_until, ends.get(row["run"], inf))
        return overlaps

    def tokens(self, key: str) -> list[int]:
        """Fencing tokens in the order in which their holders wrote."""
        return [row["token"] for row in self.read(key, "end")]

    def most_at_once(self, key: str) -> int:
        """How many bodies of the key ran at the same time, at most."""
        steps = sorted((row["at"], 1 if row["what"] == "begin" else -1) for row in self.read(key))
        running, most = 0, 0
        for _, step in steps:
            running += step
            most = max(most, running)
        return most

    # A counter that is read and written without care.

    def counter(self, key: str) -> int:
        path = self.directory / f"counter-{key}"
        return int(path.read_text()) if path.exists() else 0

    def set_counter(self, key: str, value: int) -> None:
        path = self.directory / f"counter-{key}"
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(str(value))
        fresh.rename(path)

    # A gate is a file: a body waits until the test opens it.

    def open(self, gate: str) -> None:
        (self.directory / f"gate-{gate}").touch()

    def pass_gate(self, gate: str, timeout: float = 30.0) -> None:
        deadline = time.monotonic() + timeout
        while not (self.directory / f"gate-{gate}").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"gate {gate} was not opened")
            time.sleep(0.01)
