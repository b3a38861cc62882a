"""Keeping the vendors' prices. A vendor that is slow gets one request at a time, and no queue of them."""

from __future__ import annotations

import json
import time
from os import environ
from urllib.request import urlopen

from celery import chain

from celery_singleflight import SingleflightTask, lock
from shop import app, books

VENDORS = ("acorn", "birch")
#: Where vendors answer under their names, with the prices of articles in JSON; empty for made-up ones.
URL = environ.get("SHOP_VENDOR_URL", "")


@app.task
def sync_vendors() -> None:
    """Start the sync of each vendor, and the publication of what it brings."""
    for vendor in VENDORS:
        chain(sync_vendor.s(vendor), publish_prices.s(vendor)).delay()


def code(vendor: str) -> str:
    """Return the name under which a vendor has its lock key; people write `Acorn` and mean `acorn`."""
    return vendor.strip().lower()


@app.task(base=SingleflightTask, lock_name="vendor", lock_on=code, contention_policy="skip", skip_as="stop", time_limit=120)
def sync_vendor(vendor: str) -> dict[str, int]:
    """Return the prices of a vendor by article.

    While one sync is at it, another one does not run, and does not wait either. Its chain ends there: nothing new, so
    nothing to publish.
    """
    if not URL:
        time.sleep(5)
        return {"apples": 120, "pears": 150}
    with urlopen(f"{URL}/{code(vendor)}", timeout=60) as answer:  # noqa: S310, the shop's own setting
        return json.load(answer)


@app.task
def publish_prices(prices: dict[str, int], vendor: str) -> None:
    """Replace a vendor's prices by those of a sync."""
    with lock(app, "prices", code(vendor), wait=10) as lease:
        books.publish_prices(code(vendor), prices, token=lease.fencing_token)
