"""Medians, and how sure they are."""

from __future__ import annotations

import random
from statistics import median, quantiles
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_RESAMPLES = 4000


class Estimate(NamedTuple):
    """A median and the 95 % interval of it, by bootstrap: the medians of resamples drawn with replacement."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        digits = 3 if abs(self.median) < 10 else 1
        return f"{self.median:8.{digits}f}   [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def estimate(values: Sequence[float]) -> Estimate:
    chance = random.Random(0)  # the same values give the same interval
    medians = [median(chance.choices(values, k=len(values))) for _ in range(_RESAMPLES)]
    cuts = quantiles(medians, n=40)
    return Estimate(median(values), cuts[0], cuts[-1])
