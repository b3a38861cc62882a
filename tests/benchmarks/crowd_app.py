"""The app of the benchmarks of waiting: bodies that take their turn on a key, under a policy or a hand-written lock.

A worker's policy is chosen by the environment. Under a hand-written lock nothing of the package is in its process.
"""

from __future__ import annotations

import functools
import json
import os
import random
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis
from celery import Celery, signals
from waiting_notes import note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: A lock in the body, and `self.retry` with a random countdown between so many seconds.
HAND_WRITTEN = {"polling 0.05-0.5 s": (0.05, 0.5), "polling 1-2 s": (1.0, 2.0)}
#: Of the package.
POLICIES = ("queue", "requeue")
LOCK_NAME = "waiting"
#: What the base class sets for a protected task, for all of them.
ACKS = {"acks_late": True, "reject_on_worker_lost": True}


def make_app(settings: dict[str, object], policy: str) -> Celery:
    app = Celery("waiting")
    app.conf.update(settings)
    task = functools.partial(app.task, bind=True, shared=False)  # a publisher has one app after the other
    turns, holds = functools.partial(task, name="waiting.turn"), functools.partial(task, name="waiting.hold")
    (_polling if policy in HAND_WRITTEN else _protected)(app, policy, turns, holds)

    @task(name="waiting.plain", **ACKS)
    def plain(self):
        _body(self.request.id, 0.0)

    app.finalize()
    return app


def _protected(app: Celery, policy: str, turns: Callable[..., Any], holds: Callable[..., Any]) -> None:
    from celery_singleflight import SingleflightTask  # noqa: PLC0415, under a hand-written lock there is none of it

    protected = {"base": SingleflightTask, "lock_on": ("key",), "lock_name": LOCK_NAME, "contention_policy": policy}

    @turns(**protected)
    def turn(self, key, seconds):
        _body(self.request.id, seconds)

    @holds(**protected)
    def hold(self, key, gate):
        _hold(self.request.id, gate)

    @app.task(bind=True, shared=False, name="waiting.other", base=SingleflightTask, lock_on=("number",))
    def other(self, number):
        _body(self.request.id, 0.0)


def _polling(app: Celery, policy: str, turns: Callable[..., Any], holds: Callable[..., Any]) -> None:
    client = functools.cache(lambda: redis.Redis.from_url(app.conf.singleflight_url))  # made after the fork, at its first use

    @contextmanager
    def locked(task: Any, key: str) -> Iterator[None]:
        lock = client().lock(f"waiting:{key}", timeout=600)
        note("asked", task.request.id)
        is_ours = lock.acquire(blocking=False)
        note("answered", task.request.id)
        if not is_ours:
            raise task.retry(countdown=random.uniform(*HAND_WRITTEN[policy]))
        try:
            yield
        finally:
            lock.release()

    @turns(max_retries=None, **ACKS)
    def turn(self, key, seconds):
        with locked(self, key):
            _body(self.request.id, seconds)

    @holds(max_retries=None, **ACKS)
    def hold(self, key, gate):
        with locked(self, key):
            _hold(self.request.id, gate)


def _body(task_id: str, seconds: float) -> None:
    began = note("begin", task_id)
    if seconds:
        time.sleep(seconds)
    note("end", task_id, repr(began))


def _hold(task_id: str, gate: str) -> None:
    """Hold the key until there is a file of that name."""
    note("begin", task_id)
    while not Path(gate).exists():
        time.sleep(0.02)
    note("end", task_id)


def ticket_of(entered: Any) -> int | None:
    """The trigger's place in the order in which the store has seen them arrive, when its answer to `enter` tells it."""
    ticket = getattr(entered, "ticket", None)
    return ticket if isinstance(ticket, int) and ticket else None  # that of a requeued one is a text, and its own business


def _note_arrivals() -> None:
    """Note when each delivery asks the store for the lease and when it has the answer: it has arrived between the two."""
    from celery_singleflight.store import Store  # noqa: PLC0415, as above

    enter = Store.enter

    def noting(self: Store, claim: Any) -> Any:
        note("asked", claim.record.task_id)
        entered = enter(self, claim)
        ticket = ticket_of(entered)
        note("answered", claim.record.task_id, "" if ticket is None else ticket)
        return entered

    Store.enter = noting  # type: ignore[method-assign]


def _note_deliveries() -> None:
    """Note each message that the worker has received, each that its pool has begun on, and when the worker is ready."""

    @signals.task_received.connect(weak=False)
    def received(request, **_):
        note("received", request.id)

    @signals.task_prerun.connect(weak=False)
    def prerun(task_id, **_):
        note("prerun", task_id)

    @signals.worker_ready.connect(weak=False)
    def ready(sender, **_):
        note("ready", f"worker-{os.getpid()}")


if "WAITING_POLICY" in os.environ:
    _note_deliveries()
    if os.environ["WAITING_POLICY"] not in HAND_WRITTEN:
        _note_arrivals()
    app = make_app(json.loads(os.environ["CELERY_TEST_CONFIG"]), os.environ["WAITING_POLICY"])
