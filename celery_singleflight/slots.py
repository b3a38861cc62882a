"""How many slots of this worker are free, as its main process counts them and its pool processes read them.

A slot with a trigger that is about to wait is as good as free: it is done with it in a moment. So what counts is which slots
have a body, or a trigger that lingers; the pool's processes say so, and the main one knows who is with the pool.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import deque
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakSet

from billiard.process import current_process

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ("count_slots", "engage", "free_slots", "leave_slot", "let_pass", "may_go_first", "recount_slots", "share_slots")

#: How many slots are free, and how many have a protected trigger; behind it a byte for each, 1 while it is engaged.
_COUNT: Final = struct.Struct("ii")
_MOST: Final = 1024
#: How often one that waits for a slot is passed. A burst on one key has passed by then.
_PASSED_AT_MOST: Final = 4


class _Slots:
    """Numbers in memory that the pool's processes inherit. Where they do not, as under spawn, no slot is free."""

    def __init__(self) -> None:
        self.worker: Any = None
        #: The requests that are in a slot.
        self.active: Collection[Any] = ()
        #: Of protected tasks those that are in a slot, since the first whose turn had come was among them: before, nobody asks
        #: how many slots are about to be free, and to count them would cost each task some time.
        self.given: WeakSet[Any] = WeakSet()
        self.has_called = False
        self.shared: mmap.mmap | None = None
        #: Where this process says that its slot is engaged, and which process that is.
        self.place = 0
        self.pid = 0
        #: How often those whose turn had come have passed one that waits for a slot.
        self.passed: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        #: Whether what this process has handed on last while no slot was free has gone first.
        self.went_first = False


_slots: Final = _Slots()


def share_slots(worker: Any, active: Collection[Any]) -> None:
    """Begin to count the slots of a worker that starts, before its pool does; `active` has the requests that are in one."""
    _slots.worker, _slots.active = worker, active
    _slots.shared = mmap.mmap(-1, _COUNT.size + _MOST)


def count_slots(request: Any) -> None:
    """Note how many slots are free, when a protected trigger goes to the pool."""
    if _slots.has_called or request.is_handed_out:
        _slots.has_called = True
        _slots.given.add(request)
    worker, shared = _slots.worker, _slots.shared
    if worker is not None and shared is not None and not recount_slots():
        _COUNT.pack_into(shared, 0, max(worker.concurrency - len(_slots.active) - 1, 0), 0)


def recount_slots() -> bool:
    """Note how many slots are free, at each turn of the worker's event loop; returns whether it has one that counts them."""
    semaphore, shared = getattr(_slots.worker, "semaphore", None), _slots.shared
    if semaphore is None or shared is None:
        return False
    free = max(semaphore.value, 0)
    _COUNT.pack_into(shared, 0, free, 0 if free else len(_slots.given))
    return True


def leave_slot(request: Any) -> None:
    """Note that a protected trigger has left its slot: it lives on for a while, in cycles."""
    if _slots.has_called:
        _slots.given.discard(request)


def let_pass(worker: Any) -> None:
    """Have the worker give a trigger whose turn has come to its pool before those that have come to the worker earlier.

    Each of those is passed a few times at most: else those in line, who come one after the other, would keep all slots.
    """
    semaphore = getattr(worker, "semaphore", None)
    line = getattr(semaphore, "_waiting", None)
    if semaphore is None or not isinstance(line, deque):
        return  # it has no pool of processes

    def acquire(give: Any, request: Any) -> bool:
        has_slot: bool = semaphore.acquire(give, request)
        if not has_slot and getattr(request, "is_handed_out", False):
            its, place = line.pop(), len(line)
            while place and _lets_pass(line[place - 1][1][0]):
                place -= 1
            line.insert(place, its)
        return has_slot

    worker._quick_acquire = acquire  # noqa: SLF001, it looks there each time


def _lets_pass(waiting: Any) -> bool:
    times = _slots.passed.get(waiting, 0)
    if getattr(waiting, "is_handed_out", False) or times == _PASSED_AT_MOST:
        return False
    _slots.passed[waiting] = times + 1
    return True


def may_go_first() -> bool:
    """Whether the message of a trigger whose turn has come may go before what waits in its queue, as far as this process knows.

    Beside a free slot it always may. Where there is none, every second one may: else those in line would keep all slots, and
    one line would keep the others waiting. A process without a slot gives none from one to the next; and whom the sweeper calls
    is late.
    """
    has_slot = _place() > 0 or _counts_here(getattr(_slots.worker, "pool", None))
    _slots.went_first = not has_slot or free_slots() > 0 or not _slots.went_first
    return _slots.went_first


def _counts_here(pool: Any) -> bool:
    """Whether the slots of the pool are in this process: threads, or the one of solo. Nobody takes the semaphore for them."""
    return pool is not None and not pool.uses_semaphore


def free_slots() -> int:
    """Return how many other slots are free, or about to be, as far as the main process has noted; 0 when that is not known."""
    pool: Any = getattr(_slots.worker, "pool", None)
    if _counts_here(pool):
        return max(int(pool.num_processes) - len(_slots.active), 0)
    shared, place = _slots.shared, _place()
    if shared is None:
        return 0
    free: int
    free, ours = _COUNT.unpack_from(shared, 0)
    if free or not place:
        return free
    about_to_wait: int = ours - shared[_COUNT.size :].count(1) - (1 - shared[place])
    return max(about_to_wait, 0)


def engage(now: int) -> int:
    """Say whether the slot of this process is neither free nor about to be from now on, 1 or 0. Returns what it was."""
    shared, place = _slots.shared, _place()
    if shared is None or not place:
        return 0
    before, shared[place] = shared[place], now
    return before


def _place() -> int:
    """Return where this process of the pool says that it is engaged; 0 when it cannot."""
    if _slots.pid != os.getpid():
        index = getattr(current_process(), "index", None)
        _slots.place = _COUNT.size + index if isinstance(index, int) and index < _MOST else 0
        _slots.pid = os.getpid()
        if _slots.shared is not None and _slots.place:
            _slots.shared[_slots.place] = 0  # whoever had it before may have died with a body
    return _slots.place
