"""Where a trigger comes from: headers of its message, and what its run sees of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from celery_singleflight import headers as header

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ("Cause", "history_of")


class Cause(NamedTuple):
    """The run whose body has published a trigger."""

    execution_key: str
    run_id: str
    attempt: int

    @classmethod
    def of_header(cls, value: Any) -> Cause | None:
        """Read the header of a message; None where there is none, or one that is not ours to read."""
        try:
            execution_key, run_id, attempt = (value[name] for name in cls._fields)
            return cls(str(execution_key), str(run_id), int(attempt))
        except (KeyError, TypeError, ValueError):
            return None


def history_of(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an execution is told of where its trigger comes from."""
    cause = headers.get(header.CAUSED_BY)
    return {"caused_by": Cause.of_header(cause) if cause else None, "is_forced": headers.get(header.FORCED) is True}
