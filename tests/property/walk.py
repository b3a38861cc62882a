"""A walk among triggers that wait: deliveries, deaths, lost replies and time, all at random by a seed.

python tests/property/walk.py 1000         that many walks, beginning with seed 0
python tests/property/walk.py 1 4711       one, of that seed, told step by step
"""

from __future__ import annotations

import sys
import time
from typing import Any, Final

from walk_world import MOST_SENT, PARKING, Broken, Message, Run, World

from celery_singleflight.claims import (
    Acquired,
    Claim,
    Encoded,
    Ended,
    Finished,
    Held,
    Led,
    Linger,
    Merge,
    Outcome,
    Parked,
    Record,
    Refused,
)
from celery_singleflight.keys import LockKey

STEPS: Final = 120
#: Generations between two replacements of a trigger by its own code.
RETRIES: Final = 1 << 20
_ENDS: Final = {"succeed": 6, "fail": 2, "retry": 1, "go elsewhere": 0.3, "stop": 0.3, "reject": 0.3}
_NOTHING: Final = Encoded("", "", b"")


class Walk(World):
    """What happens, a step at a time."""

    def step(self) -> None:
        deeds = {
            self.send: 4,
            self.deliver: 10,
            self.end: 6,
            self.die: 1 if self.faults else 0,
            self.pass_time: 4,
            self.sweep: 3,
            self.revoke: 0.4,
            self.renew: 1,
        }
        self.dice.choices(list(deeds), list(deeds.values()))[0]()
        self.check()

    def send(self) -> None:
        if len(self.sent) < MOST_SENT:
            task_id = f"t{len(self.sent)}"
            claim = self.sent[task_id] = self.new_claim(task_id)
            self.tell("send", claim)
            self.queue.append(Message(claim, self.now))

    # A delivery

    def deliver(self) -> None:
        ready = [message for message in self.queue if message.due <= self.now]
        if ready:
            message = ready[0] if self.chance(0.7) else self.dice.choice(ready)
            if not self.fault():
                self.queue.remove(message)  # else it is delivered again
            owner = self.new_id()
            self.ask(message.claim._replace(owner=owner, run_id=owner))

    def ask(self, own: Claim) -> None:
        """Ask as a delivery does, until there is an answer for good."""
        claim, may_linger = own, own.on_held in PARKING and self.chance(0.5)
        for _ in range(50):
            before = self.line(claim.record.lock_key)
            asked = claim._replace(waits=claim.waits._replace(linger=0.4 if may_linger else 0.0))
            is_lost = self.fault()
            if is_lost:
                self.store.enter(asked)
            answer = self.store.enter(asked)
            if isinstance(answer, Acquired) and not is_lost:
                self.check_order(claim, before)
            self.tell("deliver", own.message, own.copy[:4], own.generation, answer)
            if self.fault() and self.chance(0.4):
                self.fall_silent(own, answer)
                return
            if isinstance(answer, Linger):
                self.publish(answer.calls)
                may_linger = self.linger()
            elif isinstance(answer, Merge):
                claim = self.merge(own, answer)
            elif not isinstance(answer, Led):
                self.take(claim, answer)
                return
            elif (ended := self.store.follow(claim, answer.by)) is not None:
                self.tell("  ", ended)
                self.publish(ended.calls)
                self.answer(claim, ended)
                return
        raise Broken(f"{own.record.task_id} asks for ever")

    def linger(self) -> bool:
        """Let time pass, and who holds end. Returns whether it wants to go on lingering."""
        self.pass_time(self.dice.random() * 0.2)
        if self.chance(0.4):
            for run in list(self.runs):
                self.end(run)
        return self.chance(0.5)

    def merge(self, own: Claim, answer: Merge) -> Claim:
        """Return the claim with the arguments of both; what waits may be gone by then."""
        if self.chance(0.3):
            self.end()
        if not answer.by:
            return own
        waits = own.waits._replace(merged_with=answer.by, merged_copy=answer.copy)
        return own._replace(message=answer.message + b"+" + own.record.task_id.encode(), waits=waits)

    def fall_silent(self, claim: Claim, answer: Any) -> None:
        """The delivery does not go on: the reply never came, or its process has died, which somebody notices or nobody."""
        way = self.dice.choice(("unheard", "noticed", "not noticed"))
        self.tell("  falls silent:", way)
        if way == "unheard":
            self.publish(self.store.abandon(claim.owner, claim.record))
            self.queue.append(Message(claim, self.now + 1.0))
            return
        if way == "noticed":
            self.publish(self.store.abandon(claim.owner, claim.record, again=5.0, died=True))
        if not isinstance(answer, Acquired | Parked | Linger):
            self.queue.append(Message(claim, self.now + 1.0))

    def take(self, claim: Claim, answer: Any) -> None:
        self.publish(getattr(answer, "calls", ()))
        if isinstance(answer, Acquired):
            task_id = claim.record.task_id
            if task_id in self.outcomes or task_id in self.succeeded:
                raise Broken(f"{task_id} runs after its end")
            self.runs.append(Run(claim, answer.token))
        elif isinstance(answer, Ended):
            self.answer(claim, answer)
        elif isinstance(answer, Held):
            again = claim._replace(copy=self.new_id(), previous=claim.copy, first_ms=answer.first_ms)
            self.queue.append(Message(again, self.now + self.dice.random() * 3))

    # The end of a run

    def end(self, run: Run | None = None) -> None:
        if run is None and not self.runs:
            return
        run = run or self.dice.choice(self.runs)
        self.runs.remove(run)
        claim, way = run.claim, self.dice.choices(list(_ENDS), list(_ENDS.values()))[0]
        self.tell("end", claim.record.task_id, way)
        if way == "retry":
            self.send_on(claim, claim.generation + 1)
        elif way == "go elsewhere":
            self.send_on(claim, (claim.generation // RETRIES + 1) * RETRIES)
        elif way == "reject":
            self.publish(self.store.abandon(claim.owner, claim.record))
            self.queue.append(Message(claim, self.now))
        else:
            self.finish(run, {"succeed": Outcome.SUCCEEDED, "fail": Outcome.FAILED, "stop": Outcome.REPLACED}[way])

    def send_on(self, claim: Claim, generation: int) -> None:
        task_id = claim.record.task_id
        retry = self.sent[task_id] = self.sent[task_id]._replace(generation=generation)
        self.queue.append(Message(retry._replace(message=claim.message), self.now + self.dice.random() * 5))
        if not self.fault():
            self.publish(self.store.abandon(claim.owner, claim.record, generation=generation))

    def finish(self, run: Run, outcome: Outcome) -> None:
        claim, lease = run.claim, self.lease(run)
        value = Encoded("application/json", "utf-8", claim.record.task_id.encode())
        how: dict[str, Any] = {"reason": "[]", "keep": 600.0, "hold": self.dice.choice((0.0, 0.0, 1.0))}
        if self.fault():
            self.store.finish(lease, claim.record, outcome, value, **how)  # the reply is lost
        answer = self.store.finish(lease, claim.record, outcome, value, **how)
        self.tell("  ", answer)
        if isinstance(answer, Refused):
            self.queue.append(Message(claim._replace(copy=self.new_id(), previous=claim.copy), self.now + 2.0))
            self.publish(self.store.abandon(claim.owner, claim.record))
            return
        if outcome is Outcome.SUCCEEDED:
            self.succeeded.add(claim.record.task_id)
        self.publish(answer.calls)
        self.answer(claim, Ended(outcome, settled=False, reason=[], value=value, ended_as=outcome))

    def die(self) -> None:
        if self.runs:
            run = self.dice.choice(self.runs)
            self.runs.remove(run)
            self.tell("die", run.claim.record.task_id)
            if self.chance(0.5):
                self.publish(self.store.abandon(run.claim.owner, run.claim.record, again=5.0, died=True))

    # What goes on beside

    def renew(self) -> None:
        self.store.renew([(self.lease(run), run.claim.record, run.claim.ttl) for run in self.runs])

    def pass_time(self, seconds: float | None = None) -> None:
        self.now += self.dice.choice((0.005, 0.05, 1.0, 3.0, 10.0)) if seconds is None else seconds

    def sweep(self) -> None:
        self.now += 1.0
        for record in self.store.due(["billing"], limit=50, interval=0.75):
            self.tell("sweep", record)
            if record.task_id:
                handout = self.store.rescue(record)
                self.publish([handout] if handout else [])
            else:
                self.publish(self.store.attend(LockKey("billing", record.execution_key or "")))

    def revoke(self) -> None:
        if self.sent:
            for record in self.store.parked(self.dice.choice(list(self.sent)), ["billing"]):
                self.withdraw(record)

    def withdraw(self, record: Record) -> None:
        self.tell("revoke", record)
        how: dict[str, Any] = {"reason": '["revoked"]', "keep": 600.0, "release": False, "error": _NOTHING, "patience": 0.0}
        answer = self.store.conclude(self.new_id(), record, Outcome.REVOKED, **how)
        if isinstance(answer, Finished):
            self.publish(answer.calls)

    def settle_down(self) -> None:
        """Let everything come to its end, without further faults. Raises `Broken` when something does not."""
        self.faults = 0.0
        for _ in range(3000):
            if len(self.outcomes) == len(self.sent) and not self.runs and not self.queue:
                break
            self.sweep()
            for _ in range(6):
                self.deliver()
                self.check()
            self.end()
            self.check()
        for _ in range(3):
            self.now += 3.0
            self.sweep()
        self.check_over()


def walk(seed: int) -> Walk:
    """Walk once, on a clock of its own. Raises what has gone wrong, with the story of the walk as its note."""
    real, way = time.time, Walk(seed)
    time.time = lambda: way.now
    try:
        for _ in range(STEPS):
            way.step()
        way.settle_down()
    except Exception as error:
        error.add_note("\n".join(way.story))
        raise
    finally:
        time.time = real
    return way


def main(many: int, first: int = 0) -> int:
    """Walk so often; tell which seeds break what. Returns how many do."""
    broken = 0
    for seed in range(first, first + many):
        try:
            walk(seed)
        except Exception as error:
            if many == 1:
                raise
            broken += 1
            sys.stdout.write(f"{seed} {type(error).__name__}: {error}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{broken} of {many} are broken\n")
    return broken


if __name__ == "__main__":
    sys.exit(min(main(*map(int, sys.argv[1:])), 1))
