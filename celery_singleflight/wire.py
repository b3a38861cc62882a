"""Commands and replies in version 2 of the Redis protocol, as they go over a socket that redis-py has opened.

A run makes two calls, and a client's general parser costs more than all else the package does in a small task.
"""

from __future__ import annotations

import functools
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from socket import socket

    from celery_singleflight.script import Value

__all__ = ("ReplyError", "exchange", "pack")

_PART: Final = b"$%d\r\n%b\r\n"
_CHUNK: Final = 1 << 16


class ReplyError(Exception):
    """What the server says in place of a reply; a value, unless it is raised."""


def pack(command: str, script: str, keys: int, values: Sequence[Value]) -> bytes:
    """Return the command that runs a script, as it is sent."""
    words = [value.encode() if type(value) is str else _bytes(value) for value in values]
    return _frame(command, script, keys, len(words)) % tuple(chain.from_iterable(zip(map(len, words), words, strict=True)))


def exchange(line: socket, packed: bytes, replies: int) -> list[Any]:
    """Send commands and return as many replies; one that failed is its `ReplyError`.

    Raises `OSError` as the socket does. After any exception an unread reply may follow, and the socket is of no use.
    """
    line.sendall(packed)
    received = b""
    while True:
        try:
            more = line.recv(_CHUNK)
        except TimeoutError as error:
            raise TimeoutError(f"no reply within {line.gettimeout()} s") from error
        if not more:
            raise ConnectionResetError("the server has closed the connection")
        received = received + more if received else more
        answers = _read(received, replies)
        if answers is not None:
            return answers


@functools.lru_cache(maxsize=64)
def _frame(command: str, script: str, keys: int, values: int) -> bytes:
    """Return the command with a place for the length and the bytes of each value."""
    head = [command.encode(), script.encode(), b"%d" % keys]
    return (
        b"*%d\r\n" % (values + len(head))
        + b"".join(_PART % (len(word), word.replace(b"%", b"%%")) for word in head)
        + _PART * values
    )


def _bytes(value: Value) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _read(received: bytes, replies: int) -> list[Any] | None:
    """Return that many replies, or None while some of their bytes are still to come."""
    answers: list[Any] = []
    at = 0
    while len(answers) < replies:
        answer, at = _reply(received, at)
        if at < 0:
            return None
        answers.append(answer)
    return answers


def _reply(received: bytes, at: int) -> tuple[Any, int]:
    """Return the reply that begins there and where it ends, which is before the beginning when it does not end here."""
    end = received.find(b"\r\n", at)
    if end < 0:
        return None, -1
    kind, text = received[at], received[at + 1 : end]
    at = end + 2
    if kind == ord("$"):
        end = at + int(text)
        return received[at:end], end + 2 if len(received) >= end + 2 else -1
    if kind == ord(":"):
        return int(text), at
    if kind == ord("-"):
        return ReplyError(text.decode(errors="replace")), at
    if kind == ord("+"):
        return text, at
    values: list[Any] = []
    for _ in range(int(text)):
        value, at = _reply(received, at)
        if at < 0:
            break
        values.append(value)
    return values, at
