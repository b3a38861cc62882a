"""Features of Celery, as rows of the matrix: callbacks and canvas."""

from __future__ import annotations

from celery import chain, chord, group
from matrix_ends import end_of
from matrix_feature import Section
from nodes import wait_until

CANVAS = Section("Callbacks and canvas")


@CANVAS(holds=("add",))
def chains(t):
    """`chain`."""
    return end_of(chain(t.add.s(1, 1), t.add.s(2), t.add.s(3)).delay())


@CANVAS(holds=("add",), waiting=3)
def chords(t):
    """`chord`."""
    return end_of(chord([t.add.s(n, 1) for n in range(3)])(t.total.s()))
