"""The one list of options and settings, and what each may be."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from kombu.compression import get_encoder

from celery_singleflight.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ("CALL_OPTIONS", "OPTIONS", "PREFIX", "SETTINGS", "TASK_OPTIONS", "Option", "TaskOptions", "read_options")

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
        except (OverflowError, TypeError, ValueError):
            checked = None
        if checked is None:
            raise OptionError(f"{where}: expected {self.expected}, got {_shown(value)}{_nearest_word(value, self)}")
        return checked


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _one_of(*words: str) -> Callable[[Any], Any]:
    return lambda value: value if value in words else None


def _seconds(value: Any, least: float, most: float = math.inf) -> float | None:
    number = float(value)
    return number if not isinstance(value, bool | str) and least <= number <= most else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 1 <= value <= 1000 else None


def _delays(value: Any) -> tuple[float, ...] | None:
    delays = tuple(_seconds(delay, 0.0 if n == 0 else 1.0, 604800) for n, delay in enumerate(value))
    return None if isinstance(value, str) or len(delays) > 100 or None in delays else delays  # type: ignore[return-value]


def _bytes(value: Any) -> float | None:
    return value if (type(value) is int and value >= 0) or value == math.inf else None


def _compression(value: Any) -> str | None:
    try:
        get_encoder(value)
    except KeyError:
        return None
    return _text(value)


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
        Option("lock_name", None, "a text that is not empty", _text),
        Option("lock_limit", 1, "a whole number from 1 to 1000", _count),
        Option("lease_ttl", 30.0, "seconds from 0.5 to 604800, a week", lambda value: _seconds(value, 0.5, 604800)),
        Option("max_hold", None, "seconds, at least 1, or inf for no bound", lambda value: _seconds(value, 1)),
        Option(
            "contention_policy",
            "requeue",
            "'requeue', 'queue', 'skip', 'coalesce', 'replace', 'join' or 'reject'",
            _one_of("requeue", "queue", "skip", "coalesce", "replace", "join", "reject"),
            call=True,
        ),
        Option("wait_timeout", None, "seconds from 0, or inf for no bound", lambda value: _seconds(value, 0), call=True),
        Option(
            "coalesce_keep",
            "newest",
            "'newest', 'first', or a function of the waiting and the new arguments, each a dict by name",
            lambda value: value if value in ("newest", "first") or callable(value) else None,
        ),
        Option("coalesce_delay", 0.0, "seconds from 0 to 604800, a week", lambda value: _seconds(value, 0, 604800), call=True),
        Option("coalesce_within", None, "seconds from 0 to 604800, a week", lambda value: _seconds(value, 0, 604800)),
        Option("skip_as", "continue", "'continue', 'stop' or 'raise'", _one_of("continue", "stop", "raise")),
        Option("skip_result", None, "any value", lambda value: value),
        Option("idempotent_on", None, _RECIPE, lambda value: _recipe(value) or None),  # () would be one execution for all calls
        Option("execution_key", None, "a text that is not empty", _text, call=True),
        Option("answer_at_publish", False, "True or False", _flag, call=True),  # noqa: FBT003, the default
        Option("min_hold", 0.0, "seconds from 0 to 604800, a week", lambda value: _seconds(value, 0, 604800)),
        Option("rescue", True, "True or False", _flag),  # noqa: FBT003, the default
        Option("max_deliveries", 5, "a whole number from 1 to 1000", _count),
        Option(
            "store_error_policy",
            "requeue",
            "'requeue', 'fail' or 'run'",
            _one_of("requeue", "fail", "run"),
        ),
        Option("failure_policy", "forget", "'forget' or 'keep'", _one_of("forget", "keep")),
        Option("uncertain_policy", "rerun", "'rerun' or 'hold'", _one_of("rerun", "hold")),
        Option("reconciler", None, "a function of an UncertainExecution", lambda value: value if callable(value) else None),
        Option(
            "reconcile_delays",
            (0.0, 10.0, 60.0, 600.0, 3600.0),
            "a list of up to 100 delays in seconds, from 1 to 604800, a week; the first may be less",
            _delays,
        ),
        Option("payload_on", None, f"{_RECIPE}, or () to compare nothing", _recipe),
        Option("keep_message", "failed", "'failed', 'always' or 'never'", _one_of("failed", "always", "never")),
        Option("result_ttl", 86400.0, "seconds from 0 to 315360000, ten years", lambda value: _seconds(value, 0, 315360000)),
        Option("result_limit", 1048576, "bytes, a whole number from 0, or inf for no limit", _bytes),
        Option(
            "result_compression",
            None,
            "'gzip', 'bzip2', 'lzma', or another compression that kombu has here",
            _compression,
        ),
    )
}
CALL_OPTIONS: Final = {name: option for name, option in OPTIONS.items() if option.call}
#: All but what is given per call only: one execution key for every call of a task would make it run once for ever.
TASK_OPTIONS: Final = {name: option for name, option in OPTIONS.items() if name != "execution_key"}

#: Settings of the app that are not a task option.
SETTINGS: Final[dict[str, str]] = {
    "singleflight_url": "a URL such as redis://host:6379/0",
    "singleflight_transport_options": "a mapping of redis-py connection arguments",
    "singleflight_key_prefix": "a text without braces",
    "singleflight_log_context": "True or False",
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
    coalesce_keep: Any
    coalesce_delay: float
    coalesce_within: float | None
    skip_as: str
    skip_result: Any
    idempotent_on: Any
    answer_at_publish: bool
    result_ttl: float
    result_limit: float
    result_compression: str | None
    min_hold: float
    rescue: bool
    max_deliveries: int
    store_error_policy: str
    failure_policy: str
    uncertain_policy: str
    reconciler: Any
    reconcile_delays: tuple[float, ...]
    payload_on: Any
    keep_message: str


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


def _nearest_word(value: Any, option: Option) -> str:
    words = option.expected.replace("'", "").replace(" or ", ", ").split(", ")
    nearest = get_close_matches(value.lower(), words, n=1) if isinstance(value, str) and "'" in option.expected else None
    return f"; did you mean {nearest[0]!r}?" if nearest else ""
