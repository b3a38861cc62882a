"""Lock keys never meet by accident, and all names of one lock name live in one hash slot."""

from __future__ import annotations

import re
from itertools import count

import pytest
from hypothesis import assume, given, strategies as st
from redis.crc import key_slot
from test_canonical import plain_values, typed

from celery_singleflight.claims import Record
from celery_singleflight.keys import BUCKETS, AsNamed, KeySpace, LockKey, bounded

names = st.text(min_size=1) | st.text('ab["],{}1\\', min_size=1)
scopes = st.lists(plain_values | st.text('ab["],{}1\\'), max_size=4)
#: What people put into keys, the braces of hash tags among it.
texts = st.text() | st.text("{}a0:", max_size=12)


def is_one(one, other):
    return typed(list(one)) == typed(list(other))


def test_a_lock_key_reads_as_its_name_and_scope():
    assert str(LockKey.of("billing", ["acct_123"])) == 'billing["acct_123"]'
    assert str(LockKey.of("billing", [])) == "billing[]"


def test_a_digested_lock_key_shows_its_name_and_nothing_of_its_scope():
    assert re.fullmatch(r"billing\([0-9a-f]{16}\)", str(LockKey.digested("billing", ["4111 1111"])))
    assert LockKey.digested("billing", ["a"]) != LockKey.digested("billing", ["b"])


@given(names, scopes, names, scopes)
def test_a_digested_lock_key_is_that_of_one_name_and_one_scope_and_no_plain_one(name, scope, other_name, other_scope):
    one, other = LockKey.digested(name, scope), LockKey.digested(other_name, other_scope)
    assert (one.text == other.text) == (name == other_name and is_one(scope, other_scope))
    assert one.text != LockKey.of(other_name, other_scope).text


#: What tenants may think of: globs, hash tags, separators of our own, look-alikes, and what is far too long.
ODD = ["*", "?", "[a-z]", "{", "}", "{sf1}", ":", "%3A", "\n", "\r\n", "\0", " "]
ODD += ["a", "\u0430", "\u00e9", "e\u0301", "\uff41", "x" * 10_000]
odd = st.lists(st.sampled_from(ODD), min_size=1, max_size=4).map("".join)


@given(name=odd, other_name=odd, one=odd, two=odd)
def test_no_key_of_a_tenant_reaches_that_of_another(name, other_name, one, two):
    space = KeySpace("sf")
    same = (name, one) == (other_name, two)
    for make in (space.execution, space.trigger):
        assert (make(name, one) == make(other_name, two)) == same
    for make in (LockKey.of, LockKey.digested):
        found, other = make(name, [one]), make(other_name, [two])
        assert (found.text == other.text) == same
        assert set(space.lock(found)[:-1]).isdisjoint(space.lock(other)[:-1]) != same


@given(task_id=odd.filter(lambda text: "\n" not in text), execution_key=odd)
def test_a_record_is_known_again_by_its_member(task_id, execution_key):
    for record in (Record(LockKey("n", ""), task_id, None), Record(LockKey("n", ""), task_id, execution_key)):
        assert Record.of_member(LockKey("n", ""), record.member) == record


@given(names, scopes, names, scopes)
def test_two_lock_keys_are_equal_only_for_one_name_and_one_scope(name, scope, other_name, other_scope):
    same = name == other_name and is_one(scope, other_scope)
    one, other = LockKey.of(name, scope), LockKey.of(other_name, other_scope)
    assert (one == other) == same
    assert (one.text == other.text) == same


@given(scope=scopes, cut=st.data())
def test_a_scope_that_moves_into_the_name_makes_another_key(scope, cut):
    text = LockKey.of("n", scope).text
    assume(len(text) <= 200)
    at = cut.draw(st.integers(1, len(text) - 1))
    for other_scope in ([], [1], [text[at:]], ["]"]):
        other = LockKey.of(text[:at], other_scope)
        assert other.text != text or (text[:at] == "n" and is_one(scope, other_scope))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["1_b-2"], [1, 2]),
        (["a", "b"], ["a,b"]),
        (["a", "b"], ['a","b']),
        ([["a"], "b"], ["a", ["b"]]),
        ([], [None]),
        ([""], []),
        ([[]], []),
        (["x", None], ["x"]),
    ],
)
def test_scopes_that_would_read_alike_are_kept_apart(one, other):
    assert LockKey.of("f", one) != LockKey.of("f", other)


@given(scope=st.lists(st.text("ab", min_size=150), min_size=2, max_size=3), at=st.integers(0, 1))
def test_long_scopes_that_differ_anywhere_are_two_lock_keys(scope, at):
    other = [*scope[:at], f"{scope[at]}x", *scope[at + 1 :]]
    assert LockKey.of("n", scope).text != LockKey.of("n", other).text


@given(st.text(min_size=0, max_size=600))
def test_a_text_keeps_its_beginning_and_never_gets_longer_than_200(text):
    short = bounded(text)
    assert len(short) <= 200
    assert short == text or (len(text) >= 200 and short[:167] == text[:167] and short[167] == "#")


@given(st.text("ab", min_size=200, max_size=400))
def test_nobody_can_give_a_text_that_is_what_becomes_of_a_longer_one(text):
    short = bounded(text)
    assert bounded(str(short)) != short
    assert bounded(AsNamed(short)) == short, "but what is a name already stays"


@given(st.text("ab", min_size=190, max_size=230), st.text("ab", min_size=190, max_size=230))
def test_two_long_texts_stay_two(one, other):
    assert (bounded(one) == bounded(other)) == (one == other)


@given(name=names, scope=scopes, other_scope=scopes, task_id=texts, execution_key=texts, prefix=st.text("abc:-", max_size=5))
def test_all_names_of_one_lock_name_share_a_slot(name, scope, other_scope, task_id, execution_key, prefix):
    space = KeySpace(prefix)
    found = [
        *space.lock(LockKey.of(name, scope)),
        *space.lock(LockKey.of(name, other_scope)),
        space.execution(name, execution_key),
        space.trigger(name, task_id),
    ]
    assert len({key_slot(key.encode()) for key in found}) == 1
    assert all(key.startswith(f"{{{prefix}") for key in found)
    assert len(set(found)) == (19 if not is_one(scope, other_scope) else 11)


@given(names)
def test_the_hash_tag_is_the_prefix_and_a_bucket(name):
    root = KeySpace("sf").trigger(name, "id").partition(":")[0]
    assert root in {f"{{sf{bucket}}}" for bucket in range(BUCKETS)}


def test_lock_names_are_spread_over_the_buckets():
    space = KeySpace("sf")
    used = {space.trigger(f"shop.task_{n}", "id").partition(":")[0] for n in range(1000)}
    assert len(used) == BUCKETS


@given(prefix=st.text("ab", max_size=3), other=st.text("ab", max_size=3), name=names)
def test_two_prefixes_share_no_name(prefix, other, name):
    assume(prefix != other)
    assert KeySpace(prefix).trigger(name, "id") != KeySpace(other).trigger(name, "id")


@given(name=names, other=names, one=texts, two=texts)
def test_an_execution_key_and_a_task_id_belong_to_their_lock_name(name, other, one, two):
    space = KeySpace("sf")
    if name != other:
        assert space.execution(name, one) != space.execution(other, one)
        assert space.trigger(name, one) != space.trigger(other, one)
    if one != two:
        assert space.execution(name, one) != space.execution(name, two)
        assert space.trigger(name, one) != space.trigger(name, two)
    assert space.execution(name, one) != space.trigger(name, one)


def test_a_colon_moves_nothing_from_the_execution_key_into_the_lock_name():
    space = KeySpace("sf")
    bucket = space.execution("billing", "").partition(":")[0]
    # Two lock names of one bucket, of which one goes on where the other ends.
    tail = next(n for n in count() if space.execution(f"billing:{n}", "").startswith(bucket + ":"))
    assert space.execution(f"billing:{tail}", "42") != space.execution("billing", f"{tail}:42")
    assert space.trigger(f"billing:{tail}", "42") != space.trigger("billing", f"{tail}:42")


@given(name=st.text(max_size=900, min_size=1), scope=st.lists(st.text(max_size=900)), task_id=st.text(max_size=900))
def test_every_name_in_the_store_is_bounded(name, scope, task_id):
    space = KeySpace("sf")
    found = [*space.lock(LockKey.of(name, scope)), space.execution(name, task_id), space.trigger(name, task_id)]
    assert all(len(key) < 450 for key in found)
