"""What the store needs for triggers that wait, and what is left of them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from crowd_app import LOCK_NAME
from waiting_place import own_key

from celery_singleflight import lock

if TYPE_CHECKING:
    from waiting_place import Place

#: Seconds in which the store forgets the messages of triggers that have ended, at most.
_SETTLING = 10.0


class Kept(NamedTuple):
    """What the store keeps. Bytes are of its whole memory, over the number of triggers, which is that of the keys or on one."""

    #: For each key that is held; 0 when there is but one.
    bytes_per_key: float
    #: For each trigger that waits, on top.
    bytes_per_waiter: float
    waiting: dict[str, int]
    #: Keys by kind once all have run, and how many of all of these have no expiry.
    after: dict[str, int]
    without_expiry: int
    lost: int


def on_one_key(place: Place, count: int, *, concurrency: int) -> Kept:
    """Let triggers wait on one key, which a task holds, then drain them."""
    place.start_worker(concurrency)
    place.until_ready()
    place.warm_up(concurrency)
    with place.held():
        place.quiet()
        before = _used(place)
        place.publish(range(count), seconds=0.0)
        place.until("answered", count)
        place.quiet()
        per_waiter = (_used(place) - before) / count
        waiting = place.kinds()
    return _drained(place, count, 0.0, per_waiter, waiting)


def on_many_keys(place: Place, count: int, *, concurrency: int) -> Kept:
    """Let one trigger wait on each key, all of which this process holds, then drain them."""
    place.start_worker(concurrency)
    place.until_ready()
    place.warm_up(concurrency)
    before = _used(place)
    with ExitStack() as held:
        for n in range(count):
            held.enter_context(lock(place.app, LOCK_NAME, own_key(n)))
        with_leases = _used(place)
        place.publish(range(count), seconds=0.0, key=None)
        place.until("answered", count)
        place.quiet()
        per_waiter = (_used(place) - with_leases) / count
        waiting = place.kinds()
    return _drained(place, count, (with_leases - before) / count, per_waiter, waiting)


def _drained(place: Place, count: int, per_key: float, per_waiter: float, waiting: dict[str, int]) -> Kept:
    place.until("end", count)
    place.quiet(1.0)
    place.until_settled(_SETTLING)
    names = list(place.store.scan_iter("{sf*", count=1000))
    pipeline = place.store.pipeline(transaction=False)
    for name in names:
        pipeline.pttl(name)
    without = sum(left == -1 for left in pipeline.execute())
    return Kept(per_key, per_waiter, waiting, place.kinds(), without, count - len(place.notes.of("end")))


def _used(place: Place) -> int:
    """The server's memory without what it has for its connections, which comes and goes."""
    memory = place.store.info("memory")
    return int(memory["used_memory"]) - int(memory["mem_clients_normal"])
