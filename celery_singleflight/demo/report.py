"""The verdict at the end, by what the bodies wrote and what Celery has as results: not by the package's own records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Collection

    from celery_singleflight.demo.history import History

__all__ = ("Verdict", "exit_code", "judge", "report")

_ON_THE_KILL: Final = (
    "The process was killed before its charge took effect, so the run after it makes the charge. For a death right after "
    "the effect there is the execution key: the idempotency key for the provider."
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The numbers of one play."""

    triggers: int
    runs: int
    killed: int
    skipped: int
    answered: int
    requeued: int
    overlaps: int
    double_effects: int
    lost: int

    @property
    def is_clean(self) -> bool:
        """Whether nothing overlapped, happened twice or was lost."""
        return not (self.overlaps or self.double_effects or self.lost)


def judge(history: History, unresolved: Collection[str]) -> Verdict:
    """Count. `unresolved` are the task ids for which Celery has no result.

    A trigger is lost when it is one of them, or when nobody has done its work.
    """
    lost = sum(
        task_id in unresolved or bool(trigger.unit and not history.effects[trigger.unit])
        for task_id, trigger in history.triggers.items()
    )
    return Verdict(
        triggers=len(history.triggers),
        runs=len(history.runs),
        killed=sum(run.killed for run in history.runs),
        skipped=history.ends["skipped"],
        answered=history.ends["succeeded"],
        requeued=history.requeued,
        overlaps=history.overlaps(),
        double_effects=len(history.repeated),
        lost=lost,
    )


def exit_code(verdict: Verdict, *, protection: bool) -> int:
    """Return 1 when protection has failed, else 0: what plain tasks do wrong is no failure of the demo."""
    return 1 if protection and not verdict.is_clean else 0


def report(verdict: Verdict, *, protection: bool) -> Group:
    """Return the table of the numbers, and what is to be said about them."""
    tasks = "protected tasks" if protection else "plain tasks, without protection"
    table = Table(box=box.ROUNDED, title=f" The burst on {tasks}", title_style="bold", title_justify="left", show_header=False)
    table.add_column(justify="right")
    table.add_column(style="bold")
    table.add_column(style="bright_black")
    for number, what, meaning in (
        (verdict.triggers, "triggers", "beat ticks, clicks and webhooks, with their duplicates"),
        (verdict.runs, "runs", f"bodies that began; {verdict.killed} of them killed in the middle"),
        (verdict.skipped, "skipped", "another run for the same vendor was at it"),
        (verdict.answered, "answered", "from the stored result, without a run"),
        (verdict.requeued, "requeued", "times that a trigger went back to wait for its turn"),
    ):
        table.add_row(str(number), what, meaning)
    table.add_section()
    for number, what, meaning in (
        (verdict.overlaps, "overlaps", "bodies that began while another one ran on the same key"),
        (verdict.double_effects, "double effects", "settlements, charges and credits that happened again"),
        (verdict.lost, "lost", "triggers without a result, or whose work nobody did"),
    ):
        style = "bold red" if number else "bold green"
        table.add_row(Text(str(number), style), Text(what, style), meaning)
    other = "What this prevents: celery-singleflight demo --no-protection"
    if not protection:
        other = "The same burst with protection: celery-singleflight demo"
    return Group(Text(), table, _indented(Text(_ON_THE_KILL, "bright_black")), Text(), _indented(Text(other, "bold")))


def _indented(text: Text) -> Padding:
    return Padding(text, (0, 1))
