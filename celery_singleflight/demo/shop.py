"""The shop whose workers the demo runs: the same bodies as protected tasks, or as plain ones.

What the demo starts a worker with comes in the environment, so that a pool's processes know it however they are started.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from celery import Celery
from celery.signals import worker_ready

from celery_singleflight import signals
from celery_singleflight.demo.ledger import Ledger
from celery_singleflight.task import SingleflightTask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ("app",)

#: Seconds after which a lease ends that nobody renews. Short, so that the demo need not wait long for a dead child's.
_LEASE_TTL: Final = 3
#: Seconds for which a stalled charge waits to be killed.
_STALL: Final = 30

_url = os.environ.get("SINGLEFLIGHT_DEMO_URL", "redis://127.0.0.1:6379")
_directory = Path(os.environ.get("SINGLEFLIGHT_DEMO_DIRECTORY", "."))
_protected = os.environ.get("SINGLEFLIGHT_DEMO_PROTECTION", "on") == "on"
_ledger = Ledger(_directory / "ledger")
_holders: dict[str, str] = {}

app = Celery("shop", broker=_url, backend=_url, include=[__name__])
app.conf.update(worker_prefetch_multiplier=1, singleflight_url=_url, singleflight_lease_ttl=_LEASE_TTL)


def task(**protection: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return the decorator of a task that is protected in this way, or of a plain one that a dead child does not lose."""
    options = {"base": SingleflightTask, **protection} if _protected else {"acks_late": True, "reject_on_worker_lost": True}
    return lambda body: app.task(bind=True, name=f"shop.{body.__name__}", **options)(body)


@task(lock_name="tenant", lock_on=("tenant",), idempotent_on="settle:{tenant}:{day}")
def settle(self: Any, tenant: int, day: str, seconds: float) -> str:
    """Settle one day of a tenant."""
    with _body(self, f"tenant {tenant}"):
        time.sleep(seconds)
        return _effect(self, f"settlement of tenant {tenant}, {day}")


@task(lock_name="customer", lock_on=("customer",), idempotent_on="charge:{order}")
def charge(self: Any, customer: int, order: int, seconds: float, *, stalls: bool = False) -> str:
    """Charge a customer for an order. When it stalls, its first run stops just before the money moves."""
    with _body(self, f"customer {customer}"):
        time.sleep(seconds * 0.8)
        _ledger.write("about", trigger=self.request.id)
        if stalls and _is_first(order):
            time.sleep(_STALL)
            raise TimeoutError(f"the charge of order {order} was to be killed here")
        time.sleep(seconds * 0.2)
        return _effect(self, f"charge of order {order}")


@task(lock_name="order", lock_on=("order",))
def credit(self: Any, order: int, event: str, seconds: float) -> str:
    """Credit an order for a payment event; the webhook gives the event's id as the execution key."""
    with _body(self, f"order {order}"):
        time.sleep(seconds)
        return _effect(self, f"credit of {event}")


@task(lock_name="vendor", lock_on=("vendor",), contention_policy="skip", max_hold=60)
def sync(self: Any, vendor: int, seconds: float) -> None:
    """Fetch the prices of a vendor; while one is at it, another would only be in the way."""
    with _body(self, f"vendor {vendor}"):
        time.sleep(seconds)


@contextmanager
def _body(task: Any, key: str) -> Iterator[None]:
    worker = task.request.hostname.partition("@")[0]
    _ledger.write("begin", trigger=task.request.id, key=key, worker=worker)
    try:
        yield
    finally:
        _ledger.write("end", trigger=task.request.id)


def _effect(task: Any, unit: str) -> str:
    _ledger.write("effect", trigger=task.request.id, unit=unit)
    return unit


def _is_first(order: int) -> bool:
    try:
        (_directory / f"stalled-{order}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _ready(sender: Any, **_: Any) -> None:
    _ledger.write("ready", worker=sender.hostname.partition("@")[0])


def _contended(task_id: str, holder_task_id: str, **_: Any) -> None:
    _holders[task_id] = holder_task_id


def _requeued(task_id: str, countdown: float, **_: Any) -> None:
    _ledger.write("requeued", trigger=task_id, note=_holders.pop(task_id, ""), seconds=countdown)


def _ended(task_id: str, outcome: str, *, ran: bool, **_: Any) -> None:
    if not ran:
        _ledger.write("ended", trigger=task_id, note=str(outcome))


worker_ready.connect(_ready)
signals.contended.connect(_contended)
signals.requeued.connect(_requeued)
signals.trigger_ended.connect(_ended)
