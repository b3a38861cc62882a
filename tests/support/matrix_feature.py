"""Features of Celery, as declared: a function each, which publishes, waits for the end and returns what was to be seen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import celery
from matrix_axes import BROKERS, POLICIES, SITUATIONS, UNCONTENDED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

#: Where a cell is: name of the broker, or None for each; "uncontended", "contended", the name of a policy, or None for each.
Where = tuple[str | None, str | None]
CONTENDED = "contended"


@dataclass(frozen=True, slots=True)
class Feature:
    """A row of the matrix.

    `observe` is called with a `Twin` of each kind, and must return the same for all of them.
    """

    name: str
    title: str
    observe: Callable[[Any], Any]
    #: Names of the tasks whose lock keys somebody holds in the contended situation.
    holds: tuple[str, ...] = ()
    #: How many triggers must have met contention before the holder lets go; None when `observe` says when, by `let_go`.
    waiting: int | None = 1
    #: Whether it is calls without a message of their own that meet it, and wait where they are.
    in_place: bool = False
    #: Whether they are made to look as often as their policy lets them while the key stays held.
    looks_again: bool = False
    #: In place of comparing under contention: checks what is right there.
    in_contention: Callable[[Any], None] | None = None
    #: Whether what the bodies see of their requests is compared.
    compares_requests: bool = True
    #: What a cell says, where that is more than "same".
    says: Mapping[Where, str] = field(default_factory=dict)
    #: Why there is no such cell.
    absent: Mapping[Where, str] = field(default_factory=dict)

    #: What is wrong in a cell: its test must fail, until the entry goes.
    defects: Mapping[Where, str] = field(default_factory=dict)
    #: The same where only Celery before 5.7 is concerned.
    old_defects: Mapping[Where, str] = field(default_factory=dict)
    #: What plain Celery before 5.7 does there, so that there is nothing to compare with.
    old_celery: str = ""

    def __str__(self) -> str:
        return self.name

    def why_absent(self, broker: str, situation: str) -> str | None:
        """Return why no test runs for this cell; None when one does."""
        if situation != UNCONTENDED and not self.holds and not _at(self.absent, broker, situation):
            raise ValueError(f"{self.name} neither says whose key is held nor why it cannot be contended")
        return _at(self.absent, broker, situation)

    def defect(self, broker: str, situation: str) -> str | None:
        """Return what is wrong in this cell, for the Celery that is installed; None when nothing is."""
        defect = _at(self.defects, broker, situation)
        if defect is None and celery.VERSION < (5, 7):
            defect = _at(self.old_defects, broker, situation)
        return defect

    def text(self, broker: str, situation: str) -> str:
        """Return what the page says in this cell."""
        absent = self.why_absent(broker, situation)
        if absent:
            return f"none: {absent}"
        defect = _at(self.defects, broker, situation)
        if defect:
            return f"**not the same**: {defect}"
        said = _at(self.says, broker, situation) or ("same" if situation == UNCONTENDED else "same, after its wait")
        older = _at(self.old_defects, broker, situation)
        if older:
            said += f"; before Celery 5.7 **not the same**: {older}"
        return f"{said}; not before Celery 5.7: {self.old_celery}" if self.old_celery else said


def _at(cells: Mapping[Where, str], broker: str, situation: str) -> str | None:
    assert broker in BROKERS, broker
    assert situation in SITUATIONS, situation
    general = CONTENDED if situation in POLICIES else UNCONTENDED
    found = [text for (b, s), text in cells.items() if b in (None, broker) and s in (None, general, situation)]
    return found[0] if found else None


@dataclass(frozen=True, slots=True)
class Section:
    """Rows that belong together. Calling it declares the next row: `@section(holds=("add",))`."""

    title: str
    features: list[Feature] = field(default_factory=list)

    def __call__(self, **declared: Any) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        """Declare a feature by its function; the first line of its docstring is the row's title."""

        def declare(observe: Callable[[Any], Any]) -> Callable[[Any], Any]:
            title = (observe.__doc__ or "").partition("\n")[0].rstrip(".")
            assert title, f"{observe.__name__} needs a docstring"
            self.features.append(Feature(observe.__name__, title, observe, **declared))
            return observe

        return declare


def cells_of(sections: list[Section], broker: str) -> Iterator[tuple[Feature, str]]:
    """Yield the cells of a broker for which a test runs: a feature and a situation."""
    for section in sections:
        for feature in section.features:
            for situation in SITUATIONS:
                if feature.why_absent(broker, situation) is None:
                    yield feature, situation
