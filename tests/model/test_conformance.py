"""The model does what the scripts do, and the scripts what the model does."""

from __future__ import annotations

from random import Random

import pytest
from cluster import Keyspace
from model_config import ALL_FAULTS, Config
from model_rules import calls_in
from model_state import NONE
from model_traces import first_trace, named_trace, random_trace, short_traces
from model_worlds import WAITING as WORLDS_OF_WAITING
from replay import Halves, Replay

from celery_singleflight.keys import KeySpace
from celery_singleflight.servers import connect

#: Of its own, as it is emptied all the time.
DATABASE = 12
WALKS, LENGTH, LONG_WALK, DEPTH = 25, 50, 70, 5

ANY = Config(faults=9, kinds=ALL_FAULTS, outcomes=("succeeded", "failed"), retries=2)
WORLDS = {
    "two triggers": ANY,
    "one trigger": ANY._replace(keys=(None,), policies=("wait",)),
    "one execution key": ANY._replace(keys=("invoice", "invoice")),
    "two places": ANY._replace(limit=2, keys=(None, "invoice", None), policies=("wait",) * 3, workers=3),
    "skip and reject": ANY._replace(policies=("skip", "reject")),
    "a store that forgets": ANY._replace(forgets=2),
}
PARKED = ANY._replace(policies=("queue",) * 3, keys=(None,) * 3, retries=1, revokes=1)
WAITING = {
    "queue": PARKED,
    "queue of short runs": PARKED._replace(is_short=True),
    "queue for two places": PARKED._replace(limit=2, workers=3, policies=("queue",) * 4, keys=(None,) * 4, is_short=True),
    "queue with execution keys": PARKED._replace(keys=("invoice", "invoice", None)),
    "queue of few faults": PARKED._replace(faults=2, is_short=True),
    "join": PARKED._replace(policies=("join", "join", "join", "join other"), keys=(None, None, "invoice", None)),
    "coalesce": PARKED._replace(policies=("coalesce",) * 4, keys=(None,) * 4, is_short=True),
    "coalesce into the first": PARKED._replace(policies=("coalesce first",) * 3),
    "any policy": PARKED._replace(policies=("queue", "coalesce", "join", "wait", "skip"), keys=(None,) * 5, is_short=True),
    "deaths in a queue": PARKED._replace(max_deliveries=2, retries=0),
    "a store that forgets who waits": PARKED._replace(forgets=1, is_short=True),
}


def is_recall_of_one_that_has_entered(before, step):
    return step.action == "recall" and step.reply[0] == "gone" and before.store.records[step.where].message != NONE


def is_abandon_beside_a_parked_copy(before, step):
    worker = step.action == "abandon" and before.workers[step.where]
    waiter = worker and before.store.waits.waiter(worker.message.trigger)
    return waiter and waiter.by != worker.owner == before.store.records[waiter.trigger].owner


def is_finish_beside_a_parked_copy(before, step):
    worker = step.action.startswith("finish") and step.reply[0] == "finished" and before.workers[step.where]
    return worker and before.store.waits.waiter(worker.message.trigger) is not None


def is_held_while_somebody_waits(before, step):
    return step.reply[:2] == ("held", "lock") and bool(before.store.waits.parked)


def is_called_twice(before, step):
    return any(before.store.waits.is_called(call.trigger) for call in calls_in(step.reply))


def is_led_by_a_look(before, step):
    return step.reply == ("later",) and step.state.store.waits.line != before.store.waits.line


def is_linger_that_gives_the_baton_back(before, step):
    return step.reply[:1] == ("linger",) and step.state.store.waits.has_baton and not before.store.waits.has_baton


#: What has gone wrong once, or may, and the world in which it is met.
WAYS = [
    (is_recall_of_one_that_has_entered, "a queue, any fault"),
    (is_abandon_beside_a_parked_copy, "a queue, any fault"),
    (is_finish_beside_a_parked_copy, "a queue, any fault"),
    (is_held_while_somebody_waits, "a queue beside one that goes back"),
    (is_called_twice, "a line, late messages"),
    (is_led_by_a_look, "join, any fault"),
    (is_linger_that_gives_the_baton_back, "a line of short runs, a late message"),
]
#: Two linger, as the second is called ahead when the run ends for which the first has waited; what happens then, up to the run
#: of the second: it has the baton before the first, and gives it back.
PARK = "deliver 1, enter 1, acknowledge 1"
END = "finish succeeded 0, {calls}, tell 0, settle 0, acknowledge 0"
TWO_LINGER = f"""
    deliver 0, enter 0, {PARK}, {PARK}, {PARK}, {END.format(calls="call 0, call 0")}, deliver 0, enter 0,
    {END.format(calls="call 0")}, deliver to a free slot 0, deliver to a free slot 1
"""
SECOND_TAKES_IT = "baton 1, enter lingering 1, baton 0, enter lingering 0, finish succeeded 0, baton 1, enter lingering 1"
DEATHS = ANY._replace(keys=(None,), policies=("wait",), retries=0, max_deliveries=2)


@pytest.fixture(scope="module")
def place(valkey):
    url = f"{valkey.url}/{DATABASE}"
    keyspace, connections = Keyspace.at(url), connect(url, {})
    yield Halves(connections, KeySpace("sf")), keyspace
    connections.close()
    keyspace.close()


@pytest.mark.parametrize("name", WORLDS)
def test_random_traces_give_the_same_answers_and_leave_the_same(place, name):
    replay = Replay(*place, WORLDS[name])
    for seed in range(WALKS):
        replay.run(random_trace(WORLDS[name], LENGTH, Random(seed)))


@pytest.mark.parametrize("name", WAITING)
def test_random_traces_of_who_waits_give_the_same_answers_and_leave_the_same(place, name):
    replay = Replay(*place, WAITING[name])
    for seed in range(WALKS):
        replay.run(random_trace(WAITING[name], LONG_WALK, Random(seed)))


@pytest.mark.parametrize(("is_met", "world"), WAYS, ids=[way.__name__ for way, _ in WAYS])
def test_the_way_to_it_gives_the_same_answers_and_leaves_the_same(place, is_met, world):
    config = WORLDS_OF_WAITING[world]
    trace = first_trace(config, is_met)
    Replay(*place, config).run(trace)


def test_the_baton_that_the_second_has_taken_comes_to_the_first(place):
    config = WORLDS_OF_WAITING["a line of three"]._replace(keys=(None,) * 4, policies=("queue",) * 4, is_short=True)
    trace = named_trace(config, [*TWO_LINGER.split(","), *SECOND_TAKES_IT.split(",")])
    entered = [(step.where, step.reply[0]) for _, step in trace if step.action == "enter lingering"]
    assert entered == [(1, "linger"), (0, "acquired"), (1, "acquired")]
    Replay(*place, config).run(trace)


@pytest.mark.parametrize("name", ["two triggers", "one execution key"])
def test_all_short_traces_give_the_same_answers_and_leave_the_same(place, name):
    config = WORLDS[name]._replace(faults=1, retries=1)
    replay = Replay(*place, config)
    for trace in short_traces(config, DEPTH):
        replay.run(trace)


@pytest.mark.parametrize("key", [None, "invoice"])
def test_deaths_are_counted_as_in_the_model(place, key):
    config = DEATHS._replace(keys=(key,))
    replay = Replay(*place, config)
    for seed in range(WALKS):
        replay.run(random_trace(config, LENGTH, Random(seed)))
