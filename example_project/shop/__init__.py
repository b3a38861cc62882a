"""A small shop: it settles its tenants' days, writes invoices and keeps its vendors' prices."""

from __future__ import annotations

from celery import Celery

__all__ = ("app",)

app = Celery("shop")
app.config_from_object("celeryconfig")
