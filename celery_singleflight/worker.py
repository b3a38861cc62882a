"""The worker's main process: an owner token for each delivery."""

from __future__ import annotations

from typing import Any

from kombu.utils.imports import symbol_by_name

from celery_singleflight import headers as header
from celery_singleflight.trigger import new_owner

__all__ = ("RequestClass",)


class RequestClass:
    """The `Request` attribute of a protected task: the user's own request class, or Celery's, with an owner token.

    Made when the worker first asks for it, so that publishers never import the worker.
    """

    def __init__(self, base: Any = "celery.worker.request:Request") -> None:
        self.base = base
        self._made: type | None = None

    def __get__(self, instance: object, owner: type | None = None) -> type:
        if self._made is None:
            base = symbol_by_name(self.base)
            self._made = type(base.__name__, (_OwnerPerDelivery, base), {"__module__": base.__module__})
        return self._made


class _OwnerPerDelivery:
    """Mints the owner token of a delivery where the main process can release by it, and hands it to the pool."""

    def __init__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(message, *args, **kwargs)  # type: ignore[call-arg]
        eventer = self.eventer  # type: ignore[attr-defined]
        request_dict = self.request_dict  # type: ignore[attr-defined]
        # Properties do not travel on with a requeued message, so the token stays with this delivery.
        request_dict["properties"] = {
            **(request_dict.get("properties") or {}),
            header.OWNER: new_owner(),
            header.SERIALIZER: message.content_type,
            header.EVENTS: bool(eventer and eventer.enabled),
        }
