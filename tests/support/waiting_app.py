"""The app of the tests of waiting: the tasks of `protected_app`, and some for each policy that parks."""

from __future__ import annotations

import functools
import json
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import crash_points
import protected_app

from celery_singleflight import Replaced, SingleflightTask, entering

if TYPE_CHECKING:
    from celery import Celery

#: Under this key of the ledger it is written when a slot lingers.
LINGERING = "lingering"


def make_app(config: dict[str, Any], directory: str) -> Celery:
    app = protected_app.make_app(config, directory)
    task = partial(app.task, shared=False, bind=True, base=SingleflightTask, lock_on=("key",))
    add_queues(app, partial(task, contention_policy="queue"))
    add_coalescing(app, partial(task, contention_policy="coalesce"))
    add_joining(app, partial(task, contention_policy="join"))
    add_replacing(app, partial(task, contention_policy="replace"))
    return app


def add_queues(app, task):
    ledger = app.ledger
    body = partial(protected_app.record, ledger)
    in_one = partial(task, lock_name="protected_app.work")

    @in_one(name="protected_app.line")
    def line(self, key, value=None, gate=None, seconds=0.0):
        body(self, key, gate=gate, seconds=seconds, value=value)
        return value

    @in_one(name="protected_app.retry_in_line", max_retries=3)
    def retry_in_line(self, key, value=None, gate=None):
        """Succeed at the second attempt."""
        body(self, key, gate=gate, value=value, retries=self.request.retries)
        if self.request.retries == 0:
            raise self.retry(countdown=0)
        return value

    @task(name="protected_app.two_lines", lock_limit=2)
    def two_lines(self, key, value=None, gate=None, seconds=0.0):
        body(self, key, gate=gate, seconds=seconds, value=value)
        return value

    @task(name="protected_app.cool_line", min_hold=0.8)
    def cool_line(self, key, value=None):
        body(self, key, value=value)
        return value

    @task(name="protected_app.facts_in_line")
    def facts_in_line(self, key, gate):
        """Return what of a message survives waiting."""
        ledger.write(key, "begin")
        ledger.pass_gate(gate)
        request = self.request
        names = ("retries", "shadow", "timelimit", "stamps", "group_index", "ignore_result")
        route = {name: request.delivery_info.get(name) for name in ("priority", "exchange", "routing_key")}
        return {
            **{name: getattr(request, name, None) for name in names},
            **route,
            "is_root": request.root_id == request.id,
            "expires": bool(request.expires),
            "custom": (request.headers or {}).get("custom"),
            "compression": getattr(request, "compression", None),
            "content_type": request.properties.get("singleflight_content_type"),
        }

    @app.task(name="protected_app.long", bind=True, shared=False)
    def long(self, key, seconds=0.0):
        """A plain task that needs its slot for a while."""
        body(self, key, seconds=seconds)


def add_coalescing(app, task):
    body = partial(protected_app.record, app.ledger)

    def merge(waiting, new):
        if new["value"] == "bad":
            raise ValueError("this cannot be merged")
        return {**new, "value": waiting["value"] + new["value"]}

    kinds = {
        "newest": {},
        "first": {"coalesce_keep": "first"},
        "merged": {"coalesce_keep": merge},
        "debounced": {"coalesce_delay": 1.0, "coalesce_within": 2.0},
    }
    for name, options in kinds.items():

        @task(name=f"protected_app.{name}", **options)
        def coalesced(self, key, value=None, gate=None):
            body(self, key, gate=gate, value=value)
            return value


def add_joining(app, task):
    ledger = app.ledger
    body = partial(protected_app.record, ledger)

    def joined(self, key, payload=None, gate=None, failures=0):
        """Return what tells one run from another; the first runs fail."""
        body(self, key, gate=gate, payload=payload)
        run = len(ledger.runs(key))
        if run <= failures:
            raise OSError(f"run {run}")
        return [payload, run]

    task(name="protected_app.joined")(joined)
    task(name="protected_app.joined_retry", autoretry_for=(OSError,), default_retry_delay=0, max_retries=3)(joined)


def add_replacing(app, task):
    ledger = app.ledger

    @task(name="protected_app.replaceable")
    def replaceable(self, key, value=None, gate=None, swallows=False):
        """Pass the gate, or say that another one takes the place; with `swallows` return all the same."""
        run = uuid4().hex
        facts = {"run": run, "value": value, "token": self.lease.token}
        ledger.write(key, "begin", **facts)
        try:
            if gate:
                ledger.pass_gate(gate)
        except Replaced as replaced:
            ledger.write(key, "replaced", by=replaced.by, **facts)
            if not swallows:
                raise
            return "swallowed"
        finally:
            ledger.write(key, "end", **facts)
        return value


def watch_lingering(app: Celery) -> None:
    """Write to the ledger when a slot begins to linger and ends, how many slots are free, and how much of its time is left."""
    linger = entering._linger

    @functools.wraps(linger)
    def watched(store: Any, trigger: Any, until: float, give_up_at: float) -> Any:
        facts = {"run": uuid4().hex, "task_id": trigger.request.id, "lock_key": trigger.lock_key.text}
        app.ledger.write(LINGERING, "begin", free=entering.free_slots(), left=until - time.monotonic(), **facts)
        answer = linger(store, trigger, until, give_up_at)
        app.ledger.write(LINGERING, "end", free=entering.free_slots(), left=until - time.monotonic(), **facts)
        return answer

    entering._linger = watched


app = make_app(json.loads(os.environ.get("CELERY_TEST_CONFIG", "{}")), os.environ.get("TEST_LEDGER", "."))
if app.conf.get("watches_lingering"):
    watch_lingering(app)
if app.conf.get("crash_points"):
    crash_points.install(app)
