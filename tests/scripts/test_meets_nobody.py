"""A trigger of which nothing is known and that meets nobody: the short way through `enter` leads where the long one does."""

from __future__ import annotations

import re
from copy import copy
from hashlib import sha1
from typing import TYPE_CHECKING, Any, Final

from desk import LOCK, WORKER
from hypothesis import given, settings, strategies as st

from celery_singleflight import store as store_module
from celery_singleflight.claims import Acquired, Claim, Encoded, Outcome, Record, Terms, Waits
from celery_singleflight.keys import KeySpace
from celery_singleflight.lease import Lease
from celery_singleflight.script import Script, load
from celery_singleflight.store import Store

if TYPE_CHECKING:
    from collections.abc import Mapping

EXAMPLES: Final = 200
#: What the clock shows to `enter`, before any other look at it: seconds and microseconds. And the token that follows.
CLOCK: Final = (1_700_000_000, 123_456)
TOKEN: Final = CLOCK[0] * 1_000_000 + CLOCK[1]
#: Within so many ms a key that both ways leave behind goes.
SLACK_MS: Final = 20_000

SECONDS = st.floats(0, 200_000).map(lambda seconds: round(seconds, 3))
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=8)
WAITS = st.just(Waits()) | st.builds(
    Waits,
    keeps=st.booleans(),
    linger=SECONDS,
    digest=TEXTS,
    expires=st.none() | SECONDS,
    which=st.sampled_from(["", "newest", "first", "merged"]),
    delay=SECONDS,
    within=SECONDS,
    merged_with=st.just(""),
    merged_copy=st.just(""),
)
TERMS = st.just(Terms()) | st.builds(
    Terms,
    payload=TEXTS,
    holds=st.just(False),
    delays=st.just(()),
    source=TEXTS,
    scheduled=TEXTS,
    is_redelivered=st.booleans(),
)
CLAIMS = st.builds(
    Claim,
    record=st.builds(Record, st.just(LOCK), st.sampled_from(["t1", "t 2"]), st.sampled_from([None, "invoice"]), st.booleans()),
    owner=st.sampled_from(["o1", "o2"]),
    worker=st.just("") | TEXTS,
    run_id=TEXTS,
    limit=st.integers(1, 3),
    ttl=st.floats(1, 90_000).map(lambda seconds: round(seconds, 3)),
    keep=SECONDS,
    on_held=st.sampled_from(["wait", "skip", "reject", "ask", "queue", "replace", "join"]),
    wait=st.none() | SECONDS,
    copy=TEXTS,
    previous=st.sampled_from(["-", "", "c1"]),
    generation=st.integers(0, 1 << 24),
    first_ms=st.sampled_from(["", "1699999999000"]),
    grace=SECONDS,
    message=st.binary(max_size=100),
    max_deliveries=st.none() | st.integers(1, 5),
    task=st.sampled_from(["shop.bill", "shop.ship"]),
    waits=WAITS,
    ticket=st.just(""),
    terms=TERMS,
)
#: What may be left of others on the lock key: its fencing token, its hold time, a run that has ended.
FENCES = st.none() | st.integers(TOKEN - 2, TOKEN + 2)


def changed(**texts: str) -> Script:
    """Return `enter` at a time that stands still, with some of its text changed."""
    script = copy(load("enter"))
    for old, new in {r"redis\.call\('TIME'\)": f"{{'{CLOCK[0]}', '{CLOCK[1]}'}}", **texts}.items():
        script.source, count = re.subn(old, new, script.source)
        assert count == 1, old
    script.sha = sha1(script.source.encode(), usedforsecurity=False).hexdigest()
    return script


#: One answers by the short way or fails, the other never takes it.
SHORT: Final = changed(
    **{r"\nlocal holder, until_ms, since_ms, token,": r"\ndo return redis.error_reply('no short way') end\g<0>"}
)
LONG: Final = changed(**{r"redis\.call\('EXISTS', execution, trigger, lease, parked\) == 0": "false"})


@given(claim=CLAIMS, fence=FENCES, has_pace=st.booleans(), is_worn=st.booleans())
@settings(max_examples=EXAMPLES, deadline=None)
def test_the_short_way_answers_and_writes_what_the_long_one_does(place, open_connections, claim, fence, has_pace, is_worn):
    store, left = Store(open_connections, KeySpace("sf")), []
    for script in (SHORT, LONG):
        place.keyspace.clear()
        if is_worn:
            run_another(store)
        names = store.names(claim.record)
        if fence is not None:
            place.keyspace.client.set(names["fence"], fence, px=1_000_000)
        if has_pace:
            place.keyspace.client.hset(names["pace"], mapping={"hold_ms": "12.5", "head": "1.00"})
            place.keyspace.client.pexpire(names["pace"], 600_000)
        left.append((enter(store, script, claim), place.keyspace.snapshot()))
    (short, after_short), (long, after_long) = left
    assert isinstance(short, Acquired)
    assert short == long
    assert values(after_short) == values(after_long)
    for name, (_, at) in after_short.items():
        assert abs(at - after_long[name][1]) < SLACK_MS, name


def enter(store: Store, script: Script, claim: Claim) -> Any:
    usual, store_module._ENTER = store_module._ENTER, script
    try:
        return store.enter(claim)
    finally:
        store_module._ENTER = usual


def run_another(store: Store) -> None:
    """Another trigger has run under the same lock key, at the same time."""
    record = Record(LOCK, "another", None)
    claim = Claim(record, "o9", WORKER, "run", limit=1, ttl=30.0, keep=600.0, on_held="wait", message=b"its")
    token = enter(store, LONG, claim).token
    lease = Lease(LOCK, owner="o9", token=token, limit=1, ttl=30.0, max_hold=60.0, requested_at=0.0)
    store.finish(lease, record, Outcome.SUCCEEDED, Encoded("", "", b""), reason="[]", keep=600.0)


def values(snapshot: Mapping[str, tuple[Any, int]]) -> dict[str, Any]:
    """Return what is kept, without the times that the server's own clock has made."""
    kept = {name: value for name, (value, _) in snapshot.items()}
    for name, value in kept.items():
        if name.endswith(":another"):
            kept[name] = {field: text for field, text in value.items() if field != "ended_ms"}
    return kept
