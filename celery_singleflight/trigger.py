"""One delivery of a trigger, as its message and the options of its task make it."""

from __future__ import annotations

import logging
import math
from datetime import UTC, datetime
from os import getpid
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar
from uuid import uuid4

from celery.exceptions import Ignore
from celery.utils.time import maybe_iso8601

from celery_singleflight import headers as header
from celery_singleflight.binding import arguments_digest
from celery_singleflight.claims import Claim, OnHeld, Record, Waits
from celery_singleflight.custody import GRACE
from celery_singleflight.errors import LockKeyError, OptionError
from celery_singleflight.keys import LockKey
from celery_singleflight.message import pack_message, replace_arguments
from celery_singleflight.options import CALL_OPTIONS, PREFIX
from celery_singleflight.policies import PARKING, waits_on_contention
from celery_singleflight.terms import terms_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from celery_singleflight.binding import Binding
    from celery_singleflight.claims import Merge

__all__ = ("Trigger", "generation_of", "is_without_run", "new_owner", "without_run")

logger = logging.getLogger(__name__)

#: Retries of one trigger that its generations leave room for, between two replacements.
_RETRIES: Final = 1 << 20
_WITHOUT_RUN: Final = "_singleflight_without_run"
_Ending = TypeVar("_Ending", bound=BaseException)
_KEPT: Final = Waits()
_NOT_KEPT: Final = Waits(keeps=False)
_HEADERS: Final = {
    *(header.KEY, header.DIGEST, header.CAUSED_BY, header.SOURCE, header.FORCED),
    *header.OF_A_WAIT,
    *(option.header for option in CALL_OPTIONS.values()),
}
_ON_HELD: Final[dict[str, OnHeld]] = {
    "requeue": "wait",
    "queue": "queue",
    "skip": "skip",
    "coalesce": "coalesce",
    "replace": "replace",
    "join": "join",
    "reject": "reject",
}


def new_owner() -> str:
    """Return a new owner token."""
    return uuid4().hex


def without_run(ending: _Ending) -> _Ending:
    """Mark what ends a delivery whose body did not run, or does not count."""
    setattr(ending, _WITHOUT_RUN, True)
    return ending


def is_without_run(ending: BaseException) -> bool:
    """Whether it was marked so."""
    return hasattr(ending, _WITHOUT_RUN)


def generation_of(nesting: int | None, retries: int | None) -> int:
    """Return the generation of a message with these headers of Celery's."""
    return (nesting or 0) * _RETRIES + (retries or 0)


class Trigger:
    """What a run needs to know of the message it was started by. Made for one delivery, used once."""

    __slots__ = (
        "_unmerged",
        "args",
        "binding",
        "claim",
        "headers",
        "kwargs",
        "may_linger",
        "may_park",
        "own_arguments",
        "request",
        "task",
        "waits",
    )

    def __init__(self, task: Any, request: Any, binding: Binding, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Read the request that the task was delivered with.

        Raises `OptionError` for a bad call option, `LockKeyError` and `TypeError` when no key can be made.
        """
        self.task = task
        self.binding = binding
        self.request = request
        self.args = args
        self.kwargs = kwargs
        #: As they came, before a merge.
        self.own_arguments = (args, kwargs)
        #: What a merge has changed of the request, as it came.
        self._unmerged: tuple[Any, Any, Any, dict[str, Any]] | None = None
        self.headers: dict[str, Any] = request.headers or {}
        #: How often the trigger has been requeued before.
        self.waits = self._waits()
        options = binding.options
        policy = self._call_option("contention_policy") or options.contention_policy
        wait = self._call_option("wait_timeout")
        wait = options.wait_timeout if wait is None else wait
        owner = (request.properties or {}).get(header.OWNER) or new_owner()
        #: Whether it waits with the store.
        self.may_park = policy in PARKING and not request.is_eager
        ticket = str(self.headers.get(header.PLACE, ""))
        #: Whether its slot may wait for a place for a while.
        self.may_linger = self.may_park or bool(ticket)
        if "\n" in str(request.id):  # it stands in lines of the store
            raise LockKeyError(f"expected a task id without a line break, got {request.id!r}")
        record = Record(self._lock_key(), str(request.id), self._execution_key())
        self.claim = Claim(
            record=record,
            owner=owner,
            worker=request.hostname or "",
            run_id=f"{owner}-{getpid()}",
            limit=options.lock_limit,
            ttl=options.lease_ttl,
            keep=options.result_ttl,
            # Eager mode has nobody who would run it later.
            on_held="reject" if request.is_eager and waits_on_contention(policy) else _ON_HELD[policy],
            wait=None if wait is None or wait == math.inf else wait,
            copy=self.headers.get(header.COPY, ""),
            previous=self.headers.get(header.PREVIOUS, "-"),
            generation=generation_of(request.replaced_task_nesting, request.retries),
            first_ms=str(self.headers.get(header.FIRST_SEEN, "")),
            grace=0.0 if request.is_eager else GRACE,
            message=pack_message(request) if options.rescue or self.may_park else b"",
            max_deliveries=options.max_deliveries,
            task=task.name,
            waits=self._waits_as(policy, record.lock_key) if self.may_park else _KEPT if options.rescue else _NOT_KEPT,
            ticket=ticket,
            terms=terms_of(binding, request, record, args, kwargs),
        )

    @property
    def lock_key(self) -> LockKey:
        """What must not overlap."""
        return self.claim.record.lock_key

    @property
    def execution_key(self) -> str:
        """The explicit execution key, else the task id."""
        return self.claim.record.execution_key or self.claim.record.task_id

    @property
    def time_limit(self) -> float | None:
        """The hard time limit of this call, in seconds."""
        limit: float | None = self.request.timelimit[0] if self.request.timelimit else None
        return limit or self.task.time_limit

    @property
    def first_limit(self) -> float:
        """The time limit of this call that passes first, in seconds; inf for none."""
        hard, soft = self.request.timelimit or (None, None)
        limits = (hard or self.task.time_limit, soft or self.task.soft_time_limit)
        return float(min((limit for limit in limits if limit), default=math.inf))

    @property
    def keeps_failure(self) -> bool:
        """Whether a failure is the outcome of later triggers of an explicit execution key too."""
        return bool(self.binding.options.failure_policy == "keep")

    @property
    def cut_off_as(self) -> str:
        """What an explicit execution key has of a run that was cut off, as in `Store.conclude`."""
        return "hold" if self.claim.terms.holds else "keep" if self.keeps_failure else "unsure"

    @property
    def after_retry(self) -> int:
        """The generation of the message that a retry of this one has sent."""
        return self.claim.generation + 1

    @property
    def after_replacement(self) -> int:
        """The generation of the message that replaces this one under the same id."""
        return (self.claim.generation // _RETRIES + 1) * _RETRIES

    @property
    def called_ahead(self) -> float:
        """For how many seconds it may wait in its slot, because it was called ahead of its turn."""
        linger = self.headers.get(header.LINGER, 0.0)
        return linger if isinstance(linger, int | float) else 0.0

    def waiting(self, *, linger: float) -> Claim:
        """Return the claim, by which its slot may wait for so many seconds."""
        return self.claim._replace(waits=self.claim.waits._replace(linger=linger)) if linger else self.claim

    def merge(self, kwargs: dict[str, Any], asked: Merge) -> None:
        """Take these arguments, made from its own and those of the trigger that waits. Raises as kombu does."""
        request = self.request
        marks = {header.DIGEST: arguments_digest((), kwargs), header.KEY: self.lock_key.text}
        if self._unmerged is None:
            self._unmerged = request.properties, request.args, request.kwargs, {name: self.headers.get(name) for name in marks}
        replace_arguments(self.request, kwargs, marks)
        self.headers.update(marks)
        self.args, self.kwargs = [], kwargs
        waits = self.claim.waits._replace(merged_with=asked.by, merged_copy=asked.copy)
        self.claim = self.claim._replace(message=pack_message(self.request), waits=waits)

    def unmerge(self) -> None:
        """Take its own arguments again, as they came."""
        if self._unmerged is None:
            return
        request = self.request
        request.properties, request.args, request.kwargs, marks = self._unmerged
        self._unmerged = None
        for name, value in marks.items():
            if value is None:
                self.headers.pop(name, None)
            else:
                self.headers[name] = value
        self.args, self.kwargs = self.own_arguments
        waits = self.claim.waits._replace(merged_with="", merged_copy="")
        self.claim = self.claim._replace(message=pack_message(request), waits=waits)

    def wait_alone(self) -> None:
        """Wait in line with its own arguments, not coalesced."""
        self.unmerge()
        self.claim = self.claim._replace(on_held="queue")

    def waits_no_more(self) -> None:
        """Forget the wait, so that a retry of the body does not go on with it."""
        for name in header.OF_A_WAIT if self.waits else (header.LINGER,):
            self.headers.pop(name, None)

    def leave(self, why: str) -> NoReturn:
        """End this delivery without a trace in Celery's results: another one has, or will have, the trigger's outcome.

        Raises `Ignore`.
        """
        logger.info("%s[%s] %s", self.task.name, self.request.id, why)
        raise without_run(Ignore(why))

    def _waits_as(self, policy: str, lock_key: LockKey) -> Waits:
        options = self.binding.options
        waits = Waits(keeps=options.rescue, expires=self._expires())
        # Where tasks share a lock key, none of them gives another the outcome of its run.
        among = "" if lock_key.name == self.task.name else self.task.name
        if policy == "join":
            digest = self.binding.digest_of_all(self.args, self.kwargs)
            if not digest:
                logger.info("%s[%s] can join nobody: its arguments cannot be compared", self.task.name, self.request.id)
            return waits._replace(digest=f"{digest} {among}".rstrip() if digest else "")
        if policy == "coalesce":
            delay = self._call_option("coalesce_delay")
            delay = options.coalesce_delay if delay is None else delay
            which = "merged" if callable(options.coalesce_keep) else options.coalesce_keep
            within = delay * 10 if options.coalesce_within is None else options.coalesce_within
            return waits._replace(digest=among, which=which, delay=delay, within=within)
        return waits

    def _expires(self) -> float | None:
        """Return in how many seconds the message expires, by the clock of this machine, which Celery goes by too."""
        expires = self.request.expires
        if expires is None:
            return None
        at: datetime = maybe_iso8601(expires)
        at = at if at.tzinfo else at.replace(tzinfo=UTC)
        return max((at - datetime.now(UTC)).total_seconds(), 0.0) + 0.05

    def _waits(self) -> int:
        for name in self.headers.keys() - _HEADERS:
            if name.startswith(PREFIX):
                logger.warning("%s[%s] has a header %s, which means nothing here", self.task.name, self.request.id, name)
        waits = self.headers.get(header.WAITS, 0)
        if not isinstance(waits, int):
            raise OptionError(f"header {header.WAITS} of {self.task.name}: expected a whole number, got {waits!r}")
        return waits

    def _lock_key(self) -> LockKey:
        binding, name = self.binding, self.task.name
        stamped = self.headers.get(header.KEY)
        if stamped and self.headers.get(header.DIGEST) == arguments_digest(self.args, self.kwargs):
            return LockKey(binding.options.lock_name or name, stamped)
        return binding.lock_key(name, self.args, self.kwargs)

    def _execution_key(self) -> str | None:
        return self._call_option("execution_key") or self.binding.execution_key(self.args, self.kwargs)

    def _call_option(self, name: str) -> Any:
        option = CALL_OPTIONS[name]
        value = self.headers.get(option.header)
        return None if value is None else option.checked(value, f"header {option.header} of {self.task.name}")
