"""What Celery's own command line offers to operators: `celery -A app singleflight COMMAND`.

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

from celery_singleflight.errors import ConfigurationError, ResolutionError, SingleflightError, StoreUnavailable
from celery_singleflight.showing import (
    Paper,
    show_explanation,
    show_locks,
    show_release,
    show_replay,
    show_resolved,
    show_uncertain,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_singleflight.inspection import Inspection

__all__ = ("singleflight",)

#: Exit codes; docs/reference/commands.md lists them.
_UNKNOWN: Final = 1
_NO_STORE: Final = 2
_USAGE: Final = 2
_REFUSED: Final = 3

_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document; its keys are documented.")
_limit = click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Show so many at most.")


@click.group()
def singleflight(**_: Any) -> None:
    """Protected tasks: which lock keys are held, why a trigger does not run, what a run has done that died; and what to do.

    Exit codes: 0 done, 1 unknown key, 2 the store does not answer or there is none, 3 refused.
    """


@singleflight.command()
@click.option("--name", help="Only the lock keys of this lock name.")
@_limit
@_as_json
@click.pass_context
def locks(context: click.Context, name: str | None, limit: int, *, as_json: bool) -> None:
    """List the lock keys that are held or waited for.

    The store knows who holds a key and who waits in line for it. Under the requeue policy a trigger that waits is a message of
    the broker: of those it knows how many turns it has given out for a key, and how many of a lock name there are. A trigger
    that no worker has taken yet is not known at all. Searches the whole store, by SCAN.
    """
    with _inspection(context) as inspection:
        found = inspection.locks(name, limit=limit)
    _print(context, found, as_json=as_json, show=show_locks)


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
    _print(context, found, as_json=as_json, show=show_explanation)


@singleflight.command()
@click.option("--name", help="Only the executions of this lock name.")
@_limit
@_as_json
@click.pass_context
def uncertain(context: click.Context, name: str | None, limit: int, *, as_json: bool) -> None:
    """List the executions whose run died and of which nobody knows what it has done.

    Those of tasks with uncertain_policy "hold", from the death of the run until somebody knows; the longest first. Searches the
    whole store, by SCAN, and reads some fields of every record.
    """
    with _inspection(context) as inspection:
        found = inspection.uncertain(name, limit=limit)
    _print(context, found, as_json=as_json, show=show_uncertain)


@singleflight.command()
@click.argument("key")
@click.argument("outcome", type=click.Choice(["succeeded", "failed", "rerun"]))
@click.option("--task-id", is_flag=True, help="KEY is the id of a trigger without an explicit execution key.")
@click.option("--task", help="The name of the task, where the store does not tell it.")
@click.option("--result", help="Of one that has succeeded: its result as JSON; null if not given.")
@click.option("--reason", default="", help="For people to read; kept with the outcome.")
@_as_json
@click.pass_context
def resolve(context: click.Context, /, key: str, outcome: Any, *, task_id: bool, as_json: bool, **said: Any) -> None:
    """Say what the run has done of the execution KEY, a run that died after its body began.

    KEY is an explicit execution key, or with --task-id the id of a trigger. The triggers that wait for it ask again within a
    second or two: they get the result, or one of them runs. A failure is that of the trigger whose run it was, and one of the
    others runs; under the failure_policy "keep" it is that of all.
    """
    if said["result"] is not None:
        if outcome != "succeeded":
            raise click.UsageError(f"expected --result with succeeded only, got it with {outcome}")
        try:
            said["result"] = json.loads(said["result"])
        except ValueError as error:
            raise click.BadParameter(f"expected JSON, a text in double quotes, {error}", param_hint="--result") from error
    with _inspection(context) as inspection:
        found = inspection.resolve(key, outcome, is_task_id=task_id, **said)
    _print(context, found, as_json=as_json, show=show_resolved)
    if not found.is_resolved:
        context.exit(_REFUSED)


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
    _print(context, found, as_json=as_json, show=show_release)
    if not found.is_released:
        context.exit(_REFUSED)


@singleflight.command()
@click.argument("task_id")
@click.option("--execution-key", help="Refuse the trigger if its explicit execution key is another one.")
@click.option("--force", is_flag=True, help="Run also one that has succeeded, or of which nobody knows what it has done.")
@click.option("--reason", default="", metavar="TEXT", help="Why it is forced; recorded.")
@_as_json
@click.pass_context
def replay(context: click.Context, task_id: str, execution_key: str | None, reason: str, *, force: bool, as_json: bool) -> None:
    """Run the trigger TASK_ID again, which has ended: same id, same arguments, same keys and rules.

    Its message is the one that the store has kept with its record (the option keep_message). One that runs or waits is
    refused, and without --force one that has succeeded.
    """
    from celery_singleflight.replays import replay_trigger  # noqa: PLC0415, see above

    with _inspection(context) as inspection:
        found = replay_trigger(inspection, task_id, execution_key=execution_key, force=force, reason=reason)
    _print(context, found, as_json=as_json, show=show_replay)
    if not found.is_replayed:
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
    except ResolutionError as error:
        raise _Failure(str(error), _USAGE) from error
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
        show(found, Paper(is_rich=not context.obj.no_color and sys.stdout.isatty() and find_spec("rich") is not None))
