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

_QUEUE: Final = Config(keys=(None, None), policies=("queue", "queue"), has_effects=False, faults=1)
_LINE: Final = _QUEUE._replace(keys=(None,) * 3, policies=("queue",) * 3, faults=0)
_LATE: Final = frozenset({"late"})
_ANY_END: Final = ("succeeded", "failed")

#: Those who wait in the store. Together well under a minute.
WAITING: Final[dict[str, Config]] = {
    "a line of three": _LINE,
    "a queue, any fault": _QUEUE,
    "a queue of short runs, any fault": _QUEUE._replace(is_short=True),
    "a line, late messages": _LINE._replace(faults=2, kinds=_LATE),
    "a line of short runs, a late message": _LINE._replace(faults=1, kinds=_LATE, is_short=True),
    "a line before one worker that dies": _LINE._replace(workers=1, faults=1, kinds=frozenset({"worker dies", "sweeper dies"})),
    "a line for two places": _LINE._replace(limit=2),
    "two places, any fault": _QUEUE._replace(limit=2),
    "a queue beside one that goes back": _QUEUE._replace(policies=("queue", "wait")),
    "a line beside one that goes back": _LINE._replace(policies=("queue", "queue", "wait")),
    "a line beside one that is skipped": _LINE._replace(policies=("queue", "queue", "skip")),
    "a line with an execution key": _LINE._replace(keys=("invoice", "invoice", None)),
    "a line with an execution key, a late message": _LINE._replace(keys=("invoice", "invoice", None), faults=1, kinds=_LATE),
    "a queue, retries": _QUEUE._replace(retries=1, faults=0),
    "a queue, Redis as broker": _QUEUE._replace(shares_tags=True, kinds=_OVERLAPS),
    "a queue, hard time limit": _QUEUE._replace(kinds=frozenset({"time limit", "worker dies"})),
    "a line, one revoked": _LINE._replace(revokes=1),
    "join, any fault": _QUEUE._replace(policies=("join", "join")),
    "join, failures": _QUEUE._replace(policies=("join", "join"), outcomes=_ANY_END, kinds=_DEATHS | {"reply lost"}),
    "join, three": _LINE._replace(policies=("join",) * 3, outcomes=_ANY_END),
    "join, one revoked": _LINE._replace(policies=("join",) * 3, revokes=1),
    "coalesce, three": _LINE._replace(policies=("coalesce",) * 3, outcomes=_ANY_END),
    "coalesce, one revoked": _LINE._replace(policies=("coalesce",) * 3, revokes=1),
    "coalesce into the first": _LINE._replace(policies=("coalesce first",) * 3, outcomes=_ANY_END),
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
    "a line, a death": _LINE._replace(faults=1, kinds=frozenset({"worker dies"})),
    "a line of short runs, a death": _LINE._replace(faults=1, kinds=frozenset({"worker dies"}), is_short=True),
    "a queue, one revoked, any fault": _QUEUE._replace(revokes=1),
    "a queue, a retry and a death": _QUEUE._replace(retries=1, kinds=frozenset({"worker dies"})),
    "a queue, deaths are counted": _QUEUE._replace(faults=2, kinds=frozenset({"worker dies"}), max_deliveries=1),
    "join, a death": _LINE._replace(policies=("join",) * 3, outcomes=_ANY_END, faults=1, kinds=frozenset({"worker dies"})),
    "coalesce, any fault": _QUEUE._replace(policies=("coalesce",) * 2, outcomes=_ANY_END),
    "coalesce, a death": _LINE._replace(policies=("coalesce",) * 3, faults=1, kinds=frozenset({"worker dies"})),
}
