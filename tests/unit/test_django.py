"""In a Django app a protected task is published when the transaction commits, and only then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import celery_singleflight

SETTINGS = """
SECRET_KEY = "x"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
USE_TZ = True
CELERY_BROKER_URL = "memory://"
CELERY_SINGLEFLIGHT_URL = "redis://nowhere"
CELERY_SINGLEFLIGHT_LEASE_TTL = 7
"""

SHOP = """
import json
import sys

import django
from celery import Celery, Task
from celery.contrib.django.task import DjangoTask
from django.db import transaction

from celery_singleflight import SingleflightTask

django.setup()
base = sys.argv[1]
app = Celery("shop", **({"task_cls": SingleflightTask} if base == "task_cls" else {}))
app.config_from_object("django.conf:settings", namespace="CELERY")


class Both(SingleflightTask, DjangoTask):
    abstract = True


options = {"task_cls": {}, "base": {"base": SingleflightTask}, "both": {"base": Both}}[base]


@app.task(name="shop.settle", lock_on=("tenant_id",), **options)
def settle(tenant_id, day):
    pass


def published():
    found = []
    with app.connection_for_read() as connection:
        queue = app.amqp.queues["celery"].bind(connection.default_channel)
        queue.declare()
        while (message := queue.get(no_ack=True)) is not None:
            found.append([message.headers["argsrepr"], message.headers["singleflight_key"]])
    return found


seen = {"lease_ttl": settle._binding.options.lease_ttl}
try:
    with transaction.atomic():
        settle.delay_on_commit(1, "rolled back")
        settle.apply_async_on_commit((1, "rolled back"))
        raise OSError
except OSError:
    seen["rolled back"] = published()
with transaction.atomic():
    settle.delay_on_commit(2, "committed")
    settle.apply_async_on_commit(args=(3, "committed"), wait_timeout=5)
    seen["before commit"] = published()
seen["committed"] = published()
settle.delay_on_commit(4, "no transaction")
seen["no transaction"] = published()
print(json.dumps(seen))
"""


ANSWERED = """
import json

import django
from celery import Celery
from django.db import transaction

from celery_singleflight import SingleflightTask
from celery_singleflight.coordination import coordination

django.setup()
app = Celery("shop", task_cls=SingleflightTask)
app.config_from_object("django.conf:settings", namespace="CELERY")


@app.task(name="shop.settle", idempotent_on="settle:{tenant_id}", answer_at_publish=True)
def settle(tenant_id):
    pass


def state():
    with app.connection_for_read() as connection:
        queue = app.amqp.queues["celery"].bind(connection.default_channel)
        sent = queue.queue_declare().message_count
    with coordination(app).client() as client:
        return [sent, len(list(client.scan_iter("*:announcement:*")))]


seen = {}
try:
    with transaction.atomic():
        settle.delay_on_commit(1)
        raise OSError
except OSError:
    seen["rolled back"] = state()
with transaction.atomic():
    settle.delay_on_commit(1)
    settle.delay_on_commit(1)
    settle.apply_async_on_commit((1,), wait_timeout=5)
    seen["before commit"] = state()
seen["committed"] = state()
with transaction.atomic():
    settle.delay_on_commit(1)
    settle.delay_on_commit(2)
seen["committed again"] = state()
print(json.dumps(seen))
"""


def run_shop(directory, shop, *arguments, settings=SETTINGS):
    """Run a program of a Django app in a process of its own; returns what it prints."""
    (directory / "shop_settings.py").write_text(settings)
    path = os.pathsep.join([str(directory), str(Path(celery_singleflight.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", shop, *arguments],
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "shop_settings", "PYTHONPATH": path},
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("base", ["base", "task_cls", "both"])
def test_a_protected_task_is_published_when_the_transaction_commits(tmp_path, base):
    assert run_shop(tmp_path, SHOP, base) == {
        "lease_ttl": 7,
        "rolled back": [],
        "before commit": [],
        "committed": [["(2, 'committed')", "shop.settle[2]"], ["(3, 'committed')", "shop.settle[3]"]],
        "no transaction": [["(4, 'no transaction')", "shop.settle[4]"]],
    }


def test_it_is_announced_when_the_transaction_commits_and_not_when_it_is_rolled_back(tmp_path, valkey):
    settings = SETTINGS.replace("redis://nowhere", f"{valkey.url}/8") + f"CELERY_SINGLEFLIGHT_KEY_PREFIX = {tmp_path.name!r}\n"
    messages_and_announcements = run_shop(tmp_path, ANSWERED, settings=settings)
    assert messages_and_announcements == {
        "rolled back": [0, 0],
        "before commit": [0, 0],
        "committed": [1, 1],
        "committed again": [2, 2],
    }
