"""The axes of the matrix beside the features: brokers, and contention policies under which a trigger waits.

A policy that is added here gets its kind of each task of `twin_app`, its column in the page and its tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Policy:
    """A contention policy under which a trigger that meets contention runs later."""

    name: str
    #: How a trigger waits, for people to read.
    waits: str
    #: How often a trigger meets contention while its key stays held, at least; more than once where it looks again by itself.
    looks: int
    #: Options of the tasks beside the policy itself.
    options: dict[str, Any] = field(default_factory=dict)


POLICIES = {
    policy.name: policy
    for policy in [
        Policy("requeue", waits="is back with the broker, with a countdown", looks=2),
        Policy("queue", waits="is parked in the store, in line", looks=1),
    ]
}

#: Name in tests and declarations -> name on the page.
BROKERS = {"redis": "Redis", "rabbitmq": "RabbitMQ"}

UNCONTENDED = "uncontended"
SITUATIONS = (UNCONTENDED, *POLICIES)
