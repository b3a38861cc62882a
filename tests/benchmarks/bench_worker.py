"""What a worker makes of messages that wait for it: throughput, CPU time in its pool's children, calls on the store."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import bench_meter as meter
import psutil
import redis
from bench_app import VARIANTS, config
from bench_environment import ProcessContainer, ValkeyContainer, environment, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

_WORKER = ["celery", "-A", "bench_app", "worker", "-P", "prefork", "-l", "warning", "--without-gossip", "--without-mingle"]
_QUEUE = "celery"
_END = "the-end-of-the-drain"
#: Makes the messages in a process of its own: a plain publisher has nothing of the package, and none stays to hear results.
_PUBLISH = "import sys, bench_app as b; t = b.app.tasks[sys.argv[1]]; [t.apply_async((n,)) for n in range(int(sys.argv[2]))]"


class Drain(NamedTuple):
    """One queue of no-op tasks, drained by one worker. Times in seconds, CPU times in microseconds per task."""

    tasks: int
    #: From the first body to the last; the worker's start does not count.
    seconds: float
    child_cpu: float
    main_cpu: float
    server_cpu: float
    #: Part of the machine's CPU time that neither the worker, nor the server, nor the benchmark itself has got.
    others: float
    #: EVALSHA and EVAL together, as the server counts them.
    script_calls: int

    @property
    def per_second(self) -> float:
        return self.tasks / self.seconds


class WorkerBench:
    """Publishes each variant's messages once, and lets workers drain the same messages from an otherwise empty server."""

    def __init__(self, server: ValkeyContainer, tasks: int, concurrency: int) -> None:
        url = self._url = server.url
        self._server = server.pid
        self.client = redis.Redis.from_url(url)
        self._address = "127.0.0.1", server.port
        self._tasks = tasks
        self._concurrency = concurrency
        self._messages: dict[str, list[bytes]] = {}
        #: Script calls while each variant's messages were published.
        self.at_publish = {variant: self._publish(variant) for variant in VARIANTS}

    def rounds(self, pairs: int) -> Iterator[dict[str, Drain]]:
        """Drain each variant once a round, in rotating order. One more before, of all variants, warms up the server."""
        for variant in VARIANTS:
            self.drain(variant)
        for n in range(pairs):
            turn = n % len(VARIANTS)
            drained = {variant: self.drain(variant) for variant in VARIANTS[turn:] + VARIANTS[:turn]}
            yield {variant: drained[variant] for variant in VARIANTS}

    def drain(self, variant: str) -> Drain:
        """Start a worker on the waiting messages, end it when it has run them all. Raises unless each has run once."""
        self.client.flushall()
        self.client.rpush(_QUEUE, *self._messages[variant])
        self.client.config_resetstat()
        readings = Path(tempfile.mkdtemp(prefix="sf-meter-"))
        worker = ProcessContainer(
            "bench",
            [sys.executable, "-m", *_WORKER, "-c", str(self._concurrency)],
            self._environment(variant, BENCH_METER=str(readings), C_FORCE_ROOT="1"),
        )
        try:
            main = psutil.Process(worker.pid)
            wait_until(lambda: _began(readings) or worker.process.poll() is not None, 60, f"a {variant} worker has started")
            clocks = [_Clock(), _Clock(main), _Clock(psutil.Process(self._server))]
            psutil.cpu_percent()
            began = time.monotonic()
            wait_until(
                lambda: _began(readings) >= self._tasks or worker.process.poll() is not None,
                60 + self._tasks / 20,
                f"{self._tasks} {variant} tasks have run",
            )
            own, main_cpu, server_cpu = (clock.seconds() for clock in clocks)
            window = (time.monotonic() - began) * (psutil.cpu_count() or 1)
            busy = psutil.cpu_percent() / 100
            wait_until(lambda: self.client.hlen("unacked") == 0, 30, "the worker has acked the last tasks")
        finally:
            worker.teardown()
        noted = [reading for reading in meter.read(readings) if reading.count]
        ran = sum(reading.count for reading in noted)
        if ran != self._tasks or len(noted) > self._concurrency:
            raise AssertionError(f"{self._tasks} tasks ran {ran} times in {len(noted)} processes:\n{worker.logs()}")
        children_cpu = sum(reading.last_cpu - reading.first_cpu for reading in noted)
        return Drain(
            tasks=ran,
            seconds=max(reading.last_at for reading in noted) - min(reading.first_at for reading in noted),
            # From a process' first body to its last: one task less than it has run, and no connection is made on the way.
            child_cpu=children_cpu / max(ran - len(noted), 1) * 1e6,
            main_cpu=main_cpu / ran * 1e6,
            server_cpu=server_cpu / ran * 1e6,
            others=max(busy - (own + main_cpu + server_cpu + children_cpu) / window, 0.0),
            script_calls=self._script_calls(),
        )

    def calls_by_script(self, names: dict[str, str]) -> tuple[dict[str, int], Drain]:
        """Drain the protected variant under MONITOR, and count the calls of each script; `names` has them by their SHA1.

        Too slow to be timed. A script that has no name and none of our keys is one of Celery's own.
        """
        calls = dict.fromkeys([*names.values(), "others", "Celery's own"], 0)
        with socket.create_connection(self._address) as monitor, monitor.makefile("r", errors="replace") as lines:
            monitor.sendall(b"MONITOR\r\n")
            lines.readline()
            drained = self.drain("protected")
            self.client.echo(_END)
            for line in lines:
                command, *arguments = line.partition('] "')[2].split('" "', 2)
                if command.upper() in ("EVALSHA", "EVAL"):
                    other = "others" if '"{sf' in arguments[1] else "Celery's own"
                    calls[names.get(arguments[0], other)] += 1
                elif _END in line:
                    break
        return calls, drained

    def _publish(self, variant: str) -> int:
        self.client.flushall()
        self.client.config_resetstat()
        subprocess.run(
            [sys.executable, "-c", _PUBLISH, f"bench.{variant}", str(self._tasks)],
            check=True,
            env=self._environment(variant),
        )
        self._messages[variant] = self.client.lrange(_QUEUE, 0, -1)
        assert len(self._messages[variant]) == self._tasks
        return self._script_calls()

    def _environment(self, variant: str, **more: str) -> dict[str, str]:
        return environment(BENCH_VARIANT=variant, CELERY_TEST_CONFIG=json.dumps(config(self._url)), **more)

    def _script_calls(self) -> int:
        statistics = self.client.info("commandstats")
        return sum(statistics.get(f"cmdstat_{command}", {}).get("calls", 0) for command in ("eval", "evalsha"))


def _began(directory: Path) -> int:
    return sum(reading.count for reading in meter.read(directory))


class _Clock:
    """The CPU time of a process from now on."""

    def __init__(self, process: psutil.Process | None = None) -> None:
        self._process = process or psutil.Process()
        self._before = self._spent()

    def seconds(self) -> float:
        return self._spent() - self._before

    def _spent(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)
