"""What an operator asks the store: who holds what, why does a trigger not run; and releasing a holder.

This is the only place that asks a server which keys there are, by SCAN.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from heapq import nlargest
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from celery_singleflight.asking import signs_of
from celery_singleflight.claims import DIRECT, Record
from celery_singleflight.connection import ClientConnections
from celery_singleflight.coordination import coordination
from celery_singleflight.doubting import Doubting
from celery_singleflight.doubts import Origin, why_uncertain
from celery_singleflight.findings import (
    Counts,
    Ending,
    Explanation,
    Holder,
    Lock,
    Locks,
    Release,
    Trigger,
    Turns,
    forced_replays,
    why_of,
    why_of_lock,
)
from celery_singleflight.keys import AsNamed, LockKey, bounded
from celery_singleflight.reading import EXAMINED, UnknownKey, as_text, glob
from celery_singleflight.script import Value, load
from celery_singleflight.servers import client_beside

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery import Celery

__all__ = ("Inspection", "inspecting")

_RELEASE: Final = load("release")


@contextmanager
def inspecting(app: Celery) -> Iterator[Inspection]:
    """Yield an inspection of the app's store.

    Raises `ConfigurationError` when there is none, `StoreUnavailable` when it does not answer, here or in the block.
    """
    connections = coordination(app).store._connections  # noqa: SLF001, of the package
    with client_beside(connections) as client:
        yield Inspection(app, client)


class Inspection(Doubting):
    """A look at the store of an app."""

    def locks(self, lock_name: str | None = None, *, limit: int) -> Locks:
        """Return up to `limit` lock keys that are held or waited for, of all lock names or of one, and what waits by name."""
        root = "{*}:*:" if lock_name is None else glob(self.keys.due(lock_name).removesuffix(f"due:{bounded(lock_name)}"))
        texts: dict[str, str | None] = {}
        triggers: dict[str, list[str]] = {}
        for name in self.scan(f"{root}[ldpt]*"):
            found = self.lock_name_in(name)
            if lock_name is not None and found != lock_name:
                continue
            if name.kind in ("lease", "pace", "parked"):
                texts[name.rest] = found
            elif name.kind in ("trigger", "due") and found is not None:
                kept = triggers.setdefault(found, [])
                if name.kind == "trigger" and len(kept) <= EXAMINED:
                    kept.append(name.whole)
        shown = sorted(texts)[:limit]
        for text in shown:
            if (found := texts[text]) is not None:
                triggers.setdefault(found, [])
        now = self.now()
        counts = [
            self._counts(found, self.records(names[:EXAMINED]), len(names) <= EXAMINED, now)
            for found, names in sorted(triggers.items())
        ]
        locks = [self._lock(LockKey(texts[text] or "", text), now) for text in shown]
        is_told = lock_name is not None
        return Locks(locks, [c for c in counts if is_told or c.with_broker or c.in_custody], len(texts) - len(shown))

    def explain(self, key: str, *, is_execution_key: bool = False, limit: int) -> Explanation:
        """Say why a lock key, trigger or execution key does not run. Raises `UnknownKey`."""
        if is_execution_key:
            return self._explain_execution(key)
        lock_key = self.find_lock(key)
        if lock_key is not None:
            return self._explain_lock(lock_key, limit)
        return self._explain_trigger(key)

    def release(self, text: str, token: int, *, force: bool) -> Release:
        """Release the holder of a lock key that has this fencing token, if its lease has expired or it is forced.

        The message of its trigger, if the store has it, is published again at once. Raises `UnknownKey` and
        `StoreUnavailable`.
        """
        lock_key = self.find_lock(text)
        if lock_key is None:
            raise self.unknown(text, "a lock key that is held")
        lock = self._lock(lock_key, self.now())
        holder = next((holder for holder in lock.holders if holder.fencing_token == token), None)
        if holder is None:
            return Release(False, "other", text, token, False, lock.holders)  # noqa: FBT003, as the document has it
        record = self.record_of(lock_key, holder.task_id)
        connections = ClientConnections(lambda: self.client, spans_slots=False)
        named: dict[str, Value] = {"token": token, "task_id": holder.task_id, "member": record.member, "force": int(force)}
        named["lock_key"] = lock_key.text
        arguments = _RELEASE.arguments(coordination(self.app).store.names(record), named)
        reply = _RELEASE.reply(connections.run(_RELEASE, len(_RELEASE.keys), arguments))
        is_released = reply.word == "released"
        again = is_released and bool(reply.message)
        return Release(is_released, reply.word, text, token, again, self._lock(lock_key, self.now()).holders)

    # What an explanation is made of.

    def _explain_lock(self, lock_key: LockKey, limit: int) -> Explanation:
        now = self.now()
        lock = self._lock(lock_key, now)
        signs = signs_of(self.app, lock)
        here = (lock_key.text, None)
        wait = self.client.zrange(self.keys.lock(lock_key).line, 0, limit - 1)
        due = [member for member in self.client.zrange(self.keys.due(lock_key.name), 0, limit - 1) if member not in wait]
        kept = [
            self._trigger(Record.of_member(LockKey(lock_key.name, ""), as_text(member)), now)
            for member in (*due, *wait)
            if not as_text(member).startswith("\n")
        ]
        names = [name.whole for name in islice(self.scan(glob(self.keys.trigger(lock_key.name, "")) + "*"), EXAMINED + 1)]
        records = self.records(names[:EXAMINED])
        ended = [(int(r["ended_ms"] or 0), name) for name, r in records.items() if r["outcome"] and r["lock_key"] in here]
        last = [
            self._trigger(Record(lock_key, AsNamed(name.removeprefix(self.keys.trigger(lock_key.name, ""))), None), now)
            for _, name in nlargest(min(limit, 5), ended)
        ]
        return Explanation(
            "lock key",
            lock_key.text,
            why_of_lock(lock, signs),
            lock,
            signs,
            [trigger for trigger in kept if trigger is not None and trigger.lock_key in here],
            [trigger for trigger in last if trigger is not None],
            self._counts(lock_key.name, records, len(names) <= EXAMINED, now),
        )

    def _explain_trigger(self, task_id: str) -> Explanation:
        names = self.named("trigger", task_id)
        if not names:
            expected = "a lock key that was held within the last day, or the id of a trigger that has met one"
            if self.named("execution", task_id):
                raise UnknownKey(f"expected {expected}, got {task_id}, which is an execution key: give --execution-key with it")
            raise self.unknown(task_id, expected)
        lock_name = self.lock_name_in(names[0]) or ""
        record = self.record_of(LockKey(lock_name, ""), task_id)
        trigger = self._trigger(record, self.now())
        if trigger is None:
            raise self.unknown(task_id, "the id of a trigger that the store remembers")
        return self._with_lock("trigger", task_id, trigger, trigger.lock_key or self._lock_key_it_waits_for(trigger))

    def _explain_execution(self, execution_key: str) -> Explanation:
        names = self.named("execution", execution_key)
        record = self.records([names[0].whole])[names[0].whole] if names else None
        if record is None:
            raise self.unknown(execution_key, "an execution key that the store remembers", "execution")
        lock_key, key = LockKey(self.lock_name_in(names[0]) or "", ""), self.key_in(names[0], execution_key)
        trigger = self._trigger(Record(lock_key, record["task_id"] or "", key), self.now())
        if trigger is None:
            raise self.unknown(execution_key, "an execution key that the store remembers", "execution")
        return self._with_lock("execution key", execution_key, trigger, trigger.lock_key)

    def _with_lock(self, kind: str, key: str, trigger: Trigger, text: str | None) -> Explanation:
        lock_key = self.find_lock(text) if text else None
        lock = self._lock(lock_key, self.now()) if lock_key else None
        signs = signs_of(self.app, lock) if lock else []
        why = why_uncertain(trigger.uncertain) if kind == "execution key" and trigger.uncertain else why_of(trigger)
        if trigger.state == "with the broker" and lock and lock.holders:
            why = f"{why}. Of {text}: {why_of_lock(lock, signs)}"
        return Explanation(kind, key, why, lock, signs, [trigger], [], None)

    def _lock(self, lock_key: LockKey, now: int) -> Lock:
        names = self.keys.lock(lock_key)
        lines, (hold_ms, next_ms), in_line, called, following = self.many(
            [
                ("hgetall", names.lease),
                ("hmget", names.pace, ["hold_ms", "next_ms"]),
                ("zcard", names.line),
                ("zcard", names.called),
                ("zcard", names.followers),
            ]
        )
        holders = [Holder.of_line(as_text(owner), as_text(line), now) for owner, line in lines.items()]
        holders.sort(key=lambda holder: holder.fencing_token)
        turns = Turns.of_pace(as_text(hold_ms), as_text(next_ms), now)
        return Lock(lock_key.text, lock_key.name or None, holders, turns, in_line, called, following)

    def _trigger(self, record: Record, now: int) -> Trigger | None:
        """Return what is known of a trigger, None when its record is gone."""
        names = coordination(self.app).store.names(record)
        found = self.records([names["trigger"], names["execution"]])
        own, run = found.get(names["trigger"]), found.get(names["execution"])
        if own is None:
            own = run
        if own is None:
            return None
        # Another trigger may run, or have run, the execution.
        uncertain = (
            self.uncertainty_of(names["execution"], run, record.lock_key.name, record.execution_key, now) if run else None
        )
        run = run if run is not None and (names["execution"] == names["trigger"] or run["task_id"] == record.task_id) else own
        place, message_bytes = self._waits(record, own) if own["parked"] else (None, own["message_bytes"])
        ending, its = Ending.of_record(own, now), Ending.of_record(run, now)
        if ending and its and ending.blocker_task_id == record.task_id:
            ending = replace(
                ending, reason=its.reason, blocker_task_id=None
            )  # it was answered from what somebody knew of its run
        ending = ending or its
        origin = Origin.of_record(run)
        if ending:
            state = "ended"
        elif run["owner"] and int(run["until_ms"] or 0) > now:
            state = "running"
        elif uncertain and run["attempt"]:
            state = "uncertain"
        elif own["awaiting"] and message_bytes:
            state = "waits for word"
        elif run["owner"]:
            state = "expired"
        elif own["parked"] and message_bytes:
            state = "following" if place is None else "in line"
        else:
            state = "in custody" if message_bytes else _place_without_message(origin)
        due = self.client.zscore(names["due"], record.member)
        return Trigger(
            task_id=record.task_id,
            lock_name=record.lock_key.name,
            lock_key=own["parked"] or own["awaits_at"] or run["lock_key"] or own["lock_key"],
            execution_key=record.execution_key,
            state=state,
            place=place,
            attempt=int(run["attempt"] or 0),
            deaths=int(own["died"] or 0),
            handouts=int(own["handouts"] or 0),
            is_released=bool(own["released"]),
            message_bytes=message_bytes,
            next_attention=None if due is None else (due - now) / 1000,
            kept_for=max(own["left_ms"], 0) / 1000,
            ending=ending,
            uncertain=uncertain,
            origin=origin,
            is_payload_compared=bool(run["payload"]),
            forced=forced_replays(own["forced"], now),
        )

    def _waits(self, record: Record, own: dict[str, Any]) -> tuple[int | None, int]:
        """Return how many are before a parked trigger in line, None when it follows another, and the size of its message."""
        names = self.keys.lock(LockKey(record.lock_key.name, own["parked"]))
        place, size = self.many([("zrank", names.line, record.member), ("hstrlen", names.parked, record.member)])
        return place, size

    def _counts(self, lock_name: str, records: dict[str, dict[str, Any]], is_complete: bool, now: int) -> Counts:  # noqa: FBT001
        due = self.keys.due(lock_name)
        in_custody, overdue = self.many([("zcard", due), ("zcount", due, "-inf", now)])
        waiting = [r for r in records.values() if not (r["outcome"] or r["owner"] or r["message_bytes"] or r["parked"])]
        await_word = sum(bool(r["awaiting"] and r["message_bytes"] and not r["outcome"]) for r in records.values())
        return Counts(lock_name, len(waiting), len(records), is_complete, in_custody, overdue, await_word)

    def _lock_key_it_waits_for(self, trigger: Trigger) -> str | None:
        """Return the lock key that the result backend names: the exception of a trigger that waits is a `Contended`."""
        if trigger.state != "with the broker":
            return None
        try:
            waits_for = getattr(self.app.AsyncResult(trigger.task_id).result, "lock_key", None)
        except Exception:  # noqa: BLE001, any backend, and it may be away
            return None
        return waits_for if isinstance(waits_for, str) else None


def _place_without_message(origin: Origin | None) -> str:
    return "left" if origin and origin.source == DIRECT else "with the broker"
