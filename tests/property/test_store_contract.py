"""The store against its contract: any order of deliveries, ends, expiries, crashes and lost replies."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from cluster import Keyspace
from contract import Contract, Delivery, Execution, held_place
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule, run_state_machine_as_test
from record_states import Watch

from celery_singleflight.claims import Acquired, Claim, Encoded, Ended, Finished, Handout, Held, Outcome, Record, Surplus
from celery_singleflight.keys import KeySpace, LockKey
from celery_singleflight.lease import Lease
from celery_singleflight.servers import connect
from celery_singleflight.store import Renewal, Store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from contract import Trigger

#: Of its own, as it is emptied all the time.
DATABASE = 10
LOCKS = {"here": LockKey.of("billing", ["here"]), "there": LockKey.of("billing", ["there"])}
#: For each trigger its lock key, its execution key, and whether the store keeps its message.
TRIGGERS = {
    "t1": ("here", None, True),
    "t2": ("here", None, False),
    "e1": ("here", "invoice", True),
    "e2": ("there", "invoice", True),
}
#: Runs of one trigger that may die.
MAX_DEATHS = 2
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
    rarely = st.sampled_from([False, False, False, True])

    def __init__(self) -> None:
        super().__init__()
        self.keyspace.clear()
        self.seen: Mapping[str, Any] = {}
        self.contract = Contract(self.limit)
        self.deliveries: dict[str, Delivery] = {}
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
        lock, execution_key, is_kept = TRIGGERS[task_id]
        owner = self.new_name("owner")
        text = f"{owner} {generation}".encode() if is_kept else b""
        delivery = Delivery(owner, task_id, lock, execution_key, copy, previous, generation, text)
        self.deliveries[owner] = delivery
        how = {"on_held": on_held, "has_grace": has_grace}
        answer = self.enter(delivery, **how)
        if twice:
            assert same(self.enter(delivery, **how), answer)
        if isinstance(answer, Ended):
            self.told.append(delivery)
        if isinstance(answer, Held) and on_held != "ask":
            self.messages[task_id].append((self.new_name("copy"), copy, generation))
        return Handle(delivery, answer.token) if isinstance(answer, Acquired) else multiple()

    @rule(targets=(handles, leases), task_id=st.sampled_from(sorted(TRIGGERS)), has_grace=st.booleans())
    def deliver_newest(self, task_id, has_grace):
        return self.deliver(task_id, 0, "wait", has_grace, twice=False)

    @rule(targets=(handles, leases), handle=handles, on_held=POLICIES, has_grace=st.booleans())
    def ask_again(self, handle, on_held, has_grace):
        """The reply to the first request was lost, and much has happened since."""
        answer = self.enter(handle.delivery, on_held=on_held, has_grace=has_grace)
        is_new = isinstance(answer, Acquired) and answer.token != handle.token
        return Handle(handle.delivery, answer.token) if is_new else multiple()

    @rule(handle=handles)
    def renew(self, handle):
        with self.acting(handle.delivery.owner, is_quiet=bool(self.contract.renew(handle.delivery))):
            answers = self.store.renew([(self.lease(handle), self.record(handle.delivery), LONG)])
        assert answers == [Renewal(self.contract.renew(handle.delivery), stop_by="")]

    @rule(handle=handles, outcome=st.sampled_from([Outcome.SUCCEEDED, Outcome.FAILED]), holds=rarely, twice=twice)
    def finish(self, handle, outcome, holds, twice):
        for _ in range(1 + twice):
            self.finish_once(handle, outcome, holds=holds)

    @rule(handle=handles)
    def retry(self, handle):
        """The body sends the message of the next generation; its run is given back after that, or never."""
        delivery = handle.delivery
        self.messages[delivery.task_id].append((delivery.copy, delivery.previous, delivery.generation + 1))

    @rule(handle=consumes(handles), has_retried=st.booleans(), again=st.booleans(), holds=rarely, twice=twice)
    def abandon(self, handle, has_retried, again, holds, twice):
        """The run ends without an outcome. Its retry is the broker's, any other message may stay in the store."""
        again = again and not has_retried
        for _ in range(1 + twice):
            self.abandon_once(handle.delivery, has_retried=has_retried, again=again, holds=holds)
        if has_retried:
            self.retry(handle)

    @rule(handle=leases, twice=twice)
    def notice_death(self, handle, twice):
        """The worker's main process finds that the process of a run has died, which may have given back before."""
        for _ in range(1 + twice):
            self.abandon_once(handle.delivery, again=True, died=True)

    @rule(
        handle=leases,
        really=rarely,
        outcome=st.sampled_from([Outcome.FAILED, Outcome.REVOKED]),
        releases=st.booleans(),
        error=st.sampled_from([None, b"an error"]),
        twice=twice,
    )
    def conclude(self, handle, really, outcome, releases, error, twice):
        if not really:
            return
        delivery = handle.delivery
        for _ in range(1 + twice):
            is_concluded = self.contract.conclude(delivery, outcome.value, releases=releases, error=error)
            encoded = None if error is None else Encoded("", "", error)
            with self.acting(delivery.owner, is_quiet=not is_concluded and not releases):
                answer = self.store.conclude(
                    delivery.owner, self.record(delivery), outcome, reason="[]", keep=LONG, release=releases, error=encoded
                )
            assert (answer == Finished([])) == is_concluded

    @rule(number=st.integers(0, 9), is_done=st.booleans())
    def settle(self, number, is_done):
        if self.told:
            delivery = self.told[-1 - number % len(self.told)]
            before = copy_of(self.contract.triggers.get(delivery.task_id))
            is_its = self.contract.settle(delivery, is_done=is_done)
            is_quiet = not is_its or (is_done and before == self.contract.triggers[delivery.task_id])
            with self.acting(delivery.owner, is_quiet=is_quiet):
                self.store.settle([(self.record(delivery), delivery.owner, is_done)])

    @rule(number=st.integers(0, 9), is_late=st.booleans(), times=st.sampled_from([1, 1, 1, 3]))
    def rescue(self, number, is_late, times):
        """Sweepers look, and publish what they are handed out, which may come in any order, or never.

        When it is late, whoever has ended the trigger had all the time it takes to send what follows.
        """
        overdue = sorted(task_id for task_id in TRIGGERS if self.member(task_id) in self.due())
        task_ids = overdue if overdue and number < 7 else sorted(TRIGGERS)
        task_id = task_ids[number % len(task_ids)]
        trigger = self.contract.triggers.get(task_id)
        if is_late and trigger and trigger.outcome:
            with self.acting(""):
                self.keyspace.client.hset(self.trigger_name(task_id), "ended_ms", 1)
            self.contract.age(task_id)
        for _ in range(times):
            self.rescue_once(task_id)

    @rule(handle=leases)
    def let_pass(self, handle):
        """The time for which a place was held after its end is over."""
        delivery = handle.delivery
        place = held_place(delivery.owner)
        if place in self.contract.lock(delivery.lock).owners:
            with self.acting(delivery.owner):
                self.keyspace.expire(self.lease_name(delivery.lock), self.execution_name(delivery), place)
            self.contract.let_pass(delivery.lock, delivery.owner)

    @rule(handle=leases)
    def expire(self, handle):
        delivery = handle.delivery
        with self.acting(delivery.owner):
            self.keyspace.expire(self.lease_name(delivery.lock), self.execution_name(delivery), delivery.owner)
        self.contract.expire(delivery)

    @rule(handle=consumes(handles))
    def crash(self, handle):
        """Nobody knows of the run any more, but the store."""

    @rule(task_id=st.sampled_from(sorted(TRIGGERS)))
    def lapse(self, task_id):
        """An outcome is kept no longer: that of an execution, or of a trigger that is settled; it outlives every lease."""
        if self.contract.executions.get("key invoice", Execution()).outcome:
            with self.acting(""):
                self.keyspace.client.delete(self.store.keys.execution("billing", "invoice"))
            self.contract.lapse("key invoice")
            self.completed.discard("key invoice")
        trigger = self.contract.triggers.get(task_id)
        live = {self.deliveries[owner.removesuffix(" ended")].task_id for name in LOCKS for owner in self.live(name, self.seen)}
        if trigger and trigger.is_settled and not trigger.is_due and task_id not in live:
            with self.acting(""):
                self.keyspace.client.delete(self.trigger_name(task_id))
            self.contract.forget(task_id)
            self.completed.discard(f"task {task_id}")
            self.recorded = {delivery for delivery in self.recorded if delivery.task_id != task_id}

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
        """An index of what is due goes with its last member."""
        assert [name for name, (_, expires_at) in self.seen.items() if expires_at == -1 and name != self.due_name()] == []

    @invariant()
    def one_run_at_a_time_works_on_an_execution(self):
        owners = [owner for name in LOCKS for owner in self.live(name, self.seen) if owner in self.deliveries]
        executions = [self.deliveries[owner].execution for owner in owners]
        assert len(executions) == len(set(executions))

    @invariant()
    def what_nobody_else_would_bring_again_is_in_custody(self):
        for task_id in TRIGGERS:
            record, _ = self.seen.get(self.trigger_name(task_id), ({}, 0))
            is_due = self.member(task_id) in self.due()
            if "settled" not in record:
                assert is_due == ("message" in record)
            else:
                assert not is_due
                assert "message" not in record or record["outcome"] == "dead-lettered"

    @invariant()
    def each_trigger_is_as_the_contract_says(self):
        for task_id in TRIGGERS:
            record, _ = self.seen.get(self.trigger_name(task_id), ({}, 0))
            trigger = self.contract.triggers.get(task_id)
            found = {
                "outcome": record.get("outcome"),
                "message": record.get("message"),
                "settled": "settled" in record,
                "due": self.member(task_id) in self.due(),
                "handouts": int(record.get("handouts", 0)),
                "died": int(record.get("died", 0)),
                "left_by": record.get("left_by"),
            }
            assert not trigger or found == {
                "outcome": trigger.outcome,
                "message": None if trigger.message is None else trigger.message.decode(),
                "settled": trigger.is_settled,
                "due": trigger.is_due,
                "handouts": trigger.handouts,
                "died": trigger.died,
                "left_by": trigger.left_by,
            }

    def enter(self, delivery: Delivery, *, on_held: str, has_grace: bool) -> Any:
        is_newer = self.contract.is_newer(delivery)
        how = {"on_held": on_held, "has_grace": has_grace, "first_to_go": self.first_to_go(delivery.lock)}
        expected = self.contract.enter(delivery, **how, max_deaths=MAX_DEATHS)
        claim = Claim(
            self.record(delivery), delivery.owner, "worker", f"run of {delivery.owner}", self.limit, LONG, LONG, on_held
        )
        claim = claim._replace(copy=delivery.copy, previous=delivery.previous, generation=delivery.generation)
        claim = claim._replace(grace=LONG if has_grace else 0.0, message=delivery.message, max_deliveries=MAX_DEATHS)
        is_quiet = expected[0] == "surplus" or (expected[0] == "held" and on_held == "ask" and not has_grace and not is_newer)
        with self.acting(delivery.owner, is_quiet=is_quiet):
            answer = self.store.enter(claim)
        match answer:
            case Held():
                assert ("held", answer.what) == expected
            case Ended():
                assert ("ended", answer.outcome.value, answer.value.body, answer.settled) == expected
            case Surplus():
                assert ("surplus", answer.why) == expected
            case Acquired(token, run_id, attempt, []):
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
            case _:
                raise AssertionError(f"expected {expected}, got {answer}")
        return answer

    def finish_once(self, handle: Handle, outcome: Outcome, *, holds: bool) -> None:
        delivery = handle.delivery
        # What has ended is only ended again because its reply was lost, and so in the same way.
        outcome = self.outcomes.setdefault(delivery, outcome)
        is_recorded = delivery in self.recorded
        body = b"" if outcome is Outcome.FAILED else delivery.owner.encode()
        trigger = self.contract.triggers.get(delivery.task_id)
        is_over = bool(trigger and trigger.outcome)
        counts = self.contract.finish(delivery, handle.token, outcome.value, body, holds=holds)
        with self.acting(delivery.owner, is_quiet=not counts or is_recorded or is_over):
            answer = self.store.finish(
                self.lease(handle),
                self.record(delivery),
                outcome,
                Encoded("", "", body),
                reason="[]",
                keep=LONG,
                hold=LONG if holds else 0.0,
            )
        assert (answer == Finished([])) == counts
        if counts and not is_recorded and not is_over:
            self.recorded.add(delivery)
            self.told.append(delivery)
            if outcome is Outcome.SUCCEEDED or delivery.execution_key is None:
                self.completed.add(delivery.execution)

    def abandon_once(
        self, delivery: Delivery, *, has_retried: bool = False, again: bool, died: bool = False, holds: bool = False
    ) -> None:
        generation = delivery.generation + 1 if has_retried else None
        with self.acting(delivery.owner):
            calls = self.store.abandon(
                delivery.owner,
                self.record(delivery),
                generation=generation,
                hold=LONG if holds else 0.0,
                again=LONG if again else None,
                died=died,
            )
        assert calls == []
        self.contract.abandon(delivery, generation, again=again, died=died, holds=holds)

    def rescue_once(self, task_id: str) -> None:
        """Look at a trigger as a sweeper would that finds it overdue."""
        lock, execution_key, _ = TRIGGERS[task_id]
        record = Record(LOCKS[lock], task_id, execution_key)
        is_due = self.member(task_id) in self.due()
        if is_due:
            with self.acting(""):
                self.keyspace.client.zadd(self.due_name(), {self.member(task_id): 1})
        with self.acting(""):
            self.keyspace.client.delete(self.store.keys.turn(["billing"]))
            found = self.store.due(["billing"], limit=100, interval=LONG)
        assert is_due == (record._replace(lock_key=LockKey("billing", "")) in found)
        expected = self.contract.rescue(task_id, f"key {execution_key}" if execution_key else f"task {task_id}")
        with self.acting("", is_quiet=not is_due and not expected):
            handout = self.store.rescue(record)
        assert handout == (Handout(*expected) if expected else None)
        if self.member(task_id) in self.due():
            assert self.due()[self.member(task_id)] > time.time() * 1000
        if handout:
            generation = int(handout.message.split()[1])
            self.messages[task_id].append((self.new_name("copy"), handout.copy, generation))

    @contextmanager
    def acting(self, owner: str, *, is_quiet: bool = False):
        """See to it that nobody but the owner is touched, and nothing at all by a quiet step."""
        before = self.seen
        yield
        self.seen = self.keyspace.snapshot()
        assert not is_quiet or self.seen == before
        for name in LOCKS:
            own = (owner, held_place(owner))
            others = {item for item in self.live(name, before).items() if item[0] not in own}
            assert self.live(name, self.seen).items() >= others

    def live(self, lock: str, seen: Mapping[str, Any]) -> dict[str, float]:
        """Return who holds the lock key. No lease of these ends by itself, so the clock need not be the server's."""
        lines, _ = seen.get(self.lease_name(lock), ({}, 0))
        ends = {owner: float(line.partition("\n")[0]) for owner, line in lines.items()}
        return {owner: end for owner, end in ends.items() if end > time.time() * 1000}

    def first_to_go(self, lock: str) -> str | None:
        """The trigger whose place in the lease is free before the others."""
        live = self.live(lock, self.seen)
        if not live:
            return None
        first = min(live, key=lambda owner: live[owner])
        return self.deliveries[first.removesuffix(" ended")].task_id

    def lease(self, handle: Handle) -> Lease:
        key, owner = LOCKS[handle.delivery.lock], handle.delivery.owner
        return Lease(key, owner=owner, token=handle.token, limit=self.limit, ttl=LONG, max_hold=LONG, requested_at=0.0)

    def lease_name(self, lock: str) -> str:
        return self.store.keys.lock(LOCKS[lock]).lease

    def due_name(self) -> str:
        return self.store.keys.due("billing")

    def due(self) -> dict[str, float]:
        """What the sweeper is to look at, and when."""
        members, _ = self.seen.get(self.due_name(), ([], 0))
        return dict(members)

    def member(self, task_id: str) -> str:
        execution_key = TRIGGERS[task_id][1]
        return f"{task_id}\n{execution_key}" if execution_key else task_id

    def trigger_name(self, task_id: str) -> str:
        return self.store.keys.trigger("billing", task_id)

    def record(self, delivery: Delivery) -> Record:
        return Record(LOCKS[delivery.lock], delivery.task_id, delivery.execution_key)

    def execution_name(self, delivery: Delivery) -> str:
        return self.store.names(self.record(delivery))["execution"]

    def new_name(self, kind: str) -> str:
        self.names += 1
        return f"{kind}{self.names}"


def copy_of(trigger: Trigger | None) -> Trigger | None:
    return None if trigger is None else replace(trigger)


def same(one: Any, other: Any) -> bool:
    """Whether two answers are one answer. Those who are told to wait may be given a later turn, and time goes on."""
    if isinstance(one, Held) and isinstance(other, Held):
        return (one.what, one.task_id, one.worker) == (other.what, other.task_id, other.worker)
    return one == other


@pytest.fixture
def store_and_keyspace(valkey):
    url = f"{valkey.url}/{DATABASE}"
    keyspace = Keyspace.at(url)
    store = Store(Watch(connect(url, {}), keyspace.client, keyspace.now_ms), KeySpace("sf"))
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
            phases=[Phase.generate, Phase.shrink],  # no line of Python explains a failure of the scripts
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            derandomize=True,
            database=None,
            print_blob=True,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
