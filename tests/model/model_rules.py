"""What the scripts are told: of the tasks, and with each request; and how they reply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from model_waits import Call

if TYPE_CHECKING:
    from model_state import Message, Process
    from model_waits import Waiter

Reply = tuple[Any, ...]

#: Policies by which a trigger is parked; "join" may be followed by a payload, "coalesce" by "first".
PARKING = ("queue", "coalesce", "join")


class Rules(NamedTuple):
    """What the scripts are told of the tasks."""

    #: The explicit execution key of each trigger, if it has one.
    keys: tuple[str | None, ...]
    #: What contention means for each trigger: "wait", "skip", "reject", or one of those by which it is parked.
    policies: tuple[str, ...]
    limit: int
    max_deliveries: int | None
    is_short: bool

    def execution(self, trigger: int) -> int:
        """Where the run record of the trigger is."""
        key = self.keys[trigger]
        return trigger if key is None else len(self.keys) + sorted({k for k in self.keys if k}).index(key)

    @property
    def places(self) -> int:
        return len(self.keys) + len({key for key in self.keys if key})

    def policy(self, trigger: int) -> str:
        return self.policies[trigger].partition(" ")[0]

    def digest(self, trigger: int) -> str:
        """The payload of a trigger that joins."""
        return self.policies[trigger] if self.policy(trigger) == "join" else ""


class Asked(NamedTuple):
    """What a script is asked, and what it gathers until it replies."""

    process: Process
    #: What was known of the trigger when it was parked before, and what contention means for it now.
    before: Waiter | None
    on_held: str
    #: For how long its slot may wait: at all, or not.
    may_linger: bool
    calls: list[Call]

    @property
    def message(self) -> Message:
        return self.process.message

    @property
    def trigger(self) -> int:
        return self.process.message.trigger


def with_calls(reply: Reply, calls: list[Call]) -> Reply:
    return (*reply, tuple(calls)) if calls else reply


def calls_in(reply: Reply) -> tuple[Call, ...]:
    """What a reply tells to publish."""
    last = reply[-1] if reply else ()
    return last if isinstance(last, tuple) and last and isinstance(last[0], Call) else ()
