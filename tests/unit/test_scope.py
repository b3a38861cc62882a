"""How keys are made from the arguments of a task: by names, by a template, by a function."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from types import SimpleNamespace
from uuid import UUID

import pytest
from hypothesis import given, strategies as st
from pydantic import BaseModel

from celery_singleflight import LockKeyError, OptionError
from celery_singleflight.keys import LockKey
from celery_singleflight.scope import Arguments, compile_scope


def pay(account, amount=10, *, currency="EUR"):
    """The task that most of these make keys for."""


def key_of(function, recipe, /, *args, **kwargs):
    arguments = Arguments(inspect.signature(function))
    return compile_scope("lock_on", recipe, arguments)(arguments.bind(args, kwargs))


def refusal(function, recipe):
    arguments = Arguments(inspect.signature(function))
    with pytest.raises(OptionError) as caught:
        compile_scope("lock_on", recipe, arguments)
    return str(caught.value)


def failure(function, recipe, /, *args, **kwargs):
    with pytest.raises(LockKeyError) as caught:
        key_of(function, recipe, *args, **kwargs)
    return str(caught.value)


# All arguments


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((7,), {}),
        ((7, 10), {}),
        ((), {"account": 7}),
        ((), {"amount": 10, "account": 7}),
        ((7,), {"currency": "EUR", "amount": 10}),
    ],
)
def test_however_a_call_is_written_its_key_is_one(args, kwargs):
    assert key_of(pay, None, *args, **kwargs) == [7, 10, "EUR"]


def test_rest_arguments_are_part_of_the_key():
    def task(first, *rest, **more):
        pass

    keys = [LockKey.of("shop.pay", key_of(task, None, *args, x=4)) for args in [(1, 2, 3), (1, 3, 2), (1, 2), (1, (2, 3))]]
    assert len(set(keys)) == 4


def test_keyword_arguments_of_a_task_that_takes_all_are_told_apart_by_their_names():
    def task(**more):
        pass

    assert key_of(task, None, a=1) != key_of(task, None, b=1)


def test_the_order_of_keyword_arguments_does_not_matter_to_a_task_that_takes_all():
    def task(**more):
        pass

    assert LockKey.of("shop.pay", key_of(task, None, a=1, b=2)) == LockKey.of("shop.pay", key_of(task, None, b=2, a=1))


def test_a_keyword_argument_does_not_take_the_place_of_the_rest_arguments():
    def task(*rest, **more):
        pass

    assert LockKey.of("shop.pay", key_of(task, None, 1, rest=2)) != LockKey.of("shop.pay", key_of(task, None, 3, rest=2))


def test_a_call_that_does_not_fit_the_task_fails_as_the_call_would():
    with pytest.raises(TypeError, match="missing a required argument: 'account'"):
        key_of(pay, None)
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'colour'"):
        key_of(pay, None, 7, colour="red")


# Names


def test_names_choose_and_order_the_arguments():
    assert key_of(pay, ("currency", "account"), 7) == ["EUR", 7]


def test_no_names_are_the_task_as_a_whole():
    assert key_of(pay, (), 7) == key_of(pay, (), 8) == []


def test_one_argument_and_the_same_in_two_places_are_two_keys():
    assert key_of(pay, ("account",), [7, 7]) != key_of(pay, ("account", "account"), 7)


def test_a_name_may_be_one_that_only_keyword_arguments_bring():
    def task(first, **more):
        pass

    assert key_of(task, ("tenant",), 1, tenant=7) == [7]
    assert failure(task, ("tenant",), 1) == "lock_on: the call has no argument tenant"


def test_rest_arguments_have_a_name():
    def task(*parts):
        pass

    assert key_of(task, ("parts",), 1, 2) == [(1, 2)]


def test_an_unknown_name_is_refused():
    assert refusal(pay, ("tenant",)) == "lock_on: there is no argument tenant. Expected one of account, amount, currency"
    assert refusal(pay, ("currenzy",)) == (
        "lock_on: there is no argument currenzy, did you mean currency? Expected one of account, amount, currency"
    )
    assert refusal(lambda: None, ("tenant",)) == "lock_on: there is no argument tenant. The task has no arguments"


# Templates


@dataclass
class Account:
    id: object
    owner: object = None


class Model(BaseModel):
    id: int


@pytest.mark.parametrize(
    "account", [Account(7), {"id": 7}, SimpleNamespace(id=7), Model(id=7)], ids=lambda account: type(account).__name__
)
def test_a_template_reaches_into_an_argument_whatever_it_is(account):
    assert key_of(pay, "billing:{account.id}", account) == ["billing:7"]


@pytest.mark.parametrize("template", ["o:{account[owner][id]}", "o:{account.owner.id}", "o:{account.owner[id]}"])
def test_a_template_takes_attributes_and_items_of_each_other(template):
    assert key_of(pay, template, {"owner": {"id": "x"}}) == ["o:x"]
    assert key_of(pay, template, {"owner": Account("x")}) == ["o:x"]


def test_a_template_takes_the_items_of_a_list_by_number():
    assert key_of(pay, "{account[1]}/{account[0].id}", [Account("first"), "second"]) == ["second/first"]


@pytest.mark.parametrize(
    ("template", "value", "key"),
    [
        ("{account:>5}", "ab", "   ab"),
        ("{account:05d}", 42, "00042"),
        ("{account:%Y-%m}", date(2026, 11, 29), "2026-11"),
        ("{account:.2f}", Decimal("1.005"), "1.00"),
        ("{{{account}}}", 7, "{7}"),
        ("{account}{amount}", 1, "110"),
        ("{account}", None, "null"),
        ("{account}", True, "true"),
        ("{account}", 1.0, "1.0"),
        ("{account}", [1, "a"], '[1,"a"]'),
        ("{account}", UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        ("{account}", datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00+00:00"),
        ("{account}", b"a", '{"$bytes":"YQ=="}'),
        ("{account}", {"$a": 1}, '{"$$a":1}'),
    ],
)
def test_a_template_writes_a_value_in_its_canonical_form_or_as_its_format_says(template, value, key):
    assert key_of(pay, template, value) == [key]


@given(st.integers() | st.text() | st.booleans() | st.none())
def test_a_template_writes_a_value_as_the_worker_gets_it(value):
    (key,) = key_of(pay, "a:{account}", value)
    assert key.startswith("a:")
    assert (key == f"a:{value}") == (type(value) in (int, str))


def test_a_default_fills_a_template():
    assert key_of(pay, "{account}:{currency}", 7) == ["7:EUR"]


@pytest.mark.parametrize(
    ("template", "value", "message"),
    [
        ("{account.id}", 7, "lock_on: int has no id"),
        ("{account.id}", {}, "lock_on: dict has no id"),
        ("{account[3]}", [1], "lock_on: list has no 3"),
        ("{account[x]}", [1], "lock_on: list has no x"),
        ("{account.owner.id}", {"owner": None}, "lock_on: NoneType has no id"),
        ("{account:%Y}", 7, "lock_on: int cannot be formatted as '%Y'"),
        ("{account:d}", None, "lock_on: NoneType cannot be formatted as 'd'"),
    ],
)
def test_a_template_that_does_not_fit_the_call_makes_no_key(template, value, message):
    assert failure(pay, template, value) == message


NO_FIELD = (
    "lock_on: {0!r} has the field {0}, expected an argument name with public attributes, items and a format, such as "
    "{{account.id}}, {{order[id]}} or {{day:%Y-%m}}"
)


@pytest.mark.parametrize("template", ["{account._secret}", "{account.__class__}", "{account.id.__doc__}", "{account._a.b}"])
def test_private_attributes_are_out_of_a_templates_reach(template):
    assert refusal(pay, template) == NO_FIELD.format(template)


@pytest.mark.parametrize("template", ["{}", "{0}", "{account!r}", "{account:{amount}}", "{account.id()}", "{account[a b]}"])
def test_what_else_a_format_string_can_hold_is_refused(template):
    assert refusal(pay, template) == NO_FIELD.format(template)


def test_a_bare_name_is_refused_with_the_two_ways_to_write_it():
    assert refusal(pay, "account") == (
        "lock_on: 'account' is a template without a field, so every call would have one key; did you mean ('account',) or "
        "'{account}'?"
    )
    assert key_of(pay, ("account",), 7) == [7]
    assert key_of(pay, "{account}", 7) == ["7"]


@pytest.mark.parametrize("template", ["billing", "{{account}}", "account "])
def test_a_template_without_a_field_is_refused(template):
    assert refusal(pay, template) == (
        f"lock_on: {template!r} names no argument, so every call would have one key; expected a field such as {{account.id}}"
        ", or () for the task as a whole"
    )


def test_a_broken_template_is_refused():
    assert refusal(pay, "{account") == "lock_on: '{account' is no template: expected '}' before end of string"


def test_a_template_with_an_unknown_name_is_refused():
    assert refusal(pay, "{acount.id}") == (
        "lock_on: there is no argument acount, did you mean account? Expected one of account, amount, currency"
    )


# Functions


def test_a_function_gets_the_arguments_it_names():
    assert key_of(pay, lambda account: account, 7) == [7]
    assert key_of(pay, lambda currency, account: (currency, account), 7) == ["EUR", 7]
    assert key_of(pay, lambda *, amount: [amount], 7) == [10]


def test_a_function_that_takes_everything_gets_everything():
    assert key_of(pay, lambda **bound: sorted(bound), 7) == ["account", "amount", "currency"]
    assert key_of(pay, lambda account, **rest: [account, sorted(rest)], 7) == [7, ["amount", "currency"]]


def test_a_default_of_a_function_is_its_own():
    for region in ("eu", "us"):
        assert key_of(pay, lambda account, region=region: [region, account], 7) == [region, 7]


def test_a_partial_and_an_object_are_functions_too():
    def by_region(region, account):
        return (region, account)

    class ByAccount:
        def __call__(self, account):
            return account

    assert key_of(pay, partial(by_region, region="eu"), 7) == ["eu", 7]
    assert key_of(pay, ByAccount(), 7) == [7]


@pytest.mark.parametrize("value", [0, "", False, {"a": 1}])
def test_what_a_function_returns_is_the_key_also_when_it_is_empty(value):
    assert key_of(pay, lambda: value, 7) == [value]


def test_a_function_that_returns_none_makes_no_key():
    assert failure(pay, lambda account: None, 7) == "lock_on: the function returned None, expected the parts of a key"


def test_a_function_that_fails_fails_closed():
    said = failure(pay, lambda account: account["id"], 7)
    assert re.fullmatch(r"lock_on: the function failed, so the task does not run: TypeError at test_scope\.py:\d+", said)


def test_what_a_failing_function_says_of_its_arguments_is_not_repeated():
    def refuse(account):
        raise ValueError(f"no such account: {account}")

    assert "4111" not in failure(pay, refuse, "4111 1111")


def test_a_function_of_what_the_task_does_not_have_is_refused():
    assert refusal(pay, lambda tenant: tenant) == (
        "lock_on: there is no argument tenant. Expected one of account, amount, currency"
    )


def test_a_function_may_name_what_only_keyword_arguments_bring():
    def task(**more):
        pass

    assert key_of(task, lambda tenant: tenant, tenant=7) == [7]
    assert failure(task, lambda tenant: tenant).startswith(
        "lock_on: the function failed, so the task does not run: TypeError at "
    )


# Pydantic


def test_a_model_is_the_dict_that_celery_sends_for_it():
    assert key_of(pay, None, Model(id=7)) == key_of(pay, None, {"id": 7}) == [{"id": 7}, 10, "EUR"]
