from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import pytest
from cluster import AS_TEXT, Keyspace, ValkeyCluster
from desk import Desk
from fakeredis import FakeRedis, FakeServer
from record_states import Watch

from celery_singleflight.connection import ClientConnections, Connections
from celery_singleflight.keys import KeySpace
from celery_singleflight.servers import connect
from celery_singleflight.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable

#: Of its own, so that emptying it takes nothing from tests that have workers on the same server.
DATABASE = 9


class Place(NamedTuple):
    """Where a store is kept: how to connect to it, and a look from outside."""

    connect: Callable[[], Connections]
    keyspace: Keyspace


@pytest.fixture(scope="session")
def cluster():
    """Three primaries of the session's own."""
    servers = ValkeyCluster()
    yield servers
    servers.teardown()


@pytest.fixture(scope="session", params=["single", "cluster", "fake"])
def place(request):
    """A real server, a real cluster, and the fake of the unit tests, which must be a true likeness."""
    if request.param == "fake":
        server = FakeServer()
        found = Place(
            partial(ClientConnections, lambda: FakeRedis(server=server), spans_slots=True),
            Keyspace(FakeRedis(server=server, **AS_TEXT)),
        )
    else:
        single = request.param == "single"
        url = f"{request.getfixturevalue('valkey').url}/{DATABASE}" if single else request.getfixturevalue("cluster").url
        found = Place(partial(connect, url, {}), Keyspace.at(url))
    yield found
    found.keyspace.close()


@pytest.fixture(scope="session")
def open_connections(place):
    connections = place.connect()
    yield connections
    connections.close()


@pytest.fixture
def watch(place, open_connections):
    """The connections, with a look at the states of what each script writes."""
    return Watch(open_connections, place.keyspace.client, place.keyspace.now_ms)


@pytest.fixture
def desk(place, watch, open_connections):
    """An empty store. Whatever a test does in it, every key that is left goes by itself."""
    place.keyspace.clear()
    yield Desk(Store(watch, KeySpace("sf")), place.keyspace, open_connections)
    assert place.keyspace.lasting() == []
