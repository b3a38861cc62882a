"""A run that has the lease and does steps, for the tests of the scripts."""

from __future__ import annotations

from celery_singleflight.claims import Encoded, Outcome, Refused
from celery_singleflight.progress import Begun, Ending, Step, Writer

VALUE = Encoded("application/json", "utf-8", b'{"a": "x\ny"}')
FAILED = Ending(Outcome.FAILED, "ValueError()", Encoded("application/json", "utf-8", b"{}"))


class Run:
    """A run that has the lease, and what it writes."""

    def __init__(self, desk, claim=None, unsure_as="rerun", keep=600.0, **how):
        self.desk = desk
        self.claim = claim or desk.claim(**how)
        self.acquired = desk.acquire(self.claim)
        lease = desk.lease(self.claim, self.acquired.token)
        self.writer = Writer(self.claim.record, lease, self.acquired.run_id, "w1@host", keep, unsure_as)
        self.calls = 0

    @property
    def name(self):
        return self.desk.store.keys.steps(self.desk.execution_name(self.claim))

    def step(self, name, **how):
        self.calls += 1
        return Step(name, f"{self.claim.owner}:{self.calls}", **how)

    def begin(self, step):
        return self.desk.store.begin_step(self.writer, step)

    def record(self, step, value=VALUE, note=""):
        self.desk.store.record_step(self.writer, step, value, note)

    def do(self, name, value=VALUE, **how):
        step = self.step(name, **how)
        assert isinstance(self.begin(step), Begun)
        self.record(step, value)
        return step

    def undo(self, **told):
        self.calls += 1
        return self.desk.store.undo_step(self.writer, f"{self.claim.owner}:{self.calls}", FAILED, **told)

    def finish(self, outcome=Outcome.FAILED):
        assert not isinstance(self.desk.finish(self.claim, self.acquired.token, outcome), Refused)

    def state(self, name):
        return self.desk.client.hget(self.name, f"step:{name}").partition("\n")[0]

    def next(self, **how):
        """The attempt after this one, whose process has died."""
        self.desk.expire(self.claim)
        record = self.claim.record
        key = {"execution_key": record.execution_key, "has_trigger": record.has_trigger}
        return Run(self.desk, self.desk.claim(record.task_id, **key), self.writer.unsure_as, **how)
