"""What a worker says of a store that may forget."""

from __future__ import annotations

import logging

import pytest
import redis
from nodes import ValkeyContainer

from celery_singleflight.durability import risks, warn_of_risks
from celery_singleflight.servers import client_beside, connect

SAFE = {"maxmemory": 0, "maxmemory_policy": "noeviction", "aof_enabled": 1}


@pytest.mark.parametrize(
    ("facts", "saves", "words"),
    [
        ({}, True, []),
        ({"maxmemory": 1000}, True, []),
        ({"maxmemory_policy": "allkeys-lru"}, True, []),
        ({"maxmemory": 1000, "maxmemory_policy": "allkeys-lru"}, True, ["maxmemory-policy is allkeys-lru"]),
        ({"maxmemory": 1000, "maxmemory_policy": "volatile-ttl"}, True, ["maxmemory-policy is volatile-ttl"]),
        ({"aof_enabled": 0}, True, ["nothing since its last snapshot"]),
        ({"aof_enabled": 0}, False, ["nothing at all"]),
        ({"maxmemory": 1000, "maxmemory_policy": "allkeys-lfu", "aof_enabled": 0}, False, ["allkeys-lfu", "nothing at all"]),
    ],
)
def test_each_setting_that_breaks_a_promise_is_named(facts, saves, words):
    found = risks({**SAFE, **facts}, saves=saves)
    assert len(found) == len(words)
    assert all(word in risk for word, risk in zip(words, found, strict=True))


@pytest.fixture
def forgetful():
    server = ValkeyContainer("cache", "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    server.ready()
    yield server
    server.teardown()


def test_a_real_server_is_asked(forgetful, caplog):
    with caplog.at_level(logging.WARNING):
        warn_of_risks(lambda: client_beside(connect(forgetful.url, {})))
    assert [record.getMessage()[:40] for record in caplog.records] == [
        "the store: maxmemory-policy is allkeys-l",
        "the store: it keeps no append-only file:",
    ]
    caplog.clear()
    with redis.Redis.from_url(forgetful.url) as client:
        client.config_set("appendonly", "yes")
        client.config_set("maxmemory-policy", "noeviction")
    with caplog.at_level(logging.WARNING):
        warn_of_risks(lambda: client_beside(connect(forgetful.url, {})))
    assert caplog.records == []


def test_a_store_that_is_away_stops_nobody(caplog):
    with caplog.at_level(logging.INFO):
        warn_of_risks(lambda: client_beside(connect("redis://127.0.0.1:1", {})))
    assert "does not tell how durable it is" in caplog.text
