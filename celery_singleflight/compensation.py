"""How the undo of a step is named in the store, so that another process finds it again."""

from __future__ import annotations

from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any

from celery.app.task import Task

from celery_singleflight.step_errors import StepError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("reference", "resolved")


def reference(task: Any, function: Callable[[Any], Any] | None) -> str:
    """Return how the store names an undo; "" for none.

    Raises `StepError` for one that another process would not find: a rescue undoes without calling the body.
    """
    if function is None:
        return ""
    name = getattr(function, "__qualname__", "")
    if getattr(function, "__self__", None) is task and name:
        named = f"self.{function.__name__}"
    elif isinstance(function, Task):
        named = f"task {function.name}"
    else:
        named = f"{getattr(function, '__module__', '')}:{name}"
    try:
        found = resolved(task, named)
    except (AttributeError, ImportError, KeyError, ValueError):
        found = None
    if found != function or "\n" in named:
        raise StepError(
            f"task {task.name}: compensate must be found again by another process; expected a function that can be imported, a "
            f"method of the task, or a task, got {function!r}"
        )
    return named


def resolved(task: Any, named: str) -> Callable[[Any], Any]:
    """Return the undo of that name. Raises `AttributeError`, `ImportError`, `KeyError` or `ValueError` when there is none."""
    found: Any
    if named.startswith("self."):
        found = getattr(task, named.removeprefix("self."))
    elif named.startswith("task "):
        found = task.app.tasks[named.removeprefix("task ")]
    else:
        module, _, name = named.partition(":")
        found = reduce(getattr, name.split("."), import_module(module))
    return found  # type: ignore[no-any-return]
