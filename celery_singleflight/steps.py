"""Steps: what is done once over all attempts of an execution, and what its result was."""

from __future__ import annotations

import logging
import time
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from celery.exceptions import SoftTimeLimitExceeded

from celery_singleflight.compensation import reference
from celery_singleflight.errors import (
    Replaced,
    StoreUnavailable,
)
from celery_singleflight.keys import bounded
from celery_singleflight.lease import current_execution
from celery_singleflight.progress import Begun, Changed, Done, Step, Uncertain, Writer
from celery_singleflight.results import decode, encode
from celery_singleflight.step_errors import PayloadChanged, StepError, StepResultUnavailable, StepUncertain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from celery_singleflight.binding import Binding
    from celery_singleflight.claims import Encoded, Record
    from celery_singleflight.lease import Lease
    from celery_singleflight.store import Store

__all__ = ("CurrentStep", "Work", "current_step", "insist", "step", "work_of")

logger = logging.getLogger(__name__)

#: Seconds between two attempts to write while the store is away.
_PAUSE: Final = 0.5
_SEPARATOR: Final = "/"
#: One owner may have several works, one after the other, of the same execution.
_calls: Final = count(1)
_T = TypeVar("_T")


class CurrentStep(NamedTuple):
    """The step that the caller is in."""

    #: Its name, behind those of the steps it is in: "charge/notify".
    name: str
    #: Of this step of this execution, and the same in every attempt: the provider's idempotency key.
    key: str
    #: How often it was begun, this time included.
    attempt: int
    #: Whether an earlier call was never recorded, and may have done it.
    is_unsure: bool


class Work:
    """What one run does of its execution. Made with the run; asks the store nothing before the first step."""

    __slots__ = (
        "_arguments",
        "_digest",
        "_retries",
        "app",
        "binding",
        "had",
        "is_undone",
        "is_used",
        "may_undo",
        "task_name",
        "under_way",
        "writer",
    )

    def __init__(
        self,
        binding: Binding,
        task_name: str,
        lease: Lease,
        record: Record,
        run_id: str,
        worker: str,
        arguments: tuple[Any, Any],
    ) -> None:
        self.app = binding.app
        self.binding = binding
        self.task_name = task_name
        self.writer = Writer(record, lease, run_id, worker, binding.options.result_ttl, binding.options.uncertain_policy)
        #: Names of the steps and cursors that this run has had.
        self.had: set[str] = set()
        #: The steps that it is in, the innermost last.
        self.under_way: list[CurrentStep] = []
        #: Whether the store may keep something of it.
        self.is_used = False
        #: Whether there may be steps to undo if it fails.
        self.may_undo = False
        #: Whether the undo of one of them was begun.
        self.is_undone = False
        self._arguments = arguments
        self._digest: str | None = None
        self._retries = 0

    @property
    def goes_on(self) -> bool:
        """Whether a later run is to go on behind what is done, when this one fails: nothing of it was undone."""
        return self.is_used and not self.is_undone

    @property
    def store(self) -> Store:
        """Where it is written."""
        return self.binding.coordination.store

    @property
    def execution_key(self) -> str:
        """The explicit execution key, else the task id."""
        return self.writer.record.execution_key or self.writer.record.task_id

    @property
    def digest(self) -> str:
        """Stands for the payload, as for an explicit execution key; empty where it cannot, or is not to be compared."""
        if self._digest is None:
            self._digest = self.binding.payload(*self._arguments)
        return self._digest

    def mark(self) -> str:
        """Return a name for the next call of this run."""
        return f"{self.writer.lease.owner}:{next(_calls)}"

    def claim(self, task: Any, kind: str, name: str) -> str:
        """Take a name for this run, and return it behind those of the steps it is in. Raises `StepError`."""
        if not isinstance(name, str) or not name.strip():
            raise StepError(f"task {task.name}: expected a name for the {kind}, a text that is not empty, got {name!r}")
        if task.request.retries != self._retries:  # in eager mode a retry is a call within the first attempt
            self._retries = task.request.retries
            self.had.clear()
        parts = [self.under_way[-1].name] if self.under_way else []
        if task.name != self.task_name:  # called directly, by the body of another task
            parts.append(_part(task.name))
        path = _SEPARATOR.join([*parts, _part(name)])
        if f"{kind} {path}" in self.had:
            raise StepError(
                f"task {task.name}: this run has had a {kind} named {path} already; expected a name of its own for each, such "
                f"as {name + '[1]'!r}"
            )
        self.had.add(f"{kind} {path}")
        return path

    def give_up(self, kind: str, path: str) -> None:
        """Let the name be taken again."""
        self.had.discard(f"{kind} {path}")


def work_of(task: Any) -> Work:
    """Return the work of the run of this task that calls.

    Raises `SingleflightError` outside of a run, `StoreUnavailable` in one that goes on without the store, `LeaseLost`.
    """
    task.lease.check()
    work: Work = task.execution.work
    return work


def step(
    task: Any,
    name: str,
    function: Callable[..., _T],
    args: Any,
    kwargs: Mapping[str, Any],
    compensate: Callable[[Any], Any] | None,
) -> _T:
    """Do a step of the run of that task that calls; see `SingleflightTask.step`."""
    work = work_of(task)
    undo = reference(task, compensate)
    path = work.claim(task, "step", name)
    wanted = Step(path, work.mark(), work.digest, undo)
    writer, store = work.writer, work.store
    work.is_used = True
    begun, interruption = insist(writer.lease, lambda: store.begin_step(writer, wanted))
    if interruption:
        if isinstance(begun, Begun):
            insist(writer.lease, lambda: store.record_step(writer, wanted, None))
        raise interruption
    if not isinstance(begun, Begun):
        return _known(work, path, begun)  # type: ignore[no-any-return]
    if undo:
        work.may_undo = True
    if begun.is_unsure:
        logger.warning(
            "step %s of %s was begun before and not recorded: it is done again, for the %s. time",
            path,
            work.execution_key,
            begun.times,
        )
    work.under_way.append(CurrentStep(path, f"{work.execution_key}{_SEPARATOR}{path}", begun.times, begun.is_unsure))
    try:
        value = function(*args, **kwargs)
    except SoftTimeLimitExceeded:
        work.give_up("step", path)
        raise  # it may have been done: the mark stays, as with LeaseLost, Replaced and SystemExit
    except Exception:
        work.give_up("step", path)
        _record(work, wanted, None, "")
        raise
    finally:
        work.under_way.pop()
    _record_value(work, wanted, value)
    return value


def _known(work: Work, path: str, found: Done | Uncertain | Changed) -> Any:
    """Return the result of a step that is not to be done now."""
    key = work.execution_key
    if isinstance(found, Done):
        if not found.value.content_type:
            raise StepResultUnavailable(key, path, found.note)
        return decode(work.app, found.value, key, found.note)
    work.give_up("step", path)
    if isinstance(found, Uncertain):
        raise StepUncertain(key, path, *found)
    raise PayloadChanged(key, f"step {path}")


def _record_value(work: Work, wanted: Step, value: Any) -> None:
    interruption: BaseException | None = None
    while True:
        try:
            encoded, why_not = encode(work.app, value, work.binding.bounds)
            break
        except SoftTimeLimitExceeded as raised:  # it is done all the same
            interruption = raised
    _record(work, wanted, encoded, why_not)
    if interruption:
        raise interruption
    if why_not:
        raise StepResultUnavailable(work.execution_key, wanted.name, why_not)


def _record(work: Work, wanted: Step, value: Encoded | None, note: str) -> None:
    writer = work.writer
    _, interruption = insist(writer.lease, lambda: work.store.record_step(writer, wanted, value, note))
    if interruption:
        raise interruption


def insist(lease: Lease, write: Callable[[], _T]) -> tuple[_T, BaseException | None]:
    """Write, through an outage of the store, for as long as the lease may still be ours.

    Returns the answer, and a time limit, shutdown or replacement that fell in here, for the caller to raise. Raises
    `LeaseLost`.
    """
    interruption: BaseException | None = None
    while True:
        try:
            return write(), interruption
        except StoreUnavailable as error:
            if interruption:
                raise interruption from error
            logger.warning("the store does not take what the run on %s has done, trying again: %s", lease.lock_key, error)
            lease.check()
            time.sleep(_PAUSE)
        except (SoftTimeLimitExceeded, Replaced, SystemExit, KeyboardInterrupt) as raised:
            if interruption:
                raise
            interruption = raised


def current_step() -> CurrentStep | None:
    """Return the step that the caller is in, or None."""
    execution = current_execution()
    under_way = execution.work.under_way if execution and execution.work else []
    return under_way[-1] if under_way else None


def _part(name: str) -> str:
    """Return a name that a separator can follow."""
    return bounded(name.replace("%", "%25").replace(_SEPARATOR, "%2F"))
