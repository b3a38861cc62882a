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


@pytest.mark.parametrize("base", ["base", "task_cls", "both"])
def test_a_protected_task_is_published_when_the_transaction_commits(tmp_path, base):
    (tmp_path / "shop_settings.py").write_text(SETTINGS)
    path = os.pathsep.join([str(tmp_path), str(Path(celery_singleflight.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", SHOP, base],
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "shop_settings", "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "lease_ttl": 7,
        "rolled back": [],
        "before commit": [],
        "committed": [["(2, 'committed')", "shop.settle[2]"], ["(3, 'committed')", "shop.settle[3]"]],
        "no transaction": [["(4, 'no transaction')", "shop.settle[4]"]],
    }
