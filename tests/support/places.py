"""Places: an app, its workers and the judge, as fixtures."""

from __future__ import annotations

import gc
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import uuid4

import protected_app
import pytest
import redis
from nodes import WorkerContainer, redis_settings
from proxy import Proxy
from pytest_celery import CeleryTestWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import ModuleType


class Place:
    """An app, its workers, and the judge."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.ledger = app.ledger
        self.workers: list[Any] = []

    def task(self, name: str) -> Any:
        return self.app.tasks[f"protected_app.{name}"]

    def queue_is_empty(self) -> bool:
        """Whether the broker holds no message of this place's queue, delivered or not."""
        name = self.app.conf.task_default_queue
        with self.app.connection_for_read() as connection:
            declared = connection.default_channel.queue_declare(name, passive=True)
            return declared.message_count == 0 and not self.held_by_workers(connection)

    def held_by_workers(self, connection: Any = None) -> list[Any]:
        """What the workers have of messages: for later, for their pools, and in them."""
        running = sum(worker.container.status == "running" for worker in self.workers)
        if not running:
            return []
        # With the last answer it is known; without a limit the time would be waited for in any case.
        inspect = self.app.control.inspect(timeout=2, limit=running, connection=connection)
        kinds = [inspect.scheduled(), inspect.reserved(), inspect.active()]
        return [message for kind in kinds for messages in (kind or {}).values() for message in messages]

    def store(self) -> redis.Redis:
        return redis.Redis.from_url(self.app.conf.singleflight_url)

    def logs(self) -> str:
        return "\n".join(worker.logs() for worker in self.workers)

    def end(self) -> None:
        """End the workers at once, when all that matters has been seen."""
        for worker in self.workers:
            worker.container.end()


@contextmanager
def starting(make_directory: Callable[[str], Path]) -> Iterator[Callable[..., Place]]:
    """Yield a function that starts workers of the protected app with these settings; they end with the block."""
    places = []

    def start(
        config: dict[str, Any],
        *arguments: str,
        workers: int = 2,
        concurrency: int = 2,
        pool: str = "prefork",
        app_module: ModuleType = protected_app,
    ) -> Place:
        # Of its own, so that no sweeper of another place publishes its triggers to another broker.
        own = {"task_default_queue": f"q-{uuid4().hex[:8]}", "singleflight_key_prefix": uuid4().hex[:8]}
        config = {**own, **config}
        place = Place(app_module.make_app(config, str(make_directory("ledger"))))
        places.append(place)
        for n in range(workers):
            name, env = f"w{n}-{uuid4().hex[:6]}", {"TEST_LEDGER": str(place.ledger.directory)}
            how = {"module": app_module.__name__, "concurrency": concurrency, "pool": pool, "env": env}
            place.workers.append(CeleryTestWorker(WorkerContainer(name, config, *arguments, **how), place.app))
        for worker in place.workers:
            worker.ready()
        return place

    try:
        yield start
    finally:
        gc.collect()  # an AsyncResult that goes later would look for its server
        for place in places:
            place.end()


@pytest.fixture
def start_place(tmp_path_factory, request):
    """Start a place of the test's own."""
    with starting(tmp_path_factory.mktemp) as start:

        def start_and_show(*args: Any, **kwargs: Any) -> Place:
            place = start(*args, **kwargs)
            request.node.place = place
            return place

        yield start_and_show


@pytest.fixture(scope="module")
def start_shared(tmp_path_factory):
    """Start a place that the tests of one module share."""
    with starting(tmp_path_factory.mktemp) as start:
        yield start


@pytest.fixture(scope="session")
def shared_place(tmp_path_factory, valkey):
    with starting(tmp_path_factory.mktemp) as start:
        yield start(redis_settings(valkey.url))


@pytest.fixture
def place(shared_place, request):
    """Two workers of two processes each, on Redis as broker, result backend and store; shared by the tests."""
    request.node.place = shared_place
    return shared_place


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and hasattr(item, "place"):
        report.sections += [(worker.name(), worker.logs()[-20_000:]) for worker in item.place.workers]
    return report


@pytest.fixture
def rabbit_proxy(rabbitmq):
    """A proxy in front of RabbitMQ, whose connections can be cut."""
    parts = urlsplit(rabbitmq)
    proxy = Proxy(parts.hostname or "127.0.0.1", parts.port or 5672)
    yield proxy
    proxy.close()


@pytest.fixture
def key(request) -> str:
    """A key that no other test uses."""
    return f"{re.sub('[^a-z0-9_]+', '-', request.node.name)}-{uuid4().hex[:8]}"
