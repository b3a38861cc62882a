"""The store against its contract: any order of deliveries, ends, expiries, crashes and lost replies."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from cluster import Keyspace
from contract import Contract, Delivery
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule, run_state_machine_as_test

from celery_singleflight.claims import Acquired, Claim, Encoded, Ended, Held, Outcome, Record, Surplus
from celery_singleflight.keys import KeySpace, LockKey
from celery_singleflight.lease import Lease
from celery_singleflight.servers import connect
from celery_singleflight.store import Store

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Of its own, as it is emptied all the time.
DATABASE = 10
LOCKS = {"here": LockKey.of("billing", ["here"]), "there": LockKey.of("billing", ["there"])}
#: For each trigger its lock key and its execution key.
TRIGGERS = {
    "t1": ("here", None),
    "t2": ("here", None),
    "e1": ("here", "invoice"),
    "e2": ("there", "invoice"),
}
#: Seconds that do not pass while an example runs.
LONG = 1000.0
EXAMPLES, STEPS = 400, 40

POLICIES = st.sampled_from(["wait", "skip", "reject", "ask"])


class Handle(NamedTuple):
    """What a delivery that got a lease knows of it."""

    delivery: Delivery
    token: int


class StoreMachine(RuleBasedStateMachine):
    """Deliveries and runs in any order, each step compared with the contract and with what can be seen from outside."""

    limit: int
    keyspace: Keyspace
    store: Store

    #: Runs that may still do something, and every lease that was ever given.
    handles = Bundle("handles")
    leases = Bundle("leases")
    twice = st.booleans()

    def __init__(self) -> None:
        super().__init__()
        self.keyspace.clear()
        self.seen: Mapping[str, Any] = {}
        self.contract = Contract(self.limit)
        self.messages = {task_id: [("", "-", 0)] for task_id in TRIGGERS}
        self.tokens: dict[str, list[int]] = {name: [] for name in LOCKS}
        self.outcomes: dict[Delivery, Outcome] = {}
        self.recorded: set[Delivery] = set()
        self.completed: set[str] = set()
        self.told: list[Delivery] = []
        self.names = 0

    @rule(
        targets=(handles, leases),
        task_id=st.sampled_from(sorted(TRIGGERS)),
        message=st.integers(0, 3),
        on_held=POLICIES,
        has_grace=st.booleans(),
        twice=twice,
    )
    def deliver(self, task_id, message, on_held, has_grace, twice):
        copy, previous, generation = self.messages[task_id][-1 - message % len(self.messages[task_id])]
        lock, execution_key = TRIGGERS[task_id]
        delivery = Delivery(self.new_name("owner"), task_id, lock, execution_key, copy, previous, generation)
        how = {"on_held": on_held, "has_grace": has_grace}
        answer = self.enter(delivery, **how)
        if twice:
            assert same(self.enter(delivery, **how), answer)
        if isinstance(answer, Ended):
            self.told.append(delivery)
        if isinstance(answer, Held) and on_held != "ask":
            self.messages[task_id].append((self.new_name("copy"), copy, generation))
        return Handle(delivery, answer.token) if isinstance(answer, Acquired) else multiple()

    @rule(targets=(handles, leases), handle=handles, on_held=POLICIES, has_grace=st.booleans())
    def ask_again(self, handle, on_held, has_grace):
        """The reply to the first request was lost, and much has happened since."""
        answer = self.enter(handle.delivery, on_held=on_held, has_grace=has_grace)
        is_new = isinstance(answer, Acquired) and answer.token != handle.token
        return Handle(handle.delivery, answer.token) if is_new else multiple()

    @rule(handle=handles)
    def renew(self, handle):
        with self.acting(handle.delivery.owner, is_quiet=bool(self.contract.renew(handle.delivery))):
            (why,) = self.store.renew([(self.lease(handle), self.record(handle.delivery), LONG)])
        assert why == self.contract.renew(handle.delivery)

    @rule(handle=handles, outcome=st.sampled_from([Outcome.SUCCEEDED, Outcome.FAILED]), twice=twice)
    def finish(self, handle, outcome, twice):
        for _ in range(1 + twice):
            self.finish_once(handle, outcome)

    @rule(handle=handles)
    def retry(self, handle):
        """The body sends the message of the next generation; its run is given back after that, or never."""
        delivery = handle.delivery
        self.messages[delivery.task_id].append((delivery.copy, delivery.previous, delivery.generation + 1))

    @rule(handle=consumes(handles), has_retried=st.booleans(), twice=twice)
    def abandon(self, handle, has_retried, twice):
        delivery = handle.delivery
        generation = delivery.generation + 1 if has_retried else None
        for _ in range(1 + twice):
            with self.acting(delivery.owner):
                self.store.abandon(delivery.owner, self.record(delivery), generation=generation)
            self.contract.abandon(delivery, generation)
        if has_retried:
            self.retry(handle)

    @rule(number=st.integers(0, 9))
    def settle(self, number):
        if self.told:
            delivery = self.told[number % len(self.told)]
            with self.acting(delivery.owner, is_quiet=not self.contract.settle(delivery)):
                self.store.settle([(self.record(delivery), delivery.owner)])

    @rule(handle=leases)
    def expire(self, handle):
        delivery = handle.delivery
        with self.acting(delivery.owner):
            self.keyspace.expire(self.lease_name(delivery.lock), self.execution_name(delivery), delivery.owner)
        self.contract.expire(delivery)

    @rule(handle=consumes(handles))
    def crash(self, handle):
        """Nobody knows of the run any more, but the store."""

    @rule()
    def lapse(self):
        if self.contract.executions.get("key invoice") and self.contract.executions["key invoice"].outcome:
            with self.acting(""):
                self.keyspace.client.delete(self.store.keys.execution("billing", "invoice"))
            self.contract.lapse("key invoice")
            self.completed.discard("key invoice")

    @rule(really=st.integers(0, 3))
    def flush(self, really):
        if really:
            return
        self.keyspace.clear()
        self.seen = {}
        self.contract.flush()
        self.completed.clear()
        self.recorded.clear()

    @invariant()
    def no_more_than_the_limit_hold_a_lock_key(self):
        for name in LOCKS:
            live = self.live(name, self.seen).keys()
            assert len(live) <= self.limit
            assert live == self.contract.lock(name).live

    @invariant()
    def every_key_goes_by_itself(self):
        assert [name for name, (_, expires_at) in self.seen.items() if expires_at == -1] == []

    def enter(self, delivery: Delivery, *, on_held: str, has_grace: bool) -> Any:
        expected = self.contract.enter(delivery, on_held=on_held, has_grace=has_grace)
        claim = Claim(self.record(delivery), delivery.owner, "worker", self.new_name("run"), self.limit, LONG, LONG, on_held)
        claim = claim._replace(copy=delivery.copy, previous=delivery.previous, generation=delivery.generation)
        claim = claim._replace(grace=LONG if has_grace else 0.0)
        is_quiet = expected[0] == "surplus" or (expected[0] == "held" and on_held == "ask" and not has_grace)
        with self.acting(delivery.owner, is_quiet=is_quiet):
            answer = self.store.enter(claim)
        match answer:
            case Held():
                assert ("held", answer.what) == expected
            case Ended():
                assert ("ended", answer.outcome.value, answer.value.body, answer.settled) == expected
            case Surplus():
                assert ("surplus", answer.why) == expected
            case Acquired(token, run_id, attempt):
                assert delivery.execution not in self.completed
                _, again, run, number = expected
                assert (run_id, attempt) == (run or claim.run_id, number)
                if again:
                    assert token == again
                else:
                    assert token > max(self.tokens[delivery.lock], default=0)
                    self.tokens[delivery.lock].append(token)
                    self.outcomes.pop(delivery, None)
                    self.recorded.discard(delivery)
                    self.contract.granted(delivery, token, run_id, attempt)
        return answer

    def finish_once(self, handle: Handle, outcome: Outcome) -> None:
        delivery = handle.delivery
        # What has ended is only ended again because its reply was lost, and so in the same way.
        outcome = self.outcomes.setdefault(delivery, outcome)
        is_recorded = delivery in self.recorded
        body = b"" if outcome is Outcome.FAILED else delivery.owner.encode()
        counts = self.contract.finish(delivery, handle.token, outcome.value, body)
        with self.acting(delivery.owner, is_quiet=not counts or is_recorded):
            refused = self.store.finish(
                self.lease(handle),
                self.record(delivery),
                outcome,
                Encoded("", "", body),
                reason="[]",
                keep=LONG,
                release=True,
            )
        assert (refused is None) == counts
        if counts and not is_recorded:
            self.recorded.add(delivery)
            self.told.append(delivery)
            if outcome is Outcome.SUCCEEDED or delivery.execution_key is None:
                self.completed.add(delivery.execution)

    @contextmanager
    def acting(self, owner: str, *, is_quiet: bool = False):
        """See to it that nobody but the owner is touched, and nothing at all by a quiet step."""
        before = self.seen
        yield
        self.seen = self.keyspace.snapshot()
        assert not is_quiet or self.seen == before
        for name in LOCKS:
            others = {item for item in self.live(name, before).items() if item[0] != owner}
            assert self.live(name, self.seen).items() >= others

    def live(self, lock: str, seen: Mapping[str, Any]) -> dict[str, float]:
        """Return who holds the lock key. No lease of these ends by itself, so the clock need not be the server's."""
        lines, _ = seen.get(self.lease_name(lock), ({}, 0))
        ends = {owner: float(line.partition("\n")[0]) for owner, line in lines.items()}
        return {owner: end for owner, end in ends.items() if end > time.time() * 1000}

    def lease(self, handle: Handle) -> Lease:
        key, owner = LOCKS[handle.delivery.lock], handle.delivery.owner
        return Lease(key, owner=owner, token=handle.token, limit=self.limit, ttl=LONG, max_hold=LONG, requested_at=0.0)

    def lease_name(self, lock: str) -> str:
        return self.store.keys.lock(LOCKS[lock]).lease

    def record(self, delivery: Delivery) -> Record:
        return Record(LOCKS[delivery.lock], delivery.task_id, delivery.execution_key)

    def execution_name(self, delivery: Delivery) -> str:
        return self.store.names(self.record(delivery))["execution"]

    def new_name(self, kind: str) -> str:
        self.names += 1
        return f"{kind}{self.names}"


def same(one: Any, other: Any) -> bool:
    """Whether two answers are one answer. Those who are told to wait may be given a later turn, and time goes on."""
    if isinstance(one, Held) and isinstance(other, Held):
        return (one.what, one.task_id, one.worker) == (other.what, other.task_id, other.worker)
    return one == other


@pytest.fixture
def store_and_keyspace(valkey):
    url = f"{valkey.url}/{DATABASE}"
    store, keyspace = Store(connect(url, {}), KeySpace("sf")), Keyspace.at(url)
    yield store, keyspace
    store.close()
    keyspace.close()


@pytest.mark.timeout(600)  # a failure is made as short as it can be, which takes longer than finding none
@pytest.mark.parametrize("limit", [1, 2])
def test_the_store_keeps_its_contract_in_any_order_of_events(store_and_keyspace, limit):
    store, keyspace = store_and_keyspace
    machine = type("StoreMachine", (StoreMachine,), {"limit": limit, "store": store, "keyspace": keyspace})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            derandomize=True,
            database=None,
            print_blob=True,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
