"""What a trigger says of its execution."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from celery_singleflight import headers as header
from celery_singleflight.claims import Terms

if TYPE_CHECKING:
    from collections.abc import Mapping

    from celery_singleflight.binding import Binding
    from celery_singleflight.claims import Record

__all__ = ("terms_of",)

#: The header that Celery's beat sets.
_FROM_BEAT: Final = "celery_beat_task"


def terms_of(binding: Binding, request: Any, record: Record, args: Any, kwargs: Mapping[str, Any]) -> Terms:
    """Return what the request of a task says of its execution. Raises as `Binding.payload` does."""
    options, headers = binding.options, request.headers or {}
    holds = options.uncertain_policy == "hold"
    source = headers.get(header.SOURCE) or ("beat" if headers.get(_FROM_BEAT) else "call")
    return Terms(
        payload=binding.payload(args, kwargs) if record.execution_key is not None else "",
        holds=holds,
        delays=options.reconcile_delays if holds and options.reconciler else (),
        source=_line(source),
        scheduled=_line(request.eta or ""),
        is_redelivered=bool((request.delivery_info or {}).get("redelivered")),
    )


def _line(value: Any) -> str:
    return " ".join(str(value).split())
