"""The base class of protected tasks."""

from __future__ import annotations

import functools
import inspect
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar

from celery.app.task import Task
from celery.exceptions import Ignore, Retry
from kombu.utils.imports import symbol_by_name

from celery_singleflight.announcing import answer_or_publish, is_to_be_answered
from celery_singleflight.binding import Binding, bound_to, is_protected, quiet_contention
from celery_singleflight.direct import call_directly
from celery_singleflight.errors import Contended, ExecutionUncertain, SingleflightError, StoreUnavailable
from celery_singleflight.lease import holdings, is_inside
from celery_singleflight.outcome import settle
from celery_singleflight.publish import move_call_options
from celery_singleflight.run import run_trigger
from celery_singleflight.stepwise import Stepwise
from celery_singleflight.trigger import is_without_run
from celery_singleflight.worker import RequestClass

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery import Celery
    from celery.result import AsyncResult, EagerResult

    from celery_singleflight.lease import Execution, Lease

__all__ = ("SingleflightTask", "publishing")

#: The protected task that publishes in this context, for the hook that stamps its message.
publishing: ContextVar[SingleflightTask | None] = ContextVar("singleflight_publishing", default=None)


class SingleflightTask(Stepwise, Task):
    """A task that never overlaps another with the same lock key, and whose execution happens once.

    Set it as `base=` of a task, or as `task_cls` of an app. Every option is an attribute, to be given in the decorator; None
    is the app's `singleflight_<option>` setting, else the default. Seconds throughout.
    """

    #: What the lock key is made of: argument names, a template, or a function of arguments. Default: a digest of all arguments.
    lock_on: Any = None
    #: The name under which the lock key is kept; tasks of one lock name exclude each other. Default: the task's name.
    lock_name: str | None = None
    #: How many may hold a lock key at once. Default: 1.
    lock_limit: int | None = None
    #: How long a dead holder blocks; a live one renews every third of it. Default: 30.
    lease_ttl: float | None = None
    #: A lease is never renewed past this age. Default: the hard time limit and ten seconds, if there is one.
    max_hold: float | None = None
    #: `"requeue"` (default), `"queue"`, `"skip"`, `"coalesce"`, `"replace"`, `"join"` or `"reject"`. Also per call.
    contention_policy: str | None = None
    #: How long a trigger may wait in all before it fails with `WaitTimeout`. Default: no bound. Also per call.
    wait_timeout: float | None = None
    #: Which arguments the waiting trigger has under `coalesce`: `"newest"` (default), `"first"`, or a function that makes them
    #: from the waiting and the new ones, each a dict by name.
    coalesce_keep: Any = None
    #: How long a coalesced trigger is held back for later ones, counted from the last of them. Default: 0. Also per call.
    coalesce_delay: float | None = None
    #: How long it is held back in all, counted from the first of them. Default: ten times `coalesce_delay`.
    coalesce_within: float | None = None
    #: What a skip is to Celery: `"continue"` (default), `"stop"` or `"raise"`.
    skip_as: str | None = None
    #: The value of a skipped trigger under `skip_as="continue"`.
    skip_result: Any = None
    #: What the execution key is made of, as in `lock_on`. Default: the task id. Per call: `execution_key=…`.
    idempotent_on: Any = None
    #: How long a completed execution answers for its duplicates. Default: 86400.
    result_ttl: float | None = None
    #: How many bytes a stored result, error, step's result or cursor may have; inf for any number. Default: 1048576.
    result_limit: float | None = None
    #: How they are compressed before that counts, as kombu names it, such as `"gzip"`. Default: not at all.
    result_compression: str | None = None
    #: Whether a plain call whose explicit execution key is completed or in flight gets the handle of the trigger that has it,
    #: and sends no message. Default: False. Also per call.
    answer_at_publish: bool | None = None
    #: For how long a lock key stays taken after a success, counted from the acquisition. Default: 0.
    min_hold: float | None = None
    #: Whether the store keeps the message of a run, and a worker publishes it again when the run has died. Default: True.
    rescue: bool | None = None
    #: How many of its runs may die with their process before a trigger is dead-lettered. Default: 5.
    max_deliveries: int | None = None
    #: When the store is away before the body: `"requeue"` (default), `"fail"`, or `"run"` without any protection.
    store_error_policy: str | None = None
    #: What a failure is to later triggers of an explicit execution key: `"forget"` (default), they run it, or `"keep"`, it is
    #: their outcome too.
    failure_policy: str | None = None
    #: What is done about a run that died after its body began, or a step that was begun and not recorded: `"rerun"` (default),
    #: or `"hold"` until somebody says what it has done.
    uncertain_policy: str | None = None
    #: Under `"hold"`, a function of an `UncertainExecution` that finds out what it has done: returns a `Resolution` or None.
    reconciler: Any = None
    #: After how many seconds it is asked, the first time and each further time. Default: 0, 10, 60, 600, 3600.
    reconcile_delays: Any = None
    #: By which arguments an explicit execution key is recognised, as in `lock_on`; `()` for none. Default: all arguments.
    payload_on: Any = None
    #: Whether the message of a trigger that has ended is kept, to be replayed: `"failed"` (default), that of one that did not
    #: succeed; `"always"`; or `"never"`.
    keep_message: str | None = None

    # A run that may be repeated safely is repeated when its worker dies.
    acks_late = True
    reject_on_worker_lost = True
    retry_on_worker_lost = False

    Request = RequestClass()

    _binding: ClassVar[Binding | None] = None
    _is_stood_around: ClassVar[bool] = False
    #: The task's `before_start`, called by the run under its lease rather than by Celery for each delivery that waits.
    own_before_start: ClassVar[Callable[..., None] | None] = None

    @classmethod
    def bind(cls, app: Celery) -> Celery:
        """Bind the task to its app. Raises `OptionError` for an option, setting or task class that is wrong."""
        app = super().bind(app)
        name = cls.name or app.gen_task_name(cls.__name__, cls.__module__)
        if is_protected(cls):
            was_bound = "_binding" in vars(cls)
            cls._binding = Binding(name, cls, app, SingleflightTask)
            if not was_bound:  # Celery binds a task once more when it finalizes the app
                cls._binding.warn(cls.time_limit)
            _adapt(cls, app)
        return app

    @property
    def lease(self) -> Lease:
        """The lease of the run that calls.

        Raises `SingleflightError` outside of a run of this task, `StoreUnavailable` in a run that goes on without the store.
        """
        for holding in holdings():
            if holding.task is self and holding.lease is not None:
                return holding.lease
            if holding.task is self:
                raise StoreUnavailable(f"{self.name} runs without a lease: the store was away, and store_error_policy is 'run'")
        raise SingleflightError(f"{self.name} has a lease only while its body runs, in the thread that runs it")

    @property
    def execution(self) -> Execution:
        """The execution that the calling run works on. Raises `SingleflightError` outside of a run of this task."""
        for holding in holdings():
            if holding.task is self and holding.execution is not None:
                return holding.execution
        raise SingleflightError(f"{self.name} has an execution only while its body runs, in the thread that runs it")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task under its lease: for a message in a worker, eagerly, or as a direct call."""
        if self._is_stood_around:
            return super().__call__(*args, **kwargs)
        return _perform(self, super().__call__, args, kwargs)

    def after_return(self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Celery's handler of that name. A task may override it as it likes."""
        try:
            super().after_return(status, retval, task_id, args, kwargs, einfo)
        finally:
            settle(self.request)

    def apply_async(self, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> AsyncResult:
        """Publish the task as Celery does; also takes the call options of this package.

        Under `answer_at_publish` the handle may be that of an earlier trigger: then its `is_duplicate` is true.

        Raises `OptionError` for a wrong one; under `answer_at_publish` also `ExecutionKeyReused` and `PayloadMismatch`.
        """
        # With an explicit parent the tracer of another task publishes: an error would be taken for that task's own.
        move_call_options(self.name, options, strict="parent_id" not in options)
        outer = publishing.set(self)
        try:
            binding = self._binding
            if binding is not None and not rest and is_to_be_answered(binding, options):
                return answer_or_publish(self, binding, (args, kwargs), options, super().apply_async)
            return super().apply_async(args, kwargs, *rest, **options)
        finally:
            publishing.reset(outer)

    def apply(self, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> EagerResult:
        """Run the task here and now as Celery does; contention that would have to wait raises `Contended` at once."""
        move_call_options(self.name, options, strict=True)
        return super().apply(args, kwargs, *rest, **options)


def _perform(task: SingleflightTask, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    binding, request = task._binding, task.request  # noqa: SLF001
    if binding is None:
        return body(*args, **kwargs)
    # What a run of the task calls of itself it calls under the id of its own request.
    if request.called_directly or is_inside(task, request.id):
        return call_directly(task, binding, body, args, kwargs)
    try:
        return run_trigger(task, request, binding, body, args, kwargs)
    except (Ignore, Retry) as ending:
        if is_without_run(ending):
            # Celery takes each frame apart, which costs more than all else of a delivery that waits.
            raise ending.with_traceback(None)  # noqa: B904, it is the same
        raise


def _adapt(cls: type[SingleflightTask], app: Celery) -> None:
    """Fit what a task class brings along with the protection."""
    request = inspect.getattr_static(cls, "Request")
    if not isinstance(request, RequestClass):
        cls.Request = RequestClass(request)
    for expected in (Contended, ExecutionUncertain):
        if expected not in cls.throws:
            cls.throws = (*cls.throws, expected)  # so no error in the log
    on_retry = inspect.getattr_static(cls, "on_retry")
    if not hasattr(on_retry, "is_quiet"):
        cls.on_retry = quiet_contention(on_retry)
    _postpone_before_start(cls)
    _settle_after_return(cls)
    _stand_around(cls)
    for fixup in getattr(app, "_fixups", ()):
        if type(fixup).__name__ == "DjangoFixup" and not hasattr(cls, "delay_on_commit"):
            django_task = symbol_by_name("celery.contrib.django.task:DjangoTask")
            for method in ("delay_on_commit", "apply_async_on_commit"):
                setattr(cls, method, getattr(django_task, method))


def _postpone_before_start(cls: type[SingleflightTask]) -> None:
    """Let the run call `before_start` under its lease, and not Celery for each delivery."""
    found = inspect.getattr_static(cls, "before_start")
    own = getattr(found, "postponed", found)
    if own is Task.before_start:
        cls.own_before_start = None
        return
    if "before_start" in vars(cls) and found is not own:
        return

    def before_start(self: SingleflightTask, *args: Any, **kwargs: Any) -> None:
        if type(self) is not cls:  # `super().before_start(…)` of a task derived from this one
            bound_to(self, own)(*args, **kwargs)

    before_start.postponed = own  # type: ignore[attr-defined]
    cls.own_before_start = own
    cls.before_start = before_start


def _settle_after_return(cls: type[SingleflightTask]) -> None:
    """Settle a trigger also where the task's own `after_return` does not call ours."""
    own = inspect.getattr_static(cls, "after_return")
    if own is SingleflightTask.after_return or hasattr(own, "settles"):
        return

    @functools.wraps(own)
    def after_return(self: SingleflightTask, *args: Any, **kwargs: Any) -> Any:
        try:
            return bound_to(self, own)(*args, **kwargs)
        finally:
            settle(self.request)

    after_return.settles = True  # type: ignore[attr-defined]
    cls.after_return = after_return  # type: ignore[method-assign]


def _stand_around(cls: type[SingleflightTask]) -> None:
    """Put the protection around a `__call__` that comes before ours, because it may never get to ours."""
    first = next(base for base in cls.__mro__ if "__call__" in vars(base))
    own_call = vars(first)["__call__"]
    if issubclass(SingleflightTask, first) or getattr(own_call, "stands_around", False):
        return

    def stand_around(self: SingleflightTask, *args: Any, **kwargs: Any) -> Any:
        return _perform(self, functools.partial(own_call, self), args, kwargs)

    stand_around.stands_around = True  # type: ignore[attr-defined]
    cls.__call__ = stand_around  # type: ignore[method-assign]
    cls._is_stood_around = True
