"""Asking workers over Celery's remote control what they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from celery_singleflight.binding import bindings_of
from celery_singleflight.findings import Signs

if TYPE_CHECKING:
    from celery import Celery

    from celery_singleflight.findings import Holder, Lock

__all__ = ("ask_workers", "is_worker", "signs_of")

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


def signs_of(app: Celery, lock: Lock) -> list[Signs]:
    """Return the signs of life of each holder of a lock, in its order."""
    workers = sorted({holder.worker for holder in lock.holders if is_worker(holder)})
    active = ask_workers(app, workers) if workers else None
    ttl = _lease_ttl(app, lock.lock_name)
    signs = []
    for holder in lock.holders:
        is_asked = active is not None and is_worker(holder)
        ids = active.get(holder.worker) if active is not None else None
        renewed = ttl - holder.remaining if ttl and is_worker(holder) and holder.state != "ended" else None
        signs.append(
            Signs(
                lease_is_live=holder.state == "live",
                renewed_ago=None if renewed is None else max(renewed, 0.0),
                worker_answers=ids is not None if is_asked else None,
                worker_runs_it=holder.task_id in ids if ids is not None else None,
            )
        )
    return signs


def _lease_ttl(app: Celery, lock_name: str | None) -> float | None:
    """Return the lease TTL of the tasks of a lock name, if this app has some and they agree."""
    ttls = {b.options.lease_ttl for b in bindings_of(app) if (b.options.lock_name or b.name) == lock_name}
    return ttls.pop() if len(ttls) == 1 else None
