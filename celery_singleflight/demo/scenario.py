"""The burst: which triggers come when. Pure data, the same for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ("Trigger", "burst")


@dataclass(frozen=True, slots=True)
class Trigger:
    """One request that a task should run, `at` seconds after the start."""

    at: float
    #: Where it comes from, for people to read.
    source: str
    task: str
    kwargs: dict[str, Any]
    #: What must not overlap.
    key: str
    #: What must not happen twice; empty where each run is work of its own.
    unit: str = ""
    #: The execution key given with the call, as the sender of a webhook gives its event id.
    execution_key: str | None = None

    @property
    def stalls(self) -> bool:
        """Whether its first run stops in the middle, to be killed there."""
        return bool(self.kwargs.get("stalls"))


def burst(seed: int) -> list[Trigger]:
    """Return the triggers in the order of their times. Duplicates have equal arguments, as real ones do."""
    chance = random.Random(seed)  # noqa: S311, no secret depends on it
    triggers = [*_settlements(chance), *_charges(chance), *_webhooks(chance), *_syncs(chance)]
    return sorted(triggers, key=lambda trigger: trigger.at)


def _settlements(chance: random.Random) -> Iterator[Trigger]:
    """Two beats run after a deploy that forgot the old one; an operator and a late correction come on top."""

    def settle(at: float, source: str, tenant: int, day: str) -> Trigger:
        kwargs = {"tenant": tenant, "day": day, "seconds": seconds[tenant]}
        return Trigger(at, source, "settle", kwargs, f"tenant {tenant}", f"settlement of tenant {tenant}, {day}")

    tenants = chance.sample(range(10, 99), 3)
    seconds = {tenant: round(chance.uniform(1.3, 1.8), 2) for tenant in tenants}
    for n, tenant in enumerate(tenants):
        yield settle(0.3 + 0.1 * n, "beat", tenant, "30 November")
        yield settle(0.4 + 0.1 * n + chance.uniform(0.0, 0.1), "second beat", tenant, "30 November")
    yield settle(1.3, "late correction", tenants[0], "29 November")
    yield settle(3.0, "operator", tenants[1], "30 November")


def _charges(chance: random.Random) -> Iterator[Trigger]:
    """Impatient customers click twice and more. One charge is killed in the middle, and another waits behind it."""

    def charge(at: float, source: str, customer: int, order: int, **more: Any) -> Trigger:
        kwargs = {"customer": customer, "order": order, "seconds": seconds[order], **more}
        return Trigger(at, source, "charge", kwargs, f"customer {customer}", f"charge of order {order}")

    twice, thrice, unlucky = chance.sample(range(100, 999), 3)
    first, second, killed, behind = orders = chance.sample(range(7000, 7999), 4)
    seconds = {order: round(chance.uniform(0.9, 1.3), 2) for order in orders}
    for source, at in (("click", 0.7), ("double click", 0.7 + chance.uniform(0.1, 0.2))):
        yield charge(at, source, twice, first)
    for source, at in (("click", 3.2), ("double click", 3.35), ("third click", 3.35 + chance.uniform(0.1, 0.4))):
        yield charge(at, source, thrice, second)
    yield charge(1.5, "click", unlucky, killed, stalls=True)
    yield charge(2.6, "click", unlucky, behind)


def _webhooks(chance: random.Random) -> Iterator[Trigger]:
    """A payment provider delivers each event until it is sure, each time with the same event id."""
    for n in range(2):
        order, event = chance.randrange(8000, 8999), f"evt_{chance.randrange(1 << 20):05x}"
        kwargs = {"order": order, "event": event, "seconds": round(chance.uniform(0.7, 1.0), 2)}
        for source, later in (("webhook", 0.0), ("redelivery", 0.4), ("redelivery", 3.0)):
            at = 1.8 + 0.6 * n + later
            yield Trigger(at, source, "credit", kwargs, f"order {order}", f"credit of {event}", event)


def _syncs(chance: random.Random) -> Iterator[Trigger]:
    """Beat is more eager than the vendors are fast."""
    for n, vendor in enumerate(chance.sample(range(1, 9), 2)):
        kwargs = {"vendor": vendor, "seconds": round(chance.uniform(1.5, 1.9), 2)}
        for tick in range(6 - n):
            yield Trigger(0.6 + 0.3 * n + 0.9 * tick, "beat", "sync", kwargs, f"vendor {vendor}")
