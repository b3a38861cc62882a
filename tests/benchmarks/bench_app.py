"""The app of the benchmarks: one task that does nothing, plain, protected, and with a hand-written lock in its body.

A worker's variant is chosen by the environment, so that a plain worker has nothing of the package in its process.
"""

from __future__ import annotations

import functools
import json
import os

import bench_meter as meter
import redis
from celery import Celery

VARIANTS = ("plain", "protected", "lock")

#: What the base class sets for a protected task, for all of them.
ACKS = {"acks_late": True, "reject_on_worker_lost": True}


def config(url: str) -> dict[str, object]:
    """The Celery settings of every variant: one server is broker, result backend and store."""
    return {
        "broker_url": url,
        "result_backend": url,
        "broker_connection_retry_on_startup": True,
        "worker_hijack_root_logger": True,
    }


def make_app(settings: dict[str, object], *variants: str) -> Celery:
    app = Celery("bench")
    app.conf.update(settings)
    for variant in variants:
        _TASKS[variant](app)
    app.finalize()
    return app


def _plain(app: Celery) -> None:
    @app.task(name="bench.plain", **ACKS)
    def plain(n):
        meter.tick()


def _protected(app: Celery) -> None:
    from celery_singleflight import SingleflightTask  # noqa: PLC0415, a plain worker has none of it

    @app.task(name="bench.protected", base=SingleflightTask, lock_on=("n",))
    def protected(n):
        meter.tick()


def _lock(app: Celery) -> None:
    client = functools.cache(lambda: redis.Redis.from_url(app.conf.broker_url))  # made after the fork, at its first use

    @app.task(name="bench.lock", **ACKS)
    def lock(n):
        with client().lock(f"bench:{n}", timeout=30):
            meter.tick()


_TASKS = {"plain": _plain, "protected": _protected, "lock": _lock}

if "BENCH_VARIANT" in os.environ:
    app = make_app(json.loads(os.environ["CELERY_TEST_CONFIG"]), os.environ["BENCH_VARIANT"])
