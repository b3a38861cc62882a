"""Asking the store for a lease until it gives an answer for good: the trigger runs, waits elsewhere, or is over."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from celery_singleflight.claims import Acquired, Died, Doubt, Ended, Held, Led, Linger, Merge, Parked, Surplus
from celery_singleflight.courier import prepare
from celery_singleflight.custody import GRACE
from celery_singleflight.errors import StoreUnavailable
from celery_singleflight.handoff import hand_on
from celery_singleflight.merging import merge
from celery_singleflight.slots import engage, free_slots

if TYPE_CHECKING:
    from celery_singleflight.answers import Entered
    from celery_singleflight.claims import Claim
    from celery_singleflight.store import Store
    from celery_singleflight.trigger import Trigger

__all__ = ("Answer", "enter")

logger = logging.getLogger(__name__)

#: Seconds to wait in place for the run that has published this retry and only has its lease left to give back.
_FOR_PREDECESSOR: Final = (0.01, 0.02, 0.05, 0.1, 0.1)
#: Seconds for which a slot waits for a hand-off at most; the store makes it less where runs are short.
_LONGEST_LINGER: Final = 0.4
#: Seconds until a slot waits again whose trigger has taken the baton of the one before it, which may have it meanwhile.
_FOR_ANOTHER: Final = (0.002, 0.004, 0.008, 0.016, 0.032)
#: Which part of a time limit at most: the limit runs while the slot waits, and is meant for the body.
_PART_OF_LIMIT: Final = 0.1
#: And of a lease: its holder counts from when it was asked for, which is before the wait.
_PART_OF_LEASE: Final = 0.25

Answer = Acquired | Held | Ended | Surplus | Parked | Doubt


def enter(trigger: Trigger) -> tuple[Answer, float]:
    """Ask for the lease of a trigger. Returns the answer, and when it was asked for, in monotonic seconds.

    Raises `StoreUnavailable`, and what `Store.enter` raises beside.
    """
    app, slot, pauses = trigger.binding.app, _Slot(trigger), iter(_FOR_PREDECESSOR)
    while True:
        entered, requested_at = slot.ask()
        if isinstance(entered, Held):
            pause = next(pauses, None) if entered.what == "predecessor" else None
            if pause is None:
                return entered, requested_at
            time.sleep(pause)
        elif isinstance(entered, Linger):
            hand_on(app, entered.calls)
            slot.may_wait(entered.seconds)
        elif isinstance(entered, Died):
            _abandon(trigger)
        elif isinstance(entered, Merge):
            merge(trigger, entered)
        elif isinstance(entered, Led):
            ended = trigger.binding.coordination.store.follow(trigger.claim, entered.by)
            if ended is not None:
                hand_on(app, ended.calls)
                return ended, requested_at
        else:
            if trigger.may_park:
                prepare(app)  # where one waits there is soon one to be handed on
            hand_on(app, getattr(entered, "calls", ()))
            return entered, requested_at


class _Slot:
    """How a trigger uses its slot to wait for its turn: not for long, and only while nobody else needs it."""

    def __init__(self, trigger: Trigger) -> None:
        self._trigger = trigger
        longest = min(_LONGEST_LINGER, trigger.first_limit * _PART_OF_LIMIT, trigger.claim.ttl * _PART_OF_LEASE)
        self._give_up_at = time.monotonic() + longest
        #: For how many seconds it waits before it asks next.
        self._linger = min(trigger.called_ahead, longest)
        #: Whether what the store has answered last was asked with a baton.
        self._had_baton = False
        self._pauses = iter(_FOR_ANOTHER)

    def ask(self) -> tuple[Entered, float]:
        """Ask for the lease, after a wait where that is due. Returns the answer, and when it was asked for."""
        store, trigger = self._trigger.binding.coordination.store, self._trigger
        linger, self._linger = self._linger, 0.0
        requested_at = time.monotonic()
        if linger and trigger.may_linger and free_slots() > 0:
            entered = _linger(store, trigger, requested_at + linger, self._give_up_at)
            if entered is not None:
                self._had_baton = True
                return entered, requested_at
            requested_at = time.monotonic()
        self._had_baton = False
        return store.enter(_waiting(trigger, self._give_up_at - requested_at)), requested_at

    def may_wait(self, seconds: float) -> None:
        """Note that the store lets it wait; when it has had a baton, that was for another one, which gets it first."""
        self._linger = seconds
        if self._had_baton:
            time.sleep(next(self._pauses, seconds))


def _abandon(trigger: Trigger) -> None:
    """Give back what a process had that has died with this delivery.

    The pool gives it to another process when it does not know yet that the one that died had begun it.
    """
    claim = trigger.claim
    logger.warning("%s died with its process just after it had begun: %s", trigger.lock_key, claim.record.task_id)
    calls = trigger.binding.coordination.store.abandon(claim.owner, claim.record, again=GRACE, died=True, cut_off=True)
    hand_on(trigger.binding.app, calls)


def _waiting(trigger: Trigger, linger: float) -> Claim:
    """Return its claim, by which its slot may wait for so many seconds; not when that is none, or somebody needs the slot."""
    return trigger.waiting(linger=linger if linger > 0 and trigger.may_linger and free_slots() > 0 else 0.0)


def _linger(store: Store, trigger: Trigger, until: float, give_up_at: float) -> Entered | None:
    """Wait in the slot until a place may be free, or it has lasted long enough, and ask for the lease at once.

    Returns the answer; None when it has not asked, because somebody else needs the slot, or the store was away.
    """
    entered, left = None, max(until - time.monotonic(), 0.001)
    engaged_before = engage(1)
    try:
        entered = store.enter_after_baton(_waiting(trigger, give_up_at - until), left, lambda: free_slots() > 0)
    except StoreUnavailable as error:
        logger.info("%s lingers no more: %s", trigger.lock_key, error)
    finally:
        engage(engaged_before)
    trigger.may_linger = entered is not None and time.monotonic() < until
    return entered
