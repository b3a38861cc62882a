"""The one list of options and settings, and how a wrong one is refused."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, NoReturn

from celery_singleflight.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = (
    "CALL_OPTIONS",
    "OPTIONS",
    "SETTINGS",
    "Option",
    "TaskOptions",
    "check_names",
    "read_options",
    "refuse_call_options",
)

#: In the Celery settings every option has its app-wide default under this prefix.
PREFIX: Final = "singleflight_"


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a protected task: `check` returns the value to use, or None when it is not what was `expected`."""

    name: str
    default: Any
    expected: str
    check: Callable[[Any], Any]
    #: Can be given per call, in `apply_async`, `.set()` and beat's `options`; travels in a header of the message.
    call: bool = False

    @property
    def setting(self) -> str:
        """Name of the app-wide default in the Celery settings."""
        return PREFIX + self.name

    @property
    def header(self) -> str:
        """Name of the message header that carries it per call."""
        return PREFIX + self.name

    def checked(self, value: Any, where: str) -> Any:
        """Return the value to use. Raises `OptionError` that says what was expected and what came."""
        try:
            checked = self.check(value)
        except (TypeError, ValueError):
            checked = None
        if checked is None:
            is_later = self.name == "contention_policy" and value in LATER_POLICIES
            note = f"; {value!r} is planned and not in this version" if is_later else _meant(value, self)
            raise OptionError(f"{where}: expected {self.expected}, got {value!r}{note}")
        return checked


def _one_of(*words: str) -> Callable[[Any], Any]:
    return lambda value: value if value in words else None


def _seconds(value: Any, least: float) -> float | None:
    number = float(value)
    return number if not isinstance(value, bool | str) and number >= least and not math.isnan(number) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 1 <= value <= 10_000 else None


def _recipe(value: Any) -> Any:
    if callable(value) or _text(value):
        return value
    if isinstance(value, list | tuple) and all(map(_text, value)):
        return tuple(value)
    return None


_RECIPE: Final = "argument names such as ('tenant_id',), a template such as 'billing:{account.id}', or a function"

OPTIONS: Final[dict[str, Option]] = {
    option.name: option
    for option in (
        Option("lock_on", None, _RECIPE, _recipe),
        Option("lock_name", None, "a name that is not empty", _text),
        Option("lock_limit", 1, "a whole number from 1 to 10000", _count),
        Option("lease_ttl", 30.0, "seconds, at least 0.5", lambda value: _finite(_seconds(value, 0.5))),
        Option("max_hold", None, "seconds, at least 1, or inf for no bound", lambda value: _seconds(value, 1)),
        Option(
            "contention_policy",
            "requeue",
            "'requeue', 'skip' or 'reject'",
            _one_of("requeue", "skip", "reject"),
            call=True,
        ),
        Option("wait_timeout", None, "seconds from 0, or inf for no bound", lambda value: _seconds(value, 0), call=True),
        Option("skip_as", "continue", "'continue', 'stop' or 'raise'", _one_of("continue", "stop", "raise")),
        Option("skip_result", None, "any value", lambda value: value),
        Option("idempotent_on", None, _RECIPE, _recipe),
        Option("execution_key", None, "a text that is not empty", _text, call=True),
        Option("result_ttl", 86400.0, "seconds from 0", lambda value: _finite(_seconds(value, 0))),
    )
}
#: Given per call only: one key for every call of a task would make it run once for ever.
_ONLY_PER_CALL: Final = {"execution_key"}
CALL_OPTIONS: Final = {name: option for name, option in OPTIONS.items() if option.call}

#: Settings of the app that are not a task option.
SETTINGS: Final[dict[str, str]] = {
    "singleflight_url": "a URL such as redis://host:6379/0",
    "singleflight_transport_options": "a mapping of redis-py connection arguments",
    "singleflight_key_prefix": "a text without braces",
}

#: In the design, not in this version. Refused by name, so that nobody relies on what is not there.
LATER: Final = frozenset(
    {
        "failure_policy",
        "freshness",
        "full_policy",
        "max_deliveries",
        "max_pending",
        "min_hold",
        "rates",
        "store_error_policy",
        "uncertain_policy",
    }
)
LATER_POLICIES: Final = ("queue", "coalesce", "replace", "join")

#: Names with these beginnings are ours.
_FAMILIES: Final = ("lease_", "contention_", "idempotent_", "idempotency_", "singleflight_")
#: What people write who come from elsewhere.
_GUESSES: Final = {
    "lock_args": "lock_on",
    "lock_by": "lock_on",
    "lock_expiry": "lease_ttl",
    "lock_key": "lock_on",
    "lock_scope": "lock_on",
    "lock_timeout": "lease_ttl",
    "lock_ttl": "lease_ttl",
    "unique_on": "lock_on",
}


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """The options of one task, complete and checked. Durations in seconds; `inf` for no bound."""

    lock_on: Any
    lock_name: str | None
    lock_limit: int
    lease_ttl: float
    max_hold: float | None
    contention_policy: str
    wait_timeout: float | None
    skip_as: str
    skip_result: Any
    idempotent_on: Any
    result_ttl: float


def read_options(task_name: str, given: Callable[[str], Any], conf: Mapping[str, Any]) -> TaskOptions:
    """Return the options of a task: its own attribute, else the app's setting, else the default. None is "not given".

    Raises `OptionError`.
    """
    values = {}
    for name in (field.name for field in fields(TaskOptions)):
        option = OPTIONS[name]
        value, where = given(name), f"task {task_name}, {name}"
        if value is None:
            value, where = conf.get(option.setting), f"setting {option.setting}"
        values[name] = option.default if value is None else option.checked(value, where)
    return TaskOptions(**values)


def check_names(task_name: str, attributes: Iterable[str], settings: Iterable[str], prefix: str | None) -> None:
    """Refuse an attribute or setting that looks like one of ours and is none.

    `prefix` is the namespace of the Celery settings, such as `CELERY_`. Raises `OptionError`.
    """
    task_options = [name for name in OPTIONS if name not in _ONLY_PER_CALL]
    for name in attributes:
        if name in _ONLY_PER_CALL:
            raise OptionError(
                f"task {task_name}: {name} is given per call, in apply_async; for a key made from the arguments use "
                "idempotent_on"
            )
        if name not in task_options and (_is_ours(name) or _nearest(name, task_options, 0.85)):
            _refuse(f"task {task_name}", name, task_options, "")
    known = {*SETTINGS, *(OPTIONS[name].setting for name in task_options)}
    for name in settings:
        bare = name.removeprefix(prefix) if prefix else name
        lower = bare.lower()
        if not lower.startswith(PREFIX):
            continue
        if lower not in known:
            _refuse("the Celery settings", name, known, PREFIX)
        spelled = lower if not prefix else prefix + (lower.upper() if prefix.isupper() else lower)
        if name not in {spelled, lower}:
            raise OptionError(f"the Celery settings: {name} is not read; write {spelled}")


def refuse_call_options(task_name: str, names: Iterable[str]) -> None:
    """Refuse what is given to a call and looks like a call option of ours. Raises `OptionError`."""
    for name in names:
        if name in OPTIONS:
            raise OptionError(
                f"call of {task_name}: {name} is an option of the task, not of a call; per call there are "
                f"{', '.join(sorted(CALL_OPTIONS))}"
            )
        if _resembles_call_option(name):
            _refuse(f"call of {task_name}", name, CALL_OPTIONS, "")


@functools.cache
def _resembles_call_option(name: str) -> bool:
    return _is_ours(name) or _nearest(name, CALL_OPTIONS, 0.85) is not None


def _is_ours(name: str) -> bool:
    return name in LATER or name in _GUESSES or name.startswith(_FAMILIES)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _refuse(where: str, name: str, known: Iterable[str], prefix: str) -> NoReturn:
    lower = name.lower()
    if lower.rpartition(prefix)[2] in LATER if prefix else lower in LATER:
        raise OptionError(f"{where}: {name} is planned and not in this version; expected one of {', '.join(sorted(known))}")
    nearest = _GUESSES.get(name) or _nearest(lower, known, 0.5)
    meant = f"; did you mean {nearest}?" if nearest else ""
    raise OptionError(f"{where}: there is no {name}, expected one of {', '.join(sorted(known))}{meant}")


def _nearest(name: str, known: Iterable[str], likeness: float) -> str | None:
    return next(iter(get_close_matches(name, known, n=1, cutoff=likeness)), None)


def _meant(value: Any, option: Option) -> str:
    words = option.expected.replace("'", "").replace(" or ", ", ").split(", ")
    nearest = _nearest(value, words, 0.6) if isinstance(value, str) and "'" in option.expected else None
    return f"; did you mean {nearest!r}?" if nearest else ""
