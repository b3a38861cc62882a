"""Ways through a world, to be replayed on the real scripts."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from model_world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from random import Random

    from model_config import Config, Step
    from model_state import State

Trace = list[tuple["State", "Step"]]


def short_traces(config: Config, depth: int) -> Iterator[Trace]:
    """Yield ways through every state and every answer that can be met within so many steps."""
    world = World(config)
    start = world.start()
    seen = {hash(world.canonical(start))}
    ahead: deque[tuple[State, Trace]] = deque([(start, [])])
    while ahead:
        state, trace = ahead.popleft()
        is_last = True
        for step in world.steps(state) if len(trace) < depth else ():
            number = hash(world.canonical(step.state))
            if number not in seen:
                seen.add(number)
                ahead.append((step.state, [*trace, (state, step)]))
                is_last = False
            elif step.reply:
                yield [*trace, (state, step)]
        if is_last:
            yield trace


def random_trace(config: Config, length: int, chance: Random) -> Trace:
    """Return a walk of that length, or until nothing can happen any more."""
    world = World(config)
    state, trace = world.start(), []
    while len(trace) < length and (steps := list(world.steps(state))):
        step = chance.choice(steps)
        trace.append((state, step))
        state = step.state
    return trace


def first_trace(config: Config, is_met: Callable[[State, Step], bool]) -> Trace:
    """Return a shortest way to a step of that kind."""
    world = World(config)

    def number_of(state: State) -> int:
        # A worker that is done stands for one that is idle, and is not.
        return hash((world.canonical(state), state.workers.count(None)))

    start = world.start()
    came_by: dict[int, tuple[int, State, Step] | None] = {number_of(start): None}
    ahead = deque([(number_of(start), start)])
    while ahead:
        known, state = ahead.popleft()
        for step in world.steps(state):
            if is_met(state, step):
                return [*_way(came_by, known), (state, step)]
            number = number_of(step.state)
            if number not in came_by:
                came_by[number] = known, state, step
                ahead.append((number, step.state))
    raise LookupError("no way leads there")


def named_trace(config: Config, names: Iterable[str]) -> Trace:
    """Return the way that these steps take, each an action and where it happens; the first such one that can be taken."""
    world = World(config)
    state, trace = world.start(), []
    for action, _, where in (name.strip().rpartition(" ") for name in names):
        step = next(step for step in world.steps(state) if (step.action, step.where) == (action, int(where)))
        trace.append((state, step))
        state = step.state
    return trace


def _way(came_by: dict[int, tuple[int, State, Step] | None], number: int) -> Trace:
    way = []
    while before := came_by[number]:
        number, state, step = before
        way.append((state, step))
    return way[::-1]
