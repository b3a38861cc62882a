"""What can happen next: what workers and a sweeper do, the passing of time, and faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_config import ENDING, IN_BODY, IN_CHILD, RUNNING, Step
from model_rules import PARKING
from model_scripts import Scripts
from model_state import EMPTY, NO_TICKET, NONE, NOTHING_TOLD, Message, Process, State, Store, expired, put, take
from model_sweeper import Sweeper
from model_symmetry import Looks, canonical
from model_waits import NOBODY_WAITS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model_config import Config
    from model_waits import Waits


class World(Sweeper):
    """Every step that can be taken from a state."""

    def __init__(self, config: Config, scripts: type[Scripts] = Scripts) -> None:
        super().__init__(config, scripts)
        self.looks = Looks(config.max_deliveries is not None, config.parks, config.gathers, config.is_short)

    def start(self) -> State:
        """All triggers are published, and nothing has happened."""
        config, count = self.config, len(self.config.keys)
        return State(
            store=Store((), 0, (EMPTY,) * config.rules.places, (False,) * count),
            ready=tuple(Message(trigger) for trigger in range(count)),
            workers=(None,) * config.workers,
            handed=(),
            faults=config.faults,
            forgets=config.forgets,
            revokes=config.revokes,
            given=NO_TICKET,
            fenced=NO_TICKET,
            unfenced=0,
            succeeded=(NONE,) * config.rules.places,
            told=(NOTHING_TOLD,) * count,
            counted=(None,) * count,
            deaths=((0,) * (config.retries + 1),) * count,
            overdue=frozenset(),
            names=0,
        )

    def canonical(self, state: State) -> State:
        return canonical(state, self.looks)

    def steps(self, state: State) -> Iterator[Step]:
        idle = next((slot for slot, worker in enumerate(state.workers) if worker is None), None)
        if idle is not None:
            for message in sorted(set(state.ready)):
                may_linger = self._may_linger(message.trigger)
                process = Process("new", message, owner=state.names + 1, may_linger=may_linger)
                after = take(state, message)._replace(names=state.names + 1)
                yield Step("deliver", idle, (), self.put(after, idle, process))
                if message.is_ahead and may_linger:
                    lingering = process._replace(stage="lingering")
                    yield Step("deliver to a free slot", idle, (), self.put(after, idle, lingering))
        for slot, worker in enumerate(state.workers):
            if worker:
                yield from self.of_worker(state, slot, worker)
                if state.faults:
                    yield from self._faults(state, slot, worker)
        yield from self._sweeper(state)
        yield from self._time(state)
        if state.forgets:
            store = Store((), 0, (EMPTY,) * len(state.store.records), (False,) * len(state.store.due))
            store = store._replace(waits=NOBODY_WAITS._replace(groups=state.store.waits.groups))
            yield Step("forget", NONE, (), state._replace(store=store, forgets=state.forgets - 1))

    def _may_linger(self, trigger: int) -> bool:
        return self.config.is_short and self.config.rules.policy(trigger) in PARKING

    def _is_on_its_way(self, state: State, trigger: int) -> bool:
        """Handing out again comes late, with pauses that double: what the broker has arrives first, but for a fault."""
        stages = ("new", "lingering", "led", "refusing", "blind", "waiting", "overtaken", "released")
        held = [worker.message for worker in state.workers if worker and worker.stage in stages]
        calls = [call for worker in state.workers if worker for call in worker.calls]
        return any(message.trigger == trigger for message in (*state.ready, *held, *calls))

    def _time(self, state: State) -> Iterator[Step]:
        alive = {w.owner: (slot, w) for slot, w in enumerate(state.workers) if w}
        held = {line.owner for line in state.store.lease if line.is_live}
        for owner in sorted(held | {record.owner for record in state.store.records if record.is_live}):
            if owner not in alive or alive[owner][1].stage not in (*RUNNING, "new", "killed"):
                yield Step("expire", owner, (), expired(state, owner))
        for trigger, record in enumerate(state.store.records[: len(state.told)]):
            if record.outcome and record.is_fresh:
                after = state._replace(store=state.store.change(trigger, is_fresh=False))
                ender = alive.get(record.by) or alive.get(record.concluded_by)
                if not (ender and (ender[1].doom or ender[1].stage in ENDING)):
                    yield Step("grace", trigger, (), after)
                elif state.faults and "pause" in self.config.kinds:
                    yield Step("grace", trigger, (), after._replace(faults=state.faults - 1), is_fault=True)
        yield from self._time_of_waits(state)

    def _time_of_waits(self, state: State) -> Iterator[Step]:
        waits = state.store.waits
        lingering = {w.message.trigger for w in state.workers if w and w.stage == "lingering"}
        for trigger, is_reserved in waits.called:
            if is_reserved:
                is_late = trigger in lingering or self._is_on_its_way(state, trigger)
                after = waits.call(trigger, is_reserved=False)
                after = after._replace(is_lingering=waits.is_lingering and waits.lingers != trigger)
                late = state._replace(overdue=state.overdue | {trigger})
                yield from self._passing(late, "reserved", trigger, after, is_late=is_late)
        if waits.is_lingering:
            is_late = waits.lingers in lingering
            yield from self._passing(state, "lingers", NONE, waits._replace(is_lingering=False), is_late=is_late)
        if waits.has_baton and not lingering:
            yield from self._passing(state, "baton is gone", NONE, waits._replace(has_baton=False), is_late=False)
        if waits.no_slot:
            yield from self._passing(state, "slot again", NONE, waits._replace(no_slot=False), is_late=False)

    def _passing(self, state: State, action: str, where: int, waits: Waits, *, is_late: bool) -> Iterator[Step]:
        """Time passes: a fault only where somebody is on its way."""
        after = state._replace(store=state.store._replace(waits=waits))
        if not is_late:
            yield Step(action, where, (), after)
        elif state.faults and "late" in self.config.kinds:
            yield Step(action, where, (), after._replace(faults=state.faults - 1), is_fault=True)

    def _faults(self, state: State, slot: int, worker: Process) -> Iterator[Step]:
        kinds, spent = self.config.kinds, state._replace(faults=state.faults - 1)
        back = (*state.ready, worker.message) if worker.is_unacked else state.ready
        if "store away" in kinds and worker.stage == "new":
            yield Step("store away", slot, (), self.put(spent, slot, worker._replace(stage="refusing")), is_fault=True)
        if "worker dies" in kinds:
            died = self.put(self._count_death(spent, worker), slot, None)
            yield Step("worker dies", slot, (), died._replace(ready=back), is_fault=True)
            if worker.is_unacked and worker.has_entered and not self.config.forgets:
                yield Step("worker and message die", slot, (), died, is_fault=True)
        if "child dies" in kinds and worker.stage in IN_CHILD and not worker.doom:
            dead = worker._replace(stage="dead", ticket=NO_TICKET, believes=False, outcome="", calls=(), leader=NONE)
            yield Step("child dies", slot, (), self.put(self._count_death(spent, worker), slot, dead), is_fault=True)
        if "exit" in kinds and worker.stage in IN_BODY and not worker.doom:
            exiting = worker._replace(stage="exiting", ticket=NO_TICKET, believes=False, calls=())
            yield Step("exit", slot, (), self.put(self._count_death(spent, worker), slot, exiting), is_fault=True)
        if "pause" in kinds and worker.stage in ("new", *RUNNING):
            line = state.store.line(worker.owner)
            if worker.believes or (line and line.is_live):
                paused = self.put(spent, slot, worker._replace(believes=False))
                yield Step("pause", slot, (), expired(paused, worker.owner), is_fault=True)
        if "redelivery" in kinds and worker.is_unacked:
            again = self.put(spent, slot, worker._replace(is_unacked=False))
            yield Step("redelivery", slot, (), again._replace(ready=back), is_fault=True)
        if "time limit" in kinds and worker.stage in IN_BODY and not worker.doom:
            store, reply = self.scripts.conclude(state.store, worker, "failed", release=False, is_told=False)
            after = self._acknowledge(spent._replace(store=store), slot, worker)
            # One that was overtaken fails nothing: it is only killed.
            doomed = worker._replace(doom="to tell" if reply[0] == "concluded" else "to kill", is_unacked=False)
            yield Step("conclude", slot, reply, self.put(after, slot, doomed), is_fault=True)

    def _count_death(self, state: State, worker: Process) -> State:
        run = state.store.records[self.config.rules.execution(worker.message.trigger)]
        is_counted = worker.stage in ("dead", "exiting") or self.config.max_deliveries is None
        if is_counted or run.owner != worker.owner or run.outcome:
            return state
        trigger, generation = worker.message.trigger, worker.message.generation
        counts = state.deaths[trigger]
        return state._replace(deaths=put(state.deaths, trigger, put(counts, generation, counts[generation] + 1)))
