"""The command line of the package."""

from __future__ import annotations

import click

__all__ = ("main",)


@click.group()
def main() -> None:
    """Tools for protected Celery tasks."""
