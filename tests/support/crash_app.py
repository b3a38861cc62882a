"""The app of the crash tests: the tasks of `protected_app`, and some that die, hang or do not let go."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import crash_points
import protected_app
from celery.utils.log import get_task_logger

from celery_singleflight import LeaseLost, SingleflightTask, signals

if TYPE_CHECKING:
    from celery import Celery


logger = get_task_logger(__name__)


def make_app(config: dict[str, Any], directory: str) -> Celery:
    app = protected_app.make_app(config, directory)
    add_tasks(app)
    return app


def add_tasks(app):  # noqa: C901, PLR0915, one task after the other
    ledger = app.ledger
    body = partial(protected_app.record, ledger)
    task = partial(app.task, shared=False, bind=True, base=SingleflightTask, lock_on=("key",))
    in_one = partial(task, lock_name="protected_app.work")

    @in_one(name="protected_app.stubborn", time_limit=1)
    def stubborn(self, key, seconds):
        """Do not let go at SIGTERM, which comes a tenth of a second before SIGKILL."""
        ledger.write(key, "begin", run="stubborn", token=self.lease.token)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(BaseException):
                time.sleep(0.005)  # the body's own work: it leaves signs of life for as long as it can
            ledger.write(key, "still", run="stubborn")

    @in_one(name="protected_app.limited_in_time", time_limit=1)
    def limited_in_time(self, key):
        body(self, key, gate=f"never-{key}")

    @in_one(name="protected_app.leave_the_process")
    def leave_the_process(self, key, how, times=1000):
        """Die so many times, then succeed."""
        body(self, key)
        if len(ledger.runs(key)) <= times:
            if how == "exit":
                sys.exit(3)
            if how == "_exit":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSEGV)
        return "alive"

    @in_one(name="protected_app.early", acks_late=False)
    def early(self, key, gate):
        body(self, key, gate=gate)
        return "done"

    @in_one(name="protected_app.hold_on")
    def hold_on(self, key, gate, value, swallow=False):
        """Say when the lease is lost; with `swallow` go on all the same."""
        ledger.write(key, "begin", run=value, token=self.lease.token)
        try:
            ledger.pass_gate(gate)
        except LeaseLost as lost:
            ledger.write(key, "lost", run=value, reason=str(lost))
            if not swallow:
                raise
            ledger.pass_gate(f"{gate}-late")
        ledger.write(key, "end", run=value, token=self.lease.token)
        return value

    @in_one(name="protected_app.swallow")
    def swallow(self, key, gate, value):
        """Catch whatever comes, and return as if nothing had been."""
        ledger.write(key, "begin", run=value, token=self.lease.token)
        try:
            ledger.pass_gate(gate)
        except BaseException as lost:  # noqa: BLE001, that is what is tested
            ledger.write(key, "lost", run=value, reason=repr(lost))
            ledger.pass_gate(f"{gate}-late")
        ledger.write(key, "end", run=value)
        return value

    @task(name="protected_app.cool_down", min_hold=1.5)
    def cool_down(self, key):
        body(self, key)

    @task(name="protected_app.unrescued", rescue=False)
    def unrescued(self, key, gate):
        body(self, key, gate=gate)

    def without_store(self, key):
        """A body that asks nothing of its lease, as it may have none."""
        for what in ("begin", "end"):
            ledger.write(key, what, run=self.request.id)
        return "ran"

    for policy in ("requeue", "fail", "run"):
        task(name=f"protected_app.{policy}_without_store", store_error_policy=policy)(without_store)

    @task(name="protected_app.retry_later")
    def retry_later(self, key, value):
        """Succeed at the second attempt, a second and a half after the first."""
        body(self, key, retries=self.request.retries)
        if self.request.retries == 0:
            raise self.retry(countdown=1.5)
        return value, self.request.retries

    @task(name="protected_app.tail")
    def tail(self, before, key):
        """The rest of a chain: with its lock key of its own it happens once, however often it is sent."""
        body(self, f"{key}-tail")
        return [before, "tail"]

    for name, more in {"mended": {}, "mended_by_key": {"idempotent_on": "mend:{key}"}}.items():

        @task(name=f"protected_app.{name}", keep_message="always", **more)
        def mended(self, key):
            """Fail until what is broken is mended: the test opens a gate."""
            logger.warning("mending %s", key)
            body(self, key, attempt=self.execution.attempt, forced=self.execution.is_forced)
            if not (ledger.directory / f"gate-{key}").exists():
                raise OSError(f"{key} is broken")
            app.tasks["protected_app.effect"].delay(f"{key}-effect")
            return self.execution.run_id

    @task(name="protected_app.effect")
    def effect(self, key):
        """What another body has caused."""
        ledger.write(key, "effect", cause=self.execution.caused_by)

    @task(name="protected_app.which_run")
    def which_run(self, key, gate):
        """Return the number of the attempt, when the gate of this attempt is open."""
        attempt = self.execution.attempt
        body(self, key, gate=f"{gate}-{attempt}", attempt=attempt)
        return attempt


def say_danger(lease, remaining, **_):
    app.ledger.write(lease.lock_key, "danger", remaining=remaining)


app = make_app(json.loads(os.environ.get("CELERY_TEST_CONFIG", "{}")), os.environ.get("TEST_LEDGER", "."))
if "TEST_LEDGER" in os.environ:  # a worker, and not the tests' own process
    signals.lease_endangered.connect(say_danger)
if app.conf.get("crash_points"):
    crash_points.install(app)
