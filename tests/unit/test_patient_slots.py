"""For how long a trigger may wait in its slot, before the store has its say."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace

import pytest

from celery_singleflight import entering
from celery_singleflight.claims import Acquired


class Trigger(SimpleNamespace):
    def waiting(self, *, linger):
        return self.claim


@pytest.mark.parametrize(
    ("ttl", "limit", "called_ahead", "longest"),
    [
        (30.0, inf, 10.0, 0.4),
        (30.0, inf, 0.09, 0.09),
        (30.0, 1.0, 10.0, 0.1),
        (1.0, inf, 10.0, 0.25),
    ],
    ids=["0.4 s", "as told", "a tenth of a time limit", "a quarter of a lease"],
)
def test_a_slot_waits_for_so_long_at_most(monkeypatch, ttl, limit, called_ahead, longest):
    """A lease is counted from when it was asked for, which is before the wait."""
    monkeypatch.setattr(entering, "free_slots", lambda: 1)
    waited = []

    class Store:
        def enter_after_baton(self, claim, seconds, goes_on):
            waited.append(seconds)
            return Acquired(1, "run", 1, ())

    binding = SimpleNamespace(app=None, coordination=SimpleNamespace(store=Store()))
    claim = SimpleNamespace(ttl=ttl)
    trigger = Trigger(
        binding=binding, claim=claim, first_limit=limit, called_ahead=called_ahead, may_linger=True, may_park=False
    )
    entered, _ = entering.enter(trigger)

    assert isinstance(entered, Acquired)
    assert waited == [pytest.approx(longest, abs=0.02)]
    assert waited[0] <= longest
