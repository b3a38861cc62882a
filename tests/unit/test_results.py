"""Stored results and errors: what a duplicate is answered with, in the app's own serializer and no other."""

from __future__ import annotations

import json
import logging
import pickle

import pytest
from celery import Celery, states
from celery.backends.base import Backend
from hypothesis import given
from kombu.exceptions import ContentDisallowed
from test_canonical import plain_values, typed

from celery_singleflight import Contended, ResultUnavailable
from celery_singleflight.claims import Encoded
from celery_singleflight.results import Bounds, decode, decode_error, encode, encode_error

VALUES = [None, 0, "", False, True, 1.5, -1, [], {}, [1, {"a": None}], "text", "ünïcode \N{SNOWMAN}", 2**70]
SERIALIZERS = ["json", "pickle", "yaml"]
BOUNDS = Bounds()


class Odd:
    """Not of JSON, and of pickle."""

    def __eq__(self, other):
        return isinstance(other, Odd)

    __hash__ = None


class Unpicklable:
    def __reduce__(self):
        raise TypeError("not me")


class Local(Exception):
    """Its arguments are not those it was made with."""

    def __init__(self, code, *, why):
        super().__init__(f"{code} because of {why}")


@pytest.fixture
def serializing(make_place):
    """An app that has this result serializer."""

    def make(serializer):
        return make_place(result_serializer=serializer, accept_content=["json", serializer])

    return make


def there_and_back(place, value):
    encoded, why_not = encode(place.app, value, BOUNDS)
    assert why_not == ""
    return decode(place.app, encoded, "key", "")


@pytest.mark.parametrize("serializer", SERIALIZERS)
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_as_itself(serializing, serializer, value):
    assert typed(there_and_back(serializing(serializer), value)) == typed(value)


@given(value=plain_values)
def test_any_json_value_comes_back_as_itself(value):
    app = Celery(set_as_current=False, backend="cache+memory://")
    encoded, _ = encode(app, value, BOUNDS)
    assert typed(decode(app, encoded, "key", "")) == typed(value)


def test_what_only_pickle_knows_comes_back_under_pickle(serializing):
    assert there_and_back(serializing("pickle"), Odd()) == Odd()


@pytest.mark.parametrize("serializer", SERIALIZERS)
def test_the_stored_form_is_that_of_the_apps_serializer(serializing, serializer):
    encoded, _ = encode(serializing(serializer).app, {"a": 1}, BOUNDS)
    assert (encoded.content_type, encoded.content_encoding, encoded.body) == {
        "json": ("application/json", "utf-8", b'{"a": 1}'),
        "yaml": ("application/x-yaml", "utf-8", b"a: 1\n"),
        "pickle": ("application/x-python-serialize", "binary", pickle.dumps({"a": 1}, protocol=4)),
    }[serializer]


def test_what_does_not_serialise_is_no_value_and_a_reason(serializing):
    assert encode(serializing("json").app, Odd(), BOUNDS) == (
        Encoded("", "", b""),
        "Odd does not serialise as json: Object of type Odd is not JSON serializable",
    )
    assert encode(serializing("pickle").app, Unpicklable(), BOUNDS) == (
        Encoded("", "", b""),
        "Unpicklable does not serialise as pickle: EncodeError(…)",
    )


def test_a_value_that_was_not_stored_cannot_be_given(place):
    with pytest.raises(ResultUnavailable) as caught:
        decode(place.app, Encoded("", "", b""), "invoice:42", "Odd does not serialise as json: no")
    assert str(caught.value) == (
        "execution invoice:42 has ended, but its result is not stored: Odd does not serialise as json: no"
    )
    assert (caught.value.execution_key, caught.value.reason) == ("invoice:42", "Odd does not serialise as json: no")


class Mine:
    reads = 0

    def __reduce__(self):
        return (Mine.read, ())

    @staticmethod
    def read():
        Mine.reads += 1


def test_a_pickle_is_never_read_unless_the_app_accepts_it(make_place):
    evil = Encoded("application/x-python-serialize", "binary", pickle.dumps(Mine()))
    Mine.reads = 0
    for settings in ({}, {"result_accept_content": ["json", "yaml"], "accept_content": ["pickle"]}):
        place = make_place(**settings)
        with pytest.raises(ContentDisallowed):
            decode(place.app, evil, "key", "")
        with pytest.raises(ContentDisallowed):
            decode_error(place.app, evil, "key", "")
    assert Mine.reads == 0
    decode(make_place(accept_content=["pickle", "json"]).app, evil, "key", "")
    assert Mine.reads == 1


# Errors


ERRORS = [
    ValueError("no", 42),
    KeyError("k"),
    OSError(2, "not there"),
    Contended("billing[7]", "t1", "w1", 1.5, 28.5),
    Exception(),
]


@pytest.mark.parametrize("serializer", SERIALIZERS)
@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_error_comes_back_as_its_class_and_arguments(serializing, serializer, error):
    app = serializing(serializer).app
    back = decode_error(app, encode_error(app, error, BOUNDS), "key", "")
    assert (type(back), back.args, str(back)) == (type(error), error.args, str(error))


def test_an_error_of_the_package_keeps_its_facts(serializing):
    app = serializing("json").app
    back = decode_error(app, encode_error(app, Contended("billing[7]", "t1", "w1", 1.5, 28.5), BOUNDS), "key", "")
    assert (back.lock_key, back.task_id, back.worker, back.age, back.remaining) == ("billing[7]", "t1", "w1", 1.5, 28.5)


@pytest.mark.parametrize(
    "error", [Local(7, why="rain"), ValueError(Odd()), ValueError(Unpicklable())], ids=["its own", "odd", "unpicklable"]
)
@pytest.mark.parametrize("serializer", SERIALIZERS)
def test_an_error_that_cannot_be_made_again_comes_back_as_celery_gives_it(serializing, serializer, error):
    app = serializing(serializer).app
    back = decode_error(app, encode_error(app, error, BOUNDS), "key", "")
    assert isinstance(back, Exception)
    text = json.dumps(repr(back))
    assert "rain" in text or "Odd" in text or "Unpicklable" in text


# Whole runs


@pytest.fixture
def pay(serializing):
    """A task whose body gives what it is told to, and how often it ran."""

    def make(serializer, value):
        runs = []

        def pay(invoice):
            runs.append(invoice)
            if isinstance(value, Exception):
                raise value
            return value

        place = serializing(serializer)
        return place, place.task(pay, idempotent_on="invoice:{invoice}"), runs

    return make


@pytest.mark.parametrize("serializer", SERIALIZERS)
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_duplicate_gets_the_result_of_the_first(pay, serializer, value):
    place, task, runs = pay(serializer, value)
    first, second = task.delay(42), task.delay(42)
    place.deliver_all()
    assert [first.state, second.state] == [states.SUCCESS] * 2
    assert typed(first.get(timeout=1)) == typed(second.get(timeout=1)) == typed(value)
    assert runs == [42]


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_a_further_copy_of_a_trigger_that_failed_does_not_run_again(pay, serializer):
    place, task, runs = pay(serializer, ValueError("no", 42))
    result = task.delay(42)
    (message,) = place.messages()
    place.deliver(message)
    place.deliver(message)
    assert result.state == states.FAILURE
    assert (type(result.result), result.result.args) == (ValueError, ("no", 42))
    assert runs == [42]


def test_a_failed_execution_is_run_again_by_another_trigger(pay):
    place, task, runs = pay("json", ValueError("no"))
    task.delay(42)
    task.delay(42)
    place.deliver_all()
    assert runs == [42, 42]


def test_a_result_that_does_not_serialise_is_recorded_and_its_duplicate_is_told(pay, caplog, monkeypatch):
    place, task, runs = pay("json", Odd())
    monkeypatch.setattr(Backend, "mark_as_done", lambda *_, **__: None)  # Celery could not store it either
    with caplog.at_level(logging.WARNING, "celery_singleflight"):
        assert task(42) == Odd()
        task.delay(43)
        place.deliver_all()
    reason = "Odd does not serialise as json: Object of type Odd is not JSON serializable"
    assert any(
        record.getMessage().endswith(f"has succeeded, but its result is not stored: {reason}") for record in caplog.records
    )
    for invoice in (42, 43):
        with pytest.raises(ResultUnavailable) as caught:
            task(invoice)
        assert caught.value.execution_key == f"invoice:{invoice}"
        assert "Odd does not serialise as json: Object of type Odd is not JSON serializable" in str(caught.value)
        result = task.delay(invoice)
        place.deliver_all()
        assert result.state == states.FAILURE
        assert isinstance(result.result, ResultUnavailable)
    assert runs == [42, 43]


def test_the_reason_of_a_result_that_is_not_stored_is_told_once_and_plainly(pay):
    _, task, _ = pay("json", Odd())
    task(42)
    with pytest.raises(ResultUnavailable) as caught:
        task(42)
    assert str(caught.value) == (
        "execution invoice:42 has ended, but its result is not stored: Odd does not serialise as json: Object of type Odd "
        "is not JSON serializable"
    )


@pytest.mark.parametrize(
    ("ttl", "runs_twice"),
    [
        (0, True),
        (60, False),
    ],
)
def test_a_result_answers_for_as_long_as_its_ttl(serializing, ttl, runs_twice):
    runs = []

    def pay(invoice):
        runs.append(invoice)
        return len(runs)

    task = serializing("json").task(pay, idempotent_on="invoice:{invoice}", result_ttl=ttl)
    assert [task(42), task(42)] == ([1, 2] if runs_twice else [1, 1])
