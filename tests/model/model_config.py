"""A small world: its triggers, its workers, and the faults that may happen in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from model_rules import PARKING, Rules

if TYPE_CHECKING:
    from model_rules import Reply
    from model_state import State

#: Stages in which the body may have effects, and in which a run has begun and not ended.
IN_BODY: Final = ("body", "worked")
RUNNING: Final = (*IN_BODY, "finishing", "retried", "overtaken", "leaving", "exiting")
#: Stages in which the child is at work, and may die alone.
IN_CHILD: Final = ("new", "lingering", "led", "refusing", "blind", "waiting", *RUNNING, "telling", "told")

#: Stages in which an outcome is being passed on.
ENDING: Final = ("new", "led", "finishing", "telling", "told", "acknowledged")

ALL_FAULTS: Final = frozenset(
    {
        "worker dies",  # with the child; the broker gives the message out again, at once or too late for anybody
        "child dies",  # the main process lives
        "exit",  # SystemExit in the body
        "sweeper dies",
        "pause",  # of a holder, past its lease; of one that tells Celery an outcome, past the grace
        "redelivery",  # of an unacknowledged message, while its worker lives
        "reply lost",  # the script has run, and the caller asks again
        "store away",  # as a delivery enters; the script may have run
        "time limit",
        "second handout",  # of a message that waits in the broker
        "early look",  # of a sweeper, at a waiting trigger that nothing is to be done for
        "late",  # a message on its way for longer than a place is reserved, a slot that waits beyond its time
    }
)


class Config(NamedTuple):
    """A small world."""

    keys: tuple[str | None, ...] = (None, "invoice")
    policies: tuple[str, ...] = ("wait", "wait")
    limit: int = 1
    workers: int = 2
    faults: int = 2
    kinds: frozenset[str] = ALL_FAULTS - {"time limit"}
    outcomes: tuple[str, ...] = ("succeeded",)
    retries: int = 0
    #: None for no bound, and no counting.
    max_deliveries: int | None = None
    #: Whether writes to the resources are steps of their own.
    has_effects: bool = True
    #: As with Redis: copies of one message share a delivery tag, and one acknowledgement takes it from all of them.
    shares_tags: bool = False
    #: How often the store may forget everything.
    forgets: int = 0
    #: Whether runs are short, so that the one after the next is called ahead and may wait in its slot.
    is_short: bool = False
    #: How many of the waiting triggers may be revoked.
    revokes: int = 0

    @property
    def rules(self) -> Rules:
        return Rules(self.keys, self.policies, self.limit, self.max_deliveries, self.is_short)

    @property
    def parks(self) -> bool:
        """Whether some trigger waits in the store."""
        return any(self.rules.policy(trigger) in PARKING for trigger in range(len(self.keys)))

    @property
    def gathers(self) -> bool:
        """Whether some trigger may get the outcome of another."""
        return any(self.rules.policy(trigger) in ("coalesce", "join") for trigger in range(len(self.keys)))


class Step(NamedTuple):
    """One step: what was done by or to which worker or trigger, the answer of the script if it was one, what came of it."""

    action: str
    where: int
    reply: Reply
    state: State
    is_fault: bool = False
