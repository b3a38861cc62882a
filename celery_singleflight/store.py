"""What the store can be asked, in the words of the package. Seconds become milliseconds here, and nowhere else."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any, Final

from celery_singleflight.claims import Acquired, Encoded, Ended, Held, Outcome, Refused, Surplus
from celery_singleflight.errors import ScriptError
from celery_singleflight.script import Script, Value, load

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from celery_singleflight.claims import Claim, Record
    from celery_singleflight.connection import Connections
    from celery_singleflight.keys import KeySpace
    from celery_singleflight.lease import Lease

__all__ = ("Store",)

_ENTER: Final = load("enter")
_RENEW: Final = load("renew")
_FINISH: Final = load("finish")
_ABANDON: Final = load("abandon")
_SETTLE: Final = load("settle")


class Store:
    """The scripts of this package on one server, under one key prefix."""

    __slots__ = ("_connections", "keys", "names")

    def __init__(self, connections: Connections, keys: KeySpace) -> None:
        self._connections = connections
        self.keys = keys
        #: Where a record and its lock key are kept, by the names of the scripts. Asked for at both ends of a run.
        self.names = functools.lru_cache(maxsize=256)(self._make_names)

    def enter(self, claim: Claim) -> Acquired | Held | Ended | Surplus:
        """Ask for the lease of a claim.

        Raises `StoreUnavailable`; the store may then have granted it, to be given back by `abandon`.
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
                "ttl_ms": _ms(claim.ttl),
                "keep_ms": _ms(claim.keep),
                "on_held": claim.on_held,
                "wait_ms": "" if claim.wait is None else _ms(claim.wait),
                "first_ms": claim.first_ms,
                "grace_ms": _ms(claim.grace),
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
        return _held(reply)

    def renew(self, wanted: Sequence[tuple[Lease, Record, float]]) -> list[str | ScriptError]:
        """Keep each lease for so many seconds from now, all in one exchange.

        Returns for each why it is lost, "" when it was renewed, or the error that says neither.
        """
        calls = []
        for lease, record, ttl in wanted:
            named: dict[str, Value] = {
                **_some(self.names(record)),
                "owner": lease.owner,
                "ttl_ms": _ms(ttl),
            }
            calls.append(_RENEW.arguments(named))
        return [_why_lost(raw) for raw in self._connections.run_many(_RENEW, len(_RENEW.keys), calls)]

    def finish(
        self, lease: Lease, record: Record, outcome: Outcome, value: Encoded, *, reason: str, keep: float, release: bool
    ) -> Refused | None:
        """Record the outcome and release the lease, or return who has taken over."""
        reply = self._run(
            _FINISH,
            {
                **self.names(record),
                "owner": lease.owner,
                "token": lease.token,
                "limit": lease.limit,
                "outcome": outcome.value,
                "reason": reason,
                "content_type": value.content_type,
                "content_encoding": value.content_encoding,
                "body": value.body,
                "keep_ms": _ms(keep),
                "release": int(release),
            },
        )
        return Refused(reply.owner.decode(), reply.outcome.decode()) if reply.word == "refused" else None

    def abandon(
        self, owner: str, record: Record, *, generation: int | None = None, forget: bool = False, release: bool = True
    ) -> None:
        """End a run without an outcome. `generation` makes older copies of its message stop counting."""
        self._run(
            _ABANDON,
            {
                **_some(self.names(record)),
                "owner": owner,
                "generation": "" if generation is None else generation,
                "forget": int(forget),
                "release": int(release),
            },
        )

    def settle(self, ended: Iterable[tuple[Record, str]]) -> None:
        """Note of each (record, owner that ended it) that Celery has done what follows."""
        slots: dict[str, list[tuple[str, str]]] = {}
        for record, owner in ended:
            trigger = self.keys.trigger(record.lock_key.name, record.task_id)
            slot = "" if self._connections.spans_slots else trigger.partition("}")[0]
            slots.setdefault(slot, []).append((trigger, owner))
        for pairs in slots.values():
            values = [trigger for trigger, _ in pairs] + [owner for _, owner in pairs]
            self._connections.run(_SETTLE, len(pairs), values)

    def close(self) -> None:
        """Close the connections; the next call opens them again."""
        self._connections.close()

    def _make_names(self, record: Record) -> dict[str, str]:
        lock_name = record.lock_key.name
        trigger = self.keys.trigger(lock_name, record.task_id)
        execution = trigger if record.execution_key is None else self.keys.execution(lock_name, record.execution_key)
        return {
            **self.keys.lock(record.lock_key)._asdict(),
            "execution": execution,
            "trigger": trigger if record.has_trigger else execution,
        }

    def _run(self, script: Script, named: dict[str, Any]) -> Any:
        return script.reply(self._connections.run(script, len(script.keys), script.arguments(named)))


def _some(names: dict[str, str]) -> dict[str, str]:
    """Return the names that `renew` and `abandon` work on."""
    return {"lease": names["lease"], "execution": names["execution"], "trigger": names["trigger"]}


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


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
