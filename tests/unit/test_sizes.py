"""Results have a size that the store takes, compressed or not; what is larger is not stored, and its outcome is."""

from __future__ import annotations

import json
import logging
import math
import zlib

import pytest
from celery import states
from kombu.exceptions import ContentDisallowed
from kombu.serialization import loads

from celery_singleflight import ResultUnavailable, StepError, StepResultUnavailable, resolve_step
from celery_singleflight.claims import Encoded
from celery_singleflight.results import Bounds, decode, decode_error, encode, encode_error

COMPRESSIONS = {"gzip": "application/x-gzip", "bzip2": "application/x-bz2", "lzma": "application/x-lzma"}
NOTHING = Encoded("", "", b"")
LONG = "0123456789" * 1000


# The stored form


@pytest.mark.parametrize(("limit", "is_stored"), [(9, False), (10, True), (math.inf, True)])
def test_a_value_is_stored_up_to_the_limit(place, limit, is_stored):
    encoded, why_not = encode(place.app, "12345678", Bounds(limit))
    assert (encoded != NOTHING, why_not == "") == (is_stored, is_stored)
    assert is_stored or why_not == "its stored form has 10 bytes, result_limit is 9"


def test_none_is_stored_whatever_the_limit(place):
    encoded, why_not = encode(place.app, None, Bounds(0))
    assert (decode(place.app, encoded, "key", ""), why_not) == (None, "")


def test_a_limit_is_on_bytes_and_not_on_characters(make_place):
    app = make_place(result_serializer="yaml", accept_content=["yaml"]).app
    _, why_not = encode(app, "\N{SNOWMAN}" * 5, Bounds(20))
    assert why_not.endswith("bytes, result_limit is 20")


@pytest.mark.parametrize("serializer", ["json", "pickle", "yaml"])
@pytest.mark.parametrize(("compression", "content_type"), COMPRESSIONS.items())
def test_what_is_compressed_says_so_and_comes_back_as_itself(make_place, serializer, compression, content_type):
    app = make_place(result_serializer=serializer, accept_content=["json", serializer]).app
    plain, _ = encode(app, LONG, Bounds())
    encoded, why_not = encode(app, LONG, Bounds(1024, compression))
    assert why_not == ""
    assert encoded.content_type == f"{plain.content_type}; compression={content_type}"
    assert len(encoded.body) < 1024 < len(plain.body)
    assert decode(app, encoded, "key", "") == LONG


@pytest.mark.parametrize("value", [LONG[:1021], "no"], ids=["just below", "tiny"])
def test_what_is_small_is_not_compressed(place, value):
    assert encode(place.app, value, Bounds(2048, "gzip")) == encode(place.app, value, Bounds())


def test_what_compression_makes_larger_is_not_compressed(place, monkeypatch):
    monkeypatch.setattr("celery_singleflight.results.compress", lambda body, _: (body + b"!", "application/x-gzip"))
    assert encode(place.app, LONG, Bounds(math.inf, "gzip")) == encode(place.app, LONG, Bounds())


def test_a_limit_counts_what_is_stored(place):
    encoded, why_not = encode(place.app, LONG, Bounds(20, "gzip"))
    assert encoded == NOTHING
    assert why_not.endswith("bytes, result_limit is 20")
    assert int(why_not.split()[4]) < 1000


def test_who_does_not_know_of_compression_refuses_the_whole(place):
    encoded, _ = encode(place.app, LONG, Bounds(1024, "gzip"))
    with pytest.raises(ContentDisallowed, match="application/json; compression=application/x-gzip"):
        loads(encoded.body, encoded.content_type, encoded.content_encoding, accept={"application/json"})


def test_compression_is_no_way_around_what_the_app_accepts(make_place):
    pickling = make_place(result_serializer="pickle", accept_content=["pickle"]).app
    encoded, _ = encode(pickling, LONG, Bounds(math.inf, "gzip"))
    with pytest.raises(ContentDisallowed):
        decode(make_place().app, encoded, "key", "")


@pytest.mark.parametrize(
    ("how", "body", "reason"),
    [
        ("application/x-gzip", zlib.compress(b"0" * 5000), "expands from application/x-gzip to more than 4999 bytes"),
        ("application/x-gzip", zlib.compress(b"0" * 100)[:-5], "it is not whole"),
        ("application/x-gzip", b"no such thing", "it cannot be expanded from application/x-gzip: error"),
        ("application/zzz", b"", "it is compressed as application/zzz, which kombu cannot read here"),
    ],
    ids=["too much", "cut off", "broken", "unknown"],
)
def test_what_cannot_be_read_is_no_result_and_says_why(place, monkeypatch, how, body, reason):
    monkeypatch.setattr("celery_singleflight.results._LARGEST", 4999)
    with pytest.raises(ResultUnavailable) as caught:
        decode(place.app, Encoded(f"application/json; compression={how}", "utf-8", body), "invoice:42", "")
    assert reason in caught.value.reason


def test_what_would_not_be_read_is_not_compressed(place, monkeypatch):
    monkeypatch.setattr("celery_singleflight.results._LARGEST", 4999)
    assert encode(place.app, LONG, Bounds(math.inf, "gzip")) == encode(place.app, LONG, Bounds())


# Errors


@pytest.mark.parametrize("serializer", ["json", "pickle"])
@pytest.mark.parametrize("limit", [0, 200, 1024])
def test_an_error_that_is_too_large_keeps_its_type_and_as_much_of_its_text_as_fits(make_place, serializer, limit):
    app = make_place(result_serializer=serializer, accept_content=["json", serializer]).app
    encoded = encode_error(app, ValueError(LONG), Bounds(limit))
    back = decode_error(app, encoded, "key", "")
    assert type(back) is ValueError
    assert str(back).endswith("… (10000 characters)")
    assert LONG.startswith(str(back).partition("…")[0])
    assert len(encoded.body) <= max(limit, 200)


def test_an_error_that_fits_when_compressed_is_whole(place):
    back = decode_error(place.app, encode_error(place.app, ValueError(LONG), Bounds(1024, "gzip")), "key", "")
    assert back.args == (LONG,)


# Whole runs


@pytest.fixture
def pay():
    """A body that says how often it ran, and gives what it is told to."""

    def make(place, value, **options):
        runs = []

        def pay(invoice):
            runs.append(invoice)
            if isinstance(value, Exception):
                raise value
            return value

        return place.task(pay, idempotent_on="invoice:{invoice}", **options), runs

    return make


def test_a_result_over_the_limit_is_given_to_its_caller_and_not_to_its_duplicate(place, pay, caplog):
    task, runs = pay(place, LONG, result_limit=5000)
    with caplog.at_level(logging.WARNING, "celery_singleflight"):
        assert place.result_of(task.delay(42)) == LONG
    assert f"{task.name}(" in caplog.text
    assert "has succeeded, but its result is not stored: its stored form has 10002 bytes, result_limit is 5000" in caplog.text
    assert "0123456789" not in caplog.text
    duplicate = task.delay(42)
    place.deliver_all()
    assert duplicate.state == states.FAILURE
    assert type(duplicate.result) is ResultUnavailable
    assert duplicate.result.reason == "its stored form has 10002 bytes, result_limit is 5000"
    with pytest.raises(ResultUnavailable):
        task(42)
    assert runs == [42]


def test_a_direct_call_keeps_to_the_limit_too(place, pay):
    task, runs = pay(place, LONG, result_limit=5000)
    assert task(42) == LONG
    with pytest.raises(ResultUnavailable):
        task(42)
    assert runs == [42]


@pytest.mark.parametrize("how", ["option", "setting"])
def test_compression_is_chosen_for_a_task_or_for_the_app(make_place, pay, how):
    chosen = {"result_limit": 5000, "result_compression": "gzip"}
    place = make_place(**({f"singleflight_{name}": value for name, value in chosen.items()} if how == "setting" else {}))
    task, runs = pay(place, LONG, **(chosen if how == "option" else {}))
    results = [task.delay(42), task.delay(42)]
    place.deliver_all()
    assert [result.get(timeout=1) for result in results] == [LONG, LONG]
    assert runs == [42]
    stored = place.client.hget(place.store.keys.execution(task.name, "invoice:42"), "content_type")
    assert stored == "application/json; compression=application/x-gzip"


def test_a_failure_with_a_huge_text_is_stored_cut(place, pay):
    task, _ = pay(place, ValueError(LONG), result_limit=1000)
    result = task.delay(42)
    place.deliver_all()
    assert result.result.args == (LONG,), "what Celery stores is Celery's"
    name = next(name for name in place.client.scan_iter() if ":trigger:" in name)
    stored = json.loads(place.client.hget(name, "body"))
    assert stored["exc_type"] == "ValueError"
    assert len(json.dumps(stored)) <= 1000


# Steps and cursors


def test_a_step_over_the_limit_is_done_and_says_so(place):
    done = []

    def work(self):
        self.step("read", lambda: done.append("read") or LONG)

    task = place.task(work, bind=True, result_limit=5000)
    with pytest.raises(StepResultUnavailable) as caught:
        task()
    assert caught.value.reason == "its stored form has 10002 bytes, result_limit is 5000"
    assert done == ["read"]


def test_a_cursor_over_the_limit_stays(place):
    stood = []

    def work(self):
        cursor = self.cursor("page")
        cursor.set("first")
        try:
            cursor.set(LONG)
        finally:
            stood.append(cursor.get())

    with pytest.raises(StepError, match="cursor page: its stored form has 10002 bytes, result_limit is 5000"):
        place.task(work, bind=True, result_limit=5000)()
    assert stood == ["first"]


def test_a_person_can_give_a_step_no_result_over_the_limit(place):
    def work():
        pass

    task = place.task(work, result_limit=5000)
    with pytest.raises(StepError, match="step read: its result cannot be stored: its stored form has 10002 bytes"):
        resolve_step(place.app, task.name, "read", task_id="t1", happened=True, result=LONG)
