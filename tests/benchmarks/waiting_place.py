"""A place to wait in: its own servers, workers and notes, used for one measurement."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psutil
import redis
from amqp.exceptions import NotFound
from bench_environment import ProcessContainer, ValkeyContainer, environment, new_directory, wait_until
from crowd_app import make_app
from waiting_notes import Notes
from waiting_order import Turn, out_of_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

RABBITMQ = os.environ.get("TEST_RABBITMQ_URL", "amqp://guest:guest@127.0.0.1:5672//")
#: Seconds without any progress after which what is still to come is taken for lost; more than the longest countdown.
PATIENCE = 100.0
_WORKER = ["celery", "-A", "crowd_app", "worker", "-P", "prefork", "-l", "warning", "--without-gossip", "--without-mingle"]
KEY = "the-key"


def own_key(number: int, family: str = "turn") -> str:
    """The key that only the trigger of this number has."""
    return f"{family}-key-{number}"


class Place:
    """One Valkey as store, result backend and, unless RabbitMQ is asked for, broker; a queue of its own; no worker yet."""

    def __init__(self, policy: str, broker: str, *, store_apart: bool = False, **settings: object) -> None:
        self.policy = policy
        self.broker = broker
        self._servers: list[ValkeyContainer] = []
        self.workers: list[ProcessContainer] = []
        self._directory = new_directory("waiting")
        self.notes = Notes(self._directory)
        self._queue = f"waiting-{uuid4().hex[:8]}"
        try:
            self._prepare(store_apart=store_apart, more=settings)
        except BaseException:
            self.end()
            raise

    def _prepare(self, *, store_apart: bool, more: dict[str, object]) -> None:
        store = self.server = self._serve()
        other = self._serve() if store_apart else store
        self._settings = {
            "broker_url": RABBITMQ if self.broker == "rabbitmq" else f"{other.url}/0",
            "result_backend": f"{other.url}/1",
            "singleflight_url": f"{store.url}/2",
            "task_default_queue": self._queue,
            "broker_connection_retry_on_startup": True,
            **more,
        }
        self.store = redis.Redis.from_url(f"{store.url}/2")
        # A publisher that waits for results subscribes to each, which costs far more than what is published.
        self.app = make_app({**self._settings, "result_backend": "disabled"}, self.policy)
        self._connection = self.app.connection_for_write()
        self._producer = self.app.amqp.Producer(self._connection)

    def _serve(self) -> ValkeyContainer:
        server = ValkeyContainer()
        self._servers.append(server)
        server.ready()
        return server

    def start_worker(self, concurrency: int) -> ProcessContainer:
        """Start a worker; `until_ready` waits for it."""
        worker = ProcessContainer(
            "waiting",
            [sys.executable, "-m", *_WORKER, "-c", str(concurrency), "-n", f"w{len(self.workers)}@{self._queue}"],
            environment(
                WAITING_POLICY=self.policy,
                WAITING_NOTES=str(self._directory),
                CELERY_TEST_CONFIG=json.dumps(self._settings),
                C_FORCE_ROOT="1",
            ),
        )
        self.workers.append(worker)
        return worker

    def is_ready(self) -> bool:
        """Whether each worker has said so, since it was started last."""
        return {worker.pid for worker in self.workers} <= set(self.notes.refresh().of("ready", "worker"))

    def until_ready(self) -> None:
        wait_until(lambda: self._workers_run() and self.is_ready(), 60, "the workers are ready")

    def warm_up(self, concurrency: int) -> None:
        """Let every process of the pool have run a few bodies and met contention, on keys of their own."""
        count = 5 * concurrency
        self.publish(range(count), seconds=0.02, key=None, family="warm")
        self.publish(range(count, 2 * count), seconds=0.02, key="warm-key", family="warm")
        assert self.until("end", 2 * count, "warm"), self.logs()
        self.quiet()

    def publish(self, numbers: Iterable[int], *, seconds: float, key: str | None = KEY, family: str = "turn") -> None:
        """Publish triggers of these numbers on one key, or each on a key of its own."""
        turn = self.app.tasks["waiting.turn"]
        for n in numbers:
            turn.apply_async((key or own_key(n, family), seconds), task_id=f"{family}-{n}", producer=self._producer)

    def send(self, task: str, task_id: str, *args: Any) -> float:
        """Publish one message of another task, and return the time before."""
        now = time.monotonic()
        self.app.tasks[task].apply_async(args, task_id=task_id, producer=self._producer)
        return now

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within the block a task holds the key; it takes one of the pool's processes."""
        gate = self._directory / "gate"
        self.send("waiting.hold", "hold-0", KEY, str(gate))
        assert self.until("begin", 1, "hold"), self.logs()
        try:
            yield
        finally:
            gate.touch()

    def until(
        self, kind: str, count: int, family: str = "turn", *, patience: float = PATIENCE, meanwhile: Callable[[], object] = int
    ) -> bool:
        """Wait until so many triggers have a note of that kind. Returns False when no other came within `patience` seconds."""
        before, deadline = -1, 0.0
        while (noted := len(self.notes.refresh().of(kind, family))) < count:
            if noted > before:
                before, deadline = noted, time.monotonic() + patience
            elif time.monotonic() > deadline:
                return False
            meanwhile()
            self._workers_run()
            time.sleep(0.01)
        return True

    def quiet(self, seconds: float = 0.5) -> None:
        """Wait until so many seconds have passed in which no message was received and none was begun on."""
        before, since = -1, time.monotonic()

        def is_quiet() -> bool:
            nonlocal before, since
            now = sum(self.notes.refresh().count(kind) for kind in ("received", "prerun", "end"))
            if now != before:
                before, since = now, time.monotonic()
            return time.monotonic() - since > seconds

        wait_until(is_quiet, 120, "the workers have nothing to do")

    def out_of_order(self, by: str) -> float:
        """Percentage of the pairs of triggers that ran out of order, by "publish" or by "arrival".

        By arrival means by the tickets of the store; when it gives none, of the pairs that have certainly arrived one after
        the other.
        """
        turns = []
        for number in self.notes.of("begin"):
            began, earliest, latest = (self.notes.first(kind, number) for kind in ("begin", "asked", "answered"))
            arrival = (earliest.at, latest.at)
            if by == "publish":
                arrival = (number, number)
            elif self.gives_tickets:
                arrival = (float(latest.value), float(latest.value))
            turns.append(Turn(*arrival, began.at))
        return out_of_order(turns)

    @property
    def gives_tickets(self) -> bool:
        """Whether the first answer of the store to every trigger tells its ticket."""
        return all(self.notes.first("answered", number).value for number in self.notes.of("answered"))

    def processes(self) -> list[psutil.Process]:
        """The workers' main processes and, after each, its pool's."""
        mains = [psutil.Process(worker.pid) for worker in self.workers]
        return [process for main in mains for process in (main, *main.children(recursive=True))]

    def kinds(self) -> dict[str, int]:
        """How many keys of each kind the package has in the store."""
        found: dict[str, int] = {}
        for name in self.store.scan_iter("{sf*", count=1000):
            kind = name.split(b":")[2].decode()
            found[kind] = found.get(kind, 0) + 1
        return found

    def until_settled(self, seconds: float) -> None:
        """Wait until the sweeper has nothing more to look at, at most so long: then what is left is what stays."""
        deadline = time.monotonic() + seconds
        while self.kinds().get("due") and time.monotonic() < deadline:
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(worker.logs()[-5000:] for worker in self.workers)

    def _workers_run(self) -> bool:
        for worker in self.workers:
            assert worker.status == "running", f"a worker has exited:\n{worker.logs()}"
        return True

    def end(self) -> None:
        """End all at once: what still waits need not run."""
        for worker in self.workers:
            worker.kill(signal.SIGKILL)
            worker.teardown()
        if self.workers and self.broker == "rabbitmq":
            with self.app.connection_for_write() as connection, suppress(NotFound):
                connection.default_channel.queue_delete(self._queue)
        if hasattr(self, "_connection"):
            self._connection.release()
        for server in self._servers:
            server.teardown()


@contextmanager
def place(policy: str, broker: str = "redis", **how: Any) -> Iterator[Place]:
    """Yield a place, and end its processes with the block."""
    made = Place(policy, broker, **how)
    try:
        yield made
    finally:
        made.end()
