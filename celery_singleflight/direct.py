"""Holding a lock key without a message: direct calls of a task, and `lock` for scripts and narrow critical sections."""

from __future__ import annotations

import math
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from celery.utils.nodenames import gethostname

from celery_singleflight.claims import Acquired, Claim, Ended, Held, Outcome, Record
from celery_singleflight.coordination import Coordination, coordination
from celery_singleflight.ending import finish, give_back
from celery_singleflight.errors import Contended, LeaseLost
from celery_singleflight.keys import LockKey
from celery_singleflight.lease import Execution, Holding, Lease, current_execution, holdings
from celery_singleflight.options import OPTIONS
from celery_singleflight.policies import poll_delay, waits_on_contention
from celery_singleflight.results import decode, encode
from celery_singleflight.steps import Work
from celery_singleflight.trigger import new_owner
from celery_singleflight.undoing import forget, resume, undo_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from celery import Celery

    from celery_singleflight.binding import Binding

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
    an explicit execution key has succeeded before, its stored result is returned. A failure is not stored.

    Raises `Contended` at the end of the wait, `LeaseLost` when the lease was lost while the body ran, and what the body raises.
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
    )
    patience = options.wait_timeout
    if patience is None:
        patience = math.inf if waits_on_contention(options.contention_policy) else 0.0
    hold = None if outer else 0.0
    entered, requested_at = _enter(place, claim, patience, hold)
    if isinstance(entered, Ended):
        return decode(binding.app, entered.value, explicit or owner, " ".join(map(str, entered.reason)))
    lease = outer or _lease(claim, entered, requested_at, binding.max_hold(task.time_limit))
    execution = Execution(key=explicit or owner, run_id=entered.run_id, attempt=entered.attempt, task_id=owner)
    execution.work = Work(binding, task.name, lease, claim.record, entered.run_id, claim.worker, (args, kwargs))
    place.heartbeat.keep(lease, claim.record)
    recorded = False
    holding = Holding(lease, execution, task)
    try:
        try:
            with holding:
                if execution.attempt > 1:
                    resume(holding)
                value = body(*args, **kwargs)
        except Exception as error:
            undo_steps(holding, Outcome.FAILED, error)
            raise
        hold = None if outer else options.min_hold
        if explicit is None:
            lease.check()
        else:
            stored, why_not = encode(binding.app, value)
            refused = finish(
                place,
                lease,
                claim.record,
                Outcome.SUCCEEDED,
                stored,
                reason=why_not,
                keep=claim.keep,
                hold=hold,
            )
            recorded = True
            if refused:
                raise LeaseLost(key.text, "it was taken over while the body ran")
    finally:
        if not recorded:
            give_back(place, owner, claim.record, forget=True, hold=hold)
    forget(holding)
    return value


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
