"""A small world in which triggers wait: the store on a clock of its own, a broker, and what has become of each trigger."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from fakeredis import FakeRedis, FakeServer
from record_states import Watch

from celery_singleflight.claims import Claim, Ended, Outcome, Record, Waits
from celery_singleflight.connection import ClientConnections
from celery_singleflight.keys import KeySpace, LockKey
from celery_singleflight.lease import Lease
from celery_singleflight.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterable

    from celery_singleflight.claims import Handout

LOCK_KEYS: Final = (LockKey("billing", 'billing["a"]'), LockKey("billing", 'billing["b"]'))
PARKING: Final = ("queue", "coalesce", "replace", "join")
#: Which policies the triggers of a world have.
MIXTURES: Final = (
    (*PARKING, "wait", "skip"),
    ("queue",),
    ("coalesce",),
    ("join",),
    ("replace",),
    ("queue", "join"),
    ("coalesce", "wait"),
)
TTL: Final = 30.0
MOST_SENT: Final = 12
_BEGIN: Final = 1_700_000_000.0


class Broken(AssertionError):
    """A promise is broken."""


class Message(NamedTuple):
    """What is on its way to a worker."""

    claim: Claim
    due: float


class Run(NamedTuple):
    """A body at work."""

    claim: Claim
    token: int


class Line(NamedTuple):
    """Those in line with their tickets, who is called and until when, who is held back, and how many places are free."""

    tickets: dict[str, float]
    called: dict[str, float]
    gathers: str
    is_unripe: bool
    free: int


class World:
    """What there is; what happens in it is for who walks through it."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.now = _BEGIN
        server = FakeServer()
        self.client = FakeRedis(server=server, decode_responses=True)
        connections = ClientConnections(lambda: FakeRedis(server=server), spans_slots=True)
        self.watch = Watch(connections, self.client, lambda: self.now_ms)
        self.store = Store(self.watch, KeySpace("sf"))
        self.policies = self.dice.choice(MIXTURES)
        self.limit = self.dice.choice((1, 1, 1, 2))
        self.faults = self.dice.choice((0.0, 0.05, 0.2))
        self.queue: list[Message] = []
        self.runs: list[Run] = []
        #: The message of each trigger as its own code has sent it last.
        self.sent: dict[str, Claim] = {}
        #: What Celery was told of each trigger.
        self.outcomes: dict[str, Outcome] = {}
        self.succeeded: set[str] = set()
        #: What has happened, to be read when something is broken.
        self.story: list[str] = []

    @property
    def now_ms(self) -> int:
        """The time as the scripts see it."""
        return round(self.now * 1_000_000) // 1000

    def new_id(self) -> str:
        return UUID(int=self.dice.getrandbits(128)).hex

    def chance(self, odds: float) -> bool:
        return self.dice.random() < odds

    def fault(self) -> bool:
        return self.chance(self.faults)

    def tell(self, *what: object) -> None:
        self.story.append(f"{self.now - _BEGIN:9.3f} {' '.join(map(str, what))}")

    def new_claim(self, task_id: str) -> Claim:
        """A trigger as it is sent, with a policy of this world."""
        policy = self.dice.choice(self.policies)
        which = self.dice.choice(("newest", "first", "merged")) if policy == "coalesce" else ""
        delay = self.dice.choice((0.0, 0.0, 3.0)) if policy == "coalesce" else 0.0
        key = self.dice.choice((None, None, None, "k1", "two\nlines"))
        return Claim(
            record=Record(self.dice.choice((LOCK_KEYS[0], LOCK_KEYS[0], LOCK_KEYS[1])), task_id, key),
            owner="",
            worker="w",
            run_id="",
            limit=self.limit,
            ttl=TTL,
            keep=600.0,
            on_held=policy,
            wait=self.dice.choice((None, None, 40.0)),
            grace=5.0,
            message=task_id.encode(),
            task="shop.bill",
            max_deliveries=self.dice.choice((None, 2)),
            waits=Waits(digest=self.dice.choice("de") if policy == "join" else "", which=which, delay=delay, within=delay * 3),
        )

    def lease(self, run: Run) -> Lease:
        return Lease(
            run.claim.record.lock_key,
            owner=run.claim.owner,
            token=run.token,
            limit=self.limit,
            ttl=TTL,
            max_hold=3600.0,
            requested_at=0.0,
        )

    def publish(self, calls: Iterable[Handout]) -> None:
        """Publish what the store has told to, or die before it."""
        for call in calls:
            if self.fault():
                self.tell("  not published", call.message)
                continue
            # By a merge, the last one in it is the trigger whose message it is.
            first = self.sent[call.message.decode().rpartition("+")[2]]
            copy = {"copy": self.new_id(), "previous": call.copy, "first_ms": call.first_ms, "message": call.message}
            self.tell("  published", call.message)
            self.queue.append(Message(first._replace(**copy), self.now))

    def answer(self, claim: Claim, ended: Ended) -> None:
        """Tell Celery how a trigger has ended, or die before it. Raises `Broken` when it has been told before."""
        task_id = claim.record.task_id
        if ended.settled or self.fault():
            return
        if task_id in self.outcomes:
            raise Broken(f"{task_id} was {self.outcomes[task_id]}, and is answered again: {ended.outcome}")
        self.outcomes[task_id] = ended.outcome
        self.store.settle([(claim.record, claim.owner, True)])

    # What always holds

    def kept(self, key: LockKey) -> dict[str, set[str]]:
        """The members of what is kept of those who wait for a lock key."""
        names = self.store.keys.lock(key)._asdict()
        found: dict[str, Any] = {
            kind: self.client.zrange(names[kind], 0, -1) for kind in ("line", "called", "followers", "due")
        }
        found["parked"] = self.client.hkeys(names["parked"])
        return {kind: set(members) for kind, members in found.items()}

    def check(self) -> None:
        """Raise `Broken` when somebody can be forgotten, or too many hold a lock key."""
        for key in LOCK_KEYS:
            kept = self.kept(key)
            line, followers, parked = kept["line"], kept["followers"], kept["parked"]
            wrong = {
                "called, not in line": kept["called"] - line,
                "in line, and following": line & followers,
                "waits without a message": (line | followers) - parked,
                "nobody looks after": parked - kept["due"],
                "nobody attends to": {key.text} if line and f"\n{key.text}" not in kept["due"] else set(),
            }
            for what, members in wrong.items():
                if members:
                    raise Broken(f"{what}: {sorted(members)}")
            lines = self.client.hgetall(self.store.keys.lock(key).lease).values()
            if sum(float(line.split("\n")[0]) > self.now_ms for line in lines) > self.limit:
                raise Broken(f"too many hold {key}")

    def line(self, key: LockKey) -> Line:
        names, now = self.store.keys.lock(key), self.now_ms
        gathers, ripe = self.client.hmget(names.pace, "gathers", "ripe_ms")
        held = sum(float(line.split("\n")[0]) > now for line in self.client.hgetall(names.lease).values())
        tickets, called = (dict(self.client.zrange(name, 0, -1, withscores=True)) for name in (names.line, names.called))
        return Line(tickets, called, gathers or "", float(ripe or 0) > now, self.limit - held)

    def check_order(self, claim: Claim, before: Line) -> None:
        """Raise `Broken` when a trigger that has entered has passed somebody."""
        member = claim.record.member
        if member not in before.tickets and claim.on_held == "coalesce" and before.gathers in before.tickets:
            member = before.gathers  # whose place it has taken
        ticket = before.tickets.get(member, float("inf"))
        earlier = {other for other, its in before.tickets.items() if its < ticket}
        reserved = {other for other in earlier if before.called.get(other, 0) > self.now_ms}
        waiting = earlier - before.called.keys() - ({before.gathers} if before.is_unripe else set())
        if len(reserved) >= before.free or (waiting and member not in before.called):
            raise Broken(f"{claim.record.task_id} passes {sorted(reserved | waiting)}")

    def check_over(self) -> None:
        """Raise `Broken` when a trigger has no outcome, or something is left of waiting."""
        missing = self.sent.keys() - self.outcomes.keys()
        if missing:
            raise Broken(f"never ended: {sorted(missing)}")
        for key in LOCK_KEYS:
            kept = self.kept(key)
            due = kept.pop("due")
            if any(kept.values()) or f"\n{key.text}" in due:
                raise Broken(f"left of {key}: {kept} {due}")
            if self.client.pttl(self.store.keys.lock(key).pace) == -1:
                raise Broken(f"the pace of {key} stays")
