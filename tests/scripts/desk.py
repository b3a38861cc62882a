"""What the tests of the scripts ask the store for, without repeating what they do not care about. Durations in seconds."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from redis.exceptions import ConnectionError as RedisConnectionError

from celery_singleflight.claims import Acquired, Claim, Encoded, Finished, Outcome, Record
from celery_singleflight.keys import LockKey
from celery_singleflight.lease import Lease
from celery_singleflight.script import load
from celery_singleflight.store import Renewal

if TYPE_CHECKING:
    from cluster import Keyspace

    from celery_singleflight.answers import Entered
    from celery_singleflight.claims import Handout, Refused
    from celery_singleflight.errors import ScriptError
    from celery_singleflight.store import Store

LOCK: Final = LockKey.of("billing", ["acct_1"])
#: Another lock key of the same lock name, and so in the same hash slot.
OTHER_LOCK: Final = LockKey.of("billing", ["acct_2"])
#: A lock key of another name, in another hash slot.
FAR_LOCK: Final = LockKey.of("shipping", ["acct_1"])

RELEASE: Final = load("release")

TTL: Final = 30.0
KEEP: Final = 600.0
WORKER: Final = "worker@host"

#: What the store answers who has ended a run, where nobody waits.
NOBODY_NEXT: Final = Finished([])


class Desk:
    """A store, and a look at its keys from outside."""

    def __init__(self, store: Store, keyspace: Keyspace, connections: Any) -> None:
        self.store = store
        self.keyspace = keyspace
        self.connections = connections

    @property
    def client(self) -> Any:
        return self.keyspace.client

    def claim(
        self,
        task_id: str = "t1",
        *,
        lock_key: LockKey = LOCK,
        execution_key: str | None = None,
        has_trigger: bool = True,
        owner: str | None = None,
        **how: Any,
    ) -> Claim:
        owner = owner or uuid4().hex
        facts: dict[str, Any] = {"worker": WORKER, "run_id": f"run of {owner}", "limit": 1, "ttl": TTL, "keep": KEEP}
        facts |= {"on_held": "wait", "task": "shop.bill"}
        return Claim(record=Record(lock_key, task_id, execution_key, has_trigger), owner=owner, **{**facts, **how})

    def enter(self, claim: Claim) -> Entered:
        return self.store.enter(claim)

    def acquire(self, claim: Claim) -> Acquired:
        answer = self.store.enter(claim)
        assert isinstance(answer, Acquired), answer
        return answer

    def lease(self, claim: Claim, token: int) -> Lease:
        return Lease(
            claim.record.lock_key,
            owner=claim.owner,
            token=token,
            limit=claim.limit,
            ttl=claim.ttl,
            max_hold=3600.0,
            requested_at=0.0,
        )

    def finish(
        self,
        claim: Claim,
        token: int,
        outcome: Outcome = Outcome.SUCCEEDED,
        body: bytes = b"42",
        *,
        reason: str = "[]",
        keep: float = KEEP,
        hold: float | None = 0.0,
        keeps_failure: bool = False,
    ) -> Refused | Finished | None:
        """Return who has taken over, or None when it is recorded; nobody may have to be called then."""
        value = Encoded("application/json", "utf-8", body)
        lease = self.lease(claim, token)
        how: dict[str, Any] = {"reason": reason, "keep": keep, "hold": hold, "keeps_failure": keeps_failure}
        answer = self.store.finish(lease, claim.record, outcome, value, **how)
        return None if answer == NOBODY_NEXT else answer

    def run(self, claim: Claim, outcome: Outcome = Outcome.SUCCEEDED, **how: Any) -> Acquired:
        """Take the lease and finish."""
        acquired = self.acquire(claim)
        assert self.finish(claim, acquired.token, outcome, **how) is None
        return acquired

    def renew(self, claim: Claim, token: int = 0, ttl: float = TTL) -> str:
        """Return why the lease is lost, or "" when it is kept; nobody may have asked its holder to stop."""
        (renewal,) = self.store.renew([(self.lease(claim, token), claim.record, ttl)])
        return why_lost(renewal)

    def abandon(self, claim: Claim, **how: Any) -> None:
        """Nobody may have to be called then."""
        assert self.store.abandon(claim.owner, claim.record, **how) == []

    def settle(self, *claims: Claim, is_done: bool = True) -> None:
        self.store.settle([(claim.record, claim.owner, is_done) for claim in claims])

    def conclude(self, claim: Claim, outcome: Outcome = Outcome.FAILED, **how: Any) -> bool:
        facts: dict[str, Any] = {"reason": '["why"]', "keep": KEEP, "release": True}
        answer = self.store.conclude(claim.owner, claim.record, outcome, **{**facts, **how})
        assert isinstance(answer, str) or answer == NOBODY_NEXT
        return answer == NOBODY_NEXT

    def sweep(self, *lock_names: str, limit: int = 10) -> list[Record]:
        """Look what is due, in an interval of its own."""
        names = lock_names or ("billing",)
        for name in self.keyspace.names():
            if name.split(":")[2] == "sweep":
                self.client.delete(name)
        return self.store.due(names, limit=limit, interval=60.0)

    def rescue(self, claim: Claim) -> Handout | None:
        return self.store.rescue(claim.record)

    def release(self, claim: Claim, token: int, *, force: bool = False) -> Any:
        """What an operator asks for; returns the reply."""
        names = self.store.names(claim.record)
        named: dict[str, Any] = {
            "token": token,
            "task_id": claim.record.task_id,
            "member": claim.record.member,
            "force": int(force),
        }
        named["lock_key"] = claim.record.lock_key.text
        return RELEASE.reply(self.store._connections.run(RELEASE, len(RELEASE.keys), RELEASE.arguments(names, named)))

    def die(self, claim: Claim) -> None:
        """Take the lease, and end without a word: the lease has run out since."""
        self.acquire(claim)
        self.expire(claim)

    # Where the store keeps what belongs to a claim.

    def lease_name(self, claim: Claim) -> str:
        return self.store.keys.lock(claim.record.lock_key).lease

    def fence_name(self, claim: Claim) -> str:
        return self.store.keys.lock(claim.record.lock_key).fence

    def pace_name(self, claim: Claim) -> str:
        return self.store.keys.lock(claim.record.lock_key).pace

    def trigger_name(self, claim: Claim) -> str:
        return self.store.names(claim.record)["trigger"]

    def execution_name(self, claim: Claim) -> str:
        return self.store.names(claim.record)["execution"]

    def due_name(self, claim: Claim) -> str:
        return self.store.keys.lock(claim.record.lock_key).due

    # What it keeps there.

    def due(self, claim: Claim) -> dict[str, float]:
        """Every trigger of the lock name that the sweeper is to look at, with the time in ms at which it does."""
        return dict(self.client.zrange(self.due_name(claim), 0, -1, withscores=True))

    def due_in(self, claim: Claim) -> float | None:
        """In how many seconds the sweeper looks at the trigger; None for never."""
        score = self.due(claim).get(claim.record.member)
        return None if score is None else (score - self.keyspace.now_ms()) / 1000

    def message(self, claim: Claim) -> bytes | None:
        """The message that the store keeps of the trigger."""
        text = self.client.hget(self.trigger_name(claim), "message")
        return None if text is None else text.encode(errors="surrogateescape")

    def scores(self, claim: Claim) -> dict[str, float]:
        """Every owner in the lease, expired or not."""
        return {owner: float(line.split("\n")[0]) for owner, line in self.client.hgetall(self.lease_name(claim)).items()}

    def holders(self, claim: Claim) -> dict[str, list[str]]:
        """What is known of every owner in the lease: since in ms, fencing token, worker, group, digest, task id."""
        return {owner: line.split("\n", 6)[1:] for owner, line in self.client.hgetall(self.lease_name(claim)).items()}

    def trigger(self, claim: Claim) -> dict[str, str]:
        return self.client.hgetall(self.trigger_name(claim))

    def execution(self, claim: Claim) -> dict[str, str]:
        return self.client.hgetall(self.execution_name(claim))

    def expire(self, claim: Claim) -> None:
        """Let the claim's lease have run out a second ago."""
        self.keyspace.expire(self.lease_name(claim), self.execution_name(claim), claim.owner)

    def overdue(self, claim: Claim, seconds: float = 1.0) -> None:
        """Let the sweeper's look at the trigger have been due for that long."""
        name, past = self.due_name(claim), self.keyspace.now_ms() - seconds * 1000
        assert self.client.zadd(name, {claim.record.member: past}, xx=True, ch=True) == 1

    def take_baton(self, lock_key: LockKey = LOCK) -> bool:
        """Take what is there for whoever waits in its slot. Returns whether it was."""
        return self.client.lpop(self.store.keys.lock(lock_key).baton) is not None

    def lose_next_reply(self, *, spare: int = 0) -> list[str]:
        """Cut the connection after the next exchange, or a later one: the script has run, its reply never comes.

        Returns a list that gets a mark once that has happened.
        """
        return lose_next_reply(self.connections, spare)


def why_lost(renewal: Renewal | ScriptError) -> str:
    """Return why a lease is lost, or "" when it is kept; nobody may have asked its holder to stop."""
    assert isinstance(renewal, Renewal), renewal
    assert not renewal.stop_by
    return renewal.lost


def lose_next_reply(connections: Any, spare: int) -> list[str]:
    name = "_exchange" if hasattr(connections, "_exchange") else "_run_once"
    real = getattr(connections, name)
    lost: list[str] = []
    exchanges = count()

    def cut(*arguments: Any, **options: Any) -> Any:
        answer = real(*arguments, **options)
        if not lost and next(exchanges) >= spare:
            lost.append(f"cut before {answer!r} was read")
            setattr(connections, name, real)
            raise RedisConnectionError(lost[0])
        return answer

    setattr(connections, name, cut)
    return lost
