"""The canonical form: one text for one value, whoever derives it and however it travelled."""

from __future__ import annotations

import enum
import json
import re
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from itertools import combinations
from pathlib import Path, PurePosixPath
from uuid import UUID

import pytest
from django.utils.functional import lazystr
from hypothesis import assume, given, strategies as st
from kombu.exceptions import DecodeError, EncodeError
from kombu.serialization import dumps, loads, registry
from pydantic import BaseModel

from celery_singleflight import LockKeyError
from celery_singleflight.canonical import canonical, digest

SERIALIZERS = ("json", "yaml", "msgpack", "pickle")


class Colour(enum.StrEnum):
    RED = "red"


class OldColour(str, enum.Enum):  # noqa: UP042, as it was written before StrEnum
    RED = "red"


class Size(enum.IntEnum):
    LARGE = 3


class Kind(enum.Enum):
    PLAIN = "plain"
    PAIR = (1, 2)


@dataclass
class Account:
    id: int
    opened: date


@dataclass(slots=True)
class Slotted:
    id: int


class Order(BaseModel):
    id: int
    total: Decimal
    placed: datetime


class Money:
    """A value object with a telling repr and no JSON form."""

    def __init__(self, amount):
        self.amount = amount

    def __repr__(self):
        return f"Money({self.amount!r})"


class WithJson:
    def __json__(self):
        return {"id": 7}


class Opaque:
    pass


class Angled:
    def __repr__(self):
        return "<User: bob>"


class Addressed:
    def __repr__(self):
        return f"Session(connection at 0x{id(self):x})"


def kind(value):
    """The id of a parameter: the same in every process, as its repr may not be."""
    return type(value).__name__


Point = namedtuple("Point", "x y")  # noqa: PYI024, of the old kind too


@pytest.mark.parametrize(("one", "other"), [*combinations([1, "1", True, 1.0, None, "None", "true", [1], {"1": 1}, b"1"], 2)])
def test_values_of_two_types_are_two(one, other):
    assert canonical(one) != canonical(other)
    assert digest(one) != digest(other)


@pytest.mark.parametrize("value", [0, "", False, None, 0.0, -0.0, [], {}])
def test_empty_values_are_told_apart(value):
    others = [0, "", False, None, 0.0, -0.0, [], {}]
    forms = [canonical(other) for other in others]
    assert forms.count(canonical(value)) == 1


def test_a_tuple_is_its_list():
    assert canonical((1, ("a", None))) == canonical([1, ["a", None]]) == '[1,["a",null]]'
    assert canonical(Point(1, 2)) == "[1,2]"


def test_the_order_of_a_dict_does_not_matter():
    assert (
        canonical({"b": {"y": 1, "x": 2}, "a": 3}) == canonical({"a": 3, "b": {"x": 2, "y": 1}}) == '{"a":3,"b":{"x":2,"y":1}}'
    )
    assert canonical(OrderedDict(b=1, a=2)) == canonical(UserDict(a=2, b=1)) == '{"a":2,"b":1}'


def test_the_order_of_a_list_does_matter():
    assert canonical([1, 2]) != canonical([2, 1])


@pytest.mark.parametrize(
    ("key", "name"), [(1, "1"), (True, "true"), (None, "null"), (1.5, "1.5"), (Size.LARGE, "3"), (Colour.RED, "red")]
)
def test_a_dict_key_is_its_json_string(key, name):
    assert canonical({key: "v"}) == canonical({name: "v"}) == f'{{"{name}":"v"}}'


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (UUID("12345678123456781234567812345678"), '"12345678-1234-5678-1234-567812345678"'),
        (datetime(2026, 11, 29, 13, 3, tzinfo=UTC), '"2026-11-29T13:03:00+00:00"'),
        (datetime(2026, 11, 29, 13, 3, 0, 5), '"2026-11-29T13:03:00.000005"'),  # noqa: DTZ001, a naive one
        (date(2026, 11, 29), '"2026-11-29"'),
        (time(13, 3), '"13:03:00"'),
        (Decimal("1.10"), '"1.10"'),
        (timedelta(minutes=1, milliseconds=5), '{"$seconds":60.005}'),
        (b"\xff\x00", '{"$bytes":"/wA="}'),
        (bytearray(b"a"), '{"$bytes":"YQ=="}'),
        (memoryview(b"a"), '{"$bytes":"YQ=="}'),
        ({3, 1, 2}, '{"$set":[1,2,3]}'),
        (frozenset({"b", "a", "1"}), '{"$set":["1","a","b"]}'),
        (PurePosixPath("/srv/x"), '"/srv/x"'),
        (Path("x") / "y", '"x/y"'),
        (Colour.RED, '"red"'),
        (OldColour.RED, '"red"'),
        (Size.LARGE, "3"),
        (Kind.PLAIN, '"plain"'),
        (Kind.PAIR, "[1,2]"),
        (Account(7, date(2026, 1, 2)), '{"id":7,"opened":"2026-01-02"}'),
        (Slotted(7), '{"id":7}'),
        (Order(id=7, total=Decimal("1.10"), placed=datetime(2026, 1, 2, tzinfo=UTC)), None),
        (WithJson(), '{"id":7}'),
        (Fraction(1, 2), "0.5"),
        (lazystr("hello"), '"hello"'),
        (Money(Decimal("1.10")), """{"$Money":"Money(Decimal('1.10'))"}"""),
        (2**80, str(2**80)),
    ],
    ids=kind,
)
def test_a_value_takes_its_standard_json_form(value, form):
    if form is None:
        form = '{"id":7,"placed":"2026-01-02T00:00:00Z","total":"1.10"}'
    assert canonical(value) == form
    assert canonical([{"nested": (value,)}]) == f'[{{"nested":[{form}]}}]'


def test_decimals_that_are_written_differently_are_two():
    assert canonical(Decimal("1.1")) != canonical(Decimal("1.10"))


@pytest.mark.parametrize("cls", [Opaque, Angled, Addressed])
def test_a_repr_that_names_no_value_is_refused(cls):
    with pytest.raises(LockKeyError) as caught:
        canonical([{"who": cls()}])
    assert str(caught.value) == (
        f"an argument of type {__name__}.{cls.__name__} cannot be part of a key: its repr does not name a value. Give lock_on "
        "the names of the arguments that matter, a template such as 'billing:{account.id}', or a function"
    )


@pytest.mark.parametrize("value", [Opaque().__init__, object(), iter([1]), (n for n in [1]), len, lambda: 1], ids=kind)
def test_what_is_no_value_is_refused(value):
    with pytest.raises(LockKeyError, match="cannot be part of a key: its repr does not name a value"):
        canonical(value)


@pytest.mark.parametrize(
    "value", [b"a", timedelta(1), {1, 2}, Money(3), {"$a": 1}, {"$": {"$$": b""}}, {Colour.RED: b"a"}], ids=kind
)
def test_what_json_cannot_say_is_not_the_mapping_that_stands_for_it(value):
    forms = [canonical(value)]
    for _ in range(3):
        forms.append(canonical(json.loads(forms[-1])))
    assert len(set(forms)) == 4
    assert len({canonical([form]) for form in map(json.loads, forms)}) == 4


def test_a_key_that_begins_with_a_dollar_gets_one_more():
    assert canonical(b"a") == '{"$bytes":"YQ=="}'
    assert canonical({"$bytes": "YQ=="}) == '{"$$bytes":"YQ=="}'
    assert canonical({"$$bytes": "YQ==", "a$": 1}) == '{"$$$bytes":"YQ==","a$":1}'


@pytest.mark.parametrize("mapping", [{1: "a", "1": "b"}, {True: "a", "true": "b"}, {None: 1, "null": 2}])
def test_two_keys_of_one_json_form_are_refused(mapping):
    with pytest.raises(LockKeyError) as caught:
        canonical(mapping)
    kind = type(next(iter(mapping))).__name__
    assert str(caught.value) == f"two keys of a mapping have one JSON form; its keys are of type {kind}, str"


# What a publisher may give and a serializer may take. Offsets are whole minutes, as ISO 8601 and YAML write them.
offsets = st.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.dates(),
    st.datetimes(),
    st.datetimes(timezones=offsets),
    st.times(),
    st.uuids(),
    st.decimals(allow_nan=False),
    st.binary(),
    st.sampled_from([Colour.RED, OldColour.RED, Size.LARGE]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(st.text() | st.text("$a", min_size=1) | st.integers(), inner, max_size=4),
    ),
    max_leaves=12,
)


def delivered(value, serializer):
    """Return what the worker gets, or fail when the serializer does not take the value."""
    content_type, encoding, body = dumps(value, serializer=serializer)
    return loads(body, content_type, encoding, accept={registry.name_to_type[serializer]})


@pytest.mark.parametrize("serializer", SERIALIZERS)
@given(value=values)
def test_publisher_and_worker_derive_the_same_form(serializer, value):
    assume(_has_one_form(value))
    try:
        worker_value = delivered(value, serializer)
    except (EncodeError, DecodeError):  # what it does not take reaches no worker
        assume(False)
    assert canonical(worker_value) == canonical(value)
    assert digest(worker_value) == digest(value)


def _has_one_form(value):
    try:
        canonical(value)
    except LockKeyError:
        return False
    return True


def _has_a_dollar_key(data):
    if isinstance(data, list):
        return any(map(_has_a_dollar_key, data))
    if isinstance(data, dict):
        return any(key.startswith("$") or _has_a_dollar_key(item) for key, item in data.items())
    return False


@pytest.mark.parametrize(
    ("value", "serializers"),
    [
        ([1, "1", True, 1.0, None, {"a": [2]}], SERIALIZERS),
        ((1, (2,)), SERIALIZERS),
        (b"\xff", SERIALIZERS),
        (b"text", SERIALIZERS),
        (date(2026, 1, 2), ("json", "yaml", "pickle")),
        (datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC), ("json", "yaml", "pickle")),
        (UUID(int=7), ("json", "pickle")),
        (Decimal("1.10"), ("json", "pickle")),
        (time(1, 2), ("json", "pickle")),
        ({3, 1}, ("yaml", "pickle")),
        (Account(1, date(2026, 1, 2)), ("pickle",)),
        (timedelta(1), ("pickle",)),
        (PurePosixPath("/x"), ("pickle",)),
        (Kind.PAIR, ("pickle",)),
        (WithJson(), ("json", "pickle")),
    ],
    ids=kind,
)
def test_what_a_serializer_takes_keeps_its_form(value, serializers):
    for serializer in serializers:
        assert canonical(delivered(value, serializer)) == canonical(value), serializer


@given(value=values)
def test_the_form_is_made_of_itself_but_for_what_a_dollar_marks(value):
    assume(_has_one_form(value))
    form = canonical(value)
    data = json.loads(form)
    assert (canonical(data) == form) == (not _has_a_dollar_key(data))


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def typed(value):
    """Tell apart what Python's `==` takes for one: 1, True and 1.0; 0.0 and -0.0."""
    if isinstance(value, list):
        return [typed(item) for item in value]
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    return (type(value).__name__, repr(value))


@given(one=plain_values, other=plain_values)
def test_two_forms_are_equal_only_for_equal_data(one, other):
    assert (canonical(one) == canonical(other)) == (typed(one) == typed(other))


@given(value=plain_values)
def test_a_digest_is_sixteen_hexadecimal_digits(value):
    assert re.fullmatch(r"[0-9a-f]{16}", digest(value))
