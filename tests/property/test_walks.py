"""Random walks among triggers that wait: each trigger ends once, and nothing stays behind.

More of them: python tests/property/walk.py 1000
"""

from __future__ import annotations

from functools import cache

import pytest
from record_states import MADE, NOT_WALKED
from walk import walk

walked = cache(walk)
SEEDS = range(24)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_trigger_ends_once_and_nothing_stays_behind_whatever_happens(seed):
    way = walked(seed)
    assert way.sent.keys() == way.outcomes.keys()


def test_the_walks_come_by_every_transition_of_a_run_record_but_those_that_are_made_elsewhere():
    seen = {one for seed in SEEDS for one in walked(seed).watch.seen}
    assert MADE - seen <= frozenset().union(*NOT_WALKED.values())
