"""Where the benchmarks find the tests' harness, and the interpreters that they start find the package."""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

_HERE = Path(__file__).parent
sys.path += [str(_HERE.parent / "support"), str(_HERE.parent.parent)]  # the checkout only where nothing is installed

from nodes import ProcessContainer, ValkeyContainer, new_directory, wait_until  # noqa: E402, found by the line above

__all__ = ("ProcessContainer", "ValkeyContainer", "end_when_told", "environment", "new_directory", "wait_until")


def end_when_told() -> None:
    """Have SIGTERM end this process as an exception does, so that what it has started ends too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def environment(**more: str) -> dict[str, str]:
    """This process' environment, with the benchmarks on the path, and the package that this process has."""
    package = find_spec("celery_singleflight")
    assert package is not None
    assert package.origin is not None
    path = os.pathsep.join([str(_HERE), str(Path(package.origin).parent.parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, **more}
