"""Several messages of one trigger, and several triggers of one key: what each is to the others."""

from __future__ import annotations

import threading

import pytest
from celery import Task, signals as celery_signals, states

from celery_singleflight import Contended, ExecutionKeyReused, StoreUnavailable, headers as header, signals
from celery_singleflight.claims import Record
from celery_singleflight.keys import LockKey


def elsewhere(act, *arguments):
    """Do it as another process would: in a thread, with a context of its own."""
    errors = []

    def run():
        try:
            act(*arguments)
        except BaseException as error:  # noqa: BLE001, the test is to fail with it
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert errors == []


def waiting(place):
    """The one message that waits."""
    (message,) = place.messages()
    return message


# A body that had waited, and retries


def test_a_retry_of_a_body_that_had_waited_does_not_go_on_with_that_wait(place):
    def work(self, key):
        if self.request.retries == 0:
            raise self.retry(countdown=0)
        return "done"

    task = place.task(work, bind=True)
    result = task.apply_async(("k",), wait_timeout=60)
    message = waiting(place)
    for _ in range(2):
        with place.held_elsewhere(task.name, "k"):
            place.deliver(message)
        message = waiting(place)
    message.headers[header.LINGER] = 0.1  # as one has that was called ahead of its turn
    assert set(header.OF_A_WAIT) <= set(message.headers)

    place.deliver(message)

    retry = waiting(place)
    assert retry.headers["retries"] == 1
    assert set(header.OF_A_WAIT).isdisjoint(retry.headers)
    assert retry.headers["singleflight_wait_timeout"] == 60
    place.deliver(retry)
    assert result.get(timeout=1) == "done"


def test_the_wait_of_a_retry_begins_anew(place):
    """What the trigger had waited before its first attempt does not count against its second."""

    def work(self, key):
        if self.request.retries == 0:
            raise self.retry(countdown=0)
        return "done"

    task = place.task(work, bind=True, wait_timeout=30)
    result = task.delay("k")
    with place.held_elsewhere(task.name, "k"):
        place.deliver(waiting(place))
    message = waiting(place)
    message.headers[header.FIRST_SEEN] = str(int(message.headers[header.FIRST_SEEN]) - 29_000)
    place.deliver(message)
    with place.held_elsewhere(task.name, "k"):
        place.deliver(waiting(place))
    message = waiting(place)
    message.headers[header.FIRST_SEEN] = str(int(message.headers[header.FIRST_SEEN]) - 29_000)
    with place.held_elsewhere(task.name, "k"):
        place.deliver(message)
    assert result.state == states.RETRY
    place.deliver_all()
    assert result.get(timeout=1) == "done"


def test_a_message_that_was_retried_runs_no_more_when_it_is_delivered_again(place):
    """The worker died after the retry was published, and before its message was acknowledged."""
    runs = []

    def work(self, key):
        runs.append(self.request.retries)
        if self.request.retries == 0:
            raise self.retry(countdown=0)
        return "done"

    task = place.task(work, bind=True)
    result = task.delay("k")
    first = waiting(place)
    place.deliver(first)
    retry = waiting(place)

    place.deliver(first)

    assert (runs, place.messages()) == ([0], [])
    place.deliver(retry)
    place.deliver(first)
    assert runs == [0, 1]
    assert result.get(timeout=1) == "done"


# Retries that return


def retry_and_return(self, key):
    if self.request.retries == 0:
        self.retry(countdown=0, throw=False)
        return "first"
    return "second"


def retry_and_eat_it(self, key):
    if self.request.retries == 0:
        try:
            self.retry(countdown=0)
        except Exception:  # noqa: BLE001, as people write it
            return "first"
    return "second"


def retry_and_fail(self, key):
    if self.request.retries == 0:
        self.retry(countdown=0, throw=False)
        raise ValueError("after its retry")
    return "second"


@pytest.mark.parametrize("body", [retry_and_return, retry_and_eat_it, retry_and_fail])
@pytest.mark.parametrize("options", [{}, {"idempotent_on": "once:{key}"}], ids=["task id", "execution key"])
def test_a_body_that_ends_after_it_has_published_its_retry_runs_again(place, body, options):
    runs = []

    def work(self, key):
        runs.append(self.request.retries)
        return body(self, key)

    task = place.task(work, bind=True, **options)
    result = task.delay("k")
    place.deliver(waiting(place))
    place.deliver_all()
    assert runs == [0, 1]
    assert result.state == states.SUCCESS


# Under "skip"


@pytest.mark.parametrize("policy", ["skip", "reject"])
def test_a_retry_is_not_turned_away_by_its_own_first_attempt(place, policy):
    """It arrives while the attempt that has published it still holds the key; its execution key is another."""
    runs = []

    def work(self, key, part):
        runs.append(part)
        if part == 1:
            retry = self.retry(args=(key, 2), countdown=0, throw=False)
            elsewhere(place.deliver, waiting(place))
            raise retry
        return part

    task = place.task(
        work,
        bind=True,
        lock_on=("key",),
        idempotent_on="{key}:{part}",
        contention_policy=policy,
        skip_result="skipped",
        max_hold=60,
    )
    result = task.delay("k", 1)
    place.deliver(waiting(place))
    place.deliver_all()
    assert runs == [1, 2]
    assert result.get(timeout=1) == 2


@pytest.mark.parametrize("policy", ["skip", "reject"])
@pytest.mark.parametrize("options", [{}, {"idempotent_on": "once:{key}"}], ids=["task id", "execution key"])
def test_a_retry_that_meets_another_triggers_lease_waits(place, policy, options):
    runs = []

    def work(self, key):
        runs.append(self.request.retries)
        if self.request.retries == 0:
            raise self.retry(countdown=0)
        return "done"

    task = place.task(work, bind=True, contention_policy=policy, max_hold=60, **options)
    result = task.delay("k")
    place.deliver(waiting(place))
    with place.held_elsewhere(task.name, "k"):
        place.deliver(waiting(place))
        assert result.state == states.RETRY
        assert isinstance(result.result, Contended)
    place.deliver_all()
    assert (runs, result.get(timeout=1)) == ([0, 1], "done")


class Killed(BaseException):
    pass


@pytest.mark.parametrize("policy", ["skip", "reject"])
@pytest.mark.parametrize("options", [{}, {"idempotent_on": "once:{key}"}], ids=["task id", "execution key"])
@pytest.mark.parametrize("is_told", [True, False], ids=["given back", "left behind"])
def test_a_trigger_whose_run_was_killed_and_meets_another_triggers_lease_waits(place, monkeypatch, policy, options, is_told):
    runs = []

    def work(self, key):
        runs.append(key)
        if len(runs) == 1:
            raise Killed
        return "done"

    task = place.task(work, bind=True, contention_policy=policy, max_hold=60, **options)
    result = task.delay("k")
    message = waiting(place)
    with monkeypatch.context() as patch:
        if not is_told:
            patch.setattr("celery_singleflight.run._give_back", lambda *_, **__: None)
        with pytest.raises(Killed):
            place.deliver(message)
    if not is_told:  # its lease runs out
        names = place.store.names(Record(place.lock_key(task.name, "k"), result.id, "once:k" if options else None))
        place.client.delete(names["lease"])
        place.client.hset(names["execution"], "until_ms", "1")

    with place.held_elsewhere(task.name, "k"):
        place.deliver(message)
        assert result.state == states.RETRY
    place.deliver_all()
    assert (len(runs), result.get(timeout=1)) == (2, "done")


def test_a_newcomer_is_skipped(place):
    """Else the tests above would pass without a policy."""

    def work(key):
        return key

    task = place.task(work, contention_policy="skip", max_hold=60)
    result = task.delay("k")
    with place.held_elsewhere(task.name, "k"):
        place.deliver(waiting(place))
    assert (result.get(timeout=1), place.messages()) == (None, [])


# Two tasks and one execution key


@pytest.fixture
def two(place):
    runs = []

    def charge(invoice):
        runs.append("charge")
        if invoice == 13:
            raise ValueError("no")
        return "charged"

    def refund(invoice):
        runs.append("refund")
        return "refunded"

    shared = {"lock_name": "billing", "lock_on": ("invoice",)}
    derived = {**shared, "idempotent_on": "invoice:{invoice}"}
    return {
        "runs": runs,
        "derived": (place.task(charge, **derived), place.task(refund, **derived)),
        "per call": (
            place.task(charge, name="shop.charge_per_call", **shared),
            place.task(refund, name="shop.refund_per_call", **shared),
        ),
    }


@pytest.mark.parametrize("how", ["derived", "per call"])
def test_the_result_of_one_task_is_never_anothers(place, two, how):
    charge, refund = two[how]
    options = {"execution_key": "invoice:7"} if how == "per call" else {}
    charged = charge.apply_async((7,), **options)
    place.deliver_all()
    refunded = refund.apply_async((7,), **options)
    place.deliver_all()

    assert charged.get(timeout=1) == "charged"
    assert refunded.state == states.FAILURE
    assert type(refunded.result) is ExecutionKeyReused
    assert (refunded.result.execution_key, refunded.result.task) == ("invoice:7", charge.name)
    assert two["runs"] == ["charge"]
    again = charge.apply_async((7,), **options)
    place.deliver_all()
    assert again.get(timeout=1) == "charged", "the owner of the key still gets its result"
    assert two["runs"] == ["charge"]
    assert place.holders(LockKey.of("billing", [7])) == []


def test_a_trigger_that_was_refused_its_key_has_failed_for_good(place, two, monkeypatch):
    """Also when its message comes again: before Celery has sent what follows it fails alike, afterwards it needs no answer."""
    monkeypatch.setattr("celery_singleflight.trigger.GRACE", 0.0)
    charge, refund = two["derived"]
    told = []

    def note(sender, task_id, outcome, ran, **_):
        told.append((task_id, outcome, ran))

    signals.trigger_ended.connect(note)
    charge.delay(7)
    place.deliver_all()
    told.clear()
    refunded = refund.delay(7)
    (message,) = place.messages()
    place.deliver(message)
    assert type(refunded.result) is ExecutionKeyReused
    heartbeat = refund._binding.coordination.heartbeat
    heartbeat._settling._settled.clear()  # its process dies before it has told the store that all is sent
    refunded.forget()
    place.deliver(message)
    assert type(refunded.result) is ExecutionKeyReused
    assert told == [(refunded.id, "failed", False)] * 2
    heartbeat.flush()
    place.deliver(message)
    assert (two["runs"], len(told)) == (["charge"], 2)


def test_a_direct_call_and_an_eager_one_are_told_so_too(place, two):
    charge, refund = two["derived"]
    assert charge(7) == "charged"
    with pytest.raises(ExecutionKeyReused, match=r"execution key invoice:7 belongs to the task .*charge, which shares"):
        refund(7)
    with pytest.raises(ExecutionKeyReused):
        refund.apply((7,), throw=True)
    assert refund(8) == "refunded"


def test_what_a_direct_call_has_done_is_no_answer_to_a_trigger_of_another_task_nor_the_other_way(place, two):
    charge, refund = two["derived"]
    assert charge(7) == "charged"
    refunded = refund.delay(7)
    charged = charge.delay(8)
    place.deliver_all()
    assert type(refunded.result) is ExecutionKeyReused
    assert charged.get(timeout=1) == "charged"
    with pytest.raises(ExecutionKeyReused):
        refund(8)
    assert two["runs"] == ["charge", "charge"]


def test_a_key_whose_execution_failed_may_be_anothers(place, two):
    charge, refund = two["derived"]
    charge.delay(13)
    place.deliver_all()
    refunded = refund.delay(13)
    place.deliver_all()
    assert refunded.get(timeout=1) == "refunded"


# Replies that are lost


@pytest.mark.parametrize("options", [{}, {"idempotent_on": "once:{key}"}], ids=["task id", "execution key"])
@pytest.mark.parametrize("policy", ["requeue", "fail", "run"])
def test_a_lease_whose_grant_was_never_heard_is_given_back(place, monkeypatch, options, policy):
    runs = []

    def work(key):
        runs.append(key)
        return "done"

    task = place.task(work, store_error_policy=policy, **options)
    store, enter = type(place.store), type(place.store).enter
    asked = []

    def unheard(self, claim):
        asked.append(enter(self, claim))
        raise StoreUnavailable("no reply")

    result = task.delay("k")
    message = waiting(place)
    with monkeypatch.context() as patch:
        patch.setattr(store, "enter", unheard)
        place.deliver(message)
    assert len(asked) == 1
    assert asked[0].token, "it was granted"

    assert place.holders(place.lock_key(task.name, "k")) == []
    assert place.client.zcard(place.store.keys.due(task.name)) == 0, "the broker has its message, no sweeper may publish it"
    if policy == "requeue":
        place.deliver(waiting(place))
        assert result.get(timeout=1) == "done"
    else:
        assert result.state == (states.SUCCESS if policy == "run" else states.FAILURE)
    assert runs == ([] if policy == "fail" else ["k"])


# A message that is delivered again while its end is passed on


@pytest.mark.parametrize("options", [{}, {"idempotent_on": "once:{key}"}], ids=["task id", "execution key"])
@pytest.mark.parametrize("ends", ["succeeds", "fails"])
def test_a_delivery_that_comes_while_another_sends_the_callbacks_sends_none(place, options, ends):
    runs, sent = [], []

    def work(key):
        runs.append(key)
        if ends == "fails":
            raise ValueError("no")
        return "done"

    def after(what):
        pass

    task, after = place.task(work, **options), place.task(after, base=Task)
    result = task.apply_async(("k",), link=after.si("link"), link_error=after.si("errback"))
    message = waiting(place)

    def deliver_again(sender, **_):
        if sender == after.name:
            sent.append(sender)
            if len(sent) == 1:
                elsewhere(place.deliver, message)

    celery_signals.before_task_publish.connect(deliver_again)
    try:
        place.deliver(message)
        task._binding.coordination.heartbeat.flush()
        place.deliver_all()
    finally:
        celery_signals.before_task_publish.disconnect(deliver_again)
    assert (len(runs), len(sent)) == (1, 1)
    assert result.state == (states.SUCCESS if ends == "succeeds" else states.FAILURE)
