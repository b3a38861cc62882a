"""From the URL of a store to its connections."""

from __future__ import annotations

import inspect
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import redis
import redis.cluster
import redis.exceptions
import redis.sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_singleflight.connection import PAUSES, ClientConnections, Connections, DirectConnections
from celery_singleflight.errors import ConfigurationError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ("client_beside", "connect", "without_password")

#: Seconds. A store that has not answered by then is asked again on a new connection.
_TIMEOUTS: Final = {"socket_timeout": 2.0, "socket_connect_timeout": 1.0}
_OF_A_CLUSTER: Final = inspect.signature(redis.cluster.RedisCluster.__init__).parameters
#: In this version of the protocol nothing comes but replies.
_PROTOCOL: Final = {"protocol": 2}
#: Celery's spellings of a URL scheme, and redis-py's.
_SCHEMES: Final = {"redis": "redis", "rediss": "rediss", "unix": "unix", "socket": "unix", "redis+socket": "unix"}


def connect(url: str, options: Mapping[str, Any], *, pauses: Sequence[float] = PAUSES) -> Connections:
    """Return the connections for a store URL; nothing is opened yet.

    `pauses` are the seconds before each attempt of a call.

    `options` are keyword arguments of a redis-py connection (time-outs in seconds), and `master_name` for Sentinel.
    Raises `ConfigurationError` for a URL that is not redis://, rediss://, unix://, redis+cluster:// or sentinel://, and for an
    option that no connection has.
    """
    settings = {**_PROTOCOL, **_TIMEOUTS, **options}
    _check_options(settings)
    master = settings.pop("master_name", None)
    scheme, _, rest = url.partition("://")
    try:
        if scheme.endswith("+cluster"):
            cluster_url = _from_celery(scheme.removesuffix("+cluster"), rest)
            _database(cluster_url)
            own = {name: value for name, value in settings.items() if name not in _OF_A_CLUSTER}
            _checked(redis.ConnectionPool.from_url(cluster_url, **own))  # says what is wrong before the first script does
            return ClientConnections(
                lambda: redis.cluster.RedisCluster.from_url(cluster_url, **settings), spans_slots=False, pauses=pauses
            )
        settings["retry"] = Retry(NoBackoff(), 0)
        if scheme == "sentinel":
            return DirectConnections(_checked(_sentinel_pool(url, master, settings)), pauses)
        if scheme in _SCHEMES:
            first = rest.split(";", 1)[0]
            if scheme in ("redis", "rediss"):
                _database(f"{scheme}://{first}")
            server = _from_celery(_SCHEMES[scheme], first)
            return DirectConnections(_checked(redis.ConnectionPool.from_url(server, **settings)), pauses)
    except (ValueError, redis.RedisError):
        # What the parser says may quote a part of the password.
        raise ConfigurationError(
            f"the store at {without_password(url)} cannot be used: expected "
            "scheme://[user:password@]host[:port]/[database][?option=value], special characters percent-encoded; its options "
            "and singleflight_transport_options must have values that redis-py takes"
        ) from None
    raise ConfigurationError(
        f"the store at {without_password(url)} cannot be used: expected redis://, rediss://, unix://, "
        "redis+cluster:// or sentinel://"
    )


@contextmanager
def client_beside(connections: Connections) -> Iterator[Any]:
    """Yield a redis-py client for the same server: operators ask for what no script does, such as which keys there are.

    Raises `ConfigurationError` for options that it does not take; `StoreUnavailable` for whatever keeps the server from
    answering, here or in the block.
    """
    client: Any = None
    try:
        if isinstance(connections, ClientConnections):
            client = connections._make()
        elif isinstance(connections, DirectConnections):
            client = redis.Redis(connection_pool=connections._pool)  # noqa: SLF001, of the package
        else:
            raise TypeError(f"expected the connections of `connect`, got {connections!r}")
        yield client
    except redis.sentinel.MasterNotFoundError:
        raise StoreUnavailable("the store does not answer: no Sentinel names a primary") from None  # it may quote a password
    except (OSError, redis.RedisError, redis.exceptions.RedisClusterException) as error:
        raise StoreUnavailable(f"the store does not answer: {error}") from error
    finally:
        if client is not None:
            client.close()


def _check_options(settings: Mapping[str, Any]) -> None:
    if "retry" in settings:
        raise ConfigurationError(
            "singleflight_transport_options: there is no retry: a script call has attempts of its own, within about a quarter "
            "of a second plus the time-outs"
        )
    for name in _TIMEOUTS:
        value = settings[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise ConfigurationError(f"singleflight_transport_options, {name}: expected seconds above 0, got {value!r}")


def _database(url: str) -> int:
    """Return the database of a URL, where redis-py would take any other text for 0. Raises `ValueError`."""
    return int(urlsplit(url).path.strip("/") or 0)


def _checked(pool: redis.ConnectionPool) -> redis.ConnectionPool:
    try:
        # It opens nothing, and says now what the first script would say.
        pool.connection_class(**pool.connection_kwargs)
    except TypeError as error:
        raise _unknown_argument(error) from error
    return pool


def _unknown_argument(error: TypeError) -> ConfigurationError:
    return ConfigurationError(
        "the arguments of singleflight_url and singleflight_transport_options: expected those of a redis-py connection, "
        f"got one that it does not take: {str(error).rpartition(' ')[2]}"
    )


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
        "db": _database(servers[0].geturl()),
    }
    sentinel_settings = {**_PROTOCOL, **_TIMEOUTS, "retry": settings["retry"], **(settings.pop("sentinel_kwargs", None) or {})}
    addresses = [(server.hostname, server.port or 26379) for server in servers]
    try:
        sentinel = redis.sentinel.Sentinel(addresses, sentinel_kwargs=sentinel_settings, **settings)
    except TypeError as error:
        raise _unknown_argument(error) from error
    pool: redis.ConnectionPool = redis.sentinel.SentinelConnectionPool(master, sentinel, **{**login, **settings})
    return pool
