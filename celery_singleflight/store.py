"""What a run asks of the store, in the words of the package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from celery_singleflight.answers import ended_of, entered_of
from celery_singleflight.claims import (
    Encoded,
    Ended,
    Finished,
    Outcome,
    Record,
    Refused,
    Terms,
    Waits,
)
from celery_singleflight.custody import as_text, calls_of, milliseconds
from celery_singleflight.errors import ExecutionKeyReused, PayloadMismatch, ScriptError
from celery_singleflight.progress import Progress
from celery_singleflight.script import Value, load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_singleflight.answers import Entered
    from celery_singleflight.claims import Claim, Handout
    from celery_singleflight.lease import Lease

__all__ = ("Renewal", "Store")

_ENTER: Final = load("enter")
_RENEW: Final = load("renew")
_FINISH: Final = load("finish")
_ABANDON: Final = load("abandon")
_FOLLOW: Final = load("follow")

#: Seconds for which a trigger is remembered after its end, at least: its message may be delivered again.
_REMEMBER: Final = 3600.0


class Store(Progress):
    """The path of a run: its lease, its record and its outcome."""

    __slots__ = ()

    def enter(self, claim: Claim) -> Entered:
        """Ask for the lease of a claim.

        Raises `StoreUnavailable`; the store may then have granted it, to be given back by `abandon`. Raises
        `ExecutionKeyReused` when the explicit execution key belongs to another task, `PayloadMismatch` when it was used with
        another payload.
        """
        return _entered(claim.record, self._run(_ENTER, self.names(claim.record), _asked(claim)))

    def enter_after_baton(self, claim: Claim, seconds: float, goes_on: Callable[[], bool]) -> Entered | None:
        """Wait until a place may be free, for so many seconds at most; then ask as `enter` does, with nothing in between.

        Returns None when `goes_on`, which is asked every 20 ms, was false. Then, and when `StoreUnavailable` was raised, nobody
        knows whether it has asked: `enter` is to be called. Raises as that does.
        """
        names = self.names(claim.record)
        values = _ENTER.arguments(names, _asked(claim))
        raw = self._connections.run_after(names["baton"], seconds, goes_on, _ENTER, len(_ENTER.keys), values)
        return None if raw is None else _entered(claim.record, _ENTER.reply(raw))

    def follow(self, claim: Claim, by: str) -> Ended | None:
        """Give a trigger the outcome of the one it was coalesced into or has joined.

        Returns None when nobody knows that any more, and the trigger is a newcomer again.
        """
        record = claim.record
        leader = self.names(Record.of_member(record.lock_key, by))
        reply = self._run(
            _FOLLOW,
            {**self.names(record), "leader": leader["trigger"], "execution": leader["execution"]},
            {
                "owner": claim.owner,
                "lock_key": record.lock_key.text,
                "member": record.member,
                "by": by,
                "copy": claim.copy,
                "generation": claim.generation,
                "grace_ms": milliseconds(claim.grace),
                "keep_ms": milliseconds(claim.keep),
                "message": as_text(claim.message),
            },
        )
        return None if reply.word == "gone" else ended_of(reply)

    def renew(self, wanted: Sequence[tuple[Lease, Record, float]]) -> list[Renewal | ScriptError]:
        """Keep each lease for so many seconds from now, all in one exchange. Returns for each what came of it."""
        calls = []
        for lease, record, ttl in wanted:
            named: dict[str, Value] = {"owner": lease.owner, "ttl_ms": milliseconds(ttl)}
            calls.append(_RENEW.arguments(self.names(record), named))
        return [_renewal(raw) for raw in self._connections.run_many(_RENEW, len(_RENEW.keys), calls)]

    def finish(  # noqa: PLR0913, an outcome has many sides
        self,
        lease: Lease,
        record: Record,
        outcome: Outcome,
        value: Encoded,
        *,
        reason: str,
        keep: float,
        hold: float | None = 0.0,
        keeps_failure: bool = False,
        keeps_steps: bool = False,
    ) -> Finished | Refused:
        """Record the outcome and release the lease, or return who has taken over.

        To later triggers of an explicit execution key a failure is the answer if it `keeps_failure`; else they go on behind the
        steps that are done if it `keeps_steps`, or begin anew. The lock key stays taken until it was held for `hold` seconds;
        None keeps the lease for an outer holder.
        """
        reply = self._run(
            _FINISH,
            self.names(record),
            {
                "owner": lease.owner,
                "lock_key": record.lock_key.text,
                "member": record.member,
                "token": lease.token,
                "limit": lease.limit,
                "outcome": outcome.value,
                "reason": reason,
                "content_type": value.content_type,
                "content_encoding": value.content_encoding,
                "body": as_text(value.body),
                "keep_ms": milliseconds(keep),
                "hold_ms": "" if hold is None else milliseconds(hold),
                "remember_ms": milliseconds(_REMEMBER if record.has_trigger else 0),
                "failure": "keep" if keeps_failure else "steps" if keeps_steps else "",
            },
        )
        if reply.word == "refused":
            return Refused(reply.owner.decode(), reply.outcome.decode())
        return Finished(calls_of(reply))

    def abandon(
        self,
        owner: str,
        record: Record,
        *,
        generation: int | None = None,
        forget: bool = False,
        hold: float | None = 0.0,
        again: float | None = None,
        died: bool = False,
        cut_off: bool = False,
    ) -> list[Handout]:
        """End a run without an outcome; return the messages of those who are next. `hold` is as in `finish`.

        `generation` makes older copies of its message stop counting; `forget` deletes its record. `again` is in how many
        seconds the stored message may be published, unless the trigger has entered again; None when its message is the
        broker's from now on. `died` counts against `max_deliveries`; `cut_off` is that nobody knows what the body has done.
        """
        reply = self._run(
            _ABANDON,
            self.names(record),
            {
                "owner": owner,
                "lock_key": record.lock_key.text,
                "member": record.member,
                "generation": "" if generation is None else generation,
                "forget": int(forget),
                "hold_ms": "" if hold is None else milliseconds(hold),
                "again_ms": "" if again is None else milliseconds(again),
                "died": int(died),
                "cut_off": int(cut_off),
            },
        )
        return calls_of(reply)


def _asked(claim: Claim) -> dict[str, Value]:
    """Return what a claim says to `enter`."""
    record = claim.record
    return {
        "owner": claim.owner,
        "task_id": record.task_id,
        "worker": claim.worker,
        "lock_key": record.lock_key.text,
        "run": claim.run_id,
        "copy": claim.copy,
        "previous": claim.previous,
        "generation": claim.generation,
        "limit": claim.limit,
        "ttl_ms": milliseconds(claim.ttl),
        "keep_ms": milliseconds(claim.keep),
        "on_held": claim.on_held,
        "wait_ms": "" if claim.wait is None else milliseconds(claim.wait),
        "first_ms": claim.first_ms,
        "grace_ms": milliseconds(claim.grace),
        "message": as_text(claim.message),
        "member": record.member,
        "deaths": "" if claim.max_deliveries is None else claim.max_deliveries,
        "task": "" if record.execution_key is None else claim.task,
        "waits": _packed(claim.waits),
        "ticket": claim.ticket,
        "terms": _packed_terms(claim.terms),
    }


def _entered(record: Record, reply: Any) -> Entered:
    if reply.word == "reused":
        reused = PayloadMismatch if reply.what == b"payload" else ExecutionKeyReused
        raise reused(record.execution_key or "", reply.by_task.decode())
    return entered_of(reply)


def _packed(waits: Waits) -> str:
    """Return how a trigger waits as `enter` reads it."""
    if waits == _PLAIN:
        return _PLAIN_PACKED
    keeps, linger, digest, expires, which, delay, within, merged_with, merged_copy = waits
    return "\n".join(
        (
            "1" if keeps else "",
            str(milliseconds(linger)) if linger > 0 else "",
            digest,
            "" if expires is None else str(milliseconds(expires)),
            which,
            str(milliseconds(delay)) if delay > 0 else "",
            str(milliseconds(within)),
            merged_with,
            merged_copy,
        )
    )


def _packed_terms(terms: Terms) -> str:
    """Return what a trigger says of its execution as `enter` reads it."""
    if terms == _NO_TERMS:
        return ""
    payload, holds, delays, source, scheduled, is_redelivered = terms
    return "\n".join(
        (
            payload,
            "hold" if holds else "",
            ",".join(str(milliseconds(delay)) for delay in delays),
            source,
            scheduled,
            "1" if is_redelivered else "",
        )
    )


_NO_TERMS: Final = Terms()
_PLAIN: Final = Waits()
_PLAIN_PACKED: Final = "1" + "\n" * 8


class Renewal(NamedTuple):
    """What came of renewing a lease: why it is `lost`, or which trigger asks its holder to stop; each "" for none."""

    lost: str
    stop_by: str


def _renewal(raw: Any) -> Renewal | ScriptError:
    if isinstance(raw, ScriptError):
        return raw
    reply = _RENEW.reply(raw)
    if reply.word == "lost":
        return Renewal(reply.why.decode(), "")
    return Renewal("", reply.stop_by.decode())
