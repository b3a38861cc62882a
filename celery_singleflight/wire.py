"""Commands and replies in version 2 of the Redis protocol, as they go over a socket that redis-py has opened.

A run makes two calls, and a client's general parser costs more than all else the package does in a small task.
"""

from __future__ import annotations

import functools
import select
import time
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from socket import socket

    from celery_singleflight.script import Value

__all__ = ("ReplyError", "command", "exchange", "pack", "wait_for_reply")

_CHUNK: Final = 1 << 16
_TABLED: Final = 2048
#: What stands between two values, by the length of the second.
_LENGTHS: Final = [f"\r\n${length}\r\n" for length in range(_TABLED)]


class ReplyError(Exception):
    """What the server says in place of a reply; a value, unless it is raised."""


def pack(command: str, script: str, keys: int, values: Sequence[Value]) -> bytes:
    """Return the command that runs a script, as it is sent."""
    head, frame = _frames(command, script, keys, len(values))
    parts = [head]
    for value in values:
        if type(value) is bytes:
            break
        text = str(value)
        length = len(text)
        parts += (_LENGTHS[length] if length < _TABLED else f"\r\n${length}\r\n", text)
    else:
        packed = "".join(parts) + "\r\n"
        if packed.isascii():  # else a text has more bytes than characters
            return packed.encode()
    words = [value if isinstance(value, bytes) else str(value).encode() for value in values]
    return frame % tuple(chain.from_iterable(zip(map(len, words), words, strict=True)))


def command(*words: Value) -> bytes:
    """Return any other command, as it is sent."""
    sent = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(sent) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in sent)


def exchange(line: socket, packed: bytes, replies: int) -> list[Any]:
    """Send commands, if any are still to be sent, and return as many replies; one that failed is its `ReplyError`.

    Raises `OSError` as the socket does. After any exception an unread reply may follow, and the socket is of no use.
    """
    if packed:
        line.sendall(packed)
    received = _receive(line)
    while True:
        answers, wanted = _read(received, replies)
        if not wanted:
            return answers
        # What is known to be wanted is read before the reply is looked at again: a big one comes in many pieces.
        pieces, length = [received], len(received)
        while length < wanted:
            pieces.append(_receive(line))
            length += len(pieces[-1])
        received = b"".join(pieces)


def wait_for_reply(line: socket, *, goes_on: Callable[[], bool], look: float, seconds: float) -> bool:
    """Wait for the first byte of a reply that takes so many seconds at most, beside what the socket's own timeout gives it.

    Returns False when `goes_on`, which is asked every `look` seconds, was false. Raises `TimeoutError`.
    """
    patience = line.gettimeout()
    until = inf if patience is None else time.monotonic() + seconds + patience
    waiting = select.poll()
    waiting.register(line, select.POLLIN)
    while not waiting.poll(look * 1000):
        if not goes_on():
            return False
        if time.monotonic() > until:
            raise TimeoutError(f"no reply within {seconds + (patience or 0.0)} s")
    return True


def _receive(line: socket) -> bytes:
    try:
        received = line.recv(_CHUNK)
    except TimeoutError as error:
        raise TimeoutError(f"no reply within {line.gettimeout()} s") from error
    if not received:
        raise ConnectionResetError("the server has closed the connection")
    return received


@functools.lru_cache(maxsize=64)
def _frames(command: str, script: str, keys: int, values: int) -> tuple[str, bytes]:
    """Return what comes before the values, and the command with a place for the length of each value and the value."""
    words = (command, script, str(keys))
    head = f"*{values + len(words)}" + "".join(f"\r\n${len(word.encode())}\r\n{word}" for word in words)
    return head, head.replace("%", "%%").encode() + b"\r\n$%d\r\n%b" * values + b"\r\n"


def _read(received: bytes, replies: int) -> tuple[list[Any], int]:
    """Return that many replies and 0, or how many bytes are wanted at least before they can be read."""
    answers: list[Any] = []
    at = 0
    while len(answers) < replies:
        answer, at = _reply(received, at)
        if at < 0:
            return answers, -at
        answers.append(answer)
    return answers, 0


def _reply(received: bytes, at: int) -> tuple[Any, int]:
    """Return the reply that begins there and where it ends; minus the bytes that it takes, when it is not all there."""
    end = received.find(b"\r\n", at)
    if end < 0:
        return None, -len(received) - 1
    kind, text = received[at], received[at + 1 : end]
    at = end + 2
    if text == b"-1" and kind != ord(":"):
        return None, at
    if kind == ord("$"):
        end = at + int(text)
        return received[at:end], end + 2 if len(received) >= end + 2 else -end - 2
    if kind == ord("*"):
        return _list(received, at, int(text))
    if kind == ord("-"):
        return ReplyError(text.decode(errors="replace")), at
    return int(text) if kind == ord(":") else text, at


def _list(received: bytes, at: int, length: int) -> tuple[list[Any], int]:
    values: list[Any] = []
    for _ in range(length):
        value, at = _reply(received, at)
        if at < 0:
            break
        values.append(value)
    return values, at
