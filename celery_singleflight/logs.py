"""Which run a log line belongs to: a filter that puts it on each record, for the format of whoever reads the log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from celery_singleflight.errors import OptionError
from celery_singleflight.lease import current_execution, current_lease, is_holding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from celery import Celery

__all__ = ("SETTING", "RunFilter", "add_run_filter", "complete_logger", "complete_loggers", "is_log_context_wanted")

#: The setting by which a worker adds the filter itself, and where: the loggers whose handlers Celery sets up.
SETTING: Final = "singleflight_log_context"
_CELERYS: Final = ("", "celery.task")


class RunFilter(logging.Filter):
    """Puts on each record which run of which execution logs it, under which lock key. It lets every record pass.

    Attributes: `singleflight_run_id`, `singleflight_execution_key`, `singleflight_task_id`, `singleflight_lock_key`, texts that
    are empty outside of a run; `singleflight_attempt`, a number that is 0 there. A thread that a body starts is outside of the
    run.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Complete the record. Returns True."""
        execution = lease = None
        if is_holding():
            execution, lease = current_execution(), current_lease()
        record.singleflight_run_id = execution.run_id if execution else ""
        record.singleflight_execution_key = execution.key if execution else ""
        record.singleflight_task_id = execution.task_id if execution else ""
        record.singleflight_attempt = execution.attempt if execution else 0
        record.singleflight_lock_key = lease.lock_key if lease else ""
        return True


def add_run_filter(handlers: Iterable[logging.Handler]) -> None:
    """Add a `RunFilter` to each of these handlers that has none.

    To handlers and not to loggers, whose filters do not see what comes from the loggers below them.
    """
    for handler in handlers:
        if not any(isinstance(known, RunFilter) for known in handler.filters):
            handler.addFilter(RunFilter())


def is_log_context_wanted(app: Celery) -> bool:
    """Whether the app's workers are to add the filter to Celery's handlers. Raises `OptionError` for a wrong setting."""
    wanted = app.conf.get(SETTING)
    if wanted is not None and not isinstance(wanted, bool):
        raise OptionError(f"setting {SETTING}: expected True or False, got {wanted!r}")
    return bool(wanted)


def complete_logger(logger: Any, **_: Any) -> None:
    """Receiver of Celery's signals that say a logger is set up."""
    add_run_filter(logger.handlers)


def complete_loggers() -> None:
    """Add the filter to the handlers that Celery has set up in this process."""
    for name in _CELERYS:
        complete_logger(logging.getLogger(name))
