"""Triggers on one key, drained: how long, in which order, at which cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import redis
from waiting_order import overlaps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import psutil
    from waiting_place import Place


class Drained(NamedTuple):
    """What a drain took. Costs are per trigger, CPU times in milliseconds; orders are percentages of pairs out of order."""

    #: From the first body's begin to the last body's end, by the time that the bodies themselves need.
    makespan: float
    by_publish: float
    by_arrival: float
    #: Messages that a worker has received, and those that a process of its pool has begun on.
    deliveries: float
    attempts: float
    #: EVALSHA and EVAL together, and all commands, as the server counts them; those of broker and results included.
    script_calls: float
    commands: float
    main_cpu: float
    children_cpu: float
    #: Triggers without an end, and bodies that began before another had ended.
    lost: int
    overlaps: int
    #: Bodies that ended, per trigger that did.
    runs: float


def drain(place: Place, count: int, seconds: float, *, concurrency: int, publish_first: bool) -> Drained:
    """Publish triggers on one key and let a worker run them: one that is started on them, or one that is warm already."""
    if publish_first:
        place.publish(range(count), seconds=seconds)
    worker = place.start_worker(concurrency)
    if not publish_first:
        place.until_ready()
        place.warm_up(concurrency)
    server = redis.Redis.from_url(place.server.url)
    server.config_resetstat()
    if not publish_first:
        place.publish(range(count), seconds=seconds)
    assert place.until("begin", 1), worker.logs()
    main, *children = place.processes()
    before = spent([main]), spent(children)
    place.until("end", count)
    cpu = spent([main]) - before[0], spent(children) - before[1]
    place.quiet()
    return judged(place, count, seconds, server, cpu)


def judged(place: Place, count: int, seconds: float, server: redis.Redis, cpu: tuple[float, float] = (0.0, 0.0)) -> Drained:
    """Judge what has been noted of so many triggers on one key."""
    notes = place.notes.refresh()
    bodies = [(float(end.value), end.at) for ends in notes.of("end").values() for end in ends]
    statistics = server.info("commandstats")
    scripts = sum(statistics.get(f"cmdstat_{command}", {}).get("calls", 0) for command in ("eval", "evalsha"))
    ended = len(notes.of("end"))
    return Drained(
        makespan=(max(end for _, end in bodies) - min(begin for begin, _ in bodies)) / (count * seconds),
        by_publish=place.out_of_order("publish"),
        by_arrival=place.out_of_order("arrival"),
        deliveries=notes.count("received") / count,
        attempts=notes.count("prerun") / count,
        script_calls=scripts / count,
        commands=server.info("stats")["total_commands_processed"] / count,
        main_cpu=cpu[0] / count * 1000,
        children_cpu=cpu[1] / count * 1000,
        lost=count - ended,
        overlaps=overlaps(bodies),
        runs=len(bodies) / ended,
    )


def spent(processes: Iterable[psutil.Process]) -> float:
    """CPU seconds of these processes so far."""
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def median_of(rounds: int, measure: Callable[[], Drained]) -> dict[str, list[float]]:
    """Measure so many times, and return all that was found by its name."""
    found = [measure()._asdict() for _ in range(rounds)]
    return {name: [each[name] for each in found] for name in Drained._fields}
