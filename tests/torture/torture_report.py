"""The verdict as a table: with rich where it is installed, else as plain text."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torture_judge import CALM, percentile, promised
from torture_plan import FAULTS

if TYPE_CHECKING:
    from torture_judge import Line, Verdict

try:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ImportError:
    Table = None

_HEAD = (
    "fault before it",
    "faults",
    "triggers",
    "outcomes",
    "lost",
    "by the broker",
    "overlaps",
    "listed apart",
    "stale writes refused",
    "accepted",
    "second effects",
    "listed apart",
    "reruns of uncertain",
    "recovery p50 / p99, s",
    "longer, others in the way",
    "late",
)


def print_report(verdict: Verdict, ttl: float) -> None:
    """Print the verdict to the standard output. Each number that must have a value has it beside it."""
    rows = [_row(kind, verdict.lines[kind], ttl) for kind in (CALM, *FAULTS) if kind in verdict.lines]
    rows.append(_sum(verdict))
    print_table("Verdict by the class of the last fault before it", _HEAD, rows)
    checks = [(what, found, allowed, "yes" if is_good else "NO") for what, found, allowed, is_good in verdict.checks]
    print_table("At the end", ("what", "found", "allowed", "good"), checks)
    say("triggers: " + ", ".join(f"{count} {kind}" for kind, count in sorted(verdict.kinds.items())))
    for excuse, count in sorted(verdict.excuses.items()):
        say(f"listed apart: {count} x {excuse}")
    for violation in verdict.violations[:40]:
        say(f"VIOLATION {violation}")
    if len(verdict.violations) > 40:
        say(f"... and {len(verdict.violations) - 40} more")
    say(f"The verdict is {'good: all is within the guarantees.' if verdict.is_good else 'RED.'}")


def print_table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    if Table is not None:
        table = Table(title=title, title_justify="left", box=box.ROUNDED)
        for n, name in enumerate(head):
            table.add_column(name, justify="left" if n == 0 else "right")
        for row in rows:
            table.add_row(*map(Text, row))
        console = Console(highlight=False)
        Console(highlight=False, width=max(console.width, 190), soft_wrap=False).print(table)
    else:
        widths = [max(len(row[n]) for row in (head, *rows)) for n in range(len(head))]
        say(title)
        for row in (head, *rows):
            say("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _row(kind: str, line: Line, ttl: float) -> tuple[str, ...]:
    limits = promised(kind, ttl)
    recovery = "-"
    if line.recoveries:
        recovery = f"{percentile(line.recoveries, 0.5):.2f} / {percentile(line.recoveries, 0.99):.2f}"
        recovery += f" of {len(line.recoveries)}"
        recovery += f" (≤ {limits[0]:.1f} / {limits[1]:.1f})" if limits else ""
    disturbed = f"{max(line.disturbed):.1f} of {len(line.disturbed)}" if line.disturbed else "-"
    return (
        kind,
        str(line.faults),
        str(line.triggers),
        f"{line.outcomes} (= {line.triggers})",
        f"{line.lost} (0)",
        str(line.lost_by_broker),
        f"{line.overlaps} (0)",
        str(line.overlaps_allowed),
        str(line.stale_refused),
        f"{line.stale_accepted} (0)",
        f"{line.second_effects} (0)",
        str(line.second_allowed),
        f"{line.reruns} (≤ {line.deaths})",
        recovery,
        disturbed,
        f"{line.late} (0)",
    )


def _sum(verdict: Verdict) -> tuple[str, ...]:
    def total(name: str) -> int:
        return sum(getattr(line, name) for line in verdict.lines.values())

    return (
        "all",
        str(total("faults")),
        str(total("triggers")),
        f"{total('outcomes')} (= {total('triggers')})",
        f"{total('lost')} (0)",
        str(total("lost_by_broker")),
        f"{total('overlaps')} (0)",
        str(total("overlaps_allowed")),
        str(total("stale_refused")),
        f"{total('stale_accepted')} (0)",
        f"{total('second_effects')} (0)",
        str(total("second_allowed")),
        f"{total('reruns')} (≤ {total('deaths')})",
        "",
        "",
        f"{total('late')} (0)",
    )
