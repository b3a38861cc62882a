"""What is refused or handled when a task is bound, so that no task is unprotected without anybody noticing."""

from __future__ import annotations

import functools
import logging
import math

import celery
import pytest
from celery import Task, states
from celery.worker.request import Request
from pydantic import BaseModel

from celery_singleflight import Contended, ExecutionUncertain, OptionError, SingleflightTask, current_lease


def echo(x):
    return x


def echo_first(x, y=0):
    return x


class InOwnContext(Task):
    """As Flask's documentation has it: its `__call__` skips whatever comes after it."""

    abstract = True
    calls = 0

    def __call__(self, *args, **kwargs):
        type(self).calls += 1
        return self.run(*args, **kwargs)


class Polite(Task):
    abstract = True
    calls = 0

    def __call__(self, *args, **kwargs):
        type(self).calls += 1
        return super().__call__(*args, **kwargs)


class Rude(SingleflightTask):
    """Its own `__call__` skips ours."""

    abstract = True
    calls = 0

    def __call__(self, *args, **kwargs):
        type(self).calls += 1
        return self.run(*args, **kwargs)


class BeforeOurs(InOwnContext, SingleflightTask):
    abstract = True


class AfterOurs(SingleflightTask, InOwnContext):
    abstract = True


class PoliteBeforeOurs(Polite, SingleflightTask):
    abstract = True


class PoliteAfterOurs(SingleflightTask, Polite):
    abstract = True


class BothAround(Polite, InOwnContext, SingleflightTask):
    abstract = True


BASES = [(BeforeOurs, 1), (AfterOurs, 1), (PoliteBeforeOurs, 1), (PoliteAfterOurs, 1), (BothAround, 2), (Rude, 1)]


@pytest.mark.parametrize(("base", "calls"), BASES)
def test_a_base_with_its_own_call_is_protected_and_each_call_runs_once(place, base, calls):
    bodies = []

    def work(x):
        bodies.append(current_lease().lock_key)
        return x

    task = place.task(work, base=base, contention_policy="reject")
    with place.held_elsewhere(task.name, 1):
        with pytest.raises(Contended):
            task(1)
        with pytest.raises(Contended):
            task.apply((1,), throw=True)
        task.delay(1)
        place.deliver_all()
    assert bodies == []

    type(task).calls = 0
    assert task(1) == 1
    assert type(task).calls == calls
    assert task.apply((2,)).get() == 2
    result = task.delay(3)
    place.deliver_all()
    assert result.get(timeout=1) == 3
    assert type(task).calls == 3 * calls
    assert bodies == [place.lock_key(task.name, x).text for x in (1, 2, 3)]


class Registered(InOwnContext, SingleflightTask):
    """A task of its own, and the base of another one."""

    name = "traps.registered"
    contention_policy = "reject"

    def run(self, x):
        return x


class RegisteredToo(Registered):
    name = "traps.registered_too"

    def __call__(self, *args, **kwargs):
        return self.run(*args, **kwargs)


def test_a_task_made_from_a_task_is_protected_whatever_its_call_skips(place):
    place.app.register_task(Registered())
    task = place.app.register_task(RegisteredToo())
    place.app.finalize()
    with place.held_elsewhere(task.name, 1), pytest.raises(Contended):
        task(1)


async def coroutine(x):
    return x


async def async_generator(x):
    yield x


def generator(x):
    yield x


@functools.wraps(coroutine)
def wrapped_coroutine(*args):
    return coroutine(*args)


@pytest.mark.parametrize(
    ("function", "kind"),
    [(coroutine, "async"), (async_generator, "async"), (generator, "a generator"), (wrapped_coroutine, "async")],
)
def test_a_body_that_runs_after_its_call_is_refused(place, function, kind):
    with pytest.raises(OptionError) as caught:
        place.task(function, name="shop.work")
    assert str(caught.value) == (
        f"task shop.work: its function is {kind}, so its body would run after the lease is given back; "
        "expected a plain function"
    )


def test_a_class_based_coroutine_is_refused_too(place):
    class Work(SingleflightTask):
        name = "shop.work"

        async def run(self, x):
            return x

    with pytest.raises(OptionError, match="its function is async"):
        place.app.register_task(Work())


@pytest.mark.parametrize("name", ["lease", "execution", "step", "checkpoint"])
def test_a_class_that_takes_a_name_of_ours_is_refused(place, name):
    class Base(SingleflightTask):
        abstract = True

    setattr(Base, name, lambda self: None)

    with pytest.raises(OptionError) as caught:
        place.task(echo, base=Base, name="shop.work")
    assert str(caught.value) == (
        "task shop.work: test_a_class_that_takes_a_name_of_ours_is_refused.<locals>.Base sets "
        f"{name}, which SingleflightTask needs; rename it"
    )


@pytest.mark.parametrize("name", ["lease", "execution", "step", "checkpoint"])
def test_an_option_that_takes_a_name_of_ours_is_refused(place, name):
    def work(x):
        return x

    with pytest.raises(OptionError) as caught:
        place.task(work, name="shop.work", **{name: 5})
    assert str(caught.value) == f"task shop.work: work sets {name}, which SingleflightTask needs; rename it"


class Rate:
    def __repr__(self):
        return "Rate('10/s')"


def test_a_rate_over_all_workers_in_celerys_own_option_is_refused(place):
    with pytest.raises(OptionError) as caught:
        place.task(echo, name="shop.work", rate_limit=Rate())
    assert str(caught.value) == (
        "task shop.work: rate_limit is Celery's own limit for one worker, expected a text such as '10/s', got Rate('10/s'); "
        "a rate over all workers belongs in rates, which is planned and not in this version"
    )


@pytest.mark.parametrize("rate", ["10/s", 10, 0.5, None])
def test_celerys_own_rate_limit_is_let_be(place, rate):
    assert place.task(echo, name="shop.work", rate_limit=rate).rate_limit == rate


# The user's own signature, whatever Celery makes of the function


class Invoice(BaseModel):
    id: int
    day: str = "today"


def key_of(task, *args, **kwargs):
    return task._binding.lock_key("shop.work", args, kwargs)


@pytest.mark.parametrize(
    "options", [{}, {"autoretry_for": (OSError,)}, {"pydantic": True}, {"pydantic": True, "autoretry_for": (OSError,)}], ids=str
)
@pytest.mark.parametrize("bind", [False, True])
def test_the_signature_is_the_users_own(place, bind, options):
    def work(tenant: int, day: str = "today"):
        return current_lease().lock_key

    def bound_work(self, tenant: int, day: str = "today"):
        return current_lease().lock_key

    task = place.task(bound_work if bind else work, name="shop.work", bind=bind, **options)
    assert task._binding.arguments.names == ("tenant", "day")
    assert task(1) == task(tenant=1, day="today") == task.apply((1,)).get() == key_of(task, 1, "today").text


def test_a_class_based_task_has_the_signature_of_its_run(place):
    class Work(SingleflightTask):
        name = "shop.work"

        def run(self, tenant, day="today"):
            return self.lease.lock_key

    task = place.app.register_task(Work())
    assert task(1) == key_of(task, 1, "today").text


def test_a_decorated_function_has_its_own_signature(place):
    def decorator(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    @decorator
    def work(tenant, day="today"):
        return current_lease().lock_key

    task = place.task(work, name="shop.work")
    assert task(1) == key_of(task, 1, "today").text


@pytest.mark.parametrize("bind", [False, True])
def test_a_pydantic_task_has_one_key_for_a_model_and_what_celery_sends_for_it(place, bind):
    seen = []

    def work(invoice: Invoice, amount: int = 3) -> Invoice:
        seen.append(current_lease().lock_key)
        return invoice

    def bound_work(self, invoice: Invoice, amount: int = 3) -> Invoice:
        return work(invoice, amount)

    task = place.task(bound_work if bind else work, name="shop.work", bind=bind, pydantic=True)
    sent = {"id": 7, "day": "today"}
    task(sent)
    task(Invoice(id=7))
    task.apply((sent,)).get()
    assert place.result_of(task.delay(sent)) == sent
    if celery.VERSION >= (5, 7):  # which sends a model by itself
        assert place.result_of(task.delay(Invoice(id=7))) == sent
    assert len(seen) >= 4
    assert set(seen) == {key_of(task, sent, 3).text}


def test_a_pydantic_task_takes_a_template_into_its_model(place):
    def work(invoice: Invoice) -> str:
        return current_lease().lock_key

    task = place.task(work, name="shop.work", pydantic=True, lock_on="invoice:{invoice.id}")
    assert task(Invoice(id=7)) == task({"id": 7}) == 'shop.work["invoice:7"]'


# The worker's request


class OwnRequest(Request):
    """Somebody's own request class."""

    made = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        OwnRequest.made += 1


@pytest.mark.parametrize("request_class", [OwnRequest, f"{__name__}:OwnRequest"], ids=["class", "name"])
def test_a_request_class_of_ones_own_is_kept_and_gets_an_owner_token(place, request_class):
    class Base(SingleflightTask):
        abstract = True
        Request = request_class

    def work(self, x):
        return self.request.properties["singleflight_owner"]

    task = place.task(work, base=Base, bind=True)
    assert issubclass(task.Request, OwnRequest)
    assert task.Request.__name__ == "OwnRequest"

    OwnRequest.made = 0
    result = task.delay(1)
    (message,) = place.messages()
    owner = place.deliver(message)
    assert OwnRequest.made == 1
    assert len(owner) == 32
    assert result.get(timeout=1) == owner


def test_each_delivery_of_one_message_has_an_owner_token_of_its_own(place):
    def work(self, x):
        return x

    task = place.task(work, bind=True)
    task.delay(1)
    (message,) = place.messages()
    made = [
        task.Request(message, app=place.app, hostname="w1@test", task=task, eventer=None, connection_errors=())
        for _ in range(2)
    ]
    owners = {request.request_dict["properties"]["singleflight_owner"] for request in made}
    assert len(owners) == 2
    assert "singleflight_owner" not in message.properties


def test_a_publisher_does_not_import_the_worker(place):
    class Base(SingleflightTask):
        abstract = True
        Request = "no.such.module:Request"

    place.task(echo, base=Base).delay(1)
    assert len(place.messages()) == 1


# The base class for the whole app


def test_an_app_may_have_it_for_the_base_of_all_its_tasks(make_place):
    place = make_place(singleflight_contention_policy="reject")
    place.app.task_cls = SingleflightTask

    @place.app.task(name="shop.work", shared=False)
    def work(x):
        return current_lease().lock_key

    place.app.finalize()
    assert work(1) == place.lock_key("shop.work", 1).text
    with place.held_elsewhere("shop.work", 1), pytest.raises(Contended):
        work(1)

    celerys_own = [task for name, task in place.app.tasks.items() if name.startswith("celery.")]
    assert len(celerys_own) >= 8
    assert [task.name for task in celerys_own if getattr(task, "_binding", None) is not None] == []
    assert place.app.tasks["celery.accumulate"](1, 2) == (1, 2)


@pytest.mark.parametrize(
    ("setting", "attribute", "value"),
    [
        ("task_serializer", "serializer", "yaml"),
        ("task_track_started", "track_started", True),
        ("task_ignore_result", "ignore_result", True),
        ("task_default_rate_limit", "rate_limit", "7/s"),
    ],
)
def test_a_protected_task_has_the_settings_of_its_own_app(make_place, setting, attribute, value):
    make_place().task(echo)
    place = make_place(**{setting: value})
    assert getattr(place.task(echo), attribute) == getattr(place.task(echo, base=Task, name="shop.plain"), attribute) == value


def test_binding_a_task_leaves_the_base_class_alone(place):
    before = dict(vars(SingleflightTask))
    place.task(echo)
    assert dict(vars(SingleflightTask)) == before
    assert SingleflightTask._binding is None


# The user's hooks


def test_on_retry_is_for_retries_of_ones_own(place):
    told = []

    class Base(SingleflightTask):
        abstract = True

        def on_retry(self, exc, task_id, args, kwargs, einfo):
            told.append((type(exc).__name__, current_lease()))

    def work(self, x):
        if self.request.retries == 0:
            raise self.retry(exc=OSError("once"), countdown=0)
        return x

    task = place.task(work, base=Base, bind=True)
    with place.held_elsewhere(task.name, 1):
        result = task.delay(1)
        place.deliver(place.messages()[0])
        assert result.state == states.RETRY
        assert isinstance(result.result, Contended)
        assert told == []
    place.deliver_all()
    assert result.get(timeout=1) == 1
    assert told == [("OSError", None)]


def test_a_decorated_on_retry_is_for_retries_of_ones_own_too(place):
    told = []

    def decorator(method):
        @functools.wraps(method)
        def wrapper(*args):
            return method(*args)

        return wrapper

    class Base(SingleflightTask):
        abstract = True

        @decorator
        def on_retry(self, exc, task_id, args, kwargs, einfo):
            told.append(type(exc).__name__)

    task = place.task(echo, base=Base, name="shop.work")
    with place.held_elsewhere("shop.work", 1):
        task.delay(1)
        place.deliver(place.messages()[0])
    assert told == []


def test_before_start_runs_once_and_under_the_lease(place):
    started = []

    class Base(SingleflightTask):
        abstract = True

        def before_start(self, task_id, args, kwargs):
            started.append((task_id, list(args), kwargs, self.lease.lock_key, self.request.id))

    task = place.task(echo_first, base=Base, name="shop.work", lock_on=("x",))
    with place.held_elsewhere("shop.work", 1):
        result = task.delay(1, y=2)
        place.deliver(place.messages()[0])
        assert started == []
    place.deliver_all()
    assert result.get(timeout=1) == 1
    assert started == [(result.id, [1], {"y": 2}, "shop.work[1]", result.id)]

    eager = task.apply((3,))
    assert started[1:] == [(eager.id, [3], {}, "shop.work[3]", eager.id)]


def started_classes():
    """Tasks that are each other's bases, new each time because binding changes them, with what each starts; and what has."""

    log = []

    def note(what):
        log.append((what, current_lease().lock_key))

    class Started(SingleflightTask):
        name = "traps.started"

        def before_start(self, task_id, args, kwargs):
            note("outer")

        def run(self, x):
            return x

    class WithSuper(Started):
        name = "traps.with_super"

        def before_start(self, task_id, args, kwargs):
            super().before_start(task_id, args, kwargs)
            note("inner")

    class WithSuperTwice(WithSuper):
        name = "traps.with_super_twice"

        def before_start(self, task_id, args, kwargs):
            super().before_start(task_id, args, kwargs)
            note("innermost")

    class WithoutSuper(Started):
        name = "traps.without_super"

        def before_start(self, task_id, args, kwargs):
            note("own")

    class Inherited(Started):
        name = "traps.inherited"

    class WithSuperOfInherited(Inherited):
        name = "traps.with_super_of_inherited"

        def before_start(self, task_id, args, kwargs):
            super().before_start(task_id, args, kwargs)
            note("inner")

    class Mixed:
        def before_start(self, task_id, args, kwargs):
            note("mixed in")
            super().before_start(task_id, args, kwargs)

    class WithMixed(Mixed, Started):
        name = "traps.with_mixed"

    expected = {
        Started: ["outer"],
        WithSuper: ["outer", "inner"],
        WithSuperTwice: ["outer", "inner", "innermost"],
        WithoutSuper: ["own"],
        Inherited: ["outer"],
        WithSuperOfInherited: ["outer", "inner"],
        WithMixed: ["mixed in", "outer"],
    }
    return expected, log


@pytest.mark.parametrize("order", [list, lambda classes: [*reversed(classes)]], ids=["bases first", "bases last"])
def test_a_before_start_of_a_derived_task_runs_once_with_those_it_calls_and_under_its_own_lease(place, order):
    expected, started = started_classes()
    for cls in order(list(expected)):
        place.app.register_task(cls())
    place.app.finalize()
    for cls, whats in expected.items():
        started.clear()
        result = place.app.tasks[cls.name].delay(1)
        with place.held_elsewhere(cls.name, 1):
            place.deliver(place.messages()[0])
        assert started == [], cls
        place.deliver_all()
        assert result.get(timeout=1) == 1
        place.app.tasks[cls.name].apply((2,)).get()
        assert started == [(what, place.lock_key(cls.name, x).text) for x in (1, 2) for what in whats], cls


def test_a_before_start_is_inherited_by_a_task_made_of_a_function(place):
    expected, started = started_classes()
    base = next(iter(expected))
    place.app.register_task(base())
    place.task(echo, base=base, name="shop.work").delay(1)
    place.deliver_all()
    assert started == [("outer", place.lock_key("shop.work", 1).text)]


def test_a_derived_task_may_do_without_the_before_start_of_its_base(place):
    expected, started = started_classes()
    base = next(iter(expected))

    class Without(base):
        name = "traps.without"
        before_start = Task.before_start

    place.app.register_task(base())
    task = place.app.register_task(Without())
    place.app.finalize()
    assert task.apply((1,)).get() == 1
    assert started == []


def test_a_before_start_that_fails_fails_the_task_and_gives_the_lease_back(place):
    class Base(SingleflightTask):
        abstract = True

        def before_start(self, task_id, args, kwargs):
            raise OSError("not today")

    task = place.task(echo, base=Base, name="shop.work")
    result = task.delay(1)
    place.deliver_all()
    assert result.state == states.FAILURE
    with pytest.raises(OSError, match="not today"):
        result.get(timeout=1)
    assert place.holders(place.lock_key("shop.work", 1)) == []


def test_what_a_task_throws_is_its_own_and_contention(place):
    task = place.task(echo, name="shop.work", throws=(KeyError,))
    assert task.throws == (KeyError, Contended, ExecutionUncertain)
    assert place.task(echo, name="shop.other").throws == (Contended, ExecutionUncertain)
    assert Contended not in SingleflightTask.throws


def test_a_rejected_trigger_is_no_error_in_the_log(place, caplog):
    task = place.task(echo, name="shop.work", contention_policy="reject")
    with place.held_elsewhere("shop.work", 1), caplog.at_level(logging.INFO):
        result = task.delay(1)
        place.deliver_all()
    assert result.state == states.FAILURE
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []


# The warnings


@pytest.fixture
def warnings(make_place, caplog):
    """Bind a task and return what was warned about."""

    def bind(function, **options):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "celery_singleflight"):
            make_place().task(function, name="shop.work", **options)
        return [record.getMessage() for record in caplog.records]

    return bind


def pay(account, idempotency_key, now=None):
    """Its key is another one in every call."""


PER_CALL = (
    "task shop.work: its lock key holds {}, which differs in every call, so it protects nothing; name what matters in lock_on"
)


def test_a_key_that_differs_in_every_call_is_warned_about(warnings):
    assert warnings(pay) == [PER_CALL.format("idempotency_key, now")]
    assert warnings(pay, lock_on=("account", "now")) == [PER_CALL.format("now")]


@pytest.mark.parametrize("lock_on", [("account",), (), "{account}", lambda now: now])
def test_a_key_of_what_matters_is_not_warned_about(warnings, lock_on):
    assert warnings(pay, lock_on=lock_on) == []


SKIP = (
    "task shop.work: contention_policy is 'skip' and nothing bounds a run: one that hangs makes every later one skip for ever; "
    "set max_hold, or a time_limit"
)


def test_a_skip_that_nothing_bounds_is_warned_about(warnings):
    assert warnings(echo, contention_policy="skip") == [SKIP]
    assert warnings(echo, contention_policy="skip", max_hold=math.inf) == [SKIP]
    assert warnings(echo, contention_policy="skip", max_hold=math.inf, time_limit=60) == [SKIP]


@pytest.mark.parametrize("bound", [{"time_limit": 60}, {"max_hold": 60}, {"contention_policy": "requeue"}], ids=str)
def test_a_skip_with_a_bound_is_not_warned_about(warnings, bound):
    assert warnings(echo, **{"contention_policy": "skip", **bound}) == []


def test_a_reconciler_that_nobody_asks_is_warned_about(warnings):
    assert warnings(echo, reconciler=echo) == [
        "task shop.work: it has a reconciler, and uncertain_policy is 'rerun', under which nobody asks it; set 'hold'"
    ]


def test_a_reconciler_that_is_asked_or_is_that_of_all_tasks_is_not_warned_about(warnings, make_place, caplog):
    assert warnings(echo, reconciler=echo, uncertain_policy="hold") == []
    with caplog.at_level(logging.WARNING, "celery_singleflight"):
        make_place(singleflight_reconciler=echo).task(echo, name="shop.other")
    assert caplog.records == []


@pytest.fixture
def limited(make_place):
    """An app whose tasks all have a time limit, in Celery's own setting."""
    return make_place(task_time_limit=60)


@pytest.fixture(params=[False, True], ids=["as Celery has it", "as Celery before 5.7 has it"])
def bound_for(request, limited):
    """The bound on the age of a lease, in a direct call and in one with a request, which are one."""

    def find(**options):
        def work(x):
            return current_lease().max_hold

        task = limited.task(work, **options)
        if request.param and "time_limit" not in options:
            type(task).time_limit = None
        found = {task(1), task.apply((1,)).get(), limited.result_of(task.delay(1))}
        assert len(found) == 1
        return found.pop()

    return find


def test_the_apps_own_time_limit_bounds_a_lease(bound_for):
    assert bound_for() == 70


def test_a_tasks_own_bound_comes_before_the_apps_time_limit(bound_for):
    assert bound_for(time_limit=20) == 30
    assert bound_for(name="shop.held", max_hold=5) == 5


def test_a_calls_own_time_limit_comes_before_the_apps(limited):
    def work(x):
        return current_lease().max_hold

    assert limited.result_of(limited.task(work).apply_async((1,), time_limit=5)) == 15


def test_without_any_time_limit_nothing_bounds_a_lease(place):
    def work(x):
        return current_lease().max_hold

    assert place.task(work)(1) == math.inf


def test_a_skip_that_the_apps_time_limit_bounds_is_not_warned_about(limited, place, caplog):
    task = limited.task(echo, name="shop.work", contention_policy="skip")
    task._binding.warn(None)  # all that Celery knows of the limit before 5.7
    assert caplog.records == []
    place.task(echo, name="shop.other", contention_policy="skip")
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["task shop.other"]
