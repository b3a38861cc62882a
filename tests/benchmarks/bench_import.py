"""What importing the package adds to a process, in fresh interpreters."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import NamedTuple

from bench_environment import environment

#: What the process has already. Where no part of Celery is on Redis, redis-py comes with the package, and weighs most of it.
BASES = {
    "a worker on Redis": "import celery; celery.Task; app = celery.Celery(broker='redis://', backend='redis://'); "
    "app.finalize(); app.backend, app.amqp, app.connection_for_write().transport",
    "Celery without redis-py": "import celery; celery.Task, celery.Celery, celery.current_app.conf.broker_url, celery.signals",
}

_MEASURE = """
import gc, json, sys, time, psutil
process = psutil.Process()
{base}
gc.collect()
before, began = process.memory_info().rss, time.perf_counter()
import celery_singleflight
seconds = time.perf_counter() - began
print(json.dumps([seconds * 1000, (process.memory_info().rss - before) / 2**20]))
"""


class Import(NamedTuple):
    """Milliseconds and MiB that the import added."""

    milliseconds: float
    mebibytes: float


def added_by_import(base: str, times: int) -> list[Import]:
    """Import the package in so many fresh interpreters, and in one more before, so that its bytecode is cached."""
    script = _MEASURE.format(base=BASES[base])
    command = [sys.executable, "-c", script]
    # As in a service, which finds the bytecode where it was written the first time.
    cached = {name: value for name, value in environment().items() if name != "PYTHONDONTWRITEBYTECODE"}
    outputs = [subprocess.run(command, check=True, capture_output=True, text=True, env=cached).stdout for _ in range(times + 1)]
    return [Import(*json.loads(output)) for output in outputs[1:]]
