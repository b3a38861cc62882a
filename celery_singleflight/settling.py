"""From a trigger's outcome to the moment at which Celery has sent what follows it."""

from __future__ import annotations

import logging
import time
from threading import get_ident
from typing import TYPE_CHECKING, Final

from celery_singleflight.custody import Settled
from celery_singleflight.errors import SingleflightError

if TYPE_CHECKING:
    from celery_singleflight.claims import Record
    from celery_singleflight.store import Store

__all__ = ("Settling",)

logger = logging.getLogger(__name__)

#: Seconds after which an ending that goes on is made known, so that nobody takes this process for dead.
_LONG: Final = 2.0
#: Seconds after which it is not believed any more: whoever ends for so long will never be done.
_ENDLESS: Final = 3600.0
#: Marks that are written at once, at most.
_AT_ONCE: Final = 500


class Settling:
    """What the triggers that end in this process have still before them. Methods are called from any thread."""

    def __init__(self) -> None:
        #: By the thread in which Celery sends what follows: the trigger, and since when.
        self._ending: dict[int, tuple[Record, str, float]] = {}
        self._settled: list[Settled] = []

    def __bool__(self) -> bool:
        return bool(self._ending or self._settled)

    def begin(self, record: Record, owner: str) -> None:
        """Note that the trigger has its outcome, and Celery in this thread is about to send what follows."""
        self._ending[get_ident()] = (record, owner, time.monotonic())

    def end(self, record: Record, owner: str, keeps: str) -> None:
        """Note that Celery has sent all of it; `keeps` as in `Settled`."""
        self._ending.pop(get_ident(), None)
        self._settled.append(Settled(record, owner, is_done=True, keeps=keeps))

    def forget_thread(self) -> None:
        """Note that this thread does something else now, however its last ending went."""
        self._ending.pop(get_ident(), None)

    def write(self, store: Store) -> None:
        """Tell the store. What it does not take now is told again later."""
        settled, self._settled = self._settled, []
        now = time.monotonic()
        marks = settled + [
            Settled(record, owner, is_done=False)
            for record, owner, since in list(self._ending.values())
            if _LONG <= now - since < _ENDLESS
        ]
        for first in range(0, len(marks), _AT_ONCE):
            try:
                store.settle(marks[first : first + _AT_ONCE])
            except SingleflightError as error:
                logger.warning("could not settle %d triggers, trying again: %s", len(marks) - first, error)
                self._settled += [mark for mark in marks[first:] if mark.is_done]
                return
