"""The app of the published properties: tasks that claim an execution key, have one effect, and say what they were."""

from __future__ import annotations

import json
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import crash_points
import protected_app

from celery_singleflight import LeaseLost, Resolution, SingleflightTask

if TYPE_CHECKING:
    from celery import Celery

    from celery_singleflight import UncertainExecution


def make_app(config: dict[str, Any], directory: str) -> Celery:
    app = protected_app.make_app(config, directory)
    add_tasks(app)
    return app


def add_tasks(app):
    ledger = app.ledger
    task = partial(app.task, shared=False, bind=True, base=SingleflightTask, lock_on=("key",), idempotent_on="claim:{key}")

    def claim(self, key, amount=1, gate=None):
        """Have one effect; the first attempt waits at a gate before it, and at a later one if it loses its lease there."""
        attempt = self.execution.attempt
        facts = {"run": f"{key}-{attempt}", "task_id": self.request.id, "token": self.lease.token, "attempt": attempt}
        ledger.write(key, "begin", **facts)
        try:
            if gate and attempt == 1:
                ledger.pass_gate(gate)
        except LeaseLost:
            ledger.write(key, "lost", **facts)
            ledger.pass_gate(f"{gate}-late")
        ledger.write(key, "effect", **facts)
        ledger.write(key, "end", **facts)
        return f"{amount} by attempt {attempt}"

    def refuse(self, key):
        """Fail the first time."""
        is_first = not ledger.runs(key)
        protected_app.record(ledger, self, key)
        if is_first:
            raise ValueError(key)
        return "not refused"

    def settle(self, key):
        protected_app.record(ledger, self, key)
        return "settled"

    def ask_ledger(execution: UncertainExecution) -> Resolution:
        (key,) = execution.args
        ledger.write(key, "asked", tries=execution.tries)
        return Resolution("succeeded", result="settled") if ledger.read(key, "end") else Resolution("rerun")

    task(name="protected_app.claim")(claim)
    task(name="protected_app.claim_with_a_short_lease", lease_ttl=0.5, result_ttl=600)(claim)
    task(name="protected_app.claim_with_a_short_result", lease_ttl=0.5, result_ttl=2, contention_policy="queue")(claim)
    for policy in ("keep", "forget"):
        task(name=f"protected_app.refuse_and_{policy}", failure_policy=policy)(refuse)
    task(name="protected_app.settle", uncertain_policy="hold", reconciler=ask_ledger, reconcile_delays=(0, 1, 1, 1, 1))(settle)


app = make_app(json.loads(os.environ.get("CELERY_TEST_CONFIG", "{}")), os.environ.get("TEST_LEDGER", "."))
if app.conf.get("crash_points"):
    crash_points.install(app)
