from __future__ import annotations

import contextvars
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from uuid import uuid4

import fakeredis
import pytest
from celery import Celery
from kombu.serialization import prepare_accept_content
from kombu.utils.imports import symbol_by_name

from celery_singleflight import SingleflightTask, coordination, lock
from celery_singleflight.connection import ClientConnections
from celery_singleflight.keys import LockKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from celery_singleflight.store import Store


class Place:
    """An app on a store of its own, and a look at that store from outside."""

    def __init__(self, app: Celery, server: fakeredis.FakeServer) -> None:
        self.app = app
        self.client = fakeredis.FakeRedis(server=server, decode_responses=True)

    @property
    def store(self) -> Store:
        return coordination.coordination(self.app).store

    def task(self, function: Callable[..., Any], **options: Any) -> Any:
        """Return the function as a task of this app, bound at once; protected unless `base` says otherwise."""
        options = {"base": SingleflightTask, "name": f"{self.app.main}.{function.__name__}", "shared": False, **options}
        task = self.app.task(**options)(function)
        self.app.finalize()
        return task._get_current_object() if hasattr(task, "_get_current_object") else task

    def lock_key(self, name: str, *scope: Any) -> LockKey:
        """The lock key of a task of that name called with these arguments, else of that lock name and scope."""
        binding = getattr(self.app.tasks.get(name), "_binding", None)
        if binding is not None and binding.options.lock_on is None:
            return binding.lock_key(name, scope, {})
        return LockKey.of(name, list(scope))

    @contextmanager
    def held_elsewhere(self, name: str, *scope: Any) -> Iterator[Callable[[], None]]:
        """Hold a lock key as another process would. Yields a function that gives it back before the block ends."""
        key = self.lock_key(name, *scope)
        # For a day, because a test may put its clock forward.
        context, holding = contextvars.Context(), lock(self.app, name, *scope, lease_ttl=86_400.0)
        with patch.object(LockKey, "of", return_value=key):
            context.run(holding.__enter__)
        is_held = True

        def give_back() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                context.run(holding.__exit__, None, None, None)

        try:
            yield give_back
        finally:
            give_back()

    def messages(self) -> list[Any]:
        """Take all messages that wait in this app's queue."""
        taken = []
        with self.app.connection_for_read() as connection:
            queue = self.app.amqp.queues[self.app.conf.task_default_queue].bind(connection.default_channel)
            queue.declare()
            while (message := queue.get(no_ack=True)) is not None:
                message.accept = prepare_accept_content(self.app.conf.accept_content)
                taken.append(message)
        return taken

    def deliver(self, message: Any) -> Any:
        """Run a message as a solo worker does: through the task's own request class and Celery's tracer."""
        return self.request(message).execute()

    def request(self, message: Any) -> Any:
        """Return what a worker makes of a message."""
        task = self.app.tasks[message.headers["task"]]
        return symbol_by_name(task.Request)(
            message,
            on_ack=lambda *_: None,
            on_reject=lambda *_: None,
            app=self.app,
            hostname="w1@test",
            eventer=None,
            task=task,
            connection_errors=(),
        )

    def deliver_all(self, rounds: int = 20) -> None:
        """Run what waits, and what comes of it, countdowns or not, until nothing is left."""
        for _ in range(rounds):
            messages = self.messages()
            if not messages:
                return
            for message in messages:
                self.deliver(message)
        raise AssertionError(f"there are messages after {rounds} rounds")

    def result_of(self, result: Any) -> Any:
        """Return what a call comes to once all that waits has run."""
        self.deliver_all()
        return result.get(timeout=1)

    def holders(self, key: LockKey) -> list[str]:
        """Owner tokens in the lease of that key, expired or not."""
        return list(self.client.hgetall(self.store.keys.lock(key).lease))

    def take_away(self, key: LockKey) -> None:
        """Give the lease of that key to somebody else, as if its holder had been away for longer than its lease."""
        names = self.store.keys.lock(key)
        self.client.delete(names.lease)
        self.client.hset(names.lease, "somebody else", "9999999999999\n1000000000000\n1\nsomewhere\n\n\nelse")
        self.client.incrby(names.fence, 1_000_000)


@pytest.fixture
def make_place(monkeypatch):
    """Make apps that share one fresh fake server."""
    server = fakeredis.FakeServer()
    monkeypatch.setattr(
        coordination,
        "connect",
        lambda url, options, **_: ClientConnections(lambda: fakeredis.FakeRedis(server=server), spans_slots=True),
    )

    def make(**settings: Any) -> Place:
        # A name of its own, because what is bound in one test may still be there in the next.
        app = Celery(f"shop{uuid4().hex[:8]}", set_as_current=False, broker="memory://", backend="cache+memory://")
        app.conf.update(singleflight_url="redis://fake", task_default_queue=f"q-{uuid4().hex}", **settings)
        return Place(app, server)

    return make


@pytest.fixture
def place(make_place):
    return make_place()


class Clock:
    """A clock that only moves when it is told to, or slept on by the test; a thread beside it sleeps in real time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._thread = threading.current_thread()
        self.slept: list[float] = []
        self.while_asleep: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if threading.current_thread() is not self._thread:
            time.sleep(seconds)
            return
        self.slept.append(seconds)
        self.now += seconds
        self.while_asleep()


@pytest.fixture
def clock(monkeypatch):
    """Stands in for `time` in the modules that count the life of a lease."""
    clock = Clock()
    for module in ("direct", "ending", "entering", "heartbeat", "lease", "settling"):
        monkeypatch.setattr(f"celery_singleflight.{module}.time", clock)
    return clock
