"""Keeping leases: one daemon thread for each executing process renews what this process holds.

It never runs on the worker's event loop, which stands still while the broker is away. It is started by the first lease after
a fork and dies with the process, so a dead holder stops renewing at once. It also settles, in batches, the triggers whose
callbacks Celery has sent.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Final

from celery_singleflight import signals
from celery_singleflight.errors import SingleflightError
from celery_singleflight.settling import Settling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery_singleflight.claims import Record
    from celery_singleflight.lease import Lease
    from celery_singleflight.store import Renewal, Store

__all__ = ("Heartbeat",)

logger = logging.getLogger(__name__)

#: A lease of which no more than this part is left is in danger.
_PART: Final = 1 / 3
#: Seconds between two looks at most, while there is anything to look after.
_LONGEST_PAUSE: Final = 1.0
#: Looks that find nothing before the thread sleeps until it is needed.
_IDLE_LOOKS: Final = 5


class Heartbeat:
    """Renews the leases of this process and settles its finished triggers."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pause = _LONGEST_PAUSE
        self._reset()

    def keep(self, lease: Lease, record: Record) -> None:
        """Renew this lease from now on, until it is dropped, lost, or as old as its `max_hold`."""
        if self._pid != os.getpid():
            self._reset()
        self._settling.forget_thread()
        self._kept[lease.owner, record] = lease
        if lease.renew_every < self._pause:
            self._pause = lease.renew_every
            self._wake.set()
        self._attend()

    def drop(self, owner: str, record: Record) -> None:
        """Stop renewing; a renewal under way cannot bring back what is released after it."""
        self._kept.pop((owner, record), None)

    def begin_ending(self, record: Record, owner: str) -> None:
        """Note that the trigger has its outcome, and Celery in this thread sends what follows."""
        if self._pid != os.getpid():
            self._reset()
        self._settling.begin(record, owner)

    def settle(self, record: Record, owner: str, keeps: str) -> None:
        """Tell the store, within about a second, that Celery has done what follows this trigger; `keeps` as in `Settled`."""
        if self._pid != os.getpid():
            self._reset()
        self._settling.end(record, owner, keeps)
        self._attend()

    def flush(self) -> None:
        """Settle what waits for it, now; for a process that is about to leave."""
        if self._pid == os.getpid():
            self._settling.write(self._store)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._kept: dict[tuple[str, Record], Lease] = {}
        self._endangered: set[str] = set()
        self._settling = Settling()
        self._pause = _LONGEST_PAUSE
        self._wake = threading.Event()
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        self._watch: threading.Thread | None = None
        self._asleep = False

    def _attend(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            with self._guard:
                if self._thread is None or not self._thread.is_alive():
                    self._asleep = False
                    self._thread = threading.Thread(target=self._beat, name="singleflight-heartbeat", daemon=True)
                    self._thread.start()
        elif self._asleep:
            self._wake.set()

    def _beat(self) -> None:
        idle = 0
        while True:
            self._wake.wait(self._pause)
            self._wake.clear()
            try:
                self._renew()
                self._settling.write(self._store)
            except Exception:
                # Whatever it was, leases must go on being renewed.
                logger.exception("a look of the heartbeat failed; the next one follows")
            idle = 0 if self._kept or self._settling else idle + 1
            if idle >= _IDLE_LOOKS:
                self._sleep()
                idle = 0

    def _sleep(self) -> None:
        self._asleep = True
        if not self._kept and not self._settling:
            self._wake.wait()
        self._asleep = False

    def _renew(self) -> None:
        requested_at = time.monotonic()
        due = [
            (lease, record, ttl)
            for (_, record), lease in list(self._kept.items())
            if not self._is_over(lease, record) and (ttl := self._due(lease, requested_at)) > 0
        ]
        if not due:
            return
        self._watch_deadlines()
        try:
            answers: Sequence[Renewal | SingleflightError] = self._store.renew(due)
        except SingleflightError as error:
            answers = [error] * len(due)
        for (lease, record, ttl), answer in zip(due, answers, strict=True):
            if isinstance(answer, SingleflightError):
                self._warn(lease, answer)
            elif answer.lost:
                self._lose(lease, record, answer.lost)
            else:
                lease.renewed(requested_at, ttl)
                self._endangered.discard(lease.owner)
                if answer.stop_by:
                    lease.replace(answer.stop_by)

    def _watch_deadlines(self) -> None:
        """Have a second thread look at the deadlines: the first may be waiting for the store when they pass."""
        if self._watch is None or not self._watch.is_alive():
            self._watch = threading.Thread(target=self._await_deadlines, name="singleflight-deadlines", daemon=True)
            self._watch.start()

    def _await_deadlines(self) -> None:
        while kept := [lease for (_, record), lease in list(self._kept.items()) if not self._is_over(lease, record)]:
            for lease in kept:
                if lease.remaining <= lease.ttl * _PART:
                    self._endanger(lease)
            nearest = min(lease.remaining for lease in kept)
            time.sleep(min(max(nearest, 0.001), _LONGEST_PAUSE / 4))

    def _is_over(self, lease: Lease, record: Record) -> bool:
        if lease.is_lost:
            self._lose(lease, record, lease.why_lost)
        return lease.is_lost

    def _due(self, lease: Lease, now: float) -> float:
        """Return for how many seconds the lease is to be renewed now; 0 for not now."""
        if lease.expires_at - now > lease.ttl - lease.renew_every + self._pause:
            return 0.0
        ttl = min(lease.ttl, lease.acquired_at + lease.max_hold - now)
        return ttl if now + ttl > lease.expires_at else 0.0  # else it is as old as max_hold, and what is left runs out

    def _warn(self, lease: Lease, error: SingleflightError) -> None:
        logger.warning("could not renew %r, trying again: %s", lease, error)
        self._endanger(lease)

    def _endanger(self, lease: Lease) -> None:
        if lease.owner not in self._endangered:
            self._endangered.add(lease.owner)
            signals.lease_endangered.send(sender=None, lease=lease, remaining=lease.remaining)

    def _lose(self, lease: Lease, record: Record, reason: str) -> None:
        if self._kept.pop((lease.owner, record), None) is None:
            return  # released meanwhile, or lost already
        self._endangered.discard(lease.owner)
        lease.mark_lost(reason)
        lease.interrupt()
        logger.error("the lease on %s is lost: %s", lease.lock_key, reason)
        signals.lease_lost.send(sender=None, lease=lease, reason=reason)
