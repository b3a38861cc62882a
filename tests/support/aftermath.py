"""What a death has left in the store and in the broker; and time that is made to pass there."""

from __future__ import annotations

import os
import signal
import time
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from crash_points import DEATHS
from nodes import wait_until
from redis import Redis


def worker_of(place: Any, pid: int) -> Any:
    """The worker whose pool this process belongs to."""
    return next(worker for worker in place.workers if pid == worker.container.pid or pid in worker.container.children())


def kill_worker(place: Any, pid: int) -> float:
    """Kill the worker with all its processes, as a machine that dies does. Returns when."""
    container = worker_of(place, pid).container
    children = container.children()
    at = time.monotonic()
    os.killpg(container.pid, signal.SIGKILL)
    for child in children:
        place.ledger.write(DEATHS, "died", pid=child, task_id="")
    container.process.wait(10)
    return at


def kill_child(place: Any, pid: int) -> None:
    """Kill one process of a pool."""
    os.kill(pid, signal.SIGKILL)
    place.ledger.write(DEATHS, "died", pid=pid, task_id="")


def revive(place: Any) -> None:
    """Start again each worker that is dead; it takes a moment until it is ready."""
    for worker in place.workers:
        if worker.container.status == "exited":
            worker.container.teardown()
            worker.container._log_path.write_bytes(b"")
            worker.container.start()


def wait_for_workers(place: Any, count: int) -> None:
    """Wait until so many workers are ready."""

    def ready() -> int:
        return sum(
            one.status == "running" and one.ready_text in one.logs() for one in (worker.container for worker in place.workers)
        )

    wait_until(lambda: ready() >= count, 45, f"{count} workers are ready")


def record_of(place: Any, task_id: str) -> dict[str, str]:
    """What the store knows of a trigger; {} when it knows nothing."""
    store = place.store()
    name = next(store.scan_iter(f"*:trigger:*:{task_id}", count=1000), None)
    return (
        {} if name is None else {field.decode(): value.decode(errors="replace") for field, value in store.hgetall(name).items()}
    )


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
    """The trigger has ended, and the store keeps no lease and no reminder of it, and no message but to replay a failure."""
    wait_until(lambda: record_of(place, task_id).get("settled"), 15, f"{task_id} is settled")
    record = record_of(place, task_id)
    assert "message" not in record or record["outcome"] != "succeeded", record
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


def queue_on_rabbitmq(url: str, kind: str) -> dict[str, Any]:
    """Settings for a queue of its own, "classic" or "quorum"; for the latter as Celery wants it, with native delays."""
    name = f"q-{uuid4().hex[:8]}"
    queue = {"exchange": name, "routing_key": name, "queue_arguments": {"x-queue-type": kind}}
    settings = {"broker_url": url, "task_default_queue": name, "task_queues": {name: queue}}
    if kind == "quorum":
        queue |= {"exchange_type": "topic", "routing_key": "work.#"}
        settings |= {"task_default_exchange": name, "task_default_exchange_type": "topic"}
        settings |= {"task_default_routing_key": "work.some", "worker_detect_quorum_queues": True}
    return settings


def delete_queue(place: Any) -> None:
    """Leave nothing behind in a RabbitMQ, which is not the tests' own."""
    if is_on_redis(place):
        return
    name = place.app.conf.task_default_queue
    with place.app.connection_for_read() as connection:
        connection.default_channel.queue_delete(name)
        connection.default_channel.exchange_delete(name)
