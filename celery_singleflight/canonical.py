"""The canonical form of a value: one text for everything a serializer may make of it.

The text is JSON, whose syntax keeps `1`, `"1"`, `true`, `1.0` and `null` apart. A tuple is its list; dict keys are strings,
as JSON makes them; UUID, date, Decimal, enum, dataclass and pydantic model are their standard JSON form. The publisher and
the worker therefore agree under json, yaml, msgpack and pickle.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from hashlib import blake2b
from numbers import Integral, Real
from pathlib import PurePath
from typing import TYPE_CHECKING, Final
from uuid import UUID

from celery_singleflight.errors import LockKeyError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("canonical", "digest", "plain")

_PLAIN_TYPES: Final = frozenset({str, int, float, bool, type(None)})
#: Of plain data, which is made anew and so never holds itself.
_encode: Final = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode

#: `<User: bob>` and `<object at 0x7f…>` name no value reliably.
_NO_VALUE: Final = re.compile(r"^<.*>$|\bat 0x[0-9a-fA-F]+", re.DOTALL)


def canonical(value: object) -> str:
    """Return the canonical JSON text of `value`.

    Raises `LockKeyError` for an object that has no JSON form and no telling repr.
    """
    return _encode(plain(value))


def digest(value: object) -> str:
    """Return 16 hexadecimal digits that stand for the canonical form of `value`."""
    return blake2b(canonical(value).encode(), digest_size=8).hexdigest()


def plain(value: object) -> object:
    """Return `value` as JSON data: None, bool, int, float, str, list, or dict with sorted string keys."""
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return value
    if kind is list or kind is tuple:
        return [v if type(v) in _PLAIN_TYPES else plain(v) for v in value]  # type: ignore[attr-defined]
    if isinstance(value, (dict, Mapping)):  # a dict is known at once
        return _plain_mapping(value)
    for types, convert in _CONVERSIONS:
        if isinstance(value, types):
            return convert(value)
    return _plain_object(value)


def _plain_mapping(value: Mapping[object, object]) -> dict[str, object]:
    keyed = {_plain_key(key): v if type(v) in _PLAIN_TYPES else plain(v) for key, v in value.items()}
    if len(keyed) < len(value):
        kinds = sorted({type(key).__name__ for key in value})
        raise LockKeyError(f"two keys of a mapping have one JSON form; its keys are of type {', '.join(kinds)}")
    return {name: keyed[name] for name in sorted(keyed)}


def _plain_key(key: object) -> str:
    form = key if type(key) is str else plain(key)
    text = form if type(form) is str else _encode(form)
    return "$" + text if text.startswith("$") else text  # one dollar marks what is no JSON


def _plain_object(value: object) -> object:
    for method in ("__json__", "model_dump"):
        reduce = getattr(value, method, None)
        if callable(reduce):
            return plain(reduce(mode="json") if method == "model_dump" else reduce())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain_mapping({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if type(value).__module__ == "django.utils.functional":  # a lazy translation
        return str(value)
    text = repr(value)
    if _NO_VALUE.search(text):
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise LockKeyError(
            f"an argument of type {name} cannot be part of a key: its repr does not name a value. Give lock_on the names "
            "of the arguments that matter, a template such as 'billing:{account.id}', or a function"
        )
    return {"$" + type(value).__qualname__: text}


_CONVERSIONS: Final[tuple[tuple[type | tuple[type, ...], Callable[..., object]], ...]] = (
    (Enum, lambda value: plain(value.value)),
    (bool, bool),
    (str, str),
    (Integral, int),
    (float, float),
    ((datetime, date, time), lambda value: value.isoformat()),
    ((UUID, Decimal, PurePath), str),
    ((bytes, bytearray, memoryview), lambda value: {"$bytes": base64.b64encode(value).decode()}),
    (timedelta, lambda value: {"$seconds": value.total_seconds()}),
    ((set, frozenset), lambda value: {"$set": sorted((plain(item) for item in value), key=_encode)}),
    ((list, tuple), lambda value: [plain(item) for item in value]),
    (Real, float),
)
