"""What an operator asks the store about executions whose run died, and what he says of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal

from celery_singleflight.binding import bindings_of
from celery_singleflight.doubts import Resolved, Uncertain, Uncertainty
from celery_singleflight.errors import ResolutionError
from celery_singleflight.keys import LockKey
from celery_singleflight.reading import Reading, as_text, glob
from celery_singleflight.resolving import resolve

if TYPE_CHECKING:
    from collections.abc import Iterable

    from celery_singleflight.reading import Name

__all__ = ("Ambiguous", "Doubting")

#: What tells whether a record needs a closer look; records that are looked at so at a time.
_GLANCE: Final = ("unsure", "owner", "until_ms", "outcome")
_BATCH: Final = 500


class Ambiguous(ResolutionError):
    """Of which task's execution it is said, or by which key, does not follow; says what was expected."""


class Doubting(Reading):
    """The store of an app, as far as nobody knows what runs have done."""

    def uncertain(self, lock_name: str | None = None, *, limit: int) -> Uncertain:
        """Return up to `limit` uncertain executions, of all lock names or of one, those that are the longest so first.

        Reads some fields of every record.
        """
        patterns = ["{*}:*:[et]*"]
        if lock_name is not None:
            patterns = [f"{glob(begin)}*" for begin in (self.keys.trigger(lock_name, ""), self.keys.execution(lock_name, ""))]
        now, found = self.now(), []
        names = dict.fromkeys(name for pattern in patterns for name in self._doubtful(pattern, now))
        records = self.records([name.whole for name in names])
        for name in names:
            of, record = self.lock_name_in(name), records.get(name.whole)
            if record is None or of is None or (lock_name is not None and of != lock_name):
                continue
            key = name.rest.partition(":")[2] if name.kind == "execution" else None
            uncertainty = self.uncertainty_of(name.whole, record, of, key, now)
            if uncertainty:
                found.append(uncertainty)
        found.sort(key=lambda one: (-one.age, one.execution_key or one.task_id))
        return Uncertain(found[:limit], max(len(found) - limit, 0))

    def resolve(
        self,
        key: str,
        outcome: Literal["succeeded", "failed", "rerun"],
        *,
        is_task_id: bool,
        task: str | None,
        result: Any = None,
        reason: str = "",
    ) -> Resolved:
        """Say what the run of an execution has done that died; as `resolving.resolve`, which may be refused.

        The execution is that of the explicit execution key, or of the task id. The task is found if none is named. Raises
        `UnknownKey`, `Ambiguous`, `ResolutionError` for a result where there is none to be, and `StoreUnavailable`.
        """
        task, key = self._meant(key, task, is_task_id=is_task_id)
        task_id, execution_key = (key, None) if is_task_id else (None, key)
        found = Resolved(
            is_resolved=True,
            why="resolved",
            execution_key=execution_key,
            task_id=task_id,
            task=task,
            outcome=outcome,
            waiting=0,
        )
        try:
            waiting = resolve(
                self.app, task, outcome, execution_key=execution_key, task_id=task_id, result=result, reason=reason
            )
        except ResolutionError as error:
            return replace(found, is_resolved=False, why=str(error))
        return replace(found, waiting=waiting)

    def uncertainty_of(
        self, name: str, run: dict[str, Any], lock_name: str, execution_key: str | None, now: int
    ) -> Uncertainty | None:
        """Return what is not known of the execution of that run record, None when it is known or it runs again by itself."""
        policies = {
            binding.name: binding.options.uncertain_policy
            for binding in bindings_of(self.app)
            if (binding.options.lock_name or binding.name) == lock_name
        }
        if run["task"]:
            policies = {name: policy for name, policy in policies.items() if name == run["task"]}
        task = run["task"] or (next(iter(policies)) if len(policies) == 1 else None)
        found = Uncertainty.of_record(run, now, lock_name=lock_name, task=task, execution_key=execution_key)
        if found is None:
            return None
        waiting = len({field for field, _ in self.client.hscan_iter(name, match="awaits:*", count=_BATCH)})
        # What works in steps says by them what must not be done again.
        has_steps = run["run"] and as_text(self.client.hget(self.keys.steps(name), "run")) == run["run"]
        is_held = waiting or run["outcome"] or (not has_steps and "hold" in policies.values())
        return replace(found, waiting=waiting) if is_held else None

    def _doubtful(self, pattern: str, now: int) -> list[Name]:
        """Return the names of records that match, of a run that has died, at that store time in ms."""
        doubtful: list[Name] = []
        names = (name for name in self.scan(pattern) if name.kind in ("trigger", "execution"))
        while some := list(islice(names, _BATCH)):
            replies = self.many([("hmget", name.whole, _GLANCE) for name in some])
            doubtful += [
                name
                for name, (unsure, owner, until_ms, outcome) in zip(some, replies, strict=True)
                if as_text(outcome) in (None, "", "uncertain") and (unsure or (owner and int(until_ms or 0) <= now))
            ]
        return doubtful

    def _meant(self, key: str, task: str | None, *, is_task_id: bool) -> tuple[str, str]:
        """Return the name of the task whose execution has that key, and the key as the store has it."""
        kind = "trigger" if is_task_id else "execution"
        lock_names = {binding.name: binding.options.lock_name or binding.name for binding in bindings_of(self.app)}
        if task is not None and task not in lock_names:
            raise Ambiguous(f"expected the name of a protected task as --task, got {task}{_of(lock_names)}")
        names = self.named(kind, key)
        if task is not None:
            names = [name for name in names if self.lock_name_in(name) == lock_names[task]]
        records = self.records([name.whole for name in names])
        if not records:
            expected = "the id of a trigger" if is_task_id else "an execution key, or --task-id with the id of a trigger"
            raise self.unknown(key, f"{expected} that the store remembers", kind)
        fitting = {task} if task is not None else set()
        for name in names:
            record, of = records.get(name.whole, {}), self.lock_name_in(name) or ""
            if is_task_id:
                self._check_that_it_is_the_key(key, of)
            if task is None:
                its = record.get("task")
                fitting |= {its} if its else {each for each, lock_name in lock_names.items() if lock_name == of}
        if len(fitting) != 1:
            raise Ambiguous(f"expected the name of the task of {key} as --task{_of(fitting)}")
        return str(*fitting), self.key_in(names[0], key)

    def _check_that_it_is_the_key(self, task_id: str, lock_name: str) -> None:
        explicit = self.record_of(LockKey(lock_name, ""), task_id).execution_key
        if explicit is not None:
            raise Ambiguous(f"expected an execution key: that of {task_id} is {explicit}, got --task-id")


def _of(tasks: Iterable[str]) -> str:
    return f", one of {', '.join(sorted(tasks))}" if tasks else "; this app has none of its lock name"
