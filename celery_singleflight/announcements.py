"""What the store knows of triggers that have not reached a worker: publishers announce them to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from celery_singleflight.custody import Custody, milliseconds
from celery_singleflight.errors import ExecutionKeyReused, PayloadMismatch
from celery_singleflight.script import Script, load

if TYPE_CHECKING:
    from celery_singleflight.script import Value

__all__ = ("Announcement", "Announcements", "Answered", "Busy")

_ANNOUNCE: Final = load("announce")
_CONFIRM: Final = load("confirm")
_WITHDRAW: Final = load("withdraw")

#: Announced triggers that are looked at, one after the other, before the publisher sends its own.
_LOOKS: Final = 3


class Announcement(NamedTuple):
    """The trigger that a publisher would send, and for which execution. The digest of its payload may be empty."""

    lock_name: str
    execution_key: str
    task_id: str
    task: str
    payload: str


class Answered(NamedTuple):
    """That trigger has, or will have, the result: it is "completed", "running" or "announced"."""

    task_id: str
    how: str


class Busy(NamedTuple):
    """Another publisher is about to send one; in so many seconds it has, or nobody waits for it any more."""

    seconds: float


class Announcements(Custody):
    """The announcements of publishers on one server. Whatever they say, the worker decides by the run record."""

    __slots__ = ()

    def announce(self, announcement: Announcement, *, reserve: float) -> Answered | Busy | bool:
        """Return who works for the execution already; else whether others wait for this publisher now, for `reserve` seconds.

        With `reserve` 0 nobody is made to wait. Raises `ExecutionKeyReused`, `PayloadMismatch`, `StoreUnavailable`.
        """
        seen = ""
        for _ in range(_LOOKS):
            reply = self._ask_for(
                _ANNOUNCE,
                announcement,
                seen=seen,
                task=announcement.task,
                payload=announcement.payload,
                reserve_ms=milliseconds(reserve),
            )
            if reply.word == "announced":
                seen = reply.task_id.decode()
                continue
            if reply.word == "answered":
                return Answered(reply.task_id.decode(), reply.how.decode())
            if reply.word == "busy":
                return Busy(max(reply.left_ms, 0) / 1000)
            if reply.word in _REFUSALS:
                raise _REFUSALS[reply.word](announcement.execution_key, reply.by_task.decode())
            return bool(reply.word == "reserved")
        return False

    def confirm(self, announcement: Announcement, keep: float) -> bool:
        """Note that the broker has the message. Returns whether it answers others now, for `keep` seconds.

        Raises `StoreUnavailable`.
        """
        reply = self._ask_for(
            _CONFIRM,
            announcement,
            task=announcement.task,
            payload=announcement.payload,
            keep_ms=milliseconds(keep),
        )
        return bool(reply.word == "confirmed")

    def withdraw(self, announcement: Announcement) -> None:
        """Take an announcement back, if it is still this one. Raises `StoreUnavailable`."""
        self._ask_for(_WITHDRAW, announcement)

    def _ask_for(self, script: Script, announcement: Announcement, **values: Value) -> Any:
        lock_name, execution_key, task_id, *_ = announcement
        places = {
            "execution": self.keys.execution(lock_name, execution_key),
            "announcement": self.keys.announcement(lock_name, execution_key),
            "trigger": self.keys.trigger(lock_name, str(values.get("seen") or task_id)),
        }
        return self._run(script, places, {"task_id": task_id, **values})


_REFUSALS: Final = {"reused": ExecutionKeyReused, "mismatched": PayloadMismatch}
