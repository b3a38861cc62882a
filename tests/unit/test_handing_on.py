"""In which order the messages of those who are called are published."""

from __future__ import annotations

import pytest

from celery_singleflight import handoff
from celery_singleflight.claims import Handout
from celery_singleflight.handoff import hand_on

CALLS = [Handout(name, "") for name in (b"first", b"second", b"third")]


@pytest.mark.parametrize(
    ("has_front", "may_go_first", "is_called", "published"),
    [
        (True, True, True, [b"third", b"second", b"first"]),
        (True, False, True, [b"first", b"second", b"third"]),
        (True, True, False, [b"first", b"second", b"third"]),
        (False, True, True, [b"first", b"second", b"third"]),
    ],
    ids=["each goes to the front", "others have their share", "it is not called", "there is no front"],
)
def test_the_first_is_before_the_others_in_the_queue(monkeypatch, has_front, may_go_first, is_called, published):
    sent = []

    def publish(app, call, **how):
        assert how == {"is_called": is_called, "at_end": published[0] == b"first"}
        sent.append(call.message)

    monkeypatch.setattr(handoff, "has_front", lambda app: has_front)
    monkeypatch.setattr(handoff, "may_go_first", lambda: may_go_first)
    monkeypatch.setattr(handoff, "publish_again", publish)
    hand_on(None, CALLS, is_called=is_called)
    assert sent == published


def test_one_that_cannot_be_published_is_in_nobodys_way(monkeypatch, caplog):
    sent = []

    def publish(app, call, **_):
        if call.message == b"second":
            raise OSError("no broker")
        sent.append(call.message)

    monkeypatch.setattr(handoff, "has_front", lambda app: True)
    monkeypatch.setattr(handoff, "publish_again", publish)
    hand_on(None, CALLS)
    assert sent == [b"third", b"first"]
    assert "could not be published; a sweeper tries again" in caplog.text


def test_where_nobody_is_called_nobody_asks_for_the_broker():
    hand_on(None, [])
