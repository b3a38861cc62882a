"""The Lua loader: what a script's header declares is what runs.

A header names the script's KEYS, ARGV and replies. From it come the Lua locals of the body, the names by which Python must call
the script, and the types of its replies, so a header that no longer matches its body breaks the first test.

A line `-- Uses time, holders.` stands for those files of `scripts/shared`. Their functions are made anew by each call that gets
so far, so a body has such a line only where it needs them.
"""

from __future__ import annotations

import re
from collections import namedtuple
from hashlib import sha1
from importlib.resources import files
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from celery_singleflight.errors import ScriptError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ("Script", "Value", "load")

Value = str | int | bytes

_INPUT: Final = re.compile(r"^-- (KEYS|ARGV)\[(\d+|\*)\] (\w+)")
_USES: Final = re.compile(r"^ *-- Uses ([a-z]+(?:, [a-z]+)*)\.$", re.MULTILINE)
_REPLY: Final = re.compile(r'^-- (?:Returns|     or) \{"(\w+)"((?:, \w+)*)\}')


class Script:
    """One atomic step on the store, made from the text of a Lua file."""

    __slots__ = ("_fields", "_keys_of", "_replies", "_text", "_values_of", "keys", "many", "name", "sha", "source", "values")

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        header = [line for line in text.splitlines() if line.startswith("--")]
        inputs = [match for line in header if (match := _INPUT.match(line))]
        self.many = any(match[2] == "*" for match in inputs)
        self.keys = _named(name, inputs, "KEYS")
        self.values = _named(name, inputs, "ARGV")
        self._keys_of = _getter(self.keys)
        self._values_of = _getter(self.values)
        self._fields = {match[1]: match[2].split(", ")[1:] for line in header if (match := _REPLY.match(line))}
        #: The types of the replies that have come. A process uses few of all scripts, and is not to make the others whole.
        self._replies: dict[str, Any] = {}
        self._text = text

    def arguments(self, places: Mapping[str, Value], named: Mapping[str, Value]) -> list[Value]:
        """Put keys and values in the order of the header. The places may be more than the script has keys.

        Raises `TypeError` when a key or a value is missing, or a value is not declared.
        """
        try:
            if len(named) == len(self.values):
                return [*self._keys_of(places), *self._values_of(named)]
        except KeyError:
            pass
        names = set(self.values)
        missing = sorted({*self.keys} - places.keys() | names - named.keys())
        extra = sorted(named.keys() - names)
        raise TypeError(f"script {self.name}: missing {missing}, not declared {extra}")

    def reply(self, raw: Sequence[Any] | bytes) -> Any:
        """Return the reply as the named tuple its header declares; the first field, `word`, tells which.

        A script answers with a list, or with lines of text where no part can hold a line break: they cost both sides less.

        Raises `ScriptError` when the header declares no such reply.
        """
        try:
            parts: Sequence[Any] = raw.split(b"\n") if isinstance(raw, bytes) else raw
            word = parts[0].decode()
            make = self._replies.get(word) or self._make_reply(word)
            return make(word, *parts[1:])
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ScriptError(f"script {self.name} answered {_shown(raw)}, expected one of {sorted(self._fields)}") from error

    def __getattr__(self, name: str) -> Any:
        """Make `source`, what runs, and `sha`, the name by which a server knows it, when the script is first used."""
        if name not in ("source", "sha"):
            raise AttributeError(f"a script has no {name}", name=name)  # also of one that is being copied, and has no name yet
        self.source = _locals(self.keys, self.values, many=self.many) + _USES.sub(_shared, self._text)
        self.sha = sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        return getattr(self, name)

    def _make_reply(self, word: str) -> Any:
        fields = ["word", *self._fields[word]]
        return self._replies.setdefault(word, namedtuple(word.title(), fields))  # noqa: PYI024

    @property
    def replies(self) -> tuple[str, ...]:
        """The words with which a reply may begin."""
        return tuple(self._fields)


def load(name: str) -> Script:
    """Load `scripts/<name>.lua` of this package."""
    return Script(name, _read(name))


def _read(name: str) -> str:
    return (files(__package__) / "scripts" / f"{name}.lua").read_text(encoding="utf-8")


def _getter(names: tuple[str, ...]) -> Callable[[Mapping[str, Value]], tuple[Value, ...]]:
    if len(names) > 1:
        return itemgetter(*names)
    return lambda named: tuple(named[name] for name in names)


def _shared(uses: re.Match[str]) -> str:
    return "".join(_read(f"shared/{used}") for used in uses[1].split(", "))


def _named(script: str, inputs: Sequence[re.Match[str]], kind: str) -> tuple[str, ...]:
    found = [(match[2], match[3]) for match in inputs if match[1] == kind]
    numbers = [number for number, _ in found]
    if numbers not in (["*"], [str(n + 1) for n in range(len(found))]):
        raise ScriptError(f"script {script}: {kind} are numbered {numbers}, expected 1 to {len(found)}, or one [*]")
    return tuple(name for _, name in found)


def _shown(raw: Any) -> str:
    """Return the word of a reply and how much follows: that may be somebody's result."""
    parts = raw.split(b"\n") if isinstance(raw, bytes) else raw
    if not isinstance(parts, list) or not parts:
        return repr(parts)
    word = parts[0][:40] if isinstance(parts[0], bytes) else type(parts[0]).__name__
    return f"{word!r} and {len(parts) - 1} more"


def _locals(keys: tuple[str, ...], values: tuple[str, ...], *, many: bool) -> str:
    if many:
        return "".join(f"local {name} = {table}\n" for names, table in ((keys, "KEYS"), (values, "ARGV")) for name in names)
    lines = [
        f"local {name} = {table}[{n}]" for names, table in ((keys, "KEYS"), (values, "ARGV")) for n, name in enumerate(names, 1)
    ]
    return " ".join(lines) + "\n"
