"""The app whose workers the tests start. Its settings come as JSON, so each test chooses broker, store and limits."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from typing import Any
from uuid import uuid4

from celery import Celery
from ledger import Ledger

from celery_singleflight import SingleflightTask, lock


def record(ledger, task, key, *, gate=None, seconds=0.0, **facts):
    """What a body does for the judge: say that it began, wait, say that it ended."""
    run = uuid4().hex
    token = task.lease.token if isinstance(task, SingleflightTask) else 0
    ledger.write(key, "begin", run=run, task_id=task.request.id, token=token, **facts)
    if gate:
        ledger.pass_gate(gate)
    time.sleep(seconds)
    ledger.write(key, "end", run=run, task_id=task.request.id, token=token, **facts)


def make_app(config: dict[str, Any], directory: str) -> Celery:
    """Make the app with these settings; its bodies write to the ledger in that directory."""
    app = Celery("protected_app", set_as_current=False)
    app.conf.update(config)
    app.ledger = Ledger(directory)
    add_tasks(app)
    return app


def add_tasks(app):  # noqa: C901, PLR0915, one task after the other
    body = partial(record, app.ledger)
    ledger = app.ledger
    task = partial(app.task, shared=False)

    @task(bind=True, base=SingleflightTask, lock_on=("key",), payload_on=())
    def work(self, key, value=None, gate=None, seconds=0.0):
        """Hold the key until the gate is open, or for so many seconds."""
        body(self, key, gate=gate, seconds=seconds)
        return value

    @task(
        bind=True,
        base=SingleflightTask,
        lock_on=("key",),
        lock_name="protected_app.work",
        contention_policy="skip",
        skip_result="skipped",
        max_hold=60,
    )
    def skip(self, key, value=None, gate=None):
        body(self, key, gate=gate)
        return value

    @task(
        bind=True,
        base=SingleflightTask,
        lock_on=("key",),
        lock_name="protected_app.work",
        contention_policy="skip",
        skip_as="stop",
        max_hold=60,
    )
    def skip_stop(self, key, value=None):
        body(self, key)
        return value

    @task(
        bind=True,
        base=SingleflightTask,
        lock_on=("key",),
        lock_name="protected_app.work",
        contention_policy="skip",
        skip_as="raise",
        max_hold=60,
    )
    def skip_raise(self, key, value=None):
        body(self, key)
        return value

    @task(bind=True, base=SingleflightTask, lock_on=("key",), lock_name="protected_app.work", contention_policy="reject")
    def reject(self, key, value=None):
        body(self, key)
        return value

    @task(bind=True, base=SingleflightTask, lock_on=("key",), lock_limit=2)
    def limited(self, key, seconds=0.0):
        body(self, key, seconds=seconds)

    @task(bind=True, base=SingleflightTask, lock_on=("key",), idempotent_on="pay:{key}", payload_on=("key",))
    def pay(self, key, outcome="paid"):
        """Happens once per key; `outcome` chooses what the first run does."""
        body(self, key, execution=self.execution.key)
        if outcome == "fail":
            raise ValueError(key, 42)
        return outcome

    @task(bind=True, base=SingleflightTask, lock_on=("key",), max_retries=3)
    def retry_itself(self, key, value=None, how="plain"):
        body(self, key, retries=self.request.retries, value=value)
        if self.request.retries == 0:
            if how == "arguments":
                raise self.retry(args=(key, "changed"), kwargs={"how": how}, countdown=0)
            raise self.retry(countdown=0)
        return value, self.request.retries

    @task(bind=True, base=SingleflightTask, lock_on=("key",), autoretry_for=(OSError,), default_retry_delay=0)
    def retry_by_itself(self, key):
        body(self, key, retries=self.request.retries)
        if self.request.retries == 0:
            raise OSError("once")
        return self.request.retries

    @task(
        bind=True,
        base=SingleflightTask,
        lock_on=("key",),
        lock_name="protected_app.work",
        idempotent_on="{key}:{part}",
        contention_policy="skip",
        skip_result="skipped",
        max_hold=60,
    )
    def skip_or_retry(self, key, part=1, countdown=0.0):
        """The first part retries as the second, which is another execution."""
        body(self, key, part=part)
        if part == 1:
            raise self.retry(args=(key, 2), kwargs={}, countdown=countdown)
        return part

    @task(bind=True, base=SingleflightTask, lock_on=("key",))
    def outlive_inner_lock(self, key, seconds):
        with lock(self.app, "inner", key, max_hold=1):
            body(self, key, seconds=seconds)

    @task(bind=True, base=SingleflightTask, lock_on=("key",), max_hold=1)
    def outlive_max_hold(self, key, seconds):
        body(self, key, seconds=seconds)
        return "done"

    @task(bind=True, base=SingleflightTask, lock_on=("key",))
    def max_hold(self, key):
        return self.lease.max_hold

    for ttl in (0, 1):
        for name, more in {"task_id": {}, "execution_key": {"idempotent_on": "once:{key}"}}.items():

            @task(
                bind=True,
                base=SingleflightTask,
                name=f"protected_app.forget_{name}_{ttl}",
                lock_on=("key",),
                result_ttl=ttl,
                **more,
            )
            def forget(self, key, gate):
                body(self, key, gate=gate)
                return "done"

    @task(bind=True)
    def plain(self, key, value=None):
        body(self, key)
        return value

    @task(bind=True)
    def critical_section(self, key, gate=None):
        """A plain task with a protected part, sharing its key with `work`."""
        with lock(self.app, "protected_app.work", key, wait=20) as lease:
            ledger.write(key, "begin", run=self.request.id, token=lease.fencing_token)
            if gate:
                ledger.pass_gate(gate)
            ledger.write(key, "end", run=self.request.id, token=lease.fencing_token)

    @task(bind=True, base=SingleflightTask, lock_on=("key",))
    def count_up(self, key):
        """Read, then write: only exclusion keeps an increment from getting lost."""
        ledger.set_counter(key, ledger.counter(key) + 1)

    @task
    def note(key):
        ledger.write(key, "note")

    @task
    def note_error(request, exc, traceback, key):
        ledger.write(key, "error", error=repr(exc))

    @task
    def total(values):
        return sum(value for value in values if isinstance(value, int))

    @task
    def identity(value=None):
        return value


app = make_app(json.loads(os.environ.get("CELERY_TEST_CONFIG", "{}")), os.environ.get("TEST_LEDGER", "."))
