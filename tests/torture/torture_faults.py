"""Doing what the plan says goes wrong, and noting what it hit."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torture_evidence import Reader
    from torture_place import Place, Slot
    from torture_plan import Fault


@dataclass
class Struck:
    """A fault that has happened: when, until when, and what it hit. Times are monotonic."""

    kind: str
    at: float
    until: float = 0.0
    #: Processes that it killed, and when.
    killed: dict[int, float] = field(default_factory=dict)
    #: Processes that stood still: from when, until when.
    stopped: dict[int, tuple[float, float]] = field(default_factory=dict)
    #: When the store forgot everything.
    forgot: float | None = None
    note: str = ""


class Injector:
    """Makes faults happen, each in a thread of its own; they may overlap."""

    def __init__(self, place: Place, reader: Reader, again: Any) -> None:
        self._place, self._reader = place, reader
        self._again = again
        self._guard = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.struck: list[Struck] = []

    def start(self, fault: Fault) -> None:
        thread = threading.Thread(target=self._strike, args=(fault,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait(self, timeout: float = 60.0) -> None:
        """Wait until every fault is over, and everything runs again."""
        until = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.1))
        for slot in self._place.slots:
            if not slot.is_up():
                slot.start()
            slot.ready()

    def _strike(self, fault: Fault) -> None:
        struck = Struck(fault.kind, time.monotonic())
        self.struck.append(struck)
        try:
            getattr(self, "_" + fault.kind.replace(" ", "_"))(fault, struck)
        except Exception:  # noqa: BLE001, the run goes on, and the verdict says that this went wrong
            struck.note = traceback.format_exc()
        struck.until = struck.until or time.monotonic()

    def _kill_child(self, fault: Fault, struck: Struck) -> None:
        pid = self._victim(fault)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                struck.killed[pid] = time.monotonic()

    def _kill_worker(self, fault: Fault, struck: Struck) -> None:
        slot = self._slot(fault)
        if slot is None:
            return
        is_whole = fault.dice[1] < 0.7
        struck.killed.update(slot.kill(whole=is_whole))
        struck.note = "" if is_whole else "main process only"
        self._start_again(slot, fault.seconds)

    def _stop_child(self, fault: Fault, struck: Struck) -> None:
        pid = self._victim(fault, only_busy=True)
        if not pid:
            return
        try:
            os.kill(pid, signal.SIGSTOP)
            at = time.monotonic()
            struck.stopped[pid] = (at, at + fault.seconds + 1)
            time.sleep(fault.seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                struck.stopped[pid] = (at, time.monotonic())
                os.kill(pid, signal.SIGCONT)

    def _warm_shutdown(self, fault: Fault, struck: Struck) -> None:
        slot = self._slot(fault)
        if slot is None:
            return
        if not slot.leave(25):
            struck.note = "it did not go within 25 s, and was killed"
            struck.killed.update(slot.kill(whole=True))
        self._start_again(slot, 0.2)

    def _cut(self, fault: Fault, struck: Struck) -> None:
        for _ in range(1 + int(fault.dice[0] * 4)):
            self._place.store_proxy.cut()
            time.sleep(fault.seconds / 4)

    def _short_stall(self, fault: Fault, struck: Struck) -> None:
        self._place.stall_store(fault.seconds)

    _long_stall = _short_stall

    def _script_flush(self, fault: Fault, struck: Struck) -> None:
        client = self._place.store_client()
        for _ in range(5):
            client.script_flush()
            time.sleep(0.1)

    def _store_restart(self, fault: Fault, struck: Struck) -> None:
        with self._guard:
            self._place.restart_store(fault.seconds)

    def _empty_restart(self, fault: Fault, struck: Struck) -> None:
        with self._guard:
            struck.forgot = time.monotonic()
            self._place.restart_store(fault.seconds)

    def _flushall(self, fault: Fault, struck: Struck) -> None:
        client = self._place.store_client()
        client.flushall()
        struck.forgot = time.monotonic()

    def _time_limit(self, fault: Fault, struck: Struck) -> None:
        """The plan has triggers for it."""

    def _duplicates(self, fault: Fault, struck: Struck) -> None:
        self._again(fault.dice)
        if self._place.is_redis:
            struck.note = f"{self._place.deliver_again(fault.dice[1])} delivered again"

    def _broker_cut(self, fault: Fault, struck: Struck) -> None:
        self._place.broker_proxy.cut()

    def _victim(self, fault: Fault, *, only_busy: bool = False) -> int:
        """The process to be hit: mostly one with a body in it, or one that has ended and not sent what follows."""
        pids = {pid for slot in self._place.slots if slot.is_up() for pid in slot.children()}
        until = time.monotonic() + 1.5
        look = self._reader.between if fault.dice[1] < 0.35 and not only_busy else self._reader.in_flight
        while only_busy or fault.dice[1] < 0.8:
            busy = look(pids)
            if busy:
                return busy[int(fault.dice[0] * len(busy))]
            if time.monotonic() > until:
                break
            time.sleep(0.02)
        return sorted(pids)[int(fault.dice[0] * len(pids))] if pids and not only_busy else 0

    def _slot(self, fault: Fault) -> Slot | None:
        """The worker to be hit, one that runs: the busiest two of three times."""
        up = [slot for slot in self._place.slots if slot.is_up() and slot.children()]
        if not up:
            return None
        up.sort(key=lambda slot: -len(self._reader.in_flight(set(slot.children()))))
        return up[0 if fault.dice[0] < 0.66 else int(fault.dice[1] * len(up))]

    def _start_again(self, slot: Slot, pause: float) -> None:
        time.sleep(pause)
        slot.start()
        slot.ready()
