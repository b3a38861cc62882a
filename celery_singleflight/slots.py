"""How many slots of this worker are free, as its main process counts them and its pool processes read them."""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ("count_slots", "free_slots", "recount_slots", "share_slots")

_COUNT: Final = struct.Struct("i")


class _Slots:
    """A number in memory that the pool's processes inherit. Where they do not, as under spawn, they read 0."""

    def __init__(self) -> None:
        self.worker: Any = None
        self.active: Collection[Any] = ()
        self.shared: mmap.mmap | None = None


_slots: Final = _Slots()


def share_slots(worker: Any, active: Collection[Any]) -> None:
    """Begin to count the slots of a worker that starts, before its pool does; `active` has the requests that are in one."""
    _slots.worker, _slots.active = worker, active
    _slots.shared = mmap.mmap(-1, _COUNT.size)


def count_slots() -> None:
    """Note how many slots are free, when a trigger goes to the pool."""
    worker, shared = _slots.worker, _slots.shared
    if worker is not None and shared is not None and not recount_slots():
        _COUNT.pack_into(shared, 0, max(worker.concurrency - len(_slots.active) - 1, 0))


def recount_slots() -> bool:
    """Note how many slots are free, at each turn of the worker's event loop; returns whether it has one that counts them."""
    semaphore, shared = getattr(_slots.worker, "semaphore", None), _slots.shared
    if semaphore is None or shared is None:
        return False
    _COUNT.pack_into(shared, 0, max(semaphore.value, 0))
    return True


def free_slots() -> int:
    """Return how many slots are free, as far as the main process has noted; 0 when that is not known."""
    pool = getattr(_slots.worker, "pool", None)
    if pool is not None and not pool.uses_semaphore:
        # Its slots are in this process: threads, or the one of solo. Nobody takes the semaphore for them.
        return max(int(pool.num_processes) - len(_slots.active), 0)
    return int(_COUNT.unpack_from(_slots.shared, 0)[0]) if _slots.shared is not None else 0
