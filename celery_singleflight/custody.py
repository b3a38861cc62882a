"""What the store keeps of triggers beside their runs: outcomes given for them, what is still to be sent, their messages.

Seconds become milliseconds here and in the store of runs, and nowhere else.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from celery_singleflight.claims import Finished, Handout, Outcome, Record
from celery_singleflight.keys import LockKey
from celery_singleflight.script import Script, Value, load

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from celery_singleflight.claims import Encoded
    from celery_singleflight.connection import Connections
    from celery_singleflight.keys import KeySpace

__all__ = ("GRACE", "Custody", "Settled", "as_text", "calls_of", "milliseconds")

_CONCLUDE: Final = load("conclude")
_SETTLE: Final = load("settle")
_SWEEP: Final = load("sweep")
_RESCUE: Final = load("rescue")
_ATTEND: Final = load("attend")
_RECALL: Final = load("recall")
_FIND: Final = load("find")
_REPLAY: Final = load("replay")

#: Seconds for which a trigger that has ended is left to the delivery that ended it, before another one answers for it.
GRACE: Final = 5.0
#: Seconds after which a sweeper publishes what is replayed, if whoever replays it has not.
_AGAIN: Final = 5.0
#: Seconds after which a message that was handed out and has not entered is handed out again, at first.
_HANDOUT_PAUSE: Final = 10.0


class Settled(NamedTuple):
    """How far Celery has come with what follows the outcome that the owner has recorded.

    `keeps` is whether the message stays with the record when all is done: "failed", "always" or "never", as the option says.
    """

    record: Record
    owner: str
    is_done: bool
    keeps: str = "never"


class Custody:
    """The records of triggers on one server, under one key prefix."""

    __slots__ = ("_connections", "keys", "names")

    def __init__(self, connections: Connections, keys: KeySpace) -> None:
        self._connections = connections
        self.keys = keys
        #: Where a record and its lock key are kept, by the names of the scripts. Asked for at both ends of a run.
        self.names = functools.lru_cache(maxsize=256)(self._make_names)

    def conclude(  # noqa: PLR0913, an outcome has many sides
        self,
        owner: str,
        record: Record,
        outcome: Outcome,
        *,
        reason: str,
        keep: float,
        release: bool,
        error: Encoded | None = None,
        patience: float = GRACE,
        execution_as: str = "",
        keeps: bool = False,
    ) -> Finished | str:
        """Give a trigger an outcome that is none of its lease's.

        Returns `Finished` when that is its outcome now; else the outcome that it has, "unknown" when the store knows nothing
        of it, or "" when another delivery runs it.

        With an `error` Celery is still to send what follows, and others may do so after `patience` seconds; else it has, and
        the message stays with the record if the store `keeps` it. `execution_as` is what an explicit execution key has of it:
        "keep", the failure; "unsure", that nobody knows what its run has done, and "hold", that it is held until somebody does;
        else nothing.
        """
        content_type, content_encoding, body = error or ("", "", b"")
        reply = self._run(
            _CONCLUDE,
            self.names(record),
            {
                "owner": owner,
                "lock_key": record.lock_key.text,
                "member": record.member,
                "task_id": record.task_id,
                "outcome": outcome.value,
                "reason": reason,
                "keep_ms": milliseconds(keep),
                "release": int(release),
                "patience_ms": "" if error is None else milliseconds(patience),
                "keeps": int(keeps),
                "content_type": content_type,
                "content_encoding": content_encoding,
                "body": body,
                "execution_as": execution_as,
            },
        )
        return Finished(calls_of(reply)) if reply.word == "concluded" else str(reply.outcome.decode())

    def settle(self, ended: Iterable[Settled | tuple[Record, str, bool]]) -> None:
        """Note of each how far Celery has come with what follows its outcome."""
        slots: dict[str, tuple[list[Value], list[Value]]] = {}
        for record, owner, is_done, keeps in (Settled(*told) for told in ended):
            names = self.names(record)
            slot = "" if self._connections.spans_slots else names["trigger"].partition("}")[0]
            places, facts = slots.setdefault(slot, ([], []))
            places += (names["trigger"], names["due"])
            facts += (owner, record.member, "" if is_done else milliseconds(GRACE), keeps)
        for places, facts in slots.values():
            self._connections.run(_SETTLE, len(places), places + facts)

    def due(self, lock_names: Sequence[str], *, limit: int, interval: float) -> list[Record]:
        """Return up to `limit` triggers of each lock name that need to be looked at by `rescue`.

        Of the callers of one interval, in seconds, only the first gets any. A record without a task id stands for those who
        wait for the lock key that is its execution key; they are for `attend`.
        """
        found = []
        for names in self._by_slot(lock_names):
            places: list[Value] = [self.keys.turn(names), *map(self.keys.due, names)]
            reply = _SWEEP.reply(self._connections.run(_SWEEP, len(places), [*places, milliseconds(interval), limit]))
            if reply.word == "due":
                for name, members in zip(names, json.loads(reply.members), strict=True):
                    found += [Record.of_member(LockKey(name, ""), member) for member in members]
        return found

    def attend(self, lock_key: LockKey) -> list[Handout]:
        """Return the messages of those who wait for a lock key and are next, to be published now."""
        return calls_of(self._run(_ATTEND, self.keys.lock(lock_key)._asdict(), {"lock_key": lock_key.text}))

    def rescue(self, record: Record) -> Handout | None:
        """Return the message of a trigger whose run has died or whose outcome nobody has passed on, to be published again.

        Returns None when there is nothing to do, now or at all. Whatever becomes of the caller, the trigger comes up again.
        """
        reply = self._run(
            _RESCUE,
            self.names(record),
            {
                "member": record.member,
                "task_id": record.task_id,
                "patience_ms": milliseconds(GRACE),
                "pause_ms": milliseconds(_HANDOUT_PAUSE),
            },
        )
        if reply.word == "parked":
            return self._recall(record._replace(lock_key=LockKey(record.lock_key.name, reply.lock_key.decode())))
        if reply.word != "message":
            return None
        return Handout(reply.message, reply.copy.decode(), reply.outcome.decode(), int(reply.times), reply.first_ms.decode())

    def parked(self, task_id: str, lock_names: Sequence[str]) -> list[Record]:
        """Return where a trigger of that id waits in the store's custody, if it does."""
        found = []
        for names in self._by_slot(lock_names):
            places: list[Value] = [self.keys.trigger(name, task_id) for name in names]
            reply = _FIND.reply(self._connections.run(_FIND, len(places), places))
            for name, lock_key, member in zip(names, reply.parked[::2], reply.parked[1::2], strict=True):
                if lock_key:
                    found.append(Record.of_member(LockKey(name, lock_key.decode()), member.decode()))
        return found

    def replay(
        self,
        record: Record,
        mark: str,
        *,
        force: bool,
        reason: str,
        holds: bool,
        seen: str = "",
        message: bytes = b"",
        generation: int = 0,
    ) -> Any:
        """Clear the outcome of a trigger and put this message in place of its own; see the script for what is answered.

        Without what is `seen` of the outcome nothing is changed, and it is told. `holds` is whether an execution is held of
        which nobody knows what it has done.
        """
        return self._run(
            _REPLAY,
            self.names(record),
            {
                "replay": mark,
                "member": record.member,
                "force": int(force),
                "reason": reason,
                "unsure_as": "hold" if holds else "rerun",
                "seen": seen,
                "message": as_text(message),
                "generation": generation,
                "again_ms": milliseconds(_AGAIN),
            },
        )

    def _recall(self, record: Record) -> Handout | None:
        reply = self._run(
            _RECALL,
            self.names(record),
            {"lock_key": record.lock_key.text, "member": record.member, "pause_ms": milliseconds(_HANDOUT_PAUSE)},
        )
        if reply.word != "message":
            return None
        return Handout(reply.message, reply.copy.decode(), first_ms=reply.first_ms.decode())

    def close(self) -> None:
        """Close the connections; the next call opens them again."""
        self._connections.close()

    def _make_names(self, record: Record) -> dict[str, str]:
        lock_name = record.lock_key.name
        trigger = self.keys.trigger(lock_name, record.task_id)
        execution = trigger if record.execution_key is None else self.keys.execution(lock_name, record.execution_key)
        return {
            **self.keys.lock(record.lock_key)._asdict(),
            "steps": self.keys.steps(execution),
            "execution": execution,
            "trigger": trigger if record.has_trigger else execution,
        }

    def _by_slot(self, lock_names: Sequence[str]) -> Iterable[list[str]]:
        """Return the lock names, those together whose keys one script may have."""
        slots: dict[str, list[str]] = {}
        for name in sorted(lock_names):
            slots.setdefault("" if self._connections.spans_slots else self.keys.root(name), []).append(name)
        return slots.values()

    def _run(self, script: Script, places: Mapping[str, Value], named: Mapping[str, Value]) -> Any:
        return script.reply(self._connections.run(script, len(script.keys), script.arguments(places, named)))


def calls_of(reply: Any) -> list[Handout]:
    """Return the messages that a reply tells to publish."""
    return [
        Handout(message, copy.decode(), first_ms=first_ms.decode(), linger=linger_ms / 1000)
        for _, copy, first_ms, message, linger_ms in reply.calls or ()
    ]


def as_text(value: bytes) -> str | bytes:
    """Return ASCII bytes as a text: a call of texts alone is packed faster."""
    return value.decode() if value.isascii() else value


def milliseconds(seconds: float) -> int:
    """Return seconds as the scripts count them."""
    return round(seconds * 1000)
