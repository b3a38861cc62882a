"""Where the CPU time of a protected task goes in the pool's child: the child's own path, run in this process.

Real messages are published to a Valkey server, made into requests as the worker's main process does, pickled to the pool and
traced as its child does. Three views: the CPU time of each variant, in alternating batches; the bytecodes that a variant adds
to a plain task by function, which are the same on every machine and however busy it is; and cProfile's.

    python tests/benchmarks/profile_child.py [--tasks N] [--variant protected] [--backend redis] [--sort tottime] [--lines N]
"""

from __future__ import annotations

import argparse
import cProfile
import pickle
import pstats
import sys
import time
from collections import Counter
from statistics import median
from typing import TYPE_CHECKING, Any

from bench_app import VARIANTS, config, make_app
from bench_environment import ValkeyContainer, end_when_told
from celery.app import trace
from kombu.utils.imports import symbol_by_name

if TYPE_CHECKING:
    from types import CodeType, FrameType

BATCH = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=4000, help="of each variant")
    parser.add_argument("--variant", choices=VARIANTS[1:], default="protected", help="which one to look into")
    parser.add_argument("--backend", choices=("disabled", "redis"), default="redis", help="Celery's own result backend")
    parser.add_argument("--sort", default="tottime", help="as pstats sorts")
    parser.add_argument("--lines", type=int, default=30, help="of the two profiles; 0 for none")
    options = parser.parse_args()
    end_when_told()
    server = ValkeyContainer()
    try:
        server.ready()
        child = Child(server.url, options.backend)
        child.compare(max(options.tasks // BATCH, 4))
        if options.lines:
            child.count_bytecodes(options.variant, options.lines)
            child.profile(options.variant, options.tasks, options.sort, options.lines)
    finally:
        server.teardown()


class Child:
    """A pool child without its pool."""

    def __init__(self, url: str, backend: str) -> None:
        settings = {**config(url), "singleflight_url": url}
        if backend == "disabled":
            settings["result_backend"] = "disabled"
        self.app = make_app(settings, *VARIANTS)
        self._published = 0
        # What a worker does at its start, in the main process and in the child.
        trace.setup_worker_optimizations(self.app, "bench@child")
        for name, task in self.app.tasks.items():
            task.__trace__ = trace.build_tracer(name, task, self.app.loader, "bench@child", app=self.app)
        for variant in VARIANTS:
            self.run(self.deliver(variant, BATCH))

    def deliver(self, variant: str, count: int) -> list[bytes]:
        """Publish so many messages, take them from the queue, and return what the pool would get through its pipe."""
        task = self.app.tasks[f"bench.{variant}"]
        with self.app.connection_for_write() as connection, connection.channel() as channel:
            queue = self.app.amqp.queues["celery"](channel)
            queue.declare()
            with self.app.amqp.Producer(channel) as producer:
                for n in range(self._published, self._published + count):
                    task.apply_async((n,), producer=producer)
            self._published += count
            return [self._pickled(task, queue.get(no_ack=True)) for _ in range(count)]

    def _pickled(self, task: Any, message: Any) -> bytes:
        request = symbol_by_name(task.Request)(message, app=self.app, task=task, hostname="bench@child")
        args = (task.name, request.id, request.request_dict, request.body, message.content_type, message.content_encoding)
        return pickle.dumps(args)

    def run(self, deliveries: list[bytes]) -> None:
        for delivery in deliveries:
            failed, value, _ = trace.fast_trace_task(*pickle.loads(delivery))
            assert not failed, value

    def compare(self, rounds: int) -> None:
        """Show the CPU time of each variant, in alternating batches."""
        spent: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for n in range(rounds):
            for variant in VARIANTS[n % 3 :] + VARIANTS[: n % 3]:
                deliveries = self.deliver(variant, BATCH)
                before = time.process_time()
                self.run(deliveries)
                spent[variant].append((time.process_time() - before) / BATCH * 1e6)
        say(f"CPU time per task, µs: median of {rounds} batches of {BATCH}, the least, and what is added to plain")
        for variant, own in spent.items():
            added = median(mine - plain for mine, plain in zip(own, spent["plain"], strict=True))
            say(f"  {variant:10} {median(own):7.1f} {min(own):7.1f} {added:7.1f}")

    def count_bytecodes(self, variant: str, lines: int) -> None:
        """Show what one task executes of Python, less what a plain task does."""
        counted = {each: self._bytecodes(each) for each in VARIANTS}
        total = {each: sum(counts.values()) for each, counts in counted.items()}
        say(f"\nBytecodes of one task: {', '.join(f'{each} {count}' for each, count in total.items())}; added by {variant}:")
        for code, count in (counted[variant] - counted["plain"]).most_common(lines):
            say(f"  {count:6}  {code.co_qualname}  {'/'.join(code.co_filename.split('/')[-2:])}:{code.co_firstlineno}")

    def _bytecodes(self, variant: str) -> Counter[CodeType]:
        (delivery,) = self.deliver(variant, 1)
        counts: Counter[CodeType] = Counter()

        def count(frame: FrameType, event: str, _: object) -> Any:
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
            counts[frame.f_code] += event == "opcode"
            return count

        sys.settrace(count)
        try:
            self.run([delivery])
        finally:
            sys.settrace(None)
        return counts

    def profile(self, variant: str, count: int, sort: str, lines: int) -> None:
        """Show where the time of one variant goes. A profiler makes calls look dearer than they are: compare, do not add."""
        deliveries = self.deliver(variant, count)
        profiler = cProfile.Profile(time.process_time)
        profiler.runcall(self.run, deliveries)
        pstats.Stats(profiler).strip_dirs().sort_stats(sort).print_stats(lines)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
