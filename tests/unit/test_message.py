"""The message of a trigger: kept by the store as it came, and published again as it was, as a new copy."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from celery import states
from kombu import Exchange, Queue
from kombu.utils.imports import symbol_by_name

from celery_singleflight import headers as header
from celery_singleflight.claims import Handout
from celery_singleflight.message import pack_message, publish_again, queues_behind

ACCEPTED = ["json", "yaml", "msgpack", "pickle"]


@pytest.fixture
def place(make_place):
    return make_place(accept_content=ACCEPTED)


def received(place, message):
    """The request that a worker's main process makes of a message."""
    task = place.app.tasks[message.headers["task"]]
    request = symbol_by_name(task.Request)(
        message,
        on_ack=lambda *_: None,
        on_reject=lambda *_: None,
        app=place.app,
        hostname="w1@test",
        eventer=None,
        task=task,
        connection_errors=(),
    )
    return request._context


def taken(place):
    (message,) = place.messages()
    return message


def again(place, message, *, copy="", times=1, first_ms=""):
    """The message that comes of packing and publishing it again."""
    packed = pack_message(received(place, message))
    task_id = publish_again(place.app, Handout(packed, copy, "", times, first_ms))
    found = taken(place)
    assert task_id == message.headers["id"]
    return found


def kept(message):
    ours = (header.COPY, header.PREVIOUS, header.LINGER, "expires")
    return {name: value for name, value in message.headers.items() if name not in ours}


def echo(*args, **kwargs):
    return [args, kwargs]


@pytest.mark.parametrize("serializer", ACCEPTED)
@pytest.mark.parametrize("compression", [None, "gzip", "bzip2"])
def test_the_body_comes_again_whatever_its_serializer_and_compression(place, serializer, compression):
    task = place.task(echo)
    result = task.apply_async((1, "ünï", [None, 2.5]), {"deep": {"b": True}}, serializer=serializer, compression=compression)
    message = taken(place)

    copy = again(place, message)

    assert (copy.content_type, copy.content_encoding) == (message.content_type, message.content_encoding)
    assert copy.headers.get("compression") == message.headers.get("compression")
    assert copy.decode() == message.decode()
    assert kept(copy) == kept(message)
    place.deliver(copy)
    assert result.get(timeout=1) == [[1, "ünï", [None, 2.5]], {"deep": {"b": True}}]


def test_a_body_of_any_bytes_comes_again(place):
    task = place.task(echo)
    data = bytes(range(256)) + b"\n\n"
    task.apply_async((data,), serializer="pickle")
    assert again(place, taken(place)).decode()[0][0] == data


def test_a_copy_says_what_it_is_a_copy_of(place):
    place.task(echo).delay(1)
    message = taken(place)

    first, second = again(place, message), again(place, message, copy="c7")

    assert (first.headers[header.PREVIOUS], second.headers[header.PREVIOUS]) == ("", "c7")
    assert first.headers[header.COPY] != second.headers[header.COPY]
    third = again(place, second, copy=second.headers[header.COPY])
    assert third.headers[header.PREVIOUS] == second.headers[header.COPY]


def test_a_copy_goes_on_with_no_wait_of_the_one_before(place):
    task = place.task(echo)
    task.apply_async((1,), headers={header.WAITS: 3, header.FIRST_SEEN: "1"})
    copy = again(place, taken(place))
    assert {header.WAITS, header.FIRST_SEEN}.isdisjoint(copy.headers)


def test_properties_come_again(place):
    place.task(echo).apply_async((1,), priority=7, reply_to="somebody", correlation_id="c1")
    message = taken(place)

    copy = again(place, message)

    names = ("priority", "reply_to", "correlation_id", "delivery_mode")
    assert {name: copy.properties.get(name) for name in names} == {name: message.properties.get(name) for name in names}
    assert (copy.properties["priority"], copy.properties["reply_to"], copy.properties["correlation_id"]) == (
        7,
        "somebody",
        "c1",
    )


def test_headers_of_the_users_own_come_again(place):
    own = {"mine": "ünï", "deep": {"a": [1, None]}, "hostname": "my own", "args": "mine too", "properties": "and mine"}
    task = place.task(echo)
    task.apply_async((1,), headers=own)
    message = taken(place)

    copy = again(place, message)

    assert {name: copy.headers[name] for name in own} == own
    assert kept(copy) == kept(message)


def test_a_date_in_a_header_comes_again(place):
    """As AMQP has them; on the memory transport it comes as text."""
    place.task(echo).delay(1)
    message = taken(place)
    when = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    message.headers["when"] = when

    copy = again(place, message)

    assert datetime.fromisoformat(str(copy.headers["when"])) == when


def test_what_a_delivery_adds_does_not_come_again(place):
    place.task(echo).delay(1)
    message = taken(place)
    added = {"redelivered": True, "x-death": [{"count": 1}], "x-delivery-count": 3}
    message.headers.update(added)

    assert added.keys().isdisjoint(again(place, message).headers)


@pytest.mark.parametrize(
    "how", [{"expires": 3600}, {"expires": datetime.now(UTC) + timedelta(hours=1)}], ids=["seconds", "time"]
)
def test_a_trigger_that_has_entered_expires_no_more(place, how):
    place.task(echo).apply_async((1,), **how)
    message = taken(place)
    assert message.headers["expires"]

    copy = again(place, message)

    assert not copy.headers.get("expires")
    assert not copy.properties.get("expiration")
    assert kept(copy) == kept(message)


def test_a_trigger_that_waits_expires_when_it_would_have(place):
    place.task(echo).apply_async((1,), expires=3600, countdown=60)
    message = taken(place)

    copy = again(place, message, copy="c1", first_ms="1700000000000")

    assert copy.headers["expires"] == message.headers["expires"]
    assert (copy.headers["eta"], copy.headers[header.PREVIOUS]) == (None, "c1")
    assert (copy.headers[header.FIRST_SEEN], copy.headers[header.WAITS]) == ("1700000000000", 1)


def test_retries_and_time_limits_come_again_and_an_eta_has_come_to_pass(place):
    place.task(echo).apply_async((1,), countdown=60, retries=2, time_limit=9, soft_time_limit=8)
    message = taken(place)

    copy = again(place, message)

    assert message.headers["eta"]
    names = ("eta", "retries", "timelimit")
    assert [copy.headers[name] for name in names] == [None, 2, [9, 8]]


def test_the_rest_of_a_chain_and_callbacks_come_again(place):
    task = place.task(echo)
    callback = place.task(echo, name="shop.callback")
    (task.s(1) | callback.s()).apply_async(link_error=callback.s())
    message = taken(place)

    copy = again(place, message)

    assert copy.decode() == message.decode()
    place.deliver(copy)
    assert [sent.headers["task"] for sent in place.messages()] == ["shop.callback"]


def test_a_copy_goes_to_the_queue_that_it_was_sent_to_first(make_place):
    exchange = Exchange("orders", type="topic")
    place = make_place(task_queues=[Queue("of-orders", exchange, routing_key="order.#")])
    task = place.task(echo)

    def waiting():
        with place.app.connection_for_read() as connection:
            queue = place.app.amqp.queues["of-orders"].bind(connection.default_channel)
            queue.declare()
            return queue.get(no_ack=True)

    assert waiting() is None, "the queue is declared"
    task.apply_async((1,), exchange="orders", routing_key="order.new")
    message = waiting()
    message.accept = {"application/json"}
    publish_again(place.app, Handout(pack_message(received(place, message)), "", "", 1))

    copy = waiting()
    assert copy.headers["id"] == message.headers["id"]
    assert copy.delivery_info["routing_key"] == "order.new"
    assert [queue.name for queue in queues_behind(place.app, "orders")] == ["of-orders"]
    assert queues_behind(place.app, "") == queues_behind(place.app, None) == queues_behind(place.app, "unknown") == []


def test_what_is_packed_is_a_line_of_json_and_the_body(place):
    place.task(echo).delay(1)
    message = taken(place)

    line, _, body = pack_message(received(place, message)).partition(b"\n")

    assert json.loads(line)["headers"]["id"] == message.headers["id"]
    assert body == (message.body if isinstance(message.body, bytes) else message.body.encode())


def test_without_a_message_nothing_is_packed():
    assert pack_message(SimpleNamespace(properties=None)) == b""
    assert pack_message(SimpleNamespace(properties={"reply_to": "x"})) == b""


@pytest.mark.parametrize("packed", [b"", b"no json\nbody", b"{}\nbody"])
def test_a_message_that_cannot_be_read_is_an_error_and_publishes_nothing(place, packed):
    with pytest.raises((ValueError, KeyError)):
        publish_again(place.app, Handout(packed, "", "", 1))
    assert place.messages() == []


@pytest.mark.parametrize("rescue", [True, False])
def test_the_store_has_the_message_of_a_run_unless_rescue_is_switched_off(place, rescue):
    seen = []

    def work():
        names = [name for name in place.client.scan_iter() if place.client.type(name) == "zset"]
        seen.extend(member for name in names for member in place.client.zrange(name, 0, -1))

    result = place.task(work, rescue=rescue).delay()
    place.deliver_all()
    assert result.state == states.SUCCESS
    assert seen == ([result.id] if rescue else [])
