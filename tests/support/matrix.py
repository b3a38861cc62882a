"""The matrix: features of Celery x brokers x nobody, or somebody else, holding the lock key. Tests and page are made from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from features_of_canvas import CANVAS
from features_of_messages import MESSAGES
from features_of_results import RESULTS
from features_of_retries import RETRIES
from features_of_time import TIME
from matrix_axes import POLICIES, UNCONTENDED
from matrix_feature import cells_of
from matrix_twin import Twin, held, started_early
from nodes import wait_until

from celery_singleflight import lock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matrix_feature import Feature

SECTIONS = [RETRIES, TIME, CANVAS, MESSAGES, RESULTS]


def cells(broker: str) -> Iterator[tuple[Feature, str]]:
    """Yield a feature and a situation for each test of a broker."""
    return cells_of(SECTIONS, broker)


def check(place: Any, feature: Feature, situation: str) -> None:
    """Fail unless the feature is, in this situation, what it is on a plain task."""
    if situation == UNCONTENDED:
        plain = _on_plain(place, feature)
        _compare(Twin(place, "protected"), feature, plain)
        return
    twin = Twin(place, situation, POLICIES[situation])
    plain = None if feature.in_contention else _on_plain(place, feature)
    with held(twin, feature) as holder:
        if feature.in_contention:
            feature.in_contention(twin)
        else:
            _compare(twin, feature, plain)
        assert feature.waiting is None or holder.is_done(), f"not enough have waited: {holder.met()}"
    assert started_early(twin, holder) == []
    for name in holder.names:
        with lock(place.app, name, wait=10):
            """Nobody has kept it."""


def _on_plain(place: Any, feature: Feature) -> tuple[Any, Any]:
    """Return what is seen on a plain task, which is looked at once for all situations."""
    if feature.name not in place.plain:
        twin = Twin(place, "plain")
        observed = feature.observe(twin)
        place.plain[feature.name] = observed, twin.requests()
    return place.plain[feature.name]


def _compare(twin: Twin, feature: Feature, plain: Any) -> None:
    expected, requests = plain
    assert feature.observe(twin) == expected
    if feature.compares_requests:
        wait_until(lambda: len(twin.requests()) >= len(requests), 15, "all bodies have begun")
        assert twin.requests() == requests
