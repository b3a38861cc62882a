"""One kind of task, as a feature of the matrix sees it, and somebody else who holds its lock keys."""

from __future__ import annotations

import contextvars
import json
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from nodes import wait_until
from twin_request import bare

from celery_singleflight import lock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matrix_axes import Policy
    from matrix_feature import Feature


class Twin:
    """The tasks of one kind by their bare names: `t.add` is `plain.add`, `protected.add` or `requeue.add`."""

    def __init__(self, place: Any, kind: str, policy: Policy | None = None) -> None:
        self.place = place
        self.kind = kind
        #: The contention policy under which the triggers wait; None when nobody holds a key.
        self.policy = policy
        self.key = f"{kind}-{uuid4().hex}"
        self.holder: Holder | None = None
        self._past = len(self._requests())

    def __getattr__(self, name: str) -> Any:
        return self.place.app.tasks[f"{self.kind}.{name}"]

    @property
    def is_contended(self) -> bool:
        return self.policy is not None

    def hooks(self, result: Any, count: int) -> list[str]:
        """Wait for so many hooks of the task with that result, and return all there are."""

        def seen() -> list[str]:
            return [row["what"] for row in self.place.ledger.read(result.id)]

        wait_until(lambda: len(seen()) >= count, what=f"{count} hooks")
        return seen()

    def noted(self, name: str = "") -> int:
        """How often a body has noted the twin's key, with this ending."""
        return len(self.place.ledger.read(f"{self.key}{name}"))

    def until_noted(self, *names: str) -> None:
        """Wait until bodies have noted the twin's key with each of these endings; with none if there are no endings."""
        for name in names or ("",):
            wait_until(lambda name=name: self.noted(name), 20, f"a body has noted {name or 'the key'}")

    def requests(self) -> list[Any]:
        """What the bodies of this kind have seen of their requests since the twin was made, in an order of its own."""
        seen = [json.dumps(row["sees"], sort_keys=True).replace(self.key, "KEY") for row in self._requests()[self._past :]]
        return [json.loads(text) for text in sorted(seen)]

    def _requests(self) -> list[dict[str, Any]]:
        return [row for row in self.place.ledger.rows("before_start") if row["task"].partition(".")[0] == self.kind]

    def until_it_waits(self, result: Any) -> None:
        """Wait until a worker has the message, and until it has met contention if somebody holds its key.

        Then the pool does not have it, nor will at once: what looks again and again waits longer each time.
        """
        if self.holder:
            looks = 1 if self.policy.looks == 1 else 4
            wait_until(lambda: self.holder.met().get(result.id, 0) >= looks, 20, "it has met contention")
            wait_until(lambda: not self.is_for_a_pool(result), 20, "the delivery that has met it is over")
        else:
            wait_until(lambda: f"[{result.id}] received" in self.place.logs(), 20, "a worker has it")

    def until_it_runs(self, result: Any) -> None:
        """Wait until its body has noted the twin's key, and until the worker has heard from its pool that it runs.

        Before that Celery takes a trigger that is revoked for one that waits, and says so at once.
        """
        self.until_noted()
        wait_until(lambda: self.is_at_work(result), 20, "the worker knows that it runs")

    def let_go(self) -> None:
        """Have the holder let go of the keys, if there is one."""
        if self.holder:
            self.holder.let_go()

    def is_at_work(self, result: Any) -> bool:
        """Whether the worker has heard from its pool that the trigger runs."""
        return result.id in self._told("active")

    def is_for_a_pool(self, result: Any) -> bool:
        """Whether the worker has given the message to its pool, or is about to, and has not heard of its end."""
        return any(result.id in self._told(kind) for kind in ("reserved", "active"))

    def _told(self, kind: str) -> str:
        return json.dumps(self.place.app.control.broadcast(kind, reply=True, limit=1, timeout=10), default=repr)

    @contextmanager
    def always_eager(self) -> Iterator[None]:
        """Have calls run where they are made."""
        self.place.app.conf.task_always_eager = True
        try:
            yield
        finally:
            self.place.app.conf.task_always_eager = False

    def revoke(self, result: Any, **how: Any) -> None:
        """Revoke and wait until the worker has heard of it."""
        assert self.place.app.control.revoke(result.id, reply=True, limit=1, timeout=10, **how)

    def revoke_by_stamp(self, stamps: dict[str, list[str]]) -> None:
        """Revoke what has these stamps and wait until the worker has heard of it."""
        assert self.place.app.control.revoke_by_stamped_headers(stamps, reply=True, limit=1, timeout=10)


class Holder:
    """Somebody else, who holds the lock keys of some tasks of a twin until its triggers wait."""

    def __init__(self, twin: Twin, feature: Feature) -> None:
        self.twin = twin
        self.feature = feature
        self.names = [f"{twin.kind}.{name}" for name in feature.holds]
        self.began_at = time.monotonic()
        self.let_go_at = 0.0
        self._asking: Counter[str] | None = None
        self._context, self._locks, self._once = contextvars.Context(), ExitStack(), threading.Lock()

    def hold(self) -> None:
        for name in self.names:
            self._context.run(self._locks.enter_context, lock(self.twin.place.app, name, wait=10))
        if self.feature.in_place:
            self._asking = self._locks.enter_context(asking(self.twin.place.store(), self.names))

    def met(self) -> dict[str, int]:
        """Triggers, or calls, that have met contention, and how often."""
        if self._asking is not None:
            return dict(self._asking)
        rows = [row for name in self.names for row in self.twin.place.ledger.read(name, "contended")]
        ids = [row["task_id"] for row in rows if row["at"] > self.began_at]
        return {task_id: ids.count(task_id) for task_id in ids}

    def is_done(self) -> bool:
        """Whether as many triggers wait as the feature wants."""
        looks = self.twin.policy.looks if self.twin.policy and self.feature.looks_again else 1
        met = self.met().values()
        return self.feature.waiting is not None and len(met) >= self.feature.waiting and min(met, default=0) >= looks

    def let_go(self) -> None:
        with self._once:
            if not self.let_go_at:
                self.let_go_at = time.monotonic()
                self._context.run(self._locks.close)


@contextmanager
def asking(store: Any, names: list[str]) -> Iterator[Counter[str]]:
    """Count how often each owner token asks the store for a lock key of these names, as the server sees it."""
    asked: Counter[str] = Counter()
    last = uuid4().hex
    with store.monitor() as monitor:

        def listen() -> None:
            for heard in monitor.listen():
                words = heard["command"].split(" ")
                if last in words:
                    return
                if words[0] != "EVALSHA":
                    continue
                keys, owner = words[3 : 3 + int(words[2])], words[3 + int(words[2])]
                # While the key is held, only who asks for it has to do with its fencing tokens.
                if any(f":fence:{name}[" in key for key in keys for name in names):
                    asked[owner] += 1

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            yield asked
        finally:
            store.echo(last)
            listener.join()


@contextmanager
def held(twin: Twin, feature: Feature) -> Iterator[Holder]:
    """Hold the keys until as many triggers wait as the feature wants, or it lets go; fails when they did not wait."""
    holder = twin.holder = Holder(twin, feature)
    over = threading.Event()
    holder.hold()

    def watch() -> None:
        while not over.wait(0.02) and not holder.let_go_at:
            if holder.is_done() or time.monotonic() > holder.began_at + 20:
                holder.let_go()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield holder
    finally:
        over.set()
        watcher.join()
        holder.let_go()


def started_early(twin: Twin, holder: Holder) -> list[str]:
    """Bodies that began though somebody held their key."""
    rows = [row for row in twin.place.ledger.rows("before_start") if row["task"] in holder.names]
    return [bare(row["task"]) for row in rows if holder.began_at < row["at"] < holder.let_go_at]
