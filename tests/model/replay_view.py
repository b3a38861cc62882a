"""What the real store keeps, and what it should keep by the model, in the same words."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from model_state import FIRST, NOBODY, NONE, Line, Record as Facts

from celery_singleflight.claims import Record
from celery_singleflight.custody import GRACE
from celery_singleflight.keys import LockKey

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster import Keyspace
    from model_config import Config
    from model_state import State

    from celery_singleflight.store import Store

LOCK: Final = LockKey.of("billing", ["acct_1"])


class View:
    """The keys of one lock key, read and edited from outside."""

    def __init__(self, store: Store, keyspace: Keyspace, config: Config) -> None:
        self.store = store
        self.keyspace = keyspace
        self.config = config
        self.counts_deaths = config.max_deliveries is not None
        self.records = [Record(LOCK, f"t{trigger}", key) for trigger, key in enumerate(config.keys)]
        self.names = store.keys.lock(LOCK)
        names = [store.names(record) for record in self.records]
        executions = {config.rules.execution(trigger): name["execution"] for trigger, name in enumerate(names)}
        self.places = [name["trigger"] for name in names]
        self.places += [executions[place] for place in range(len(names), config.rules.places)]
        self.tokens: dict[int, int] = {}

    # What is kept.

    def look(self) -> dict[str, Any]:
        client, now, names = self.keyspace.client, self.keyspace.now_ms(), self.names
        asked = client.pipeline(transaction=False)
        asked.hgetall(names.lease)
        asked.get(names.fence)
        asked.zrange(names.due, 0, -1)
        for place in self.places:
            asked.hgetall(place)
        lease, fence, due, *records = asked.execute()
        held = {owner: line.split("\n") for owner, line in sorted(lease.items())}
        found = {
            "lease": {owner: (int(line[0]) > now, int(line[2])) for owner, line in held.items()},
            "fence": int(fence or 0),
            "due": sorted(due),
            "records": [self.facts(record, now) for record in records],
        }
        if self.config.parks:
            groups = [line[4] for line in held.values()] + [record.get("group") for record in records]
            found["waits"] = self.waits(now, groups)
        return found

    def waits(self, now: int, groups: list[str | None]) -> dict[str, Any]:
        client, names = self.keyspace.client, self.names
        asked = client.pipeline(transaction=False)
        asked.hgetall(names.pace)
        asked.pttl(names.pace)
        asked.zrange(names.line, 0, -1)
        asked.zrange(names.called, 0, -1, withscores=True)
        asked.hgetall(names.parked)
        asked.zrange(names.followers, 0, -1, withscores=True)
        asked.llen(names.baton)
        pace, ttl, line, called, parked, followers, baton = asked.execute()
        waiters = {member: (json.loads(head), message) for member, (head, message) in _split(parked)}
        groups = groups + [about.get("group") for about, _ in waiters.values()] + [score for _, score in sorted(followers)]
        return {
            "line": line,
            "called": {member: until > now for member, until in called},
            "parked": {
                member: (
                    about["copy"],
                    about["by"],
                    _generation(message),
                    about["kind"],
                    about.get("leader", ""),
                    "again" in about,
                )
                for member, (about, message) in waiters.items()
            },
            "followers": sorted(member for member, _ in followers),
            "groups": _pattern(groups),
            "lingers": (pace.get("lingers", ""), float(pace.get("lingers_until", 0)) > now),
            "baton": baton > 0,
            "gathers": pace.get("gathers", ""),
            "joins": {name.removeprefix("join:"): member for name, member in pace.items() if name.startswith("join:")},
            "knows_hold": "hold_ms" in pace,
            "no_slot": float(pace.get("no_slot_until", 0)) > now,
            "pace": "lasts" if ttl == -1 else "goes" if ttl >= 0 else "",
            "ended": [name for name in pace if name.startswith("ended:")],
        }

    def facts(self, record: dict[str, str], now: int) -> dict[str, Any]:
        owner, outcome = record.get("owner") or "", record.get("outcome", "")
        facts = {
            "owner": owner,
            "is_live": bool(owner) and int(record["until_ms"]) > now,
            "token": int(record["fence"]) if owner else 0,
            "has_attempt": "attempt" in record,
            "has_run": "has_run" in record,
            "runs": record.get("task_id", ""),
            "run_generation": int(record.get("run_generation", NONE)),
            "generation": int(record.get("generation", NONE)),
            "copy": record.get("copy"),
            "outcome": outcome,
            "by": record.get("by", ""),
            "is_fresh": bool(outcome) and now - int(record["ended_ms"]) < GRACE * 1000,
            "is_settled": "settled" in record,
            "message": _generation(record.get("message", "")),
            "left_by": record.get("left_by", ""),
            "concluded_by": record.get("concluded_by", ""),
            "is_parked": "parked" in record,
            "led_by": record.get("led_by", ""),
        }
        if self.counts_deaths:
            facts["died"] = int(record.get("died", 0))
        return facts

    # What the model says.

    def expected(self, state: State) -> dict[str, Any]:
        store = state.store
        due = [record.member for record, is_due in zip(self.records, store.due, strict=True) if is_due]
        expected = {
            "lease": {owner_name(line.owner): (line.is_live, self.token(line)) for line in store.lease},
            "fence": self.tokens[state.given[1]] if store.fence else 0,
            "due": sorted([*due, *([f"\n{LOCK.text}"] if store.waits.is_attended else [])]),
            "records": [self.expected_facts(record) for record in store.records],
        }
        if self.config.parks:
            expected["waits"] = self.expected_waits(state)
        return expected

    def expected_waits(self, state: State) -> dict[str, Any]:
        waits, member = state.store.waits, self.member
        groups = [line.group for line in sorted(state.store.lease, key=lambda line: owner_name(line.owner))]
        groups += [record.group for record in state.store.records]
        groups += [waiter.group for waiter in waits.parked] + [group for _, group in waits.followers]
        return {
            "line": [member(trigger) for trigger in waits.line],
            "called": {member(trigger): is_reserved for trigger, is_reserved in waits.called},
            "parked": {
                member(waiter.trigger): (
                    copy_name(waiter.copy),
                    owner_name(waiter.by),
                    waiter.generation,
                    waiter.kind,
                    member(waiter.leader),
                    waiter.again,
                )
                for waiter in waits.parked
            },
            "followers": [member(trigger) for trigger, _ in waits.followers],
            "groups": _pattern(groups),
            "lingers": (member(waits.lingers), waits.is_lingering),
            "baton": waits.has_baton,
            "gathers": member(waits.gathers),
            "joins": {digest: member(trigger) for digest, trigger in waits.joins},
            "knows_hold": waits.knows_hold,
            "no_slot": waits.no_slot,
            "pace": waits.pace,
            "ended": [],
        }

    def member(self, trigger: int) -> str:
        return "" if trigger == NONE else self.records[trigger].member

    def token(self, holder: Line | Facts) -> int:
        return self.tokens.get(holder.ticket[1], 0)

    def expected_facts(self, record: Facts) -> dict[str, Any]:
        facts: dict[str, Any] = record._asdict()
        for name in ("owner", "by", "left_by", "concluded_by"):
            facts[name] = owner_name(facts[name])
        facts["token"] = self.token(record) if record.owner != NOBODY else 0
        facts["runs"] = "" if record.runs == NONE else f"t{record.runs}"
        facts["copy"] = None if record.copy == NONE else copy_name(record.copy)
        facts["led_by"] = self.member(record.led_by)
        del facts["ticket"], facts["group"]
        if not self.counts_deaths:
            del facts["died"]
        return facts


def owner_name(number: int) -> str:
    return "" if number == NOBODY else f"owner {number}"


def copy_name(number: int) -> str:
    return "" if number in (FIRST, NONE) else f"copy {number}"


def _split(parked: dict[str, str]) -> Iterable[tuple[str, list[str]]]:
    return ((member, stored.split("\n", 1)) for member, stored in sorted(parked.items()))


def _generation(message: str) -> int:
    return int(message.split()[1]) if message else NONE


def _pattern(groups: Iterable[Any]) -> list[int]:
    """Which groups are the same, whatever their names."""
    names: list[float] = []
    pattern = []
    for group in groups:
        name = float(group or 0)
        if name and name not in names:
            names.append(name)
        pattern.append(names.index(name) + 1 if name else 0)
    return pattern
