"""Handing on: the messages of those who are next, published by whoever has made room for them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from celery_singleflight.courier import has_front
from celery_singleflight.message import publish_again
from celery_singleflight.slots import may_go_first

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery import Celery

    from celery_singleflight.claims import Handout

__all__ = ("hand_on",)

logger = logging.getLogger(__name__)


def hand_on(app: Celery, calls: Sequence[Handout], *, is_called: bool = True) -> None:
    """Publish messages that the store has told to publish, as `publish_again` does.

    Raises nothing: what is not published now, a sweeper publishes.
    """
    goes_first = bool(calls) and is_called and has_front(app) and may_go_first()
    # Where each goes before the others, the first is published last.
    for call in reversed(calls) if goes_first else calls:
        try:
            publish_again(app, call, is_called=is_called, at_end=not goes_first)
        except Exception:
            logger.exception("the message of a waiting trigger could not be published; a sweeper tries again")
