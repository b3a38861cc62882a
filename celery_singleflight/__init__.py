"""Task-level mutual exclusion, idempotency and fencing for Celery."""

from __future__ import annotations

from celery_singleflight.cause import Cause
from celery_singleflight.checkpoints import Cursor
from celery_singleflight.claims import Outcome
from celery_singleflight.direct import lock
from celery_singleflight.errors import (
    ConfigurationError,
    Contended,
    DeadLettered,
    ExecutionKeyReused,
    ExecutionUncertain,
    FencingUnavailable,
    LeaseLost,
    LockKeyError,
    MaxHoldExceeded,
    NestedLeaseLost,
    OptionError,
    PayloadMismatch,
    Replaced,
    ResolutionError,
    ResolvedFailed,
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
from celery_singleflight.replaying import ReplayRefused, replay
from celery_singleflight.resolution import Resolution, UncertainExecution
from celery_singleflight.resolving import forget_steps, resolve, resolve_step
from celery_singleflight.step_errors import PayloadChanged, StepError, StepResultUnavailable, StepUncertain
from celery_singleflight.steps import CurrentStep, current_step
from celery_singleflight.task import SingleflightTask

__all__ = (
    "Cause",
    "ConfigurationError",
    "Contended",
    "CurrentStep",
    "Cursor",
    "DeadLettered",
    "Execution",
    "ExecutionKeyReused",
    "ExecutionUncertain",
    "FencingUnavailable",
    "Lease",
    "LeaseLost",
    "LockKeyError",
    "MaxHoldExceeded",
    "NestedLeaseLost",
    "OptionError",
    "Outcome",
    "PayloadChanged",
    "PayloadMismatch",
    "Replaced",
    "ReplayRefused",
    "Resolution",
    "ResolutionError",
    "ResolvedFailed",
    "ResultUnavailable",
    "ScriptError",
    "SingleflightError",
    "SingleflightTask",
    "Skipped",
    "StaleToken",
    "StepError",
    "StepResultUnavailable",
    "StepUncertain",
    "StoreUnavailable",
    "UncertainExecution",
    "WaitTimeout",
    "current_execution",
    "current_lease",
    "current_step",
    "forget_steps",
    "lock",
    "replay",
    "resolve",
    "resolve_step",
)
__version__ = "0.1.0"

connect_hooks()
