"""The page of the matrix, docs/reference/celery-matrix.md, made from the declaration that its tests run from.

`python tests/support/matrix_page.py --write` writes it; without `--write` it is printed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from matrix import SECTIONS
from matrix_axes import BROKERS, POLICIES, SITUATIONS, UNCONTENDED

if TYPE_CHECKING:
    from matrix_feature import Feature, Section

PAGE = Path(__file__).parents[2] / "docs/reference/celery-matrix.md"

_HEAD = """# Celery, feature by feature

Made by `python tests/support/matrix_page.py --write` from the declaration that the tests run from; a test compares the two.

A cell is a test with a real worker, in `tests/integration/test_matrix_on_redis.py` or
`tests/integration/test_matrix_on_rabbitmq.py`. It publishes to a plain task of Celery and to a protected one with the same
body, and compares results, states, callbacks, hooks, and what each body sees of its request: arguments, queue, exchange,
routing key, priority, delivery mode, headers, stamps, links, chain, chord, group, expiry, time limits, shadow, serializer,
compression, retries. Not compared is what differs between any two messages: ids, times, processes. (A message that was sent
again has itself as `parent_id` where it had none, as after a retry of Celery's.)

- **uncontended**: nobody else holds the lock key. *Same*: what is observed is equal.
- **contended**: somebody else holds the lock key when the message arrives, and lets go when it waits. *Same, after its wait*:
  nothing of it ran while the key was held, the key is free in the end, and all that is observed is equal.
- **none**: there is no such cell, and why.
- **not the same**: a defect; its test says so when it is gone.

The worker's pool is prefork: other pools have no time limits, or cannot terminate. While a trigger waits {waiting}.
Queues on RabbitMQ are classic ones. Quorum queues have tests of their own, in `tests/integration/test_brokers.py`. **Not the
same** there: under `requeue` what was sent to another queue than the default one comes through the default one after its wait.
"""


def page() -> str:
    """Return the page as it should be."""
    waiting = "; ".join(f"under `{policy.name}` it {policy.waits}" for policy in POLICIES.values())
    return "\n".join([_HEAD.format(waiting=waiting), *(_table(section) for section in SECTIONS)])


def _table(section: Section) -> str:
    columns = [(broker, situation) for broker in BROKERS for situation in SITUATIONS]
    titles = [f"{BROKERS[broker]}, {_title(situation)}" for broker, situation in columns]
    rows = [["feature", *titles], ["---"] * (len(columns) + 1)]
    rows += [[feature.title, *(feature.text(*column) for column in columns)] for feature in section.features]
    return f"## {section.title}\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _title(situation: str) -> str:
    return situation if situation == UNCONTENDED else f"contended, `{situation}`"


def features() -> list[Feature]:
    """Return the rows of all sections."""
    return [feature for section in SECTIONS for feature in section.features]


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())
