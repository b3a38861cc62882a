"""The app of the tests of uncertain runs: tasks that charge at a bank outside, and die before it is recorded."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import protected_app

from celery_singleflight import Resolution, SingleflightTask

if TYPE_CHECKING:
    from celery import Celery
    from ledger import Ledger

    from celery_singleflight import UncertainExecution


def make_app(config: dict[str, Any], directory: str) -> Celery:
    app = protected_app.make_app(config, directory)
    add_tasks(app)
    return app


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # a signal may take a moment


def let_bank_answer(ledger: Ledger, key: str, *answers: str) -> None:
    """Have the reconciler find, one each time: "charged", "unknown", "not charged", or let it "die". The last stays."""
    path = ledger.directory / f"bank-{key}"
    (ledger.directory / f"new-{key}").write_text(json.dumps(answers))
    (ledger.directory / f"new-{key}").replace(path)


def add_tasks(app):
    ledger = app.ledger
    task = partial(app.task, shared=False, bind=True, base=SingleflightTask, lock_on=("key",), idempotent_on="pay:{key}")

    def charge(self, key, then="die", gate=None):
        """Charge. The first charge of a key is not recorded: the process dies, or stands until it is killed."""
        is_first = not ledger.read(key, "charge")
        ledger.write(key, "charge", attempt=self.execution.attempt, run=self.execution.run_id, told=self.execution.is_unsure)
        if is_first and then == "die":
            die()
        if is_first and then == "stand":
            while True:
                time.sleep(0.05)  # until it is killed or cut off
        return f"charged by attempt {self.execution.attempt}"

    def ask_bank(execution: UncertainExecution) -> Resolution | None:
        key = execution.kwargs.get("key") or execution.args[0]
        ledger.write(key, "asked", tries=execution.tries, execution=execution.key, died=execution.task_id)
        path = ledger.directory / f"bank-{key}"
        answers = json.loads(path.read_text()) if path.exists() else ["unknown"]
        if len(answers) > 1:
            let_bank_answer(ledger, key, *answers[1:])
        if answers[0] == "die":
            die()
        found = {"charged": Resolution("succeeded", result="found at the bank"), "not charged": Resolution("rerun")}
        return found.get(answers[0])

    for name, more in {
        "charge": {},
        "charge_by_id": {"idempotent_on": None},
        "charge_or_rerun": {"uncertain_policy": "rerun"},
        "charge_in_time": {"time_limit": 1},
        "charge_and_hold": {"max_hold": 1},
        "charge_reconciled": {"reconciler": ask_bank, "reconcile_delays": (0, 1, 1, 1, 1, 1, 1, 1, 1, 1)},
    }.items():
        task(name=f"protected_app.{name}", **{"uncertain_policy": "hold", **more})(charge)


app = make_app(json.loads(os.environ.get("CELERY_TEST_CONFIG", "{}")), os.environ.get("TEST_LEDGER", "."))
