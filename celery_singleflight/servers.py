"""From the URL of a store to its connections."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import redis
import redis.cluster
import redis.sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_singleflight.connection import ClientConnections, Connections, DirectConnections
from celery_singleflight.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ("connect", "without_password")

#: Seconds. A store that has not answered by then is asked again on a new connection.
_TIMEOUTS: Final = {"socket_timeout": 2.0, "socket_connect_timeout": 1.0}
#: Celery's spellings of a URL scheme, and redis-py's.
_SCHEMES: Final = {"redis": "redis", "rediss": "rediss", "unix": "unix", "socket": "unix", "redis+socket": "unix"}


def connect(url: str, options: Mapping[str, Any]) -> Connections:
    """Return the connections for a store URL; nothing is opened yet.

    `options` are keyword arguments of a redis-py connection (time-outs in seconds), and `master_name` for Sentinel.
    Raises `ConfigurationError` for a URL that is not redis://, rediss://, unix://, redis+cluster:// or sentinel://, and for an
    option that no connection has.
    """
    settings = {**_TIMEOUTS, **options}
    master = settings.pop("master_name", None)
    scheme, _, rest = url.partition("://")
    if scheme.endswith("+cluster"):
        cluster_url = f"{scheme.removesuffix('+cluster')}://{rest}"
        return ClientConnections(lambda: redis.cluster.RedisCluster.from_url(cluster_url, **settings), spans_slots=False)
    settings["retry"] = Retry(NoBackoff(), 0)
    try:
        if scheme == "sentinel":
            return _direct(_sentinel_pool(url, master, settings))
        if scheme in _SCHEMES:
            first = rest.split(";", 1)[0]
            if scheme in ("redis", "rediss"):
                int(urlsplit(f"{scheme}://{first}").path.strip("/") or 0)  # redis-py would take any other text for database 0
            return _direct(redis.ConnectionPool.from_url(_from_celery(_SCHEMES[scheme], first), **settings))
    except (ValueError, redis.RedisError) as error:
        # What the parser says may quote a part of the password.
        raise ConfigurationError(
            f"singleflight_url {without_password(url)} cannot be used: expected "
            "scheme://[user:password@]host[:port]/[database][?option=value], with special characters percent-encoded"
        ) from error
    raise ConfigurationError(
        f"singleflight_url {without_password(url)} cannot be used: expected redis://, rediss://, unix://, "
        "redis+cluster:// or sentinel://"
    )


def _direct(pool: redis.ConnectionPool) -> DirectConnections:
    try:
        pool.make_connection()  # it opens nothing, and says now what the first script would say
    except TypeError as error:
        raise ConfigurationError(
            "the arguments of singleflight_url and singleflight_transport_options: expected those of a redis-py connection, "
            f"got one that it does not take: {str(error).rpartition(' ')[2]}"
        ) from error
    return DirectConnections(pool)


def without_password(url: str) -> str:
    """Return the URL as it may be shown."""
    shown = re.sub(r"(password=)[^&]*", r"\1…", url)
    return re.sub(r"://.*@", "://…@", shown)


def _from_celery(scheme: str, rest: str) -> str:
    """Return a redis-py URL for one of Celery's, whose query spells some arguments in another way."""
    base, _, query = rest.partition("?")
    arguments = dict(parse_qsl(query))
    if "virtual_host" in arguments:
        arguments["db"] = arguments.pop("virtual_host")
    if "ssl_cert_reqs" in arguments:
        arguments["ssl_cert_reqs"] = arguments["ssl_cert_reqs"].removeprefix("CERT_").lower()
    return f"{scheme}://{base}" + (f"?{urlencode(arguments)}" if arguments else "")


def _sentinel_pool(url: str, master: str | None, settings: dict[str, Any]) -> redis.ConnectionPool:
    if not master:
        raise ConfigurationError(
            "a sentinel:// URL needs the name of the primary: singleflight_transport_options = {'master_name': …}"
        )
    servers = [urlsplit(part) for part in url.split(";") if part]
    first = servers[0]
    login = {
        "username": unquote(first.username) if first.username else None,
        "password": unquote(first.password) if first.password else None,
        "db": int(first.path.strip("/") or 0),
    }
    sentinel_settings = {**_TIMEOUTS, "retry": settings["retry"], **(settings.pop("sentinel_kwargs", None) or {})}
    sentinel = redis.sentinel.Sentinel(
        [(server.hostname, server.port or 26379) for server in servers], sentinel_kwargs=sentinel_settings, **settings
    )
    pool: redis.ConnectionPool = redis.sentinel.SentinelConnectionPool(master, sentinel, **{**login, **settings})
    return pool
