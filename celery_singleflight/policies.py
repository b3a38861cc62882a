"""Decisions, without doing anything: how long to wait, what a skip means."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from celery_singleflight.claims import Held

__all__ = ("LONGEST_DELAY", "PARKING", "blind_delay", "poll_delay", "requeue_delay", "waits_on_contention")

#: The policies under which the store has the message of a trigger that waits.
PARKING: Final = frozenset({"queue", "coalesce", "replace", "join"})
#: Seconds. No trigger waits longer than this before it looks again.
LONGEST_DELAY: Final = 60.0
#: Seconds of the first countdown when the store knows nothing of the holder; doubles with each try.
_FIRST_DELAY: Final = 0.25
_JITTER: Final = 0.2


class Uniform(Protocol):
    """What is asked of a source of randomness."""

    def uniform(self, low: float, high: float, /) -> float: ...


def requeue_delay(held: Held, waits: int, *, longest: float, least: float = 0.0, chance: Uniform = random) -> float:
    """Return the countdown in seconds for a trigger that met contention and has been requeued `waits` times before.

    The store's turn spreads the waiting triggers over the time their forerunners will need. A floor that doubles with each
    try keeps a wrong guess from polling; it is bounded by what the holder's lease has left, after which a dead holder is out
    of the way, and by `longest`. Never less than `least`.
    """
    floor = min(_FIRST_DELAY * 2.0 ** min(waits, 16), max(held.hold, 1.0) * (waits + 1))
    if held.is_own:
        floor = min(_FIRST_DELAY * 4 * 2.0 ** min(waits, 16), max(held.remaining, 1.0))
    delay = min(max(held.turn, floor), longest)
    return max(delay * (1.0 + chance.uniform(0.0, _JITTER)), least)


def blind_delay(waits: int, *, longest: float, chance: Uniform = random) -> float:
    """Return the countdown in seconds for a trigger whose store does not answer: about 1 s, then twice as long each time."""
    return min(2.0 ** min(waits, 16), longest) * (1.0 + chance.uniform(0.0, _JITTER))


def poll_delay(held: Held, tries: int, left: float, *, chance: Uniform = random) -> float:
    """Return how many seconds a caller that waits in place sleeps before it asks again, with `left` seconds to wait."""
    delay = min(0.02 * 2.0 ** min(tries, 6), max(held.remaining, 0.02), 1.0)
    return min(delay * (1.0 + chance.uniform(-_JITTER, _JITTER)), max(left, 0.0))


def waits_on_contention(policy: str) -> bool:
    """Whether a newcomer under this policy runs later, rather than not at all."""
    return policy not in ("skip", "reject")
