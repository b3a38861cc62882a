"""Signals of the package, to be connected like Celery's own. The sender is the task; a receiver's error breaks nothing.

They are sent in the process that executes, in the order in which things happen; `answered_at_publish` in that which publishes.
"""

from __future__ import annotations

from typing import Final

from celery.utils.dispatch import Signal

__all__ = (
    "answered_at_publish",
    "contended",
    "lease_acquired",
    "lease_endangered",
    "lease_lost",
    "parked",
    "replayed",
    "requeued",
    "rescued",
    "trigger_ended",
    "uncertain",
)

#: The run has got its lease and its body comes next. Passes `lease`, `execution`.
lease_acquired: Final = Signal(name="lease_acquired", providing_args={"lease", "execution"})

#: A live lease was in the way. Passes `lock_key`, `task_id`, and of the holder `holder_task_id`, `holder_worker`, `age` and
#: `remaining` in seconds.
contended: Final = Signal(
    name="contended",
    providing_args={"lock_key", "task_id", "holder_task_id", "holder_worker", "age", "remaining"},
)

#: A trigger went back to the broker because of contention. Passes `lock_key`, `task_id`, `countdown` in seconds, `waits`.
requeued: Final = Signal(name="requeued", providing_args={"lock_key", "task_id", "countdown", "waits"})

#: The store has taken the message of a trigger that waits. Passes `lock_key`, `task_id`, `how` ("line", or "group" when it gets
#: the outcome of another's run) and `place`, how many are before it in line.
parked: Final = Signal(name="parked", providing_args={"lock_key", "task_id", "how", "place"})

#: A trigger waits until somebody knows what an earlier run of its execution has done, which died. Passes `lock_key`, `task_id`,
#: `execution_key`, and of the run that died `died_task_id`, `died_worker` and `age`, how many seconds ago that was found.
uncertain: Final = Signal(
    name="uncertain",
    providing_args={"lock_key", "task_id", "execution_key", "died_task_id", "died_worker", "age"},
)

#: A trigger has its outcome. Passes `lock_key`, `task_id`, `outcome` (an `Outcome`), `reason` (a text) and `ran`: False when
#: it was skipped, rejected, timed out waiting, or answered from a stored outcome.
trigger_ended: Final = Signal(name="trigger_ended", providing_args={"lock_key", "task_id", "outcome", "reason", "ran"})

#: A lease could not be renewed and ends soon. Passes `lease`, `remaining` in seconds. Sent from the heartbeat thread, with no
#: sender, once until a renewal succeeds.
lease_endangered: Final = Signal(name="lease_endangered", providing_args={"lease", "remaining"})

#: A holder learned that its lease is lost. Passes `lease`, `reason`. Sent from the heartbeat thread, with no sender.
lease_lost: Final = Signal(name="lease_lost", providing_args={"lease", "reason"})

#: The message of a trigger whose run died, or whose outcome nobody had passed on, was published again. Passes `task_id`,
#: `lock_name`, `outcome` (a text, empty for a run that died) and `times`, how often since it entered. Sent in the worker's main
#: process, with no sender.
rescued: Final = Signal(name="rescued", providing_args={"task_id", "lock_name", "outcome", "times"})

#: A call was answered with the handle of an earlier trigger, and no message was sent. Passes `task_id` of that trigger,
#: `execution_key` and `how` ("completed", "running" or "announced").
answered_at_publish: Final = Signal(name="answered_at_publish", providing_args={"task_id", "execution_key", "how"})

#: A trigger that was over is run again. Passes `task_id`, `lock_name`, `outcome` (the `Outcome` that it had; None when that was
#: taken back with a resolved step), `is_forced` and `reason` (a text). Sent in the process that replays it.
replayed: Final = Signal(name="replayed", providing_args={"task_id", "lock_name", "outcome", "is_forced", "reason"})
