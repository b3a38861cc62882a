"""What goes back to RabbitMQ is confirmed before the message that it continues is acknowledged; what has waited goes first."""

from __future__ import annotations

import os
import threading
from uuid import uuid4

import pytest
from amqp.exceptions import MessageNacked
from celery import Celery
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError
from kombu.utils.imports import symbol_by_name
from nodes import free_port, wait_until

from celery_singleflight import courier
from celery_singleflight.courier import careful_producer, prepare, swift_producer


class Place:
    """An app behind the proxy, a queue of its own, and a look at it that does not go through the proxy."""

    def __init__(self, proxied: str, straight: str) -> None:
        self.app = Celery("careful", broker=proxied, set_as_current=False)
        self.queue = Queue(f"careful-{uuid4().hex[:8]}", durable=False, auto_delete=False)
        self._straight = Celery("straight", broker=straight, set_as_current=False)

    def publish(self, producer, body):
        producer.publish(body, routing_key=self.queue.name, declare=[self.queue], retry=False)

    def count(self):
        with self._straight.connection_for_read() as connection:
            return self.queue(connection).queue_declare(passive=True).message_count

    def close(self):
        with self._straight.connection_for_read() as connection:
            self.queue(connection).delete()


@pytest.fixture
def place(rabbitmq, rabbit_proxy):
    place = Place(rabbit_proxy.url_for(rabbitmq), rabbitmq)
    with careful_producer(place.app) as producer:
        place.publish(producer, "first")
    yield place
    rabbit_proxy.resume()
    place.close()


def in_thread(work):
    """Run it in a thread; returns the thread, and a list for the error that it ends with."""
    errors = []

    def run():
        try:
            work()
        except Exception as error:  # noqa: BLE001, whatever a client raises
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def test_a_message_that_the_broker_has_not_got_is_not_sent(place, rabbit_proxy):
    rabbit_proxy.stall()

    def send():
        with careful_producer(place.app) as producer:
            place.publish(producer, "second")

    thread, errors = in_thread(send)
    thread.join(0.5)
    assert thread.is_alive(), "it waits for the broker's word"
    rabbit_proxy.cut()
    rabbit_proxy.resume()
    thread.join(20)
    assert errors, "what was lost on the way is an error"
    assert place.count() == 1
    send()
    assert place.count() == 2


def test_celerys_own_producer_would_not_have_noticed(place, rabbit_proxy):
    with place.app.producer_pool.acquire(block=True) as producer:
        place.publish(producer, "second")
        wait_until(lambda: place.count() == 2)
        rabbit_proxy.stall()
        producer.publish("third", routing_key=place.queue.name, retry=False)
        rabbit_proxy.cut()
        rabbit_proxy.resume()
    assert place.count() == 2


def test_a_forked_process_has_a_connection_of_its_own(place):
    with careful_producer(place.app) as producer:
        mine = id(producer)
    pid = os.fork()
    if pid == 0:
        try:
            with careful_producer(place.app) as producer:
                place.publish(producer, "of the child")
                os._exit(0 if id(producer) != mine else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert place.count() == 2


def test_a_redis_confirms_by_its_reply(valkey):
    app = Celery("careful", broker=valkey.url, set_as_current=False)
    name = f"careful-{uuid4().hex[:8]}"
    with careful_producer(app) as producer:
        producer.publish("first", routing_key=name, declare=[Queue(name)], retry=False)
    with app.connection_for_read() as connection:
        assert connection.default_channel.client.llen(name) == 1


def test_a_full_queue_that_refuses_is_an_error_and_not_silence(rabbitmq):
    app = Celery("careful", broker=rabbitmq, set_as_current=False)
    full = {"x-max-length": 1, "x-overflow": "reject-publish"}
    queue = Queue(f"careful-{uuid4().hex[:8]}", durable=False, queue_arguments=full)
    try:
        with careful_producer(app) as producer:
            producer.publish("first", routing_key=queue.name, declare=[queue], retry=False)
        with pytest.raises(MessageNacked), careful_producer(app) as producer:
            producer.publish("second", routing_key=queue.name, retry=False)
    finally:
        with app.connection_for_read() as connection:
            queue(connection).delete()


# What has waited its turn goes first


def bodies(app, queue):
    """What a consumer of the queue is given, in order; nothing is left."""
    found = []
    with app.connection_for_read() as connection:
        bound = queue(connection)
        while (message := bound.get(no_ack=True)) is not None:
            found.append(message.payload)
        bound.delete()
    return found


def send(producer, queue, *bodies, **how):
    for body in bodies:
        producer.publish(body, exchange=queue.exchange, routing_key=queue.routing_key, declare=[queue], retry=False, **how)


@pytest.mark.parametrize("kind", ["direct", "topic"])
@pytest.mark.parametrize("options", [{}, {"global_keyprefix": "of-this-app:"}, {"priority_steps": [0, 5, 9]}], ids=str)
def test_what_has_waited_its_turn_goes_before_all_that_a_redis_broker_has(valkey, kind, options):
    app = Celery("swift", broker=valkey.url, set_as_current=False)
    app.conf.broker_transport_options = options
    name = f"swift-{uuid4().hex[:8]}"
    queue = Queue(name, Exchange(name, kind), routing_key=f"{name}.key")
    with careful_producer(app) as producer:
        send(producer, queue, "first", "second")
    with swift_producer(app) as producer:
        send(producer, queue, "called")
        send(producer, queue, "called later")
    with careful_producer(app) as producer:
        send(producer, queue, "third")
    assert bodies(app, queue) == ["called later", "called", "first", "second", "third"]


def test_it_goes_first_among_those_of_its_priority(valkey):
    app = Celery("swift", broker=valkey.url, set_as_current=False)
    queue = Queue(f"swift-{uuid4().hex[:8]}")
    queue.routing_key = queue.name
    with careful_producer(app) as producer:
        send(producer, queue, "urgent", priority=0)
        send(producer, queue, "later", priority=6)
    with swift_producer(app) as producer:
        send(producer, queue, "called", priority=6)
    assert bodies(app, queue) == ["urgent", "called", "later"]


@pytest.mark.skipif(
    not hasattr(symbol_by_name("kombu.transport.redis:Channel"), "_get_queue_expire"),
    reason="this kombu keeps all queues",
)
def test_a_queue_that_expires_when_it_is_not_used_goes_on_to(valkey):
    app = Celery("swift", broker=valkey.url, set_as_current=False)
    queue = Queue(f"swift-{uuid4().hex[:8]}", expires=600.0)
    queue.routing_key = queue.name
    with swift_producer(app) as producer:
        send(producer, queue, "called")
    with app.connection_for_read() as connection:
        assert 0 < connection.default_channel.client.ttl(queue.name) <= 600
    assert bodies(app, queue) == ["called"]


@pytest.mark.parametrize("name", ["kombu.transport.redis:Transport", "kombu.transport.redis:SentinelTransport"])
def test_a_transport_that_keeps_its_queues_as_redis_does_is_known(name):
    transport = symbol_by_name(name)
    made = courier._to_the_front(transport)
    assert issubclass(made, transport)
    assert issubclass(made.Channel, transport.Channel)
    assert made.Channel._put is not transport.Channel._put


def test_one_that_does_not_is_left_as_it_is():
    transport = symbol_by_name("kombu.transport.memory:Transport")
    assert courier._to_the_front(transport) is transport


def test_on_rabbitmq_it_is_sent_as_carefully_as_the_others(place):
    with swift_producer(place.app) as producer:
        place.publish(producer, "called")
    with careful_producer(place.app) as other:
        assert other is producer
    assert place.count() == 2


def test_a_connection_that_breaks_is_made_anew(valkey):
    app = Celery("swift", broker=valkey.url, set_as_current=False)
    queue = Queue(f"swift-{uuid4().hex[:8]}")
    queue.routing_key = queue.name
    with swift_producer(app) as producer:
        send(producer, queue, "first")
    with pytest.raises(ConnectionError), swift_producer(app) as broken:
        raise ConnectionError
    with swift_producer(app) as producer:
        assert producer is not broken
        send(producer, queue, "second")
    assert bodies(app, queue) == ["second", "first"]


def test_a_process_that_may_have_to_hand_on_connects_ahead(valkey, monkeypatch):
    app = Celery("swift", broker=valkey.url, set_as_current=False)
    queue = Queue(f"swift-{uuid4().hex[:8]}")
    queue.routing_key = queue.name
    connect, made = courier._Express._connection, []
    monkeypatch.setattr(courier._Express, "_connection", lambda self, app: made.append(connect(self, app)) or made[-1])
    prepare(app)
    wait_until(lambda: made and made[0].connected, 10, "it has connected")
    prepare(app)
    with swift_producer(app) as producer:
        assert producer.connection is made[0]
        send(producer, queue, "called")
    assert len(made) == 1
    assert bodies(app, queue) == ["called"]


def test_a_broker_that_is_away_is_found_out_by_who_has_something_to_publish(caplog):
    app = Celery("swift", broker=f"redis://127.0.0.1:{free_port()}", set_as_current=False)
    caplog.set_level("INFO", "celery_singleflight")
    prepare(app)
    wait_until(lambda: "no connection to the broker yet" in caplog.text, 30, "it could not connect")
    with pytest.raises(OperationalError), swift_producer(app) as producer:
        send(producer, Queue("nowhere", routing_key="nowhere"), "called")


def test_a_child_that_is_forked_while_its_parent_publishes_has_a_connection_of_its_own(valkey):
    app = Celery("swift", broker=valkey.url, set_as_current=False)
    queue = Queue(f"swift-{uuid4().hex[:8]}")
    queue.routing_key = queue.name
    with swift_producer(app) as producer:
        send(producer, queue, "of the parent")
        pid = os.fork()
        if pid == 0:
            try:
                with swift_producer(app) as own:
                    send(own, queue, "of the child")
                    os._exit(0 if own is not producer else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        send(producer, queue, "of the parent again")
    assert bodies(app, queue) == ["of the parent again", "of the child", "of the parent"]
