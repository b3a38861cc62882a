"""The app of the tests of steps: tasks that do several things, some of which end their process in between."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import protected_app

from celery_singleflight import LeaseLost, SingleflightTask, StepUncertain, current_step
from celery_singleflight.store import Store

if TYPE_CHECKING:
    from celery import Celery

EFFECTS = ("one", "two", "three")


def make_app(config: dict[str, Any], directory: str) -> Celery:
    app = protected_app.make_app(config, directory)
    add_tasks(app)
    return app


def die():
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # a signal may take a moment


def arm(ledger, key, name, how):
    """Let an undo, once, "die" in its process, or have that "die between" it and the next, or raise an error of this text."""
    (ledger.directory / f"undo-{key}-{name}").write_text(how)


def undo(result):
    """Take back an effect. What is armed for it happens after that."""
    app.ledger.write(result["key"], "undo", name=result["name"])
    armed = app.ledger.directory / f"undo-{result['key']}-{result['name']}"
    how = armed.read_text() if armed.exists() else ""
    if how and how != "die between":
        armed.unlink()
        if how == "die":
            die()
        raise OSError(how)


def die_between(undo_step):
    """Wrap the store's step between two undos: the one is noted, the next is not called."""

    @functools.wraps(undo_step)
    def wrapped(self, writer, *given, undone="", **told):
        found = undo_step(self, writer, *given, undone=undone, **told)
        for armed in app.ledger.directory.glob(f"undo-*-{undone}") if undone else ():
            if armed.read_text() == "die between":
                armed.unlink()
                die()
        return found

    return wrapped


def add_tasks(app):  # noqa: C901, one task after the other
    ledger = app.ledger
    task = partial(app.task, shared=False, bind=True, base=SingleflightTask, lock_on=("key",))

    def effect(self, key, name, *, dies=False):
        """Something that must not happen twice."""
        execution = self.execution
        ledger.write(key, "effect", name=name, attempt=execution.attempt, run=execution.run_id, step=current_step().key)
        if dies and current_step().attempt == 1:
            die()
        return {"key": key, "name": name}

    def three(self, key, dies_after="", dies_in="", then="succeed"):
        """Do three things. The first attempt dies in or after one of them."""
        ledger.write(key, "begin", task_id=self.request.id, attempt=self.execution.attempt, run=self.execution.run_id)
        for name in EFFECTS:
            self.step(name, effect, self, key, name, dies=name == dies_in, compensate=undo)
            if name == dies_after and self.execution.attempt == 1:
                die()
        ledger.write(key, "end", task_id=self.request.id, run=self.execution.run_id)
        if then == "retry" and self.request.retries < 2:
            raise self.retry(countdown=0)
        if then == "fail":
            raise ValueError(key)
        return [self.execution.attempt, self.execution.run_id]

    for name, more in {
        "three": {},
        "three_by_key": {"idempotent_on": "three:{key}"},
        "three_held": {"uncertain_policy": "hold"},
        "three_held_patiently": {
            "uncertain_policy": "hold",
            "autoretry_for": (StepUncertain,),
            "max_retries": None,
            "default_retry_delay": 1,
        },
    }.items():
        task(name=f"protected_app.{name}", **more)(three)

    @task(name="protected_app.too_slow", soft_time_limit=1)
    def too_slow(self, key):
        """Meet the soft time limit within the second step."""
        self.step("one", effect, self, key, "one", compensate=undo)
        self.step("slow", ledger.pass_gate, f"never-{key}", compensate=undo)

    @task(name="protected_app.parts", max_deliveries=1000)
    def parts(self, key, count, every=1):
        """Do so many parts, one after the other."""
        for part in self.checkpoint(range(count), every=every):
            ledger.write(key, "part", part=part, attempt=self.execution.attempt)
            time.sleep(0.001)
        return self.execution.attempt

    @task(name="protected_app.fenced_out")
    def fenced_out(self, key, gate):
        """The first attempt stands still past its lease, then tries to go on."""
        attempt = self.execution.attempt
        cursor = self.cursor("page")
        page = cursor.get()
        if attempt == 1:
            cursor.set("first")
        ledger.write(key, "begin", attempt=attempt, page=page)  # from here on it may be stopped
        tries = {"page": lambda: cursor.set(f"page of {attempt}"), "step": lambda: self.step("late", effect, self, key, "late")}
        try:
            ledger.pass_gate(f"{gate}-{attempt}")
        except LeaseLost:
            ledger.write(key, "lost", attempt=attempt)
        for name, attempted in tries.items():
            try:
                attempted()
            except LeaseLost as lost:
                ledger.write(key, "refused", name=name, attempt=attempt, reason=lost.reason)
        return [attempt, cursor.get()]


app = make_app(json.loads(os.environ.get("CELERY_TEST_CONFIG", "{}")), os.environ.get("TEST_LEDGER", "."))
if "TEST_LEDGER" in os.environ:  # a worker, and not the tests' own process
    Store.undo_step = die_between(Store.undo_step)
