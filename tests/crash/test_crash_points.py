"""A process dies at a named point: the trigger has its right result all the same, and nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import crash_app
import pytest
from aftermath import (
    assert_nothing_is_left,
    delete_queue,
    due_at,
    is_on_redis,
    let_patience_end,
    let_the_broker_give_out_again,
    messages_with,
    queue_on_rabbitmq,
    revive,
    wait_for_workers,
)
from crash_points import POINTS, arm, deaths, live_overlaps
from nodes import SUPPORT, ValkeyContainer, redis_settings, wait_until

from celery_singleflight import lock

DOCUMENT = Path(__file__).parents[2] / "docs/explanation/crash-points.md"
BROKERS = ["redis with the store in it", "redis apart", "rabbitmq classic", "rabbitmq quorum"]
#: One to be killed and one to go on; a third one may still be starting.
NEEDED, WORKERS = 2, 3


class Cell(NamedTuple):
    """One way to die."""

    point: str
    how: str
    #: How many bodies of the key may begin.
    runs: tuple[int, ...] = (1,)
    #: Whose point it is: the trigger's own, the "tail"'s that is sent after it, or that of a "contender" of this test.
    of: str = ""
    #: What has to die before anybody comes to the point.
    first: tuple[str, str] | None = None
    task: str = "work"
    #: Whether the broker has the only message, so that on Redis the trigger waits for the visibility timeout; or may wait for
    #: it, when the worker that died had fetched the new copy.
    is_the_brokers: bool = False

    def __str__(self) -> str:
        return " ".join(filter(None, [self.of, self.point, "kills the", self.how]))


def in_a_child(how: str) -> list[Cell]:
    is_worker = how == "worker"
    return [
        Cell("enter:before", how, is_the_brokers=is_worker),
        Cell("enter:after", how),
        Cell("body:begin", how, (2,)),
        Cell("body:end", how, (2,)),
        Cell("finish:after", how),
        Cell("publish:before", how, of="tail"),
        Cell("publish:after", how, of="tail"),
        Cell("result:before", how),
        Cell("result:after", how),
        Cell("settle:before", how),
        Cell("settle:after", how),
        Cell("requeue:before-publish", how, of="contender", is_the_brokers=is_worker),
        Cell("requeue:after-publish", how, of="contender", is_the_brokers=is_worker),
        Cell("retry:after-publish", how, (2, 3), task="retry_later"),
        Cell("abandon:after", how, (2,), task="retry_later", is_the_brokers=is_worker),
    ]


CHILD_DIES = in_a_child("child")
WORKER_DIES = [
    *in_a_child("worker"),
    Cell("ack:before", "worker"),
    Cell("ack:after", "worker"),
    *[Cell(f"release:{when}", "worker", (2,), first=("body:begin", "child")) for when in ("before", "after")],
    # A trigger whose message the broker has no more: only a sweeper can help.
    *[
        Cell(f"sweep:{when}", "worker", first=("settle:before", "child"))
        for when in ("after-look", "after-handout", "after-publish")
    ],
]
IN_A_PUBLISHER = ["publish:before", "publish:after"]
#: Where the outcome is not the usual one, tested in `test_dead_workers.py`; where triggers wait in the store, tested in
#: `test_handoff.py`; and where one is replayed, tested in `test_replaying_in_workers.py`.
ELSEWHERE = {
    "conclude:after",
    "park:after",
    "linger:begin",
    "linger:granted",
    "call:before-publish",
    "call:after-publish",
    "follow:after",
    "replay:before-publish",
    "replay:after-publish",
}


class Victim:
    """A trigger, the tail of its chain, and what is to die for it."""

    def __init__(self, place, cell):
        self.place, self.cell, self.ledger = place, cell, place.ledger
        self.key = f"{re.sub('[^a-z]+', '-', str(cell))}-{uuid4().hex[:8]}"
        self.id = self.key
        self.at_end = ExitStack()

    def chain(self):
        body = self.place.task(self.cell.task).si(self.key, "value").set(task_id=self.id)
        return body | self.place.task("tail").s(self.key).set(task_id=f"{self.id}-tail")

    def start(self):
        if self.cell.of == "contender":
            self.at_end.enter_context(lock(self.place.app, "protected_app.work", self.key))
        for point, how in filter(None, [self.cell.first, (self.cell.point, self.cell.how)]):
            arm(self.ledger, point, how, f"{self.id}-tail" if self.cell.of == "tail" else self.id)
        self.result = self.chain().apply_async()

    def wait_for_deaths(self):
        count = 2 if self.cell.first else 1
        dead = f"{self.id}-tail" if self.cell.of == "tail" else self.id
        wait_until(lambda: len(deaths(self.ledger, dead)) >= count, 30, f"{self.cell} for {dead}")
        self.at_end.close()

    def judge(self):
        cell = self.cell
        expected = [["value", 1] if cell.task == "retry_later" else "value", "tail"]
        assert self.result.get(timeout=45) == expected, cell
        assert self.result.parent.get(timeout=5) == expected[0]
        assert_nothing_is_left(self.place, self.id, self.key)
        assert_nothing_is_left(self.place, f"{self.id}-tail", f"{self.key}-tail")
        # An hour later the broker delivers again what a dead worker had: there is nothing to do.
        let_the_broker_give_out_again(self.place, self.id)
        wait_until(lambda: messages_with(self.place, self.id) == 0, 20, "the broker has no message of it")
        assert len(self.ledger.runs(self.key)) in cell.runs, cell
        assert live_overlaps(self.ledger, self.key) == 0, cell
        assert len(self.ledger.runs(f"{self.key}-tail")) == 1, cell
        assert_nothing_is_left(self.place, self.id, self.key)


@pytest.fixture(scope="module", params=BROKERS)
def crew(request, start_shared, valkey):
    """Three workers that die where they are told to, on each kind of broker."""
    server, store = None, valkey
    more = {"crash_points": True, "singleflight_lease_ttl": 2}
    try:
        if "rabbitmq" in request.param:
            more |= queue_on_rabbitmq(request.getfixturevalue("rabbitmq"), request.param.rpartition(" ")[2])
        else:
            server = ValkeyContainer()
            server.ready()
            store = server if "with" in request.param else valkey
            more |= {"broker_url": f"{server.url}/0", "broker_transport_options": {"visibility_timeout": 3600}}
        place = start_shared(redis_settings(store.url, **more), workers=WORKERS, app_module=crash_app)
        yield place
        place.end()
        delete_queue(place)
    finally:
        if server is not None:
            server.teardown()


@pytest.fixture
def place(crew, request):
    request.node.place = crew
    wait_for_workers(crew, NEEDED)
    return crew


def test_children_die_at_every_point_and_their_workers_go_on(place):
    victims = [Victim(place, cell) for cell in CHILD_DIES]
    # A child that dies while it settles may have begun something else: first those that take nobody else along.
    for is_settling in (False, True):
        wave = [victim for victim in victims if victim.cell.point.startswith("settle") == is_settling]
        for victim in wave:
            victim.start()
        for victim in wave:
            victim.wait_for_deaths()
        for victim in wave:
            victim.judge()
    assert all(worker.container.status == "running" for worker in place.workers)


@pytest.mark.parametrize("cell", WORKER_DIES, ids=str)
def test_a_worker_dies_and_another_goes_on(place, cell):
    victim = Victim(place, cell)
    victim.start()
    if cell.first and cell.first[0] == "settle:before":
        wait_until(lambda: deaths(place.ledger, victim.id), 20, "the child is dead")
        let_patience_end(place, victim.id)
    victim.wait_for_deaths()
    wait_until(lambda: any(worker.container.status == "exited" for worker in place.workers), 10, "a worker is dead")
    if cell.is_the_brokers and is_on_redis(place):
        given = let_the_broker_give_out_again(place, victim.id)
        assert given == 1 or "after" in cell.point, "the broker has its message, and nobody else"
    if cell.point == "sweep:after-handout":
        assert due_at(place, victim.id) < 10.1, "it comes up again by itself"
    if cell.point.startswith(("finish", "publish", "result", "settle", "release:after", "sweep")):
        let_patience_end(place, victim.id)
    revive(place)
    victim.judge()


@pytest.mark.parametrize("point", IN_A_PUBLISHER)
def test_a_publisher_dies_and_publishes_again_under_the_same_id(place, point, key):
    arm(place.ledger, point, "child", key)
    code = "import sys, crash_app; crash_app.app.tasks['protected_app.work'].apply_async(sys.argv[1:], task_id=sys.argv[1])"
    config = {
        name: value
        for name, value in place.app.conf.items()
        if name.startswith(("broker_url", "result_backend", "singleflight_", "task_default_", "task_queues", "worker_detect"))
    }
    environment = {
        **os.environ,
        "CELERY_TEST_CONFIG": json.dumps({**config, "crash_points": True}),
        "TEST_LEDGER": str(place.ledger.directory),
        "PYTHONPATH": str(SUPPORT),
    }

    def publish():
        return subprocess.run([sys.executable, "-c", code, key, "value"], env=environment, check=False, timeout=30).returncode

    assert publish() == -9
    assert publish() == 0
    assert place.app.AsyncResult(key).get(timeout=30) == "value"
    assert_nothing_is_left(place, key, key)
    wait_until(lambda: messages_with(place, key) == 0, 10, "the broker has no message of it")
    assert len(place.ledger.runs(key)) == 1


def test_every_point_is_killed_at():
    assert {cell.point for cell in CHILD_DIES + WORKER_DIES} | set(IN_A_PUBLISHER) | ELSEWHERE == set(POINTS)


def test_every_point_is_documented():
    rows = re.findall(r"^\| `([a-z:-]+)` \| (\w+) \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == list(POINTS.items())
