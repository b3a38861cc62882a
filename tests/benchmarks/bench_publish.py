"""What a protected task adds to `apply_async`, when nothing is asked for at publish, and when an answer is."""

from __future__ import annotations

import functools
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bench_app import config, make_app
from celery import signals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery import Celery

_BATCH = 50


def added_at_publish(url: str, batches: int) -> tuple[list[float], list[float]]:
    """Publish in alternating batches over one connection.

    Returns the microseconds of a plain `apply_async`, and what a protected one adds to it, of each pair of batches. Without
    results, because a publisher that waits for one subscribes to it, which costs far more than what is measured here.
    """
    app = _publisher(url)
    plain, protected = app.tasks["bench.plain"], app.tasks["bench.protected"]
    base, added = [], []
    with app.connection_for_write() as connection, app.amqp.Producer(connection) as producer:

        def batch(task: Any) -> float:
            before = time.perf_counter()
            for n in range(_BATCH):
                task.apply_async((n,), producer=producer)
            return (time.perf_counter() - before) / _BATCH * 1e6

        with _without_the_package():
            batch(plain)
        batch(protected)
        for n in range(batches):
            if n % 2:
                with_package = batch(protected)
            with _without_the_package():
                without = batch(plain)
            if not n % 2:
                with_package = batch(protected)
            base.append(without)
            added.append(with_package - without)
    return base, added


def asked_at_publish(url: str, batches: int) -> dict[str, list[float]]:
    """Return the microseconds of a call that asks for an answer: the first of its execution, and one that gets its handle."""
    app = _publisher(url)
    task = app.tasks["bench.protected"]
    found: dict[str, list[float]] = {"the first of its key": [], "answered": []}
    with app.connection_for_write() as connection, app.amqp.Producer(connection) as producer:
        for n in range(batches):
            for times in found.values():
                before = time.perf_counter()
                for m in range(_BATCH):
                    task.apply_async((n,), producer=producer, execution_key=f"{n}-{m}", answer_at_publish=True)
                times.append((time.perf_counter() - before) / _BATCH * 1e6)
    return found


@functools.cache
def _publisher(url: str) -> Celery:
    return make_app({**config(url), "result_backend": "disabled", "singleflight_url": url}, "plain", "protected")


@contextmanager
def _without_the_package() -> Iterator[None]:
    """As in a process that has not imported it: nobody listens to a publish."""
    receivers = signals.before_task_publish.receivers
    connected = receivers[:]
    receivers.clear()
    try:
        yield
    finally:
        receivers[:] = connected
