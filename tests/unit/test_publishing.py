"""What a message carries when it is published, whoever publishes it, and what the worker makes of it."""

from __future__ import annotations

import copy
from datetime import UTC, date, datetime

import pytest
from celery import Task, chain, chord, group
from celery.beat import ScheduleEntry, Scheduler
from celery.schedules import schedule

from celery_singleflight import LockKeyError, OptionError, current_execution, current_lease
from celery_singleflight.binding import arguments_digest

KEY, DIGEST = "singleflight_key", "singleflight_digest"


def settle(tenant_id, day="today"):
    return current_lease().lock_key


def seen(self, *args, **kwargs):
    return {"key": self.lease.lock_key, "execution": self.execution.key}


@pytest.fixture
def task(place):
    """Its lock key is made of one of its arguments."""
    return place.task(settle, lock_on=("tenant_id",))


@pytest.fixture
def only_message(place):
    def take():
        (message,) = place.messages()
        return message

    return take


def is_stamped(message, name, *scope):
    args, kwargs, _ = message.decode()
    text = ",".join(str(part) for part in scope)
    return (message.headers[KEY], message.headers[DIGEST]) == (f"{name}[{text}]", arguments_digest(args, kwargs))


def test_a_call_carries_its_lock_key_and_the_digest_of_its_arguments(task, only_message):
    task.delay(7)
    assert is_stamped(only_message(), task.name, 7)
    task.apply_async(kwargs={"day": "x", "tenant_id": 8})
    assert is_stamped(only_message(), task.name, 8)


def test_a_call_by_name_carries_them_too(place, task, only_message):
    place.app.send_task(task.name, (7,), {"day": "x"})
    assert is_stamped(only_message(), task.name, 7)


def test_a_task_without_protection_carries_nothing(place, only_message):
    place.task(settle, base=Task, name="shop.plain").delay(1)
    headers = only_message().headers
    assert [name for name in headers if name.startswith("singleflight")] == []


def test_a_task_of_another_service_leaves_its_key_to_its_worker(place, only_message):
    place.app.send_task("elsewhere.settle", (7,), contention_policy="skip", wait_timeout=5)
    headers = only_message().headers
    assert KEY not in headers
    assert (headers["singleflight_contention_policy"], headers["singleflight_wait_timeout"]) == ("skip", 5)


@pytest.mark.parametrize(
    "canvas",
    [
        lambda s: group(s(1), s(2), s(3)),
        lambda s: group(s(1), chain(s(2), s(9)), s(3)),
        lambda s: chord([s(1), s(2), s(3)], s(9)),
        lambda s: group(s(1), s(2), chord([s(3)], s(9))),
    ],
    ids=["group", "chain in a group", "chord", "chord in a group"],
)
def test_each_member_of_a_canvas_carries_its_own_key(place, task, canvas):
    canvas(task.si).apply_async()
    messages = [message for message in place.messages() if message.headers["task"] == task.name]
    assert len(messages) == 3
    assert all(is_stamped(message, task.name, n) for n, message in zip((1, 2, 3), messages, strict=True))


def test_the_next_of_a_chain_and_a_callback_are_stamped_when_they_are_sent(place, task):
    (task.si(1) | task.si(2)).apply_async(link=task.si(3), link_error=task.si(9))
    (first,) = place.messages()
    assert is_stamped(first, task.name, 1)
    place.deliver(first)
    (second,) = place.messages()
    assert is_stamped(second, task.name, 2)
    place.deliver(second)
    (third,) = place.messages()
    assert is_stamped(third, task.name, 3)


def test_a_retry_with_new_arguments_carries_their_key(place):
    keys = []

    def work(self, tenant_id, day="today"):
        keys.append(self.lease.lock_key)
        if self.request.retries == 0:
            raise self.retry(args=(tenant_id + 1,), countdown=0)

    task = place.task(work, bind=True, lock_on=("tenant_id",))
    task.delay(1)
    (first,) = place.messages()
    place.deliver(first)
    (retried,) = place.messages()
    assert is_stamped(retried, task.name, 2)
    place.deliver(retried)
    assert keys == [f"{task.name}[1]", f"{task.name}[2]"]


def test_beat_stamps_a_registered_task_and_one_known_by_name(place, task):
    scheduler = Scheduler(place.app, lazy=True)
    for name, options in (
        (task.name, {"wait_timeout": 5, "contention_policy": "skip"}),
        ("elsewhere.settle", {"wait_timeout": 6}),
    ):
        entry = ScheduleEntry(
            name=name,
            task=name,
            args=(7,),
            schedule=schedule(60),
            options=options,
            last_run_at=datetime.now(UTC),
            app=place.app,
        )
        scheduler.apply_async(entry, advance=False)
    ours, other = place.messages()
    assert is_stamped(ours, task.name, 7)
    assert (ours.headers["singleflight_wait_timeout"], ours.headers["singleflight_contention_policy"]) == (5, "skip")
    assert KEY not in other.headers
    assert other.headers["singleflight_wait_timeout"] == 6


OPTIONS = {"contention_policy": "skip", "wait_timeout": 5.0, "execution_key": "invoice:42"}


@pytest.mark.parametrize(
    "publish",
    [
        lambda task: task.apply_async((7,), **OPTIONS),
        lambda task: task.apply_async(args=(7,), headers={"mine": 1}, **OPTIONS),
        lambda task: task.s(7).set(**OPTIONS).delay(),
        lambda task: task.s(7).set(headers={"mine": 1}).set(**OPTIONS).apply_async(),
        lambda task: task.app.send_task(task.name, (7,), **OPTIONS),
        lambda task: group(task.s(7)).apply_async(**OPTIONS),
        lambda task: task.apply_async((7,), priority=3, expires=60, **OPTIONS),
    ],
    ids=["call", "call with headers", "signature", "signature with headers", "name", "group", "with Celery's options"],
)
def test_call_options_become_headers_and_leave_no_other_trace(task, only_message, publish):
    publish(task)
    message = only_message()
    ours = {name: value for name, value in message.headers.items() if name.startswith("singleflight")}
    assert ours == {
        KEY: f"{task.name}[7]",
        DIGEST: arguments_digest([7], {}),
        "singleflight_contention_policy": "skip",
        "singleflight_wait_timeout": 5.0,
        "singleflight_execution_key": "invoice:42",
    }
    assert [name for name in message.properties if name in OPTIONS] == []
    assert [name for name in message.headers if name in OPTIONS] == []


def test_headers_of_ones_own_are_kept(task, only_message):
    own = {"mine": 1}
    task.apply_async((7,), headers=own, wait_timeout=5)
    assert only_message().headers["mine"] == 1
    assert own == {"mine": 1}


def test_options_that_are_given_again_for_a_call_win(task, only_message):
    task.s(7).set(wait_timeout=5).apply_async(wait_timeout=6)
    assert only_message().headers["singleflight_wait_timeout"] == 6


def test_none_is_not_given(task, only_message):
    task.apply_async((7,), contention_policy=None, wait_timeout=None, execution_key=None)
    assert sorted(name for name in only_message().headers if name.startswith("singleflight")) == [DIGEST, KEY]


def test_a_stamp_of_the_users_is_no_option(task, only_message):
    signature = task.s(7)
    signature.stamp(max_hold="a stamp of mine")
    signature.apply_async()
    assert only_message().headers["stamps"] == {"max_hold": "a stamp of mine"}


def test_a_callback_with_a_wrong_option_does_not_fail_the_task_that_sends_it(place, task):
    other = place.task(seen, name="shop.seen", bind=True)
    result = task.apply_async((7,), link=other.si().set(contention_policy="skp"))
    (first,) = place.messages()
    place.deliver(first)
    assert result.state == "SUCCESS"
    (callback,) = place.messages()
    place.deliver(callback)
    failed = place.app.AsyncResult(callback.headers["id"])
    assert failed.state == "FAILURE"
    assert isinstance(failed.result, OptionError)


def test_two_apps_with_a_task_of_one_name_do_not_mix_their_keys(make_place):
    one, other = make_place(), make_place()
    first = one.task(settle, name="shop.twin", lock_on=("tenant_id",))
    second = other.task(settle, name="shop.twin", lock_on=("day",))
    first.delay(7, "monday")
    second.delay(7, "monday")
    assert [message.headers[KEY] for message in one.messages()] == ["shop.twin[7]"]
    assert [message.headers[KEY] for message in other.messages()] == ['shop.twin["monday"]']


def test_a_name_that_two_apps_have_is_left_to_the_worker_when_only_the_name_is_known(make_place):
    one, other = make_place(), make_place()
    one.task(settle, name="shop.twin", lock_on=("tenant_id",))
    other.task(settle, name="shop.twin", lock_on=("day",))
    one.app.send_task("shop.twin", (7, "monday"))
    (message,) = one.messages()
    assert KEY not in message.headers
    assert one.deliver(message) == "shop.twin[7]"


# What the worker makes of it


def test_the_worker_takes_the_key_that_fits_the_arguments(place):
    calls = []

    def key(tenant_id):
        calls.append(tenant_id)
        return tenant_id

    task = place.task(settle, lock_on=key)
    task.delay(7)
    assert calls == [7]
    (message,) = place.messages()
    assert place.deliver(message) == f"{task.name}[7]"
    assert calls == [7]


@pytest.mark.parametrize(
    "change",
    [
        {KEY: "shop.settle[8]", DIGEST: "0123456789abcdef"},
        {KEY: "shop.settle[8]", DIGEST: None},
        {KEY: "shop.settle[8]", DIGEST: 5},
        {KEY: None},
        {KEY: ""},
        {KEY: None, DIGEST: None},
    ],
    ids=str,
)
def test_the_worker_derives_a_key_that_does_not_fit_or_is_not_there(place, change):
    task = place.task(settle, name="shop.settle", lock_on=("tenant_id",))
    task.delay(7)
    (message,) = place.messages()
    message.headers.update(change)
    for name in [name for name, value in change.items() if value is None]:
        del message.headers[name]
    assert place.deliver(message) == "shop.settle[7]"


def test_two_triggers_with_one_key_are_one_however_they_were_published(place):
    task = place.task(
        settle, name="shop.settle", lock_on=("day",), contention_policy="skip", skip_result="skipped", max_hold=60
    )
    day = date(2026, 11, 29)
    task.delay(1, day)
    place.app.send_task("shop.settle", kwargs={"day": day, "tenant_id": 1})
    first, second = place.messages()
    bare = copy.copy(first)
    bare.headers = {name: value for name, value in first.headers.items() if not name.startswith("singleflight")}
    bare.headers["id"] = "of a publisher without this package"
    with place.held_elsewhere("shop.settle", day):
        assert [place.deliver(message) for message in (first, second, bare)] == ["skipped"] * 3


@pytest.mark.parametrize("error", [LookupError("not here"), LockKeyError("no"), TypeError("unfit")], ids=repr)
def test_a_key_function_that_fails_at_publish_leaves_it_to_the_worker(place, error):
    can_be_made = False

    def key(tenant_id):
        if not can_be_made:
            raise error
        return tenant_id

    task = place.task(settle, lock_on=key)
    task.delay(7)
    (message,) = place.messages()
    assert KEY not in message.headers
    can_be_made = True
    assert place.deliver(message) == f"{task.name}[7]"


def test_a_key_function_that_fails_at_the_worker_fails_the_task_and_its_body_does_not_run(place):
    bodies = []

    def work(tenant_id):
        bodies.append(tenant_id)

    def key(tenant_id):
        raise LookupError("no such tenant")

    task = place.task(work, lock_on=key)
    result = task.delay(7)
    place.deliver_all()
    assert result.state == "FAILURE"
    said, _, where = str(result.result).partition(" at ")
    assert said == f"task {task.name}, lock_on: the function failed, so the task does not run: LookupError"
    assert where.startswith("test_publishing.py:")
    assert bodies == []


def test_arguments_that_no_key_can_be_made_of_are_published_and_refused_by_the_worker(make_place):
    place = make_place(task_serializer="pickle", accept_content=["pickle", "json"])
    task = place.task(seen, bind=True, serializer="pickle")
    result = task.delay(Opaque())
    (message,) = place.messages()
    assert KEY not in message.headers
    place.deliver(message)
    assert isinstance(result.result, LockKeyError)
    assert f"an argument of type {__name__}.Opaque cannot be part of a key" in str(result.result)


class Opaque:
    pass


def test_an_execution_key_per_call_wins_over_one_made_from_the_arguments(place):
    task = place.task(seen, bind=True, idempotent_on=lambda: "made")
    task.delay()
    task.apply_async(execution_key="given")
    first, second = place.messages()
    assert place.deliver(first)["execution"] == "made"
    assert place.deliver(second)["execution"] == "given"


def test_the_execution_key_is_the_task_id_unless_there_is_another(place):
    def work():
        return current_execution().key

    task = place.task(work)
    result = task.delay()
    place.deliver_all()
    assert result.get(timeout=1) == result.id


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        ("settle:{tenant_id}:{day}", "settle:7:monday"),
        (("day",), '["monday"]'),
        (("tenant_id",), "[7]"),
        (("tenant_id", "day"), '[7,"monday"]'),
        (lambda tenant_id: tenant_id * 2, "[14]"),
        (lambda day: day, "monday"),
        (lambda day: [day], "monday"),
        (lambda day: "", '[""]'),
        (lambda tenant_id: f"[{tenant_id}]", '["[7]"]'),
        ("[{tenant_id}]", '["[7]"]'),
    ],
)
def test_an_execution_key_is_the_text_it_is_made_of_or_its_canonical_form(place, recipe, key):
    def work(tenant_id, day):
        return current_execution().key

    assert place.task(work, idempotent_on=recipe)(7, "monday") == key


def work_on(place, recipe):
    """A task that returns its execution key, and has one argument to make it of."""

    def work(v):
        return current_execution().key

    return place.task(work, name="shop.work", idempotent_on=recipe)


#: The key of each is the text of another one, where brackets and quotes are not kept apart.
ALIKE = [7, "7", "[7]", '["7"]', '["[7]"]', "", '[""]', "null", "[null]", '["null"]', "[]", "[", "]"]


@pytest.mark.parametrize("recipe", [("v",), lambda v: v, lambda v: [v]], ids=["name", "value", "list"])
def test_an_execution_key_of_one_value_never_is_that_of_another(place, recipe):
    values = [*ALIKE, [7], ["[7]"], [""], [], None, [None]] if recipe == ("v",) else ALIKE
    task = work_on(place, recipe)
    keys = [task._binding.execution_key((value,), {}) for value in values]
    assert len(set(keys)) == len(keys)


def test_an_execution_key_that_a_template_writes_never_is_that_of_another_text(place):
    task = work_on(place, "{v}")
    texts = [value for value in ALIKE if isinstance(value, str)]
    keys = [task._binding.execution_key((text,), {}) for text in texts]
    assert len(set(keys)) == len(keys)
    assert keys[:4] == ["7", '["[7]"]', r'["[\"7\"]"]', r'["[\"[7]\"]"]']


def test_one_who_is_named_like_the_key_of_another_runs_as_itself(place):
    bodies = []

    def pay(v):
        bodies.append(v)
        return repr(v)

    task = place.task(pay, idempotent_on=("v",))
    results = [task.delay(v) for v in (7, "[7]", 7, "[7]")]
    place.deliver_all()
    assert [result.get(timeout=1) for result in results] == ["7", "'[7]'"] * 2
    assert bodies == [7, "[7]"]
