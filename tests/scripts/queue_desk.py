"""What the tests of those who wait in the store ask it for, and a look at what it keeps of them. Durations in seconds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from desk import KEEP, LOCK, RELEASE, WORKER, Desk

from celery_singleflight.claims import Encoded, Finished, Outcome, Parked, Waits
from celery_singleflight.keys import LockKey

if TYPE_CHECKING:
    from collections.abc import Iterable

    from celery_singleflight.claims import Claim, Handout, Refused

#: Kinds of keys that are there only while somebody waits.
_OF_WAITING = ("line", "called", "parked", "followers")
ERROR = Encoded("application/json", "utf-8", b'{"exc_type": "ValueError"}')


def ids(calls: Iterable[Handout]) -> list[str]:
    """Whose messages they are: by `QueueDesk.waits`, a message is the id of its trigger."""
    return [call.message.decode() for call in calls]


class QueueDesk(Desk):
    """A store in which triggers wait."""

    def waits(self, task_id: str, on_held: str = "queue", **how: Any) -> Claim:
        """A trigger that is parked when it has to wait; fields of `Waits` may be given too."""
        of_waits = {name: how.pop(name) for name in Waits._fields if name in how}
        facts: dict[str, Any] = {"on_held": on_held, "message": task_id.encode(), "waits": Waits(**of_waits), **how}
        return self.claim(task_id, **facts)

    def park(self, task_id: str, on_held: str = "queue", **how: Any) -> Claim:
        """Have a trigger parked, so that nobody is called. Runs are long, unless a test says otherwise."""
        claim = self.waits(task_id, on_held, **how)
        answer = self.enter(claim)
        assert isinstance(answer, Parked), answer
        assert ids(answer.calls) == []
        self.client.hsetnx(self.name("pace", claim.record.lock_key), "hold_ms", 3_600_000)
        return claim

    def hold(self, task_id: str = "holder", on_held: str = "queue", **how: Any) -> tuple[Claim, int]:
        """Take the lease. Returns what `end` needs."""
        claim = self.waits(task_id, on_held, **how)
        return claim, self.acquire(claim).token

    def line_of(self, *task_ids: str, **how: Any) -> tuple[Claim, int, list[Claim]]:
        """A holder, and triggers in line behind it."""
        holder, token = self.hold(**how)
        return holder, token, [self.park(task_id, **how) for task_id in task_ids]

    def intrude(self, task_id: str, lock_key: LockKey = LOCK) -> None:
        """Let a lease be there that should not: whoever is called finds its place taken."""
        now = self.keyspace.now_ms()
        line = "\n".join([str(now + 30_000), str(now), "1", WORKER, "1", "", task_id])
        name = self.name("lease", lock_key)
        self.client.hset(name, f"owner of {task_id}", line)
        self.client.pexpire(name, 90_000)

    def copy_of(self, claim: Claim, **how: Any) -> Claim:
        """The message as it is when the store has handed it out: a new copy, in a new delivery."""
        about = self.about(claim)
        first_ms = about["first"] if about else claim.first_ms
        facts = {"copy": uuid4().hex, "previous": claim.copy, "owner": uuid4().hex, "first_ms": first_ms, **how}
        return claim._replace(**facts)

    def redelivered(self, claim: Claim, **how: Any) -> Claim:
        """The same message in another delivery."""
        return claim._replace(owner=uuid4().hex, **how)

    def come(self, claim: Claim, **how: Any) -> Any:
        """Let the message that was handed out arrive. Returns the answer."""
        return self.enter(self.copy_of(claim, **how))

    def succeed(self, claim: Claim) -> None:
        """Run a trigger of which nobody is in the way, and behind which nobody waits."""
        assert self.end(claim, self.acquire(claim).token) == []

    def run_called(self, claim: Claim, outcome: Outcome = Outcome.SUCCEEDED, **how: Any) -> list[str]:
        """Let one that was called come, run and end. Returns whom that calls."""
        copy = self.copy_of(claim)
        return self.end(copy, self.acquire(copy).token, outcome, **how)

    def ending(
        self,
        claim: Claim,
        token: int,
        outcome: Outcome = Outcome.SUCCEEDED,
        body: bytes = b"42",
        *,
        keep: float = KEEP,
        hold: float | None = 0.0,
    ) -> Finished | Refused:
        """What the store answers to the end of a run."""
        value, lease = Encoded("application/json", "utf-8", body), self.lease(claim, token)
        return self.store.finish(lease, claim.record, outcome, value, reason="[]", keep=keep, hold=hold)

    def end(self, claim: Claim, token: int, outcome: Outcome = Outcome.SUCCEEDED, **how: Any) -> list[str]:
        """End a run. Returns whose messages are to be published."""
        answer = self.ending(claim, token, outcome, **how)
        assert isinstance(answer, Finished), answer
        return ids(answer.calls)

    def give_back(self, claim: Claim, **how: Any) -> list[str]:
        """End a run without an outcome. Returns whose messages are to be published."""
        return ids(self.store.abandon(claim.owner, claim.record, **how))

    def withdraw(self, claim: Claim, outcome: Outcome = Outcome.REVOKED, **how: Any) -> list[str]:
        """Give a trigger that waits an outcome, as a sweeper does. Returns whose messages are to be published."""
        facts: dict[str, Any] = {
            "reason": '["revoked"]',
            "keep": KEEP,
            "release": False,
            "error": ERROR,
            "patience": 0.0,
            **how,
        }
        owner = facts.pop("owner", uuid4().hex)
        answer = self.store.conclude(owner, claim.record, outcome, **facts)
        assert isinstance(answer, Finished), answer
        return ids(answer.calls)

    def attend(self, lock_key: LockKey = LOCK) -> list[str]:
        """What a sweeper does for a lock key. Returns whose messages it publishes."""
        return ids(self.store.attend(lock_key))

    def evict(self, claim: Claim, token: int) -> str:
        """Release a live holder on an operator's word. Returns the word of the answer."""
        names = self.store.names(claim.record)
        named: dict[str, Any] = {"token": token, "task_id": claim.record.task_id, "member": claim.record.member, "force": 1}
        named |= {"lock_key": claim.record.lock_key.text}
        return RELEASE.reply(self.connections.run(RELEASE, len(RELEASE.keys), RELEASE.arguments(names, named))).word

    def look_at(self, claim: Claim) -> str | None:
        """What a sweeper does for a trigger that is due. Returns whose message it publishes."""
        handout = self.store.rescue(claim.record._replace(lock_key=LockKey(claim.record.lock_key.name, "")))
        return None if handout is None else handout.message.decode()

    def renewed(self, claim: Claim, token: int) -> str:
        """Renew a lease that is ours. Returns which trigger asks its holder to stop."""
        (renewal,) = self.store.renew([(self.lease(claim, token), claim.record, claim.ttl)])
        assert renewal.lost == ""
        return renewal.stop_by

    # What the store keeps of those who wait.

    def name(self, kind: str, lock_key: LockKey = LOCK) -> str:
        return getattr(self.store.keys.lock(lock_key), kind)

    def line(self, lock_key: LockKey = LOCK) -> list[str]:
        return self.client.zrange(self.name("line", lock_key), 0, -1)

    def called(self, lock_key: LockKey = LOCK) -> set[str]:
        """Those for whom a place is reserved, or was when they were called."""
        return set(self.client.zrange(self.name("called", lock_key), 0, -1))

    def followers(self, lock_key: LockKey = LOCK) -> dict[str, float]:
        return dict(self.client.zrange(self.name("followers", lock_key), 0, -1, withscores=True))

    def parked(self, lock_key: LockKey = LOCK) -> set[str]:
        return set(self.client.hkeys(self.name("parked", lock_key)))

    def about(self, claim: Claim) -> dict[str, str]:
        """What is known of one that waits; empty when it does not."""
        line = self.client.hget(self.name("parked", claim.record.lock_key), claim.record.member)
        return json.loads(line.partition("\n")[0]) if line else {}

    def pace(self, lock_key: LockKey = LOCK) -> dict[str, str]:
        return self.client.hgetall(self.name("pace", lock_key))

    def attention_in(self, lock_key: LockKey = LOCK) -> float | None:
        """In how many seconds a sweeper looks after the lock key; None for never."""
        score = self.client.zscore(self.name("due", lock_key), f"\n{lock_key.text}")
        return None if score is None else (score - self.keyspace.now_ms()) / 1000

    # Time is forced.

    def make_runs_short(self, hold_ms: int = 10, lock_key: LockKey = LOCK) -> None:
        self.client.hset(self.name("pace", lock_key), mapping={"hold_ms": hold_ms})

    def let_reservation_lapse(self, claim: Claim) -> None:
        name = self.name("called", claim.record.lock_key)
        assert self.client.zadd(name, {claim.record.member: self.keyspace.now_ms() - 1}, xx=True, ch=True) == 1

    def let_call_be_missed(self, claim: Claim) -> None:
        """Let nobody come, neither when the trigger is called nor when it is called once more."""
        self.let_reservation_lapse(claim)
        assert claim.record.task_id in self.attend(claim.record.lock_key)
        self.let_reservation_lapse(claim)

    def let_linger_last(self, lock_key: LockKey = LOCK) -> None:
        """Let whoever lingers do so for a minute, however slow this machine is."""
        pace, until = self.name("pace", lock_key), self.keyspace.now_ms() + 60_000
        self.client.hset(pace, "lingers_until", until)
        self.client.zadd(self.name("called", lock_key), {self.client.hget(pace, "lingers"): until}, xx=True)

    def let_linger_lapse(self, lock_key: LockKey = LOCK) -> None:
        self.client.hset(self.name("pace", lock_key), "lingers_until", self.keyspace.now_ms() - 1)

    def ripen(self, lock_key: LockKey = LOCK) -> None:
        """Let the delay of whoever gathers others be over."""
        assert self.client.hexists(self.name("pace", lock_key), "ripe_ms")
        self.client.hset(self.name("pace", lock_key), "ripe_ms", self.keyspace.now_ms() - 1)

    def wait_long_ago(self, claim: Claim, seconds: float) -> None:
        """Let one that waits have begun so many seconds earlier."""
        name, member = self.name("parked", claim.record.lock_key), claim.record.member
        head, _, message = self.client.hget(name, member).partition("\n")
        about, ms = json.loads(head), round(seconds * 1000)
        about["first"] = str(int(about["first"]) - ms)
        if "until_ms" in about:
            about["until_ms"] = str(int(about["until_ms"]) - ms)
        self.client.hset(name, member, f"{json.dumps(about)}\n{message}")
        self.client.zincrby(self.due_name(claim), -ms, member)

    # What always holds.

    def lock_keys(self) -> set[LockKey]:
        """Those that something is kept of which is there while somebody waits."""
        kinds = {*_OF_WAITING, "pace"}
        parts = [name.split(":", 3) for name in self.keyspace.names()]
        return {LockKey(part[3].partition("[")[0], part[3]) for part in parts if part[2] in kinds}

    def check(self) -> None:
        """Fail if somebody who waits can be forgotten, or something stays where nobody waits any more."""
        for lock_key in self.lock_keys():
            parked, line, followers = self.parked(lock_key), set(self.line(lock_key)), set(self.followers(lock_key))
            due = set(self.client.zrange(self.name("due", lock_key), 0, -1))
            assert self.called(lock_key) <= line
            assert not line & followers
            assert line | followers <= parked
            assert parked <= due, "whoever waits is looked after"
            if line:
                assert self.attention_in(lock_key) is not None
            if not parked:
                self.check_gone(lock_key)

    def check_gone(self, lock_key: LockKey = LOCK) -> None:
        """Fail if more than the pace is left, for ten minutes, once a sweeper has had its look."""
        if self.attention_in(lock_key) is not None:
            assert self.attend(lock_key) == []
        assert self.attention_in(lock_key) is None
        for kind in _OF_WAITING:
            assert not self.client.exists(self.name(kind, lock_key)), kind
        name = self.name("pace", lock_key)
        assert self.client.pttl(name) != -1, self.client.hgetall(name)
        assert self.client.pttl(name) <= 600_000
