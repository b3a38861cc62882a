"""What else is looked at on the sweeper's timer, by app."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from celery import Celery

__all__ = ("look_also", "looks_of")

_looks: Final[WeakKeyDictionary[Celery, list[Callable[[Celery], None]]]] = WeakKeyDictionary()


def look_also(app: Celery, look: Callable[[Celery], None]) -> None:
    """Have the sweeper of every worker of the app call `look` with the app, about once a second, on its event loop.

    So it must be short, and must raise nothing.
    """
    _looks.setdefault(app, []).append(look)


def looks_of(app: Celery) -> Iterator[Callable[[Celery], None]]:
    """Yield what was registered for the app."""
    yield from _looks.get(app, ())
