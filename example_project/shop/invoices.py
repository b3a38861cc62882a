"""Writing invoices: one for each order, however often it is asked for, under numbers without gaps."""

from __future__ import annotations

from typing import Any

from celery_singleflight import SingleflightTask, lock
from shop import app, books


@app.task(base=SingleflightTask, lock_on="order:{order[id]}", idempotent_on="invoice:{order[id]}", wait_timeout=60)
def invoice(order: dict[str, Any]) -> int:
    """Write the invoice of an order such as `{"id": "o-17", "amount": 1990}`, and return its number.

    An order is not blocked by another one's; only the next number is, and only for the moment that it takes.
    """
    with lock(app, "invoice numbers", wait=10) as lease:
        return books.invoice(order["id"], order["amount"], token=lease.fencing_token)
