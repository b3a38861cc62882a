"""What a run asks of the store, in the words of the package."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from celery_singleflight.claims import Acquired, Encoded, Ended, Held, Outcome, Refused, Surplus
from celery_singleflight.custody import Custody, as_text, milliseconds
from celery_singleflight.errors import ExecutionKeyReused, ScriptError
from celery_singleflight.script import Value, load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery_singleflight.claims import Claim, Record
    from celery_singleflight.lease import Lease

__all__ = ("Store",)

_ENTER: Final = load("enter")
_RENEW: Final = load("renew")
_FINISH: Final = load("finish")
_ABANDON: Final = load("abandon")

#: Seconds for which a trigger is remembered after its end, at least: its message may be delivered again.
_REMEMBER: Final = 3600.0


class Store(Custody):
    """The path of a run: its lease, its record and its outcome."""

    __slots__ = ()

    def enter(self, claim: Claim) -> Acquired | Held | Ended | Surplus:
        """Ask for the lease of a claim.

        Raises `StoreUnavailable`; the store may then have granted it, to be given back by `abandon`. Raises
        `ExecutionKeyReused` when the explicit execution key belongs to another task.
        """
        record = claim.record
        reply = self._run(
            _ENTER,
            {
                **self.names(record),
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
            },
        )
        match reply.word:
            case "acquired":
                return Acquired(int(reply.fence), reply.run.decode(), int(reply.attempt))
            case "ended":
                return Ended(
                    Outcome(reply.outcome.decode()),
                    settled=bool(reply.settled),
                    reason=json.loads(reply.reason or b"[]"),
                    value=Encoded(reply.content_type.decode(), reply.content_encoding.decode(), reply.body),
                )
            case "surplus":
                return Surplus(reply.why.decode())
            case "reused":
                raise ExecutionKeyReused(record.execution_key or "", reply.by_task.decode())
        return _held(reply)

    def renew(self, wanted: Sequence[tuple[Lease, Record, float]]) -> list[str | ScriptError]:
        """Keep each lease for so many seconds from now, all in one exchange.

        Returns for each why it is lost, "" when it was renewed, or the error that says neither.
        """
        calls = []
        for lease, record, ttl in wanted:
            names = self.names(record)
            named: dict[str, Value] = {
                "lease": names["lease"],
                "execution": names["execution"],
                "trigger": names["trigger"],
                "owner": lease.owner,
                "ttl_ms": milliseconds(ttl),
            }
            calls.append(_RENEW.arguments(named))
        return [_why_lost(raw) for raw in self._connections.run_many(_RENEW, len(_RENEW.keys), calls)]

    def finish(
        self,
        lease: Lease,
        record: Record,
        outcome: Outcome,
        value: Encoded,
        *,
        reason: str,
        keep: float,
        hold: float | None = 0.0,
    ) -> Refused | None:
        """Record the outcome and release the lease, or return who has taken over.

        The lock key stays taken until it was held for `hold` seconds; None keeps the lease for an outer holder.
        """
        names = self.names(record)
        reply = self._run(
            _FINISH,
            {
                "lease": names["lease"],
                "fence": names["fence"],
                "pace": names["pace"],
                "execution": names["execution"],
                "trigger": names["trigger"],
                "owner": lease.owner,
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
            },
        )
        return Refused(reply.owner.decode(), reply.outcome.decode()) if reply.word == "refused" else None

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
    ) -> None:
        """End a run without an outcome. `hold` is as in `finish`.

        `generation` makes older copies of its message stop counting; `forget` deletes its record. `again` is in how many
        seconds the stored message may be published, unless the trigger has entered again; None when its message is the
        broker's from now on. `died` counts against `max_deliveries`.
        """
        self._run(
            _ABANDON,
            {
                **self._of_trigger(record),
                "owner": owner,
                "generation": "" if generation is None else generation,
                "forget": int(forget),
                "hold_ms": "" if hold is None else milliseconds(hold),
                "again_ms": "" if again is None else milliseconds(again),
                "died": int(died),
            },
        )


def _why_lost(raw: Any) -> str | ScriptError:
    if isinstance(raw, ScriptError):
        return raw
    reply = _RENEW.reply(raw)
    return str(reply.why.decode()) if reply.word == "lost" else ""


def _held(reply: Any) -> Held:
    task_id, worker = json.loads(reply.holder)
    return Held(
        what=reply.what.decode(),
        task_id=task_id or "",
        worker=worker or "",
        age=reply.age_ms / 1000,
        remaining=reply.remaining_ms / 1000,
        hold=reply.hold_ms / 1000,
        turn=reply.turn_ms / 1000,
        waited=(int(reply.now_ms) - int(reply.first_ms)) / 1000,
        first_ms=reply.first_ms.decode(),
    )
