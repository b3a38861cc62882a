"""What the settings of an app mean for triggers that wait with the broker; said in the log when a worker starts."""

from __future__ import annotations

import logging
from math import inf
from typing import TYPE_CHECKING, Any, Final

from celery_singleflight.binding import bindings_of
from celery_singleflight.options import CALL_OPTIONS
from celery_singleflight.waiting import driver_of, longest_delay

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery import Celery

    from celery_singleflight.binding import Binding

__all__ = ("risks_of_waiting", "warn_of_settings")

logger = logging.getLogger(__name__)

#: Messages that a worker on RabbitMQ should be allowed at once: it raises their number, for those that wait, with each round.
_PREFETCH: Final = 8
#: Seconds. Where everybody looks again more often than this, a thousand that wait for one key keep a worker busy.
_SHORT: Final = 10.0


def warn_of_settings(app: Celery, prefetch: int) -> None:
    """Log what the settings put at risk for triggers that are requeued. `prefetch` is what the worker begins with."""
    for risk in risks_of_waiting(app, prefetch):
        logger.warning("%s", risk)


def risks_of_waiting(app: Celery, prefetch: int) -> list[str]:
    """Return what the settings of an app put at risk, for people to read."""
    bindings = {binding.name: binding for binding in bindings_of(app)}
    requeues = any(binding.options.contention_policy == "requeue" for binding in bindings.values())
    return [*(_of_the_broker(app, prefetch) if requeues else ()), *_of_beat(app, bindings)]


def _of_the_broker(app: Celery, prefetch: int) -> Iterator[str]:
    limit, longest = app.conf.get("worker_eta_task_limit"), longest_delay(app)
    if limit:
        yield (
            f"worker_eta_task_limit is {limit}: a requeued trigger waits as a message with an ETA, and a worker that has "
            "so many of them takes no other work; leave it unset, or use contention_policy='queue' where many wait for one key"
        )
    if 0 < prefetch < _PREFETCH and driver_of(app) == "amqp":
        yield (
            f"the worker takes {prefetch} messages at once, and RabbitMQ gives it others past those that wait only slowly: "
            "where many wait, other tasks of the queue wait for seconds; raise worker_prefetch_multiplier, so that with the "
            f"concurrency it makes {_PREFETCH * 2} or more, or use contention_policy='queue'"
        )
    if longest < _SHORT:
        yield (
            f"visibility_timeout is {longest * 2:g} s: no requeued trigger may wait longer than half of it, so each looks "
            f"again at least every {longest:g} s; make it {_SHORT * 2:g} s or more, or use contention_policy='queue'"
        )


def _of_beat(app: Celery, bindings: dict[str, Binding]) -> Iterator[str]:
    for entry, schedule in (app.conf.beat_schedule or {}).items():
        call = schedule.get("options") or {}
        binding = bindings.get(schedule.get("task"))
        if binding is None:
            continue
        policy, wait = (
            _called_with(call, name, getattr(binding.options, name)) for name in ("contention_policy", "wait_timeout")
        )
        if policy == "requeue" and (wait is None or wait == inf):
            yield (
                f"beat entry {entry!r}: {binding.name} requeues without wait_timeout, so that triggers pile up when runs take "
                "longer than its interval; use contention_policy='coalesce' or 'skip', or give it a wait_timeout"
            )


def _called_with(call: dict[str, Any], name: str, default: Any) -> Any:
    """Return the option that a scheduled call has, by its name or in its headers."""
    value = call.get(name)
    if value is None:
        value = (call.get("headers") or {}).get(CALL_OPTIONS[name].header)
    return default if value is None else value
