"""How what an operator asks for is shown to people: sentences and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery_singleflight.doubts import Origin, Resolved, Uncertain, Uncertainty
    from celery_singleflight.findings import Explanation, Holder, Lock, Locks, Release, Signs, Trigger, Turns
    from celery_singleflight.replays import Replay

__all__ = ("Paper", "show_explanation", "show_locks", "show_release", "show_replay", "show_resolved", "show_uncertain")


class Paper:
    """Where tables go: aligned text, or with rich on a terminal."""

    def __init__(self, *, is_rich: bool) -> None:
        self._is_rich = is_rich

    def say(self, text: str) -> None:
        """Print a line."""
        click.echo(text)

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print rows under their heads."""
        if self._is_rich:
            from rich import box  # noqa: PLC0415, an extra
            from rich.console import Console  # noqa: PLC0415
            from rich.table import Table  # noqa: PLC0415
            from rich.text import Text  # noqa: PLC0415

            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for head in heads:
                table.add_column(head, overflow="fold")  # ids and tokens are there to be copied
            for row in rows:
                table.add_row(*(Text(cell, style="red" if cell == "expired" else "") for cell in row))
            Console().print(table)
            return
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        for row in (heads, *rows):
            click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


_HOLDER: Final = ("TRIGGER", "WORKER", "TOKEN", "AGE", "LEFT", "LEASE")
_NOBODY: Final = ("-",) * len(_HOLDER)


def _holder(holder: Holder) -> tuple[str, ...]:
    left, age = _seconds(holder.remaining), _seconds(holder.age)
    return (holder.task_id, holder.worker or "-", str(holder.fencing_token), age, left, holder.state)


def show_locks(found: Locks, paper: Paper) -> None:
    """Show what `locks` found."""
    if found.locks:
        rows = [
            (lock.lock_key, *holder, _waiting(lock), _turns(lock.turns))
            for lock in found.locks
            for holder in [_holder(holder) for holder in lock.holders] or [_NOBODY]
        ]
        paper.table(("LOCK KEY", *_HOLDER, "IN LINE", "TURNS"), rows)
    else:
        paper.say("No lock key is held or waited for.")
    if found.left_out:
        paper.say(f"and {found.left_out} more lock keys, beyond --limit")
    if found.lock_names:
        paper.say("")
        rows = [
            (
                c.lock_name,
                _count(c.with_broker, is_all=c.is_complete),
                str(c.in_custody),
                str(c.due),
                _count(c.waiting_for_word, is_all=c.is_complete),
            )
            for c in found.lock_names
        ]
        paper.table(("LOCK NAME", "WITH THE BROKER", "IN CUSTODY", "DUE", "WAITING FOR WORD"), rows)


def show_explanation(found: Explanation, paper: Paper) -> None:
    """Show what `explain` found."""
    paper.say(f"{found.kind} {found.key}")
    paper.say(f"why: {found.why}")
    if found.lock:
        paper.say("")
        of = "" if found.kind == "lock key" else f"lock key {found.lock.lock_key}; "
        paper.say(f"{of}in line: {_waiting(found.lock)}; turns: {_turns(found.lock.turns)}")
        if found.lock.holders:
            pairs = zip(found.lock.holders, found.signs, strict=True)
            paper.table((*_HOLDER, "RENEWED", "WORKER SAYS"), [(*_holder(holder), *_signs(signs)) for holder, signs in pairs])
    for title, triggers in (("triggers in custody", found.triggers), ("last outcomes", found.last)):
        if triggers:
            paper.say("")
            paper.say(title if found.kind == "lock key" else "trigger")
            heads = (
                "TRIGGER",
                "STATE",
                "ATTEMPT",
                "DEATHS",
                "HANDED OUT",
                "MESSAGE",
                "RESULT",
                "NEXT LOOK",
                "OUTCOME",
                "REASON",
            )
            paper.table(heads, [_trigger(trigger) for trigger in triggers])
            if found.kind != "lock key":
                _say_more(triggers[0], paper)
            for trigger in triggers:
                for ago, reason in trigger.forced:
                    paper.say(f"{trigger.task_id} was replayed by force {_seconds(ago)} ago: {reason}")
    if found.counts:
        c = found.counts
        with_broker, waiting = (_count(number, is_all=c.is_complete) for number in (c.with_broker, c.waiting_for_word))
        paper.say("")
        paper.say(
            f"of {c.lock_name}, whichever the lock key: {with_broker} triggers with the broker, {c.in_custody} in custody, "
            f"{c.due} of them due, {waiting} of them waiting for word"
        )


def _say_more(trigger: Trigger, paper: Paper) -> None:
    if trigger.origin:
        compared = "; its payload is compared" if trigger.is_payload_compared else ""
        paper.say(f"comes from: {_origin(trigger.origin)}{compared}")
    if trigger.uncertain:
        paper.say("")
        paper.say("what its execution has done is uncertain")
        paper.table(_UNCERTAINTY, [_uncertainty(trigger.uncertain)])


def show_uncertain(found: Uncertain, paper: Paper) -> None:
    """Show what `uncertain` found."""
    if not found.executions:
        paper.say("No execution is uncertain.")
        return
    paper.table(_UNCERTAINTY, [_uncertainty(one) for one in found.executions])
    if found.left_out:
        paper.say(f"and {found.left_out} more, beyond --limit")
    paper.say("")
    paper.say(
        "Who knows says so: celery -A proj singleflight resolve EXECUTION_KEY succeeded|failed|rerun, or TRIGGER --task-id"
    )


def show_resolved(found: Resolved, paper: Paper) -> None:
    """Show what `resolve` has done."""
    if not found.is_resolved:
        click.echo(f"Refused: {found.why}", err=True)
        return
    said = "is to run again" if found.outcome == "rerun" else f"is taken for {found.outcome}"
    asks = {0: "no trigger waits for it", 1: "1 trigger that waits for it asks again"}
    after = asks.get(found.waiting, f"{found.waiting} triggers that wait for it ask again")
    paper.say(f"{found.execution_key or found.task_id} of {found.task} {said}; {after}")


def show_release(found: Release, paper: Paper) -> None:
    """Show what `release` has done."""
    if found.is_released:
        after = (
            "its message is in the store and is published again at once, by a worker that has the task"
            if found.is_published_again
            else "the store has no message of it: it runs again only if its broker delivers it again"
        )
        paper.say(f"{found.lock_key}: released the holder with token {found.fencing_token}; {after}")
        return
    if not found.holders:
        click.echo(f"{found.lock_key}: nobody holds it", err=True)
    for holder in found.holders:
        held = f"{holder.task_id} on {holder.worker or 'unknown'} holds it for {_seconds(holder.age)}"
        left = f"its lease has {_seconds(holder.remaining)} left" if holder.remaining > 0 else "its lease has expired"
        click.echo(f"{found.lock_key}: {held}, {left}, token {holder.fencing_token}", err=True)
    expected = "expected an expired lease, or --force" if found.why == "live" else "expected the --token of a holder"
    click.echo(f"Refused: {expected}, got --token {found.fencing_token}", err=True)


def show_replay(found: Replay, paper: Paper) -> None:
    """Show what `replay` has done."""
    if found.is_replayed:
        how = "replayed by force" if found.is_forced else "replayed"
        was = f"it had ended {found.outcome}" if found.outcome else "its outcome was taken back with a resolved step"
        paper.say(f"{found.task_id} of {found.task}: {how}, {was}")
        return
    click.echo(f"Refused: {found.refusal}", err=True)


def _signs(signs: Signs) -> tuple[str, str]:
    renewed = "-" if signs.renewed_ago is None else f"{_seconds(signs.renewed_ago)} ago"
    if signs.worker_answers is None:
        return renewed, "not asked"
    if not signs.worker_answers:
        return renewed, "no answer"
    return renewed, "it runs" if signs.worker_runs_it else "it does not run"


def _trigger(trigger: Trigger) -> tuple[str, ...]:
    ending = trigger.ending
    return (
        trigger.task_id,
        trigger.state if trigger.place is None else f"{trigger.state}, behind {trigger.place}",
        str(trigger.attempt),
        str(trigger.deaths),
        str(trigger.handouts),
        f"{trigger.message_bytes} B" if trigger.message_bytes else "-",
        f"{ending.result_bytes} B" if ending and ending.result_bytes else "-",
        "-" if trigger.next_attention is None else _seconds(trigger.next_attention),
        f"{ending.outcome}, {_seconds(ending.ended_ago)} ago" if ending else "-",
        ending.reason or "-" if ending else "-",
    )


_UNCERTAINTY: Final = ("EXECUTION KEY", "TASK", "TRIGGER", "WORKER", "SINCE", "WAITING", "TRIES", "NEXT TRY")


def _uncertainty(doubt: Uncertainty) -> tuple[str, ...]:
    return (
        doubt.execution_key or "-",
        doubt.task or f"one of {doubt.lock_name}",
        doubt.task_id or "-",
        doubt.worker or "-",
        _seconds(doubt.age),
        str(doubt.waiting),
        str(doubt.tries),
        _seconds(doubt.next_try) if doubt.asked_by is None else f"now, on {doubt.asked_by or 'unknown'}",
    )


def _origin(origin: Origin) -> str:
    again = ", delivered again" if origin.is_redelivered else ""
    return origin.source + (f", for {origin.scheduled}" if origin.scheduled else "") + again


def _waiting(lock: Lock) -> str:
    called = f", {lock.called} called" if lock.called else ""
    return f"{lock.in_line}{called}" + (f", {lock.following} following" if lock.following else "")


def _turns(turns: Turns) -> str:
    if not turns.next_turn:
        return "-"
    about = f"about {turns.reserved} of {_seconds(turns.hold)}, " if turns.hold else ""
    return f"{about}next in {_seconds(turns.next_turn)}"


def _count(number: int, *, is_all: bool) -> str:
    return str(number) if is_all else f"{number} or more"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if abs(seconds) < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(abs(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return ("-" if seconds < 0 else "") + (f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s")
