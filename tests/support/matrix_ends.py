"""How results end, in words that are the same for each kind of task."""

from __future__ import annotations

import re
from typing import Any

from matrix_axes import POLICIES

_KINDS = re.compile(rf"\b({'|'.join(['plain', 'protected', *POLICIES])})\.")


def end_of(result: Any, timeout: float = 30) -> dict[str, Any]:
    """Return how a result ended, as its caller sees it."""
    try:
        value = result.get(timeout=timeout)
    except Exception as error:  # noqa: BLE001, it is what is observed
        value = _KINDS.sub("kind.", f"{type(error).__name__}: {error}").replace(result.id, "ID")
    return {"state": result.state, "value": value}


def ends_of(*results: Any) -> list[dict[str, Any]]:
    """Return how several results ended, all of them published before the first is waited for."""
    return [end_of(result) for result in results]
