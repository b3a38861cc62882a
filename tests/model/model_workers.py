"""The steps of a worker, from a delivery to its acknowledgement.

Each call of a script is one step, and so is each thing that others see: a message published, a write to a resource, what Celery
is told. A worker may die between any two of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from model_config import Step
from model_rules import calls_in
from model_scripts import Scripts
from model_state import BEFORE_FIRST, FIRST, NO_TICKET, NONE, SOMEBODY, Message, Process, put, with_copy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model_config import Config
    from model_rules import Reply
    from model_state import State


class Workers:
    """What the workers of a world do, one method for each stage of a delivery."""

    def __init__(self, config: Config, scripts: type[Scripts] = Scripts) -> None:
        self.config = config
        self.scripts = scripts(config.rules)

    def of_worker(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        if worker.calls:
            yield from self._calling_on(state, slot, worker)
            return
        if worker.doom:
            yield from self._doomed(state, slot, worker)
        yield from getattr(self, f"_{worker.stage}")(state, slot, worker)

    def _calling_on(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        """The messages of those who are next are published, one by one, before anything else."""
        call, *calls = worker.calls
        then = worker._replace(calls=tuple(calls))
        yield self._step("call", with_copy(state, call), slot, None if not calls and worker.stage == "calling" else then)

    def _new(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        yield from self._entering(state, slot, worker, "enter", linger=False)
        if worker.may_linger and state.store.waits.knows_hold:
            yield from self._entering(state, slot, worker, "enter lingering", linger=True)

    def _entering(self, state: State, slot: int, worker: Process, action: str, *, linger: bool) -> Iterator[Step]:
        """Ask for the lease; with a slot that is free for as long as it may linger, or without one."""
        store, reply = self.scripts.enter(state.store, worker, state.given, linger=linger)
        after = state._replace(store=store)
        if reply[0] == "acquired":
            after = after._replace(given=max(state.given, reply[1]))
            stage = "body" if self.config.has_effects else "worked"
            then = worker._replace(stage=stage, ticket=reply[1], believes=True, has_entered=True)
        elif reply[0] == "held":
            after = after._replace(counted=put(state.counted, worker.message.trigger, worker.message))
            then = worker._replace(stage="waiting")
        elif reply[0] == "ended" and not reply[2]:
            then = worker._replace(stage="telling", outcome=reply[1], has_entered=True)
        elif reply[0] == "linger":
            then = worker._replace(stage="lingering", has_entered=True)
        elif reply[0] == "led":
            then = worker._replace(stage="led", leader=reply[1])
        else:
            then = worker._replace(stage="done", has_entered=worker.has_entered or reply[0] == "parked")
        yield from self._called(action, after, slot, then, reply, unheard=worker)

    def _lingering(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        """It asks again when it is told that a place may be free, or when it has waited for long enough."""
        asking, waits = worker._replace(stage="new"), state.store.waits
        if waits.has_baton:
            store = state.store._replace(waits=waits._replace(has_baton=False))
            yield self._step("baton", state._replace(store=store), slot, asking)
        yield self._step("linger no more", state, slot, asking._replace(may_linger=False))

    def _led(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        store, reply = self.scripts.follow(state.store, worker, worker.leader)
        then = worker._replace(stage="new", leader=NONE)
        if reply[0] == "ended":
            is_settled = reply[2]
            then = then._replace(stage="done" if is_settled else "telling", outcome=reply[1], has_entered=True)
        yield from self._called("follow", state._replace(store=store), slot, then, reply, unheard=worker)

    def _body(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        after = state._replace(unfenced=worker.ticket[1])
        if worker.ticket[0] >= state.fenced[0]:
            after = after._replace(fenced=worker.ticket)
        yield self._step("effect", after, slot, worker._replace(stage="worked"))
        yield from self._interrupted(state, slot, worker)

    def _worked(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        for outcome in self.config.outcomes:
            yield from self._finishing(state, slot, worker._replace(stage="finishing", outcome=outcome, believes=False))
        if worker.message.generation < self.config.retries:
            retry = Message(worker.message.trigger, FIRST, BEFORE_FIRST, worker.message.generation + 1)
            retried = worker._replace(stage="retried", ticket=NO_TICKET, believes=False)
            yield self._step("retry", state._replace(ready=(*state.ready, retry)), slot, retried)
        yield from self._interrupted(state, slot, worker)

    def _finishing(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        store, reply = self.scripts.finish(state.store, worker, worker.outcome)
        after = state._replace(store=store)
        if reply[0] == "finished" and worker.outcome == "succeeded":
            place = self.config.rules.execution(worker.message.trigger)
            after = after._replace(succeeded=put(state.succeeded, place, worker.message.generation))
        ended = worker._replace(stage="telling" if reply[0] == "finished" else "overtaken", ticket=NO_TICKET)
        yield from self._called(f"finish {worker.outcome}", after, slot, ended, reply, unheard=worker)

    def _interrupted(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        store, reply = self.scripts.renew(state.store, worker)
        after = state._replace(store=store)
        overtaken = worker._replace(stage="overtaken", ticket=NO_TICKET, believes=False)
        if reply[0] == "lost":
            yield self._step("renew", after, slot, overtaken, reply)
        elif not worker.believes:
            yield self._step("renew", after, slot, worker._replace(believes=True), reply)
        if not worker.believes:
            yield self._step("interrupt", state, slot, overtaken)
        if not worker.believes and "failed" in self.config.outcomes:
            # It has held the lease for too long, and that is its failure.
            store, reply = self.scripts.conclude(state.store, worker, "failed", release=True, is_told=False)
            ended = overtaken._replace(stage="telling", outcome="failed") if reply[0] == "concluded" else overtaken
            yield self._step("conclude worn", state._replace(store=store), slot, ended, reply)

    def _retried(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        store, reply = self.scripts.abandon(state.store, worker, generation=worker.message.generation + 1)
        yield from self._called("abandon retried", state._replace(store=store), slot, worker._replace(stage="done"), reply)

    def _overtaken(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        yield self._step("publish", with_copy(state, worker.message), slot, worker._replace(stage="leaving"))

    def _leaving(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        store, reply = self.scripts.abandon(state.store, worker)
        yield from self._called("abandon", state._replace(store=store), slot, worker._replace(stage="done"), reply)

    def _waiting(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        yield self._step("publish", with_copy(state, worker.message), slot, worker._replace(stage="done"))

    def _done(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        yield self._step("acknowledge", self._acknowledge(state, slot, worker), slot, None)

    def _telling(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        after = self._tell(state, worker.message, worker.outcome)
        yield self._step("tell", after, slot, worker._replace(stage="told"))

    def _told(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        yield from self._settling(state, slot, worker, worker._replace(stage="done"))
        late = worker._replace(stage="acknowledged", is_unacked=False)
        yield self._step("acknowledge", self._acknowledge(state, slot, worker), slot, late)

    def _acknowledged(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        yield from self._settling(state, slot, worker, None)

    def _settling(self, state: State, slot: int, worker: Process, then: Process | None) -> Iterator[Step]:
        store, reply = self.scripts.settle(state.store, worker)
        yield from self._called("settle", state._replace(store=store), slot, then, reply)

    # The main process, when the child is gone or about to be.

    def _exiting(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        store, reply = self.scripts.abandon(state.store, worker, again=True)
        yield from self._called("abandon again", state._replace(store=store), slot, worker._replace(stage="dead"), reply)

    def _dead(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        store, reply = self.scripts.abandon(state.store, worker, again=True, died=True)
        yield from self._called("abandon died", state._replace(store=store), slot, worker._replace(stage="released"), reply)

    def _released(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        ready = (*state.ready, worker.message) if worker.is_unacked else state.ready
        yield self._step("give back", state._replace(ready=ready), slot, None)

    def _doomed(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        """The main process tells Celery of the time limit, then settles; it releases the lease when the child is gone."""
        if worker.doom == "to tell":
            yield self._step("tell", self._tell(state, worker.message, "failed"), slot, worker._replace(doom="to settle"))
        elif worker.doom == "to settle":
            store, reply = self.scripts.conclude(state.store, worker, "failed", release=False, is_told=True)
            done = worker._replace(doom="to kill") if worker.stage != "killed" else None
            yield self._step("conclude told", state._replace(store=store), slot, done, reply)
        if worker.stage != "killed":
            store, reply = self.scripts.conclude(state.store, worker, "failed", release=True, is_told=False)
            killed = Process("killed", worker.message, worker.owner, is_unacked=False, doom=worker.doom)
            yield self._step(
                "conclude gone", state._replace(store=store), slot, killed if worker.doom != "to kill" else None, reply
            )

    def _killed(self, *_: Any) -> tuple[Step, ...]:
        return ()

    def _calling(self, *_: Any) -> tuple[Step, ...]:
        return ()

    # A delivery whose store does not answer goes back as it is; what it may have got is given back, if that can be.

    def _refusing(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        store, reply = self.scripts.abandon(state.store, worker)
        yield from self._called("abandon", state._replace(store=store), slot, worker._replace(stage="blind"), reply)
        yield self._step("give up", state, slot, worker._replace(stage="blind"))

    def _blind(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        yield self._step("publish", state._replace(ready=(*state.ready, worker.message)), slot, worker._replace(stage="done"))

    def _called(
        self, action: str, after: State, slot: int, worker: Process | None, reply: Reply, unheard: Process | None = None
    ) -> Iterator[Step]:
        """The call of a script, and the same with its reply lost."""
        yield self._step(action, after, slot, worker, reply)
        if after.faults and "reply lost" in self.config.kinds:
            lost = after._replace(faults=after.faults - 1)
            lost = self.put(lost, slot, unheard) if unheard else lost
            yield Step(f"{action}, reply lost", slot, reply, lost, is_fault=True)

    def _step(self, action: str, after: State, slot: int, worker: Process | None, reply: Reply = ()) -> Step:
        calls = calls_in(reply)
        if calls and worker is None:
            leaving = after.workers[slot]
            assert leaving
            worker = Process("calling", leaving.message, SOMEBODY, is_unacked=False)
        if calls and worker:
            worker = worker._replace(calls=calls)
        return Step(action, slot, reply, self.put(after, slot, worker))

    def _acknowledge(self, state: State, slot: int, worker: Process) -> State:
        if worker.is_unacked or worker.doom or not self.config.shares_tags:
            return state
        for other, process in enumerate(state.workers):
            if other != slot and process and process.is_unacked and process.message == worker.message:
                return self.put(state, other, process._replace(is_unacked=False))
        return state

    def _tell(self, state: State, message: Message, outcome: str) -> State:
        generation, known = state.told[message.trigger]
        if message.generation <= generation and outcome != known:
            outcome = f"{known}, then {outcome}"
        return state._replace(told=put(state.told, message.trigger, (max(generation, message.generation), outcome)))

    def put(self, state: State, slot: int, worker: Process | None) -> State:
        return state._replace(workers=put(state.workers, slot, worker))
