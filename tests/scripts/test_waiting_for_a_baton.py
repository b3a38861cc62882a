"""`run_after`: a script that runs as soon as an element of a list is there, or when nobody has brought one for long enough."""

from __future__ import annotations

import threading
import time
import traceback
from typing import NamedTuple
from uuid import uuid4

import pytest
import redis
from cluster import Keyspace
from nodes import wait_until
from proxy import Proxy
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError

from celery_singleflight import ScriptError, StoreUnavailable
from celery_singleflight.connection import ClientConnections, DirectConnections
from celery_singleflight.script import load
from celery_singleflight.servers import connect

SETTLE = load("settle")
#: Of its own, so that emptying it takes nothing from others.
DATABASE = 13
#: Seconds that no test waits for.
LONG = 60.0


class Wait(NamedTuple):
    """A list to wait for, a record that the script writes to, and who looks on."""

    connections: DirectConnections | ClientConnections
    client: redis.Redis
    list: str
    record: str

    def bring(self, count=1):
        self.client.rpush(self.list, *["1"] * count)

    def has_run(self):
        return self.client.hget(self.record, "settled") == "1"

    def run_after(self, seconds=LONG, goes_on=lambda: True):
        places = [self.record, f"{self.record}:due"]
        return self.connections.run_after(self.list, seconds, goes_on, SETTLE, 2, [*places, "1", "member", "", ""])

    def run(self):
        return self.connections.run(SETTLE, 2, [self.record, f"{self.record}:due", "1", "member", "", ""])

    def blocked(self):
        """How many connections wait for an element; of other tests there are none."""
        every = {"target_nodes": "all"} if isinstance(self.client, redis.RedisCluster) else {}
        found = self.client.info("clients", **every)
        return sum(of_node["blocked_clients"] for of_node in (found.values() if every else [found]))


def wait_with(connections, client):
    name = f"{{sf-{uuid4().hex[:8]}}}"
    client.hset(f"{name}:record", "by", "1")
    return Wait(connections, client, f"{name}:list", f"{name}:record")


@pytest.fixture(params=["single", "cluster"])
def wait(request):
    """A server to wait at: as it is reached directly, and a cluster by redis-py's client."""
    single = request.param == "single"
    url = f"{request.getfixturevalue('valkey').url}/{DATABASE}" if single else request.getfixturevalue("cluster").url
    keyspace, connections = Keyspace.at(url), connect(url, {})
    yield wait_with(connections, keyspace.client)
    connections.close()
    keyspace.clear()
    keyspace.close()


@pytest.fixture
def proxy(valkey):
    proxy = Proxy("127.0.0.1", valkey.port)
    yield proxy
    proxy.close()


@pytest.fixture(params=["direct", "client"])
def far(request, proxy, valkey):
    """A server to wait at by way of a proxy, by connections that give up after 0.2 s of silence; already connected."""
    url, options = f"{proxy.url_for(valkey.url)}/{DATABASE}", {"socket_timeout": 0.2, "retry": Retry(NoBackoff(), 0)}
    if request.param == "direct":
        connections = connect(url, {"socket_timeout": 0.2})
    else:
        connections = ClientConnections(lambda: redis.Redis.from_url(url, **options), spans_slots=True)
    keyspace = Keyspace.at(f"{valkey.url}/{DATABASE}")
    far = wait_with(connections, keyspace.client)
    assert far.connections.run(SETTLE, 2, [f"{far.list}:other", f"{far.list}:due", "1", "member", "", ""]) == [b"settled", 0]
    yield far
    proxy.resume()
    connections.close()
    keyspace.clear()
    keyspace.close()


def once(do):
    """What is asked whether to go on: the first time it does this, and then goes on."""
    done = []

    def goes_on():
        if not done:
            done.append(True)
            do()
        return True

    return goes_on


def test_the_script_runs_at_once_where_an_element_is_there(wait):
    wait.bring(2)
    began = time.monotonic()
    assert wait.run_after() == [b"settled", 1]
    assert time.monotonic() - began < LONG / 2
    assert wait.has_run()
    assert wait.client.llen(wait.list) == 1, "it has taken one"


def test_it_runs_when_somebody_brings_one(wait):
    states = []

    def bring():
        states.append(wait.has_run())
        wait.bring()

    began = time.monotonic()
    assert wait.run_after(goes_on=once(bring)) == [b"settled", 1]
    assert time.monotonic() - began < LONG / 2
    assert states == [False], "and not before"
    assert not wait.client.exists(wait.list)


def test_it_runs_where_nobody_brings_one(wait):
    began = time.monotonic()
    assert wait.run_after(0.05) == [b"settled", 1]
    assert time.monotonic() - began >= 0.05
    wait.bring()
    assert wait.run() == [b"settled", 1], "the next call has a reply of its own"
    assert wait.client.llen(wait.list) == 1


def test_who_does_not_go_on_has_no_answer_and_takes_nothing_any_more(wait):
    began = time.monotonic()
    assert wait.run_after(goes_on=lambda: False) is None
    assert time.monotonic() - began < LONG / 2
    wait_until(lambda: wait.blocked() == 0, 10, "the server lets nobody wait")
    assert not wait.has_run()
    wait.bring()
    assert wait.run() == [b"settled", 1]
    assert wait.client.llen(wait.list) == 1


def test_it_is_asked_again_and_again_whether_it_goes_on(wait):
    asked = []

    def goes_on():
        asked.append(True)
        return len(asked) < 3

    assert wait.run_after(goes_on=goes_on) is None
    assert len(asked) == 3


class Interruption(BaseException):
    pass


def test_a_wait_that_is_interrupted_leaves_no_reply_to_the_next_call(wait):
    """As a soft time limit does."""

    def interrupt():
        raise Interruption

    with pytest.raises(Interruption):
        wait.run_after(goes_on=interrupt)
    wait_until(lambda: wait.blocked() == 0, 10, "the server lets nobody wait")
    assert wait.run() == [b"settled", 1]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_script_that_the_server_does_not_know_is_sent_to_it(wait, when):
    def forget_and_bring():
        wait.client.script_flush()
        wait.bring()

    if when == "before":
        forget_and_bring()
    assert wait.run_after(goes_on=once(forget_and_bring if when == "meanwhile" else wait.has_run)) == [b"settled", 1]
    assert wait.has_run()
    assert not wait.client.exists(wait.list)


def test_a_script_that_fails_fails_as_it_would_without_a_wait(wait):
    wait.client.delete(wait.record)
    wait.client.set(wait.record, "no hash")
    wait.bring()
    with pytest.raises(ScriptError, match=r"^script settle failed: .*wrong kind of value"):
        wait.run_after()
    wait.client.delete(wait.record)
    wait.client.hset(wait.record, "by", "1")
    assert wait.run() == [b"settled", 1]


def test_it_runs_where_there_is_no_list_to_wait_for(wait):
    wait.client.set(wait.list, "no list")
    assert wait.run_after() == [b"settled", 1]
    assert wait.run() == [b"settled", 1]


@pytest.mark.parametrize("far", ["direct"], indirect=True)
def test_the_server_runs_it_before_the_client_has_heard_of_the_element(valkey, far, proxy):
    """There is no way there and back between the element and the script, but where redis-py's client asks for one by one."""
    found = []
    # It is patient: 0.2 s are up when nothing passes.
    connections = connect(f"{proxy.url_for(valkey.url)}/{DATABASE}", {"socket_timeout": LONG})
    patient = far._replace(connections=connections)
    waiter = threading.Thread(target=lambda: found.append(patient.run_after()))
    waiter.start()
    try:
        wait_until(lambda: far.blocked() == 1, 10, "it waits")
        proxy.stall()
        far.bring()
        wait_until(far.has_run, 10, "the script has run")
        assert found == []
    finally:
        proxy.resume()
        waiter.join()
        connections.close()
    assert found == [[b"settled", 1]]


@pytest.mark.parametrize("far", ["direct"], indirect=True)
def test_a_connection_that_is_cut_is_a_store_that_is_away(far, proxy):
    with pytest.raises(StoreUnavailable, match=f"^the store does not let wait for {far.list}: "):
        far.run_after(goes_on=once(proxy.cut))
    wait_until(lambda: far.blocked() == 0, 10, "the server lets nobody wait")
    assert far.run() == [b"settled", 1]
    far.bring()
    assert far.run_after() == [b"settled", 1]


@pytest.mark.parametrize("far", ["client"], indirect=True)
def test_a_client_whose_connection_is_cut_between_two_looks_goes_on(far, proxy):
    def cut_and_bring():
        proxy.cut()
        far.bring()

    assert far.run_after(goes_on=once(cut_and_bring)) == [b"settled", 1]
    assert not far.client.exists(far.list)


def test_a_server_that_is_silent_is_a_store_that_is_away(far, proxy):
    proxy.stall()
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match=f"^the store does not let wait for {far.list}: "):
        far.run_after(0.05)
    assert time.monotonic() - began < LONG / 2
    proxy.resume()
    assert far.run() == [b"settled", 1]


@pytest.mark.parametrize("far", ["direct"], indirect=True)
def test_a_server_is_given_the_time_for_which_it_waits_and_that_of_any_other_reply(far, proxy):
    proxy.stall()
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        far.run_after(0.3)
    assert time.monotonic() - began >= 0.5


class WithoutPrimary:
    """A pool whose connections say what Sentinel's do when none of them names a primary; some redis-py quote a password."""

    def __init__(self):
        self.password = uuid4().hex
        self.connection_class = lambda: self
        self.connection_kwargs = {}

    def connect(self):
        raise MasterNotFoundError(f"No master found for 'main' : Redis<Pool(password={self.password})>")


def test_what_redis_py_says_of_sentinels_is_not_quoted():
    pool = WithoutPrimary()
    with pytest.raises(StoreUnavailable) as caught:
        DirectConnections(pool).run_after("list", 1.0, lambda: True, SETTLE, 0, [])
    assert str(caught.value) == "the store does not let wait for list: no Sentinel names a primary"
    assert pool.password not in "".join(traceback.format_exception(caught.value))
