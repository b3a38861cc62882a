"""Every task in several kinds, as `<kind>.<name>`, with one body and the same acknowledgements.

`plain` is Celery's own, `protected` locks on all arguments, and one kind for each contention policy locks on the task as a
whole, so that a test can hold its key beforehand.

Annotations are not postponed: before 5.7 Celery finds pydantic models in them only as they are.
"""

import json
import os
import signal
import time
from typing import Any

from celery import Celery, Task, group
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from ledger import Ledger
from matrix_axes import POLICIES
from pydantic import BaseModel
from twin_request import facts_of

from celery_singleflight import SingleflightTask, signals


class Order(BaseModel):
    number: int
    items: list[str] = []


class Hooks:
    """Notes each of Celery's hooks that is called for a task, and what its run sees of its request."""

    Request = "twin_request:NotingRequest"

    def _note(self, hook: str, task_id: str, **facts: Any) -> None:
        self.app.ledger.write(str(task_id), hook, **facts)

    def before_start(self, task_id, args, kwargs):
        self._note("before_start", task_id, task=self.name, sees=facts_of(self, args, kwargs))

    def on_success(self, retval, task_id, args, kwargs):
        self._note("on_success", task_id)

    def on_retry(self, exc, task_id, args, kwargs, einfo):
        self._note("on_retry", task_id)

    def on_failure(self, exc, task_id, args, kwargs, einfo):
        self._note("on_failure", task_id)

    def after_return(self, status, retval, task_id, args, kwargs, einfo):
        self._note(f"after_return {status}", task_id)


def make_app(config: dict[str, Any], directory: str) -> Celery:
    app = Celery("twin_app", set_as_current=False)
    app.conf.update(config)
    app.ledger = Ledger(directory)
    kinds = {"plain": (Task, {}), "protected": (SingleflightTask, {})}
    for policy in POLICIES.values():
        kinds[policy.name] = SingleflightTask, {"contention_policy": policy.name, "lock_on": (), **policy.options}
    for kind, (base, attributes) in kinds.items():
        add_tasks(app, kind, type(f"Hooked{kind.title()}", (Hooks, base), attributes))
    return app


def note_contention(sender: Any, task_id: str, **facts: Any) -> None:
    """Write down who met contention. The key in the ledger is the lock name."""
    ledger = getattr(sender.app, "ledger", None)
    if ledger is not None:
        ledger.write(sender.name, "contended", task_id=str(task_id))


def die_after_the_end(sender: Any, task_id: str, **facts: Any) -> None:
    """Kill the process of a run that has its outcome, before Celery has told anybody; once for each trigger."""
    if sender.name.endswith(".die_after_the_end") and not sender.app.ledger.read(f"{task_id}-died"):
        sender.app.ledger.write(f"{task_id}-died", "died")
        os.kill(os.getpid(), signal.SIGKILL)


signals.contended.connect(note_contention, weak=False, dispatch_uid="twin_app")
signals.trigger_ended.connect(die_after_the_end, weak=False, dispatch_uid="twin_app")


def add_tasks(app: Celery, kind: str, base: type) -> None:  # noqa: C901, PLR0915, one task after the other
    ledger = app.ledger

    def task(protection=None, **options):
        if issubclass(base, SingleflightTask):
            options.update(protection or {})

        def register(function):
            return app.task(
                name=f"{kind}.{function.__name__}",
                base=base,
                bind=True,
                acks_late=True,
                reject_on_worker_lost=True,
                shared=False,
                **options,
            )(function)

        return register

    @task()
    def echo(self, *args, **kwargs):
        return {"args": args, "kwargs": kwargs}

    @task()
    def add(self, a, b=0):
        return a + b

    @task()
    def double(self, n):
        return 2 * n

    @task()
    def total(self, values):
        return sum(values)

    @task(protection={"lease_ttl": 1})
    def short_lease(self, value):
        return value

    @task()
    def fail(self, *args):
        raise KeyError("missing", 3)

    @task(throws=(KeyError,))
    def fail_as_expected(self):
        raise KeyError("expected")

    @task()
    def ignore(self):
        raise Ignore

    @task()
    def reject(self):
        raise Reject("no", requeue=False)

    @task()
    def not_serialisable(self):
        return object()

    @task(ignore_result=True)
    def forget_result(self, key):
        ledger.write(key, "ran")
        return object()

    @task()
    def note(self, key):
        ledger.write(key, "note")

    @task()
    def note_value(self, value, key):
        ledger.write(key, "note", value=value)

    @task()
    def flat_total(self, values):
        return sum(sum(value) if isinstance(value, list) else value for value in values)

    @task(max_retries=2, default_retry_delay=0)
    def retry_for_ever(self):
        raise self.retry(exc=OSError("still"))

    @task(max_retries=5)
    def retry_twice(self):
        if self.request.retries < 2:
            raise self.retry(countdown=0)
        return self.request.retries

    @task(autoretry_for=(OSError,), retry_kwargs={"max_retries": 1, "countdown": 0})
    def autoretry(self):
        if self.request.retries == 0:
            raise OSError("once")
        return self.request.retries

    @task(max_retries=3)
    def retry_with_arguments(self, value):
        if value == "first":
            raise self.retry(args=("second",), countdown=0)
        return value

    @task(max_retries=3)
    def retry_and_return(self, key):
        ledger.write(key, "ran")
        if self.request.retries == 0:
            self.retry(countdown=0, throw=False)
        return self.request.retries

    @task(max_retries=3)
    def retry_and_eat_it(self, key):
        ledger.write(key, "ran")
        if self.request.retries == 0:
            try:
                self.retry(countdown=0)
            except Exception:  # noqa: BLE001, as people write it
                return "eaten"
        return self.request.retries

    @task(max_retries=3)
    def retry_and_fail(self, key):
        ledger.write(key, "ran")
        if self.request.retries == 0:
            self.retry(countdown=0, throw=False)
            raise KeyError("after its retry")
        return self.request.retries

    @task()
    def replace_by_chain(self):
        raise self.replace(self.app.tasks[f"{kind}.add"].si(1, 1) | self.app.tasks[f"{kind}.add"].s(5))

    @task()
    def replace_by_group(self):
        add = self.app.tasks[f"{kind}.add"]
        raise self.replace(group(add.si(2, 2), add.si(2, 2)))

    @task()
    def replace_by_itself(self, n):
        if n > 0:
            raise self.replace(self.app.tasks[f"{kind}.replace_by_itself"].si(n - 1))
        return "replaced"

    @task(soft_time_limit=0.3)
    def soft_limited(self, catch):
        try:
            time.sleep(20)
        except SoftTimeLimitExceeded:
            if catch:
                return "cleaned up"
            raise

    @task(time_limit=1)
    def hard_limited(self):
        time.sleep(20)

    @task()
    def sleep_at_gate(self, key):
        ledger.write(key, "begin")
        ledger.pass_gate(key)
        return "passed"

    @task()
    def die_after_the_end(self, key):
        ledger.write(key, "begin")
        ledger.pass_gate(key)
        return "passed"

    @task()
    def announce_state(self):
        self.update_state(state="HALF", meta={"done": 50})
        return self.AsyncResult(self.request.id).state

    @task()
    def call_another(self, n):
        return self.app.tasks[f"{kind}.add"](n, 1)

    @task(pydantic=True)
    def order(self, order: Order) -> Order:
        assert isinstance(order, Order)
        return Order(number=order.number + 1, items=order.items)

    @task()
    def spawn(self):
        return self.app.tasks[f"{kind}.add"].delay(1, 2).id


app = make_app(json.loads(os.environ.get("CELERY_TEST_CONFIG", "{}")), os.environ.get("TEST_LEDGER", "."))
