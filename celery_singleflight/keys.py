"""Lock keys, and the names under which the store keeps what belongs to them.

Every name carries the schema version and a hash tag `{<prefix><bucket>}` made from the lock *name*, so that a lock key, the
run records and the triggers of one lock name share a slot: each script is one step on Redis Cluster too, and an execution key
is recognised across the lock keys of its name.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

from celery_singleflight.canonical import canonical, digest

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ("BUCKETS", "SCHEMA", "AsNamed", "KeySpace", "LockKey", "LockNames", "bounded")

#: Version of the layout of the store. Names of two versions never meet.
SCHEMA: Final = 1
BUCKETS: Final = 64
_LONGEST: Final = 200


class AsNamed(str):
    """A text as it is in the name of a key already."""

    __slots__ = ()


def bounded(text: str) -> str:
    """Return `text`, or when it has 200 characters or more, its beginning and a digest of the whole.

    That has 200 characters, so nobody can give a text that stays as it is and is what becomes of another.
    """
    if len(text) < _LONGEST or isinstance(text, AsNamed):
        return text
    return f"{text[: _LONGEST - 33]}#{blake2b(text.encode(), digest_size=16).hexdigest()}"


def _part(text: str) -> str:
    """Return a text that a colon can follow."""
    return bounded(text.replace("%", "%25").replace(":", "%3A") if ":" in text or "%" in text else text)


class LockKey(NamedTuple):
    """What must not overlap: a lock name and a business scope, as one text such as `billing["acct_123"]`."""

    name: str
    text: str

    @classmethod
    def of(cls, name: str, scope: object) -> LockKey:
        """Make the lock key of `scope` (a list of values, its order matters) under the lock name."""
        return cls(name, bounded(name + canonical(scope)))

    @classmethod
    def digested(cls, name: str, scope: object) -> LockKey:
        """Make a lock key whose text shows nothing of the scope, such as `billing(6f1a3c0d9e2b4857)`."""
        return cls(name, bounded(f"{name}({digest(scope)})"))

    def __str__(self) -> str:
        return self.text


class LockNames(NamedTuple):
    """Where the store keeps a lock key, and what is due of its lock name."""

    lease: str
    fence: str
    pace: str
    line: str
    called: str
    parked: str
    followers: str
    baton: str
    due: str


_OF_A_LOCK_KEY: Final = LockNames._fields[:-1]


class _Beginnings(NamedTuple):
    """How the names of the keys of one lock name begin."""

    root: str
    trigger: str
    execution: str
    announcement: str
    due: str
    #: Of what belongs to a lock key, in the order of its names.
    of_lock_key: tuple[str, ...]


class KeySpace:
    """Makes the names of the store's keys from the app's `singleflight_key_prefix`."""

    __slots__ = ("_of", "roots")

    def __init__(self, prefix: str) -> None:
        #: How all names begin, by bucket.
        self.roots = tuple(f"{{{prefix}{bucket}}}:{SCHEMA}:" for bucket in range(BUCKETS))

        def begin(lock_name: str) -> _Beginnings:
            root = self.roots[crc32(lock_name.encode()) % BUCKETS]
            part = _part(lock_name)
            return _Beginnings(
                root,
                f"{root}trigger:{part}:",
                f"{root}execution:{part}:",
                f"{root}announcement:{part}:",
                f"{root}due:{bounded(lock_name)}",
                tuple(f"{root}{kind}:" for kind in _OF_A_LOCK_KEY),
            )

        self._of = lru_cache(maxsize=1024)(begin)

    def lock(self, key: LockKey) -> LockNames:
        """Names of what belongs to a lock key."""
        begin, text = self._of(key.name), key.text
        return LockNames._make([*[beginning + text for beginning in begin.of_lock_key], begin.due])

    def due(self, lock_name: str) -> str:
        """Name of the index in which the sweeper finds the triggers of a lock name."""
        return self._of(lock_name).due

    def execution(self, lock_name: str, execution_key: str) -> str:
        """Name of the run record of an explicit execution key, scoped by the lock name."""
        return self._of(lock_name).execution + bounded(execution_key)

    def announcement(self, lock_name: str, execution_key: str) -> str:
        """Name of what publishers tell each other of an explicit execution key."""
        return self._of(lock_name).announcement + bounded(execution_key)

    def trigger(self, lock_name: str, task_id: str) -> str:
        """Name of the record of one trigger, which is its run record too when it has no explicit execution key."""
        return self._of(lock_name).trigger + bounded(task_id)

    @staticmethod
    def steps(record: str) -> str:
        """Name of what an execution has done so far, kept beside its run record of that name."""
        return record.replace(f"}}:{SCHEMA}:", f"}}:{SCHEMA}:steps:", 1)

    def turn(self, lock_names: Sequence[str]) -> str:
        """Name of the turn that the sweepers of these lock names take; it lies in the slot of the first of them."""
        return f"{self.root(lock_names[0])}sweep:{digest(list(lock_names))}"

    def root(self, lock_name: str) -> str:
        """Beginning of all names of a lock name, with its hash tag."""
        return self._of(lock_name).root
