"""What is shown while the burst runs: a picture that changes on a terminal, lines of text elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from celery_singleflight.demo.picture import KEY_WIDTH, picture

if TYPE_CHECKING:
    from celery_singleflight.demo.history import History
    from celery_singleflight.demo.narration import Line

__all__ = ("LiveScreen", "PlainScreen", "Screen", "make_console", "open_screen")

#: Columns where no terminal says otherwise.
_WIDTH: Final = 100
#: Lines on the screen beside those of the keys and of the story, and how many of the story are enough.
_FRAME: Final = 7
_STORY: Final = 8


class Screen(Protocol):
    """Where the burst is shown."""

    def tell(self, line: Line) -> None:
        """Show one line of the story."""

    def show(self, history: History) -> None:
        """Show how things are."""

    def close(self, history: History) -> None:
        """Show how things ended, and leave the terminal as it was."""


def make_console() -> Console:
    """Return the console for the standard output."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


def open_screen(console: Console, started: float) -> Screen:
    """Return the screen that suits the console."""
    return LiveScreen(console, started) if console.is_terminal else PlainScreen(console, started)


class PlainScreen:
    """Lines, as they come, and the picture at the end."""

    def __init__(self, console: Console, started: float) -> None:
        self._console = console
        self._started = started

    def tell(self, line: Line) -> None:  # noqa: D102, as declared
        self._console.print(_told(line, self._started))

    def show(self, history: History) -> None:
        """Do nothing: the lines say it all."""

    def close(self, history: History) -> None:  # noqa: D102, as declared
        self._console.print()
        self._console.print(picture(history, self._console, self._started, time.monotonic(), final=True))


class LiveScreen:
    """The picture as it changes, and the last lines of the story."""

    def __init__(self, console: Console, started: float) -> None:
        self._console = console
        self._started = started
        self._lines: list[Line] = []
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def tell(self, line: Line) -> None:  # noqa: D102, as declared
        self._lines.append(line)

    def show(self, history: History) -> None:  # noqa: D102, as declared
        room = self._console.height - len(history.keys) - _FRAME
        story = [_told(line, self._started) for line in self._lines[-max(min(room, _STORY), 1) :]]
        self._live.update(Group(self._picture(history), Text(), *story), refresh=True)

    def close(self, history: History) -> None:  # noqa: D102, as declared
        self._live.update(self._picture(history, final=True), refresh=True)
        self._live.stop()

    def _picture(self, history: History, *, final: bool = False) -> Group:
        return picture(history, self._console, self._started, time.monotonic(), final=final)


def _told(line: Line, started: float) -> Text:
    told = Text(f" {line.at - started:5.2f} s  {line.key:<{KEY_WIDTH}} ", "bright_black", no_wrap=True, overflow="ellipsis")
    return told.append(line.text, line.style)
