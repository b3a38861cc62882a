from __future__ import annotations

import os

import pytest
from kombu import Connection
from nodes import ValkeyContainer

pytest_plugins = ["places", "databases"]


@pytest.fixture(scope="session")
def valkey():
    """A server of the session's own; nothing of one test depends on what another left in it."""
    server = ValkeyContainer()
    try:
        server.ready()
        yield server
    finally:
        server.teardown()


def need(url: str, what: str) -> str:
    """Return the URL of a service that answers; skip with a reason where it is not required, fail where it is."""
    try:
        with Connection(url, connect_timeout=2) as connection:
            connection.connect()
    except Exception as error:  # noqa: BLE001, any failure means that it is not there
        message = f"{what} does not answer at its URL: {error!r}"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return url


@pytest.fixture(scope="session")
def rabbitmq() -> str:
    return need(os.environ.get("TEST_RABBITMQ_URL", "amqp://guest:guest@127.0.0.1:5672//"), "RabbitMQ")
