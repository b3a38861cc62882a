"""The one worker of a broker's matrix."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import twin_app
from nodes import redis_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def start_twins(start: Callable[..., Any], url: str, broker: str | None = None) -> Iterator[Any]:
    """Start a worker of the twins, with results and store on Redis, and the broker there too unless another is given."""
    settings = redis_settings(
        url,
        result_extended=True,
        task_serializer="json",
        accept_content=["json", "yaml", "msgpack", "pickle"],
    )
    if broker:
        settings["broker_url"] = broker
    place = start(settings, "-E", app_module=twin_app, workers=1, concurrency=3)
    place.plain = {}
    try:
        yield place
    finally:
        # Results that nobody has waited for to their end: collected later, they would look for a server that is gone.
        for pending in place.app.backend._pending_results:
            pending.clear()
