"""The one store and heartbeat of an app in this process, made from the Celery settings at first use."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, ref

from celery_singleflight.connection import BRISK_PAUSES
from celery_singleflight.errors import ConfigurationError
from celery_singleflight.heartbeat import Heartbeat
from celery_singleflight.keys import KeySpace
from celery_singleflight.servers import client_beside, connect
from celery_singleflight.store import Store

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from celery import Celery

__all__ = ("Coordination", "check_store_settings", "coordination", "coordinations")

_REDIS: Final = ("redis", "rediss", "socket", "sentinel")
#: Seconds that a publisher waits for the store, which may be away: the trigger is sent all the same.
_AT_PUBLISH: Final = {"socket_timeout": 1.0, "socket_connect_timeout": 0.5}
#: What a Celery transport option means to us too.
_SHARED_OPTIONS: Final = ("master_name", "sentinel_kwargs")


class Coordination:
    """The store of one app, and the heartbeat of this process on it."""

    def __init__(self, app: Celery) -> None:
        self._app = ref(app)
        self._server, self._keys = _server(app), KeySpace(_prefix(app))
        self.store = Store(connect(*self._server), self._keys)
        self.heartbeat = Heartbeat(self.store)

    @property
    def app(self) -> Celery:
        """The app whose settings it was made from."""
        app = self._app()
        if app is None:
            raise ReferenceError("the app of this coordination is gone")
        return app

    @cached_property
    def brisk_store(self) -> Store:
        """The same store for an event loop, which cannot wait."""
        return Store(connect(*self._server, pauses=BRISK_PAUSES), self._keys)

    @cached_property
    def publishing_store(self) -> Store:
        """The same store for publishers, who do not depend on it."""
        url, options = self._server
        return Store(connect(url, {**_AT_PUBLISH, **options}, pauses=BRISK_PAUSES), self._keys)

    def client(self) -> AbstractContextManager[Any]:
        """Return a redis-py client of the store, for what no script does; raises `StoreUnavailable` in the block."""
        return client_beside(connect(*self._server, pauses=BRISK_PAUSES))


_coordinations: Final[WeakKeyDictionary[Celery, Coordination]] = WeakKeyDictionary()
_guard: Final = threading.Lock()


def coordination(app: Celery) -> Coordination:
    """Return the app's coordination. Raises `ConfigurationError` when its settings name no usable store."""
    found = _coordinations.get(app)
    if found is None:
        with _guard:
            found = _coordinations.get(app) or _coordinations.setdefault(app, Coordination(app))
    return found


def coordinations() -> list[Coordination]:
    """Return those in use in this process."""
    return list(_coordinations.values())


def check_store_settings(app: Celery) -> None:
    """Refuse settings of the store that are wrong in themselves. Raises `ConfigurationError`.

    An app without any store is let be: a publisher needs none.
    """
    _prefix(app)
    _transport_options(app)
    if app.conf.get("singleflight_url"):
        connect(*_server(app))


def _prefix(app: Celery) -> str:
    prefix = app.conf.get("singleflight_key_prefix") or "sf"
    if not isinstance(prefix, str) or set("{}") & set(prefix):
        raise ConfigurationError(f"setting singleflight_key_prefix: expected a text without braces, got {prefix!r}")
    return prefix


def _transport_options(app: Celery) -> dict[str, Any]:
    options = app.conf.get("singleflight_transport_options") or {}
    if not isinstance(options, Mapping):
        raise ConfigurationError(f"setting singleflight_transport_options: expected a mapping, got {options!r}")
    return dict(options)


def _server(app: Celery) -> tuple[str, dict[str, Any]]:
    """Return the store's URL and connection options: the app's own setting, else its Redis result backend or broker."""
    conf = app.conf
    options = _transport_options(app)
    url = conf.get("singleflight_url")
    if url:
        return str(url), options
    candidates = (
        (conf.result_backend, conf.get("result_backend_transport_options"), conf.get("redis_backend_use_ssl")),
        (conf.broker_url, conf.get("broker_transport_options"), conf.get("broker_use_ssl")),
    )
    for servers, transport, use_ssl in candidates:
        candidate = servers[0] if isinstance(servers, list | tuple) and servers else servers
        if isinstance(candidate, str) and candidate.partition("://")[0].partition("+")[0] in _REDIS:
            taken = {name: transport[name] for name in _SHARED_OPTIONS if transport and name in transport}
            if isinstance(use_ssl, Mapping):
                taken.update(use_ssl)
            if use_ssl and candidate.startswith("redis://"):
                candidate = "rediss" + candidate.removeprefix("redis")
            return candidate, {**taken, **options}
    raise ConfigurationError(
        "there is no store for leases: neither result_backend nor broker_url is a Redis URL; expected the setting "
        "singleflight_url, a URL such as redis://host:6379/0"
    )
