"""What must hold for those who wait for the lock key, in every state and for every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_rules import calls_in
from model_state import NONE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model_config import Config, Step
    from model_state import State, Store
    from model_waits import Waiter


def broken_for_waiters(config: Config, before: State, step: Step) -> Iterator[str]:
    if step.state.store.waits != before.store.waits:
        yield from _in_disorder(step.state.store)
        called = {trigger for trigger, is_reserved in step.state.store.waits.called if is_reserved}
        called -= {trigger for trigger, is_reserved in before.store.waits.called if is_reserved}
        called -= {call.trigger for call in calls_in(step.reply)} | {step.state.store.waits.lingers}
        if called:
            yield f"P3 unheard: {called} are called, and nobody is told to publish it"
    for waiter in step.state.store.waits.parked:
        if not _is_looked_after(step.state.store, waiter):
            yield f"P3 no call: trigger {waiter.trigger} is parked, and nobody will call it"
    if step.action.startswith("finish succeeded") and step.reply[0] == "finished":
        yield from _unanswered(before, step)
    if step.action.startswith("enter"):
        yield from _of_newcomer(config, before, step)


def _unanswered(before: State, step: Step) -> Iterator[str]:
    worker = before.workers[step.where]
    line = worker and before.store.line(worker.owner)
    if line and line.group and line.group in dict(step.state.store.waits.followers).values():
        yield "P4 unanswered: a run has succeeded, and somebody waits for that still"


def nobody_waits(store: Store) -> bool:
    """Whether nothing is left of those who waited but what goes by itself."""
    waits = store.waits
    return not (waits.parked or waits.is_attended) and waits.pace != "lasts"


def _in_disorder(store: Store) -> Iterator[str]:
    waits = store.waits
    if any(trigger not in waits.line for trigger, _ in waits.called):
        yield "P3 called without being in line"
    if waits.parked and waits.pace != "lasts":
        yield "P3 forgotten: somebody waits, and the facts of the lock key will go"
    if not waits.parked:
        if waits.line or waits.called or waits.followers or waits.joins or {waits.gathers, waits.lingers} != {NONE}:
            yield "left over: nobody waits, and keys of the lock key stay"
        if waits.pace == "lasts" and not waits.is_attended:
            yield "left over: nobody waits, and the facts of the lock key stay"


def _is_looked_after(store: Store, waiter: Waiter) -> bool:
    """Whether a sweeper looks at a parked trigger, and at its lock key when it is in line; and it is in one place."""
    trigger, waits = waiter.trigger, store.waits
    places = (waiter.leader != NONE) + (trigger in waits.line) + waits.follows(trigger)
    return places == 1 and store.due[trigger] and (waits.is_attended or trigger not in waits.line)


def _of_newcomer(config: Config, before: State, step: Step) -> Iterator[str]:
    worker, waits = before.workers[step.where], before.store.waits
    if worker is None or not waits.line:
        return
    trigger = worker.message.trigger
    free = config.limit - sum(line.is_live for line in before.store.lease)
    # A newcomer that is coalesced with one in line takes its place.
    place = waits.gathers if config.policies[trigger] == "coalesce" and _is_newcomer(config, before, trigger) else trigger
    others = waits.line[: waits.line.index(place)] if place in waits.line else waits.line
    # A place is kept for those who are called, until they were called twice and have not come.
    late = {waiter.trigger for waiter in waits.parked if waiter.again and not waits.is_reserved(waiter.trigger)}
    reserved = sum(waits.is_called(other) and other not in late for other in others)
    # Whoever came late for its reservation has others before it.
    uncalled = [other for other in others if not waits.is_called(other) and other not in before.overdue]
    if waits.is_called(trigger):
        # Its turn had come when one that had died was put in front.
        uncalled = [other for other in uncalled if not _comes_back(config, before, other)]
    if step.reply[0] == "acquired" and step.state.given != before.given:
        if reserved >= free:
            yield f"order: trigger {trigger} takes a place that is reserved"
        if uncalled:
            yield f"order: trigger {trigger} passes {uncalled}, who wait in line"
    is_first = reserved < free and all(waits.is_called(other) for other in others) and not waits.follows(trigger)
    if is_first and step.reply[:2] in (("parked", "line"), ("parked", "again"), ("linger",)):
        yield f"P3 kept out: trigger {trigger} waits, and nobody is before it"


def _comes_back(config: Config, state: State, trigger: int) -> bool:
    """Whether it has run in its generation: it may have been put in front, when a run of it had died."""
    own, run = state.store.records[trigger], state.store.records[config.rules.execution(trigger)]
    return run.runs == trigger and run.run_generation == own.generation


def _is_newcomer(config: Config, state: State, trigger: int) -> bool:
    record, run = state.store.records[trigger], state.store.records[config.rules.execution(trigger)]
    return state.store.waits.waiter(trigger) is None and not record.has_run and run.runs != trigger
