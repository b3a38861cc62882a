"""What the store keeps of those who wait for a lock key, and how tests bring them there one after the other."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from nodes import redis_settings, wait_until

from celery_singleflight import lock

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The lock name that most tasks of `waiting_app` share.
LOCK_NAME = "protected_app.work"


def settings_apart(url: str, **more: Any) -> dict[str, Any]:
    """Settings of a place of whose triggers no other place knows: its sweepers would publish them to their own broker."""
    return redis_settings(url, singleflight_key_prefix=uuid4().hex[:8], **more)


def name_of(place: Any, kind: str, key: str) -> bytes | None:
    """The store's name for something of a lock key, of whatever lock name; None when there is none."""
    store, end = place.store(), f'["{key}"]'.encode()
    return next((name for name in store.scan_iter(f"*:{kind}:*", count=1000) if name.endswith(end)), None)


def parked(place: Any, key: str) -> set[str]:
    """The ids of all who wait for a lock key in the store, in line or for the outcome of another."""
    name = name_of(place, "parked", key)
    return set() if name is None else {member.decode().partition("\n")[0] for member in place.store().hkeys(name)}


def line(place: Any, key: str) -> list[str]:
    """The ids of those who are in line, in order."""
    name = name_of(place, "line", key)
    return [] if name is None else [member.decode().partition("\n")[0] for member in place.store().zrange(name, 0, -1)]


def remember_short_runs(place: Any, key: str, hold_ms: int = 90) -> None:
    """Let the store have seen short runs for a lock key for which somebody waits or has waited."""
    name = name_of(place, "pace", key)
    assert name is not None, f"nobody has waited for {key}"
    place.store().hset(name, "hold_ms", hold_ms)


def messages_in_custody(place: Any, key: str) -> list[dict[str, Any]]:
    """What the store notes of each who waits."""
    name = name_of(place, "parked", key)
    return [] if name is None else [json.loads(value.partition(b"\n")[0]) for value in place.store().hvals(name)]


def attention_at(place: Any, key: str) -> float:
    """When a sweeper looks at the lock key, in ms of the store's time; 0 when none does."""
    store, end = place.store(), f'["{key}"]'.encode()
    for name in store.scan_iter("*:due:*", count=1000):
        for member, score in store.zrange(name, 0, -1, withscores=True):
            if member.startswith(b"\n") and member.endswith(end):
                return float(score)
    return 0.0


def park(place: Any, key: str, signature: Any, **options: Any) -> Any:
    """Publish a trigger and wait until the store has it. Returns its result."""
    result = signature.apply_async(**options)
    wait_until(lambda: result.id in parked(place, key), 20, f"{result.id} waits for {key}")
    return result


def park_all(place: Any, key: str, signatures: list[Any]) -> list[Any]:
    """Publish triggers, each when the one before has its place."""
    return [park(place, key, signature) for signature in signatures]


@contextmanager
def held(place: Any, key: str, name: str = LOCK_NAME, lease_ttl: float = 30.0) -> Iterator[None]:
    """Hold a lock key in the tests' own process; whoever waits is called at the end of the block.

    No sweeper calls anybody before the lease has ended.
    """
    with lock(place.app, name, key, lease_ttl=lease_ttl):
        yield


def deliveries(place: Any, result: Any) -> int:
    """How often workers have received the message of a trigger, or a copy of it."""
    return place.logs().count(f"[{result.id}] received")


def values(place: Any, key: str) -> list[Any]:
    """What the bodies that ran for a key were called with, in order."""
    return [row.get("value") for row in place.ledger.runs(key)]


def get_all(results: list[Any], timeout: float = 40.0) -> list[Any]:
    return [result.get(timeout=timeout) for result in results]
