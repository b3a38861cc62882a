"""A torture run: random faults over thousands of triggers, judged from outside.

    python tests/torture/run.py --minutes 4 --seed 7 --broker redis --persistence

The same seed gives the same triggers and the same schedule of faults. Exit code 0 only when all is within the guarantees.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "support")]

from torture_evidence import Reader  # noqa: E402
from torture_faults import Injector  # noqa: E402
from torture_judge import Expected, Judge, Verdict  # noqa: E402
from torture_place import Place  # noqa: E402
from torture_plan import FAULTS, Plan, Planned, make_plan  # noqa: E402
from torture_report import print_report, say  # noqa: E402
from torture_sabotage import SABOTAGES  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

_FINAL = ("SUCCESS", "FAILURE", "REVOKED")
#: Seconds after the last fault and the last trigger, until which the store has to bring back by itself what had entered; then
#: the broker gives out again what is not acknowledged, as its visibility timeout would make it do.
_STORES_TURN = 8.0
#: Seconds without any message or outcome after which what has no outcome will not get one.
_STILL = 6.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.seed is None:
        options.seed = random.randrange(10**6)
    kinds = _kinds(options)
    seconds = options.seconds or options.minutes * 60
    plan = make_plan(options.seed, seconds, kinds, rate=options.rate, keys=options.keys, ttl=options.lease_ttl, gap=options.gap)
    store = "with" if options.persistence else "without"
    say(f"seed {options.seed}, plan {plan.digest()}: {len(plan.triggers)} triggers and {len(plan.faults)} faults in")
    say(f"{seconds:.0f} s, broker {options.broker}, policy {options.policy}, store {store} persistence,")
    say(f"sabotage: {options.sabotage or 'none'}")
    if options.plan:
        for fault in plan.faults:
            say(f"{fault.at:7.2f} s  {fault.kind:15}  {fault.seconds:.2f} s  {FAULTS[fault.kind]}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    directory = Path(options.directory or tempfile.mkdtemp(prefix="sf-torture-"))
    directory.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(directory)
    verdict = Torture(options, plan, directory).perform()
    (directory / "recoveries.txt").write_text("\n".join(verdict.recoveries))
    print_report(verdict, options.lease_ttl)
    say(f"seed {options.seed}")
    if verdict.is_good and not options.directory:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        say(f"evidence and logs: {directory}")
    return 0 if verdict.is_good else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=4.0, help="how long triggers are published and faults made")
    parser.add_argument("--seconds", type=float, help="the same, for short runs")
    parser.add_argument("--seed", type=int, help="chosen and printed when not given")
    parser.add_argument("--broker", choices=("redis", "rabbitmq"), default="redis")
    parser.add_argument("--persistence", action=argparse.BooleanOptionalAction, default=True, help="of the store")
    parser.add_argument("--policy", choices=("requeue", "queue"), default="requeue", help="of all kinds but those that skip")
    parser.add_argument("--only", help=f"classes of faults, comma between them, of: {', '.join(FAULTS)}; or none")
    parser.add_argument("--rate", type=float, default=15.0, help="triggers per second")
    parser.add_argument("--gap", type=float, default=3.5, help="seconds between two faults, on average")
    parser.add_argument("--keys", type=int, default=40)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=3)
    parser.add_argument("--lease-ttl", type=float, default=2.0)
    parser.add_argument("--drain", type=float, default=90.0, help="seconds that all may take to end afterwards")
    parser.add_argument("--sabotage", choices=sorted(SABOTAGES), help="break the package in the workers: to test the judge")
    parser.add_argument("--directory", help="where evidence and logs are kept; else they are deleted after a good verdict")
    parser.add_argument("--plan", action="store_true", help="only print the schedule of faults")
    return parser.parse_args(arguments)


def _kinds(options: argparse.Namespace) -> list[str]:
    if options.only:
        kinds = [] if options.only == "none" else options.only.split(",")
        unknown = set(kinds) - set(FAULTS)
        if unknown:
            raise SystemExit(f"no such faults: {', '.join(unknown)}; there are: {', '.join(FAULTS)}")
        return kinds
    left_out = {"empty restart" if options.persistence else "store restart"}
    if options.broker == "redis":
        left_out.add("broker cut")
    if options.policy == "queue":
        # What is parked is as durable as the store: one that forgets loses it, and there would be nothing to judge.
        left_out |= {"empty restart", "flushall"}
    return [kind for kind in FAULTS if kind not in left_out]


class Torture:
    """One run, from the first process to the verdict."""

    def __init__(self, options: argparse.Namespace, plan: Plan, directory: Path) -> None:
        self.options, self.plan, self.directory = options, plan, directory
        self.expected: dict[str, Expected] = {}
        #: Heads of chains: only after a success the tail is to be expected.
        self.tails: dict[str, Expected] = {}
        self.states: dict[str, tuple[str, Any]] = {}
        self.published: list[Planned] = []
        self.most_waiting = 0

    def perform(self) -> Verdict:
        options = self.options
        self.place = Place(
            self.directory,
            broker=options.broker,
            persistence=options.persistence,
            workers=options.workers,
            concurrency=options.concurrency,
            ttl=options.lease_ttl,
            sabotage=options.sabotage or "",
            policy=options.policy,
        )
        try:
            self.reader = Reader(self.directory)
            self.injector = Injector(self.place, self.reader, self.publish_again)
            self._play()
            self.injector.wait()
            say("the faults are over; everything has to end now")
            drained_in = self._drain()
            say(f"ended in {drained_in:.1f} s; at most {self.most_waiting} triggers were behind")
            return self._judge(drained_in)
        finally:
            (self.directory / "workers.log").write_text(self.place.logs())
            self.place.close()

    def _play(self) -> None:
        """Publish and strike by the plan."""
        steps: list[Any] = sorted([*self.plan.triggers, *self.plan.faults], key=lambda step: step.at)
        start, told = time.monotonic(), 0.0
        for step in steps:
            time.sleep(max(start + step.at - time.monotonic(), 0.0))
            if isinstance(step, Planned):
                self._publish(step)
            else:
                self.injector.start(step)
            if step.at - told >= 20:
                told = step.at
                self._look()
                behind = len(self._open())
                self.most_waiting = max(self.most_waiting, behind)
                say(f"{step.at:5.0f} s: {len(self.expected)} triggers, {behind} without an outcome yet")

    def _publish(self, planned: Planned) -> None:
        tasks = self.place.app.tasks
        arguments = {"key": planned.key, "seconds": planned.seconds, "early": planned.early}
        kind, at = planned.kind, time.monotonic()
        self.published.append(planned)
        self.expected[planned.id] = Expected(planned.id, kind, at, planned.execution or planned.id)
        if kind == "chain":
            head = tasks["torture.work"].si(**arguments, kind="head", linger=planned.linger).set(task_id=planned.id)
            tail = tasks["torture.work"].si(planned.key, 0.02, early=False, kind="tail").set(task_id=planned.tail)
            self.tails[planned.id] = Expected(planned.tail, "tail", at, planned.tail)
            (head | tail).apply_async()
        elif kind == "paid":
            work = tasks["torture.work"]
            arguments |= {"kind": "paid", "linger": planned.linger}
            work.apply_async(kwargs=arguments, task_id=planned.id, execution_key=planned.execution)
        else:
            tasks[f"torture.{kind}"].apply_async(kwargs=arguments, task_id=planned.id)

    def publish_again(self, dice: tuple[float, float]) -> None:
        """Publish some of the last triggers a second time, as the same message."""
        chance = random.Random(dice[0])
        recent = [planned for planned in self.published[-60:] if planned.kind not in ("chain", "overrun")]
        tasks = self.place.app.tasks
        for planned in chance.sample(recent, min(5, len(recent))):
            task = tasks[f"torture.{'work' if planned.kind == 'paid' else planned.kind}"]
            arguments = {"key": planned.key, "seconds": planned.seconds, "early": planned.early}
            more = {"execution_key": planned.execution} if planned.execution else {}
            if planned.kind == "paid":
                arguments["kind"] = "paid"
            task.apply_async(kwargs=arguments, task_id=planned.id, **more)

    def _open(self) -> list[str]:
        return [task_id for task_id in self.expected if self.states.get(task_id, ("", None))[0] not in _FINAL]

    def _look(self) -> None:
        """Take in what Celery has as results."""
        backend, client = self.place.app.backend, self.place.result_client()
        ids = self._open()
        for first in range(0, len(ids), 500):
            some = ids[first : first + 500]
            for task_id, raw in zip(some, client.mget([backend.get_key_for_task(each) for each in some]), strict=True):
                if raw is not None:
                    meta = backend.decode(raw)
                    self.states[task_id] = (meta["status"], meta["result"])
        for head, tail in self.tails.items():
            if self.states.get(head, ("", None))[0] == "SUCCESS":
                self.expected.setdefault(tail.id, tail)

    def _drain(self) -> float:
        """Wait until each trigger has its outcome, or nothing moves any more. Returns how long it took."""
        start = moved = time.monotonic()
        turn = start + _STORES_TURN
        left = -1
        while time.monotonic() - start < self.options.drain:
            self._look()
            if not self._open():
                self._look()  # the tails of the last heads
                if not self._open():
                    break
            if len(self._open()) != left or not self._is_still():
                left, moved = len(self._open()), time.monotonic()
            if time.monotonic() - moved > _STILL:
                break
            if self.place.is_redis and time.monotonic() > turn:
                turn = time.monotonic() + _STORES_TURN
                count = self.place.deliver_again(1.0)
                say(f"{len(self._open())} without an outcome; the broker gives out {count} messages again")
            time.sleep(0.25)
        return time.monotonic() - start

    def _is_still(self) -> bool:
        """Whether neither the broker nor the store has anything more to give; only of Redis is it known."""
        client = self.place.store_client()
        is_due = any(client.zcard(name) for name in client.scan_iter("*:due:*", 1000))
        return self.place.is_redis and not is_due and not self.place.waiting_messages()

    def _judge(self, drained_in: float) -> Verdict:
        leftovers = self._await_clean_store()
        self._look()
        self.reader.read()
        checks = [
            ("all ended within, s", f"{drained_in:.1f}", f"≤ {self.options.drain:.0f}", drained_in < self.options.drain),
            *leftovers,
            *self._memory(),
        ]
        judge = Judge(
            self.reader.rows,
            self.expected.values(),
            self.injector.struck,
            self.states,
            self._records(),
            ttl=self.options.lease_ttl,
            logs=self.place.logs(),
            wall=time.time() - time.monotonic(),
        )
        faults = [f"{struck}\n" for struck in judge.struck]
        (self.directory / "faults.txt").write_text(f"start {judge.start}\n{''.join(faults)}")
        return judge.verdict(checks)

    def _await_clean_store(self) -> list[tuple[str, str, str, bool]]:
        """No live lease, nothing due, no message left; what is settled in batches is given a while."""
        until = time.monotonic() + (2 if self._open() else 20)
        while True:
            client = self.place.store_client()
            now = sum(n * f for n, f in zip(client.time(), (1000, 0.001), strict=True))
            lines = [line for name in client.scan_iter("*:lease:*", 1000) for line in client.hvals(name)]
            live = [line for line in lines if int(line.split(b"\n")[0]) > now]
            due = [(name, member) for name in client.scan_iter("*:due:*", 1000) for member in client.zrange(name, 0, -1)]
            names = [*client.scan_iter("*:trigger:*", 1000), *client.scan_iter("*:execution:*", 1000)]
            with client.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hmget(name, "message", "outcome", "settled")
                # That of one that did not succeed is kept, to be replayed.
                kept = [
                    name
                    for name, (message, outcome, is_settled) in zip(names, pipe.execute(), strict=True)
                    if message and (outcome in (None, b"succeeded", b"coalesced") or not is_settled)
                ]
            if not (live or due or kept) or time.monotonic() > until:
                break
            time.sleep(0.5)
        return [
            ("live leases", str(len(live)), "0", not live),
            ("triggers that are due", f"{len(due)} {due[:3] or ''}".strip(), "0", not due),
            ("messages that the store keeps", f"{len(kept)} {kept[:3] or ''}".strip(), "0", not kept),
        ]

    def _memory(self) -> list[tuple[str, str, str, bool]]:
        client = self.place.store_client()
        names = list(client.scan_iter("*", 1000))
        with client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.pttl(name)
            eternal = [name for name, ttl in zip(names, pipe.execute(), strict=True) if ttl == -1]
        units = len({each.id for each in self.expected.values()} | {each.execution for each in self.expected.values()})
        # A lease, a fence and a pace for each key of two lock names, and an index for each lock name.
        bound = units + 3 * 2 * (self.options.keys + 5) + 10
        waiting = self.place.waiting_messages()
        until = time.monotonic() + (2 if self._open() else 15)
        while waiting and time.monotonic() < until:
            time.sleep(0.5)
            if self.place.is_redis:
                self.place.deliver_again(1.0)
            waiting = self.place.waiting_messages()
        return [
            ("keys in the store", str(len(names)), f"≤ {bound}", len(names) <= bound),
            ("keys without an end", f"{len(eternal)} {eternal[:3] or ''}".strip(), "0", not eternal),
            ("messages in the broker", str(waiting), "0", not waiting),
        ]

    def _records(self) -> dict[str, dict[str, str]]:
        client = self.place.store_client()
        names = list(client.scan_iter("*:trigger:*", 1000))
        with client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hgetall(name)
            found = pipe.execute()
        return {
            name.decode().rpartition(":")[2]: {
                field.decode(): value.decode(errors="replace") for field, value in record.items()
            }
            for name, record in zip(names, found, strict=True)
        }


if __name__ == "__main__":
    sys.exit(main())
