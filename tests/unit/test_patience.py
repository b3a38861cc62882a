"""What a worker says of settings that hurt triggers which wait with the broker."""

from __future__ import annotations

import logging
from math import inf

import pytest

from celery_singleflight import patience
from celery_singleflight.patience import risks_of_waiting, warn_of_settings


def work(key):
    return key


@pytest.fixture
def app(place):
    place.app.conf.beat_schedule = {}
    return place.app


def test_an_app_of_the_defaults_is_not_warned_about(place, app):
    place.task(work)
    assert risks_of_waiting(app, 16) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"worker_eta_task_limit": 100}, "worker_eta_task_limit is 100"),
        ({"broker_transport_options": {"visibility_timeout": 10}}, "visibility_timeout is 10 s"),
    ],
)
def test_each_setting_that_hurts_is_named_where_something_is_requeued(place, app, settings, words):
    app.conf.update(settings)
    place.task(work, contention_policy="queue")
    assert risks_of_waiting(app, 16) == []
    place.task(work, name="other")
    (risk,) = risks_of_waiting(app, 16)
    assert risk.startswith(words)
    assert "contention_policy='queue'" in risk


@pytest.mark.parametrize(
    ("driver", "prefetch", "is_named"), [("amqp", 2, True), ("amqp", 16, False), ("amqp", 0, False), ("redis", 2, False)]
)
def test_a_worker_that_takes_few_messages_at_once_from_rabbitmq_is_warned(place, app, monkeypatch, driver, prefetch, is_named):
    """With 2 at once and 600 that waited, an unrelated task of the queue waited for seconds; with 16, and 3,000, for 10 ms."""
    monkeypatch.setattr(patience, "driver_of", lambda _: driver)
    place.task(work)
    assert [risk.split(",")[0] for risk in risks_of_waiting(app, prefetch)] == (
        ["the worker takes 2 messages at once"] if is_named else []
    )


@pytest.mark.parametrize("timeout", [20, 60, 3600])
def test_a_visibility_timeout_that_leaves_room_to_wait_is_not_warned_about(place, app, timeout):
    app.conf.broker_transport_options = {"visibility_timeout": timeout}
    place.task(work)
    assert risks_of_waiting(app, 16) == []


@pytest.mark.parametrize(
    ("options", "call", "is_named"),
    [
        ({}, {}, True),
        ({"wait_timeout": inf}, {}, True),
        ({"wait_timeout": 60}, {}, False),
        ({}, {"wait_timeout": 60}, False),
        ({}, {"headers": {"singleflight_wait_timeout": 60}}, False),
        ({}, {"contention_policy": "coalesce"}, False),
        ({"contention_policy": "coalesce"}, {}, False),
        ({"contention_policy": "coalesce"}, {"contention_policy": "requeue"}, True),
    ],
)
def test_a_beat_entry_that_requeues_without_a_bound_is_named(place, app, options, call, is_named):
    task = place.task(work, **options)
    app.conf.beat_schedule = {"nightly": {"task": task.name, "schedule": 60.0, "options": call}}
    found = risks_of_waiting(app, 16)
    assert [risk.split(":")[0] for risk in found] == (["beat entry 'nightly'"] if is_named else [])


def test_a_beat_entry_of_a_task_that_is_not_protected_is_none_of_ours(place, app):
    place.task(work)
    app.conf.beat_schedule = {"nightly": {"task": "elsewhere.work", "schedule": 60.0}}
    assert risks_of_waiting(app, 16) == []


def test_what_is_found_is_logged(place, app, caplog):
    place.task(work)
    app.conf.worker_eta_task_limit = 5
    with caplog.at_level(logging.WARNING, "celery_singleflight"):
        warn_of_settings(app, 16)
    assert [record.getMessage() for record in caplog.records] == risks_of_waiting(app, 16) != []
