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
#: Seconds of the first countdown of a trigger whose own run is in the way; doubles with each try.
_FIRST_OWN_DELAY: Final = 1.0
#: Seconds of the first floor under the countdown of one that has looked in vain; doubles with each try.
_FIRST_FLOOR: Final = 0.05
#: Which part of the time until its turn a trigger waits, and how long at least, in seconds.
_EARLY: Final = 0.95
_SHORTEST: Final = 0.002
_JITTER: Final = 0.2
#: Places spread those who wait: chance is only to keep two from coming at the same instant.
_LITTLE_JITTER: Final = 0.02


class Uniform(Protocol):
    """What is asked of a source of randomness."""

    def uniform(self, low: float, high: float, /) -> float: ...


def requeue_delay(held: Held, waits: int, *, longest: float, least: float = 0.0, chance: Uniform = random) -> float:
    """Return the countdown in seconds for a trigger that met contention and has been requeued `waits` times before.

    It comes a little before its turn, so that somebody is always there; what it has guessed wrong it corrects then. A floor
    that doubles with each try in vain keeps a holder that hangs from being polled; it is bounded by what the holder's lease has
    left, after which a dead holder is out of the way, and everything by `longest`. Never less than `least`.
    """
    if held.is_own:
        delay, jitter = min(_FIRST_OWN_DELAY * 2.0 ** min(waits, 16), max(held.remaining, 1.0)), _JITTER
    else:
        floor = min(_FIRST_FLOOR * 2.0 ** min(held.tries, 16), max(held.remaining, 1.0)) if held.tries else 0.0
        turn = max(held.turn * _EARLY, _SHORTEST)
        delay, jitter = max(turn, floor), _LITTLE_JITTER if floor < turn < longest else _JITTER
    return max(min(delay, longest) * (1.0 + chance.uniform(0.0, jitter)), least)


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
