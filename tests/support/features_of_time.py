"""Features of Celery, as rows of the matrix: what has to do with time, and revoking."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from matrix_ends import end_of, ends_of
from matrix_feature import CONTENDED, UNCONTENDED, Section
from nodes import wait_until

TIME = Section("Time limits, countdowns, revoking")


@TIME(holds=("add",))
def countdown(t):
    """`countdown`."""
    begun = datetime.now(UTC)
    value = t.add.apply_async((1, 2), countdown=1).get(timeout=20)
    return value, (datetime.now(UTC) - begun).total_seconds() >= 1


@TIME(holds=("short_lease",))
def countdown_longer_than_a_lease(t):
    """`countdown` longer than `lease_ttl`."""
    begun = datetime.now(UTC)
    value = t.short_lease.apply_async(("late",), countdown=1.5).get(timeout=20)
    return value, (datetime.now(UTC) - begun).total_seconds() >= 1.5


@TIME(holds=("add",))
def eta(t):
    """`eta`."""
    return end_of(t.add.apply_async((1, 2), eta=datetime.now(UTC) + timedelta(seconds=0.5)))


@TIME(
    holds=("add",),
    waiting=None,
    says={(None, UNCONTENDED): "same: REVOKED, not run", (None, CONTENDED): "REVOKED when it expires during its wait, not run"},
)
def expires(t):
    """`expires` passes before it can run."""
    expiry = datetime.now(UTC) + timedelta(seconds=2 if t.is_contended else 0.1)
    result = t.add.apply_async((1, 2), countdown=None if t.is_contended else 1, expires=expiry)
    t.until_it_waits(result)
    wait_until(lambda: datetime.now(UTC) > expiry, what="it has expired")
    t.let_go()
    return end_of(result)


_REVOKED = {(None, UNCONTENDED): "same: REVOKED, not run", (None, CONTENDED): "REVOKED during its wait, not run"}


def _revoked_while_it_waits(t, revoke):
    signature = t.add.s(1, 2)
    signature.stamp(mark=t.key)
    result = signature.apply_async(countdown=None if t.is_contended else 1)
    t.until_it_waits(result)
    revoke(result)
    t.let_go()
    return end_of(result)


@TIME(holds=("add",), waiting=None, says=_REVOKED)
def revoke_while_it_waits(t):
    """`revoke` while it waits."""
    return _revoked_while_it_waits(t, t.revoke)


@TIME(holds=("add",), waiting=None, says=_REVOKED)
def terminate_while_it_waits(t):
    """`revoke(terminate=True)` while it waits."""
    return _revoked_while_it_waits(t, lambda result: t.revoke(result, terminate=True))


@TIME(holds=("add",), waiting=None, says=_REVOKED)
def revoke_by_stamp_while_it_waits(t):
    """`revoke_by_stamped_headers` while it waits."""
    return _revoked_while_it_waits(t, lambda _: t.revoke_by_stamp({"mark": [t.key]}))


@TIME(holds=("sleep_at_gate",))
def revoke_while_it_runs(t):
    """`revoke` without `terminate` while it runs: it ends as it likes."""
    result = t.sleep_at_gate.delay(t.key)
    t.until_it_runs(result)
    t.revoke(result)
    t.place.ledger.open(t.key)
    return end_of(result)


@TIME(holds=("sleep_at_gate",))
def terminate(t):
    """`revoke(terminate=True)` while it runs."""
    result = t.sleep_at_gate.delay(t.key)
    t.until_it_runs(result)
    t.revoke(result, terminate=True, signal="SIGKILL")
    return end_of(result)


@TIME(holds=("soft_limited",), waiting=2)
def soft_time_limit(t):
    """`soft_time_limit`, caught and not caught."""
    return ends_of(t.soft_limited.delay(True), t.soft_limited.delay(False))


@TIME(holds=("hard_limited",))
def hard_time_limit(t):
    """`time_limit`."""
    return end_of(t.hard_limited.delay())
