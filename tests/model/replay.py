"""Traces of the model on the real scripts: every answer and all that the store keeps is compared after every step."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from model_state import FIRST, NOBODY, NONE, Line, Record as Facts
from model_world import World

from celery_singleflight.claims import Acquired, Claim, Encoded, Ended, Finished, Held, Outcome, Record, Refused
from celery_singleflight.custody import GRACE
from celery_singleflight.keys import LockKey
from celery_singleflight.lease import Lease

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

    from cluster import Keyspace
    from model_config import Config, Step
    from model_state import Process, State

    from celery_singleflight.store import Store

LOCK: Final = LockKey.of("billing", ["acct_1"])
#: Seconds that do not pass while a trace is replayed.
LONG: Final = 1000.0
#: A trace that took longer than this has run into the grace, which the package fixes, and is replayed again.
PATIENCE_MS: Final = (GRACE - 1.0) * 1000
NOTHING: Final = Encoded("application/json", "utf-8", b"null")

Trace = list[tuple["State", "Step"]]


def short_traces(config: Config, depth: int) -> Iterator[Trace]:
    """Yield ways through every state and every answer that can be met within so many steps."""
    world = World(config)
    start = world.start()
    seen = {hash(world.canonical(start))}
    ahead: deque[tuple[State, Trace]] = deque([(start, [])])
    while ahead:
        state, trace = ahead.popleft()
        is_last = True
        for step in world.steps(state) if len(trace) < depth else ():
            number = hash(world.canonical(step.state))
            if number not in seen:
                seen.add(number)
                ahead.append((step.state, [*trace, (state, step)]))
                is_last = False
            elif step.reply:
                yield [*trace, (state, step)]
        if is_last:
            yield trace


def random_trace(config: Config, length: int, chance: Random) -> Trace:
    """Return a walk of that length, or until nothing can happen any more."""
    world = World(config)
    state, trace = world.start(), []
    while len(trace) < length and (steps := list(world.steps(state))):
        step = chance.choice(steps)
        trace.append((state, step))
        state = step.state
    return trace


class Replay:
    """The real store, asked what the model was asked."""

    def __init__(self, store: Store, keyspace: Keyspace, config: Config) -> None:
        self.store = store
        self.keyspace = keyspace
        self.config = config
        self.counts_deaths = config.max_deliveries is not None
        self.records = [Record(LOCK, f"t{trigger}", key) for trigger, key in enumerate(config.keys)]
        names = [store.names(record) for record in self.records]
        self.lease, self.fence, self.due = (names[0][what] for what in ("lease", "fence", "due"))
        executions = {config.rules.execution(trigger): name["execution"] for trigger, name in enumerate(names)}
        self.places = [name["trigger"] for name in names]
        self.places += [executions[place] for place in range(len(names), config.rules.places)]

    def run(self, trace: Trace) -> None:
        """Replay a trace; fail at the first difference."""
        while True:
            began = self.begin()
            try:
                for number, (before, step) in enumerate(trace):
                    found = self.act(before, step), self.look()
                    expected = self.expected_reply(step), self.expected(step.state)
                    assert found == expected, describe(trace[: number + 1], found, expected)
            except AssertionError:
                if self.keyspace.now_ms() - began < PATIENCE_MS:
                    raise
            else:
                return

    def begin(self) -> int:
        self.keyspace.clear()
        self.tokens: dict[int, int] = {}
        return self.keyspace.now_ms()

    # What is done.

    def act(self, before: State, step: Step) -> tuple[Any, ...]:
        """Do the step and return the answer in the model's words."""
        action, words = step.action.partition(",")[0], ()
        if action == "rescue":
            words = self.rescue(step.where)
        elif action == "expire":
            self.expire(step.where)
        elif action == "pause":
            self.expire(_worker(before, step).owner)
        elif action == "grace":
            self.keyspace.client.hincrby(self.places[step.where], "ended_ms", round(-GRACE * 2000))
        elif action == "forget":
            self.keyspace.clear()
        elif step.reply:
            name, _, how = action.partition(" ")
            words = getattr(self, name)(_worker(before, step), how, step)
        return words

    def enter(self, worker: Process, _: str, step: Step) -> tuple[Any, ...]:
        message = worker.message
        answer = self.store.enter(
            Claim(
                self.records[message.trigger],
                _owner(worker.owner),
                worker="worker",
                run_id="run",
                limit=self.config.limit,
                ttl=LONG,
                keep=LONG,
                on_held=self.config.policies[message.trigger],
                copy=_copy(message.copy),
                previous="-" if message.copy == FIRST else _copy(message.previous),
                generation=message.generation,
                grace=GRACE,
                message=str(message.generation).encode(),
                max_deliveries=self.config.max_deliveries,
            )
        )
        if isinstance(answer, Acquired):
            number = step.reply[1][1] if step.reply[0] == "acquired" else NONE
            if number not in self.tokens:
                assert answer.token > max(self.tokens.values(), default=0), "tokens grow"
                self.tokens[number] = answer.token
            return "acquired", self.tokens[number] == answer.token
        if isinstance(answer, Held):
            return "held", answer.what
        if isinstance(answer, Ended):
            return "ended", answer.outcome.value, answer.settled
        return "surplus", answer.why

    def renew(self, worker: Process, *_: Any) -> tuple[Any, ...]:
        (answer,) = self.store.renew([(self.lease_of(worker), self.records[worker.message.trigger], LONG)])
        return ("lost", answer.lost) if answer.lost else ("renewed",)

    def finish(self, worker: Process, how: str, _: Step) -> tuple[Any, ...]:
        record = self.records[worker.message.trigger]
        answer = self.store.finish(self.lease_of(worker), record, Outcome(how), NOTHING, reason="[]", keep=LONG)
        return ("refused",) if isinstance(answer, Refused) else ("finished",)

    def abandon(self, worker: Process, how: str, _: Step) -> tuple[Any, ...]:
        options = {
            "": {},
            "retried": {"generation": worker.message.generation + 1},
            "again": {"again": GRACE},
            "died": {"again": GRACE, "died": True},
        }
        self.store.abandon(_owner(worker.owner), self.records[worker.message.trigger], **options[how])
        return ("abandoned",)

    def conclude(self, worker: Process, how: str, _: Step) -> tuple[Any, ...]:
        record, release = self.records[worker.message.trigger], how in ("gone", "worn")
        owner, error = _owner(worker.owner), None if how == "told" else NOTHING
        answer = self.store.conclude(owner, record, Outcome.FAILED, reason="[]", keep=LONG, release=release, error=error)
        return ("concluded",) if isinstance(answer, Finished) else ("refused",)

    def settle(self, worker: Process, _: str, step: Step) -> tuple[Any, ...]:
        self.store.settle([(self.records[worker.message.trigger], _owner(worker.owner), True)])
        return step.reply

    def rescue(self, trigger: int) -> tuple[Any, ...]:
        handout = self.store.rescue(self.records[trigger])
        if handout is None:
            return ("nothing",)
        return "message", int(handout.message), handout.copy, handout.outcome

    def expire(self, owner: int) -> None:
        for place in self.places:
            self.keyspace.expire(self.lease, place, _owner(owner))

    def lease_of(self, worker: Process) -> Lease:
        token = self.tokens[worker.ticket[1]]
        owner, limit = _owner(worker.owner), self.config.limit
        return Lease(LOCK, owner=owner, token=token, limit=limit, ttl=LONG, max_hold=LONG, requested_at=0.0)

    # What is kept.

    def look(self) -> tuple[Any, ...]:
        client, now = self.keyspace.client, self.keyspace.now_ms()
        asked = client.pipeline(transaction=False)
        asked.hgetall(self.lease)
        asked.get(self.fence)
        asked.zrange(self.due, 0, -1)
        for place in self.places:
            asked.hgetall(place)
        lease, fence, due, *records = asked.execute()
        lines = {owner: (int(line.split("\n")[0]) > now, int(line.split("\n")[2])) for owner, line in lease.items()}
        return lines, int(fence or 0), sorted(due), [self.facts(record, now) for record in records]

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
            "message": int(record.get("message", NONE)),
            "left_by": record.get("left_by", ""),
            "concluded_by": record.get("concluded_by", ""),
        }
        if self.counts_deaths:
            facts["died"] = int(record.get("died", 0))
        return facts

    # What the model says.

    def expected_reply(self, step: Step) -> tuple[Any, ...]:
        if not step.reply:
            return ()
        if step.reply[0] == "acquired":
            return "acquired", True
        if step.reply[0] == "message":
            return "message", step.reply[1], _copy(step.reply[2]) or "", step.reply[3]
        return ("nothing",) if step.action == "rescue" else step.reply

    def expected(self, state: State) -> tuple[Any, ...]:
        store = state.store
        lines = {_owner(line.owner): (line.is_live, self.token(line)) for line in store.lease}
        fence = self.tokens[state.given[1]] if store.fence else 0
        due = sorted(record.member for record, is_due in zip(self.records, store.due, strict=True) if is_due)
        return lines, fence, due, [self.expected_facts(record) for record in store.records]

    def token(self, holder: Line | Facts) -> int:
        return self.tokens.get(holder.ticket[1], 0)

    def expected_facts(self, record: Facts) -> dict[str, Any]:
        facts: dict[str, Any] = record._asdict()
        for name in ("owner", "by", "left_by", "concluded_by"):
            facts[name] = _owner(facts[name])
        facts["token"] = self.token(record) if record.owner != NOBODY else 0
        facts["runs"] = "" if record.runs == NONE else f"t{record.runs}"
        facts["copy"] = None if record.copy == NONE else _copy(record.copy)
        del facts["ticket"]
        if not self.counts_deaths:
            del facts["died"]
        return facts


def _worker(state: State, step: Step) -> Process:
    worker = state.workers[step.where]
    assert worker
    return worker


def _owner(number: int) -> str:
    return "" if number == NOBODY else f"owner {number}"


def _copy(number: int) -> str:
    return "" if number in (FIRST, NONE) else f"copy {number}"


def describe(trace: Trace, found: tuple[Any, ...], expected: tuple[Any, ...]) -> str:
    lines = [f"{step.action} [{step.where}] {step.reply}" for _, step in trace]
    return "\n".join(["", *lines, "the store:", *map(str, _flat(found)), "the model:", *map(str, _flat(expected))])


def _flat(what: tuple[Any, ...]) -> Iterator[Any]:
    answer, (lines, fence, due, records) = what
    yield answer
    yield from (lines, fence, due)
    yield from (sorted(record.items()) for record in records)
