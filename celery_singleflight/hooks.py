"""Receivers of Celery's own signals, connected when the package is imported."""

from __future__ import annotations

from typing import Any

from celery import current_app, signals

from celery_singleflight.binding import bindings_of, only_binding
from celery_singleflight.coordination import coordinations
from celery_singleflight.lease import is_holding, note_continuation
from celery_singleflight.logs import complete_logger, complete_loggers, is_log_context_wanted
from celery_singleflight.publish import name_cause, stamp
from celery_singleflight.task import publishing
from celery_singleflight.trigger import generation_of

__all__ = ("connect_hooks",)


def stamp_message(sender: str, headers: Any = None, body: Any = None, properties: Any = None, **_: Any) -> None:
    """Stamp each message on its way to the broker, whoever publishes it: `send_task`, beat, canvas, retry."""
    if isinstance(headers, dict) and isinstance(properties, dict):
        task = publishing.get()
        binding = task._binding if task is not None and task.name == sender else only_binding(sender)  # noqa: SLF001
        stamp(sender, binding, headers, body, properties)
        if is_holding():
            generation = generation_of(headers.get("replaced_task_nesting"), headers.get("retries"))
            name_cause(headers, is_continuation=note_continuation(headers.get("id", ""), generation))


def leave(**_: Any) -> None:
    """Settle what is left before the process goes."""
    for place in coordinations():
        place.heartbeat.flush()


def complete_process(**_: Any) -> None:
    """Complete the log of a pool's process that has not inherited it from the main one."""
    if is_log_context_wanted(current_app):
        complete_loggers()


def equip_worker(sender: Any, **_: Any) -> None:
    """Give a worker that starts its sweeper, a count of its slots, and its tasks the hard time limit of its command line."""
    from celery.worker import state  # noqa: PLC0415, as below

    from celery_singleflight.slots import share_slots  # noqa: PLC0415, publishers never import the worker
    from celery_singleflight.sweeper import SweeperStep  # noqa: PLC0415

    if is_log_context_wanted(sender.app):
        signals.after_setup_logger.connect(complete_logger, dispatch_uid="singleflight.complete_logger")
        signals.after_setup_task_logger.connect(complete_logger, dispatch_uid="singleflight.complete_logger")
    share_slots(sender, state.active_requests)
    sender.app.steps["consumer"].add(SweeperStep)
    for binding in bindings_of(sender.app):
        binding.time_limit = sender.time_limit or binding.time_limit


def connect_hooks() -> None:
    """Connect the receivers; again does nothing."""
    signals.before_task_publish.connect(stamp_message, dispatch_uid="singleflight.stamp_message")
    signals.worker_init.connect(equip_worker, dispatch_uid="singleflight.equip_worker")
    signals.worker_process_init.connect(complete_process, dispatch_uid="singleflight.complete_process")
    signals.worker_process_shutdown.connect(leave, dispatch_uid="singleflight.leave")
    signals.worker_shutdown.connect(leave, dispatch_uid="singleflight.leave")
