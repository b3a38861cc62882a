"""The worlds that are explored."""

from __future__ import annotations

from typing import Final

from model_config import Config

#: Faults that send a trigger to somebody else.
_DEATHS: Final = frozenset({"worker dies", "child dies"})
_OVERLAPS: Final = frozenset({"pause", "redelivery"})
_ONE: Final = Config(keys=(None,), policies=("wait",), has_effects=False)
_TWO: Final = Config(has_effects=False)

#: Together well under a minute.
SMALL: Final[dict[str, Config]] = {
    "one trigger, any two faults": _ONE,
    "two triggers, any fault": _TWO._replace(faults=1),
    "two triggers, two overlaps, writes outside": Config(kinds=frozenset({"pause"})),
    "two triggers, Redis as broker": _TWO._replace(shares_tags=True, faults=2, kinds=frozenset({"redelivery"})),
    "one trigger, Redis as broker": _ONE._replace(shares_tags=True, kinds=_OVERLAPS | {"worker dies"}),
    "one execution key": _TWO._replace(keys=("invoice", "invoice"), faults=1, kinds=frozenset({"pause", "worker dies"})),
    "failures": _ONE._replace(keys=("invoice",), outcomes=("succeeded", "failed"), faults=1),
    "a retry": _ONE._replace(retries=1, faults=1),
    "skipped on contention": _TWO._replace(policies=("skip", "wait"), faults=1, kinds=_OVERLAPS | {"worker dies"}),
    "two places": _TWO._replace(limit=2, faults=1),
    "deaths are counted": _ONE._replace(keys=("invoice",), max_deliveries=2, kinds=_DEATHS | {"reply lost"}),
    "hard time limit": _ONE._replace(kinds=frozenset({"time limit", "worker dies", "sweeper dies"})),
    "a store that forgets": _ONE._replace(has_effects=True, forgets=1, kinds=_OVERLAPS),
    "hard time limit of a run that was overtaken": _ONE._replace(kinds=frozenset({"time limit", "pause"})),
    "a retry beside a failure": _ONE._replace(
        outcomes=("succeeded", "failed"), retries=1, kinds=frozenset({"worker dies"}), faults=1
    ),
    "deaths beside a retry": _ONE._replace(retries=1, max_deliveries=2, kinds=_DEATHS),
}

#: For minutes to hours.
BIG: Final[dict[str, Config]] = {
    "two triggers, two deaths": _TWO._replace(kinds=frozenset({"worker dies"})),
    "failures and deaths, one execution key": _TWO._replace(
        keys=("invoice", "invoice"), outcomes=("succeeded", "failed"), faults=1
    ),
    "two triggers, any fault, Redis as broker": _TWO._replace(shares_tags=True, faults=1),
    "three workers, any two faults": _ONE._replace(workers=3),
    "a store that forgets, any fault": Config(faults=1, forgets=1),
    "two places for three workers": _TWO._replace(
        limit=2, workers=3, keys=(None, None, "invoice"), policies=("wait",) * 3, faults=1, kinds=_OVERLAPS
    ),
    "one trigger, any three faults": _ONE._replace(faults=3),
    "two triggers, any two faults": _TWO,
}
