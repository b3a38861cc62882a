"""The real parts of a torture run: a store behind a proxy, a broker, workers that are started again when they have died."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import redis
import torture_app
from nodes import SUPPORT, ValkeyContainer, WorkerContainer, wait_until
from proxy import Proxy

#: Of a persistent store: a reply is sent when what it says is on disk.
_PERSISTENT = ("--appendonly", "yes", "--appendfsync", "always", "--save", "")


class Slot:
    """The place of one worker: a process that is started again, under the same name."""

    def __init__(self, name: str, config: dict[str, Any], env: dict[str, str], concurrency: int) -> None:
        self.name = name
        self._config, self._env, self._concurrency = config, env, concurrency
        self.incarnations: list[WorkerContainer] = []
        self._guard = threading.Lock()
        self.start()

    @property
    def worker(self) -> WorkerContainer:
        return self.incarnations[-1]

    def start(self) -> None:
        self.incarnations.append(
            WorkerContainer(
                self.name,
                self._config,
                "--without-heartbeat",
                module="torture_app",
                concurrency=self._concurrency,
                env=self._env,
            )
        )

    def ready(self) -> None:
        self.worker.ready()

    def children(self) -> list[int]:
        with contextlib.suppress(OSError):
            return self.worker.children()
        return []

    def is_up(self) -> bool:
        return self.worker.status == "running"

    def kill(self, *, whole: bool) -> dict[int, float]:
        """SIGKILL; returns which processes are dead since when. Without `whole` the kernel ends the pool's processes."""
        with self._guard:
            pids = [self.worker.pid, *self.children()]
            if whole:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.worker.pid, signal.SIGKILL)
            else:
                os.kill(self.worker.pid, signal.SIGKILL)
            at = time.monotonic()
            self.worker.process.wait(10)
            return dict.fromkeys(pids, at)

    def leave(self, timeout: float) -> bool:
        """SIGTERM, a warm shutdown. Returns whether it has gone in time."""
        self.worker.process.terminate()
        with contextlib.suppress(Exception):
            self.worker.process.wait(timeout)
        return not self.is_up()

    def logs(self) -> str:
        return "\n".join(f"--- {self.name}\n{worker.logs()}" for worker in self.incarnations)


class Place:
    """Everything there is, as a context."""

    def __init__(
        self,
        directory: Path,
        *,
        broker: str,
        persistence: bool,
        workers: int,
        concurrency: int,
        ttl: float,
        sabotage: str = "",
        policy: str = "requeue",
    ) -> None:
        self.directory = directory
        self.is_redis = broker == "redis"
        self.queue = f"torture-{uuid4().hex[:8]}"
        self._started: list[Any] = []
        self._stalls = 0
        self._guard = threading.Lock()
        try:
            self._start(persistence, workers, concurrency, {"ttl": ttl, "policy": policy}, sabotage)
        except BaseException:
            self.close()
            raise

    def _start(self, persistence: bool, workers: int, concurrency: int, options: dict[str, Any], sabotage: str) -> None:
        self.store = self._add(ValkeyContainer("store", *(_PERSISTENT if persistence else ())))
        self.results = self._add(ValkeyContainer("broker"))
        for server in (self.store, self.results):
            server.ready()
        self.store_proxy = Proxy("127.0.0.1", self.store.port)
        rabbitmq = os.environ.get("TEST_RABBITMQ_URL", "amqp://guest:guest@127.0.0.1:5672//")
        broker_url = f"{self.results.url}/0" if self.is_redis else rabbitmq
        parts = urlsplit(broker_url)
        self.broker_proxy = Proxy(parts.hostname or "127.0.0.1", parts.port or 5672)
        own = {
            "task_default_queue": self.queue,
            "task_default_exchange": self.queue,
            "task_default_routing_key": self.queue,
            "result_backend": f"{self.results.url}/1",
            "singleflight_lease_ttl": options["ttl"],
            "singleflight_contention_policy": options["policy"],
            "worker_prefetch_multiplier": 1,
            "worker_enable_remote_control": False,
            "broker_connection_retry_on_startup": True,
            "broker_connection_max_retries": None,
            "result_backend_always_retry": True,
        }
        if self.is_redis:
            own["broker_transport_options"] = {"visibility_timeout": 3600}
        ours = {**own, "broker_url": broker_url, "singleflight_url": f"{self.store.url}/2"}
        self.app = torture_app.make_app(ours, str(self.directory))
        theirs = {
            **own,
            # A proxy would take from the Redis broker what is on its way to a worker that has just died.
            "broker_url": broker_url if self.is_redis else self.broker_proxy.url_for(broker_url),
            "singleflight_url": self.store_proxy.url_for(f"{self.store.url}/2"),
        }
        env = {
            "TORTURE_CONFIG": json.dumps(theirs),
            "TORTURE_DIRECTORY": str(self.directory),
            "TORTURE_SABOTAGE": sabotage,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
        }
        self.slots = [self._add(Slot(f"t{n}-{uuid4().hex[:6]}", theirs, env, concurrency)) for n in range(workers)]
        for slot in self.slots:
            slot.ready()

    def _add(self, started: Any) -> Any:
        self._started.append(started)
        return started

    def store_client(self) -> redis.Redis:
        return redis.Redis.from_url(f"{self.store.url}/2", socket_timeout=5)

    def broker_client(self) -> redis.Redis:
        return redis.Redis.from_url(f"{self.results.url}/0", socket_timeout=5)

    def result_client(self) -> redis.Redis:
        return redis.Redis.from_url(f"{self.results.url}/1", socket_timeout=5)

    def restart_store(self, pause: float) -> None:
        self.store.kill("SIGKILL")
        time.sleep(pause)
        self.store.start()
        self.await_store()

    def await_store(self) -> None:
        def answers() -> bool:
            with contextlib.suppress(redis.RedisError):
                return bool(self.store_client().ping())
            return False

        wait_until(answers, 20, "the store answers")

    def stall_store(self, seconds: float) -> None:
        with self._guard:
            self._stalls += 1
            self.store_proxy.stall()
        time.sleep(seconds)
        with self._guard:
            self._stalls -= 1
            if not self._stalls:
                self.store_proxy.resume()

    def deliver_again(self, chance: float) -> int:
        """Do what the broker would do when the visibility timeout has passed: give out again whatever is not acknowledged.

        `chance` is the part of it. Returns how many messages.
        """
        client = self.broker_client()
        tags = sorted(client.zrange("unacked_index", 0, -1))
        tags = tags[: max(round(len(tags) * chance), 1)]
        if not tags:
            return 0
        client.zadd("unacked_index", dict.fromkeys(tags, 1), xx=True)
        with self.app.connection_for_read() as connection:
            connection.default_channel.qos.restore_visible(num=5000, interval=1)
        return len(tags)

    def waiting_messages(self) -> int:
        """How many messages the broker holds, delivered or not; those only that it can count."""
        if self.is_redis:
            client = self.broker_client()
            return int(client.llen(self.queue)) + int(client.zcard("unacked_index"))
        with self.app.connection_for_read() as connection:
            return int(connection.default_channel.queue_declare(self.queue, passive=True).message_count)

    def logs(self) -> str:
        return "\n".join(slot.logs() for slot in self.slots)

    def close(self) -> None:
        """End all that runs; what was made in a broker of the machine's own is deleted."""
        workers = [worker for slot in self._started if isinstance(slot, Slot) for worker in slot.incarnations]
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        for worker in workers:
            worker.teardown()
        if not self.is_redis and hasattr(self, "app"):
            with contextlib.suppress(Exception), self.app.connection_for_write() as connection:
                connection.default_channel.queue_delete(self.queue)
                connection.default_channel.exchange_delete(self.queue)
        if hasattr(self, "app"):
            self.app.close()
        for proxy in (getattr(self, "store_proxy", None), getattr(self, "broker_proxy", None)):
            if proxy is not None:
                proxy.close()
        for server in self._started:
            if isinstance(server, ValkeyContainer):
                server.teardown()
