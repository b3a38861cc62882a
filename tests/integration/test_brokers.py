"""A trigger that waited arrives as it was sent, on every broker and kind of queue."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
import twin_app
from celery.canvas import StampingVisitor
from nodes import redis_settings, wait_until


class Stamp(StampingVisitor):
    def on_signature(self, sig, **headers):
        return {"mark": "blue"}


def queue(name, exchange, kind, routing_key, **arguments):
    return {name: {"exchange": exchange, "exchange_type": kind, "routing_key": routing_key, "queue_arguments": arguments}}


def place_on(start_place, url, broker, kind, arguments):
    name = f"q-{uuid4().hex[:8]}"
    settings = redis_settings(url, accept_content=["json", "yaml", "pickle"], task_default_queue=name)
    if broker:
        settings["broker_url"] = broker
    if kind == "topic":
        settings["task_queues"] = queue(name, f"x-{name}", "topic", "work.#", **arguments)
        settings["task_default_exchange"], settings["task_default_exchange_type"] = f"x-{name}", "topic"
        settings["task_default_routing_key"] = "work.some"
    else:
        settings["task_queues"] = queue(name, name, "direct", name, **arguments)
    if arguments.get("x-queue-type") == "quorum":
        settings["worker_detect_quorum_queues"] = True
    return start_place(settings, workers=1, concurrency=2, app_module=twin_app)


@pytest.fixture(params=["redis direct", "redis topic", "rabbitmq direct", "rabbitmq topic", "rabbitmq quorum topic"])
def place(request, start_place, valkey):
    broker = request.getfixturevalue("rabbitmq") if "rabbitmq" in request.param else None
    arguments = {"x-queue-type": "quorum"} if "quorum" in request.param else {}
    return place_on(start_place, valkey.url, broker, request.param.rpartition(" ")[2], arguments)


def publish(place, key, **more):
    tasks = place.app.tasks
    signature = tasks["protected.facts_at_gate"].s(key, f"{key}-open")
    signature.stamp(Stamp())
    return signature.apply_async(
        shadow="shade",
        priority=3,
        headers={"custom": "kept"},
        time_limit=300,
        soft_time_limit=200,
        expires=datetime.now(UTC) + timedelta(hours=1),
        link=tasks["plain.note"].si(f"{key}-link"),
        serializer="pickle",
        compression="zlib",
        **more,
    )


def test_a_trigger_that_waited_arrives_as_it_was_sent(place, key):
    place.ledger.open(f"{key}-open")
    expected = publish(place, key).get(timeout=30)

    holder = place.app.tasks["protected.facts_at_gate"].delay(key, f"{key}-later")
    wait_until(lambda: len(place.ledger.read(key, "begin")) == 2, what="the key is held")
    waited = publish(place, key)
    wait_until(lambda: place.logs().count("waits:") >= 2, 30, "it has waited twice")
    place.ledger.open(f"{key}-later")

    assert holder.get(timeout=30)
    facts = waited.get(timeout=30)
    # Through Celery's delay exchanges a routing key comes out with their bits before it, as after any countdown.
    facts["routing_key"] = re.sub(r"^([01]\.){28}", "", facts["routing_key"])
    assert facts == expected
    assert facts["custom"] == "kept"
    assert facts["stamps"] == {"mark": "blue"}
    assert facts["priority"] == 3
    assert facts["content_type"] == "application/x-python-serialize"
    wait_until(lambda: len(place.ledger.read(f"{key}-link")) == 2, what="both callbacks have run, once each")
