"""What works on a plain task works on a protected one: each case is observed on both, and the observations are equal."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import celery
import pytest
import twin_app
from celery import chain, chord, group
from celery.canvas import StampingVisitor
from nodes import redis_settings, wait_until


@pytest.fixture(scope="module")
def twins(start_shared, valkey):
    settings = redis_settings(
        valkey.url,
        result_extended=True,
        task_serializer="json",
        accept_content=["json", "yaml", "msgpack", "pickle"],
        task_queues={"q-twins": {}, "q-other": {}},
        task_default_queue="q-twins",
    )
    place = start_shared(settings, "-E", app_module=twin_app, workers=1, concurrency=3)
    yield place
    # Results that nobody has waited for to their end: collected later, they would look for a server that is gone.
    for pending in place.app.backend._pending_results:
        pending.clear()


class Twin:
    """One of the two kinds, as a case sees it."""

    def __init__(self, place, kind):
        self.place = place
        self.kind = kind
        self.key = f"{kind}-{uuid4().hex}"

    def __getattr__(self, name):
        return self.place.app.tasks[f"{self.kind}.{name}"]

    def hooks(self, result):
        return [row["what"] for row in self.place.ledger.read(result.id)]


def end_of(result, timeout=20):
    """How a result ended, as its caller sees it."""
    try:
        value = result.get(timeout=timeout)
    except Exception as error:  # noqa: BLE001, it is what is observed
        value = f"{type(error).__name__}: {error}".replace("plain", "kind").replace("protected", "kind")
    return {"state": result.state, "value": value}


def hooks_of(t, result, count):
    wait_until(lambda: len(t.hooks(result)) >= count, what=f"{count} hooks")
    return t.hooks(result)


class Stamp(StampingVisitor):
    def on_signature(self, sig, **headers):
        return {"mark": "blue"}


def returns(t):
    values = [None, 0, "", False, 1.5, "text", [1, [2]], {"a": {"b": None}}]
    return [t.echo.delay(value).get(timeout=20) for value in values]


def keyword_arguments(t):
    return t.echo.apply_async((1,), {"x": 2}).get(timeout=20)


def failure(t):
    result = t.fail.delay()
    return end_of(result), hooks_of(t, result, 3)


def expected_failure(t):
    return end_of(t.fail_as_expected.delay())


def success_hooks(t):
    result = t.add.delay(1, 2)
    return end_of(result), hooks_of(t, result, 3)


def retry_hooks(t):
    result = t.retry_twice.delay()
    return end_of(result), sorted(hooks_of(t, result, 7))


def retries_run_out(t):
    return end_of(t.retry_for_ever.delay())


def autoretry(t):
    return end_of(t.autoretry.delay())


def retry_with_arguments(t):
    return end_of(t.retry_with_arguments.delay("first"))


def retries_and_goes_on(t, name, callbacks):
    task, note = t.place.app.tasks[f"{t.kind}.{name}"], t.place.app.tasks["plain.note"]
    result = task.apply_async((t.key,), link=note.si(f"{t.key}-link"))
    wait_until(lambda: len([row for row in t.hooks(result) if "after_return" in row]) == 2, what="both runs have ended")
    wait_until(lambda: len(t.place.ledger.read(f"{t.key}-link")) == callbacks, what="the callbacks have run")
    # Not what `result` has heard: the first of the two outcomes may have come first.
    return t.place.app.AsyncResult(result.id).state, sorted(t.hooks(result)), len(t.place.ledger.read(t.key))


def retry_that_returns(t):
    return retries_and_goes_on(t, "retry_and_return", 2)


def retry_that_is_eaten(t):
    return retries_and_goes_on(t, "retry_and_eat_it", 2)


def retry_that_fails(t):
    # Which of its two outcomes a plain task stores last is a matter of luck.
    return retries_and_goes_on(t, "retry_and_fail", 1)[1:]


def ignored(t):
    result = t.ignore.delay()
    wait_until(lambda: t.hooks(result))
    t.add.delay(0).get(timeout=20)
    return result.state


def rejected(t):
    return end_of(t.reject.delay())


def result_that_does_not_serialise(t):
    end = end_of(t.not_serialisable.delay())
    return end["state"], end["value"].partition(":")[0]


def ignored_result(t):
    result = t.forget_result.delay(t.key)
    wait_until(lambda: t.place.ledger.read(t.key))
    return result.state


def ignored_result_per_call(t):
    result = t.add.apply_async((1,), ignore_result=True)
    t.add.delay(1).get(timeout=20)
    return result.state


def link_and_link_error(t):
    note = t.place.app.tasks[f"{t.kind}.forget_result"]
    t.add.apply_async((1, 2), link=note.si(f"{t.key}-ok"), link_error=note.si(f"{t.key}-bad")).get(timeout=20)
    t.fail.apply_async((), link=note.si(f"{t.key}-ok2"), link_error=note.si(f"{t.key}-bad2"))
    wait_until(lambda: t.place.ledger.read(f"{t.key}-ok") and t.place.ledger.read(f"{t.key}-bad2"))
    return [len(t.place.ledger.read(f"{t.key}-{name}")) for name in ("ok", "bad", "ok2", "bad2")]


def chains(t):
    return end_of(chain(t.add.s(1, 1), t.add.s(2), t.add.s(3)).delay())


def failing_chain(t):
    result = chain(t.add.s(1, 1), t.fail.s(), t.add.s(3)).delay()
    return end_of(result.parent)["value"], result.parent.parent.get(timeout=20)


def groups(t):
    return group(t.add.s(n, 1) for n in range(5)).delay().get(timeout=20)


def chords(t):
    return end_of(chord([t.add.s(n, 1) for n in range(5)])(t.total.s()))


def chord_of_chords(t):
    inner = chord([t.add.s(1, 1), t.add.s(2, 2)], t.total.s())
    return end_of(chord([inner, t.add.s(3, 3)])(t.total.s()))


def failing_chord(t):
    result = chord([t.add.s(1, 1), t.fail.s()])(t.total.s())
    return wait_until(result.ready), result.state


def chain_with_group_in_the_middle(t):
    return end_of(chain(t.add.s(1, 1), group(t.add.s(1), t.add.s(2)), t.total.s()).delay())


def maps_and_chunks(t):
    mapped = t.total.map([[1, 2], [3]]).delay().get(timeout=20)
    star = t.add.starmap([(1, 2), (3, 4)]).delay().get(timeout=20)
    chunks = t.add.chunks([(n, n) for n in range(6)], 2).apply_async().get(timeout=20)
    return mapped, star, chunks


def replaced_by_a_chain(t):
    return end_of(t.replace_by_chain.delay())


def replaced_by_itself(t):
    return end_of(t.replace_by_itself.delay(2))


def replaced_in_a_chain(t):
    return end_of(chain(t.replace_by_chain.si(), t.add.s(10)).delay())


def countdown(t):
    begun = datetime.now(UTC)
    value = t.add.apply_async((1, 2), countdown=1).get(timeout=20)
    return value, (datetime.now(UTC) - begun).total_seconds() >= 1


def eta(t):
    return t.add.apply_async((1, 2), eta=datetime.now(UTC) + timedelta(seconds=0.5)).get(timeout=20)


def expired(t):
    return end_of(t.add.apply_async((1, 2), countdown=1, expires=0.1))


def revoked_before_it_runs(t):
    result = t.add.apply_async((1, 2), countdown=1.5)
    result.revoke()
    return end_of(result)


def terminated(t):
    result = t.sleep_at_gate.delay(t.key)
    wait_until(lambda: t.place.ledger.read(t.key))
    result.revoke(terminate=True, signal="SIGKILL")
    return end_of(result)


def soft_time_limit(t):
    return end_of(t.soft_limited.delay(True)), end_of(t.soft_limited.delay(False))


def hard_time_limit(t):
    return end_of(t.hard_limited.delay())


def request(t):
    return t.request_facts.apply_async(
        shadow="shade", priority=3, headers={"custom": "kept"}, time_limit=30, soft_time_limit=20
    ).get(timeout=20)


def request_in_a_group(t):
    return group(t.request_facts.si(), t.request_facts.si()).delay().get(timeout=20)[1]["group_index"]


def stamps(t):
    signature = t.request_facts.s()
    signature.stamp(Stamp())
    return signature.apply_async().get(timeout=20)["stamps"]


def another_queue(t):
    return t.request_facts.apply_async(queue="q-other").get(timeout=20)["routing_key"]


def serializers(t):
    return [
        t.echo.apply_async(({"a": [1, None]},), serializer=name).get(timeout=20)
        for name in ("json", "yaml", "msgpack", "pickle")
    ]


def compression(t):
    return t.echo.apply_async(("x" * 5000,), compression="zlib").get(timeout=20)["args"][0] == "x" * 5000


def given_task_id(t):
    task_id = uuid4().hex
    return t.add.apply_async((1, 2), task_id=task_id).get(timeout=20), t.place.app.AsyncResult(task_id).get(timeout=5)


def given_task_id_as_an_object(t):
    first, last = uuid4(), uuid4()
    t.add.apply_async((1, 2), task_id=first)
    chain(t.add.si(1, 1).set(task_id=uuid4()), t.add.s(1).set(task_id=last)).delay()
    # Looked for rather than waited for: Celery does not know the id of the message that tells it by the one that was given.
    found = [t.place.app.AsyncResult(str(task_id)) for task_id in (first, last)]
    wait_until(lambda: all(result.ready() for result in found), what="both have ended")
    return [(result.state, result.result) for result in found]


def given_task_id_as_an_object_eagerly(t):
    task_id = uuid4()
    results = [t.add.apply((1, 2), task_id=task_id), t.retry_twice.apply(task_id=uuid4()), t.fail.apply(task_id=uuid4())]
    return results[0].id == task_id, [(result.state, repr(result.result)) for result in results]


def extended_result(t):
    result = t.add.apply_async((1,), {"b": 2})
    result.get(timeout=20)
    return result.args, result.kwargs, result.name.partition(".")[2], result.queue, result.retries


def own_state(t):
    return end_of(t.announce_state.delay())


def call_of_another_task(t):
    return end_of(t.call_another.delay(4))


def a_task_that_publishes(t):
    result = t.spawn.delay()
    child = t.place.app.AsyncResult(result.get(timeout=20))
    return child.get(timeout=20), [r.id for r in result.children] == [child.id]


def pydantic_models(t):
    model = twin_app.Order(number=1, items=["a"])
    # Celery sends models since 5.7; before, the caller dumps them.
    sent = model if celery.VERSION >= (5, 7) else model.model_dump()
    return t.order.delay(sent).get(timeout=20), t.order.delay({"number": 5}).get(timeout=20), t.order(sent)


def direct_call(t):
    return t.add(1, b=2)


def eager_apply(t):
    results = [t.add.apply((1, 2)), t.retry_twice.apply(), t.fail.apply(), t.autoretry.apply()]
    return [(result.state, repr(result.result)) for result in results]


def wrong_arguments(t):
    with pytest.raises(TypeError):
        t.add.delay()
    return end_of(t.place.app.send_task(t.add.name, ()))["state"]


CASES = [
    value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__code__", None)
    and value.__code__.co_varnames[:1] == ("t",)
    and value.__code__.co_argcount == 1
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_protected_task_does_what_a_plain_one_does(twins, case):
    plain, protected = case(Twin(twins, "plain")), case(Twin(twins, "protected"))
    assert protected == plain
