"""Ending a stretch of one thread's work from another thread, with an exception.

In a process whose main thread does the work a signal interrupts it at once, blocking calls included. In any other thread
CPython raises the exception at the next bytecode; a blocking call returns first. C code that does not return to the
interpreter is not interrupted by either.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from typing import Any, Final

__all__ = ("Stretch", "take_signal")

#: SIGUSR1 is billiard's soft time limit.
SIGNAL: Final[int] = getattr(signal, "SIGUSR2", 0)

_guard: Final = threading.Lock()
#: Seconds after which the signal is sent again while it has not been heard.
_PAUSES: Final = (0.001, 0.01, 0.05, 0.2)
#: What the signal's handler is to raise.
_wanted: Final[list[tuple[Stretch, BaseException]]] = []
#: The process whose main thread has our handler.
_handled_in: int = 0


def take_signal() -> None:
    """Let the main thread of this process be interrupted at once; does nothing in another thread.

    A handler that somebody else has set for SIGUSR2 stays, and the main thread is then interrupted like any other.
    """
    global _handled_in  # noqa: PLW0603, signal handlers belong to the process
    if _handled_in == os.getpid() or not SIGNAL or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN, _raise_wanted):
        signal.signal(SIGNAL, _raise_wanted)
        _handled_in = os.getpid()


class _TakenBackError(BaseException):
    """Raised in place of what is not to be raised any more."""


class Stretch:
    """Work that this thread begins and ends, and that another thread may interrupt in between; once."""

    __slots__ = ("_is_interrupted", "_thread")

    def __init__(self) -> None:
        self._thread = 0
        self._is_interrupted = False

    @property
    def is_under_way(self) -> bool:
        """Whether it has begun and not ended."""
        return self._thread != 0

    def begin(self) -> None:
        """Begin in the calling thread."""
        self._thread = threading.get_ident()

    def interrupt(self, error: BaseException) -> bool:
        """Raise the error in the thread that is at it. Returns whether it was under way, and not interrupted before."""
        with _guard:
            if not self._thread or self._is_interrupted:
                return False
            self._is_interrupted = True
            if self._thread != threading.main_thread().ident or not _has_handler():
                return _raise_in(self._thread, _class_of(error)) == 1
            _wanted.append((self, error))
        self._insist()
        return True

    def _insist(self) -> None:
        """Send the signal until it is heard: one that falls just before a blocking call does not end that call."""
        for pause in _PAUSES:
            if all(stretch is not self for stretch, _ in _wanted) or not _has_handler():
                return
            signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
            time.sleep(pause)

    def end(self) -> None:
        """End; nothing is raised by `interrupt` once this has returned. May itself raise what was wanted before."""
        with _guard:
            thread, self._thread = self._thread, 0
            if self._is_interrupted:
                _wanted[:] = [(stretch, error) for stretch, error in _wanted if stretch is not self]
                _raise_no_more(thread)


def _has_handler() -> bool:
    return _handled_in == os.getpid() and signal.getsignal(SIGNAL) is _raise_wanted


def _raise_wanted(*_: object) -> None:
    # No guard here: the main thread, which this runs in, may be holding it.
    while _wanted:
        stretch, error = _wanted.pop()
        if stretch.is_under_way:
            raise error


def _raise_in(thread: int, error: type[BaseException] | None) -> int:
    exception: Any = ctypes.py_object() if error is None else ctypes.py_object(error)
    return int(ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception))


def _raise_no_more(thread: int) -> None:
    """Take back what was to be raised in this thread, if it has not been.

    Another exception takes its place, to be caught here. CPython takes one back without (NULL), but up to 3.12 what tells all
    threads of the process that there is one stays set then: each of their function calls takes longer for ever, and in 3.11 a
    traced one does not return.
    """
    if thread != threading.get_ident():
        _raise_in(thread, None)
        return
    try:
        _raise_in(thread, _TakenBackError)
        while True:
            pass
    except _TakenBackError:
        pass


def _class_of(error: BaseException) -> type[BaseException]:
    """Return a class whose instances, made without arguments, are like this error: CPython makes them so."""
    kind, arguments = type(error), error.args

    def __init__(self: BaseException) -> None:  # noqa: N807
        kind.__init__(self, *arguments)

    return type(kind.__name__, (kind,), {"__init__": __init__, "__module__": kind.__module__})
