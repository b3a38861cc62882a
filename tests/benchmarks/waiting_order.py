"""Judging order and exclusion from outside, from what the bodies have noted."""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Turn(NamedTuple):
    """When a trigger's body began, and between which two moments, or at which place in a line, the trigger has arrived."""

    earliest: float
    latest: float
    began: float


def out_of_order(turns: Sequence[Turn]) -> float:
    """Return which percentage of the pairs that have certainly arrived one after the other began the other way round.

    A pair whose moments of arrival overlap is not counted: nobody knows which of them was first.
    """
    pairs = passed = 0
    arrived: list[float] = []  # when those began that had arrived by then, in order
    by_latest = iter(sorted(turns, key=lambda turn: turn.latest))
    former = next(by_latest, None)
    for turn in sorted(turns, key=lambda turn: turn.earliest):
        while former is not None and former.latest < turn.earliest:
            insort(arrived, former.began)
            former = next(by_latest, None)
        pairs += len(arrived)
        passed += len(arrived) - bisect_right(arrived, turn.began)
    return 100.0 * passed / pairs if pairs else 0.0


def overlaps(bodies: Iterable[tuple[float, float]]) -> int:
    """Return how many of these bodies, given by begin and end, began before an earlier one had ended."""
    count, ended = 0, float("-inf")
    for begin, end in sorted(bodies):
        count += begin < ended
        ended = max(ended, end)
    return count
