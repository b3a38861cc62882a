"""Scripts with one thing wrong each: every one must be caught."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_scripts import Scripts
from model_state import NONE, Line
from model_world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model_config import Step
    from model_rules import Reply
    from model_state import Message, Process, Record, State, Store, Ticket


class FinishWithoutOwner(Scripts):
    """`finish` takes the outcome of whoever comes."""

    def is_anothers(self, run: Record, owner: int, *, is_forgotten: bool) -> bool:
        return False

    def is_taken(self, store: Store, ticket: Ticket) -> bool:
        return False


class ReleaseWithoutOwner(Scripts):
    """`finish` and `abandon` release the lease, whosever it is."""

    def release(self, store: Store, owner: int) -> Store:
        return store._replace(lease=())


class EnterByTaskId(Scripts):
    """`enter` takes a delivery for the holder when it has the holder's task id."""

    def is_asked_again(self, run: Record, process: Process) -> bool:
        return run.runs == process.message.trigger


class EnterWithoutOutcome(Scripts):
    """`enter` does not look whether the execution is completed."""

    def is_over(self, run: Record, *, is_own: bool) -> bool:
        return False


class TokenByCounter(Scripts):
    """The fencing token is a counter of the store, and nothing else."""

    def next_token(self, store: Store, given: Ticket) -> int:
        return store.fence + 1


class RenewRevives(Scripts):
    """`renew` writes the lease that its caller once had."""

    def renew(self, store: Store, process: Process) -> tuple[Store, Reply]:
        line = Line(process.owner, is_live=True, ticket=process.ticket, trigger=process.message.trigger)
        return store.without(process.owner)._replace(lease=(*store.without(process.owner).lease, line)), ("renewed",)


class RescueUnderLease(Scripts):
    """`rescue` hands the message out while the trigger runs, and `enter` takes the newest copy for the one to run."""

    def is_running(self, run: Record, trigger: int) -> bool:
        return False

    def enter(self, store: Store, process: Process, given: Ticket, *, linger: bool = False) -> tuple[Store, Reply]:
        run = store.records[self.rules.execution(process.message.trigger)]
        if run.is_live and run.owner != process.owner and process.message.copy != store.records[process.message.trigger].copy:
            store = self.release(store, run.owner).change(self.rules.execution(process.message.trigger), is_live=False)
        return super().enter(store, process, given, linger=linger)


class RescueOnce(Scripts):
    """`rescue` takes the trigger out of the index instead of putting it off."""

    def put_off(self, store: Store, trigger: int) -> Store:
        return store.set_due(trigger, is_due=False)


class AnyCopy(Scripts):
    """`enter` lets every copy count, and so the copies of a waiting trigger have as many outcomes."""

    def is_surplus(self, record: Record, message: Message) -> str:
        return ""


class NewestCopyOnly(Scripts):
    """`enter` lets a copy count only if the store knows it, not if it was made from the one that the store knows."""

    def is_surplus(self, record: Record, message: Message) -> str:
        return "copy" if record.copy not in (NONE, message.copy) else ""


class LetGoOfTheDead(Scripts):
    """`abandon` of a run that died lets go of the stored message, although nobody has published it."""

    def abandon(
        self, store: Store, process: Process, *, generation: int = NONE, again: bool = False, died: bool = False
    ) -> tuple[Store, Reply]:
        del again
        return super().abandon(store, process, generation=generation, again=False, died=died)


class SettleFirst(World):
    """The trigger is settled before Celery was told."""

    def _telling(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        store, reply = self.scripts.settle(state.store, worker)
        yield self._step("settle", state._replace(store=store), slot, worker._replace(stage="settled"), reply)

    def _settled(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        after = self._tell(state, worker.message, worker.outcome)
        yield self._step("tell", after, slot, worker._replace(stage="done"))


class AcknowledgeFirst(World):
    """A waiting trigger's message is acknowledged before its copy is published."""

    def _waiting(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        yield self._step("acknowledge", state, slot, worker._replace(stage="acked", is_unacked=False))

    def _acked(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        yield from super()._waiting(state, slot, worker)
