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
    message: bytes = b""

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
    #: Whether it ended so long ago that nobody can be at passing its outcome on any more.
    is_old: bool = False
    concluded_by: str | None = None
    #: The message in custody, whether the sweeper is to look at it, and how often it was handed out.
    message: bytes | None = None
    is_due: bool = False
    handouts: int = 0
    #: Whether it has run before, how many of its runs have died, and who gave it back last without having died.
    has_run: bool = False
    died: int = 0
    left_by: str | None = None

    def end(self, outcome: str | None, body: bytes, told: str | None) -> None:
        self.outcome, self.body, self.told, self.is_old = outcome, body, told, False

    def enter_custody(self, message: bytes) -> None:
        if message:
            self.message, self.is_due = message, True

    def settle(self) -> None:
        self.is_settled = True
        self.leave_custody()

    def leave_custody(self) -> None:
        self.message, self.is_due = None, False


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
    #: Owner of the run that has died last, until another begins.
    dead: str | None = None


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

    def enter(
        self,
        delivery: Delivery,
        *,
        on_held: str,
        has_grace: bool,
        first_to_go: str | None = None,
        max_deaths: int | None = None,
    ) -> tuple[object, ...]:
        """Return the word of the reply and what comes with it; None for the token and the run id of a new lease.

        `has_grace`: whether another delivery that has ended the trigger is given time to send what follows. `first_to_go`: the
        trigger whose place in the lease is free before the others.
        """
        trigger = self.triggers.get(delivery.task_id, Trigger(0, None))
        execution = self.executions.get(delivery.execution, Execution())
        if execution.is_live and execution.owner == delivery.owner:
            return ("acquired", execution.token, execution.run_id, execution.attempt)
        why = self.surplus(delivery)
        if why:
            return ("surplus", why)
        if self.is_newer(delivery):
            trigger.died, trigger.left_by = 0, None
        if trigger.outcome and (trigger.outcome != "succeeded" or trigger.is_settled or execution.outcome):
            return self._answer(trigger, execution, delivery, has_grace=has_grace)
        if execution.outcome:
            return self._end(delivery, execution.outcome, execution.body)
        if on_held != "ask" and (trigger.has_run or delivery.generation > 0):
            on_held = "wait"
        return self._take(delivery, execution, on_held, first_to_go, max_deaths)

    def _answer(self, trigger: Trigger, execution: Execution, delivery: Delivery, *, has_grace: bool) -> tuple[object, ...]:
        is_anothers = trigger.told != delivery.owner
        if has_grace and is_anothers and not trigger.is_settled and not trigger.is_old:
            self._remember(delivery)
            return ("held", "own")
        if is_anothers:
            trigger.told, trigger.is_old = delivery.owner, False
        if not trigger.is_settled:
            trigger.enter_custody(delivery.message)
        has_lapsed = delivery.execution_key and trigger.outcome == "succeeded" and not execution.outcome
        body = execution.body if trigger.outcome == "succeeded" else trigger.body
        return ("ended", trigger.outcome, b"" if has_lapsed else body, trigger.is_settled)

    def _take(
        self, delivery: Delivery, execution: Execution, on_held: str, first_to_go: str | None, max_deaths: int | None
    ) -> tuple[object, ...]:
        if execution.owner and execution.is_live:
            if execution.task_id != delivery.task_id:
                return self._held("execution", delivery, on_held)
            return self._held("predecessor" if delivery.generation > execution.generation else "own", delivery, on_held)
        if max_deaths and self._deaths(delivery, execution) >= max_deaths:
            return self._bury(delivery, execution)
        if len(self.lock(delivery.lock).live) >= self.limit:
            if first_to_go != delivery.task_id or on_held == "ask":
                return self._held("lock", delivery, on_held)
            return self._held("predecessor" if self.is_newer(delivery) else "own", delivery, on_held)
        return ("acquired", None, execution.run_id or None, execution.attempt + 1)

    def _deaths(self, delivery: Delivery, execution: Execution) -> int:
        """How many runs of this message, and of copies of it, have died. One that has not ended and is not live has."""
        trigger = self.triggers.get(delivery.task_id)
        died = trigger.died if trigger and trigger.generation == delivery.generation else 0
        is_dead = execution.owner and execution.task_id == delivery.task_id and execution.generation == delivery.generation
        return died + 1 if is_dead else died

    def _bury(self, delivery: Delivery, execution: Execution) -> tuple[object, ...]:
        died = self._deaths(delivery, execution)
        if execution.task_id == delivery.task_id:
            self.executions.pop(delivery.execution, None)
        answer = self._end(delivery, "dead-lettered", b"")
        self.triggers[delivery.task_id].died = died
        return answer

    def surplus(self, delivery: Delivery) -> str:
        """Return why another copy of the message counts, or "" when this one does."""
        trigger = self.triggers.get(delivery.task_id)
        if trigger is None or delivery.generation > trigger.generation:
            return ""
        if delivery.generation < trigger.generation:
            return "generation"
        return "" if trigger.copy in (None, delivery.copy, delivery.previous) else "copy"

    def is_newer(self, delivery: Delivery) -> bool:
        """Whether it is of a later generation than any that is known."""
        trigger = self.triggers.get(delivery.task_id)
        return trigger is not None and trigger.generation >= 0 and delivery.generation > trigger.generation

    def granted(self, delivery: Delivery, token: int, run_id: str, attempt: int) -> None:
        """Take note of a new lease. It clears away the expired ones of its lock key."""
        lock = self.lock(delivery.lock)
        lock.owners = dict.fromkeys(lock.live, True)
        lock.owners[delivery.owner] = True
        lock.last_token = token
        died = self._deaths(delivery, self.executions.get(delivery.execution, Execution()))
        trigger = self._remember(delivery)
        trigger.died, trigger.has_run = died, True
        if trigger.outcome:
            trigger.outcome, trigger.told, trigger.is_settled, trigger.is_old = None, None, False, False
        trigger.handouts, trigger.left_by = 0, None
        trigger.enter_custody(delivery.message)
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

    def finish(self, delivery: Delivery, token: int, outcome: str, body: bytes, *, holds: bool) -> bool:
        """Return whether the outcome counts. `holds`: whether the place stays taken."""
        trigger = self.triggers.get(delivery.task_id)
        if trigger and trigger.outcome:
            return trigger.told == delivery.owner
        lock = self.lock(delivery.lock)
        if self._is_anothers(delivery) or (delivery.owner not in lock.owners and self._is_taken(lock, token)):
            return False
        self._leave(delivery, holds=holds)
        if trigger is None:
            # The store forgot it, and with it which of its messages counts.
            trigger = self.triggers[delivery.task_id] = Trigger(-1, None)
        trigger.end(outcome, body, delivery.owner)
        execution = self.executions.pop(delivery.execution, Execution())
        if outcome == "succeeded" or not delivery.execution_key:
            self.executions[delivery.execution] = execution
            execution.owner, execution.outcome, execution.body = None, outcome, body
        return True

    def _leave(self, delivery: Delivery, *, holds: bool) -> None:
        """The owner holds no more. Its place may stay taken, by a name that nobody owns."""
        owners = self.lock(delivery.lock).owners
        if owners.pop(delivery.owner, None) is not None and holds:
            owners[held_place(delivery.owner)] = True

    def let_pass(self, lock: str, owner: str) -> None:
        """The time for which a place was held is over."""
        self.lock(lock).owners[held_place(owner)] = False

    def _is_anothers(self, delivery: Delivery) -> bool:
        """Whether the run's execution is known, and somebody else has begun or ended it since."""
        execution = self.executions.get(delivery.execution)
        if execution is None:
            # Unless the store forgot the trigger too, somebody has run the execution to an end that is not kept.
            return delivery.execution_key is not None and delivery.task_id in self.triggers
        return execution.outcome is not None or execution.owner != delivery.owner

    def _is_taken(self, lock: Lock, token: int) -> bool:
        return lock.last_token > token if self.limit == 1 else len(lock.live) >= self.limit

    def abandon(
        self, delivery: Delivery, generation: int | None, *, again: bool = False, died: bool = False, holds: bool = False
    ) -> None:
        """`again`: whether the store goes on keeping the message; else it is the broker's. `died`: whether the process has."""
        self._leave(delivery, holds=holds)
        trigger, execution = self.triggers.get(delivery.task_id), self.executions.get(delivery.execution)
        has_outcome = bool((execution and execution.outcome) or (trigger and trigger.outcome))
        owned = bool(execution and execution.owner == delivery.owner)
        if owned and delivery.execution_key and trigger and trigger.outcome and not (execution and execution.outcome):
            if died and execution:
                execution.owner = None  # nobody knows what it has done
            else:
                self._free_execution(delivery)
        is_its = bool(execution and execution.owner == delivery.owner and not has_outcome)
        is_current = bool(trigger and execution and execution.generation == trigger.generation)
        # Unless another trigger has begun since.
        was_left = bool(trigger and execution and is_current and trigger.left_by == delivery.owner and not execution.owner)
        if died and execution and not execution.outcome and (owned or was_left):
            execution.dead = delivery.owner
        if trigger and died and not has_outcome and is_current and (is_its or was_left):
            trigger.died += 1
            trigger.left_by = None
        if trigger and execution and is_its:
            execution.owner = None
            trigger.left_by = trigger.left_by if died else delivery.owner
            if not again:
                trigger.leave_custody()
            elif trigger.message is not None:
                trigger.is_due = True
        if trigger and generation is not None and generation > trigger.generation:
            trigger.generation, trigger.copy, trigger.died, trigger.left_by = generation, None, 0, None

    def conclude(self, delivery: Delivery, outcome: str, *, releases: bool, error: bytes | None) -> bool:
        """Return whether the trigger has this outcome now.

        Without an error all that follows has been sent, and it may have the outcome from another owner too.
        """
        if releases:
            self.lock(delivery.lock).owners.pop(delivery.owner, None)
        trigger = self.triggers.get(delivery.task_id)
        if releases and (trigger is None or trigger.outcome is None or trigger.concluded_by == delivery.owner):
            self._free_execution(delivery)
        if trigger and (trigger.concluded_by == delivery.owner or (trigger.outcome == outcome and error is None)):
            if error is None:
                trigger.settle()
            return True
        if trigger is None or trigger.outcome or not self._stop(delivery):
            return False
        trigger.end(outcome, error or b"", delivery.owner if releases and error is not None else None)
        trigger.concluded_by = delivery.owner
        if error is None:
            trigger.settle()
        elif trigger.message is not None:
            trigger.is_due = True
        return True

    def _stop(self, delivery: Delivery) -> bool:
        """No run works on the trigger any more. Returns False when another delivery does."""
        execution = self.executions.get(delivery.execution)
        if execution is None or execution.owner is None or execution.task_id != delivery.task_id:
            return True
        if execution.owner != delivery.owner and execution.is_live:
            return False
        if not delivery.execution_key:
            execution.owner = None
        return True

    def _free_execution(self, delivery: Delivery) -> None:
        """Others may run it now: the process of this run is gone."""
        execution = self.executions.get(delivery.execution)
        if delivery.execution_key and execution and (execution.owner or execution.dead) == delivery.owner:
            del self.executions[delivery.execution]

    def settle(self, delivery: Delivery, *, is_done: bool) -> bool:
        """Return whether the trigger is this delivery's to settle."""
        trigger = self.triggers.get(delivery.task_id)
        if trigger is None or trigger.told != delivery.owner:
            return False
        if not is_done:
            trigger.is_old = False
            return True
        trigger.is_settled, trigger.is_due = True, False
        if trigger.outcome == "dead-lettered":
            trigger.handouts = 0  # somebody will want to see its message
        else:
            trigger.message = None
        return True

    def rescue(self, task_id: str, execution: str) -> tuple[object, ...]:
        """Return what the sweeper is told: nothing, or the message, the copy to go on from, the outcome and the count."""
        trigger = self.triggers.get(task_id)
        if trigger is None or trigger.message is None or trigger.is_settled:
            if trigger:
                trigger.is_due = False
            return ()
        run = self.executions.get(execution, Execution())
        if not trigger.is_old if trigger.outcome else run.owner and run.is_live and run.task_id == task_id:
            return ()
        trigger.handouts += 1
        return (trigger.message, trigger.copy or "", trigger.outcome or "", trigger.handouts)

    def age(self, task_id: str) -> None:
        """The trigger ended long ago."""
        self.triggers[task_id].is_old = True

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

    def forget(self, task_id: str) -> None:
        """The record of this trigger is kept no longer."""
        del self.triggers[task_id]
        self.executions.pop(f"task {task_id}", None)

    def _held(self, what: str, delivery: Delivery, on_held: str) -> tuple[object, ...]:
        is_newcomer = what in ("lock", "execution")
        if is_newcomer and on_held == "skip":
            return self._end(delivery, "skipped", b"")
        if is_newcomer and on_held == "reject":
            return self._end(delivery, "rejected", b"")
        if on_held != "ask":
            trigger = self._remember(delivery)
            if is_newcomer:
                trigger.leave_custody()
                trigger.handouts = 0
        return ("held", what)

    def _end(self, delivery: Delivery, outcome: str, body: bytes) -> tuple[object, ...]:
        trigger = self._remember(delivery)
        # What Celery has done for another outcome, such as that of an execution kept no longer, it has not done for this one.
        trigger.is_settled = trigger.is_settled and trigger.outcome == outcome
        trigger.end(outcome, body, delivery.owner)
        if not trigger.is_settled:
            trigger.enter_custody(delivery.message)
        return ("ended", outcome, body, trigger.is_settled)

    def _remember(self, delivery: Delivery) -> Trigger:
        trigger = self.triggers.setdefault(delivery.task_id, Trigger(delivery.generation, delivery.copy))
        trigger.generation, trigger.copy = delivery.generation, delivery.copy
        return trigger


def held_place(owner: str) -> str:
    """The name by which a place stays taken after its owner has ended."""
    return f"{owner} ended"
