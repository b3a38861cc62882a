"""The matrix: features of Celery x brokers x somebody else holding the lock key or not. Tests and page are made from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import celery
import pytest
from features_of_canvas import CANVAS
from features_of_messages import MESSAGES, ROUTING
from features_of_results import RESULTS, WITHOUT_MESSAGE
from features_of_retries import RETRIES
from features_of_time import TIME
from matrix_axes import POLICIES, UNCONTENDED
from matrix_feature import cells_of
from matrix_place import messages_left
from matrix_twin import Twin, held, started_early
from nodes import wait_until

from celery_singleflight import lock

if TYPE_CHECKING:
    from matrix_feature import Feature

SECTIONS = [RETRIES, TIME, CANVAS, ROUTING, MESSAGES, RESULTS, WITHOUT_MESSAGE]


class NotTheSameError(AssertionError):
    """What is observed, or what a body sees of its request, is not what it is on a plain task."""


def cells(broker: str) -> list[tuple[Feature, str]]:
    """Return a feature and a situation for each test of a broker."""
    return list(cells_of(SECTIONS, broker))


def feature(name: str) -> Feature:
    """Return the feature of this name."""
    (found,) = [feature for section in SECTIONS for feature in section.features if feature.name == name]
    return found


def parameters(broker: str) -> list[Any]:
    """Return the cells of a broker as parameters of its test; one with a defect must fail."""
    return [
        pytest.param(
            feature,
            situation,
            id=f"{feature}-{situation}",
            marks=_marks(feature, feature.defect(broker, situation)),
        )
        for feature, situation in cells(broker)
    ]


def _marks(feature: Feature, defect: str | None) -> Any:
    if feature.old_celery and celery.VERSION < (5, 7):
        return pytest.mark.skip(reason=f"Celery before 5.7: {feature.old_celery}")
    return pytest.mark.xfail(strict=True, raises=NotTheSameError, reason=defect) if defect else ()


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


def check_that_nothing_is_left(place: Any) -> None:
    """Fail unless the broker, the worker and the store have soon done with every trigger."""
    wait_until(lambda: messages_left(place) == 0, 20, "no message is left")
    store = place.store()
    left: list[bytes] = []

    def is_clear() -> bool:
        left[:] = [*store.scan_iter("*:lease:*"), *store.scan_iter("*:due:*")]
        return not left

    try:
        wait_until(is_clear, 20)
    except AssertionError as error:
        raise AssertionError(f"left in the store: {left}") from error


def _on_plain(place: Any, feature: Feature) -> tuple[Any, Any]:
    """Return what is seen on a plain task, which is looked at once for all situations."""
    if feature.name not in place.plain:
        twin = Twin(place, "plain")
        observed = feature.observe(twin)
        place.plain[feature.name] = observed, twin.requests()
    return place.plain[feature.name]


def _compare(twin: Twin, feature: Feature, plain: Any) -> None:
    expected, requests = plain
    observed = feature.observe(twin)
    if observed != expected:
        raise NotTheSameError(f"observed {observed}, expected {expected}")
    if feature.compares_requests:
        wait_until(lambda: len(twin.requests()) >= len(requests), 15, "all bodies have begun")
        if twin.requests() != requests:
            raise NotTheSameError(_differences(twin.requests(), requests))


def _differences(seen: list[dict[str, Any]], expected: list[dict[str, Any]]) -> str:
    """Return what is not the same in the requests of bodies, fact by fact."""
    if len(seen) != len(expected):
        return f"{len(seen)} bodies began, expected {len(expected)}: {seen}"
    differ = [
        f"{ours['task']} sees {name} {ours[name]!r}, expected {theirs[name]!r}"
        for ours, theirs in zip(seen, expected, strict=True)
        for name in theirs
        if ours[name] != theirs[name]
    ]
    return "; ".join(differ)
