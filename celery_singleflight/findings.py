"""What an operator is told: values made from what the store keeps, without a look at the store.

The names of their fields are the keys of the JSON documents; docs/reference/commands.md lists them. Durations in seconds. Of a
message and a result there is only the size.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from celery_singleflight.doubts import Origin, Uncertainty, why_uncertain, why_waits_for_word
from celery_singleflight.reasons import told

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = (
    "Counts",
    "Ending",
    "Explanation",
    "Holder",
    "Lock",
    "Locks",
    "Release",
    "Signs",
    "Trigger",
    "Turns",
    "forced_replays",
    "why_of",
    "why_of_lock",
)


@dataclass(frozen=True, slots=True)
class Signs:
    """Whether a holder lives, as far as can be told; None is not known."""

    #: Its lease is live by the store's clock.
    lease_is_live: bool
    #: How long ago the lease was acquired or renewed.
    renewed_ago: float | None
    #: Whether its worker answers over Celery's remote control.
    worker_answers: bool | None
    #: Whether it says that the trigger is active there.
    worker_runs_it: bool | None


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a place of a lock key."""

    task_id: str
    worker: str
    owner: str
    fencing_token: int
    #: "live"; "expired", and nobody has come in since; "ended", and the place stays taken until its min_hold is over.
    state: str
    age: float
    #: Until the lease ends unless it is renewed; negative since when it has expired.
    remaining: float

    @classmethod
    def of_line(cls, owner: str, line: str, now: int) -> Holder:
        """Read a line of a lease, at that store time in ms."""
        ends, since, token, worker, _, _, task_id = line.split("\n", 6)
        remaining = (int(ends) - now) / 1000
        state = "ended" if owner.endswith(" ended") else "live" if remaining > 0 else "expired"
        return cls(task_id, worker, owner, int(token), state, max(now - int(since), 0) / 1000, remaining)


@dataclass(frozen=True, slots=True)
class Turns:
    """What is known of those that wait for a lock key: they are with the broker, and the store gives each a turn."""

    #: The recent hold time; None as long as no run has ended while another waited.
    hold: float | None
    #: In what time the next one that comes gets its turn; 0 when no turn is reserved.
    next_turn: float
    #: About how many turns are reserved, which is about how many wait; None without a hold time.
    reserved: int | None

    @classmethod
    def of_pace(cls, hold_ms: str | None, next_ms: str | None, now: int) -> Turns:
        """Read the pace of a lock key, at that store time in ms."""
        hold = float(hold_ms) / 1000 if hold_ms else None
        turn = max(float(next_ms or 0) - now, 0.0) / 1000
        return cls(hold, turn, round(turn / hold) if hold else None if turn else 0)


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock key that is held, or was waited for within the last ten minutes. The name is None where the text does not tell."""

    lock_key: str
    lock_name: str | None
    holders: list[Holder]
    turns: Turns
    #: How many wait in line in the store, how many of those have been called and not entered, and how many wait for the outcome
    #: of another's run.
    in_line: int
    called: int
    following: int


@dataclass(frozen=True, slots=True)
class Counts:
    """The triggers of a lock name. Those that the broker has keep no lock key in the store: they are counted by name."""

    lock_name: str
    #: Triggers that are with the broker: contended, or between two attempts.
    with_broker: int
    #: How many records were looked at, and whether that was all of them.
    examined: int
    is_complete: bool
    #: Triggers whose message is in the store, and how many of them the sweeper is to look at by now.
    in_custody: int
    due: int
    #: How many of them wait until somebody knows what a run has done that died.
    waiting_for_word: int


@dataclass(frozen=True, slots=True)
class Locks:
    """What `locks` answers. `left_out` is how many lock keys were beyond the limit."""

    locks: list[Lock]
    lock_names: list[Counts]
    left_out: int


@dataclass(frozen=True, slots=True)
class Ending:
    """How a trigger or an execution has ended."""

    outcome: str
    reason: str
    blocker_task_id: str | None
    blocker_worker: str | None
    ended_ago: float
    is_settled: bool
    result_bytes: int

    @classmethod
    def of_record(cls, record: Mapping[str, Any], now: int) -> Ending | None:
        """Read the outcome of a record, if it has one."""
        outcome = record["outcome"]
        if not outcome:
            return None
        reason, task_id, worker = told(outcome, record["reason"] or "")
        ended = max(now - int(record["ended_ms"] or now), 0) / 1000
        return cls(outcome, reason, task_id, worker, ended, bool(record["settled"]), record["body_bytes"])


@dataclass(frozen=True, slots=True)
class Trigger:
    """What the store knows of a trigger; the lock key is None as long as it has not held one."""

    task_id: str
    lock_name: str
    lock_key: str | None
    execution_key: str | None
    #: "running", "expired", "uncertain", "waits for word", "in line", "following", "in custody", "with the broker", "left" or
    #: "ended".
    state: str
    #: How many are before it in line; None when it is not there.
    place: int | None
    attempt: int
    deaths: int
    handouts: int
    is_released: bool
    message_bytes: int
    #: In what time the sweeper looks at it next; negative when it is overdue, None when it will not.
    next_attention: float | None
    kept_for: float
    ending: Ending | None
    #: Of its execution, if nobody knows what a run of that has done.
    uncertain: Uncertainty | None
    #: None as long as it has not run.
    origin: Origin | None
    #: Whether another payload under its explicit execution key is refused.
    is_payload_compared: bool
    #: Of each replay that was forced: how long ago, and why.
    forced: list[tuple[float, str]]


def forced_replays(told: str | None, now: int) -> list[tuple[float, str]]:
    """Read which replays of a trigger were forced, at that store time in ms."""
    return [(max(now - at, 0) / 1000, reason) for at, reason in json.loads(told or "[]")]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` answers; `kind` is "lock key", "trigger" or "execution key"."""

    kind: str
    key: str
    #: Why it does not run, in one sentence.
    why: str
    lock: Lock | None
    #: Of each holder of the lock, in its order.
    signs: list[Signs]
    #: The trigger that is asked for; of a lock key those whose message is in the store.
    triggers: list[Trigger]
    #: The last outcomes of the lock name, newest first, where the lock key is the one that is asked for or is not known.
    last: list[Trigger]
    counts: Counts | None


@dataclass(frozen=True, slots=True)
class Release:
    """What `release` answers; `why` is "released", "live" or "other"."""

    is_released: bool
    why: str
    lock_key: str
    fencing_token: int
    is_published_again: bool
    holders: list[Holder]


def why_of_lock(lock: Lock, signs: list[Signs]) -> str:
    """Say in one sentence what keeps a trigger of the lock key from running."""
    if lock.holders:
        holder, sign = max(zip(lock.holders, signs, strict=True), key=lambda pair: pair[0].remaining)
        return _why_held(holder, sign)
    if lock.in_line:
        return f"nobody holds it; {lock.in_line} wait in line, {lock.called} of them called and on their way"
    return "nobody holds it: a trigger that comes now runs"


def _why_held(holder: Holder, sign: Signs) -> str:
    held = f"{holder.task_id} on {holder.worker or 'unknown'}"
    if holder.state == "ended" and holder.remaining > 0:
        return f"the run of {held} has ended, and its min_hold keeps the place for {holder.remaining:.1f} s"
    if holder.remaining <= 0:
        return f"the lease of {held} ended {-holder.remaining:.1f} s ago without a finish: a trigger that comes now runs"
    if sign.worker_answers is False:
        return f"{held} holds it, its worker does not answer, and its lease ends in {holder.remaining:.1f} s unless renewed"
    if sign.worker_runs_it is False:
        return f"{held} holds it, but its worker does not run it; the lease ends in {holder.remaining:.1f} s unless renewed"
    return f"{held} holds it for {holder.age:.1f} s, its lease has {holder.remaining:.1f} s left"


_WHY: Final = {
    "running": "it runs",
    "in line": "it waits in line for {0.lock_key}, behind {0.place}; the store has its message",
    "following": "it waits for the outcome of another trigger's run on {0.lock_key}; the store has its message",
    "with the broker": "it is with the broker: it waits its turn, or for its next attempt; the store has no message of it",
    "left": "nothing is under way: a direct call has failed, and the next trigger with its execution key goes on from there",
}


def why_of(trigger: Trigger) -> str:
    """Say in one sentence what becomes of a trigger."""
    if trigger.ending:
        ending = trigger.ending
        reason = f": {ending.reason}" if ending.reason else ""
        rest = "" if ending.is_settled else "; Celery has not sent all that follows yet"
        unsure = f". Of its execution: {why_uncertain(trigger.uncertain)}" if trigger.uncertain else ""
        return f"it has ended {ending.ended_ago:.1f} s ago, {ending.outcome}{reason}{rest}{unsure}"
    if trigger.state == "waits for word":
        return why_waits_for_word(trigger.uncertain, trigger.next_attention)
    if trigger.uncertain:
        return why_uncertain(trigger.uncertain)
    if trigger.state in _WHY:
        return _WHY[trigger.state].format(trigger)
    if trigger.message_bytes == 0:
        return "its run has died, and the store has no message of it: it runs again if the broker delivers it again"
    when = "by now" if (trigger.next_attention or 0) <= 0 else f"in {trigger.next_attention:.1f} s"
    left = "its run has died" if trigger.state == "expired" else "its last run gave it back"
    return f"{left}; the sweeper of a worker is to publish it again {when}"
