"""What a run calls to be done once, and to go on where an earlier attempt of its execution got to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from celery_singleflight.checkpoints import Cursor, checkpoint
from celery_singleflight.steps import step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ("Stepwise",)

_T = TypeVar("_T")


class Stepwise:
    """The part of `SingleflightTask` that knows of steps, checkpoints and cursors."""

    def step(
        self,
        name: str,
        function: Callable[..., _T],
        /,
        *args: Any,
        compensate: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> _T:
        """Do something once over all attempts of this execution; return its result, or the stored one of the attempt that did.

        It is marked before `function` is called and recorded when it has returned. An exception of it clears the mark. A step
        within a step has the names of both. With `compensate`, a function of its result that can be imported, or a method of
        the task, it is undone when the execution fails for good.

        Raises `StepUncertain` when it was begun and not recorded, under `uncertain_policy="hold"`; `StepResultUnavailable` when
        it is done and its result does not serialise; `PayloadChanged` when it was done with other arguments of the task;
        `LeaseLost` when the run has been overtaken; `StepError` for a name that this run has had; as `lease` outside of a run.
        """
        return step(self, name, function, args, kwargs, compensate)

    def checkpoint(
        self,
        parts: Iterable[_T],
        every: int = 1,
        name: str = "parts",
        on_change: Callable[[int], int] | None = None,
    ) -> Iterator[_T]:
        """Yield the parts that no attempt of this execution has done yet, in their order, which must always be the same.

        A part is done when the next one is asked for; that is recorded at once, or after `every` so many parts and at the end.
        Where an earlier attempt had other arguments of the task, `on_change` is given how many parts were done, and returns how
        many are.

        Raises as `cursor` does.
        """
        return checkpoint(self, parts, every, name, on_change)

    def cursor(self, name: str, on_change: Callable[[Any], Any] | None = None) -> Cursor:
        """Return a cursor of this execution, which has `get` and `set`: for page tokens and the like.

        Where an earlier attempt had other arguments of the task, `on_change` is given where it stands, and returns where it is
        to stand.

        Raises `PayloadChanged` without that function; `StepError` for a name that this run has had; `LeaseLost` when the run
        has been overtaken; as `lease` outside of a run.
        """
        return Cursor(self, name, on_change)
