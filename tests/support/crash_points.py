"""Points at which a process of the crash tests dies. The package has no hooks: its functions and Celery's are wrapped here.

A point is armed for one trigger by a file beside the ledger, `crash-<point>-<how>-<task id>`. The process that succeeds in
removing it writes that it dies, and is killed exactly there: itself (`child`), or its worker's main process first (`worker`).
Or it only stands still there (`pause`), until the gate `resume-<task id>` is open.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from celery import Celery
    from ledger import Ledger

#: Every point, and who is there: "publisher" is any process that sends a task, a pool's child among them.
POINTS: Final = {
    "publish:before": "publisher",
    "publish:after": "publisher",
    "enter:before": "child",
    "enter:after": "child",
    "body:begin": "child",
    "body:end": "child",
    "finish:after": "child",
    "result:before": "child",
    "result:after": "child",
    "ack:before": "main",
    "ack:after": "main",
    "settle:before": "child",
    "settle:after": "child",
    "requeue:before-publish": "child",
    "requeue:after-publish": "child",
    "park:after": "child",
    "linger:begin": "child",
    "linger:granted": "child",
    "call:before-publish": "child",
    "call:after-publish": "child",
    "follow:after": "child",
    "retry:after-publish": "child",
    "abandon:after": "child",
    "release:before": "main",
    "release:after": "main",
    "conclude:after": "main",
    "replay:before-publish": "publisher",
    "replay:after-publish": "publisher",
    "sweep:after-look": "main",
    "sweep:after-handout": "main",
    "sweep:after-publish": "main",
}
HOWS: Final = ("child", "worker", "pause")
#: The ledger's key of what died.
DEATHS: Final = "deaths"


def arm(ledger: Ledger, point: str, how: str, task_id: str) -> None:
    """Let the next process that comes to the point with this trigger die there."""
    assert point in POINTS, point
    (ledger.directory / f"crash-{point}-{how}-{task_id}").touch()


def deaths(ledger: Ledger, task_id: str) -> list[dict[str, Any]]:
    """Those that died at a point for this trigger, in order."""
    return [row for row in ledger.read(DEATHS) if row["task_id"] == task_id]


def live_overlaps(ledger: Ledger, key: str) -> int:
    """How many bodies began while the process of another one of the same key lived, and had not ended it."""
    died = {row["pid"]: row["at"] for row in ledger.read(DEATHS)}
    ends = {row["run"]: row["at"] for row in ledger.read(key, "end")}
    overlaps, busy_until = 0, 0.0
    for row in ledger.runs(key):
        overlaps += row["at"] < busy_until
        busy_until = max(busy_until, ends.get(row["run"], died.get(row["pid"], float("inf"))))
    return overlaps


def install(app: Celery) -> None:
    """Wrap what the points are at; for a process that is going to be killed, before it forks."""
    from celery.backends.base import Backend  # noqa: PLC0415, publishers and workers only
    from celery.worker.request import Request  # noqa: PLC0415, as above

    from celery_singleflight import entering, handoff, replaying, run, sweeper, waiting  # noqa: PLC0415, as above
    from celery_singleflight.claims import Acquired  # noqa: PLC0415, publishers and workers only
    from celery_singleflight.departure import Departure  # noqa: PLC0415, as above
    from celery_singleflight.store import Store  # noqa: PLC0415, as above

    at = _Points(app.ledger)
    around = at.around

    around(
        app.amqp, "send_task_message", "publish:before", "publish:after", lambda _, __, message, **___: [message.headers["id"]]
    )
    around(Store, "enter", "enter:before", "enter:after", lambda _, claim: [claim.record.task_id])
    around(Store, "finish", "", "finish:after", lambda _, __, record, *___, **____: [record.task_id])
    around(Store, "settle", "settle:before", "settle:after", lambda _, ended: [it.record.task_id for it in ended if it.is_done])
    around(Backend, "mark_as_done", "result:before", "result:after", lambda _, task_id, *__, **___: [task_id])
    around(Request, "acknowledge", "ack:before", "ack:after", lambda request: [request.id])
    around(
        waiting, "_publish", "requeue:before-publish", "requeue:after-publish", lambda trigger, *_, **__: [trigger.request.id]
    )
    around(run, "park", "park:after", "", lambda trigger, _: [trigger.request.id])
    around(entering, "_linger", "linger:begin", "", lambda _, trigger, *__: [trigger.request.id])
    around(
        Store,
        "enter_after_baton",
        "",
        "linger:granted",
        lambda _, claim, *__: [claim.record.task_id],
        found=lambda entered: [] if isinstance(entered, Acquired) else None,
    )
    around(handoff, "publish_again", "call:before-publish", "call:after-publish", lambda _, it, **__: [_id_in(it.message)])
    around(
        replaying,
        "hand_on",
        "replay:before-publish",
        "replay:after-publish",
        lambda _, calls, **__: [_id_in(call.message) for call in calls],
    )
    around(Store, "follow", "", "follow:after", lambda _, claim, by: [claim.record.task_id])
    around(run, "_give_back", "retry:after-publish", "abandon:after", _given_back_to_a_later_generation)
    around(Departure, "give_back", "release:before", "release:after", lambda departure, **_: [departure._request.id])
    around(Departure, "conclude", "", "conclude:after", lambda departure, *_, **__: [departure._request.id])
    around(Store, "due", "", "sweep:after-look", found=lambda records: [record.task_id for record in records])
    around(
        Store,
        "rescue",
        "",
        "sweep:after-handout",
        lambda _, record: [record.task_id],
        found=lambda handout: [] if handout else None,
    )
    around(sweeper, "publish_again", "", "sweep:after-publish", found=lambda task_id: [task_id])

    write = app.ledger.write

    def write_and_die(key: str, what: str, **facts: Any) -> None:
        write(key, what, **facts)
        at.reach(f"body:{what}", [facts.get("task_id")])

    app.ledger.write = write_and_die


def _given_back_to_a_later_generation(trigger: Any, *, generation: int | None = None, **_: Any) -> list[str]:
    return [] if generation is None else [trigger.request.id]


def _id_in(message: bytes) -> str:
    """The id of the trigger whose message the store keeps."""
    return str(json.loads(message.partition(b"\n")[0])["headers"]["id"])


class _Points:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._main = os.getpid()

    def around(
        self,
        owner: Any,
        name: str,
        before: str,
        after: str,
        ids: Callable[..., list[str]] = lambda *_, **__: [],
        found: Callable[[Any], list[str] | None] = lambda _: [],
    ) -> None:
        """Wrap a function: `ids` says from its arguments for which triggers it is called, `found` adds some from its result.

        When `found` is None nothing came of the call, and the point behind it is not reached.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            called_for = ids(*args, **kwargs)
            self.reach(before, called_for)
            result = original(*args, **kwargs)
            more = found(result)
            if more is not None:
                self.reach(after, [*called_for, *more])
            return result

        setattr(owner, name, wrapped)

    def reach(self, point: str, task_ids: Iterable[Any]) -> None:
        """Die here, if the point is armed for one of the triggers."""
        for task_id in task_ids if point in POINTS else ():
            for how in HOWS:
                with suppress(FileNotFoundError):
                    (self._ledger.directory / f"crash-{point}-{how}-{task_id}").unlink()
                    self._die(point, how, task_id)

    def _die(self, point: str, how: str, task_id: str) -> None:
        if how == "pause":
            self._ledger.write(task_id, "paused", point=point)
            self._ledger.pass_gate(f"resume-{task_id}", 60)
            return
        if point == "abandon:after":
            # A Redis broker loses what a worker takes off the list in the moment of its death. That is none of our points: what
            # was sent last is in some worker's hands by then.
            time.sleep(0.5)
        self._ledger.write(DEATHS, "died", point=point, how=how, task_id=task_id)
        if how == "worker":
            os.kill(self._main, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # a signal may take a moment
