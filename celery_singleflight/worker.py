"""The worker's main process: an owner token for each delivery, and what becomes of one whose process is lost."""

from __future__ import annotations

import logging
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.worker import state
from kombu.utils.imports import symbol_by_name

from celery_singleflight import headers as header
from celery_singleflight.claims import Outcome
from celery_singleflight.departure import Departure
from celery_singleflight.discretion import kind
from celery_singleflight.slots import count_slots, leave_slot
from celery_singleflight.trigger import new_owner

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("RequestClass",)

logger = logging.getLogger(__name__)


class _NothingToRevokeError(Exception):
    """The trigger of a revoked message has another outcome already, or its run is under way elsewhere."""


class RequestClass:
    """The `Request` attribute of a protected task: the user's own request class, or Celery's, with an owner token.

    Made when the worker first asks for it, so that publishers never import the worker.
    """

    def __init__(self, base: Any = "celery.worker.request:Request") -> None:
        self.base = base
        self._made: type | None = None

    def __get__(self, instance: object, owner: type | None = None) -> type:
        if self._made is None:
            base = symbol_by_name(self.base)
            self._made = type(base.__name__, (_OwnerPerDelivery, base), {"__module__": base.__module__})
        return self._made


class _OwnerPerDelivery:
    """Mints the owner token of a delivery where the main process can release by it, and hands it to the pool."""

    task: Any
    id: str

    def __init_subclass__(cls, **options: Any) -> None:
        """Count the slots where Celery's own subclass, which does not call ours, gives a trigger to the pool."""
        super().__init_subclass__(**options)
        give = vars(cls).get("execute_using_pool")
        if give is not None:

            def execute_using_pool(self: Any, pool: Any, **how: Any) -> Any:
                count_slots(self)
                return give(self, pool, **how)

            cls.execute_using_pool = execute_using_pool  # type: ignore[attr-defined]

    def __init__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(message, *args, **kwargs)  # type: ignore[call-arg]
        self.is_handed_out = header.LINGER in message.headers
        former = state.requests.get(self.id)
        self._former = weakref.ref(former) if former is not None else lambda: None
        eventer = self.eventer  # type: ignore[attr-defined]
        request_dict = self.request_dict  # type: ignore[attr-defined]
        # Properties do not travel on with a requeued message, so the token stays with this delivery. What is here of the
        # message goes to the pool in any case, and is not pickled twice.
        request_dict["properties"] = {
            **(request_dict.get("properties") or {}),
            header.OWNER: new_owner(),
            header.SERIALIZER: message.content_type,
            header.EVENTS: bool(eventer and eventer.enabled),
            header.MESSAGE: (message.headers, self.body, message.content_type, message.content_encoding),  # type: ignore[attr-defined]
        }

    def on_success(self, *args: Any, **kwargs: Any) -> Any:
        """Celery's handler for a delivery that ends with a result."""
        leave_slot(self)
        return super().on_success(*args, **kwargs)  # type: ignore[misc]

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        """Celery's handler for a delivery that ends without a result: it raised, waits, was dropped, or its process is lost."""
        latest = state.requests.get(self.id)
        try:
            return self._fail(exc_info, *args, **kwargs)
        finally:
            leave_slot(self)
            self._leave_to_be_found(latest)

    def _fail(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        """Release the lease of a run whose process is lost, and let Celery do what follows."""
        error = getattr(exc_info.exception, "exc", exc_info.exception)
        forward = partial(super().on_failure, exc_info, *args, **kwargs)  # type: ignore[misc]
        if isinstance(error, TimeLimitExceeded):
            return self._end_at_time_limit(error, forward)
        if isinstance(error, Terminated) and not self._is_cancelled:
            Departure(self).conclude(Outcome.REVOKED, "terminated", is_gone=True)
            return forward()
        if not isinstance(error, Terminated | WorkerLostError | SystemExit | KeyboardInterrupt):
            return forward()
        departure = Departure(self)
        # A worker that is told to go is no fault of the task.
        is_leaving = state.should_stop is not None or state.should_terminate is not None or self._is_cancelled
        departure.give_back(died=not is_leaving)
        result = forward()
        runs_again = self._is_given_back or self._is_cancelled or getattr(self.task, "retry_on_worker_lost", False)
        if not runs_again:
            reason = repr(error) if isinstance(error, WorkerLostError) else kind(error)  # an exit may hold a user's value
            departure.conclude(Outcome.FAILED, reason, is_gone=True)
        return result

    def on_timeout(self, soft: bool, timeout: Any) -> Any:  # noqa: FBT001, as Celery calls it
        """Celery's handler of a time limit, which at a hard one tells the failure; not that of a run that was overtaken."""
        return None if self._is_overtaken and not soft else super().on_timeout(soft, timeout)  # type: ignore[misc]

    def reject(self, requeue: bool = False) -> Any:  # noqa: FBT001, FBT002, as Celery calls it
        """Celery's way to give the message back to the broker, or to drop it."""
        self._is_given_back = requeue
        return super().reject(requeue=requeue)  # type: ignore[misc]

    def revoked(self) -> bool:
        """Celery's question whether to drop the message; not that of a trigger that has ended, which is to be answered."""
        try:
            return bool(super().revoked())  # type: ignore[misc]
        except _NothingToRevokeError:
            logger.info("%s was revoked, but has ended or runs elsewhere: its message is not dropped", self)
            return False

    def _announce_revoked(self, reason: str, terminated: bool, *args: Any, **kwargs: Any) -> Any:  # noqa: FBT001
        if not Departure(self).revoke(reason) and not terminated:
            raise _NothingToRevokeError
        return super()._announce_revoked(reason, terminated, *args, **kwargs)  # type: ignore[misc]

    def _leave_to_be_found(self, latest: Any) -> None:
        """Have Celery know of another delivery of the trigger that is here, now that this one is over.

        Celery keeps one for an id, that which came last, and none when any of them is over. A trigger that has waited may
        begin, and a copy of one that runs be dropped, and `revoke(terminate=True)` would not find the run.
        """
        other = self._former() if latest is self else latest
        if other is not None and other in state.reserved_requests:  # those that run are among them
            state.requests.setdefault(self.id, other)

    #: Whether the store has handed its message out, because its turn has come or is about to.
    is_handed_out = False
    _is_given_back = False
    _is_overtaken = False

    @property
    def _is_cancelled(self) -> bool:
        """Whether the worker has stopped the run itself, and the message is not acknowledged."""
        return bool(getattr(self, "_already_cancelled", False))

    def _end_at_time_limit(self, error: Exception, forward: Callable[[], Any]) -> Any:
        """Record the failure now, and release the lease when the process, which still lives, has been killed."""
        departure, task = Departure(self), self.task
        pid = getattr(self, "worker_pid", None)
        acks = getattr(task, "acks_on_timeout", None)
        if acks is None:
            acks = task.acks_on_failure_or_timeout
        if task.acks_late and not acks:
            departure.when_gone(pid, partial(departure.give_back, died=True))
            return forward()
        end = partial(departure.conclude, Outcome.FAILED, "the hard time limit passed")
        counts = end(is_gone=False, error=error)
        departure.when_gone(pid, partial(end, is_gone=True, error=error))
        if not counts:
            self._is_overtaken = True
            logger.warning("%s passed its hard time limit, and was overtaken: its failure does not count", self)
            state.task_ready(self)
            return self.acknowledge()  # type: ignore[attr-defined]
        # Celery acknowledges the message, then stores the failure; a worker that is about to go does not store it.
        result = forward()
        if not state.should_terminate:
            end(is_gone=False)
        return result
