"""Traces of the model on the real scripts: every answer and all that the store keeps is compared after every step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from model_rules import calls_in
from model_state import FIRST, NONE
from replay_view import LOCK, View, copy_name, owner_name

from celery_singleflight.claims import (
    Acquired,
    Claim,
    Encoded,
    Ended,
    Finished,
    Held,
    Led,
    Linger,
    Outcome,
    Parked,
    Record,
    Refused,
    Waits,
)
from celery_singleflight.custody import GRACE
from celery_singleflight.lease import Lease
from celery_singleflight.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterable

    from model_config import Step
    from model_state import Process, State
    from model_traces import Trace

    from celery_singleflight.claims import Handout

#: Seconds that do not pass while a trace is replayed.
LONG: Final = 1000.0
#: A trace that took longer than this has run into the grace, which the package fixes, and is replayed again.
PATIENCE: Final = GRACE - 1.0
#: So is one with a step that took longer than this: the time for which a slot may linger has passed.
STEP: Final = 0.3
NOTHING: Final = Encoded("application/json", "utf-8", b"null")

#: Lets no time pass for those who wait, and makes the recent hold time what the world says.
FREEZE: Final = """
local clock = redis.call('TIME')
local now, called, pace, baton, hold_ms = clock[1] * 1000, KEYS[1], KEYS[2], KEYS[3], ARGV[1]
local far = string.format('%.0f', now + 1000000)
for _, member in ipairs(redis.call('ZRANGEBYSCORE', called, now + 1000, '+inf')) do
  redis.call('ZADD', called, far, member)
end
for _, name in ipairs({'lingers_until', 'no_slot_until'}) do
  if (tonumber(redis.call('HGET', pace, name) or nil) or 0) > now then
    redis.call('HSET', pace, name, far)
  end
end
if redis.call('HEXISTS', pace, 'hold_ms') == 1 then
  redis.call('HSET', pace, 'hold_ms', hold_ms)
end
redis.call('PERSIST', baton)
"""


class Halves(Store):
    """Tells that a trigger is parked, and has its message recalled only when it is asked to."""

    __slots__ = ()

    def _recall(self, record: Record) -> Any:
        return record

    def recall(self, record: Record) -> Handout | None:
        return super()._recall(record)


class Replay(View):
    """The real store, asked what the model was asked."""

    store: Halves

    def run(self, trace: Trace) -> None:
        """Replay a trace; fail at the first difference."""
        while True:
            began = time.monotonic()
            self.longest = 0.0
            self.keyspace.clear()
            self.tokens = {}
            try:
                for number, (before, step) in enumerate(trace):
                    found = self.timed(before, step), self.look()
                    expected = self.expected_reply(step), self.expected(step.state)
                    assert found == expected, describe(trace[: number + 1], found, expected)
            except AssertionError:
                if time.monotonic() - began < PATIENCE and self.longest < STEP:
                    raise
            else:
                return

    def timed(self, before: State, step: Step) -> tuple[Any, ...]:
        began = time.monotonic()
        words = self.act(before, step)
        if self.config.parks:
            names, hold = self.names, "100" if self.config.is_short else "100000"
            self.keyspace.client.eval(FREEZE, 3, names.called, names.pace, names.baton, hold)
        self.longest = max(self.longest, time.monotonic() - began)
        return words

    # What is done.

    def act(self, before: State, step: Step) -> tuple[Any, ...]:
        """Do the step and return the answer in the model's words."""
        action = step.action.partition(",")[0]
        name, _, how = action.partition(" ")
        if action in ("rescue", "recall", "attend", "conclude revoked", "find"):
            return getattr(self, f"sweeper_{name}")(step.where, before)
        if step.reply:
            return getattr(self, name)(_worker(before, step), how, step)
        if action in ("expire", "pause"):
            self.expire(step.where if action == "expire" else _worker(before, step).owner)
        elif action == "forget":
            self.keyspace.clear()
        else:
            self.pass_time(action, step.where)
        return ()

    def pass_time(self, action: str, where: int) -> None:
        client, names, past = self.keyspace.client, self.names, self.keyspace.now_ms() - 1000
        if action == "grace":
            client.hincrby(self.places[where], "ended_ms", round(-GRACE * 2000))
        elif action == "reserved":
            client.zadd(names.called, {self.member(where): past}, xx=True)
            if client.hget(names.pace, "lingers") == self.member(where):
                client.hset(names.pace, "lingers_until", past)
        elif action in ("lingers", "slot again"):
            client.hset(names.pace, {"lingers": "lingers_until"}.get(action, "no_slot_until"), past)
        elif action == "baton":
            assert client.lpop(names.baton)
        elif action == "baton is gone":
            client.delete(names.baton)

    def claim(self, worker: Process, *, linger: bool = False) -> Claim:
        message, rules = worker.message, self.config.rules
        policy = self.config.policies[message.trigger]
        return Claim(
            self.records[message.trigger],
            owner_name(worker.owner),
            worker="worker",
            run_id="run",
            limit=self.config.limit,
            ttl=LONG,
            keep=LONG,
            on_held=rules.policy(message.trigger),
            copy=copy_name(message.copy),
            previous="-" if message.copy == FIRST else copy_name(message.previous),
            generation=message.generation,
            grace=GRACE,
            message=f"{message.trigger} {message.generation}".encode(),
            max_deliveries=self.config.max_deliveries,
            waits=Waits(
                linger=LONG if linger else 0.0,
                digest=rules.digest(message.trigger),
                which="" if not policy.startswith("coalesce") else policy.partition(" ")[2] or "newest",
            ),
        )

    def enter(self, worker: Process, how: str, step: Step) -> tuple[Any, ...]:
        answer = self.store.enter(self.claim(worker, linger=how == "lingering"))
        if isinstance(answer, Acquired):
            number = step.reply[1][1] if step.reply[0] == "acquired" else NONE
            if number not in self.tokens:
                assert answer.token > max(self.tokens.values(), default=0), "tokens grow"
                self.tokens[number] = answer.token
            return "acquired", self.tokens[number] == answer.token, *_told(answer.calls)
        if isinstance(answer, Held):
            return "held", answer.what
        if isinstance(answer, Ended):
            return "ended", answer.outcome.value, answer.settled, *_told(answer.calls)
        if isinstance(answer, Parked):
            return "parked", answer.how, *_told(answer.calls)
        if isinstance(answer, Linger):
            return "linger", *_told(answer.calls)
        return ("led", answer.by) if isinstance(answer, Led) else ("surplus", answer.why)

    def follow(self, worker: Process, *_: Any) -> tuple[Any, ...]:
        answer = self.store.follow(self.claim(worker), self.member(worker.leader))
        return ("gone",) if answer is None else ("ended", answer.outcome.value, answer.settled, *_told(answer.calls))

    def renew(self, worker: Process, *_: Any) -> tuple[Any, ...]:
        (answer,) = self.store.renew([(self.lease_of(worker), self.records[worker.message.trigger], LONG)])
        return ("lost", answer.lost) if answer.lost else ("renewed",)

    def finish(self, worker: Process, how: str, _: Step) -> tuple[Any, ...]:
        record = self.records[worker.message.trigger]
        execution, client = self.places[self.config.rules.execution(worker.message.trigger)], self.keyspace.client
        if self.config.parks and client.hexists(execution, "since_ms"):
            client.hset(execution, "since_ms", self.keyspace.now_ms() - (0 if self.config.is_short else 100_000))
        answer = self.store.finish(self.lease_of(worker), record, Outcome(how), NOTHING, reason="[]", keep=LONG)
        return ("refused",) if isinstance(answer, Refused) else ("finished", *_told(answer.calls))

    def abandon(self, worker: Process, how: str, _: Step) -> tuple[Any, ...]:
        options = {
            "": {},
            "retried": {"generation": worker.message.generation + 1},
            "again": {"again": GRACE},
            "died": {"again": GRACE, "died": True},
        }
        calls = self.store.abandon(owner_name(worker.owner), self.records[worker.message.trigger], **options[how])
        return "abandoned", *_told(calls)

    def conclude(self, worker: Process, how: str, _: Step) -> tuple[Any, ...]:
        record, release = self.records[worker.message.trigger], how in ("gone", "worn")
        owner, error = owner_name(worker.owner), None if how == "told" else NOTHING
        answer = self.store.conclude(owner, record, Outcome.FAILED, reason="[]", keep=LONG, release=release, error=error)
        return ("concluded", *_told(answer.calls)) if isinstance(answer, Finished) else ("refused",)

    def settle(self, worker: Process, _: str, step: Step) -> tuple[Any, ...]:
        self.store.settle([(self.records[worker.message.trigger], owner_name(worker.owner), True)])
        return step.reply

    def sweeper_rescue(self, trigger: int, _: State) -> tuple[Any, ...]:
        handout = self.store.rescue(self.records[trigger])
        if isinstance(handout, Record):
            return ("parked",)
        return ("nothing",) if handout is None else ("message", *_told([handout])[0][0], handout.outcome)

    def sweeper_recall(self, trigger: int, _: State) -> tuple[Any, ...]:
        handout = self.store.recall(self.records[trigger])
        return ("nothing",) if handout is None else ("message", *_told([handout])[0][0])

    def sweeper_attend(self, *_: Any) -> tuple[Any, ...]:
        return "attended", *_told(self.store.attend(LOCK))

    def sweeper_find(self, trigger: int, _: State) -> tuple[Any, ...]:
        record = self.records[trigger]
        assert self.store.parked(record.task_id, [LOCK.name]) == [record]
        return ()

    def sweeper_conclude(self, trigger: int, before: State) -> tuple[Any, ...]:
        how: dict[str, Any] = {"reason": "[]", "keep": LONG, "release": False, "error": Encoded("", "", b""), "patience": 0.0}
        answer = self.store.conclude(owner_name(before.names + 1), self.records[trigger], Outcome.REVOKED, **how)
        return ("concluded", *_told(answer.calls)) if isinstance(answer, Finished) else ("refused",)

    def expire(self, owner: int) -> None:
        for place in self.places:
            self.keyspace.expire(self.names.lease, place, owner_name(owner))

    def lease_of(self, worker: Process) -> Lease:
        token = self.tokens[worker.ticket[1]]
        owner, limit = owner_name(worker.owner), self.config.limit
        return Lease(LOCK, owner=owner, token=token, limit=limit, ttl=LONG, max_hold=LONG, requested_at=0.0)

    def expected_reply(self, step: Step) -> tuple[Any, ...]:
        word, *rest = step.reply or ("",)
        calls = calls_in(step.reply)
        if calls:
            rest[-1] = tuple((f"{call.trigger} {call.generation}", copy_name(call.copy), call.is_ahead) for call in calls)
        if word == "acquired":
            rest[0] = True
        elif word == "message":
            generation, copy, *outcome = rest
            rest = [f"{step.where} {generation}", copy_name(copy), False, *outcome]
        elif word == "led":
            rest[0] = self.member(rest[0])
        elif word in ("gone", "later") and step.action in ("rescue", "recall"):
            return ("nothing",)
        return (word, *rest) if word else ()


def _told(calls: Iterable[Handout]) -> list[tuple[tuple[str, str, bool], ...]]:
    """What a reply tells to publish, if that is anything."""
    told = tuple((call.message.decode(), call.copy, call.linger > 0) for call in calls)
    return [told] if told else []


def _worker(state: State, step: Step) -> Process:
    worker = state.workers[step.where]
    assert worker
    return worker


def describe(trace: Trace, found: tuple[Any, ...], expected: tuple[Any, ...]) -> str:
    """The steps, and what differs after the last one."""
    lines = [f"{step.action} [{step.where}] {step.reply}" for _, step in trace]
    lines += [f"the store answers {found[0]}", f"the model answers {expected[0]}"]
    for name, kept in found[1].items():
        if kept != expected[1][name]:
            lines += [f"{name} in the store: {kept}", f"{name} in the model: {expected[1][name]}"]
    return "\n".join(["", *lines])
