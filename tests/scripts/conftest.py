from __future__ import annotations

import pytest
from cluster import Keyspace, ValkeyCluster
from desk import Desk

from celery_singleflight.connection import connect
from celery_singleflight.keys import KeySpace
from celery_singleflight.store import Store

#: Of its own, so that emptying it takes nothing from tests that have workers on the same server.
DATABASE = 9


@pytest.fixture(scope="session")
def cluster():
    """Three primaries of the session's own."""
    servers = ValkeyCluster()
    yield servers
    servers.teardown()


@pytest.fixture(scope="session", params=["single", "cluster"])
def store_url(request) -> str:
    if request.param == "cluster":
        return request.getfixturevalue("cluster").url
    return f"{request.getfixturevalue('valkey').url}/{DATABASE}"


@pytest.fixture(scope="session")
def keyspace(store_url):
    found = Keyspace.at(store_url)
    yield found
    found.close()


@pytest.fixture(scope="session")
def open_connections(store_url):
    connections = connect(store_url, {})
    yield connections
    connections.close()


@pytest.fixture
def desk(keyspace, open_connections):
    """An empty store. Whatever a test does in it, every key that is left goes by itself."""
    keyspace.clear()
    yield Desk(Store(open_connections, KeySpace("sf")), keyspace, open_connections)
    assert keyspace.lasting() == []
