"""What Celery's own command line offers to operators: `celery -A app singleflight locks | explain | release`.

Every `celery` command imports this module, so that what the commands need is imported when one of them runs.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import click

from celery_singleflight.errors import ConfigurationError, SingleflightError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from celery_singleflight.findings import Explanation, Holder, Locks, Release, Signs, Trigger, Turns
    from celery_singleflight.inspection import Inspection

__all__ = ("singleflight",)

#: Exit codes; docs/reference/commands.md lists them.
_UNKNOWN: Final = 1
_NO_STORE: Final = 2
_REFUSED: Final = 3

_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document; its keys are documented.")
_limit = click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Show so many at most.")


@click.group()
def singleflight(**_: Any) -> None:
    """Protected tasks: which lock keys are held, why a trigger does not run, and releasing a holder.

    Exit codes: 0 done, 1 unknown key, 2 the store does not answer or there is none, 3 refused.
    """


@singleflight.command()
@click.option("--name", help="Only the lock keys of this lock name.")
@_limit
@_as_json
@click.pass_context
def locks(context: click.Context, name: str | None, limit: int, *, as_json: bool) -> None:
    """List the lock keys that are held or waited for.

    The store knows who holds a key. It does not know who waits for it: a trigger that waits is a message of the broker. What
    the store does know is how many turns it has given out for a key, and how many triggers of a lock name are with the broker.
    A trigger that no worker has taken yet is not known at all. Searches the whole store, by SCAN.
    """
    with _inspection(context) as inspection:
        found = inspection.locks(name, limit=limit)
    _print(context, found, as_json=as_json, show=_show_locks)


@singleflight.command()
@click.argument("key")
@click.option("--execution-key", is_flag=True, help="KEY is an execution key.")
@_limit
@_as_json
@click.pass_context
def explain(context: click.Context, key: str, limit: int, *, execution_key: bool, as_json: bool) -> None:
    """Say why KEY, a lock key or the id of a trigger, does not run.

    Who holds it, whether that one lives, what waits, how the last triggers have ended. Asks the workers of the holders over
    Celery's remote control; one in a solo pool answers between two tasks only. Arguments and results are never shown.
    """
    with _inspection(context) as inspection:
        found = inspection.explain(key, is_execution_key=execution_key, limit=limit)
    _print(context, found, as_json=as_json, show=_show_explanation)


@singleflight.command()
@click.argument("key")
@click.option("--token", type=int, required=True, help="The fencing token of the holder, as `locks` shows it.")
@click.option("--force", is_flag=True, help="Release a holder whose lease is live, too.")
@_as_json
@click.pass_context
def release(context: click.Context, key: str, token: int, *, force: bool, as_json: bool) -> None:
    """Release the holder of the lock key KEY that has this fencing token.

    Without --force only one whose lease has expired. The message of its trigger, if the store has it, is published again by a
    worker at once. A body that is forced out goes on until its next renewal, after a third of its lease_ttl at most, and may
    overlap the next one until then; nothing that it finishes counts.
    """
    with _inspection(context) as inspection:
        found = inspection.release(key, token, force=force)
    _print(context, found, as_json=as_json, show=_show_release)
    if not found.is_released:
        context.exit(_REFUSED)


@contextmanager
def _inspection(context: click.Context) -> Iterator[Inspection]:
    """Yield an inspection of the app's store; an error of the package ends the command with its text and exit code."""
    from celery_singleflight.inspection import inspecting  # noqa: PLC0415, see above

    app = context.obj.app
    try:
        try:
            app.loader.import_default_modules()
            app.finalize()
        except ConfigurationError:
            raise
        except Exception as error:  # noqa: BLE001, of anybody's modules
            click.echo(f"Warning: not all tasks could be imported, so their lock names are not known: {error!r}", err=True)
        with inspecting(app) as inspection:
            yield inspection
    except (ConfigurationError, StoreUnavailable) as error:
        raise _Failure(str(error), _NO_STORE) from error
    except SingleflightError as error:
        raise _Failure(str(error), _UNKNOWN) from error


class _Failure(click.ClickException):
    def __init__(self, message: str, code: int) -> None:
        super().__init__(" ".join(message.split()))
        self._code = code

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        """As click asks for it."""
        return self._code


def _print(context: click.Context, found: Any, *, as_json: bool, show: Any) -> None:
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2))
    else:
        show(found, _Paper(is_rich=not context.obj.no_color and sys.stdout.isatty() and find_spec("rich") is not None))


class _Paper:
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


def _show_locks(found: Locks, paper: _Paper) -> None:
    if found.locks:
        rows = [
            (lock.lock_key, *holder, _turns(lock.turns))
            for lock in found.locks
            for holder in [_holder(holder) for holder in lock.holders] or [_NOBODY]
        ]
        paper.table(("LOCK KEY", *_HOLDER, "TURNS"), rows)
    else:
        paper.say("No lock key is held or waited for.")
    if found.left_out:
        paper.say(f"and {found.left_out} more lock keys, beyond --limit")
    if found.lock_names:
        paper.say("")
        rows = [
            (c.lock_name, _count(c.with_broker, is_all=c.is_complete), str(c.in_custody), str(c.due)) for c in found.lock_names
        ]
        paper.table(("LOCK NAME", "WITH THE BROKER", "IN CUSTODY", "DUE"), rows)


def _show_explanation(found: Explanation, paper: _Paper) -> None:
    paper.say(f"{found.kind} {found.key}")
    paper.say(f"why: {found.why}")
    if found.lock:
        paper.say("")
        of = "" if found.kind == "lock key" else f"lock key {found.lock.lock_key}; "
        paper.say(f"{of}turns: {_turns(found.lock.turns)}")
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
    if found.counts:
        c = found.counts
        paper.say("")
        paper.say(
            f"of {c.lock_name}, whichever the lock key: {_count(c.with_broker, is_all=c.is_complete)} triggers with the "
            f"broker, {c.in_custody} in custody, {c.due} of them due"
        )


def _show_release(found: Release, paper: _Paper) -> None:
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
        trigger.state,
        str(trigger.attempt),
        str(trigger.deaths),
        str(trigger.handouts),
        f"{trigger.message_bytes} B" if trigger.message_bytes else "-",
        f"{ending.result_bytes} B" if ending and ending.result_bytes else "-",
        "-" if trigger.next_attention is None else _seconds(trigger.next_attention),
        f"{ending.outcome}, {_seconds(ending.ended_ago)} ago" if ending else "-",
        ending.reason or "-" if ending else "-",
    )


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
