"""Ending what was begun: recording an outcome through an outage of the store, giving a lease back."""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from celery_singleflight.errors import SingleflightError, StoreUnavailable

if TYPE_CHECKING:
    from celery_singleflight.claims import Encoded, Outcome, Record, Refused
    from celery_singleflight.coordination import Coordination
    from celery_singleflight.lease import Lease

__all__ = ("finish", "give_back")

logger = logging.getLogger(__name__)

#: Seconds between two attempts to record an outcome while the store is away.
_PAUSE: Final = 0.5


def finish(
    place: Coordination,
    lease: Lease,
    record: Record,
    outcome: Outcome,
    value: Encoded,
    *,
    reason: str = "",
    keep: float,
    release: bool = True,
) -> Refused | None:
    """Record the outcome of a run and release its lease; return who has taken over, if somebody has.

    A shutdown that falls in here waits for one more attempt. While the store is away it is tried again for one lease TTL; then
    the outcome is given up with an error in the log: a duplicate of the execution would run again.
    """
    place.heartbeat.drop(lease.owner, record)
    give_up_at = time.monotonic() + lease.ttl
    reasons = json.dumps([reason]) if reason else "[]"
    interruption: BaseException | None = None
    while True:
        try:
            refused = place.store.finish(lease, record, outcome, value, reason=reasons, keep=keep, release=release)
        except StoreUnavailable as error:
            if time.monotonic() >= give_up_at:
                logger.exception("the store has not taken the outcome %r of %s in %.0f s", outcome.value, lease, lease.ttl)
                return None
            logger.warning("the store does not take the outcome of %s, trying again: %s", lease.lock_key, error)
            time.sleep(_PAUSE)
        except (SystemExit, KeyboardInterrupt) as raised:
            if interruption:
                raise
            interruption = raised
        else:
            if interruption:
                raise interruption
            return refused


def give_back(place: Coordination, owner: str, record: Record, **how: Any) -> None:
    """End a run without an outcome, as `Store.abandon` does; a store that is away lets the lease expire by itself."""
    place.heartbeat.drop(owner, record)
    try:
        place.store.abandon(owner, record, **how)
    except SingleflightError as error:
        logger.warning("%s could not be given back, its lease will expire: %s", record.lock_key, error)
