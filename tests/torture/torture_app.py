"""The app under torture: protected tasks of several kinds, whose bodies tell the judge what they do."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from typing import Any, Self
from uuid import uuid4

from celery import Celery
from torture_evidence import Evidence
from torture_sabotage import sabotage

from celery_singleflight import LeaseLost, SingleflightTask, signals

#: The lock name that most kinds share.
LOCK = "torture.work"


class Body:
    """One body: what it does, and what it writes about it."""

    #: The run that this process has had last, and for how many seconds it lingers between its record and Celery's result.
    last = ""
    linger = 0.0

    def __init__(self, evidence: Evidence, task: Any, key: str, kind: str) -> None:
        self.evidence = evidence
        self.task, self.key, self.kind = task, key, kind
        self.run = Body.last = uuid4().hex[:16]
        Body.linger = 0.0
        self.lock = task.lock_name or task.name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.evidence.write("end", run=self.run, error=error.__name__ if error else "")

    def begin(self) -> None:
        request, lease, execution = self.task.request, self.task.lease, self.task.execution
        facts = {"lock": self.lock, "key": self.key, "kind": self.kind, "id": request.id, "execution": execution.key}
        self.evidence.write("begin", run=self.run, token=lease.token, attempt=execution.attempt, **facts)
        self.offer("begin")

    def offer(self, when: str) -> None:
        """Write to the resource that looks at fencing tokens; there are none where two may hold the key."""
        if self.task.lock_limit in (None, 1):
            self.evidence.offer(f"{self.lock}/{self.key}", self.task.lease.token, self.run, when)

    def effect(self) -> None:
        """Do what must not happen twice, to a resource that knows of no tokens."""
        self.evidence.write("effect", run=self.run)

    def work(self, seconds: float, early: bool) -> str:
        """Have the effect before or after some work, then write to the register."""
        self.begin()
        if early:
            self.effect()
        time.sleep(seconds)
        if not early:
            self.effect()
        self.offer("end")
        return self.run


def make_app(config: dict[str, Any], directory: str) -> Celery:
    app = Celery("torture", set_as_current=False)
    app.conf.update(config)
    app.evidence = Evidence(directory)
    add_tasks(app)
    return app


def add_tasks(app: Celery) -> None:  # noqa: C901, PLR0915, one task after the other
    evidence = app.evidence
    task = partial(app.task, shared=False, bind=True, base=SingleflightTask, lock_on=("key",))

    @task(name="torture.work", payload_on=("kind",))
    def work(self, key, seconds, early, kind="work", linger=0.0):
        with Body(evidence, self, key, kind) as body:
            Body.linger = linger
            return body.work(seconds, early)

    @task(name="torture.skip", lock_name=LOCK, contention_policy="skip", skip_result="skipped", max_hold=60)
    def skip(self, key, seconds, early):
        with Body(evidence, self, key, "skip") as body:
            return body.work(seconds, early)

    @task(name="torture.limited", lock_limit=2)
    def limited(self, key, seconds, early):
        with Body(evidence, self, key, "limited") as body:
            return body.work(seconds, early)

    @task(name="torture.flaky", lock_name=LOCK, autoretry_for=(OSError,), default_retry_delay=0.1)
    def flaky(self, key, seconds, early):
        """Fail once, before any effect. Without a delay Celery may write RETRY after the SUCCESS of the retry."""
        with Body(evidence, self, key, "flaky") as body:
            if self.request.retries == 0:
                body.begin()
                raise OSError("once")
            return body.work(seconds, early)

    @task(name="torture.fail", lock_name=LOCK)
    def fail(self, key, seconds, early):
        with Body(evidence, self, key, "fail") as body:
            raise ValueError(body.work(seconds, early))

    @task(name="torture.deaf", lock_name=LOCK)
    def deaf(self, key, seconds, early):
        """Go on when the lease is lost, and return as if nothing had been."""
        with Body(evidence, self, key, "deaf") as body:
            body.begin()
            try:
                time.sleep(seconds)
            except LeaseLost:
                evidence.write("deaf", run=body.run)
                time.sleep(seconds)
            body.effect()
            body.offer("end")
            return body.run

    @task(name="torture.overrun", lock_name=LOCK, time_limit=1)
    def overrun(self, key, seconds, early):
        """Meet the hard time limit, and say all the time that this body still lives."""
        with Body(evidence, self, key, "overrun") as body:
            body.begin()
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                time.sleep(0.02)
                evidence.write("sign", run=body.run)
            return body.run

    def say_ended(task_id, outcome, ran, **_):
        evidence.write("ended", id=task_id, outcome=str(outcome), ran=ran, run=Body.last if ran else "")
        if ran and Body.linger:
            # The store has the outcome, and Celery has not: a bad moment to die.
            evidence.write("linger", run=Body.last)
            time.sleep(Body.linger)
            evidence.write("lingered", run=Body.last)

    def say_lost(lease, reason, **_):
        evidence.write("lost", token=lease.token, reason=reason)

    def say_rescued(task_id, outcome, times, **_):
        evidence.write("rescued", id=task_id, outcome=outcome, times=times)

    app.receivers = (say_ended, say_lost, say_rescued)  # signals keep weak references
    signals.trigger_ended.connect(say_ended)
    signals.lease_lost.connect(say_lost)
    signals.rescued.connect(say_rescued)


if "TORTURE_CONFIG" in os.environ:
    app = make_app(json.loads(os.environ["TORTURE_CONFIG"]), os.environ["TORTURE_DIRECTORY"])
    sabotage(os.environ.get("TORTURE_SABOTAGE", ""))
