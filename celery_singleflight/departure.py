"""What the worker's main process does for a run whose process is gone, or is about to be killed."""

from __future__ import annotations

import json
import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kombu.asynchronous import get_event_loop

from celery_singleflight.announcements import Announcement
from celery_singleflight.claims import Finished, Outcome
from celery_singleflight.custody import GRACE
from celery_singleflight.discretion import log_error
from celery_singleflight.errors import SingleflightError
from celery_singleflight.handoff import hand_on
from celery_singleflight.results import encode_error
from celery_singleflight.trigger import Trigger

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_singleflight.claims import Claim
    from celery_singleflight.store import Store

__all__ = ("Departure",)

logger = logging.getLogger(__name__)

#: Seconds between two looks whether a process is gone.
_LOOK: Final = 0.1
_Answer = TypeVar("_Answer")


class Departure:
    """Releases the lease of one delivery by its owner token, from the worker's main process.

    A store that does not answer lets the lease expire by itself: nothing here raises.
    """

    def __init__(self, request: Any) -> None:
        self._request = request
        self._place: tuple[Store, Claim] | None = None
        self._execution_as = ""
        self._keeps = False
        try:
            binding = request.task._binding  # noqa: SLF001, of the package
            trigger = Trigger(request.task, request._context, binding, request.args, request.kwargs)  # noqa: SLF001
            self._place = binding.coordination.brisk_store, trigger.claim
            self._execution_as = trigger.cut_off_as
            self._keeps = binding.options.keep_message != "never"
        except Exception as error:  # noqa: BLE001, keys are made by users' functions from anybody's arguments
            log_error(logger, f"{request.name}[{request.id}]: its lease is left to expire", error, logging.WARNING)

    def give_back(self, *, died: bool) -> None:
        """Release the lease: the process is gone, and the trigger runs again."""
        if self._place:
            store, claim = self._place
            calls = self._try(lambda: store.abandon(claim.owner, claim.record, again=GRACE, died=died, cut_off=True))
            hand_on(self._request.task.app, calls or ())

    def conclude(self, outcome: Outcome, reason: str, *, is_gone: bool, error: Exception | None = None) -> bool:
        """Record an outcome that Celery has decided on; the lease is released if the process is gone.

        With an `error` Celery is still to store it and to send what follows; until the same is said without one, others may do
        it. Returns False when it is none: the trigger has another outcome, or is under way elsewhere.
        """
        refusal = self._conclude(outcome, reason, is_gone=is_gone, error=error)
        return refusal is None or refusal == "unknown"

    def revoke(self, reason: str) -> bool:
        """Record that Celery drops a message that was to run.

        Returns False when its trigger has ended otherwise, or is under way elsewhere: then there is nothing to revoke.
        """
        refusal = self._conclude(Outcome.REVOKED, reason, is_gone=False)
        if refusal == "unknown":
            self._announce_no_more()
        return refusal in (None, "unknown", Outcome.REVOKED.value)

    def when_gone(self, pid: int | None, act: Any) -> None:
        """Call `act` once no process has that id any more; a lease whose holder lives is never released."""
        if pid is None or not _is_alive(pid):
            act()
        elif (loop := get_event_loop()) is not None:
            loop.call_later(_LOOK, self.when_gone, pid, act)

    def _conclude(self, outcome: Outcome, reason: str, *, is_gone: bool, error: Exception | None = None) -> str | None:
        if not self._place:
            return None
        store, claim = self._place
        conclude = partial(
            store.conclude,
            claim.owner,
            claim.record,
            outcome,
            keep=claim.keep,
            release=is_gone,
            execution_as=self._execution_as,
        )
        task = self._request.task
        encoded = None if error is None else encode_error(task.app, error, task._binding.bounds)  # noqa: SLF001, of the package
        answer = self._try(lambda: conclude(reason=json.dumps([reason]), error=encoded, keeps=self._keeps))
        if isinstance(answer, Finished):
            hand_on(self._request.task.app, answer.calls)
            return None
        return answer

    def _announce_no_more(self) -> None:
        """Have no publisher be answered with a trigger of which the store knows nothing, and never will."""
        if self._place and self._place[1].record.execution_key is not None:
            store, claim = self._place
            lock_key, task_id, execution_key, _ = claim.record
            announced = Announcement(lock_key.name, execution_key or "", task_id, claim.task, claim.terms.payload)
            self._try(lambda: store.withdraw(announced))

    def _try(self, call: Callable[[], _Answer]) -> _Answer | None:
        try:
            return call()
        except SingleflightError as error:
            logger.warning("%s[%s]: its lease is left to expire: %s", self._request.name, self._request.id, error)
            return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
