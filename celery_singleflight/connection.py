"""Connections to the store: how a script call goes out and its reply comes back.

A script call goes out as one packed EVALSHA on a connection kept by this process, without redis-py's pool, retry and metrics
layers around it: they cost as much as the call itself. A cluster keeps redis-py's own routing.
"""

from __future__ import annotations

import os
import random
import re
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol
from weakref import WeakSet

from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    ConnectionError as RedisConnectionError,
    MasterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError as RedisTimeoutError,
    TryAgainError,
)
from redis.sentinel import MasterNotFoundError

from celery_singleflight.errors import ConfigurationError, ScriptError, StoreUnavailable
from celery_singleflight.wire import ReplyError, command, exchange, pack, wait_for_reply

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from redis import ConnectionPool

    from celery_singleflight.script import Script, Value

__all__ = ("BRISK_PAUSES", "PAUSES", "ClientConnections", "Connections", "DirectConnections")

#: Seconds before each attempt, jittered. redis-py's own default costs 3.2 s per call on a dead server.
PAUSES: Final = (0.0, 0.05, 0.2)
#: The same where an event loop waits: one more attempt only, in case the first met a connection that had been closed.
BRISK_PAUSES: Final = (0.0, 0.01)

_TRANSIENT: Final = (
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    OSError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisConnectionError,
    RedisTimeoutError,
    TryAgainError,
)
#: Seconds between two questions whether to go on waiting.
_LOOK: Final = 0.02
#: By its first word, also where Redis 6.2 wraps it into an error of the script.
_TRANSIENT_REPLIES: Final = re.compile(
    r"(^|: -)(BUSY|CLUSTERDOWN|LOADING|MASTERDOWN|MISCONF|NOAUTH|NOREPLICAS|OOM|READONLY|TRYAGAIN|UNBLOCKED)\b"
)


class Connections(Protocol):
    """What the store needs of a server: that it runs scripts."""

    #: Whether the keys of one call may lie in several hash slots.
    spans_slots: bool

    def run(self, script: Script, keys: int, values: Sequence[Value]) -> Any:
        """Run one script and return its raw reply. A reply that got lost is asked for again: scripts are repeatable.

        Raises `StoreUnavailable` when every attempt failed, `ScriptError` when the script itself did.
        """

    def run_many(self, script: Script, keys: int, calls: Sequence[Sequence[Value]]) -> list[Any]:
        """Run one script several times, in one exchange where possible.

        Returns the raw replies in order, and for a call that failed by itself its `ScriptError`. Raises `StoreUnavailable`.
        """

    def run_after(
        self, name: str, seconds: float, goes_on: Callable[[], bool], script: Script, keys: int, values: Sequence[Value]
    ) -> Any:
        """Take an element of a list, waiting for it for so many seconds, at most one; then run a script, in any case.

        Returns the raw reply; None when `goes_on`, which is asked every 20 ms, was false: then nobody knows whether the script
        has run. Raises `StoreUnavailable` at the first failure, after which nobody knows either, and `ScriptError` as `run`.
        """

    def close(self) -> None:
        """Close what is open; a later `run` connects again."""


class DirectConnections:
    """Connections to one server, or to the primary that Sentinel names. Safe in threads and across a fork."""

    spans_slots = True

    def __init__(self, pool: ConnectionPool, pauses: Sequence[float] = PAUSES) -> None:
        self._pool: Any = pool
        self._pauses = pauses
        self._idle: list[Any] = []
        _opened.add(self)

    def run(self, script: Script, keys: int, values: Sequence[Value]) -> Any:  # noqa: D102, as declared
        return _persist(self._run_once, self._pauses, script, keys, values)

    def run_many(self, script: Script, keys: int, calls: Sequence[Sequence[Value]]) -> list[Any]:  # noqa: D102
        def once(script: Script, keys: int, _: Sequence[Value]) -> list[Any]:
            return self._exchange(b"".join(pack("EVALSHA", script.sha, keys, values) for values in calls), len(calls))

        replies = _persist(once, self._pauses, script, keys, calls[0]) if calls else []
        for n, reply in enumerate(replies):
            if isinstance(reply, ReplyError):
                replies[n] = _or_error(self.run, script, keys, calls[n]) if _is_unknown(reply) else _failed(script, reply)
        return replies

    def run_after(  # noqa: D102
        self, name: str, seconds: float, goes_on: Callable[[], bool], script: Script, keys: int, values: Sequence[Value]
    ) -> Any:
        # The server goes on with what a client has sent when it has the element: there is no way there and back in between.
        packed = command("BLPOP", name, f"{seconds:.3f}") + pack("EVALSHA", script.sha, keys, values)
        try:
            answers = self._exchange(packed, 2, partial(wait_for_reply, goes_on=goes_on, look=_LOOK, seconds=seconds))
        except (*_TRANSIENT, RedisError, ReplyError) as error:
            _give_up(f"the store does not let wait for {name}", error)
        if not answers:
            return None
        reply = answers[1]
        return self.run(script, keys, values) if isinstance(reply, ReplyError) else reply

    def close(self) -> None:  # noqa: D102
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()

    def _run_once(self, script: Script, keys: int, values: Sequence[Value]) -> Any:
        reply = self._exchange(pack("EVALSHA", script.sha, keys, values), 1)[0]
        if isinstance(reply, ReplyError):
            if not _is_unknown(reply):
                raise reply
            reply = self._exchange(pack("EVAL", script.source, keys, values), 1)[0]
            if isinstance(reply, ReplyError):
                raise reply
        return reply

    def _exchange(self, packed: bytes, replies: int, wait: Callable[[Any], bool] | None = None) -> list[Any]:
        """Send calls and return their replies; none when `wait`, called with the socket then, did not wait for them.

        Raises `ReplyError` when the server cannot work now.
        """
        connection = self._take()
        try:
            line = connection._sock  # noqa: SLF001, as redis-py's own parsers do
            if wait is not None:
                line.sendall(packed)
                packed = b""
                if not wait(line):
                    connection.disconnect()
                    return []
            answers = exchange(line, packed, replies)
            _refuse_transient(answers)
        except BaseException as error:
            # Whatever interrupted the exchange, an unread reply must never answer the next call.
            connection.disconnect()
            if isinstance(error, OSError):
                self.close()  # what this connection went through, the idle ones did too
            raise
        self._idle.append(connection)
        return answers

    def _take(self) -> Any:
        try:
            return self._idle.pop()
        except IndexError:
            # Not by the pool, which counts every connection it ever made against `max_connections`.
            connection = self._pool.connection_class(**self._pool.connection_kwargs)
            connection.connect()  # here Sentinel is asked, which sending would not
            return connection


_opened: Final[WeakSet[DirectConnections]] = WeakSet()


def _leave_to_parent() -> None:
    """Close what a forked child has of its parent's: else the server takes a parent that has died for one that still waits."""
    for connections in _opened:
        connections.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


class ClientConnections:
    """A redis-py client that routes by itself: a cluster, or a fake in unit tests. Made at its first use."""

    def __init__(self, make: Callable[[], Any], *, spans_slots: bool, pauses: Sequence[float] = PAUSES) -> None:
        self.spans_slots = spans_slots
        self._pauses = pauses
        self._make = make
        self._client: Any = None

    def run(self, script: Script, keys: int, values: Sequence[Value]) -> Any:  # noqa: D102, as declared
        return _persist(self._run_once, self._pauses, script, keys, values)

    def run_many(self, script: Script, keys: int, calls: Sequence[Sequence[Value]]) -> list[Any]:  # noqa: D102
        return [_or_error(self.run, script, keys, values) for values in calls]

    def run_after(  # noqa: D102
        self, name: str, seconds: float, goes_on: Callable[[], bool], script: Script, keys: int, values: Sequence[Value]
    ) -> Any:
        until = time.monotonic() + seconds
        try:
            while (left := until - time.monotonic()) > 0 and self._opened().blpop([name], min(left, _LOOK)) is None:
                if not goes_on():
                    return None
        except (*_TRANSIENT, RedisError) as error:
            # What the server says of the list keeps no script from running.
            if isinstance(error, _TRANSIENT) or not isinstance(error, ResponseError):
                _give_up(f"the store does not let wait for {name}", error)
        return self.run(script, keys, values)

    def close(self) -> None:  # noqa: D102
        if self._client is not None:
            self._client.close()

    def _run_once(self, script: Script, keys: int, values: Sequence[Value]) -> Any:
        client = self._opened()
        try:
            return client.evalsha(script.sha, keys, *values)
        except NoScriptError:
            return client.eval(script.source, keys, *values)

    def _opened(self) -> Any:
        if self._client is None:
            try:
                self._client = self._make()
            except TypeError as error:
                raise ConfigurationError(f"setting singleflight_transport_options: {error}") from error
        return self._client


def _persist(
    once: Callable[[Script, int, Sequence[Value]], Any],
    pauses: Sequence[float],
    script: Script,
    keys: int,
    values: Sequence[Value],
) -> Any:
    failure: Exception | None = None
    for pause in pauses:
        if pause:
            time.sleep(random.uniform(pause / 2, pause))  # noqa: S311, jitter
        try:
            return once(script, keys, values)
        except _TRANSIENT as error:
            failure = error
        except (ReplyError, ResponseError) as error:
            if not _TRANSIENT_REPLIES.search(str(error)):
                raise _failed(script, error) from error
            failure = error
        except RedisError as error:
            failure = error
    return _give_up(f"the store did not run {script.name} in {len(pauses)} attempts", failure)


def _give_up(what: str, failure: Exception | None) -> NoReturn:
    if isinstance(failure, MasterNotFoundError):
        raise StoreUnavailable(f"{what}: no Sentinel names a primary") from None  # it may quote a password
    raise StoreUnavailable(f"{what}: {failure}") from failure


def _or_error(run: Callable[[Script, int, Sequence[Value]], Any], script: Script, keys: int, values: Sequence[Value]) -> Any:
    try:
        return run(script, keys, values)
    except ScriptError as error:
        return error


def _refuse_transient(answers: Sequence[Any]) -> None:
    for answer in answers:
        if isinstance(answer, ReplyError) and _TRANSIENT_REPLIES.search(str(answer)):
            raise answer


def _is_unknown(reply: ReplyError) -> bool:
    return str(reply).startswith("NOSCRIPT")


def _failed(script: Script, error: Exception) -> ScriptError:
    return ScriptError(f"script {script.name} failed: {error}")
