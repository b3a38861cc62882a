"""Handing on: the messages of those who are next, published by whoever has made room for them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from celery_singleflight.courier import has_front
from celery_singleflight.message import publish_again

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery import Celery

    from celery_singleflight.claims import Handout

__all__ = ("hand_on",)

logger = logging.getLogger(__name__)


def hand_on(app: Celery, calls: Sequence[Handout], *, at_end: bool = False) -> None:
    """Publish messages that the store has told to publish, as `publish_again` does.

    Raises nothing: what is not published now, a sweeper publishes.
    """
    # Where each goes before the others, the first is published last.
    for call in reversed(calls) if calls and not at_end and has_front(app) else calls:
        try:
            publish_again(app, call, at_end=at_end)
        except Exception:
            logger.exception("the message of a waiting trigger could not be published; a sweeper tries again")
