"""What is told of an error that may hold values of a user's: its type and where it was raised, and its text at DEBUG only."""

from __future__ import annotations

import logging
from pathlib import PurePath
from typing import TYPE_CHECKING

from celery_singleflight.errors import LeaseLost, SingleflightError

if TYPE_CHECKING:
    from logging import Logger

__all__ = ("kind", "log_error", "told")


def kind(error: BaseException) -> str:
    """Return the type of an error, as it is kept for people to read."""
    return f"{type(error).__name__}(…)"


def told(error: BaseException) -> str:
    """Return what may be read in any log: the text of an error of the package, else the type and where it was raised."""
    if isinstance(error, SingleflightError | LeaseLost):
        return str(error)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" at {PurePath(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""
    return f"{type(error).__name__}{where}"


def log_error(logger: Logger, message: str, error: BaseException, level: int = logging.ERROR) -> None:
    """Log a message with what may be told of its error; the whole error with its traceback at DEBUG."""
    logger.log(level, "%s: %s", message, told(error))
    logger.debug("%s, in full:", message, exc_info=error)
