"""The settings of the shop. Broker, results and leases are on one Redis."""

from __future__ import annotations

from os import environ

from celery.schedules import crontab


def every(name: str, otherwise: float | crontab) -> float | crontab:
    """Return a schedule, or the seconds that the environment gives instead, as in SHOP_SYNC_EVERY=5."""
    seconds = environ.get(f"SHOP_{name}_EVERY")
    return float(seconds) if seconds else otherwise


broker_url = environ.get("SHOP_REDIS_URL", "redis://localhost:6379/0")
result_backend = broker_url
include = ("shop.settlement", "shop.invoices", "shop.shelves", "shop.vendors")
task_default_queue = "shop"
task_time_limit = 600

# What all protected tasks have in common; each may say otherwise in its decorator, as `<option>` without the prefix.
singleflight_url = broker_url
singleflight_key_prefix = "shop"
singleflight_lease_ttl = 20
singleflight_contention_policy = "requeue"
singleflight_wait_timeout = 15 * 60
singleflight_result_ttl = 7 * 24 * 3600

beat_schedule = {
    "settle yesterday": {
        "task": "shop.settlement.settle_yesterday",
        "schedule": every("SETTLE", crontab(hour=2, minute=0)),
        # Options of a call: a tick that finds the one before it still at work is not needed.
        "options": {"contention_policy": "skip"},
    },
    "sync vendors": {
        "task": "shop.vendors.sync_vendors",
        "schedule": every("SYNC", 60.0),
        "options": {"expires": 60},
    },
}
