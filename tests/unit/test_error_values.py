"""Errors are API: one tree, messages made from facts, and they survive the ways that results travel."""

from __future__ import annotations

import copy
import inspect
import json
import pickle

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured
from kombu.serialization import dumps, loads

import celery_singleflight
from celery_singleflight import errors, step_errors
from celery_singleflight.errors import (
    ConfigurationError,
    Contended,
    DeadLettered,
    ExecutionKeyReused,
    ExecutionUncertain,
    FencingUnavailable,
    LeaseLost,
    LockKeyError,
    MaxHoldExceeded,
    NestedLeaseLost,
    OptionError,
    PayloadMismatch,
    Replaced,
    ResolutionError,
    ResolvedFailed,
    ResultUnavailable,
    ScriptError,
    SingleflightError,
    Skipped,
    StaleToken,
    StoreUnavailable,
    WaitTimeout,
)
from celery_singleflight.step_errors import PayloadChanged, StepError, StepResultUnavailable, StepUncertain

CONTENTION = ("billing[7]", "t1", "w1@host", 1.23, 28.77)
MESSAGES = [
    (ConfigurationError("no store"), "no store"),
    (OptionError("no such option"), "no such option"),
    (LockKeyError("no key"), "no key"),
    (ScriptError("a strange answer"), "a strange answer"),
    (StoreUnavailable("away"), "away"),
    (
        FencingUnavailable("billing[7]"),
        "billing[7] has a lock_limit above 1: its holders would fence each other out, so there is no fencing token to ask for",
    ),
    (
        ResultUnavailable("invoice:42", "too odd"),
        "execution invoice:42 has ended, but its result is not stored: too odd",
    ),
    (Contended(*CONTENTION), "billing[7] is held by t1 on w1@host for 1.2 s, its lease has 28.8 s left"),
    (Contended("billing[7]"), "billing[7] is held by unknown on unknown for 0.0 s, its lease has 0.0 s left"),
    (Skipped(*CONTENTION), "billing[7] was skipped: held by t1 on w1@host for 1.2 s, its lease has 28.8 s left"),
    (
        WaitTimeout(*CONTENTION),
        "billing[7] was still contended at the end of wait_timeout: held by t1 on w1@host for 1.2 s, its lease has 28.8 s left",
    ),
    (
        DeadLettered("billing[7]", "t1", "w1@host", 5),
        "t1 on billing[7] is dead-lettered: 5 of its runs died with their process, the last on w1@host",
    ),
    (
        DeadLettered("billing[7]", "t1", "", 5),
        "t1 on billing[7] is dead-lettered: 5 of its runs died with their process, the last on unknown",
    ),
    (NestedLeaseLost("billing[7]"), "a lease that the body held on billing[7] is lost"),
    (NestedLeaseLost("billing[7]", "taken"), "a lease that the body held on billing[7] is lost: taken"),
    (MaxHoldExceeded("billing[7]", 12.5), "the run held billing[7] for longer than its max_hold, 12.5 s"),
    (
        ExecutionKeyReused("invoice:42", "shop.pay"),
        "execution key invoice:42 belongs to the task shop.pay, which shares the lock name",
    ),
    (
        PayloadMismatch("invoice:42", "shop.pay"),
        "execution key invoice:42 was recorded by shop.pay with another payload",
    ),
    (PayloadMismatch("invoice:42", ""), "execution key invoice:42 was recorded by its task with another payload"),
    (
        ExecutionUncertain("invoice:42", "t1", "w1@host", 1.23),
        (
            "nobody knows what the run of t1 on w1@host, which was found dead 1.2 s ago, has done of execution invoice:42: "
            "find out, and say so with resolve"
        ),
    ),
    (
        ExecutionUncertain("invoice:42"),
        (
            "nobody knows what a run on unknown, which was found dead 0.0 s ago, has done of execution invoice:42: find out, "
            "and say so with resolve"
        ),
    ),
    (ResolutionError("no resolution"), "no resolution"),
    (ResolvedFailed("invoice:42"), "execution invoice:42 was found to have failed"),
    (ResolvedFailed("invoice:42", "no money"), "execution invoice:42 was found to have failed: no money"),
    (StaleToken("billing[7]", 5, 7), "billing[7] has seen fencing token 7, so a write with 5 comes too late"),
    (StepError("no step"), "no step"),
    (
        StepResultUnavailable("invoice:42", "charge", "too odd"),
        (
            "step charge of execution invoice:42 is done and will not be done again, but its result is not stored: too odd; "
            "have it return what can be stored, or give it its result with resolve_step"
        ),
    ),
    (
        StepUncertain("invoice:42", "charge", 2, "w1@host", 1.23),
        (
            "step charge of execution invoice:42 was begun by w1@host 1.2 s ago and not recorded: find out whether it "
            "happened, and say so with resolve_step"
        ),
    ),
    (
        StepUncertain("invoice:42", "charge"),
        (
            "step charge of execution invoice:42 was begun by unknown 0.0 s ago and not recorded: find out whether it "
            "happened, and say so with resolve_step"
        ),
    ),
    (
        PayloadChanged("invoice:42", "step charge"),
        (
            "step charge of execution invoice:42 was reached with other arguments of the task: give other arguments an "
            "execution key of their own, give a checkpoint or cursor an on_change, or begin anew after forget_steps"
        ),
    ),
    (LeaseLost("billing[7]"), "the lease on billing[7] is lost"),
    (LeaseLost("billing[7]", "taken"), "the lease on billing[7] is lost: taken"),
    (Replaced("billing[7]", "t2"), "the run on billing[7] is replaced by t2"),
    (Replaced("billing[7]"), "the run on billing[7] is replaced by unknown"),
]
EVERY = [
    value
    for module in (errors, step_errors)
    for value in vars(module).values()
    if inspect.isclass(value) and value.__module__ == module.__name__
]


def facts(error):
    return (type(error), error.args, str(error), vars(error))


@pytest.mark.parametrize(("error", "message"), MESSAGES, ids=lambda value: type(value).__name__)
def test_the_message_is_made_from_the_facts(error, message):
    assert str(error) == message


@pytest.mark.parametrize(("error", "message"), MESSAGES, ids=lambda value: type(value).__name__)
def test_an_error_survives_pickling_and_copying(error, message):
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert facts(pickle.loads(pickle.dumps(error, protocol))) == facts(error)
    assert facts(copy.copy(error)) == facts(error)


@pytest.mark.parametrize(("error", "message"), MESSAGES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("serializer", ["json", "pickle", "yaml"])
def test_an_error_survives_the_result_backends(error, message, serializer):
    app = Celery(set_as_current=False, backend="cache+memory://")
    app.conf.update(result_serializer=serializer, accept_content=["json", serializer])
    prepared = app.backend.prepare_exception(error, serializer)
    content_type, encoding, body = dumps(prepared, serializer=serializer)
    back = app.backend.exception_to_python(loads(body, content_type, encoding, accept={content_type}))
    assert facts(back) == facts(error)
    if serializer == "json":
        assert json.loads(body)["exc_module"] == type(error).__module__


def test_every_error_is_public_has_a_docstring_and_a_message_here():
    names = {*errors.__all__, *step_errors.__all__}
    assert {cls.__name__ for cls in EVERY} == names
    assert names <= set(celery_singleflight.__all__)
    assert {cls for cls in EVERY if cls is not SingleflightError} == {type(error) for error, _ in MESSAGES}
    assert all(inspect.getdoc(cls) for cls in EVERY)
    assert all(getattr(celery_singleflight, cls.__name__) is cls for cls in EVERY)


def test_there_is_one_tree_and_two_errors_that_no_except_exception_eats():
    assert [cls for cls in EVERY if not issubclass(cls, SingleflightError)] == [LeaseLost, Replaced]
    for cls in (LeaseLost, Replaced):
        assert not issubclass(cls, Exception)
        assert issubclass(cls, BaseException)


def test_a_wrong_configuration_is_caught_as_celerys_own():
    assert issubclass(ConfigurationError, ImproperlyConfigured)
    assert issubclass(OptionError, ConfigurationError)
    assert issubclass(OptionError, ValueError)


@pytest.mark.parametrize("cls", [Skipped, WaitTimeout])
def test_a_skip_and_a_wait_that_ended_are_contention(cls):
    error = cls(*CONTENTION)
    assert isinstance(error, Contended)
    assert (error.lock_key, error.task_id, error.worker, error.age, error.remaining) == CONTENTION
