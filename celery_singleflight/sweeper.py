"""The sweeper: a step of every worker that publishes again what a dead worker has left.

There is no leader: the script that hands a message out also puts off the next look at it, so that of several sweepers one gets
it, and the trigger comes up again if that one dies. Under prefork it runs on the worker's event loop; nothing is forked
beside a thread.
"""

from __future__ import annotations

import json
import logging
import random
import time
from typing import TYPE_CHECKING, Any, Final

from celery.bootsteps import StartStopStep
from celery.worker import state

from celery_singleflight import signals
from celery_singleflight.binding import lock_names
from celery_singleflight.claims import Encoded, Finished, Outcome
from celery_singleflight.coordination import coordination
from celery_singleflight.durability import warn_of_risks
from celery_singleflight.errors import ScriptError, SingleflightError
from celery_singleflight.handoff import hand_on
from celery_singleflight.keys import LockKey
from celery_singleflight.looks import looks_of
from celery_singleflight.message import publish_again
from celery_singleflight.patience import warn_of_settings
from celery_singleflight.slots import let_pass, recount_slots
from celery_singleflight.trigger import new_owner

if TYPE_CHECKING:
    from celery import Celery

    from celery_singleflight.claims import Handout, Record
    from celery_singleflight.store import Store

__all__ = ("Sweeper", "SweeperStep")

logger = logging.getLogger(__name__)

#: Seconds between two looks, with jitter, so that workers that were started together do not all look at once.
_INTERVAL: Final = 1.0
#: Seconds in which one sweeper of all workers looks; not more than the shortest pause of a single one.
_TURN: Final = 0.75
#: Seconds after which a look is left to the next one: an event loop has other things to do.
_LONGEST_LOOK: Final = 0.5
#: Triggers of one lock name that are handed out in one look, at most.
_AT_ONCE: Final = 50
#: Seconds for which it is remembered that a waiting trigger was revoked.
_KEEP_REVOKED: Final = 86400.0
#: Seconds between two looks at most, while the store is away.
_LONGEST_PAUSE: Final = 15.0


class Sweeper:
    """Looks, for all lock names of an app, which triggers need to be published again, and does it."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._failures = 0
        #: Ids that this worker was told to revoke and has looked for, and how many there were.
        self._withdrawn: set[str] = set()
        self._revoked_seen = 0

    def look(self) -> float:
        """Look once. Returns in how many seconds to look again. Raises nothing: one bad row must not stop the rest."""
        try:
            self._sweep()
        except SingleflightError as error:
            self._failures += 1
            logger.warning("the sweeper cannot look, and rescues nothing until it can: %s", error)
        except Exception:
            self._failures += 1
            logger.exception("a look of the sweeper failed; the next one follows")
        else:
            self._failures = 0
        for look in looks_of(self._app):
            look(self._app)
        pause = min(_INTERVAL * 2.0 ** min(self._failures, 10), _LONGEST_PAUSE)
        return pause * random.uniform(0.8, 1.2)  # noqa: S311, jitter

    def withdraw(self) -> None:
        """End what waits and was revoked since the last look, for a worker that goes and forgets it. Raises nothing."""
        names = lock_names(self._app)
        try:
            if names:
                self._withdraw_revoked(coordination(self._app).brisk_store, sorted(names))
        except SingleflightError as error:
            logger.warning("what was revoked just now may run, the store is away: %s", error)

    def _sweep(self) -> None:
        names = lock_names(self._app)
        if not names:
            return
        store = coordination(self._app).brisk_store
        self._withdraw_revoked(store, sorted(names))
        give_up_at = time.monotonic() + _LONGEST_LOOK
        for record in store.due(sorted(names), limit=_AT_ONCE, interval=_TURN):
            if time.monotonic() > give_up_at:
                return
            try:
                self._look_at(store, record)
            except ScriptError as error:
                logger.error("%s of %s cannot be looked at: %s", record.task_id, record.lock_key.name, error)  # noqa: TRY400

    def _look_at(self, store: Store, record: Record) -> None:
        if not record.task_id:
            hand_on(self._app, store.attend(LockKey(record.lock_key.name, record.execution_key or "")))
            return
        handout = store.rescue(record)
        if handout is None:
            return
        if handout.first_ms:
            hand_on(self._app, [handout])
        else:
            self._publish(record, handout)

    def _withdraw_revoked(self, store: Store, names: list[str]) -> None:
        """End what waits in the store and has been revoked; its message is published once more, for Celery to say so.

        A worker forgets what was revoked when it restarts, and the store does not.
        """
        if len(state.revoked) == self._revoked_seen < state.revoked.maxlen:
            return
        revoked = set(state.revoked.as_dict())
        for task_id in revoked - self._withdrawn:
            for record in store.parked(task_id, names):
                try:
                    self._revoke(store, record)
                except ScriptError as error:
                    logger.error("%s of %s cannot be revoked: %s", task_id, record.lock_key.name, error)  # noqa: TRY400
        self._withdrawn, self._revoked_seen = revoked, len(revoked)

    def _revoke(self, store: Store, record: Record) -> None:
        answer = store.conclude(
            new_owner(),
            record,
            Outcome.REVOKED,
            reason=json.dumps(["revoked"]),
            keep=_KEEP_REVOKED,
            release=False,
            error=Encoded("", "", b""),
            patience=0.0,
        )
        if isinstance(answer, Finished):
            hand_on(self._app, answer.calls)

    def _publish(self, record: Record, handout: Handout) -> None:
        lock_name = record.lock_key.name
        why = f"ended, {handout.outcome}, and what follows was not sent" if handout.outcome else "was left by a run that died"
        try:
            publish_again(self._app, handout)
        except Exception:
            # It comes up again by itself; the others must not wait for it.
            logger.exception("%s of %s %s, and could not be published again", record.task_id, lock_name, why)
            return
        logger.warning("%s of %s %s: published again", record.task_id, lock_name, why)
        signals.rescued.send(
            sender=None, task_id=record.task_id, lock_name=lock_name, outcome=handout.outcome, times=handout.times
        )


class SweeperStep(StartStopStep):  # type: ignore[misc]
    """Runs the sweeper on the timer of the worker's consumer, while that is connected to the broker."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._sweeper = Sweeper(consumer.app)
        self._entry: Any = None
        self._has_warned = False
        if lock_names(consumer.app):
            coordination(consumer.app)  # a worker of protected tasks that has no store does not start

    def start(self, consumer: Any) -> None:
        """Look for the first time, soon."""
        if not self._has_warned and lock_names(consumer.app):
            warn_of_risks(coordination(consumer.app).client)
            warn_of_settings(consumer.app, getattr(consumer, "initial_prefetch_count", 0) or 0)
            self._has_warned = True
        self._entry = consumer.timer.call_after(_INTERVAL, self._tick, (consumer,))
        if consumer.hub is not None:
            consumer.hub.on_tick.add(recount_slots)
            let_pass(consumer.controller)

    def stop(self, consumer: Any) -> None:
        """Look no more."""
        if self._entry is not None:
            consumer.timer.cancel(self._entry)
            self._entry = None
        if state.should_stop is not None:
            self._sweeper.withdraw()

    def _tick(self, consumer: Any) -> None:
        pause = self._sweeper.look()
        if self._entry is not None:
            self._entry = consumer.timer.call_after(pause, self._tick, (consumer,))
