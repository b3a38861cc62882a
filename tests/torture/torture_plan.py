"""The plan of a torture run, made from its seed and nothing else: what is triggered, and what goes wrong, when."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

#: What each class of fault does; the names under which verdicts are given.
FAULTS = {
    "kill child": "SIGKILL of a pool process, mostly one with a body in it",
    "kill worker": "SIGKILL of a whole worker, or of its main process only; started again after a while",
    "stop child": "SIGSTOP of a pool process for longer than its lease, then SIGCONT",
    "warm shutdown": "SIGTERM to a worker; started again when it has gone",
    "cut": "all connections to the store are cut, once or several times",
    "short stall": "the store is not heard for less than a lease",
    "long stall": "the store is not heard for longer than a lease",
    "script flush": "SCRIPT FLUSH",
    "store restart": "SIGKILL of the store, and a new one that reads what it has written",
    "empty restart": "SIGKILL of the store, and a new one that has nothing",
    "flushall": "FLUSHALL",
    "time limit": "bodies that meet their hard time limit",
    "duplicates": "messages are delivered again: every one that is out, or single ones",
    "broker cut": "all connections to the broker are cut",
}
#: Kinds of triggers and how many of a hundred.
KINDS = {"work": 30, "paid": 24, "chain": 12, "flaky": 8, "limited": 10, "skip": 8, "fail": 3, "deaf": 5}


@dataclass(frozen=True)
class Planned:
    """One trigger: published so many seconds after the start."""

    at: float
    id: str
    kind: str
    key: str
    seconds: float
    early: bool
    execution: str = ""
    tail: str = ""
    #: Seconds between the record of its outcome and what Celery does then.
    linger: float = 0.0


@dataclass(frozen=True)
class Fault:
    """One fault: so many seconds after the start. What it hits is drawn from what is there then, with `dice`."""

    at: float
    kind: str
    seconds: float
    dice: tuple[float, float]


@dataclass(frozen=True)
class Plan:
    triggers: tuple[Planned, ...]
    faults: tuple[Fault, ...]

    def digest(self) -> str:
        return sha256(repr(asdict(self)).encode()).hexdigest()[:12]


def make_plan(seed: int, seconds: float, kinds: list[str], *, rate: float, keys: int, ttl: float, gap: float) -> Plan:
    """Return the plan for a run of so many seconds, with faults of these kinds every `gap` seconds or so."""
    triggers = _triggers(random.Random(f"triggers {seed}"), seconds, rate=rate, keys=keys)
    faults = _faults(random.Random(f"faults {seed}"), seconds, kinds, ttl=ttl, gap=gap)
    extra = random.Random(f"overruns {seed}")
    for fault in faults:
        if fault.kind == "time limit":
            for _ in range(3):
                key = f"k{extra.randrange(keys)}"
                triggers.append(Planned(fault.at + extra.uniform(0, 0.3), _id(extra), "overrun", key, 6.0, early=False))
    return Plan(tuple(sorted(triggers, key=lambda each: each.at)), tuple(faults))


def _triggers(chance: random.Random, seconds: float, *, rate: float, keys: int) -> list[Planned]:
    found: list[Planned] = []
    paid: list[Planned] = []
    at = 0.5
    while at < seconds:
        kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
        # A few keys are hot, most are not.
        key = chance.randrange(4) if chance.random() < 0.2 else chance.randrange(keys)
        long = chance.random() < 0.12 or kind == "deaf"
        planned: dict[str, Any] = {
            "at": at,
            "id": _id(chance),
            "kind": kind,
            "key": f"k{key}" if kind != "limited" else f"l{key % 5}",
            "seconds": round(chance.uniform(0.5, 3.0) if long else chance.uniform(0.0, 0.06), 3),
            "early": chance.random() < 0.5,
        }
        tail, again, other = _id(chance), chance.random() < 0.45, chance.random() < 0.2
        before = chance.choice(paid[-30:]) if paid else None
        lingers, linger = chance.random() < 0.2, round(chance.uniform(0.2, 1.2), 3)
        if kind in ("chain", "paid") and lingers:
            planned["linger"] = linger
        if kind == "chain":
            planned["tail"] = tail
        if kind == "paid":
            planned["execution"] = f"invoice-{planned['id'][:8]}"
            if again and before:
                planned["execution"] = before.execution
                planned["key"] = planned["key"] if other else before.key
            paid.append(Planned(**planned))
        found.append(Planned(**planned))
        at += chance.uniform(0.6, 1.4) / rate
    return found


def _faults(chance: random.Random, seconds: float, kinds: list[str], *, ttl: float, gap: float) -> list[Fault]:
    lasts = {
        "kill child": (0.0, 0.0),
        "kill worker": (1.5, 4.0),
        "stop child": (1.8 * ttl, 3.0 * ttl),
        "cut": (0.1, 1.0),
        "short stall": (0.1 * ttl, 0.6 * ttl),
        "long stall": (1.3 * ttl, 2.5 * ttl),
        "store restart": (0.1, 1.5),
        "empty restart": (0.1, 1.5),
    }
    faults: list[Fault] = []
    bag: list[str] = []
    at = 2.0
    while kinds and at < seconds - 0.5:
        if not bag:
            bag = list(kinds)
            chance.shuffle(bag)
        kind = bag.pop()
        length = round(chance.uniform(*lasts.get(kind, (0.0, 0.0))), 2)
        faults.append(Fault(round(at, 2), kind, length, (chance.random(), chance.random())))
        at += chance.uniform(0.5, 1.5) * gap
    return faults


def _id(chance: random.Random) -> str:
    text = f"{chance.getrandbits(128):032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
