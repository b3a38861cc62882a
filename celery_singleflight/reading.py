"""How the store is read for an operator: names taken apart, records without what people put into them.

This is the only place that asks a server which keys there are, by SCAN. Raises what a redis-py client raises.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from celery_singleflight.binding import lock_names
from celery_singleflight.claims import Record
from celery_singleflight.coordination import coordination
from celery_singleflight.errors import SingleflightError
from celery_singleflight.keys import AsNamed, LockKey, bounded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from celery import Celery

__all__ = ("EXAMINED", "Name", "Reading", "UnknownKey", "as_text", "glob")

#: Records that one command looks at, at most.
EXAMINED: Final = 10_000
#: Keys that are asked for at a time.
_BATCH: Final = 500
_FIELDS: Final = (
    *("owner", "until_ms", "attempt", "task_id", "lock_key", "handouts", "died", "released"),
    *("outcome", "reason", "ended_ms", "settled", "parked", "forced"),
    *("unsure", "worker", "task", "run", "generation", "run_generation", "origin", "payload", "awaiting", "awaits_at"),
)
_NAME: Final = re.compile(r"(\{.*?\}:\d+:)([a-z]+):(.*)", re.DOTALL)
#: With what the scope of a lock key begins, or the digest that stands for it.
_SCOPE: Final = re.compile(r"[\[(]")


class UnknownKey(SingleflightError, LookupError):
    """The store knows nothing of this key; says what was expected, and what is near."""


class Name(NamedTuple):
    """The name of a key in the store, taken apart."""

    root: str
    kind: str
    rest: str

    @property
    def whole(self) -> str:
        """The name as it is."""
        return f"{self.root}{self.kind}:{self.rest}"


class Reading:
    """The store of an app, by a redis-py client."""

    def __init__(self, app: Celery, client: Any) -> None:
        self.app = app
        self.client = client
        self.keys = coordination(app).store.keys
        self._roots = set(self.keys.roots)

    def find_lock(self, text: str) -> LockKey | None:
        """Return the lock key of that text, if it is or was held within a day."""
        known = [name for name in lock_names(self.app) if text.startswith(name)]
        begins = [text[: match.start()] for match in _SCOPE.finditer(text)]
        candidates = [LockKey(name, text) for name in dict.fromkeys([*known, *begins])]
        names = [self.keys.lock(lock_key) for lock_key in candidates]
        exist = self.many([("exists", name) for n in names for name in (n.lease, n.fence, n.pace, n.parked)])
        return next((key for n, key in enumerate(candidates) if any(exist[4 * n : 4 * n + 4])), None)

    def named(self, kind: str, key: str) -> list[Name]:
        """Return the names of records of that trigger or execution: where the app's lock names say, else wherever they are."""
        make = getattr(self.keys, kind)
        wholes = [make(name, each) for name in sorted(lock_names(self.app)) for each in (key, AsNamed(key))]
        names = [_taken_apart(whole) for whole in dict.fromkeys(wholes)]
        found = [name for name, n in zip(names, self.many([("exists", name.whole) for name in names]), strict=True) if n]
        return found or list(islice(self.scan(f"{{*}}:*:{kind}:*:{glob(bounded(key))}"), 1))

    def key_in(self, name: Name, key: str) -> str:
        """Return that key as `name` has it: an operator may have given a long one as a command shows it."""
        return key if getattr(self.keys, name.kind)(self.lock_name_in(name) or "", key) == name.whole else AsNamed(key)

    def record_of(self, lock_key: LockKey, task_id: str) -> Record:
        """Return where a trigger is recorded, with its execution key if it has an explicit one."""
        plain = Record(lock_key, task_id, None)
        name = self.keys.trigger(lock_key.name, task_id)
        own = self.records([name]).get(name)
        if own is not None and own["attempt"]:
            return plain
        match = f"{glob(task_id)}\n*"
        for member, _ in self.client.zscan_iter(self.keys.due(lock_key.name), match=match, count=_BATCH):
            return plain._replace(execution_key=as_text(member).partition("\n")[2])
        prefix = self.keys.execution(lock_key.name, "")
        names = [name.whole for name in islice(self.scan(f"{glob(prefix)}*"), EXAMINED)]
        for whole, record in self.records(names).items():
            if record["task_id"] == task_id:
                return plain._replace(execution_key=AsNamed(whole.removeprefix(prefix)))
        return plain

    def lock_name_in(self, name: Name) -> str | None:
        """Return the lock name that the name of a key tells, None when it does not."""
        if name.kind == "due":
            return name.rest
        if name.kind in ("trigger", "execution"):
            part = name.rest.partition(":")[0]
            return part.replace("%3A", ":").replace("%25", "%")
        known = lock_names(self.app)
        begins = [name.rest[: match.start()] for match in _SCOPE.finditer(name.rest)]
        for lock_name in sorted(begins, key=lambda begin: begin not in known):
            if self.keys.due(lock_name).startswith(name.root):
                return lock_name
        return None

    def unknown(self, key: str, expected: str, kind: str = "") -> UnknownKey:
        """Return the error for a key that is not there."""
        if kind:
            known = [name.rest.partition(":")[2] for name in islice(self.scan(f"{{*}}:*:{kind}:*"), EXAMINED)]
        else:
            known = [name.rest for name in islice(self.scan("{*}:*:[lfp]*"), EXAMINED) if name.kind in ("lease", "fence")]
        nearest = get_close_matches(key, set(known), n=1, cutoff=0.5)
        near = f"; nearest: {nearest[0]}" if nearest else ""
        return UnknownKey(f"expected {expected}, got {key}, of which the store knows nothing{near}")

    # How the server is asked.

    def now(self) -> int:
        """Return the store time in ms."""
        seconds, micros = self.client.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def scan(self, pattern: str) -> Iterator[Name]:
        """Yield the names of the store's keys that match; what else lies in its database is left out."""
        for key in self.client.scan_iter(match=pattern, count=_BATCH):
            name = _taken_apart(as_text(key))
            if name.root in self._roots:
                yield name

    def many(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send commands together and return their replies."""
        if not commands:
            return []
        pipeline = self.client.pipeline(transaction=False)
        for method, *arguments in commands:
            getattr(pipeline, method)(*arguments)
        replies: list[Any] = pipeline.execute()
        return replies

    def records(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return what is shown of records, those that are there: some fields, and sizes in place of message and result."""
        found = {}
        rest = iter(dict.fromkeys(names))
        while some := list(islice(rest, _BATCH)):
            replies = iter(
                self.many(
                    [
                        command
                        for name in some
                        for command in (
                            ("hmget", name, _FIELDS),
                            ("hstrlen", name, "message"),
                            ("hstrlen", name, "body"),
                            ("pttl", name),
                        )
                    ]
                )
            )
            for name in some:
                values, message, body, left = next(replies), next(replies), next(replies), next(replies)
                if left != -2:
                    record: dict[str, Any] = dict(zip(_FIELDS, map(as_text, values), strict=True))
                    found[name] = {**record, "message_bytes": message, "body_bytes": body, "left_ms": left}
        return found


def _taken_apart(whole: str) -> Name:
    match = _NAME.fullmatch(whole)
    return Name(*match.groups()) if match else Name("", "", whole)


def glob(text: str) -> str:
    """Return the pattern that matches this text only."""
    return re.sub(r"([*?\[\]\\])", r"\\\1", text)


def as_text(raw: Any) -> Any:
    """Return what the server says as text; None stays None."""
    return raw.decode(errors="replace") if isinstance(raw, bytes) else raw
