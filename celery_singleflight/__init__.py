"""Task-level mutual exclusion, idempotency and fencing for Celery."""

from __future__ import annotations

from celery_singleflight.claims import Outcome
from celery_singleflight.direct import lock
from celery_singleflight.errors import (
    ConfigurationError,
    Contended,
    DeadLettered,
    ExecutionKeyReused,
    FencingUnavailable,
    LeaseLost,
    LockKeyError,
    MaxHoldExceeded,
    NestedLeaseLost,
    OptionError,
    PayloadMismatch,
    Replaced,
    ResultUnavailable,
    ScriptError,
    SingleflightError,
    Skipped,
    StaleToken,
    StoreUnavailable,
    WaitTimeout,
)
from celery_singleflight.hooks import connect_hooks
from celery_singleflight.lease import Execution, Lease, current_execution, current_lease
from celery_singleflight.task import SingleflightTask

__all__ = (
    "ConfigurationError",
    "Contended",
    "DeadLettered",
    "Execution",
    "ExecutionKeyReused",
    "FencingUnavailable",
    "Lease",
    "LeaseLost",
    "LockKeyError",
    "MaxHoldExceeded",
    "NestedLeaseLost",
    "OptionError",
    "Outcome",
    "PayloadMismatch",
    "Replaced",
    "ResultUnavailable",
    "ScriptError",
    "SingleflightError",
    "SingleflightTask",
    "Skipped",
    "StaleToken",
    "StoreUnavailable",
    "WaitTimeout",
    "current_execution",
    "current_lease",
    "lock",
)
__version__ = "0.1.0"

connect_hooks()
