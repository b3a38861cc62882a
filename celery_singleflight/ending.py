"""Ending what was begun: recording an outcome through an outage of the store, giving a lease back."""

from __future__ import annotations

import functools
import json
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from celery.exceptions import SoftTimeLimitExceeded

from celery_singleflight.claims import Finished, Outcome, Refused
from celery_singleflight.errors import LeaseLost, ScriptError, SingleflightError, StoreUnavailable
from celery_singleflight.handoff import hand_on

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_singleflight.claims import Encoded, Handout, Record
    from celery_singleflight.coordination import Coordination
    from celery_singleflight.lease import Lease

__all__ = ("fail", "finish", "give_back")

logger = logging.getLogger(__name__)

#: Seconds between two attempts to record an outcome while the store is away.
_PAUSE: Final = 0.5
_Answer = TypeVar("_Answer")


def finish(  # noqa: PLR0913, an outcome has many sides
    place: Coordination,
    lease: Lease,
    record: Record,
    outcome: Outcome,
    value: Encoded,
    *,
    reason: str | list[str] = "",
    keep: float,
    hold: float | None = 0.0,
    keeps_failure: bool = False,
    keeps_steps: bool = False,
) -> Refused | None:
    """Record the outcome of a run and release its lease; return who has taken over, if somebody has.

    While the store is away it is tried again for as long as it takes, because what is not recorded would happen again; the
    soft time limit is one of the body. A shutdown that falls in here waits for one more attempt; then the outcome is not
    recorded, and the trigger runs again. Raises `LeaseLost` when the record is in a state that no outcome may follow.
    """
    place.heartbeat.drop(lease.owner, record)
    reasons = json.dumps([reason] if isinstance(reason, str) else reason) if reason else "[]"
    what = f"the outcome {outcome.value!r} of {lease.lock_key}"
    how: dict[str, Any] = {"reason": reasons, "keep": keep, "hold": hold}
    how |= {"keeps_failure": keeps_failure, "keeps_steps": keeps_steps}
    answer = _record(lambda: place.store.finish(lease, record, outcome, value, **how), lease, what)
    if isinstance(answer, Refused):
        return answer
    _hand_on(place, answer.calls)
    return None


def fail(
    place: Coordination,
    lease: Lease,
    record: Record,
    error: Encoded,
    *,
    reason: str,
    keep: float,
    execution_as: str,
) -> bool:
    """Record the failure of a run whose lease may be somebody else's by now.

    Returns whether it counts: it does not when its trigger is under way elsewhere or has an outcome. `execution_as` is as in
    `Store.conclude`. Tries and raises as `finish` does.
    """
    place.heartbeat.drop(lease.owner, record)
    reasons = json.dumps([reason])
    conclude = functools.partial(place.store.conclude, lease.owner, record, Outcome.FAILED, execution_as=execution_as)
    write = functools.partial(conclude, reason=reasons, keep=keep, release=True, error=error)
    answer = _record(write, lease, f"the failure of {lease.lock_key}")
    if not isinstance(answer, Finished):
        return False
    _hand_on(place, answer.calls)
    return True


def _record(write: Callable[[], _Answer], lease: Lease, what: str) -> _Answer:
    interruption: BaseException | None = None
    while True:
        try:
            answer = write()
        except StoreUnavailable as error:
            if interruption:
                logger.error(  # noqa: TRY400, the store is away, no bug here
                    "%s is not recorded, its trigger will run again: %s", what, error
                )
                raise interruption from error
            logger.warning("the store does not take %s, trying again: %s", what, error)
            _pause()
        except ScriptError as error:
            logger.error("%s is not recorded, its trigger goes back: %s", what, error)  # noqa: TRY400, it says all
            raise interruption or LeaseLost(lease.lock_key, str(error)) from error
        except SoftTimeLimitExceeded:
            logger.info("the soft time limit passed when a body had ended: %s stands", what)
        except (SystemExit, KeyboardInterrupt) as raised:
            if interruption:
                raise
            interruption = raised
        else:
            if interruption:
                raise interruption
            return answer


def _pause() -> None:
    with suppress(SoftTimeLimitExceeded):
        time.sleep(_PAUSE)


def give_back(place: Coordination, owner: str, record: Record, *, is_brisk: bool = False, **how: Any) -> None:
    """End a run without an outcome, as `Store.abandon` does; a store that is away lets the lease expire by itself.

    `is_brisk` tries less hard, where the store has just been found away.
    """
    place.heartbeat.drop(owner, record)
    try:
        calls = (place.brisk_store if is_brisk else place.store).abandon(owner, record, **how)
    except SingleflightError as error:
        logger.warning("%s could not be given back, its lease will expire: %s", record.lock_key, error)
    else:
        _hand_on(place, calls)


def _hand_on(place: Coordination, calls: Sequence[Handout]) -> None:
    if calls:  # else the app is not asked for: it may be gone before a lock of it is given back
        hand_on(place.app, calls)
