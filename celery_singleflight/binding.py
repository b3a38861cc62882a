"""What is known of a protected task once it is bound, and the traps that are refused or handled there."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from celery_singleflight.canonical import digest
from celery_singleflight.coordination import Coordination, check_store_settings, coordination
from celery_singleflight.errors import Contended, ExecutionUncertain, LockKeyError, OptionError
from celery_singleflight.keys import LockKey
from celery_singleflight.logs import is_log_context_wanted
from celery_singleflight.options import read_options
from celery_singleflight.results import Bounds
from celery_singleflight.scope import Arguments, compile_scope
from celery_singleflight.spelling import check_settings, check_task

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from celery import Celery

__all__ = (
    "Binding",
    "arguments_digest",
    "bindings_of",
    "bound_to",
    "is_protected",
    "lock_names",
    "only_binding",
    "quiet_contention",
)

logger = logging.getLogger(__name__)

#: Names of the base class that a task must leave alone.
_RESERVED: Final = ("lease", "execution", "step", "checkpoint", "cursor")
#: Arguments that differ in every call. A lock key that holds one protects nothing.
_PER_CALL: Final = frozenset(
    {"correlation_id", "idempotency_key", "nonce", "now", "request_id", "timestamp", "trace_id", "uuid"}
)


_bindings: Final[dict[str, WeakSet[Binding]]] = {}


class Binding:
    """A task's options, and how its keys are made."""

    def __init__(self, name: str, task: type, app: Celery, base: type) -> None:
        """Check and compile the options of a task class under this name. Raises `OptionError`."""
        own = [cls for cls in task.__mro__ if not issubclass(base, cls)]
        _refuse_traps(name, task, own)
        conf = app.conf
        check_task(name, _attributes(own, base))
        check_settings(conf, conf.__dict__.get("prefix"))
        check_store_settings(app)
        is_log_context_wanted(app)
        self.app = app
        self.name = name
        #: The hard time limit of a call that has none of its own; a worker started with another one says so.
        self.time_limit: float | None = conf.task_time_limit
        self.options = read_options(name, lambda option: getattr(task, option, None), conf)
        #: Of what the store keeps of its results.
        self.bounds = Bounds(self.options.result_limit, self.options.result_compression)
        self.arguments = Arguments(_signature(task))
        self._scope = compile_scope(f"task {name}, lock_on", self.options.lock_on, self.arguments)
        #: Of all arguments nobody has said that they may be read in logs and in the store.
        self._make_key = LockKey.digested if self.options.lock_on is None and self.arguments.parameters else LockKey.of
        self._execution_parts = (
            compile_scope(f"task {name}, idempotent_on", self.options.idempotent_on, self.arguments)
            if self.options.idempotent_on is not None
            else None
        )
        self._payload = (
            compile_scope(f"task {name}, payload_on", self.options.payload_on, self.arguments)
            if self.options.payload_on
            else None
        )
        _bindings.setdefault(name, WeakSet()).add(self)

    @functools.cached_property
    def coordination(self) -> Coordination:
        """The app's store and heartbeat. Raises `ConfigurationError` when the settings name no store."""
        return coordination(self.app)

    def warn(self, time_limit: float | None) -> None:
        """Say in the log what is allowed and hardly meant."""
        options = self.options
        named = self.arguments.names if options.lock_on is None else options.lock_on
        per_call = _PER_CALL.intersection(named) if isinstance(named, tuple) else None
        if per_call:
            logger.warning(
                "task %s: its lock key holds %s, which differs in every call, so it protects nothing; name what matters in "
                "lock_on",
                self.name,
                ", ".join(sorted(per_call)),
            )
        if options.contention_policy == "skip" and self.max_hold(time_limit) == math.inf:
            logger.warning(
                "task %s: contention_policy is 'skip' and nothing bounds a run: one that hangs makes every later one skip for "
                "ever; set max_hold, or a time_limit",
                self.name,
            )
        if (
            options.reconciler is not None
            and options.uncertain_policy != "hold"
            and self.app.conf.get("singleflight_reconciler") is None
        ):
            logger.warning(
                "task %s: it has a reconciler, and uncertain_policy is %r, under which nobody asks it; set 'hold'",
                self.name,
                options.uncertain_policy,
            )

    def lock_key(self, task_name: str, args: Any, kwargs: Mapping[str, Any]) -> LockKey:
        """Make the lock key of a call.

        Raises `LockKeyError` when there is none to be made, `TypeError` when the arguments do not fit the task.
        """
        return self._make_key(self.options.lock_name or task_name, self._scope(self.arguments.bind(args, kwargs)))

    def execution_key(self, args: Any, kwargs: Mapping[str, Any]) -> str | None:
        """Make the execution key of a call, or return None where the task id is it. Raises as `lock_key` does."""
        if self._execution_parts is None:
            return None
        parts = self._execution_parts(self.arguments.bind(args, kwargs))
        text = parts[0] if len(parts) == 1 and not isinstance(self.options.idempotent_on, tuple) else None
        # A text is the key as it is, unless it could be taken for the canonical form of something else.
        return text if isinstance(text, str) and text and text[0] != "[" else LockKey.of("", parts).text

    def payload(self, args: Any, kwargs: Mapping[str, Any]) -> str:
        """Return what an explicit execution key is compared by: a digest of the arguments named in `payload_on`.

        Empty where nothing is compared. Raises as `lock_key` does.
        """
        if self._payload is not None:
            return digest(self._payload(self.arguments.bind(args, kwargs)))
        return self.digest_of_all(args, kwargs) if self.options.payload_on is None else ""

    def digest_of_all(self, args: Any, kwargs: Mapping[str, Any]) -> str:
        """Return what tells payloads apart: the arguments by name, or as they came where a default has no canonical form.

        Of an argument that has none it cannot be told whether it is the same: then it is empty.
        """
        for given in (((), self.arguments.bind(args, kwargs)), (args, kwargs)):
            try:
                return arguments_digest(*given)
            except LockKeyError as error:
                logger.debug("the arguments of %s cannot be compared: %s", self.name, error)
        return ""

    def max_hold(self, time_limit: float | None) -> float:
        """Return the bound on a lease's age, in seconds; by default the hard time limit and ten seconds."""
        if self.options.max_hold is not None:
            return self.options.max_hold
        limit = time_limit or self.time_limit
        return limit + 10.0 if limit else math.inf


def arguments_digest(args: Any, kwargs: Mapping[str, Any]) -> str:
    """Return what tells whether a lock key in a message was made for these arguments."""
    return digest([list(args), kwargs])


def only_binding(task_name: str) -> Binding | None:
    """Return the binding of that task, if it is a protected one of exactly one app in this process."""
    found = list(_bindings.get(task_name, ()))
    return found[0] if found and len({id(binding.app) for binding in found}) == 1 else None


def bindings_of(app: Celery) -> list[Binding]:
    """Return the bindings of all protected tasks of an app."""
    return [binding for bindings in list(_bindings.values()) for binding in list(bindings) if binding.app is app]


def lock_names(app: Celery) -> set[str]:
    """Return the lock names of all protected tasks of an app."""
    return {binding.options.lock_name or binding.name for binding in bindings_of(app)}


def is_protected(task: type) -> bool:
    """Whether tasks of this class are protected; Celery's own (`celery.chord_unlock` and the like) never are."""
    return not task.run.__module__.startswith("celery.")  # type: ignore[attr-defined]


def _attributes(own: list[type], base: type) -> list[str]:
    """Names of the values set on the task: not its methods and properties, nor what Celery itself knows."""
    known = {attribute for cls in base.__mro__ for attribute in vars(cls)}  # hasattr would bind the base to an app
    return [
        attribute
        for cls in own
        for attribute, value in vars(cls).items()
        if not attribute.startswith("_") and attribute not in known and not _is_member(attribute, value)
    ]


def _is_member(attribute: str, value: object) -> bool:
    if inspect.isroutine(value):
        return getattr(value, "__name__", attribute) == attribute  # else a function given as an option
    return hasattr(type(value), "__get__")


def _refuse_traps(name: str, task: type, own: list[type]) -> None:
    for cls in own:
        taken = [reserved for reserved in _RESERVED if reserved in vars(cls)]
        if taken:
            raise OptionError(
                f"task {name}: {cls.__qualname__} sets {', '.join(taken)}, which SingleflightTask needs; rename it"
            )
    run = inspect.unwrap(task.run)  # type: ignore[attr-defined]
    if inspect.iscoroutinefunction(run) or inspect.isasyncgenfunction(run) or inspect.isgeneratorfunction(run):
        kind = "a generator" if inspect.isgeneratorfunction(run) else "async"
        raise OptionError(
            f"task {name}: its function is {kind}, so its body would run after the lease is given back; expected a plain "
            "function"
        )
    rate = getattr(task, "rate_limit", None)
    if rate is not None and not isinstance(rate, str | int | float):
        raise OptionError(
            f"task {name}: rate_limit is Celery's own limit for one worker, expected a text such as '10/s', got {rate!r}; "
            "a rate over all workers belongs in rates, which is planned and not in this version"
        )


def _signature(task: type) -> inspect.Signature:
    signature = inspect.signature(task.run)  # type: ignore[attr-defined]
    if isinstance(inspect.getattr_static(task, "run"), staticmethod):
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def bound_to(task: Any, handler: Any) -> Any:
    """Return a handler as the task would find it: a function as its method, a static or class method as it is meant."""
    return handler.__get__(task, type(task)) if hasattr(handler, "__get__") else handler


def quiet_contention(on_retry: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a task's `on_retry`, which is for retries of its own code, so that waiting does not call it.

    What waits has no traceback worth the name, and the frames that Celery would send to the worker's main process with it cost
    that process more than all else of the delivery.
    """

    @functools.wraps(on_retry)
    def quiet(self: Any, exc: BaseException, task_id: str, args: Any, kwargs: Any, einfo: Any) -> Any:
        if isinstance(exc, Contended | ExecutionUncertain):
            einfo.tb = None
            return None
        return bound_to(self, on_retry)(exc, task_id, args, kwargs, einfo)

    quiet.is_quiet = True  # type: ignore[attr-defined]
    return quiet
