"""The table of transitions of a run record, as the scripts have it, and a watch on every script that runs."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_singleflight.connection import Connections
    from celery_singleflight.script import Script, Value

#: Of a transition, as (from, to): the scripts that make it, and "time" where it happens by itself.
TRANSITIONS: Final[dict[tuple[str, str], frozenset[str]]] = {
    (match[1], match[2]): frozenset(match[3].split(", "))
    for match in re.finditer(
        r"^([a-z -]+) > ([a-z -]+): ([a-z_, ]+)$",
        (files("celery_singleflight") / "scripts" / "shared" / "states.lua").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    if match[1] != "from"
}
#: What happens when a script runs, and not by itself.
MADE: Final = frozenset(one for one, by in TRANSITIONS.items() if by != {"time"})
#: What the walks of tests/property need not come by, and why; tests/scripts/test_states.py makes each of them.
NOT_WALKED: Final[dict[str, frozenset[tuple[str, str]]]] = {
    "no run of a walk is held as uncertain, and nobody says what one has done": frozenset(
        {
            ("new", "ended uncertain"),
            ("waiting", "ended uncertain"),
            ("overdue", "ended uncertain"),
            ("overdue", "uncertain"),
            ("uncertain", "ended uncertain"),
            ("uncertain", "waiting"),
            ("ended uncertain", "succeeded"),
            ("ended uncertain", "failed"),
            ("ended uncertain", "waiting"),
        }
    ),
    "who has died in a walk ends nothing any more, and no lease of one who lives ends": frozenset(
        {
            ("overdue", "succeeded"),
            ("overdue", "failed"),
            ("overdue", "replaced"),
            ("overdue", "new"),
            ("overdue", "waiting"),
            ("uncertain", "succeeded"),
            ("uncertain", "failed"),
            ("uncertain", "replaced"),
            ("uncertain", "new"),
            ("waiting", "uncertain"),
        }
    ),
    "no main process ends a run, and no operator releases one": frozenset(
        {
            ("running", "revoked"),
            ("overdue", "revoked"),
            ("uncertain", "revoked"),
            ("waiting", "dead-lettered"),
            ("waiting", "new"),
        }
    ),
    "no store of a walk forgets": frozenset(
        {("new", "replaced"), ("new", "coalesced"), ("coalesced", "waiting"), ("succeeded", "waiting")}
    ),
    "nothing is rejected, no policy changes while a trigger waits, no failure is kept, no step is held": frozenset(
        {("new", "rejected"), ("waiting", "rejected"), ("waiting", "skipped"), ("new", "failed"), ("failed", "waiting")}
    ),
    "nothing is replayed": frozenset(
        {
            ("skipped", "waiting"),
            ("rejected", "waiting"),
            ("replaced", "waiting"),
            ("timed out waiting", "waiting"),
            ("timed out waiting", "uncertain"),
            ("dead-lettered", "waiting"),
            ("dead-lettered", "uncertain"),
            ("revoked", "waiting"),
            ("revoked", "uncertain"),
            ("ended uncertain", "uncertain"),
            ("failed", "uncertain"),
            ("succeeded", "new"),
            ("failed", "new"),
        }
    ),
    "it takes a death, and then others in the way for longer than the trigger may wait": frozenset(
        {
            ("new", "timed out waiting"),
            ("overdue", "timed out waiting"),
            ("uncertain", "timed out waiting"),
            ("overdue", "dead-lettered"),
            ("uncertain", "dead-lettered"),
        }
    ),
}
#: What an execution with an explicit key may be, and the record of a trigger beside it.
OF_EXECUTION: Final = frozenset({"new", "running", "overdue", "uncertain", "waiting", "succeeded", "failed"})
OF_RUN: Final = frozenset({"running", "overdue", "uncertain"})
FIELDS: Final = ("run", "generation", "owner", "until_ms", "unsure", "outcome")


def state_of(record: Sequence[Any], now_ms: float) -> str:
    """Return the state of a record by these fields of it, in the order of `FIELDS`; as states.lua does."""
    run, generation, owner, until_ms, unsure, outcome = (
        value.decode() if isinstance(value, bytes) else value for value in record
    )
    is_live = bool(owner) and (until_ms is None or float(until_ms) > now_ms)
    if outcome is not None:
        ended = "ended uncertain" if outcome == "uncertain" else outcome
        return f"{outcome} and running" if is_live else ended
    if is_live:
        return "running without an end" if until_ms is None else "running"
    if unsure is not None:
        return "uncertain"
    if owner:
        return "overdue"
    return "new" if run is None and generation is None else "waiting"


class Watch:
    """Connections that look at the records of each script call. They raise when a transition is not in the table."""

    def __init__(self, connections: Connections, client: Any, now_ms: Callable[[], float]) -> None:
        self.spans_slots = connections.spans_slots
        self._connections = connections
        self._client = client
        self._now_ms = now_ms
        #: What was seen, with a script that did it.
        self.seen: dict[tuple[str, str], str] = {}

    def run(self, script: Script, keys: int, values: Sequence[Value]) -> Any:
        before = self._look(script, values)
        reply = self._connections.run(script, keys, values)
        self._compare(script, before, self._look(script, values))
        return reply

    def run_many(self, script: Script, keys: int, calls: Sequence[Sequence[Value]]) -> list[Any]:
        before = [self._look(script, values) for values in calls]
        replies = self._connections.run_many(script, keys, calls)
        for was, values in zip(before, calls, strict=True):
            self._compare(script, was, self._look(script, values))
        return replies

    def run_after(
        self, name: str, seconds: float, goes_on: Callable[[], bool], script: Script, keys: int, values: Sequence[Value]
    ) -> Any:
        before = self._look(script, values)
        reply = self._connections.run_after(name, seconds, goes_on, script, keys, values)
        self._compare(script, before, self._look(script, values))
        return reply

    def close(self) -> None:
        self._connections.close()

    def _look(self, script: Script, values: Sequence[Value]) -> dict[str, str]:
        names = {kind: values[n] for n, kind in enumerate(script.keys) if kind in ("execution", "trigger")}
        found = {kind: state_of(self._client.hmget(name, FIELDS), self._now_ms()) for kind, name in names.items()}
        if len(names) == 2 and script.name != "follow":
            if names["execution"] == names["trigger"]:
                del found["execution"]
            else:
                assert found["execution"] in OF_EXECUTION, f"an execution is {found['execution']}"
                assert found["trigger"] not in OF_RUN, f"a trigger beside its execution is {found['trigger']}"
        return found

    def _compare(self, script: Script, before: dict[str, str], after: dict[str, str]) -> None:
        for kind, was in before.items():
            becomes = after[kind]
            if was == becomes:
                continue
            # Where what has answered a trigger is forgotten, it asks anew, and may end at once.
            moves = [(was, becomes)] if (was, becomes) in TRANSITIONS else [(was, "waiting"), ("waiting", becomes)]
            for move in moves:
                assert script.name in TRANSITIONS.get(move, ()), f"{script.name} makes of {was} what is {becomes}"
                self.seen.setdefault(move, script.name)
