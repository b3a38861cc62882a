"""The path of one publish: call options become headers, and the lock key is stamped on the message."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from celery_singleflight import headers as header
from celery_singleflight.binding import arguments_digest
from celery_singleflight.cause import Cause
from celery_singleflight.errors import OptionError, SingleflightError
from celery_singleflight.lease import current_execution
from celery_singleflight.options import CALL_OPTIONS
from celery_singleflight.spelling import check_call

if TYPE_CHECKING:
    from celery_singleflight.binding import Binding

__all__ = ("move_call_options", "name_cause", "stamp")

logger = logging.getLogger(__name__)


def move_call_options(task_name: str, options: dict[str, Any], *, strict: bool) -> None:
    """Move our call options from the options of a publish into its headers, where brokers do not drop them.

    Raises `OptionError` for a wrong one when `strict`; else that is left to the log and to the worker, because an error here
    would be taken for one of whoever published.
    """
    stamps = options.get("stamped_headers") or ()
    try:
        check_call(task_name, [name for name in options if name not in CALL_OPTIONS and name not in stamps])
    except OptionError as error:
        if strict:
            raise
        logger.error("an option has no effect: %s", error)  # noqa: TRY400, it says all
    moved = {}
    for name, option in CALL_OPTIONS.items():
        value = options.pop(name, None)
        if value is not None:
            moved[option.header] = option.checked(value, f"call of {task_name}, {name}") if strict else value
    if moved:
        options["headers"] = {**(options.get("headers") or {}), **moved}


def name_cause(headers: dict[str, Any], *, is_continuation: bool) -> None:
    """Put on a message which run has published it, if the publisher is the body of one.

    A retry or a replacement keeps the cause of what it continues.
    """
    execution = current_execution()
    if execution is None:
        return
    if not is_continuation:
        headers[header.CAUSED_BY] = Cause(execution.key, execution.run_id, execution.attempt)._asdict()
    elif execution.caused_by is not None:
        headers.setdefault(header.CAUSED_BY, execution.caused_by._asdict())


def stamp(task_name: str, binding: Binding | None, headers: dict[str, Any], body: Any, properties: dict[str, Any]) -> None:
    """Complete a message before it is sent: `headers` and `properties` are changed in place.

    `binding` is None for a task of another service: its worker derives the key. So it does when no key can be made here,
    and refuses the call if it cannot either.
    """
    for name, option in CALL_OPTIONS.items():
        value = properties.pop(name, None)
        if value is not None:
            headers[option.header] = value
    if binding is None or not isinstance(body, list | tuple):
        return
    args, kwargs = body[0], body[1]
    try:
        digest = arguments_digest(args, kwargs)
        if headers.get(header.DIGEST) != digest:
            headers[header.KEY] = binding.lock_key(task_name, args, kwargs).text
            headers[header.DIGEST] = digest
    except (SingleflightError, TypeError) as error:
        headers.pop(header.KEY, None)
        logger.debug("no lock key for %s at publish:", task_name, exc_info=error)
