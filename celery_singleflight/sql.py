"""At the business boundary: the package's part in a transaction of the caller's, for programs with SQLAlchemy.

`Boundary` has the tables and what a transaction does with them, `Outbox` has the workers publish what was committed.
"""

from __future__ import annotations

from celery_singleflight.boundary import Boundary, ExecutionRecord
from celery_singleflight.outbox import Outbox

__all__ = ("Boundary", "ExecutionRecord", "Outbox")
