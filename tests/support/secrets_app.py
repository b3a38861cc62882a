"""The app of the tests of secrets: bodies whose arguments, results and errors hold what no log of the package may show."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import protected_app

from celery_singleflight import SingleflightTask, StepError, signals

if TYPE_CHECKING:
    from pathlib import Path

    from celery import Celery

SECRET = "s3cr3t-4111-1111"
POLICIES = ("requeue", "queue", "coalesce", "join", "replace", "skip", "reject")


def make_app(config: dict[str, Any], directory: str) -> Celery:
    app = protected_app.make_app(config, directory)
    task = partial(app.task, shared=False, bind=True, base=SingleflightTask)
    add_waiting(app, task)
    add_failures(app, task)
    add_sizes(app, task)
    return app


def add_waiting(app, task):
    ledger = app.ledger
    for policy in POLICIES:

        @task(name=f"protected_app.hold_{policy}", contention_policy=policy, max_hold=60)
        def hold(self, secret, gate):
            """Hold the key of all arguments until the gate is open."""
            ledger.write(gate, "begin", run=self.execution.run_id, pid=os.getpid())
            ledger.pass_gate(gate)
            return secret

    def fail_to_merge(waiting, new):
        raise ValueError(f"{waiting} and {new}")

    @task(name="protected_app.merge", contention_policy="coalesce", coalesce_keep=fail_to_merge, lock_on=("gate",))
    def merge(self, secret, gate):
        ledger.write(gate, "begin", run=self.execution.run_id)
        ledger.pass_gate(gate)
        return secret


def undo(result):
    raise ValueError(result)


def refuse(secret):
    raise LookupError(f"no account {secret}")


def find_nothing(execution):
    raise LookupError(f"nothing is known of {execution.args}")


def add_failures(app, task):
    @task(name="protected_app.retry")
    def retry(self, secret):
        if self.request.retries == 0:
            raise self.retry(exc=ValueError(secret), countdown=0)
        return secret

    @task(name="protected_app.fail")
    def fail(self, secret):
        self.step("one", lambda: secret, compensate=undo)
        raise ValueError(secret)

    @task(name="protected_app.no_key", lock_on=refuse)
    def no_key(self, secret):
        return secret

    @task(name="protected_app.die", max_deliveries=2)
    def die(self, secret):
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # a signal may take a moment

    @task(name="protected_app.unsure", uncertain_policy="hold", reconciler=find_nothing)
    def unsure(self, secret):
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # a signal may take a moment


def add_sizes(app, task):
    @task(name="protected_app.large", result_limit=1000)
    def large(self, secret):
        return secret * 1000

    @task(name="protected_app.odd")
    def odd(self, secret):
        return {secret: object()}

    @task(name="protected_app.steps", result_limit=1000)
    def steps(self, secret):
        self.step("one", lambda: secret)
        cursor = self.cursor("page")
        cursor.set(secret)
        try:
            cursor.set(secret * 1000)
        except StepError as error:
            return [list(self.checkpoint([secret, secret])), str(error)]


def keep_what_is_told(directory: Path) -> None:
    """Write what the package logs and signals to files of their own: Celery's lines are Celery's."""
    handler = logging.FileHandler(directory / "ours.log", encoding="utf-8")
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    logging.getLogger("celery_singleflight").addHandler(handler)
    for name in signals.__all__:

        def tell(name=name, sender=None, signal=None, **facts):
            app.ledger.write("signals", name, facts=repr(facts))

        getattr(signals, name).connect(tell, weak=False)


app = make_app(json.loads(os.environ.get("CELERY_TEST_CONFIG", "{}")), os.environ.get("TEST_LEDGER", "."))
if "TEST_LEDGER" in os.environ:  # a worker, and not the tests' own process
    keep_what_is_told(app.ledger.directory)
