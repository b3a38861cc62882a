"""What a death has left in the store and in the broker; and time that is made to pass there."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from nodes import wait_until
from redis import Redis


def record_of(place: Any, task_id: str) -> dict[str, str]:
    """What the store knows of a trigger; {} when it knows nothing."""
    store = place.store()
    name = next(store.scan_iter(f"*:trigger:*:{task_id}", count=1000), None)
    return {} if name is None else {field.decode(): value.decode(errors="replace") for field, value in store.hgetall(name).items()}


def live_lines(place: Any, key: str) -> list[str]:
    """The lines of the leases on a key, of whatever lock name, that have not expired."""
    store = place.store()
    seconds, micros = store.time()
    names = [name for name in store.scan_iter("*:lease:*", count=1000) if name.endswith(f'["{key}"]'.encode())]
    lines = [line.decode() for name in names for line in store.hvals(name)]
    return [line for line in lines if int(line.partition("\n")[0]) > seconds * 1000 + micros // 1000]


def due_at(place: Any, task_id: str) -> float | None:
    """In how many seconds the sweeper looks at a trigger; None when it does not."""
    store = place.store()
    seconds, micros = store.time()
    for name in store.scan_iter("*:due:*", count=1000):
        score = store.zscore(name, task_id)
        if score is not None:
            return float(score) / 1000 - seconds - micros / 1_000_000
    return None


def let_patience_end(place: Any, task_id: str) -> None:
    """Let the store have waited long enough for the delivery that ended the trigger, and the sweeper for the next look."""
    store = place.store()
    trigger = next(store.scan_iter(f"*:trigger:*:{task_id}", count=1000), None)
    if trigger is not None and store.hexists(trigger, "ended_ms") and not store.hexists(trigger, "settled"):
        store.hset(trigger, "ended_ms", int(store.time()[0]) * 1000 - 10_000)
    for name in store.scan_iter("*:due:*", count=1000):
        store.zadd(name, {task_id: 1}, xx=True)


def assert_nothing_is_left(place: Any, task_id: str, key: str) -> None:
    """The trigger has ended, and the store keeps no lease, no message and no reminder of it."""
    wait_until(lambda: record_of(place, task_id).get("settled"), 15, f"{task_id} is settled")
    record = record_of(place, task_id)
    assert "message" not in record, record
    assert due_at(place, task_id) is None
    wait_until(lambda: not live_lines(place, key), 5, "no lease is live")


def is_on_redis(place: Any) -> bool:
    return urlsplit(place.app.conf.broker_url).scheme == "redis"


def let_the_broker_give_out_again(place: Any, text: str) -> int:
    """Let the visibility timeout of each unacknowledged message with this text in it be over. Returns how many there were.

    RabbitMQ needs none: it delivers again when a connection ends.
    """
    if not is_on_redis(place):
        return 0
    with Redis.from_url(place.app.conf.broker_url) as client, place.app.connection_for_read() as connection:
        tags = [tag.decode() for tag, message in client.hgetall("unacked").items() if text.encode() in message]
        for tag in tags:
            connection.default_channel.qos.restore_by_tag(tag)
    return len(tags)


def messages_with(place: Any, text: str) -> int:
    """How many messages with this text in it the broker holds, delivered or not; on RabbitMQ all that wait in the queue."""
    queue = place.app.conf.task_default_queue
    if not is_on_redis(place):
        with place.app.connection_for_read() as connection:
            return int(connection.default_channel.queue_declare(queue, passive=True).message_count)
    with Redis.from_url(place.app.conf.broker_url) as client:
        return sum(text.encode() in message for message in [*client.lrange(queue, 0, -1), *client.hvals("unacked")])


def delete_queue(place: Any) -> None:
    """Leave nothing behind in a broker that is not the tests' own."""
    with place.app.connection_for_read() as connection:
        connection.default_channel.queue_delete(place.app.conf.task_default_queue)
