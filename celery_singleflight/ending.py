"""Ending what was begun: recording an outcome through an outage of the store, giving a lease back."""

from __future__ import annotations

import json
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from celery.exceptions import SoftTimeLimitExceeded

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
    hold: float | None = 0.0,
) -> Refused | None:
    """Record the outcome of a run and release its lease; return who has taken over, if somebody has.

    While the store is away it is tried again for as long as it takes, because what is not recorded would happen again; the
    soft time limit is one of the body. A shutdown that falls in here waits for one more attempt; then the outcome is not
    recorded, and the trigger runs again.
    """
    place.heartbeat.drop(lease.owner, record)
    reasons = json.dumps([reason]) if reason else "[]"
    interruption: BaseException | None = None
    while True:
        try:
            refused = place.store.finish(lease, record, outcome, value, reason=reasons, keep=keep, hold=hold)
        except StoreUnavailable as error:
            if interruption:
                logger.error(  # noqa: TRY400, the store is away, no bug here
                    "the outcome %r of %s is not recorded, its trigger will run again: %s", outcome.value, lease.lock_key, error
                )
                raise interruption from error
            logger.warning("the store does not take the outcome of %s, trying again: %s", lease.lock_key, error)
            _pause()
        except SoftTimeLimitExceeded:
            logger.info("the soft time limit of %s passed when its body had ended; the outcome stands", lease.lock_key)
        except (SystemExit, KeyboardInterrupt) as raised:
            if interruption:
                raise
            interruption = raised
        else:
            if interruption:
                raise interruption
            return refused


def _pause() -> None:
    with suppress(SoftTimeLimitExceeded):
        time.sleep(_PAUSE)


def give_back(place: Coordination, owner: str, record: Record, **how: Any) -> None:
    """End a run without an outcome, as `Store.abandon` does; a store that is away lets the lease expire by itself."""
    place.heartbeat.drop(owner, record)
    try:
        place.store.abandon(owner, record, **how)
    except SingleflightError as error:
        logger.warning("%s could not be given back, its lease will expire: %s", record.lock_key, error)
