"""Which run has published a message: a header of the message, and what its own run sees of it."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ("Cause",)


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
