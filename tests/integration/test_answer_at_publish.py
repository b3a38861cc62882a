"""Calls that are answered at publish, with a real worker, a real broker, and publishers that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import protected_app
import pytest
from celery import chord
from kombu.exceptions import OperationalError
from nodes import PACKAGE, SUPPORT, free_port, redis_settings, wait_until

from celery_singleflight.announcing import RESERVED

#: A publisher that dies at the moment at which its message goes to the broker, or has just gone.
DIES = """
import json, os, signal, sys
import protected_app

config, directory, key, when = json.loads(sys.argv[1]), *sys.argv[2:]
app = protected_app.make_app(config, directory)
send = app.amqp.send_task_message

def die(*args, **kwargs):
    if when == "after":
        send(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)

app.amqp.send_task_message = die
app.tasks["protected_app.pay"].apply_async((key,), answer_at_publish=True)
"""


@pytest.fixture(scope="module")
def config(valkey):
    own = {"task_default_queue": f"q-{uuid4().hex[:8]}", "singleflight_key_prefix": uuid4().hex[:8]}
    return redis_settings(valkey.url, **own)


@pytest.fixture(scope="module")
def paying(start_shared, config):
    """One worker of two processes."""
    return start_shared(config, workers=1)


def announcements(place):
    prefix = place.app.conf.singleflight_key_prefix
    return list(place.store().scan_iter(f"{{{prefix}*:announcement:*", count=1000))


def test_fifty_calls_at_once_are_one_message_and_one_result(paying, key):
    pay, aside = paying.task("pay"), f"aside-{key}"
    pay.apply_async((f"{key}-before",), answer_at_publish=True).get(timeout=20)  # connections are open

    def call(_):
        return pay.apply_async((key, "paid once"), answer_at_publish=True, queue=aside)

    with ThreadPoolExecutor(50) as publishers:
        results = list(publishers.map(call, range(50)))

    assert {result.id for result in results} == {results[0].id}
    assert sum(not result.is_duplicate for result in results) == 1
    with paying.app.connection_for_read() as connection:
        assert connection.default_channel.client.llen(aside) == 1
    node = f"{paying.workers[0].container.name}@test"  # workers of other tests may be on the same broker
    (reply,) = paying.app.control.add_consumer(aside, reply=True, destination=[node], timeout=10, limit=1)
    assert list(reply.values()) == [{"ok": f"add consumer {aside}"}]
    assert [result.get(timeout=20) for result in results] == ["paid once"] * 50
    assert len(paying.ledger.runs(key)) == 1
    late = pay.apply_async((key, "paid once"), answer_at_publish=True)
    assert (late.is_duplicate, late.get(timeout=20)) == (True, "paid once")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_publisher_that_dies_between_its_reservation_and_its_word_loses_nothing(paying, config, key, when):
    directory = str(paying.ledger.directory)
    died = subprocess.run(
        [sys.executable, "-c", DIES, json.dumps(config), directory, key, when],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(PACKAGE)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert died.returncode == -signal.SIGKILL, died.stderr

    result = paying.task("pay").apply_async((key,), answer_at_publish=True)
    assert result.get(timeout=20) == "paid"
    assert len(paying.ledger.runs(key)) == 1
    assert result.is_duplicate is (when == "after")


def test_what_the_broker_does_not_take_is_given_back_at_once(paying, config, key):
    at_once = {"max_retries": 1, "interval_start": 0, "interval_step": 0}
    away = {"broker_url": f"amqp://127.0.0.1:{free_port()}//", "broker_transport_options": at_once}
    elsewhere = protected_app.make_app({**config, **away}, str(paying.ledger.directory))
    begun = time.monotonic()
    with pytest.raises(OperationalError):
        elsewhere.tasks["protected_app.pay"].apply_async((key,), answer_at_publish=True, retry=False)
    assert [name for name in announcements(paying) if key.encode() in name] == []
    assert time.monotonic() - begun < RESERVED, "else it would have ended by itself"
    result = paying.task("pay").apply_async((key,), answer_at_publish=True)
    assert (result.is_duplicate, result.get(timeout=20)) == (False, "paid")


def test_a_member_of_a_chord_with_the_same_key_is_sent_and_its_chord_goes_on(paying, key):
    work, asking = paying.task("work"), {"execution_key": f"once-{key}", "answer_at_publish": True}
    first = work.apply_async((key, 1), {"gate": f"open-{key}"}, **asking)
    wait_until(lambda: paying.ledger.runs(key), what="the first body has begun")
    second = work.apply_async((key, 1), {"gate": f"open-{key}"}, **asking)
    member = work.si(key, 1, gate=f"open-{key}").set(**asking)
    result = chord([member, work.si(f"{key}-other", 2)], work.si(f"{key}-body", gate=None)).apply_async()
    assert second == first
    assert member.options.get("task_id") != first.id
    paying.ledger.open(f"open-{key}")
    assert (first.get(timeout=20), second.get(timeout=20)) == (1, 1)
    result.get(timeout=20)
    assert (len(paying.ledger.runs(key)), len(paying.ledger.runs(f"{key}-other"))) == (1, 1)
