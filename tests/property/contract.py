"""What the store is expected to answer: the contract of the scripts in plain Python, without time and without a server.

A lease is live or it is not. Tokens are made by the server, and are only remembered here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Delivery(NamedTuple):
    """One delivery of one message of a trigger."""

    owner: str
    task_id: str
    lock: str
    execution_key: str | None
    copy: str = ""
    previous: str = "-"
    generation: int = 0

    @property
    def execution(self) -> str:
        """Where its execution is known: a trigger without an execution key is an execution of its own."""
        return f"key {self.execution_key}" if self.execution_key else f"task {self.task_id}"


@dataclass
class Trigger:
    """What is known of one trigger. `told` is the owner that was told of its end last."""

    generation: int
    copy: str | None
    outcome: str | None = None
    body: bytes = b""
    told: str | None = None
    is_settled: bool = False


@dataclass
class Execution:
    """What is known of one execution: who runs it and for which message, or how it ended."""

    owner: str | None = None
    is_live: bool = False
    task_id: str = ""
    generation: int = 0
    run_id: str = ""
    attempt: int = 0
    token: int = 0
    outcome: str | None = None
    body: bytes = b""


@dataclass
class Lock:
    """What is known of one lock key: who is in its lease, live or expired, and the last token that the store knows of."""

    owners: dict[str, bool] = field(default_factory=dict)
    last_token: int = 0

    @property
    def live(self) -> set[str]:
        return {owner for owner, is_live in self.owners.items() if is_live}


class Contract:
    """The state of one store in which every lock key has the same limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.flush()

    def flush(self) -> None:
        """Forget everything."""
        self.triggers: dict[str, Trigger] = {}
        self.executions: dict[str, Execution] = {}
        self.locks: dict[str, Lock] = {}

    def lock(self, name: str) -> Lock:
        return self.locks.setdefault(name, Lock())

    def enter(self, delivery: Delivery, *, on_held: str, has_grace: bool) -> tuple[object, ...]:
        """Return the word of the reply and what comes with it; None for the token and the run id of a new lease.

        `has_grace`: whether another delivery that ended the trigger, however long ago, is given time to send what follows.
        """
        trigger = self.triggers.get(delivery.task_id, Trigger(0, None))
        execution = self.executions.get(delivery.execution, Execution())
        if execution.is_live and execution.owner == delivery.owner:
            return ("acquired", execution.token, execution.run_id, execution.attempt)
        why = self.surplus(delivery)
        if why:
            return ("surplus", why)
        answers = execution.outcome or trigger.outcome != "succeeded" or not delivery.execution_key
        if trigger.outcome and answers and has_grace and not trigger.is_settled and trigger.told != delivery.owner:
            self._remember(delivery)
            return ("held", "own")
        if trigger.outcome and (trigger.outcome != "succeeded" or not delivery.execution_key):
            trigger.told = delivery.owner
            return ("ended", trigger.outcome, trigger.body, trigger.is_settled)
        if execution.outcome:
            return self._end(delivery, execution.outcome, execution.body)
        return self._take(delivery, execution, on_held)

    def _take(self, delivery: Delivery, execution: Execution, on_held: str) -> tuple[object, ...]:
        if execution.owner and execution.is_live:
            if execution.task_id != delivery.task_id:
                return self._held("execution", delivery, on_held)
            return self._held("predecessor" if delivery.generation > execution.generation else "own", delivery, on_held)
        if len(self.lock(delivery.lock).live) >= self.limit:
            return self._held("lock", delivery, on_held)
        return ("acquired", None, execution.run_id or None, execution.attempt + 1)

    def surplus(self, delivery: Delivery) -> str:
        """Return why another copy of the message counts, or "" when this one does."""
        trigger = self.triggers.get(delivery.task_id)
        if trigger is None or delivery.generation > trigger.generation:
            return ""
        if delivery.generation < trigger.generation:
            return "generation"
        return "" if trigger.copy in (None, delivery.copy, delivery.previous) else "copy"

    def granted(self, delivery: Delivery, token: int, run_id: str, attempt: int) -> None:
        """Take note of a new lease. Where every place of its lock key was taken, it clears away the expired ones."""
        lock = self.lock(delivery.lock)
        if len(lock.owners) >= self.limit:
            lock.owners = dict.fromkeys(lock.live, True)
        lock.owners[delivery.owner] = True
        lock.last_token = token
        trigger = self._remember(delivery)
        trigger.outcome, trigger.told, trigger.is_settled = None, None, False
        self.executions[delivery.execution] = Execution(
            owner=delivery.owner,
            is_live=True,
            task_id=delivery.task_id,
            generation=delivery.generation,
            run_id=run_id,
            attempt=attempt,
            token=token,
        )

    def renew(self, delivery: Delivery) -> str:
        """Return why the lease is lost, or "" when it is kept."""
        is_live = self.lock(delivery.lock).owners.get(delivery.owner)
        if is_live is None:
            return "taken"
        return "" if is_live else "expired"

    def finish(self, delivery: Delivery, token: int, outcome: str, body: bytes) -> bool:
        """Return whether the outcome counts."""
        trigger = self.triggers.get(delivery.task_id)
        if trigger and trigger.outcome:
            return trigger.told == delivery.owner
        lock = self.lock(delivery.lock)
        if self._is_anothers(delivery) or (delivery.owner not in lock.owners and self._is_taken(lock, token)):
            return False
        lock.owners.pop(delivery.owner, None)
        if trigger is None:
            # The store forgot it, and with it which of its messages counts.
            trigger = self.triggers[delivery.task_id] = Trigger(-1, None)
        trigger.outcome, trigger.body, trigger.told = outcome, body, delivery.owner
        execution = self.executions.pop(delivery.execution, Execution())
        if outcome == "succeeded" or not delivery.execution_key:
            self.executions[delivery.execution] = execution
            execution.owner, execution.outcome, execution.body = None, outcome, body
        return True

    def _is_anothers(self, delivery: Delivery) -> bool:
        """Whether the run's execution is known, and somebody else has begun or ended it since."""
        execution = self.executions.get(delivery.execution)
        if execution is None:
            # Unless the store forgot the trigger too, somebody has run the execution to an end that is not kept.
            return delivery.execution_key is not None and delivery.task_id in self.triggers
        return execution.outcome is not None or execution.owner != delivery.owner

    def _is_taken(self, lock: Lock, token: int) -> bool:
        return lock.last_token > token if self.limit == 1 else len(lock.live) >= self.limit

    def abandon(self, delivery: Delivery, generation: int | None) -> None:
        self.lock(delivery.lock).owners.pop(delivery.owner, None)
        execution = self.executions.get(delivery.execution)
        if execution and execution.owner == delivery.owner:
            execution.owner = None
        trigger = self.triggers.get(delivery.task_id)
        if trigger and generation is not None and generation > trigger.generation:
            trigger.generation, trigger.copy = generation, None

    def settle(self, delivery: Delivery) -> bool:
        """Return whether the trigger is settled by this delivery, for the first time."""
        trigger = self.triggers.get(delivery.task_id)
        if trigger is None or trigger.told != delivery.owner or trigger.is_settled:
            return False
        trigger.is_settled = True
        return True

    def expire(self, delivery: Delivery) -> None:
        lock = self.lock(delivery.lock)
        if delivery.owner in lock.owners:
            lock.owners[delivery.owner] = False
        execution = self.executions.get(delivery.execution)
        if execution and execution.owner == delivery.owner:
            execution.is_live = False

    def lapse(self, execution: str) -> None:
        """The record of this execution is kept no longer."""
        del self.executions[execution]

    def _held(self, what: str, delivery: Delivery, on_held: str) -> tuple[object, ...]:
        is_newcomer = what in ("lock", "execution")
        if is_newcomer and on_held == "skip":
            return self._end(delivery, "skipped", b"")
        if is_newcomer and on_held == "reject":
            return self._end(delivery, "rejected", b"")
        if on_held != "ask":
            self._remember(delivery)
        return ("held", what)

    def _end(self, delivery: Delivery, outcome: str, body: bytes) -> tuple[object, ...]:
        trigger = self._remember(delivery)
        # What Celery has done for another outcome, such as that of an execution kept no longer, it has not done for this one.
        trigger.is_settled = trigger.is_settled and trigger.outcome == outcome
        trigger.outcome, trigger.body, trigger.told = outcome, body, delivery.owner
        return ("ended", outcome, body, trigger.is_settled)

    def _remember(self, delivery: Delivery) -> Trigger:
        trigger = self.triggers.setdefault(delivery.task_id, Trigger(delivery.generation, delivery.copy))
        trigger.generation, trigger.copy = delivery.generation, delivery.copy
        return trigger
