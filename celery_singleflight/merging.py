"""Merging the arguments of a coalesced trigger with those of the one that waits."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from celery_singleflight.discretion import log_error
from celery_singleflight.errors import LockKeyError
from celery_singleflight.message import arguments_in

if TYPE_CHECKING:
    from celery_singleflight.claims import Merge
    from celery_singleflight.keys import LockKey
    from celery_singleflight.trigger import Trigger

__all__ = ("merge",)

logger = logging.getLogger(__name__)


def merge(trigger: Trigger, asked: Merge) -> None:
    """Give a trigger the arguments that its task's `coalesce_keep` makes of its own and of those that wait.

    When the one that it was merged with waits no longer, it has its own again. When the function raises, or makes a call of
    another lock key, the trigger waits by itself, in line: nothing is lost.
    """
    if not asked.by:
        trigger.unmerge()
        return
    binding, name = trigger.binding, trigger.task.name
    try:
        # Of `**options` each is there by its own name and once, so that no change of it is made in vain.
        waiting, newest = (
            binding.arguments.as_keywords(binding.arguments.bind(*call))
            for call in (arguments_in(asked.message), trigger.own_arguments)
        )
        merged = binding.options.coalesce_keep(waiting, newest)
        kwargs = binding.arguments.as_keywords(merged)
        lock_key = binding.lock_key(name, (), kwargs)
        _refuse_other_key(name, lock_key, trigger.lock_key)
        trigger.merge(kwargs, asked)
    except Exception as error:  # noqa: BLE001, of a user's function
        log_error(logger, f"{name}[{trigger.request.id}] is not merged with what waits, and waits by itself", error)
        trigger.wait_alone()


def _refuse_other_key(name: str, made: LockKey, expected: LockKey) -> None:
    if made != expected:
        raise LockKeyError(f"coalesce_keep of {name} made a call of {made}, expected one of {expected}")
