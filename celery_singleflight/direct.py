"""Holding a lock key without a message: direct calls of a task, and `lock` for scripts and narrow critical sections."""

from __future__ import annotations

import math
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from celery.exceptions import Ignore, Reject, Retry
from celery.utils.nodenames import gethostname

from celery_singleflight.claims import DIRECT, Acquired, Claim, Doubt, Ended, Held, Outcome, Record, Terms
from celery_singleflight.coordination import Coordination, coordination
from celery_singleflight.discretion import kind
from celery_singleflight.ending import finish, give_back
from celery_singleflight.errors import Contended, ExecutionUncertain, LeaseLost
from celery_singleflight.keys import LockKey
from celery_singleflight.lease import Execution, Holding, Lease, current_execution, holdings
from celery_singleflight.options import OPTIONS
from celery_singleflight.policies import poll_delay, waits_on_contention
from celery_singleflight.results import decode, decode_error, encode, encode_error
from celery_singleflight.steps import Work
from celery_singleflight.trigger import new_owner
from celery_singleflight.undoing import forget, resume, undo_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from celery import Celery

    from celery_singleflight.binding import Binding
    from celery_singleflight.claims import Encoded, Refused

__all__ = ("call_directly", "held_here", "lock")


@contextmanager
def lock(
    app: Celery,
    name: str,
    *scope: Any,
    wait: float = 0.0,
    lock_limit: int = 1,
    lease_ttl: float | None = None,
    max_hold: float = math.inf,
) -> Iterator[Lease]:
    """Hold the lock key of `name` and `scope`; a task with that `lock_name` and the same values in `lock_on` shares it.

    That of a task without `lock_on` is a digest of its arguments, and is not to be had here.

    Seconds throughout. `wait` is how long to wait for the key, `inf` for as long as it takes; it is polled for, so those who
    wait are not served in order. The lease (by default of the app's `singleflight_lease_ttl`) is renewed until the block
    ends, or is older than `max_hold`. A key that this context holds already is entered at once, and released by its outermost
    holder.

    Raises `Contended` when somebody else holds it at the end of `wait`; `LeaseLost` at the end of a block whose lease was
    lost; `StoreUnavailable`; `OptionError` and `LockKeyError` for bad arguments.
    """
    where = f"lock {name!r}"
    key = LockKey.of(OPTIONS["lock_name"].checked(name, f"{where}, name"), list(scope))
    outer = held_here(key)
    if outer:
        with Holding(outer):
            yield outer
        return
    if lease_ttl is None:
        lease_ttl = app.conf.get("singleflight_lease_ttl") or OPTIONS["lease_ttl"].default
    pid = os.getpid()
    owner = new_owner()
    claim = Claim(
        record=Record(key, owner, None),
        owner=owner,
        worker=gethostname(),
        run_id=owner,
        limit=OPTIONS["lock_limit"].checked(lock_limit, f"{where}, lock_limit"),
        ttl=OPTIONS["lease_ttl"].checked(lease_ttl, f"{where}, lease_ttl"),
        keep=0.0,
        on_held="ask",
    )
    bound = OPTIONS["max_hold"].checked(max_hold, f"{where}, max_hold")
    place = coordination(app)
    entered, requested_at = _enter(place, claim, OPTIONS["wait_timeout"].checked(wait, f"{where}, wait"))
    lease = _lease(claim, cast("Acquired", entered), requested_at, bound)  # a new owner has no outcome yet
    place.heartbeat.keep(lease, claim.record)
    try:
        with Holding(lease):
            yield lease
        lease.check()
    finally:
        place.heartbeat.drop(owner, claim.record)
        lease.mark_lost("it was given back")
        if os.getpid() == pid:  # a child that leaves the block of its parent has nothing to give back
            give_back(place, owner, claim.record, forget=True)


def call_directly(
    task: Any,
    binding: Binding,
    body: Callable[..., Any],
    args: Any,
    kwargs: Mapping[str, Any],
    execution_key: str | None = None,
) -> Any:
    """Run the body for a call without a message, such as `task(…)` and each item of `map` and `chunks`.

    Under `requeue` it waits in place, up to `wait_timeout`; under `skip` and `reject` only if there is a `wait_timeout`. Where
    an explicit execution key has succeeded before, its stored result is returned; a failure of it that is kept is raised.

    Raises `Contended` at the end of the wait, `ExecutionUncertain` under `uncertain_policy="hold"`, `LeaseLost` when the lease
    was lost while the body ran, and what the body raises.
    """
    key = binding.lock_key(task.name, args, kwargs)
    explicit = execution_key or binding.execution_key(args, kwargs)
    outer = held_here(key)
    execution = current_execution()
    if outer and (explicit is None or (execution and execution.key == explicit)):
        with Holding(outer, execution, task):
            return body(*args, **kwargs)
    options, place = binding.options, binding.coordination
    owner = outer.owner if outer else new_owner()
    claim = Claim(
        record=Record(key, owner, explicit, has_trigger=explicit is None),
        owner=owner,
        worker=gethostname(),
        run_id=new_owner(),
        limit=options.lock_limit,
        ttl=options.lease_ttl,
        keep=options.result_ttl,
        on_held="ask",
        task=task.name,
        terms=Terms(
            payload=binding.payload(args, kwargs) if explicit else "",
            holds=options.uncertain_policy == "hold",
            source=DIRECT,
        ),
    )
    patience = options.wait_timeout
    if patience is None:
        patience = math.inf if waits_on_contention(options.contention_policy) else 0.0
    entered, requested_at = _enter(place, claim, patience, None if outer else 0.0)
    if isinstance(entered, Ended):
        known = (binding.app, entered.value, explicit or owner, " ".join(map(str, entered.reason)))
        if entered.ended_as is Outcome.FAILED:
            raise decode_error(*known)
        return decode(*known)
    lease = outer or _lease(claim, entered, requested_at, binding.max_hold(task.time_limit))
    execution = Execution(
        key=explicit or owner,
        run_id=entered.run_id,
        attempt=entered.attempt,
        task_id=owner,
        is_unsure=entered.is_unsure,
    )
    execution.work = Work(binding, task.name, lease, claim.record, entered.run_id, claim.worker, (args, kwargs))
    place.heartbeat.keep(lease, claim.record)
    call = _Call(binding, claim, Holding(lease, execution, task), is_inner=outer is not None)
    try:
        value = call.run(lambda: body(*args, **kwargs))
    finally:
        call.leave()
    forget(call.holding)
    return value


class _Call:
    """One direct call that has its lease."""

    def __init__(self, binding: Binding, claim: Claim, holding: Holding, *, is_inner: bool) -> None:
        self.holding = holding
        self._binding = binding
        self._claim = claim
        self._has_key = claim.record.execution_key is not None
        #: What is left when it is neither recorded nor known how the body ended.
        self._is_recorded, self._is_cut_off = False, self._has_key
        self._hold: float | None = None if is_inner else 0.0

    def run(self, body: Callable[[], Any]) -> Any:
        """Call the body and record its outcome. Raises what it raises, and `LeaseLost`."""
        lease = self.holding.lease
        assert lease is not None  # noqa: S101, it has one
        try:
            with self.holding:
                if self.holding.execution is not None and self.holding.execution.attempt > 1:
                    resume(self.holding)
                value = body()
        except Exception as error:
            undo_steps(self.holding, Outcome.FAILED, error)
            self._is_cut_off = False
            # Celery would do with a later trigger as these say, and no message would follow.
            is_failure = not isinstance(error, Retry | Ignore | Reject)
            if is_failure and self._has_key and self._binding.options.failure_policy == "keep":
                self._record(lease, Outcome.FAILED, encode_error(self._binding.app, error, self._binding.bounds), kind(error))
            raise
        self._is_cut_off = False
        if self._hold is not None:
            self._hold = self._binding.options.min_hold
        if self._has_key:
            stored, why_not = encode(self._binding.app, value, self._binding.bounds)
            if self._record(lease, Outcome.SUCCEEDED, stored, why_not):
                raise LeaseLost(lease.lock_key, "it was taken over while the body ran")
        else:
            lease.check()
        return value

    def leave(self) -> None:
        """Give back what is left of it."""
        if not self._is_recorded:
            place, claim = self._binding.coordination, self._claim
            work = self.holding.execution.work if self.holding.execution else None
            goes_on = self._has_key and work is not None and work.goes_on
            forget = not (self._is_cut_off or goes_on)
            give_back(place, claim.owner, claim.record, forget=forget, cut_off=self._is_cut_off, hold=self._hold)

    def _record(self, lease: Lease, outcome: Outcome, value: Encoded, reason: str) -> Refused | None:
        self._is_recorded = True
        claim = self._claim
        return finish(
            self._binding.coordination,
            lease,
            claim.record,
            outcome,
            value,
            reason=reason,
            keep=claim.keep,
            hold=self._hold,
            keeps_failure=outcome is Outcome.FAILED,
        )


def held_here(key: LockKey) -> Lease | None:
    """Return the lease by which this context holds the lock key already, if it does. Raises `LeaseLost` when it is lost."""
    lease = next((holding.lease for holding in holdings() if holding.lease and holding.lease.key == key), None)
    if lease is not None:
        lease.check()
    return lease


def _enter(place: Coordination, claim: Claim, patience: float, hold: float | None = 0.0) -> tuple[Acquired | Ended, float]:
    """Ask until the lease is ours or the execution has ended. Returns the answer, and when it was asked for.

    `hold` is None when the owner holds the lease already, so that giving up leaves it alone.
    """
    give_up_at = time.monotonic() + patience
    tries = 0
    while True:
        requested_at = time.monotonic()
        try:
            entered = place.store.enter(claim)
        except BaseException:
            give_back(place, claim.owner, claim.record, forget=True, hold=hold)
            raise
        if isinstance(entered, Acquired | Ended):
            return entered, requested_at
        if isinstance(entered, Doubt):
            raise ExecutionUncertain(claim.record.execution_key or claim.owner, entered.task_id, entered.worker, entered.age)
        if not isinstance(entered, Held) or requested_at >= give_up_at:
            facts = (entered.task_id, entered.worker, entered.age, entered.remaining) if isinstance(entered, Held) else ()
            raise Contended(claim.record.lock_key.text, *facts)
        time.sleep(poll_delay(entered, tries, give_up_at - requested_at))
        tries += 1


def _lease(claim: Claim, entered: Acquired, requested_at: float, max_hold: float) -> Lease:
    return Lease(
        claim.record.lock_key,
        owner=claim.owner,
        token=entered.token,
        limit=claim.limit,
        ttl=claim.ttl,
        max_hold=max_hold,
        requested_at=requested_at,
    )
