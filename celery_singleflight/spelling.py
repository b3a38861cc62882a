"""Names that look like one of ours and are none: refused with what was expected and the nearest one."""

from __future__ import annotations

import functools
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final, NoReturn

from celery_singleflight.errors import OptionError
from celery_singleflight.options import CALL_OPTIONS, OPTIONS, PREFIX, SETTINGS, TASK_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ("check_call", "check_settings", "check_task", "nearest")

#: In the design, not in this version. Refused by name, so that nobody relies on what is not there.
_LATER: Final = frozenset(
    {
        "freshness",
        "full_policy",
        "max_pending",
        "rates",
    }
)
#: Names with these beginnings are ours.
_FAMILIES: Final = ("lease_", "lock_", "contention_", "idempotent_", "idempotency_", PREFIX)
#: What people write who come from elsewhere.
_GUESSES: Final = {
    "contention": "contention_policy",
    "lock_args": "lock_on",
    "lock_by": "lock_on",
    "lock_expiry": "lease_ttl",
    "lock_key": "lock_on",
    "lock_scope": "lock_on",
    "lock_timeout": "lease_ttl",
    "lock_ttl": "lease_ttl",
    "lock_wait": "wait_timeout",
    "on_contention": "contention_policy",
    "skip_if_running": "contention_policy",
    "unique_on": "lock_on",
}
_LIKENESS: Final = 0.85
_CALL_OPTIONS: Final = tuple(CALL_OPTIONS)


def check_task(task_name: str, attributes: Iterable[str]) -> None:
    """Refuse an attribute of a task that looks like an option. Raises `OptionError`."""
    for name in attributes:
        if name in OPTIONS and name not in TASK_OPTIONS:
            raise OptionError(
                f"task {task_name}: {name} is given per call, in apply_async; for a key made from the arguments use "
                "idempotent_on"
            )
        if name not in OPTIONS and _resembles(name, tuple(TASK_OPTIONS)):
            _refuse(f"task {task_name}", name, name.lower(), TASK_OPTIONS)


def check_settings(settings: Iterable[str], namespace: str | None) -> None:
    """Refuse a Celery setting that looks like one of ours. `namespace` is that of the settings, such as `CELERY_`.

    Raises `OptionError`.
    """
    known = {*SETTINGS, *(option.setting for option in TASK_OPTIONS.values())}
    spelled = {name: _in_namespace(name, namespace) for name in known}
    for name in settings:
        lower = (name.removeprefix(namespace) if namespace else name).lower()
        if not lower.startswith(PREFIX):
            continue
        bare = lower.removeprefix(PREFIX)
        if bare in OPTIONS and bare not in TASK_OPTIONS:
            raise OptionError(
                f"the Celery settings: {name}: {bare} is given per call, in apply_async; for a key made from the arguments use "
                f"{_in_namespace(PREFIX + 'idempotent_on', namespace)}"
            )
        if lower not in known:
            guess = _GUESSES.get(bare) or nearest(bare, [each.removeprefix(PREFIX) for each in known])
            meant = spelled[PREFIX + guess] if guess else None
            _refuse("the Celery settings", name, bare, spelled.values(), meant)
        if name not in {spelled[lower], lower}:
            raise OptionError(f"the Celery settings: {name} is not read; write {spelled[lower]}")


def check_call(task_name: str, names: Iterable[str]) -> None:
    """Refuse what is given to a call and looks like a call option. Raises `OptionError`."""
    for name in names:
        bare = name.removeprefix(PREFIX)
        known = bare if bare in TASK_OPTIONS else _GUESSES.get(bare)
        if known and known not in CALL_OPTIONS:
            meant = "" if known == name else f": {known}"
            raise OptionError(
                f"call of {task_name}: {name}{meant} is an option of the task, not of a call; per call there are "
                f"{', '.join(sorted(CALL_OPTIONS))}"
            )
        if _resembles(name, _CALL_OPTIONS):
            _refuse(f"call of {task_name}", name, name.lower(), CALL_OPTIONS)


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """Return the known name that is most like this one, if one is."""
    return next(iter(get_close_matches(name, known, n=1, cutoff=likeness)), None)


@functools.cache
def _resembles(name: str, known: tuple[str, ...]) -> bool:
    lower = name.lower()
    is_ours = lower in _LATER or lower in _GUESSES or lower in known or lower.startswith(_FAMILIES)
    return is_ours or nearest(lower, known, _LIKENESS) is not None


def _in_namespace(name: str, namespace: str | None) -> str:
    if not namespace:
        return name
    return namespace + (name.upper() if namespace.isupper() else name)


def _refuse(where: str, name: str, bare: str, known: Iterable[str], meant: str | None = None) -> NoReturn:
    names = sorted(known)
    if bare in _LATER:
        raise OptionError(f"{where}: {name} is planned and not in this version; expected one of {', '.join(names)}")
    guess = _GUESSES.get(bare)
    meant = meant or (guess if guess in names else None) or nearest(bare, names, 0.5)
    question = f", did you mean {meant}?" if meant else "."
    raise OptionError(f"{where}: there is no {name}{question} Expected one of {', '.join(names)}")
