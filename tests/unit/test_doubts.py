"""What the commands for operators show of executions whose run died, and what `resolve` does to them."""

from __future__ import annotations

import json
import re

import pytest
from celery import states
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_singleflight import Resolution, ResolvedFailed, commands, doubts
from celery_singleflight.doubts import Uncertainty
from celery_singleflight.keys import LockKey
from celery_singleflight.reasons import told
from celery_singleflight.sweeper import Sweeper

charges = []


@pytest.fixture(autouse=True)
def no_charges():
    charges.clear()


@pytest.fixture(autouse=True)
def no_worker_is_asked(monkeypatch):
    monkeypatch.setattr("celery_singleflight.asking.ask_workers", lambda app, workers: {})


def pay(invoice):
    """Charge, and die before it is recorded, once for each invoice."""
    charges.append(invoice)
    if charges.count(invoice) == 1:
        raise SystemExit
    return f"paid {invoice}"


def paying(place, **options):
    return place.task(pay, **{"idempotent_on": "invoice:{invoice}", "uncertain_policy": "hold", **options})


def die(place, task, *args, **options):
    """Publish a trigger whose run dies; return its result and its message."""
    result = task.apply_async(args, **options)
    (message,) = place.messages()
    with pytest.raises(SystemExit):
        place.deliver(message)
    return result, message


def wait_for_word(place, task, *args):
    """Let a run die, and its trigger and a later one wait for word of it; return their results."""
    first, message = die(place, task, *args)
    place.deliver(message)
    later = task.delay(*args)
    place.deliver_all()
    return first, later


def come_again(place):
    for key in place.client.scan_iter("*:due:*"):
        for member in place.client.zrange(key, 0, -1):
            place.client.zadd(key, {member: 0})
    Sweeper(place.app).look()
    place.deliver_all()


def run(place, *arguments):
    obj = CLIContext(app=place.app, no_color=True, workdir=None)
    result = CliRunner().invoke(commands.singleflight, [str(word) for word in arguments], obj=obj)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def ask(place, *arguments):
    return json.loads(run(place, *arguments, "--json").stdout)


def explained(place, *arguments):
    """The reason and the one trigger of an explanation."""
    found = ask(place, "explain", *arguments)
    (trigger,) = found["triggers"]
    return found["why"], trigger


# uncertain


def test_a_store_in_which_nothing_is_uncertain_says_so(place):
    paying(place).delay(7)
    assert run(place, "uncertain").output == "No execution is uncertain.\n"
    assert ask(place, "uncertain") == {"executions": [], "left_out": 0}


def test_an_uncertain_execution_is_listed_with_whose_run_died_and_who_waits(place):
    task = paying(place)
    first, _ = wait_for_word(place, task, 7)
    (one,) = ask(place, "uncertain")["executions"]
    assert one == {
        "lock_name": task.name,
        "task": task.name,
        "execution_key": "invoice:7",
        "task_id": first.id,
        "worker": "w1@test",
        "age": pytest.approx(0, abs=5),
        "waiting": 2,
        "tries": 0,
        "next_try": None,
        "asked_by": None,
    }
    heads, row = run(place, "uncertain").output.splitlines()[:2]
    assert re.split("  +", heads) == ["EXECUTION KEY", "TASK", "TRIGGER", "WORKER", "SINCE", "WAITING", "TRIES", "NEXT TRY"]
    assert re.split("  +", row)[:4] == ["invoice:7", task.name, first.id, "w1@test"]
    assert re.split("  +", row)[5:] == ["2", "0", "-"]


def test_one_of_which_nobody_has_noticed_anything_is_uncertain_since_its_lease_ended(place):
    task = paying(place, idempotent_on=None)
    result, _ = die(place, task, 7)
    (name,) = place.client.scan_iter("*:trigger:*")
    place.client.hdel(name, "unsure")
    seconds, micros = place.client.time()
    ended = seconds * 1000 + micros // 1000 - 60_000
    place.client.hset(name, mapping={"owner": "the dead", "until_ms": ended})
    (one,) = ask(place, "uncertain")["executions"]
    assert (one["execution_key"], one["task_id"], one["waiting"]) == (None, result.id, 0)
    assert 60 <= one["age"] < 65
    place.client.hset(name, "generation", 1)
    assert ask(place, "uncertain")["executions"] == [], "it has sent its retry, and so has said how it goes on"


def test_what_runs_what_has_ended_and_what_runs_again_by_itself_is_not_listed(place):
    seen = []

    def look():
        seen.append(ask(place, "uncertain")["executions"])

    place.task(look, uncertain_policy="hold").delay()
    place.deliver_all()
    die(place, place.task(pay, name="rerun"), 7)
    assert [*seen, ask(place, "uncertain")["executions"]] == [[], []]


def test_one_that_works_in_steps_is_not_held(place):
    def work(self):
        self.step("charge", lambda: "charged")
        raise SystemExit

    die(place, place.task(work, bind=True, uncertain_policy="hold"))
    assert ask(place, "uncertain")["executions"] == []


def test_only_those_of_the_named_lock_are_listed_the_longest_first_up_to_the_limit(place):
    task, other = paying(place), paying(place, name="other", lock_name="oth*r:x")
    for invoice in (1, 2):
        die(place, task, invoice)
    die(place, other, 3)
    name = place.store.keys.execution(task.name, "invoice:2")
    since, *rest = place.client.hget(name, "unsure").split("\n")
    place.client.hset(name, "unsure", "\n".join([str(int(since) - 60_000), *rest]))

    keys = [one["execution_key"] for one in ask(place, "uncertain", "--name", task.name)["executions"]]
    assert keys == ["invoice:2", "invoice:1"]
    assert [one["task"] for one in ask(place, "uncertain", "--name", "oth*r:x")["executions"]] == ["other"]
    found = ask(place, "uncertain", "--limit", 1)
    assert ([one["execution_key"] for one in found["executions"]], found["left_out"]) == (["invoice:2"], 2)
    assert "and 2 more, beyond --limit" in run(place, "uncertain", "--limit", 1).output


def test_more_than_are_read_at_a_time_are_all_found(place, monkeypatch):
    monkeypatch.setattr("celery_singleflight.doubting._BATCH", 2)
    task = paying(place)
    for invoice in range(5):
        die(place, task, invoice)
    assert len(ask(place, "uncertain")["executions"]) == 5


def test_tries_and_the_next_one_are_told(place):
    task = paying(place, reconciler=lambda execution: None, reconcile_delays=(0, 600))
    wait_for_word(place, task, 7)
    (one,) = ask(place, "uncertain")["executions"]
    assert (one["tries"], one["waiting"]) == (1, 2)
    assert 590 < one["next_try"] <= 600
    why, _ = explained(place, "invoice:7", "--execution-key")
    assert re.search(r"2 triggers wait for word; it was tried once to find out, the next is in \d+\.\d s\. Who knows", why)


def test_while_somebody_finds_out_that_is_told(place):
    seen = []

    def reconcile(execution):
        seen.extend([ask(place, "uncertain")["executions"], explained(place, execution.key, "--execution-key")])
        return Resolution("succeeded", result="found")

    task = paying(place, reconciler=reconcile, reconcile_delays=(0,))
    result, message = die(place, task, 7)
    place.deliver(message)
    assert result.get(timeout=1) == "found"
    (one,), (why, trigger) = seen
    assert (one["asked_by"], one["tries"], one["next_try"]) == ("w1@test", 1, None)
    assert why.startswith(f"w1@test is finding out, at try 1, what the run of {result.id} on w1@test, which died ")
    assert trigger["state"] == "running"
    assert ask(place, "uncertain")["executions"] == []


# explain


def test_the_trigger_whose_run_died_and_its_execution_are_uncertain_and_say_what_to_do(place):
    task = paying(place)
    first, _ = wait_for_word(place, task, 7)
    for key in ([first.id], ["invoice:7", "--execution-key"]):
        why, trigger = explained(place, *key)
        assert why.startswith(f"nobody knows what the run of {first.id} on w1@test, which died ")
        assert why.endswith("Who knows says so: celery -A proj singleflight resolve invoice:7 succeeded|failed|rerun")
        assert (trigger["state"], trigger["uncertain"]["execution_key"]) == ("uncertain", "invoice:7")
        shown = run(place, "explain", *key).output
        assert "what its execution has done is uncertain\nEXECUTION KEY" in shown


def test_a_later_trigger_waits_for_word(place):
    task = paying(place, lock_on=("invoice",))
    first, later = wait_for_word(place, task, 7)
    why, trigger = explained(place, later.id)
    assert why.startswith(f"it waits for word, and the store has its message: nobody knows what the run of {first.id} ")
    assert (trigger["state"], trigger["uncertain"]["task_id"], trigger["origin"]) == ("waits for word", first.id, None)
    assert trigger["message_bytes"] > 0
    assert trigger["lock_key"] == LockKey.of(task.name, [7]).text

    found = ask(place, "explain", trigger["lock_key"])
    assert sorted(each["state"] for each in found["triggers"]) == ["uncertain", "waits for word"]
    assert found["counts"]["waiting_for_word"] == 2
    assert [counts["waiting_for_word"] for counts in ask(place, "locks", "--name", task.name)["lock_names"]] == [2]
    assert "2 of them waiting for word" in run(place, "explain", trigger["lock_key"]).output


def test_one_for_whom_word_has_come_is_to_be_published_again(place):
    task = paying(place)
    _, later = wait_for_word(place, task, 7)
    run(place, "resolve", "invoice:7", "rerun")
    why, trigger = explained(place, later.id)
    assert why == "somebody knows what it has waited for; the sweeper of a worker is to publish it again by now"
    assert (trigger["state"], trigger["uncertain"]) == ("waits for word", None)
    come_again(place)
    assert later.get(timeout=1) == "paid 7"


def test_without_an_execution_key_the_task_id_is_what_to_resolve(place):
    result, _ = die(place, paying(place, idempotent_on=None), 7)
    why, trigger = explained(place, result.id)
    assert "has done; no trigger waits for word; nobody has tried to find out. Who knows says so: " in why
    assert why.endswith(f"celery -A proj singleflight resolve {result.id} --task-id succeeded|failed|rerun")
    assert trigger["state"] == "uncertain"


def test_a_trigger_that_did_not_wait_has_ended_and_its_execution_stays_uncertain(place):
    task = paying(place)
    first, _ = die(place, task, 7)
    later = task.apply_async((7,), contention_policy="reject")
    place.deliver_all()
    why, trigger = explained(place, later.id)
    assert re.match(
        r"it has ended 0\.\d s ago, uncertain: nobody knew what the run of \S+ on w1@test had done, which had died", why
    )
    assert (trigger["state"], trigger["ending"]["blocker_task_id"]) == ("ended", first.id)


def test_where_the_run_came_from_and_whether_its_payload_is_compared_is_told(place):
    task = paying(place)
    first, _ = die(place, task, 7, headers={"singleflight_source": "webhook"})
    _, trigger = explained(place, first.id)
    assert trigger["origin"] == {"source": "webhook", "scheduled": None, "is_redelivered": False}
    assert trigger["is_payload_compared"] is True
    assert "comes from: webhook; its payload is compared\n" in run(place, "explain", first.id).output


@pytest.mark.parametrize(
    ("stored", "shown"),
    [
        (None, "call"),
        ("beat\n2026-11-30T02:00:00+00:00\n1", "beat, for 2026-11-30T02:00:00+00:00, delivered again"),
    ],
)
def test_the_scheduled_time_and_a_redelivery_are_told(place, stored, shown):
    result, _ = die(place, paying(place, idempotent_on=None, uncertain_policy="rerun"), 7)
    (name,) = place.client.scan_iter("*:trigger:*")
    if stored:
        place.client.hset(name, "origin", stored)
    else:
        place.client.hdel(name, "origin")
    assert f"comes from: {shown}\n" in run(place, "explain", result.id).output


# resolve


def test_those_who_wait_get_what_is_said(place):
    task = paying(place)
    results = wait_for_word(place, task, 7)
    said = run(place, "resolve", "invoice:7", "succeeded", "--result", '{"charge": 1}', "--reason", "seen at the bank")
    assert (said.exit_code, said.stderr) == (0, "")
    assert said.stdout == f"invoice:7 of {task.name} is taken for succeeded; 2 triggers that wait for it ask again\n"
    come_again(place)
    assert [result.get(timeout=1) for result in results] == [{"charge": 1}] * 2
    why, _ = explained(place, "invoice:7", "--execution-key")
    assert "succeeded: somebody knew: seen at the bank" in why
    assert charges == [7]


def test_the_answer_as_a_document(place):
    task = paying(place, idempotent_on=None)
    result, message = die(place, task, 7)
    place.deliver(message)
    assert ask(place, "resolve", result.id, "failed", "--task-id", "--reason", "refused") == {
        "is_resolved": True,
        "why": "resolved",
        "execution_key": None,
        "task_id": result.id,
        "task": task.name,
        "outcome": "failed",
        "waiting": 1,
    }
    come_again(place)
    with pytest.raises(ResolvedFailed, match="refused"):
        result.get(timeout=1)


def test_what_has_ended_is_refused_and_says_so(place):
    task = paying(place)
    charges.append(7)
    task.delay(7)
    place.deliver_all()
    said = run(place, "resolve", "invoice:7", "rerun")
    assert (said.exit_code, said.stdout) == (3, "")
    expected = "expected one whose run died after its body began"
    assert said.stderr == f"Refused: execution invoice:7 of {task.name}: {expected}; it has ended, succeeded\n"
    found = ask(place, "resolve", "invoice:7", "rerun")
    assert (found["is_resolved"], found["why"].partition("; ")[2]) == (False, "it has ended, succeeded")


def test_what_runs_and_what_goes_on_by_itself_is_refused(place):
    said = []

    def work(self, invoice):
        said.append(run(place, "resolve", f"invoice:{invoice}", "rerun"))
        raise self.retry(countdown=60)

    result = place.task(work, bind=True, idempotent_on="invoice:{invoice}", uncertain_policy="hold").delay(7)
    (message,) = place.messages()
    place.deliver(message)
    said.append(run(place, "resolve", "invoice:7", "rerun"))
    assert result.state == states.RETRY
    assert [one.exit_code for one in said] == [3, 3]
    assert said[0].stderr.endswith("; w1@test is at it\n")
    assert said[1].stderr.endswith("; none has, and it goes on by itself\n")


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["invoice:8", "rerun"], 1, "expected an execution key, or --task-id with .* got invoice:8, .*; nearest: invoice:7"),
        (["no-such", "rerun", "--task-id"], 1, "expected the id of a trigger that the store remembers, got no-such"),
        (
            ["invoice:7", "rerun", "--task", "nothing"],
            2,
            "expected the name of a protected task as --task, got nothing, one of ",
        ),
        (["invoice:7", "gone"], 2, "'gone' is not one of"),
        (["invoice:7", "failed", "--result", "null"], 2, "expected --result with succeeded only, got it with failed"),
        (["invoice:7", "succeeded", "--result", "{"], 2, "expected JSON, a text in double quotes"),
        (["invoice:7", "succeeded", "--result", "ch_1"], 2, "expected JSON, a text in double quotes"),
    ],
)
def test_what_cannot_be_meant_says_what_was_expected(place, words, code, text):
    die(place, paying(place), 7)
    said = run(place, "resolve", *words)
    assert (said.exit_code, said.stdout) == (code, "")
    assert re.search(text, " ".join(said.stderr.split())), said.stderr
    assert len(ask(place, "uncertain")["executions"]) == 1


def test_an_execution_key_that_is_explained_as_another_kind_of_key_is_recognised(place):
    die(place, paying(place), 7)
    said = run(place, "explain", "invoice:7")
    assert (said.exit_code, said.stdout) == (1, "")
    assert said.stderr.endswith("got invoice:7, which is an execution key: give --execution-key with it\n")
    assert ask(place, "explain", "invoice:7", "--execution-key")["kind"] == "execution key"


def test_a_trigger_with_an_execution_key_is_resolved_by_that(place):
    first, _ = die(place, paying(place), 7)
    said = run(place, "resolve", first.id, "rerun", "--task-id")
    assert said.exit_code == 2
    assert said.stderr == f"Error: expected an execution key: that of {first.id} is invoice:7, got --task-id\n"


def test_where_several_tasks_fit_the_name_is_asked_for(place):
    one = paying(place, name="one", idempotent_on=None, lock_name="both")
    paying(place, name="two", idempotent_on=None, lock_name="both")
    result, _ = die(place, one, 7)
    assert ask(place, "uncertain")["executions"][0]["task"] is None
    assert "  one of both  " in run(place, "uncertain").output
    said = run(place, "resolve", result.id, "rerun", "--task-id")
    assert (said.exit_code, said.stderr) == (
        2,
        f"Error: expected the name of the task of {result.id} as --task, one of one, two\n",
    )
    assert run(place, "resolve", result.id, "rerun", "--task-id", "--task", "one").exit_code == 0


def test_of_two_executions_with_one_key_the_tasks_name_tells_which(place):
    for name in ("one", "two"):
        die(place, paying(place, name=name), 7)
        charges.clear()
    assert run(place, "resolve", "invoice:7", "rerun").exit_code == 2
    assert ask(place, "resolve", "invoice:7", "rerun", "--task", "two")["task"] == "two"
    assert [one["task"] for one in ask(place, "uncertain")["executions"]] == ["one"]


@pytest.mark.parametrize("length", [199, 200, 201, 300])
@pytest.mark.parametrize("is_as_shown", [True, False])
def test_a_long_key_may_be_given_as_it_is_or_as_it_is_shown(place, length, is_as_shown):
    invoice = "x" * (length - len("invoice:"))
    result, _ = die(place, paying(place), invoice)
    (one,) = ask(place, "uncertain")["executions"]
    assert len(one["execution_key"]) == min(length, 200)
    key = one["execution_key"] if is_as_shown else f"invoice:{invoice}"
    assert explained(place, key, "--execution-key")[1]["uncertain"]["task_id"] == result.id
    assert run(place, "resolve", key, "rerun").exit_code == 0
    assert ask(place, "uncertain")["executions"] == []


# How it is said.


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"waiting": 1}, "1 trigger waits for word; nobody has tried to find out. Who"),
        ({"tries": 3, "next_try": -1.0}, "it was tried 3 times to find out, the next is due. Who"),
        ({"execution_key": "pay 7"}, "resolve 'pay 7' succeeded|failed|rerun"),
        ({"task_id": "", "worker": ""}, "the run of unknown on unknown, which died 4.0 s ago, has done"),
        ({"asked_by": "", "tries": 2}, "a worker is finding out, at try 2, what the run of t1 on w1"),
    ],
)
def test_what_nobody_knows_is_one_sentence(more, text):
    facts = {"task_id": "t1", "worker": "w1", "waiting": 0, "tries": 0, "next_try": None, "asked_by": None, **more}
    facts = {"lock_name": "billing", "task": "billing", "execution_key": "pay:7", "age": 4.0, **facts}
    assert text in doubts.why_uncertain(Uncertainty(**facts))


@pytest.mark.parametrize(
    ("stored", "shown"),
    [
        (["resolved", ""], ("somebody knew", None, None)),
        (["resolved", "seen at the bank"], ("somebody knew: seen at the bank", None, None)),
        (["resolved", "x" * 300], (f"somebody knew: {'x' * 185}…", None, None)),
    ],
)
def test_what_a_person_said_is_shown(stored, shown):
    assert told("failed", json.dumps(stored)) == shown
