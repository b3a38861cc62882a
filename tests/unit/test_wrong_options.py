"""Whatever is wrong is refused: what was expected, what came, the nearest valid name. Each message in full."""

from __future__ import annotations

import math
import traceback
from uuid import uuid4

import pytest
from celery import Celery, chain

from celery_singleflight import ConfigurationError, OptionError, SingleflightTask, lock, options as names
from celery_singleflight.coordination import coordination

RECIPE = "argument names such as ('tenant_id',), a template such as 'billing:{account.id}', or a function"
POLICIES = "'requeue', 'queue', 'skip', 'coalesce', 'replace', 'join' or 'reject'"
DELAYS = "a list of up to 100 delays in seconds, from 1 to 604800, a week; the first may be less"
KEEP = "'newest', 'first', or a function of the waiting and the new arguments, each a dict by name"
TASK_OPTIONS = ", ".join(sorted(names.TASK_OPTIONS))
CALL_OPTIONS = ", ".join(sorted(names.CALL_OPTIONS))
SETTINGS = ", ".join(
    f"singleflight_{name}"
    for name in sorted([*TASK_OPTIONS.split(", "), "key_prefix", "log_context", "transport_options", "url"])
)
DJANGO_SETTINGS = ", ".join(sorted(f"CELERY_{name.upper()}" for name in SETTINGS.split(", ")))
LATER = "is planned and not in this version"
PATTERN = (
    "expected scheme://[user:password@]host[:port]/[database][?option=value], special characters percent-encoded; its "
    "options and singleflight_transport_options must have values that redis-py takes"
)
A_LEASE = "seconds from 0.5 to 604800, a week"
A_SIZE = "bytes, a whole number from 0, or inf for no limit"
A_COMPRESSION = "'gzip', 'bzip2', 'lzma', or another compression that kombu has here"
A_KEPT_RESULT = "seconds from 0 to 315360000, ten years"
A_HOLD = "seconds from 0 to 604800, a week"
A_COUNT = "a whole number from 1 to 1000"
BY_POSITION = "by position only, expected parameters that have the names of the task's arguments: it is called with those"
URLS = "expected redis://, rediss://, unix://, redis+cluster:// or sentinel://"
MEMORY = {"broker_url": "memory://", "result_backend": "cache+memory://"}


def shop(**settings):
    app = Celery("shop", set_as_current=False)
    app.conf.update({**MEMORY, **settings})
    return app


def settle(tenant_id, day):
    """The task that these are the options of."""


async def tenant_of(tenant_id):
    return tenant_id


def bind(app=None, function=settle, **options):
    app = app or shop()
    app.task(base=SingleflightTask, name="shop.settle", shared=False, **options)(function)
    app.finalize()
    return app.tasks["shop.settle"]


def task(**options):
    return lambda: bind(**options)


def settings(**wrong):
    return lambda: bind(shop(**wrong))


def django(**wrong):
    """Settings of a Django module, whose names begin with CELERY_."""

    def configure():
        app = Celery("shop", set_as_current=False)
        app.config_from_object(type("settings", (), {"CELERY_BROKER_URL": "memory://", **wrong}), namespace="CELERY")
        bind(app)

    return configure


def call(**options):
    return lambda: bind(lock_on=("tenant_id",)).apply_async((1, 2), **options)


def header(**headers):
    """A message of a publisher without this package, as the worker gets it."""
    return lambda: bind(shop(singleflight_url="redis://nowhere")).apply((1, 2), headers=headers, throw=True)


def store(**wrong):
    return lambda: coordination(shop(**wrong))


def held(name="n", *scope, **options):
    def hold():
        with lock(shop(singleflight_url="redis://nowhere"), name, *scope, **options):
            pass

    return hold


def row(what, wrong, message):
    return pytest.param(wrong, message, id=what)


WRONG = [
    # Values of task options
    row("lock_on number", task(lock_on=5), f"task shop.settle, lock_on: expected {RECIPE}, got 5"),
    row("lock_on empty", task(lock_on=""), f"task shop.settle, lock_on: expected {RECIPE}, got ''"),
    row("lock_on mixed", task(lock_on=["a", 1]), f"task shop.settle, lock_on: expected {RECIPE}, got ['a', 1]"),
    row("lock_on set", task(lock_on={"day"}), f"task shop.settle, lock_on: expected {RECIPE}, got {{'day'}}"),
    row(
        "lock_on one bare name",
        task(lock_on="tenant_id"),
        "task shop.settle, lock_on: 'tenant_id' is a template without a field, so every call would have one key; did you mean "
        "('tenant_id',) or '{tenant_id}'?",
    ),
    row(
        "lock_on unknown name",
        task(lock_on=("tenant", "day")),
        "task shop.settle, lock_on: there is no argument tenant, did you mean tenant_id? Expected one of tenant_id, day",
    ),
    row(
        "lock_on template with an unknown name",
        task(lock_on="settle:{tenant.id}"),
        "task shop.settle, lock_on: there is no argument tenant, did you mean tenant_id? Expected one of tenant_id, day",
    ),
    row(
        "lock_on function with an unknown name",
        task(lock_on=lambda tenant: tenant),
        "task shop.settle, lock_on: there is no argument tenant, did you mean tenant_id? Expected one of tenant_id, day",
    ),
    row(
        "lock_on function of everything",
        task(lock_on=lambda *arguments: arguments),
        f"task shop.settle, lock_on: the function takes *arguments {BY_POSITION}",
    ),
    row(
        "lock_on function by position",
        task(lock_on=lambda tenant_id, /: tenant_id),
        f"task shop.settle, lock_on: the function takes tenant_id {BY_POSITION}",
    ),
    row(
        "lock_on async function",
        task(lock_on=tenant_of),
        "task shop.settle, lock_on: the function is async, so it would return no parts of a key; expected a plain function",
    ),
    row(
        "lock_on broken template",
        task(lock_on="settle:{tenant_id"),
        "task shop.settle, lock_on: 'settle:{tenant_id' is no template: expected '}' before end of string",
    ),
    row(
        "lock_on conversion",
        task(lock_on="settle:{tenant_id!r}"),
        "task shop.settle, lock_on: 'settle:{tenant_id!r}' has the field {tenant_id!r}, expected an argument name "
        "with public attributes, items and a format, such as {account.id}, {order[id]} or {day:%Y-%m}",
    ),
    row("idempotent_on number", task(idempotent_on=5), f"task shop.settle, idempotent_on: expected {RECIPE}, got 5"),
    row("idempotent_on empty", task(idempotent_on=()), f"task shop.settle, idempotent_on: expected {RECIPE}, got ()"),
    row("idempotent_on empty list", task(idempotent_on=[]), f"task shop.settle, idempotent_on: expected {RECIPE}, got []"),
    row(
        "idempotent_on function of everything",
        task(idempotent_on=lambda *arguments: arguments),
        f"task shop.settle, idempotent_on: the function takes *arguments {BY_POSITION}",
    ),
    row(
        "idempotent_on without a field",
        task(idempotent_on="settle"),
        "task shop.settle, idempotent_on: 'settle' names no argument, so every call would have one key; expected a field such "
        "as {account.id}",
    ),
    row(
        "idempotent_on unknown name",
        task(idempotent_on=["month"]),
        "task shop.settle, idempotent_on: there is no argument month. Expected one of tenant_id, day",
    ),
    row("lock_name blank", task(lock_name=" "), "task shop.settle, lock_name: expected a text that is not empty, got ' '"),
    row("lock_name number", task(lock_name=5), "task shop.settle, lock_name: expected a text that is not empty, got 5"),
    row("lock_limit zero", task(lock_limit=0), "task shop.settle, lock_limit: expected a whole number from 1 to 1000, got 0"),
    row(
        "lock_limit text",
        task(lock_limit="2"),
        "task shop.settle, lock_limit: expected a whole number from 1 to 1000, got '2'",
    ),
    row(
        "lock_limit truth",
        task(lock_limit=True),
        "task shop.settle, lock_limit: expected a whole number from 1 to 1000, got True",
    ),
    row(
        "lock_limit float",
        task(lock_limit=2.0),
        "task shop.settle, lock_limit: expected a whole number from 1 to 1000, got 2.0",
    ),
    row(
        "lease_ttl small",
        task(lease_ttl=0.1),
        f"task shop.settle, lease_ttl: expected {A_LEASE}, got 0.1",
    ),
    row(
        "lease_ttl text",
        task(lease_ttl="30"),
        f"task shop.settle, lease_ttl: expected {A_LEASE}, got '30'",
    ),
    row(
        "lease_ttl nan",
        task(lease_ttl=math.nan),
        f"task shop.settle, lease_ttl: expected {A_LEASE}, got nan",
    ),
    row(
        "lease_ttl inf",
        task(lease_ttl=math.inf),
        f"task shop.settle, lease_ttl: expected {A_LEASE}, got inf",
    ),
    row(
        "lease_ttl list",
        task(lease_ttl=[30]),
        f"task shop.settle, lease_ttl: expected {A_LEASE}, got [30]",
    ),
    row(
        "lease_ttl truth",
        task(lease_ttl=True),
        f"task shop.settle, lease_ttl: expected {A_LEASE}, got True",
    ),
    row("lease_ttl of ages", task(lease_ttl=1e12), f"task shop.settle, lease_ttl: expected {A_LEASE}, got 1000000000000.0"),
    row("min_hold below zero", task(min_hold=-1), f"task shop.settle, min_hold: expected {A_HOLD}, got -1"),
    row("min_hold of ages", task(min_hold=604801), f"task shop.settle, min_hold: expected {A_HOLD}, got 604801"),
    row("rescue number", task(rescue=1), "task shop.settle, rescue: expected True or False, got 1"),
    row("max_deliveries", task(max_deliveries=0), f"task shop.settle, max_deliveries: expected {A_COUNT}, got 0"),
    row(
        "store_error_policy",
        task(store_error_policy="retry"),
        "task shop.settle, store_error_policy: expected 'requeue', 'fail' or 'run', got 'retry'",
    ),
    row(
        "keep_message",
        task(keep_message="fail"),
        "task shop.settle, keep_message: expected 'failed', 'always' or 'never', got 'fail'; did you mean 'failed'?",
    ),
    row("max_hold", task(max_hold=0), "task shop.settle, max_hold: expected seconds, at least 1, or inf for no bound, got 0"),
    row(
        "wait_timeout below zero",
        task(wait_timeout=-1),
        "task shop.settle, wait_timeout: expected seconds from 0, or inf for no bound, got -1",
    ),
    row(
        "result_ttl",
        task(result_ttl="1d"),
        f"task shop.settle, result_ttl: expected {A_KEPT_RESULT}, got '1d'",
    ),
    row("result_limit negative", task(result_limit=-1), f"task shop.settle, result_limit: expected {A_SIZE}, got -1"),
    row("result_limit text", task(result_limit="1MB"), f"task shop.settle, result_limit: expected {A_SIZE}, got '1MB'"),
    row("result_limit flag", task(result_limit=True), f"task shop.settle, result_limit: expected {A_SIZE}, got True"),
    row("result_limit part", task(result_limit=0.5), f"task shop.settle, result_limit: expected {A_SIZE}, got 0.5"),
    row(
        "result_compression misspelled",
        task(result_compression="gzp"),
        f"task shop.settle, result_compression: expected {A_COMPRESSION}, got 'gzp'; did you mean 'gzip'?",
    ),
    row(
        "result_compression flag",
        task(result_compression=True),
        f"task shop.settle, result_compression: expected {A_COMPRESSION}, got True",
    ),
    row("result_ttl of ages", task(result_ttl=1e17), f"task shop.settle, result_ttl: expected {A_KEPT_RESULT}, got 1e+17"),
    row(
        "contention_policy misspelled",
        task(contention_policy="Skip"),
        f"task shop.settle, contention_policy: expected {POLICIES}, got 'Skip'; did you mean 'skip'?",
    ),
    row(
        "contention_policy in capitals",
        task(contention_policy="REQUEUE"),
        f"task shop.settle, contention_policy: expected {POLICIES}, got 'REQUEUE'; did you mean 'requeue'?",
    ),
    row("contention_policy", task(contention_policy=5), f"task shop.settle, contention_policy: expected {POLICIES}, got 5"),
    row(
        "contention_policy in other words",
        task(contention_policy="coalesced"),
        f"task shop.settle, contention_policy: expected {POLICIES}, got 'coalesced'; did you mean 'coalesce'?",
    ),
    row(
        "contention_policy like two",
        task(contention_policy="queued"),
        f"task shop.settle, contention_policy: expected {POLICIES}, got 'queued'; did you mean 'queue'?",
    ),
    row(
        "failure_policy",
        task(failure_policy="hold"),
        "task shop.settle, failure_policy: expected 'forget' or 'keep', got 'hold'",
    ),
    row(
        "reconciler",
        task(reconciler="ask_bank"),
        "task shop.settle, reconciler: expected a function of an UncertainExecution, got 'ask_bank'",
    ),
    row(
        "reconcile_delays",
        task(reconcile_delays=(0, 0.5)),
        f"task shop.settle, reconcile_delays: expected {DELAYS}, got (0, 0.5)",
    ),
    row(
        "reconcile_delays as a text",
        task(reconcile_delays="5"),
        f"task shop.settle, reconcile_delays: expected {DELAYS}, got '5'",
    ),
    row(
        "reconcile_delays as a number",
        task(reconcile_delays=5),
        f"task shop.settle, reconcile_delays: expected {DELAYS}, got 5",
    ),
    row("payload_on", task(payload_on=5), f"task shop.settle, payload_on: expected {RECIPE}, or () to compare nothing, got 5"),
    row("coalesce_keep", task(coalesce_keep=5), f"task shop.settle, coalesce_keep: expected {KEEP}, got 5"),
    row(
        "coalesce_keep in other words",
        task(coalesce_keep="newer"),
        f"task shop.settle, coalesce_keep: expected {KEEP}, got 'newer'; did you mean 'newest'?",
    ),
    row("coalesce_delay", task(coalesce_delay=-1), f"task shop.settle, coalesce_delay: expected {A_HOLD}, got -1"),
    row("coalesce_within", task(coalesce_within="1m"), f"task shop.settle, coalesce_within: expected {A_HOLD}, got '1m'"),
    row(
        "skip_as misspelled",
        task(skip_as="contine"),
        "task shop.settle, skip_as: expected 'continue', 'stop' or 'raise', got 'contine'; did you mean 'continue'?",
    ),
    row("skip_as", task(skip_as=True), "task shop.settle, skip_as: expected 'continue', 'stop' or 'raise', got True"),
    # Names of task options
    row(
        "execution_key as a task option",
        task(execution_key="x"),
        "task shop.settle: execution_key is given per call, in apply_async; for a key made from the arguments use "
        "idempotent_on",
    ),
    row(
        "misspelled",
        task(contention_polcy="skip"),
        f"task shop.settle: there is no contention_polcy, did you mean contention_policy? Expected one of {TASK_OPTIONS}",
    ),
    row(
        "near",
        task(lease_timeout=30),
        f"task shop.settle: there is no lease_timeout, did you mean lease_ttl? Expected one of {TASK_OPTIONS}",
    ),
    row(
        "from elsewhere",
        task(unique_on=("day",)),
        f"task shop.settle: there is no unique_on, did you mean lock_on? Expected one of {TASK_OPTIONS}",
    ),
    row(
        "from elsewhere, with our beginning",
        task(lock_wait=5),
        f"task shop.settle: there is no lock_wait, did you mean wait_timeout? Expected one of {TASK_OPTIONS}",
    ),
    row(
        "unknown, with our beginning",
        task(lock_mode="shared"),
        f"task shop.settle: there is no lock_mode, did you mean lock_name? Expected one of {TASK_OPTIONS}",
    ),
    row(
        "with the prefix of the settings",
        task(singleflight_lease_ttl=5),
        f"task shop.settle: there is no singleflight_lease_ttl, did you mean lease_ttl? Expected one of {TASK_OPTIONS}",
    ),
    *(
        row(
            f"{name} of a later version",
            task(**{name: 5}),
            f"task shop.settle: {name} {LATER}; expected one of {TASK_OPTIONS}",
        )
        for name in (
            "freshness",
            "full_policy",
            "max_pending",
            "rates",
        )
    ),
    # Settings
    row(
        "setting with a wrong value",
        settings(singleflight_lease_ttl="30"),
        f"setting singleflight_lease_ttl: expected {A_LEASE}, got '30'",
    ),
    row(
        "setting with a wrong policy",
        settings(singleflight_contention_policy="joins"),
        f"setting singleflight_contention_policy: expected {POLICIES}, got 'joins'; did you mean 'join'?",
    ),
    row(
        "setting misspelled",
        settings(singleflight_leasettl=30),
        "the Celery settings: there is no singleflight_leasettl, did you mean singleflight_lease_ttl? Expected one of "
        f"{SETTINGS}",
    ),
    row(
        "setting from elsewhere",
        settings(singleflight_lock_timeout=30),
        "the Celery settings: there is no singleflight_lock_timeout, did you mean singleflight_lease_ttl? Expected one of "
        f"{SETTINGS}",
    ),
    row(
        "setting that is given per call",
        settings(singleflight_execution_key="x"),
        "the Celery settings: singleflight_execution_key: execution_key is given per call, in apply_async; for a key made from "
        "the arguments use singleflight_idempotent_on",
    ),
    row(
        "Django setting that is given per call",
        django(CELERY_SINGLEFLIGHT_EXECUTION_KEY="x"),
        "the Celery settings: CELERY_SINGLEFLIGHT_EXECUTION_KEY: execution_key is given per call, in apply_async; for a key "
        "made from the arguments use CELERY_SINGLEFLIGHT_IDEMPOTENT_ON",
    ),
    row(
        "setting that is like none",
        settings(singleflight_zzz=5),
        f"the Celery settings: there is no singleflight_zzz. Expected one of {SETTINGS}",
    ),
    row(
        "setting of a later version",
        settings(singleflight_rates=()),
        f"the Celery settings: singleflight_rates {LATER}; expected one of {SETTINGS}",
    ),
    row(
        "setting in capitals",
        settings(SINGLEFLIGHT_LEASE_TTL=5),
        "the Celery settings: SINGLEFLIGHT_LEASE_TTL is not read; write singleflight_lease_ttl",
    ),
    row(
        "Django setting without its namespace",
        django(SINGLEFLIGHT_LEASE_TTL=5),
        "the Celery settings: SINGLEFLIGHT_LEASE_TTL is not read; write CELERY_SINGLEFLIGHT_LEASE_TTL",
    ),
    row(
        "Django setting in small letters",
        django(CELERY_singleflight_lease_ttl=5),
        "the Celery settings: CELERY_singleflight_lease_ttl is not read; write CELERY_SINGLEFLIGHT_LEASE_TTL",
    ),
    row(
        "Django setting misspelled",
        django(CELERY_SINGLEFLIGHT_LEASETTL=5),
        "the Celery settings: there is no CELERY_SINGLEFLIGHT_LEASETTL, did you mean CELERY_SINGLEFLIGHT_LEASE_TTL? "
        f"Expected one of {DJANGO_SETTINGS}",
    ),
    row(
        "Django setting of a later version",
        django(CELERY_SINGLEFLIGHT_MAX_PENDING=5),
        f"the Celery settings: CELERY_SINGLEFLIGHT_MAX_PENDING {LATER}; expected one of {DJANGO_SETTINGS}",
    ),
    row(
        "Django setting with a wrong value",
        django(CELERY_SINGLEFLIGHT_LOCK_LIMIT=0),
        "setting singleflight_lock_limit: expected a whole number from 1 to 1000, got 0",
    ),
    # Calls
    row(
        "call with a wrong policy",
        call(contention_policy="skp"),
        f"call of shop.settle, contention_policy: expected {POLICIES}, got 'skp'; did you mean 'skip'?",
    ),
    row(
        "call with a policy in other words",
        call(contention_policy="replaces"),
        f"call of shop.settle, contention_policy: expected {POLICIES}, got 'replaces'; did you mean 'replace'?",
    ),
    row(
        "call with a wrong time-out",
        call(wait_timeout="5"),
        "call of shop.settle, wait_timeout: expected seconds from 0, or inf for no bound, got '5'",
    ),
    row(
        "call with an execution key of no text",
        call(execution_key=5),
        "call of shop.settle, execution_key: expected a text that is not empty, got 5",
    ),
    row(
        "call with an option of the task",
        call(lock_on=("day",)),
        f"call of shop.settle: lock_on is an option of the task, not of a call; per call there are {CALL_OPTIONS}",
    ),
    row(
        "call with an option of the task in other words",
        call(lock_key="day"),
        f"call of shop.settle: lock_key: lock_on is an option of the task, not of a call; per call there are {CALL_OPTIONS}",
    ),
    row(
        "call with the setting of the task",
        call(singleflight_lease_ttl=5),
        "call of shop.settle: singleflight_lease_ttl: lease_ttl is an option of the task, not of a call; per call there are "
        f"{CALL_OPTIONS}",
    ),
    row(
        "call with the header of a call option",
        call(singleflight_execution_key="x"),
        "call of shop.settle: there is no singleflight_execution_key, did you mean execution_key? Expected one of "
        f"{CALL_OPTIONS}",
    ),
    row(
        "call with a misspelled option",
        call(wait_timeot=5),
        f"call of shop.settle: there is no wait_timeot, did you mean wait_timeout? Expected one of {CALL_OPTIONS}",
    ),
    row(
        "call with an option from elsewhere",
        call(idempotency_key="x"),
        f"call of shop.settle: there is no idempotency_key, did you mean execution_key? Expected one of {CALL_OPTIONS}",
    ),
    row(
        "call with an option of a later version",
        call(full_policy="drop"),
        f"call of shop.settle: full_policy {LATER}; expected one of {CALL_OPTIONS}",
    ),
    # Headers of a foreign publisher
    row(
        "header with a wrong policy",
        header(singleflight_contention_policy="debounce"),
        f"header singleflight_contention_policy of shop.settle: expected {POLICIES}, got 'debounce'",
    ),
    row(
        "header with a wrong time-out",
        header(singleflight_wait_timeout="5"),
        "header singleflight_wait_timeout of shop.settle: expected seconds from 0, or inf for no bound, got '5'",
    ),
    row(
        "header with an empty execution key",
        header(singleflight_execution_key=""),
        "header singleflight_execution_key of shop.settle: expected a text that is not empty, got ''",
    ),
    row(
        "header with waits that are no number",
        header(singleflight_waits="x"),
        "header singleflight_waits of shop.settle: expected a whole number, got 'x'",
    ),
    # The store
    row(
        "URL of another server",
        store(singleflight_url="amqp://guest:secret@host//"),
        f"the store at amqp://…@host// cannot be used: {URLS}",
    ),
    row("URL that is none", store(singleflight_url=5), f"the store at 5 cannot be used: {URLS}"),
    row(
        "URL with a wrong port",
        store(singleflight_url="redis://host:port"),
        f"the store at redis://host:port cannot be used: {PATTERN}",
    ),
    row(
        "URL with a database that is none",
        store(singleflight_url="redis://host/abc"),
        f"the store at redis://host/abc cannot be used: {PATTERN}",
    ),
    row(
        "URL with a wrong option",
        store(singleflight_url="rediss://host?ssl_cert_reqs=CERT_NOPE"),
        f"the store at rediss://host?ssl_cert_reqs=CERT_NOPE cannot be used: {PATTERN}",
    ),
    row(
        "transport option that no connection has",
        store(singleflight_url="redis://host", singleflight_transport_options={"visibility_timeout": 5}),
        "the arguments of singleflight_url and singleflight_transport_options: expected those of a redis-py connection, got "
        "one that it does not take: 'visibility_timeout'",
    ),
    row(
        "Sentinel without a name",
        store(singleflight_url="sentinel://host:26379"),
        "a sentinel:// URL needs the name of the primary: singleflight_transport_options = {'master_name': …}",
    ),
    row(
        "no Redis anywhere",
        store(),
        "there is no store for leases: neither result_backend nor broker_url is a Redis URL; expected the setting "
        "singleflight_url, a URL such as redis://host:6379/0",
    ),
    row(
        "key prefix with braces",
        store(singleflight_url="redis://host", singleflight_key_prefix="{sf}"),
        "setting singleflight_key_prefix: expected a text without braces, got '{sf}'",
    ),
    row(
        "key prefix that is no text",
        store(singleflight_url="redis://host", singleflight_key_prefix=5),
        "setting singleflight_key_prefix: expected a text without braces, got 5",
    ),
    row(
        "transport options that are no mapping",
        store(singleflight_url="redis://host", singleflight_transport_options=["socket_timeout"]),
        "setting singleflight_transport_options: expected a mapping, got ['socket_timeout']",
    ),
    row(
        "transport option that has a place of its own",
        store(singleflight_url="redis://host", singleflight_transport_options={"retry": 3}),
        "singleflight_transport_options: there is no retry: a script call has attempts of its own, within about a quarter of a "
        "second plus the time-outs",
    ),
    row(
        "time-out that is no number",
        store(singleflight_url="redis://host", singleflight_transport_options={"socket_timeout": "x"}),
        "singleflight_transport_options, socket_timeout: expected seconds above 0, got 'x'",
    ),
    row(
        "time-out of zero",
        store(singleflight_url="redis://host", singleflight_transport_options={"socket_connect_timeout": 0}),
        "singleflight_transport_options, socket_connect_timeout: expected seconds above 0, got 0",
    ),
    # The store, when a task is bound: before a message is published, and before a worker takes one
    row(
        "URL of another server, at bind",
        settings(singleflight_url="http://x"),
        f"the store at http://x cannot be used: {URLS}",
    ),
    row(
        "key prefix with braces, at bind",
        settings(singleflight_key_prefix="{sf}"),
        "setting singleflight_key_prefix: expected a text without braces, got '{sf}'",
    ),
    row(
        "transport options that are no mapping, at bind",
        settings(singleflight_transport_options=["socket_timeout"]),
        "setting singleflight_transport_options: expected a mapping, got ['socket_timeout']",
    ),
    row(
        "time-out that is no number, at bind",
        settings(singleflight_url="redis://host", singleflight_transport_options={"socket_timeout": "x"}),
        "singleflight_transport_options, socket_timeout: expected seconds above 0, got 'x'",
    ),
    # Locks outside of a task
    row("lock without a name", held(""), "lock '', name: expected a text that is not empty, got ''"),
    row("lock with a number for a name", held(5), "lock 5, name: expected a text that is not empty, got 5"),
    row("lock that waits", held(wait=-1), "lock 'n', wait: expected seconds from 0, or inf for no bound, got -1"),
    row("lock limit", held(lock_limit=0), "lock 'n', lock_limit: expected a whole number from 1 to 1000, got 0"),
    row("lock lease", held(lease_ttl="30"), f"lock 'n', lease_ttl: expected {A_LEASE}, got '30'"),
    row("lock hold", held(max_hold=None), "lock 'n', max_hold: expected seconds, at least 1, or inf for no bound, got None"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_what_is_wrong_is_refused_with_a_message_that_helps(wrong, message):
    with pytest.raises(ConfigurationError) as caught:
        wrong()
    assert str(caught.value) == message


@pytest.mark.parametrize("option", ["lock_limit", "lease_ttl", "max_hold", "wait_timeout", "result_ttl", "skip_as", "lock_on"])
def test_none_is_not_given(option):
    assert bind(**{option: None})._binding.options == bind()._binding.options


def test_an_own_attribute_is_nobodys_business():
    bound = bind(queue_of_mine=5, retention=3, owner="billing", report_url="x")
    assert (bound.queue_of_mine, bound.owner) == (5, "billing")


def test_an_own_setting_is_nobodys_business():
    assert bind(shop(shop_lease_ttl="x", lease_ttl="x"))._binding.options.lease_ttl == 30.0


def test_an_own_attribute_that_reads_a_little_like_an_option_is_let_be():
    assert bind(result_url="https://x").result_url == "https://x"


def test_a_function_without_a_signature_is_refused_as_an_option():
    with pytest.raises(ValueError, match="lock_on") as caught:
        bind(lock_on=str)
    assert isinstance(caught.value, OptionError)


@pytest.mark.parametrize(
    "url", ["redis://:hunter/two@host:6379/0", "redis://host/0?password=hunter&socket_timeout=abc"], ids=["slash", "query"]
)
def test_a_password_is_in_no_message(url):
    with pytest.raises(ConfigurationError) as caught:
        store(singleflight_url=url)()
    assert "hunter" not in str(caught.value)
    assert "…" in str(caught.value)


def test_a_part_of_a_password_that_the_parser_takes_for_something_else_is_in_no_traceback():
    secret = uuid4().hex
    with pytest.raises(ConfigurationError) as caught:
        store(singleflight_url=f"redis://:slash/{secret}@host:6379/0")()
    assert secret not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("option", ["lease_ttl", "max_hold", "wait_timeout", "result_ttl"])
def test_seconds_that_are_no_float_are_refused(option):
    with pytest.raises(OptionError, match=f"^task shop.settle, {option}: expected "):
        bind(**{option: 10**400})


@pytest.mark.parametrize("name", ["contention", "singleflight_contention_policy", "singleflight_wait_timeout"])
def test_a_call_option_in_other_words_is_not_said_to_be_no_call_option(name):
    with pytest.raises(OptionError) as caught:
        call(**{name: "skip"})()
    assert "not of a call" not in str(caught.value)
    assert "did you mean" in str(caught.value)


def test_a_wrong_option_is_of_every_kind_that_it_is_caught_as():
    with pytest.raises(OptionError) as caught:
        bind(lock_limit=0)
    assert isinstance(caught.value, ConfigurationError)
    assert isinstance(caught.value, ValueError)


def test_an_app_without_a_store_may_bind_and_publish():
    """A publisher needs none."""
    assert call()().id


@pytest.mark.parametrize("name", ["celery.mine", "celery_mine.settle"])
def test_a_task_is_celerys_own_by_its_function_and_not_by_its_name(name):
    app = shop()
    task = app.task(base=SingleflightTask, name=name, shared=False)(settle)
    app.finalize()
    assert task._binding.name == name


def test_a_header_with_a_wrong_delay_is_refused_where_the_delay_counts(place):
    task = place.task(settle, contention_policy="coalesce")
    result = task.apply_async((1, 2), headers={"singleflight_coalesce_delay": "5"})
    place.deliver_all()
    with pytest.raises(OptionError) as caught:
        result.get(timeout=1)
    assert str(caught.value) == f"header singleflight_coalesce_delay of {task.name}: expected {A_HOLD}, got '5'"


def test_celerys_own_tasks_are_left_alone_where_all_tasks_of_an_app_are_protected():
    app = Celery("shop", set_as_current=False, task_cls=SingleflightTask, broker="memory://", backend="cache+memory://")
    app.finalize()
    own = [task for name, task in app.tasks.items() if name.startswith("celery.")]
    assert len(own) > 5
    assert [task.name for task in own if task._binding is not None] == []


def test_a_misspelt_option_of_the_second_in_a_chain_is_logged_and_the_chain_goes_on(place, caplog):
    """It is published by the tracer of the first, whose failure an error would become."""
    task = place.task(settle, lock_on=("tenant_id",))
    result = chain(task.si(1, 1), task.si(2, 2).set(contention_polcy="skip")).delay()
    with caplog.at_level("ERROR", "celery_singleflight"):
        place.deliver_all()
    assert (result.parent.state, result.state) == ("SUCCESS", "SUCCESS")
    said = [record.getMessage() for record in caplog.records if record.name.startswith("celery_singleflight")]
    unknown = "there is no contention_polcy, did you mean contention_policy?"
    assert said == [f"an option has no effect: call of {task.name}: {unknown} Expected one of {CALL_OPTIONS}"]
