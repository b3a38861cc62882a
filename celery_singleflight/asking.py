"""Asking workers over Celery's remote control what they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from celery import Celery

    from celery_singleflight.findings import Holder

__all__ = ("ask_workers", "is_worker")

#: Seconds for which a worker may keep an operator waiting.
_PATIENCE: Final = 1.0


def is_worker(holder: Holder) -> bool:
    """Whether a Celery worker holds it, and no script or other process of that host."""
    return "@" in holder.worker


def ask_workers(app: Celery, workers: list[str]) -> dict[str, set[str]] | None:
    """Ask workers which triggers they run. Returns the answers of those that answer, None when the broker does not."""
    try:
        with app.connection_for_read() as connection:
            connection.ensure_connection(max_retries=1, timeout=_PATIENCE)
            answers = app.control.inspect(destination=workers, timeout=_PATIENCE, connection=connection).active() or {}
    except Exception:  # noqa: BLE001, whatever a broker's client raises
        return None
    return {worker: {request["id"] for request in requests} for worker, requests in answers.items()}
