"""What the pool's children note while they work, for about a microsecond a task and alike in every variant.

Each process keeps one small record in a file of its own that is mapped into memory: nothing is sent, and nothing is lost
however the process ends.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

_RECORD = struct.Struct("=qdddd")
_DIRECTORY = os.environ.get("BENCH_METER")


class Reading(NamedTuple):
    """The bodies of one process: how many began, when the first and the last did, and its CPU seconds by then.

    Times are of the machine's monotonic clock, so those of several processes compare.
    """

    count: int
    first_at: float
    first_cpu: float
    last_at: float
    last_cpu: float


class _Meter:
    def __init__(self) -> None:
        path = Path(_DIRECTORY or "") / f"{os.getpid()}.new"
        path.write_bytes(bytes(_RECORD.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _RECORD.size)
        path.rename(path.with_suffix(".meter"))  # whoever reads it finds it whole
        self._count = 0
        self._first = (time.monotonic(), time.process_time())

    def tick(self) -> None:
        self._count += 1
        _RECORD.pack_into(self._map, 0, self._count, *self._first, time.monotonic(), time.process_time())


_meter: _Meter | None = None


def tick() -> None:
    """Note that a body has begun. Does nothing in a process that is not metered."""
    global _meter  # noqa: PLW0603, one for each process, made after the fork
    if _DIRECTORY is None:
        return
    if _meter is None:
        _meter = _Meter()
    _meter.tick()


def read(directory: Path) -> list[Reading]:
    """What the processes have noted so far."""
    return [Reading(*_RECORD.unpack(path.read_bytes())) for path in sorted(directory.glob("*.meter"))]
