"""What must hold in every state and for every step, told by what an onlooker sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_config import IN_BODY
from model_promises_waits import broken_for_waiters, nobody_waits
from model_state import BEFORE_FIRST, NONE

if TYPE_CHECKING:
    from model_config import Config, Step
    from model_state import Message, State

#: A store that forgets everything keeps only these.
WITHOUT_STORE = ("P2", "P3 vanished")


def broken(config: Config, before: State, step: Step) -> str:
    """Return the promise that this step breaks and how, or ""."""
    for why in _broken(config, before, step):
        if not config.forgets or why.startswith(WITHOUT_STORE):
            return why
    return ""


def is_over(config: Config, state: State) -> bool:
    """Whether every trigger has its outcome, Celery was told, and nobody has anything left to do."""
    if state.ready or any(state.workers) or not nobody_waits(state.store) or not all(outcome for _, outcome in state.told):
        return False
    return bool(config.forgets) or all(record.is_settled for record in state.store.records[: len(state.told)])


def _broken(config: Config, before: State, step: Step):  # noqa: C901, PLR0912, one line for each promise
    after, store = step.state, step.state.store
    if sum(line.is_live for line in store.lease) > config.limit:
        yield "P1 more live leases than the limit"
    if sum(worker.stage in IN_BODY and worker.believes for worker in after.workers if worker) > config.limit:
        yield "P1 more bodies under leases than the limit"

    if after.given != before.given and after.given[0] <= before.given[0]:
        yield "P2 a token that is not greater than the last"
    is_effect = step.action == "effect"
    if is_effect and after.fenced != before.fenced and after.fenced[1] < before.fenced[1]:
        yield "P2 a stale write accepted by the resource that looks at tokens"

    for trigger in range(len(config.keys)):
        if not is_in_custody(after, trigger) and not (config.forgets and after.told[trigger][1]):
            yield f"P3 vanished: trigger {trigger} is nowhere"
        if "then" in after.told[trigger][1]:
            yield f"P3 two outcomes: Celery was told {after.told[trigger][1]} of trigger {trigger}"
        record = store.records[trigger]
        if record.message != NONE and not record.is_settled and not store.due[trigger]:
            yield f"P3 no rescue: the message of trigger {trigger} is stored, and nobody will look at it"

    worker = before.workers[step.where] if step.action.startswith("enter") and step.reply[0] == "held" else None
    known = worker and before.counted[worker.message.trigger]
    if worker and known and _are_siblings(known, worker.message):
        yield f"P3 copies multiply: two that were made from one go back, of trigger {worker.message.trigger}"

    if before.store.waits.parked or store.waits.parked:
        yield from broken_for_waiters(config, before, step)

    message, most = _ran(before, step), config.max_deliveries
    if message is not None:
        if is_completed(config, before, message):
            yield "P4 a body starts after the recorded success"
        if most is not None and before.deaths[message.trigger][message.generation] >= most:
            yield f"P3 crash loop: trigger {message.trigger} runs again after {most} deaths"
    if step.action.startswith("finish succeeded") and step.reply[0] == "finished" and before.store != after.store:
        worker = before.workers[step.where]
        if worker and is_completed(config, before, worker.message):
            yield "P4 a second recorded success"
    if step.reply[:2] == ("ended", "dead-lettered") and before.store != after.store:
        worker = before.workers[step.where]
        if worker and not before.store.records[worker.message.trigger].outcome:
            deaths = before.deaths[worker.message.trigger][worker.message.generation]
            if most is not None and deaths < most and "pause" not in config.kinds:
                yield f"P3 dead-lettered after {deaths} of {most} deaths"


def _ran(before: State, step: Step) -> Message | None:
    """Return the message of the body that starts with this step."""
    if not step.action.startswith("enter") or step.reply[0] != "acquired":
        return None
    worker = before.workers[step.where]
    return worker.message if worker else None


def is_completed(config: Config, state: State, message: Message) -> bool:
    """Whether a success is recorded; without an explicit key, one of this generation or a later one."""
    generation = state.succeeded[config.rules.execution(message.trigger)]
    return generation != NONE and (config.keys[message.trigger] is not None or generation >= message.generation)


def is_in_custody(state: State, trigger: int) -> bool:
    """Whether the trigger is over, or somebody has it who will bring it on."""
    record = state.store.records[trigger]
    return (
        (bool(record.outcome) and record.is_settled)
        or any(message.trigger == trigger for message in state.ready)
        or any(worker is not None and worker.message.trigger == trigger for worker in state.workers)
        or (record.message != NONE and state.store.due[trigger])
        or any(call.trigger == trigger for call in state.handed)
        or any(waiter.trigger == trigger for waiter in state.store.waits.parked)
    )


def _are_siblings(one: Message, other: Message) -> bool:
    same_origin = one.generation == other.generation and one.previous == other.previous != BEFORE_FIRST
    return same_origin and one.copy != other.copy
