"""Random walks among triggers that wait: each trigger ends once, and nothing stays behind.

More of them: python tests/property/walk.py 1000
"""

from __future__ import annotations

import pytest
from walk import walk


@pytest.mark.parametrize("seed", range(24))
def test_each_trigger_ends_once_and_nothing_stays_behind_whatever_happens(seed):
    way = walk(seed)
    assert way.sent.keys() == way.outcomes.keys()
