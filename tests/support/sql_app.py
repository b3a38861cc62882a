"""The app of the tests at the business boundary: the tasks of `crash_app`, and some that write to a caller's database."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import crash_app
import crash_points
from databases import Database

from celery_singleflight import LeaseLost, SingleflightTask, StaleToken, outbox
from celery_singleflight.sql import Outbox

if TYPE_CHECKING:
    from celery import Celery


def sql_settings(database: Database) -> dict[str, Any]:
    """Settings for workers whose database this is."""
    return {"database_of_tests": {"url": database.url, "schema": database.schema}}


def make_app(config: dict[str, Any], directory: str) -> Celery:
    app = crash_app.make_app(config, directory)
    if "database_of_tests" in config:
        add_tasks(app, Database(**config["database_of_tests"]))
    return app


def add_tasks(app: Celery, database: Database) -> None:
    ledger, boundary = app.ledger, database.boundary
    task = partial(app.task, shared=False, bind=True, base=SingleflightTask, lock_on=("key",))
    Outbox(app, boundary, lambda: database.engine)

    def note(self, what, key, **facts):
        ledger.write(key, what, run=self.request.id, task_id=self.request.id, **facts)

    @task(name="protected_app.charge")
    def charge(self, key, value):
        """One effect: what is told about a run is told before and after its transaction."""
        note(self, "begin", key, token=self.lease.fencing_token)
        with database.engine.begin() as connection:
            execution = boundary.claim(connection, self, payload=value)
            if execution.is_done:
                result = execution.result
            else:
                database.pay(connection, key, value)
                result = execution.finish({"value": value, "attempt": self.execution.attempt})
        note(self, "end", key)
        return result

    @task(name="protected_app.write_late")
    def write_late(self, key, gate):
        """A body that does not let go: it writes though it has been told that its lease is lost."""
        attempt, token = self.execution.attempt, self.lease.fencing_token
        note(self, "begin", key, token=token)
        with suppress(LeaseLost):
            ledger.pass_gate(f"{gate}-{attempt}")
        try:
            with database.engine.begin() as connection:
                boundary.check_fence(connection, key, token)
                database.pay(connection, key, attempt)
        except StaleToken as stale:
            note(self, "refused", key, token=stale.token, seen=stale.seen)
            raise
        note(self, "end", key)
        return attempt

    @task(name="protected_app.order")
    def order(self, key, fails=False):
        """Put into the outbox what follows from the effect."""
        with database.engine.begin() as connection:
            database.pay(connection, key, 1)
            boundary.send(connection, app.tasks["protected_app.work"].si(f"{key}-next", "next").set(task_id=f"{key}-next"))
            if fails:
                raise KeyError(key)


def install_deaths(app: Celery) -> None:
    """Tell of each message that goes from the outbox, and die behind it where a file `crash-outbox-<task id>` says so."""
    publish, pid = outbox._publish, os.getpid()

    def publish_and_die(app: Celery, row: Any) -> None:
        publish(app, row)
        app.ledger.write(row.task_id, "published", publication=uuid4().hex)
        with suppress(FileNotFoundError):
            (app.ledger.directory / f"crash-outbox-{row.task_id}").unlink()
            app.ledger.write(crash_points.DEATHS, "died", point="outbox:after-publish", how="worker", task_id=row.task_id)
            os.kill(pid, signal.SIGKILL)

    outbox._publish = publish_and_die


app = make_app(json.loads(os.environ.get("CELERY_TEST_CONFIG", "{}")), os.environ.get("TEST_LEDGER", "."))
if app.conf.get("crash_points"):
    crash_points.install(app)
if "database_of_tests" in app.conf:
    install_deaths(app)
