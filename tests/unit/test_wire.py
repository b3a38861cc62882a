"""Commands and replies as bytes: the commands are redis-py's, and a reply is read however its bytes arrive."""

from __future__ import annotations

import socket
import threading

import pytest
from hypothesis import given, strategies as st
from redis import Connection

from celery_singleflight.wire import ReplyError, exchange, pack

values = st.lists(st.text() | st.binary() | st.integers(-(2**63), 2**63 - 1), max_size=12)


@given(st.text(), st.integers(0, 40), values)
def test_a_command_is_what_redis_py_would_send(script, keys, given_values):
    theirs = b"".join(Connection().pack_command("EVAL", script, keys, *given_values))
    assert pack("EVAL", script, keys, given_values) == theirs


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    ours.settimeout(5)
    yield ours, theirs
    ours.close()
    theirs.close()


def encoded(reply) -> bytes:
    if isinstance(reply, ReplyError):
        return b"-%b\r\n" % str(reply).encode()
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    return b"*%d\r\n" % len(reply) + b"".join(map(encoded, reply))


def told(reply):
    return str(reply) if isinstance(reply, ReplyError) else reply


scalars = st.binary(max_size=40) | st.integers(-(2**63), 2**63 - 1)
replies = st.lists(scalars | st.lists(scalars, max_size=6) | st.just(ReplyError("ERR no")), min_size=1, max_size=4)


@given(replies, st.data())
def test_replies_are_read_however_their_bytes_arrive(expected, data):
    text = b"".join(map(encoded, expected))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    class Line:
        def sendall(self, packed):
            assert packed == b"command"

        def recv(self, size):
            while not (piece := pieces.pop(0)):
                pass
            return piece

    assert list(map(told, exchange(Line(), b"command", len(expected)))) == list(map(told, expected))


def test_a_status_is_its_text(ends):
    ours, theirs = ends
    theirs.sendall(b"+OK\r\n")
    assert exchange(ours, b"", 1) == [b"OK"]


def test_a_long_reply_is_read_to_its_end(ends):
    ours, theirs = ends
    body = bytes(range(256)) * 4096
    writer = threading.Thread(target=theirs.sendall, args=(encoded([body, 1]),))
    writer.start()
    assert exchange(ours, b"", 1) == [[body, 1]]
    writer.join()


def test_a_closed_connection_is_no_empty_reply(ends):
    ours, theirs = ends
    theirs.sendall(b"$5\r\nab")
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError, match="closed"):
        exchange(ours, b"", 1)


def test_a_reply_that_does_not_come_is_waited_for_as_long_as_the_socket_says(ends):
    ours, _ = ends
    ours.settimeout(0.01)
    with pytest.raises(TimeoutError, match=r"no reply within 0.01 s"):
        exchange(ours, b"", 1)
