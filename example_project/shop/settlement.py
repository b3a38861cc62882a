"""Settling what the tenants are owed: once for each tenant and day, and never two at once on one tenant's account."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from os import environ
from zlib import crc32

from celery_singleflight import SingleflightTask
from shop import app, books

TENANTS = ("north", "south", "west")
BANK_SECONDS = float(environ.get("SHOP_BANK_SECONDS", "3"))


@app.task(base=SingleflightTask, lock_on=())
def settle_yesterday() -> None:
    """Start the settlement of yesterday for all tenants.

    The day is chosen here and not in `settle_day`: a retry after midnight must still be about the same day.
    """
    day = (datetime.now(UTC) - timedelta(days=1)).date().isoformat()
    for tenant in TENANTS:
        settle_day.delay(tenant, day)


@app.task(base=SingleflightTask, bind=True, lock_name="account", lock_on=("tenant",), idempotent_on="settle:{tenant}:{day}")
def settle_day(self: SingleflightTask, tenant: str, day: str) -> int:
    """Pay a tenant what one day has brought, and return the amount.

    Two days of a tenant wait for each other (`lock_on`). A day that was settled already is not settled again: whoever asks
    gets the amount of then (`idempotent_on`).
    """
    amount = crc32(f"{tenant} {day}".encode()) % 100_000  # what the day has brought, in cents
    transfer(tenant, amount, reference=self.execution.key)
    books.settle(tenant, day, amount, token=self.lease.fencing_token)
    return amount


@app.task(base=SingleflightTask, bind=True, lock_name="account", lock_on=("tenant",), contention_policy="reject")
def close_month(self: SingleflightTask, tenant: str, month: str) -> int:
    """Return what a tenant was paid in a month.

    On the same key as `settle_day`, because of the lock name; but the accountant who asks is told at once when the account is
    busy, with `Contended`.
    """
    return books.month(tenant, month, token=self.lease.fencing_token)


def transfer(tenant: str, amount: int, *, reference: str) -> str:
    """Let the bank transfer the money; a real one takes the reference as its idempotency key."""
    time.sleep(BANK_SECONDS)
    return f"{amount} to {tenant}: {reference}"
