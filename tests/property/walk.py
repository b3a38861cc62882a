"""A walk through a small world in which triggers wait: deliveries, deaths, lost replies and time, all at random by a seed.

python tests/property/walk.py 1000         that many walks, beginning with seed 0
python tests/property/walk.py 1 4711       one, of that seed, step by step
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any, Final, NamedTuple
from uuid import UUID

from fakeredis import FakeRedis, FakeServer

from celery_singleflight.claims import (
    Acquired,
    Claim,
    Encoded,
    Ended,
    Finished,
    Held,
    Led,
    Linger,
    Merge,
    Outcome,
    Parked,
    Record,
    Refused,
    Surplus,
    Waits,
)
from celery_singleflight.connection import ClientConnections
from celery_singleflight.errors import ExecutionKeyReused
from celery_singleflight.keys import KeySpace, LockKey
from celery_singleflight.lease import Lease
from celery_singleflight.store import Store

LOCK_KEYS: Final = (LockKey("billing", 'billing["a"]'), LockKey("billing", 'billing["b"]'))
POLICIES: Final = ("queue", "coalesce", "replace", "join", "wait", "skip")
TTL: Final = 30.0
STEPS: Final = 120
#: Generations between two replacements of a trigger by its own code.
RETRIES: Final = 1 << 20
#: Which worlds to make, beside one of all policies.
MIXED: Final = (POLICIES, ("queue",), ("coalesce",), ("join",), ("replace",), ("queue", "join"), ("coalesce", "wait"))


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


class World:
    """The store, a broker, workers, and what has become of each trigger."""

    def __init__(self, seed: int, *, is_told: bool = False) -> None:
        self.dice = random.Random(seed)
        self.is_told = is_told
        self.now = 1_700_000_000.0
        server = FakeServer()
        self.client = FakeRedis(server=server, decode_responses=True)
        self.store = Store(ClientConnections(lambda: FakeRedis(server=server), spans_slots=True), KeySpace("sf"))
        self.policies = self.dice.choice(MIXED)
        self.limit = self.dice.choice((1, 1, 1, 2))
        self.faults = self.dice.choice((0.0, 0.05, 0.2))
        self.queue: list[Message] = []
        self.runs: list[Run] = []
        self.sent: dict[str, Claim] = {}
        #: What Celery was told of each trigger, and how often a body has ended well for it.
        self.outcomes: dict[str, Outcome] = {}
        self.merges: dict[str, set[str]] = {}
        self.successes: dict[str, int] = {}
        self.done_in: dict[str, int] = {}

    # Chance

    def new_id(self) -> str:
        return UUID(int=self.dice.getrandbits(128)).hex

    def chance(self, odds: float) -> bool:
        return self.dice.random() < odds

    def fault(self) -> bool:
        return self.chance(self.faults)

    def tell(self, *what: object) -> None:
        if self.is_told:
            print(f"{self.now - 1_700_000_000:9.3f}", *what)

    # What happens

    def step(self) -> None:
        act = self.dice.choices(
            (self.send, self.deliver, self.end, self.die, self.pass_time, self.sweep, self.revoke, self.renew),
            (4, 10, 6, 1 if self.faults else 0, 4, 3, 0.4, 1),
        )[0]
        act()
        self.check()

    def send(self) -> None:
        if len(self.sent) >= 12:
            return
        task_id = f"t{len(self.sent)}"
        policy = self.dice.choice(self.policies)
        which = self.dice.choice(("newest", "first", "merged")) if policy == "coalesce" else ""
        delay = self.dice.choice((0.0, 0.0, 3.0)) if policy == "coalesce" else 0.0
        key = self.dice.choice((None, None, None, "k1", "two\nlines"))
        self.sent[task_id] = claim = Claim(
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
        self.tell("send", task_id, policy, which, delay, claim.record.lock_key.text, key)
        self.queue.append(Message(claim, self.now))

    def publish(self, calls: Any) -> None:
        for call in calls:
            if self.fault():
                self.tell("  not published", call.message)
                continue
            ids = call.message.decode().split("+")
            first = self.sent[ids[-1]]
            claim = first._replace(
                copy=self.new_id(),
                previous=call.copy,
                first_ms=call.first_ms,
                message=call.message,
                generation=self.generation(ids[-1], call.copy),
            )
            self.tell("  published", call.message)
            self.queue.append(Message(claim, self.now))

    def generation(self, task_id: str, _: str) -> int:
        return self.sent[task_id].generation

    def deliver(self) -> None:
        here = [message for message in self.queue if message.due <= self.now]
        if not here:
            return
        message = here[0] if self.chance(0.7) else self.dice.choice(here)
        if not self.fault():
            self.queue.remove(message)  # else it will be delivered again
        claim = message.claim._replace(owner=self.new_id())
        claim = claim._replace(run_id=claim.owner)
        self.tell("deliver", claim.message, claim.copy[:4], claim.generation)
        may_linger = self.chance(0.5)
        own = claim
        for _ in range(50):
            linger = 0.4 if may_linger and claim.on_held in POLICIES[:4] else 0.0
            asked = claim._replace(waits=claim.waits._replace(linger=linger))
            try:
                if self.fault():
                    self.store.enter(asked)
                answer = self.store.enter(asked)
            except ExecutionKeyReused:
                raise AssertionError("one task only") from None
            self.tell("  ", answer)
            if self.fault() and self.chance(0.2):
                self.tell("   cannot hear the answer")
                self.publish(self.store.abandon(claim.owner, claim.record))
                self.queue.append(Message(own, self.now + 1.0))
                return
            if self.fault() and self.chance(0.3):
                self.tell("   dies")
                self.leave_message(claim, answer)
                return
            if isinstance(answer, Linger):
                self.publish(answer.calls)
                self.pass_time(self.dice.random() * 0.2)
                if self.chance(0.4):
                    for run in list(self.runs):
                        self.end(run)
                may_linger = self.chance(0.5)
            elif isinstance(answer, Merge):
                if not answer.by:
                    claim = own
                else:
                    waits = own.waits._replace(merged_with=answer.by, merged_copy=answer.copy)
                    claim = own._replace(message=answer.message + b"+" + self.own_part(own), waits=waits)
                if self.chance(0.3):
                    self.end()
            elif isinstance(answer, Led):
                ended = self.store.follow(claim, answer.by)
                self.tell("  ", ended)
                if ended is not None:
                    self.publish(ended.calls)
                    self.answer(claim, ended)
                    return
            else:
                self.take(claim, answer)
                return
        raise Broken(f"{claim.record.task_id} asks for ever")

    def own_part(self, claim: Claim) -> bytes:
        return claim.record.task_id.encode()

    def leave_message(self, claim: Claim, answer: Any) -> None:
        """A process died: as the worker's main process does it, or nobody does."""
        if self.chance(0.5):
            self.publish(self.store.abandon(claim.owner, claim.record, again=5.0, died=True))
        elif not isinstance(answer, Acquired | Parked | Linger):
            self.queue.append(Message(claim, self.now + 1.0))

    def take(self, claim: Claim, answer: Any) -> None:
        if isinstance(answer, Acquired):
            self.begin(claim, answer)
            self.publish(answer.calls)
        elif isinstance(answer, Ended):
            self.publish(answer.calls)
            self.answer(claim, answer)
        elif isinstance(answer, Held):
            again = claim._replace(copy=self.new_id(), previous=claim.copy, first_ms=answer.first_ms)
            self.queue.append(Message(again, self.now + self.dice.random() * 3))
        elif isinstance(answer, Parked):
            self.publish(answer.calls)
        else:
            assert isinstance(answer, Surplus)

    def begin(self, claim: Claim, acquired: Acquired) -> None:
        task_id = claim.record.task_id
        if task_id in self.outcomes:
            raise Broken(f"{task_id} runs after its end")
        if self.successes.get(task_id):
            raise Broken(f"{task_id} runs after it has succeeded")
        self.runs.append(Run(claim, acquired.token))

    def answer(self, claim: Claim, ended: Ended) -> None:
        task_id = claim.record.task_id
        if ended.settled:
            return
        if self.fault():
            return  # it dies with the answer; somebody else gives it later
        if task_id in self.outcomes:
            if self.outcomes[task_id] is not ended.outcome:
                raise Broken(f"{task_id} was {self.outcomes[task_id]}, and is {ended.outcome}")
            raise Broken(f"{task_id} is answered twice: {ended.outcome}")
        self.outcomes[task_id] = ended.outcome
        self.store.settle([(claim.record, claim.owner, True)])

    def end(self, run: Run | None = None) -> None:
        if run is None:
            if not self.runs:
                return
            run = self.dice.choice(self.runs)
        self.runs.remove(run)
        claim, record = run.claim, run.claim.record
        ways = ("succeed", "fail", "retry", "goes elsewhere", "replaced", "reject")
        way = self.dice.choices(ways, (6, 2, 1, 0.3, 0.3, 0.3))[0]
        self.tell("end", record.task_id, way)
        if way == "retry":
            self.send_on(claim, claim.generation + 1)
            return
        if way == "goes elsewhere":
            self.send_on(claim, (claim.generation // RETRIES + 1) * RETRIES)
            return
        if way == "reject":
            self.publish(self.store.abandon(claim.owner, record))
            self.queue.append(Message(claim, self.now))
            return
        outcome = {"succeed": Outcome.SUCCEEDED, "fail": Outcome.FAILED, "replaced": Outcome.REPLACED}[way]
        lease = Lease(
            record.lock_key, owner=claim.owner, token=run.token, limit=self.limit, ttl=TTL, max_hold=3600.0, requested_at=0.0
        )
        value = Encoded("application/json", "utf-8", record.task_id.encode())
        how: dict[str, Any] = {"reason": "[]", "keep": 600.0, "hold": self.dice.choice((0.0, 0.0, 1.0))}
        if self.fault():
            self.store.finish(lease, record, outcome, value, **how)
        answer = self.store.finish(lease, record, outcome, value, **how)
        self.tell("  ", answer)
        if isinstance(answer, Refused):
            self.queue.append(Message(claim._replace(copy=self.new_id(), previous=claim.copy), self.now + 2.0))
            self.publish(self.store.abandon(claim.owner, record))
            return
        assert isinstance(answer, Finished)
        if outcome is Outcome.SUCCEEDED:
            self.successes[record.task_id] = 1
        self.publish(answer.calls)
        self.answer(claim, Ended(outcome, settled=False, reason=[], value=value, ended_as=outcome))

    def send_on(self, claim: Claim, generation: int) -> None:
        task_id = claim.record.task_id
        self.sent[task_id] = retry = self.sent[task_id]._replace(generation=generation)
        retry = retry._replace(message=claim.message)
        self.queue.append(Message(retry, self.now + self.dice.random() * 5))
        if not self.fault():
            self.publish(self.store.abandon(claim.owner, claim.record, generation=generation))

    def die(self) -> None:
        if self.runs:
            run = self.dice.choice(self.runs)
            self.runs.remove(run)
            self.tell("die", run.claim.record.task_id)
            if self.chance(0.5):
                self.publish(self.store.abandon(run.claim.owner, run.claim.record, again=5.0, died=True))

    def renew(self) -> None:
        for run in self.runs:
            lease = Lease(
                run.claim.record.lock_key,
                owner=run.claim.owner,
                token=run.token,
                limit=self.limit,
                ttl=TTL,
                max_hold=3600.0,
                requested_at=0.0,
            )
            self.store.renew([(lease, run.claim.record, TTL)])

    def pass_time(self, seconds: float | None = None) -> None:
        self.now += self.dice.choice((0.005, 0.05, 1.0, 3.0, 10.0)) if seconds is None else seconds

    def sweep(self) -> None:
        self.now += 1.0
        for record in self.store.due(["billing"], limit=50, interval=0.75):
            if not record.task_id:
                calls = self.store.attend(LockKey("billing", record.execution_key or ""))
                self.tell("attend", record.execution_key, [call.message for call in calls])
                self.publish(calls)
            else:
                handout = self.store.rescue(record)
                self.tell("rescue", record.member, handout)
                if handout is not None:
                    self.publish([handout])

    def revoke(self) -> None:
        if not self.sent:
            return
        for record in self.store.parked(self.dice.choice(list(self.sent)), ["billing"]):
            self.tell("revoke", record.task_id)
            answer = self.store.conclude(
                self.new_id(),
                record,
                Outcome.REVOKED,
                reason='["revoked"]',
                keep=600.0,
                release=False,
                error=Encoded("", "", b""),
                patience=0.0,
            )
            if isinstance(answer, Finished):
                self.publish(answer.calls)

    # What always holds

    def kept(self, key: LockKey) -> tuple[set[str], ...]:
        names = self.store.keys.lock(key)
        sets = [set(self.client.zrange(name, 0, -1)) for name in (names.line, names.called, names.followers, names.due)]
        return set(self.client.hkeys(names.parked)), *sets

    def check(self) -> None:
        for key in LOCK_KEYS:
            parked, line, called, followers, due = self.kept(key)
            if not called <= line:
                raise Broken(f"called, not in line: {called - line}")
            if line & followers:
                raise Broken(f"in line and following: {line & followers}")
            if not line | followers <= parked:
                raise Broken(f"waits without a message: {(line | followers) - parked}")
            if not parked <= due:
                raise Broken(f"nobody looks after {parked - due}")
            if line and f"\n{key.text}" not in due:
                raise Broken(f"nobody attends to {key}")
            if len(self.live(key)) > self.limit:
                raise Broken(f"too many hold {key}")

    def live(self, key: LockKey) -> list[str]:
        lines = self.client.hgetall(self.store.keys.lock(key).lease).values()
        return [line for line in lines if float(line.split("\n")[0]) > self.now * 1000]

    def settle_down(self) -> None:
        """Let everything come to its end, without further faults. Raises `Broken` when something does not."""
        self.faults = 0.0
        for _ in range(4000):
            if len(self.outcomes) == len(self.sent) and not self.runs and not self.queue:
                break
            self.sweep()
            for _ in range(6):
                self.deliver()
                self.check()
            if self.runs:
                self.end()
                self.check()
        missing = self.sent.keys() - self.outcomes.keys()
        if missing:
            raise Broken(f"never ended: {sorted(missing)}")
        for _ in range(3):
            self.now += 3.0
            self.sweep()
        for key in LOCK_KEYS:
            parked, line, called, followers, due = self.kept(key)
            if parked or line or called or followers or f"\n{key.text}" in due:
                raise Broken(f"left of {key}: {parked} {line} {called} {followers} {due}")
            if self.client.pttl(self.store.keys.lock(key).pace) == -1:
                raise Broken(f"the pace of {key} stays: {self.client.hgetall(self.store.keys.lock(key).pace)}")


def walk(seed: int, *, is_told: bool = False) -> World:
    """Walk once. Raises `Broken`."""
    real = time.time
    world = World(seed, is_told=is_told)
    time.time = lambda: world.now
    try:
        for _ in range(STEPS):
            world.step()
        world.settle_down()
    finally:
        time.time = real
    return world


if __name__ == "__main__":
    many, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    broken: dict[str, list[int]] = {}
    for number in range(first, first + many):
        try:
            walk(number, is_told=many == 1)
        except Exception as error:
            if many == 1:
                raise
            broken.setdefault(f"{type(error).__name__}: {str(error)[:60]}", []).append(number)
    for what, seeds in sorted(broken.items(), key=lambda item: -len(item[1])):
        print(len(seeds), what, seeds[:5])
