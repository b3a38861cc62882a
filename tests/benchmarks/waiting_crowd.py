"""Many triggers that wait while the key is held: what they cost those who have nothing to do with it, and the worker."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

import redis
from bench_environment import wait_until
from waiting_drain import Drained, judged

if TYPE_CHECKING:
    from waiting_place import Place

#: Seconds after which an unrelated task is no longer waited for; its latency is at least this.
_LONGEST = 30.0
#: Seconds in which unrelated tasks are published, at most.
_BUDGET = 60.0
#: Seconds without a further trigger's arrival after which the others are taken to wait in the broker.
_ARRIVAL = 10.0
#: Seconds in which workers and processes of their pools are killed, at most; then the rest drains in peace.
_KILLING = 60.0


class Unrelated(NamedTuple):
    """Tasks beside triggers that wait. Latencies in ms from before the publish to the body's begin."""

    latencies: list[float]
    #: Triggers that had asked the store when the first unrelated task was published.
    arrived: int
    #: Deliveries of waiting triggers for each second in which only unrelated tasks were published.
    deliveries_per_second: float


def unrelated(place: Place, waiters: int, samples: int, *, concurrency: int) -> Unrelated:
    """Let triggers wait on one key, and publish unrelated tasks, plain and protected in turn, on the same queue."""
    place.start_worker(concurrency)
    place.until_ready()
    place.warm_up(concurrency)
    latencies = []
    has_other = "waiting.other" in place.app.tasks
    with place.held():
        place.publish(range(waiters), seconds=0.0)
        place.until("answered", waiters, patience=_ARRIVAL)
        arrived, before, began = len(place.notes.of("answered")), place.notes.count("received"), time.monotonic()
        for n in range(samples):
            if time.monotonic() - began > _BUDGET:
                break
            name = "waiting.other" if has_other and n % 2 else "waiting.plain"
            sent = place.send(name, f"unrelated-{n}", *([n] if name == "waiting.other" else []))
            place.until("begin", n + 1, "unrelated", patience=_LONGEST)
            noted = place.notes.of("begin", "unrelated").get(n)
            latencies.append((noted[0].at - sent if noted else _LONGEST) * 1000)
            time.sleep(random.uniform(0.0, 0.1))  # so that the samples spread over the rhythm of those that wait
        seconds = time.monotonic() - began
        received = place.notes.refresh().count("received") - before
    return Unrelated(latencies, arrived, received / seconds)


class HeldStill(NamedTuple):
    """What happens while the key is held and nothing else does: how many deliveries in how many seconds."""

    arrived: int
    deliveries: int
    seconds: float


def held_still(place: Place, waiters: int, seconds: float, *, concurrency: int) -> HeldStill:
    """Let triggers wait on one key, and watch for so many seconds."""
    place.start_worker(concurrency)
    place.until_ready()
    with place.held():
        place.publish(range(waiters), seconds=0.0)
        place.until("answered", waiters, patience=_ARRIVAL)
        notes = place.notes.refresh()
        # Each delivery is first received and then begun on, so what was on its way is not counted as a new one.
        arrived, before, began = len(notes.of("answered")), notes.count("received"), time.monotonic()
        wait_until(lambda: time.monotonic() - began > seconds, seconds + 5, "the time to watch is over")
        return HeldStill(arrived, notes.refresh().count("received") - before, time.monotonic() - began)


class Memory(NamedTuple):
    """Resident memory in MiB: of all of the worker's processes, and of its main process among them."""

    worker: float
    main: float


class Crowd(NamedTuple):
    """Triggers that waited and were then drained, and the worker's memory before, with some and with all of them waiting."""

    before: Memory
    with_some: Memory
    with_all: Memory
    drained: Drained


def crowd(place: Place, some: int, waiters: int, seconds: float, *, concurrency: int) -> Crowd:
    """Let some triggers wait on one key, then all, then drain them."""
    place.start_worker(concurrency)
    place.until_ready()
    place.warm_up(concurrency)
    server = redis.Redis.from_url(place.server.url)
    server.config_resetstat()
    with place.held():
        memory = [_memory(place)]
        for numbers in (range(some), range(some, waiters)):
            place.publish(numbers, seconds=seconds)
            place.until("answered", numbers.stop, patience=_ARRIVAL)
            memory.append(_memory(place))
    place.until("end", waiters)
    place.quiet()
    return Crowd(*memory, judged(place, waiters, seconds, server))


def _memory(place: Place) -> Memory:
    main, *pool = (process.memory_info().rss / 2**20 for process in place.processes())
    return Memory(main + sum(pool), main)


class Killed(NamedTuple):
    """Triggers that were drained while processes were killed."""

    children: int
    workers: int
    drained: Drained


def killed(place: Place, waiters: int, seconds: float, kills: int, *, concurrency: int) -> Killed:
    """Drain triggers of one key by two workers; a pool's process or a whole worker is killed, so often, and started again."""
    for _ in range(2):
        place.start_worker(concurrency)
    place.until_ready()
    server = redis.Redis.from_url(place.server.url)
    server.config_resetstat()
    with place.held():
        place.publish(range(waiters), seconds=seconds)
        place.until("answered", waiters, patience=_ARRIVAL)
    killer = _Killer(place, kills)
    place.until("end", waiters, meanwhile=killer.look)
    place.quiet()
    return Killed(killer.children, killer.workers, judged(place, waiters, seconds, server))


class _Killer:
    """Kills in turn a pool's process and a worker with its pool, which it starts again.

    Once a second, and only when all workers are ready: on a busy machine none would ever come to run anything.
    """

    def __init__(self, place: Place, kills: int) -> None:
        self._place = place
        self._most = kills
        self._began = self._last = time.monotonic()
        self.children = self.workers = 0

    def look(self) -> None:
        now = time.monotonic()
        if now - self._last < 1.0 or now - self._began > _KILLING or self.children + self.workers == self._most:
            return
        if not self._place.is_ready():
            return
        self._last = now
        if self.children <= self.workers:
            self._kill_child()
        else:
            self._kill_worker()

    def _kill_child(self) -> None:
        worker = self._place.workers[self.children % 2]
        pool = [process.pid for process in self._place.processes() if process.ppid() == worker.pid]
        os.kill(random.choice(pool), signal.SIGKILL)
        self.children += 1

    def _kill_worker(self) -> None:
        worker = self._place.workers[self.workers % 2]
        os.killpg(worker.pid, signal.SIGKILL)
        worker.process.wait(10)
        worker.start()
        self.workers += 1
