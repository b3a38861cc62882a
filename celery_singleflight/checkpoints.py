"""Checkpoints: how far an execution has come with what it does part by part."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from celery_singleflight.progress import Changed
from celery_singleflight.results import decode, encode
from celery_singleflight.step_errors import PayloadChanged, StepError
from celery_singleflight.steps import insist, work_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from celery_singleflight.claims import Encoded

__all__ = ("Cursor", "checkpoint")

_T = TypeVar("_T")


class Cursor:
    """Where an execution has got to, kept over its attempts. Only the run that owns the execution can move it."""

    __slots__ = ("_path", "_task", "_value")

    def __init__(
        self, task: Any, name: str, on_change: Callable[[Any], Any] | None = None, kind: str = "cursor", default: Any = None
    ) -> None:
        """Read where it stands; see `SingleflightTask.cursor`."""
        work = work_of(task)
        self._task = task
        self._path = work.claim(task, kind, name)
        self._value = default
        work.is_used = True
        store, writer = work.store, work.writer
        accepts = on_change is not None
        found, interruption = insist(writer.lease, lambda: store.read_cursor(writer, self._path, work.digest, accepts=accepts))
        if interruption:
            raise interruption
        if isinstance(found, Changed):
            if on_change is None:
                work.give_up(kind, self._path)
                raise PayloadChanged(work.execution_key, f"{kind} {self._path}")
            self.set(on_change(self._decoded(found.value)))
        elif found is not None:
            self._value = self._decoded(found)

    def get(self) -> Any:
        """Return where it stands; None, or the default, when no attempt has moved it."""
        return self._value

    def set(self, value: Any) -> None:
        """Move it, in the store and at once.

        Raises `LeaseLost` when the run has been overtaken, `StepError` when the value does not serialise or is too large; it
        stays then.
        """
        work = work_of(self._task)
        encoded, why_not = encode(work.app, value, work.binding.bounds)
        if why_not:
            raise StepError(f"cursor {self._path}: {why_not}")
        store, writer = work.store, work.writer
        _, interruption = insist(writer.lease, lambda: store.move_cursor(writer, self._path, work.digest, encoded))
        self._value = value
        if interruption:
            raise interruption

    def __repr__(self) -> str:
        return f"<Cursor {self._path} at {self._value!r}>"

    def _decoded(self, value: Encoded) -> Any:
        work = work_of(self._task)
        return decode(work.app, value, work.execution_key, "")


def checkpoint(task: Any, parts: Iterable[_T], every: int, name: str, on_change: Callable[[Any], Any] | None) -> Iterator[_T]:
    """Yield the parts that are not done yet; see `SingleflightTask.checkpoint`."""
    if type(every) is not int or every < 1:
        raise StepError(f"task {task.name}: checkpoint {name}, every: expected a whole number from 1, got {every!r}")
    cursor = Cursor(task, name, on_change, kind="checkpoint", default=0)
    done = cursor.get()
    if type(done) is not int or done < 0:
        raise StepError(f"task {task.name}: checkpoint {name}: expected a number of parts that are done, got {_shown(done)}")
    return _remaining(iter(parts), cursor, done, every)


def _shown(done: Any) -> str:
    """Return a count as it is; of anything else, which may be a cursor of the user's, its type."""
    return repr(done) if type(done) is int else type(done).__name__


def _remaining(parts: Iterator[_T], cursor: Cursor, done: int, every: int) -> Iterator[_T]:
    written = done
    for part in islice(parts, done, None):
        yield part
        done += 1
        if done - written >= every:
            cursor.set(done)
            written = done
    if done > written:
        cursor.set(done)
