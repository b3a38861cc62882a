"""How many slots of this worker are free, as its main process counts them and its pool processes read them."""

from __future__ import annotations

import mmap
import struct
from typing import Any, Final

__all__ = ("count_slots", "free_slots", "share_slots")

_COUNT: Final = struct.Struct("i")


class _Slots:
    """A number in memory that the pool's processes inherit. Where they do not, as under spawn, they read 0."""

    def __init__(self) -> None:
        self.worker: Any = None
        self.shared: mmap.mmap | None = None


_slots: Final = _Slots()


def share_slots(worker: Any) -> None:
    """Begin to count the slots of a worker that starts, before its pool does."""
    _slots.worker = worker
    _slots.shared = mmap.mmap(-1, _COUNT.size)


def count_slots(active: int) -> None:
    """Note how many slots are free, when a trigger goes to the pool beside so many `active` ones.

    A slot that becomes free later is not noted until then.
    """
    worker, shared = _slots.worker, _slots.shared
    if worker is None or shared is None:
        return
    semaphore = getattr(worker, "semaphore", None)
    free = semaphore.value if semaphore is not None else worker.concurrency - active - 1
    _COUNT.pack_into(shared, 0, max(free, 0))


def free_slots() -> int:
    """Return how many slots were free when the last trigger went to the pool; 0 when that is not known."""
    return int(_COUNT.unpack_from(_slots.shared, 0)[0]) if _slots.shared is not None else 0
