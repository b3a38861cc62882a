"""Walk through every state of a small world: breadth first, so that what is found first is a shortest accident.

python tests/model/explore.py            the worlds of the tests
python tests/model/explore.py --big      larger ones, for minutes
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, NamedTuple

from model_promises import broken, is_over
from model_scripts import Scripts
from model_world import World
from model_worlds import BIG, SMALL, WAITING

if TYPE_CHECKING:
    from model_config import Config, Step
    from model_state import State

Label = tuple[str, int, tuple[Any, ...]]


class Accident(NamedTuple):
    """A promise that is broken, and the shortest way to it."""

    promise: str
    steps: list[Label]

    def __str__(self) -> str:
        lines = [
            f"{n:3} {action} [{where}] {' '.join(map(str, reply))}" for n, (action, where, reply) in enumerate(self.steps, 1)
        ]
        return "\n".join([self.promise, *lines])


class Seen(NamedTuple):
    """What an exploration has found."""

    states: int
    steps: int
    #: How often each action got each answer.
    answers: Counter[tuple[str, ...]]
    accident: Accident | None


def explore(config: Config, scripts: type[Scripts] = Scripts, world: type[World] = World) -> Seen:
    """Visit every state that can be reached, until a promise is broken; then look whether every one can come to its end.

    States are known by their hashes, of 64 bits.
    """
    place = world(config, scripts)
    start = place.canonical(place.start())
    numbers = {hash(start): 0}
    met: dict[int, int] = {}
    came_by: list[tuple[int, Label]] = [(0, ("start", 0, ()))]
    faultless: list[list[int]] = [[]]
    ends: list[int] = []
    answers: Counter[tuple[str, ...]] = Counter()
    ahead = deque([(0, start)])
    while ahead:
        number, state = ahead.popleft()
        if is_over(config, state):
            ends.append(number)
        for step in place.steps(state):
            answers[step.action, *_words(state, step)] += 1
            promise = broken(config, state, step)
            label = (step.action, step.where, step.reply)
            if promise:
                return Seen(len(numbers), answers.total(), answers, Accident(promise, [*_way(came_by, number), label]))
            raw = hash(step.state)
            known = met.get(raw)
            if known is None:
                after = place.canonical(step.state)
                known = met[raw] = numbers.setdefault(hash(after), len(numbers))
            if known == len(came_by):
                came_by.append((number, label))
                faultless.append([])
                ahead.append((known, after))
            if not step.is_fault:
                faultless[known].append(number)
    stuck = _first_without_end(faultless, ends)
    accident = None if stuck is None else Accident("P3 no end: a trigger cannot end any more", _way(came_by, stuck))
    return Seen(len(numbers), answers.total(), answers, accident)


def _words(state: State, step: Step) -> tuple[str, ...]:
    if step.action == "effect":
        worker = state.workers[step.where]
        assert worker
        is_stale = worker.ticket[1] < state.unfenced
        is_accepted = worker.ticket[0] >= state.fenced[0]
        return ("stale" if is_stale else "in order", "accepted" if is_accepted else "refused")
    return tuple(word for word in step.reply if isinstance(word, str))


def _way(came_by: list[tuple[int, Label]], number: int) -> list[Label]:
    steps = []
    while number:
        number, label = came_by[number]
        steps.append(label)
    return steps[::-1]


def _first_without_end(faultless: list[list[int]], ends: list[int]) -> int | None:
    """Return the first state from which, without further faults, no end can be reached."""
    can_end = bytearray(len(faultless))
    ahead = list(ends)
    for number in ends:
        can_end[number] = True
    while ahead:
        for before in faultless[ahead.pop()]:
            if not can_end[before]:
                can_end[before] = True
                ahead.append(before)
    number = can_end.find(0)
    return None if number < 0 else number


def main() -> int:
    parser = argparse.ArgumentParser(description="Walk through every state of the model.")
    parser.add_argument("--big", action="store_true", help="larger worlds, for minutes")
    parser.add_argument("worlds", nargs="*", help="names of worlds; all when none is given")
    arguments = parser.parse_args()
    worlds = BIG if arguments.big else {**SMALL, **WAITING}
    failed = 0
    for name, config in worlds.items():
        if arguments.worlds and name not in arguments.worlds:
            continue
        began = time.process_time()
        seen = explore(config)
        print(f"{name}: {seen.states:,} states, {seen.steps:,} steps, {time.process_time() - began:.1f} s", flush=True)  # noqa: T201, a command line
        if seen.accident:
            failed += 1
            print(seen.accident, flush=True)  # noqa: T201, a command line
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
