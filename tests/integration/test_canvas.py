"""Chains, groups and chords around protected tasks, with a member contended: nothing in them waits for ever."""

from __future__ import annotations

import pytest
from celery import chain, chord, group
from celery.exceptions import ChordError, TaskRevokedError
from nodes import wait_until

from celery_singleflight import Contended, Skipped


@pytest.fixture
def contended(place, key):
    """A key that is held until the test has ended."""
    holder = place.task("work").delay(key, gate=key)
    wait_until(lambda: place.ledger.runs(key), what="the key is held")
    yield key
    place.ledger.open(key)
    holder.get(timeout=20)


def test_a_chain_with_a_skipped_task_in_the_middle_goes_on(place, contended):
    identity, skip = place.task("identity"), place.task("skip")
    result = chain(identity.si(1), skip.si(contended, "ran"), identity.s()).delay()
    assert result.get(timeout=20) == "skipped"


def test_the_callback_of_a_chord_with_a_skipped_member_runs(place, contended):
    header = [place.task("identity").si(1), place.task("skip").si(contended), place.task("identity").si(2)]
    assert chord(header)(place.task("total").s()).get(timeout=20) == 3


def test_a_group_with_a_skipped_member_is_complete(place, contended):
    result = group(place.task("identity").si(1), place.task("skip").si(contended)).delay()
    assert result.get(timeout=20) == [1, "skipped"]


def test_a_stopped_chain_ends_quietly_and_says_why(place, contended):
    identity = place.task("identity")
    result = chain(identity.si(1), place.task("skip_stop").si(contended), identity.s(), identity.s()).delay()
    with pytest.raises(TaskRevokedError, match="was skipped"):
        result.get(timeout=20)
    assert result.state == result.parent.state == "REVOKED"
    assert result.parent.parent.get(timeout=20) is None


def test_a_stopped_chain_that_ends_in_a_chord_is_revoked_to_its_last_task(place, contended):
    identity, total = place.task("identity"), place.task("total")
    result = chain(
        place.task("skip_stop").si(contended), group(identity.si(1), identity.si(2)), total.s(), identity.s()
    ).delay()
    with pytest.raises(TaskRevokedError):
        result.get(timeout=20)


def test_a_stopped_chain_in_a_group_lets_the_group_end(place, contended):
    identity = place.task("identity")
    result = group(chain(place.task("skip_stop").si(contended), identity.s()), identity.si(2)).delay()
    with pytest.raises(TaskRevokedError):
        result.get(timeout=20)
    assert result.results[1].get(timeout=20) == 2


def test_a_stopped_member_of_a_chord_counts_as_continued(place, contended):
    header = [place.task("identity").si(1), place.task("skip_stop").si(contended)]
    assert chord(header)(place.task("total").s()).get(timeout=20) == 1


def test_a_stopped_chain_in_a_chord_goes_on_because_the_chord_waits_for_its_end(place, contended):
    identity = place.task("identity")
    header = [identity.si(1), chain(place.task("skip_stop").si(contended), identity.si(5))]
    assert chord(header)(place.task("total").s()).get(timeout=20) == 6


def test_a_stopped_chain_in_a_chord_whose_end_is_a_chord_goes_on(place, contended):
    identity, total = place.task("identity"), place.task("total")
    inner = chain(place.task("skip_stop").si(contended), group(identity.si(1), identity.si(2)), total.s())
    assert chord([identity.si(10), inner])(total.s()).get(timeout=20) == 13


def test_a_raised_skip_fails_the_chain_the_group_and_the_chord(place, contended):
    identity, skip_raise = place.task("identity"), place.task("skip_raise")
    with pytest.raises(Skipped):
        chain(identity.si(1), skip_raise.si(contended), identity.s()).delay().get(timeout=20)
    with pytest.raises(Skipped):
        group(identity.si(1), skip_raise.si(contended)).delay().get(timeout=20)
    with pytest.raises((Skipped, ChordError), match="skipped"):
        chord([identity.si(1), skip_raise.si(contended)])(place.task("total").s()).get(timeout=20)
    with pytest.raises((Skipped, ChordError), match="skipped"):
        chord([identity.si(1), chain(skip_raise.si(contended), identity.s())])(place.task("total").s()).get(timeout=20)


def test_a_rejected_member_fails_the_chord_and_its_errback_runs(place, contended):
    errback = place.task("note_error").s(f"{contended}-error")
    body = place.task("total").s().on_error(errback)
    with pytest.raises((Contended, ChordError), match="is held"):
        chord([place.task("identity").si(1), place.task("reject").si(contended)])(body).get(timeout=20)
    wait_until(lambda: place.ledger.read(f"{contended}-error"), what="the errback has run")
    with pytest.raises(Contended):
        group(place.task("identity").si(1), place.task("reject").si(contended)).delay().get(timeout=20)


@pytest.mark.parametrize("shape", ["chain", "group", "chord", "chain in chord"])
def test_members_that_wait_for_their_key_all_run(place, key, shape):
    identity, work, total = place.task("identity"), place.task("work"), place.task("total")
    members = [work.si(key, n, seconds=0.05) for n in range(1, 5)]
    canvas = {
        "chain": chain(*members),
        "group": group(members),
        "chord": chord(members, total.s()),
        "chain in chord": chord([chain(identity.si(0), members[0], members[1]), *members[2:]], total.s()),
    }[shape]
    expected = {"chain": 4, "group": [1, 2, 3, 4], "chord": 10, "chain in chord": 9}[shape]
    assert canvas.delay().get(timeout=30) == expected
    assert len(place.ledger.runs(key)) == 4
    assert place.ledger.overlaps(key) == 0


def test_one_option_reaches_every_member_of_a_group(place, contended):
    members = group(place.task("work").si(contended, n) for n in range(3))
    assert members.apply_async(contention_policy="skip").get(timeout=20) == [None, None, None]


def test_a_link_to_a_task_answered_from_a_stored_result_gets_that_result(place, key):
    pay, note = place.task("pay"), place.task("note")
    assert pay.delay(key).get(timeout=20) == "paid"
    answered = chain(pay.si(key, "other"), place.task("identity").s())
    assert answered.apply_async(link=note.si(f"{key}-link")).get(timeout=20) == "paid"
    wait_until(lambda: place.ledger.read(f"{key}-link"), what="the callback has run")
    assert len(place.ledger.runs(key)) == 1
