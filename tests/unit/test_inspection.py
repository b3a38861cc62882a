"""What the commands for operators show, and what `release` does to the store."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_singleflight import commands, doubts, findings, lock, replays, showing
from celery_singleflight.claims import Acquired, Claim, Encoded, Ended, Finished, Held, Outcome, Record
from celery_singleflight.findings import Turns
from celery_singleflight.inspection import _RELEASE, inspecting
from celery_singleflight.keys import LockKey
from celery_singleflight.lease import Lease
from celery_singleflight.store import Renewal

LOCK = LockKey.of("billing", ["acct_1"])
OTHER = LockKey.of("billing", ["acct_2"])
MESSAGE = b'{"headers": {"argsrepr": "secret"}}\nsecret'


class Desk:
    """The store of an app, and its command line."""

    def __init__(self, place) -> None:
        self.app = place.app
        self.store = place.store
        self.client = place.client

    def claim(self, task_id="t1", lock_key=LOCK, execution_key=None, message=MESSAGE, **how):
        facts = {"worker": "w1@test", "limit": 1, "ttl": 30.0, "keep": 600.0, "on_held": "wait", "message": message, **how}
        owner = uuid4().hex
        return Claim(Record(lock_key, task_id, execution_key), owner=owner, run_id=owner, **facts)

    def hold(self, *args, **how):
        claim = self.claim(*args, **how)
        entered = self.store.enter(claim)
        assert isinstance(entered, Acquired), entered
        return claim, entered.token

    def lease(self, claim, token):
        return Lease(
            claim.record.lock_key,
            owner=claim.owner,
            token=token,
            limit=claim.limit,
            ttl=claim.ttl,
            max_hold=3600.0,
            requested_at=0.0,
        )

    def finish(self, claim, token, outcome=Outcome.SUCCEEDED, reason="[]", body=b"secret", hold=0.0):
        """Return who has taken over, or None when it is recorded."""
        value = Encoded("application/json", "utf-8", body)
        lease = self.lease(claim, token)
        answer = self.store.finish(lease, claim.record, outcome, value, reason=reason, keep=600.0, hold=hold)
        return None if answer == Finished([]) else answer

    def renew(self, claim, token):
        (renewal,) = self.store.renew([(self.lease(claim, token), claim.record, claim.ttl)])
        assert not renewal.stop_by
        return renewal.lost

    def expire(self, claim, ago=1000):
        """Let the lease have ended a second ago."""
        names = self.store.names(claim.record)
        seconds, micros = self.client.time()
        past = seconds * 1000 + micros // 1000 - ago
        line = self.client.hget(names["lease"], claim.owner)
        self.client.hset(names["lease"], claim.owner, "\n".join([str(past), *line.split("\n")[1:]]))
        self.client.hset(names["execution"], "until_ms", past)

    def due(self, lock_name="billing"):
        """In how many seconds the sweeper looks at each trigger."""
        seconds, micros = self.client.time()
        scores = self.client.zrange(self.store.keys.due(lock_name), 0, -1, withscores=True)
        return {member: score / 1000 - seconds - micros / 1e6 for member, score in scores}

    def run(self, *arguments):
        """Run a command; its result has `output`, `stderr` and `exit_code`."""
        obj = CLIContext(app=self.app, no_color=False, workdir=None)
        result = CliRunner().invoke(commands.singleflight, [str(word) for word in arguments], obj=obj)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        return result

    def ask(self, *arguments):
        """Return the JSON document of a command."""
        return json.loads(self.run(*arguments, "--json").stdout)


@pytest.fixture(autouse=True)
def answers(monkeypatch):
    """What workers say when they are asked: which triggers they run."""
    answers = {}
    monkeypatch.setattr("celery_singleflight.asking.ask_workers", lambda app, workers: answers)
    return answers


@pytest.fixture
def desk(place):
    return Desk(place)


def table(output):
    """The cells of an aligned table, by the heads of its columns."""
    lines = output.splitlines()
    heads = re.split(r"  +", lines[0])
    rows = []
    for line in lines[1:]:
        if not line:
            break
        rows.append(dict(zip(heads, re.split(r"  +", line), strict=True)))
    return rows


# locks


def test_a_store_in_which_nothing_is_held_says_so(desk):
    assert desk.run("locks").output == "No lock key is held or waited for.\n"
    assert desk.ask("locks") == {"locks": [], "lock_names": [], "left_out": 0}


def test_a_held_key_is_listed_with_its_holder_token_and_time_left(desk):
    claim, token = desk.hold()
    (row,) = table(desk.run("locks").output)
    assert row == {
        "LOCK KEY": LOCK.text,
        "TRIGGER": "t1",
        "WORKER": "w1@test",
        "TOKEN": str(token),
        "AGE": "0.0 s",
        "LEFT": row["LEFT"],
        "LEASE": "live",
        "IN LINE": "0",
        "TURNS": "-",
    }
    assert 29 < float(row["LEFT"].removesuffix(" s")) <= 30
    (holder,) = desk.ask("locks")["locks"][0]["holders"]
    assert holder["owner"] == claim.owner


def test_an_expired_holder_is_told_from_a_live_one(desk):
    claim, _ = desk.hold()
    desk.expire(claim)
    (row,) = table(desk.run("locks").output)
    assert (row["LEASE"], row["LEFT"][:2]) == ("expired", "-1")


def test_a_place_kept_by_min_hold_is_told_from_a_holder(desk):
    claim, token = desk.hold()
    assert desk.finish(claim, token, hold=20.0) is None
    (row,) = table(desk.run("locks").output)
    assert row["LEASE"] == "ended"
    assert "its min_hold keeps the place for" in desk.ask("explain", LOCK.text)["why"]


def test_every_holder_of_a_key_of_limit_two_is_listed(desk):
    tokens = [desk.hold(task_id, limit=2)[1] for task_id in ("t1", "t2")]
    assert [row["TOKEN"] for row in table(desk.run("locks").output)] == [str(token) for token in tokens]


def test_a_trigger_that_waits_has_a_turn_and_is_counted_by_its_lock_name(desk):
    desk.hold()
    for task_id in ("t2", "t3"):
        assert isinstance(desk.store.enter(desk.claim(task_id)), Held)
    found = desk.ask("locks")
    assert found["locks"][0]["turns"]["next_turn"] > 0
    assert found["lock_names"] == [
        {
            "lock_name": "billing",
            "with_broker": 2,
            "examined": 3,
            "is_complete": True,
            "in_custody": 1,
            "due": 0,
            "waiting_for_word": 0,
        }
    ]


def test_more_records_than_are_looked_at_are_said_to_be_more(desk, monkeypatch):
    monkeypatch.setattr("celery_singleflight.inspection.EXAMINED", 2)
    desk.hold()
    for number in range(4):
        desk.store.enter(desk.claim(f"w{number}"))
    (counts,) = desk.ask("locks")["lock_names"]
    assert (counts["examined"], counts["is_complete"]) == (2, False)
    assert " or more" in desk.run("locks").output


def test_what_is_beyond_the_limit_is_counted(desk):
    for number in range(5):
        desk.hold(f"t{number}", LockKey.of("billing", [number]))
    found = desk.ask("locks", "--limit", 2)
    assert ([one["lock_key"] for one in found["locks"]], found["left_out"]) == (["billing[0]", "billing[1]"], 3)
    assert "and 3 more lock keys, beyond --limit" in desk.run("locks", "--limit", 2).output


def test_only_keys_of_the_named_lock_and_of_this_prefix_are_listed(desk):
    desk.hold()
    desk.hold("t2", LockKey.of("shipping", ["acct_1"]))
    desk.client.hset("{elsewhere0}:1:lease:billing[9]", "owner", "1\n1\n1\nw\nt")
    desk.client.set("celery-task-meta-1", "secret")
    assert [one["lock_key"] for one in desk.ask("locks")["locks"]] == [LOCK.text, 'shipping["acct_1"]']
    assert [one["lock_key"] for one in desk.ask("locks", "--name", "billing")["locks"]] == [LOCK.text]


@pytest.mark.parametrize("name", ["billing:eu", "50%", "a[b]", "what?*", "x" * 150, "ünïcode"])
def test_any_lock_name_is_found_again(desk, name):
    lock_key = LockKey.of(name, ["acct_*[1]", "y" * 100])
    desk.hold("t:1", lock_key)
    (found,) = desk.ask("locks", "--name", name)["locks"]
    assert (found["lock_key"], found["lock_name"]) == (lock_key.text, name)
    assert desk.ask("explain", lock_key.text)["lock"]["holders"][0]["task_id"] == "t:1"
    (trigger,) = desk.ask("explain", "t:1")["triggers"]
    assert (trigger["lock_name"], trigger["lock_key"], trigger["state"]) == (name, lock_key.text, "running")


# explain


def why(desk, *arguments):
    return desk.ask("explain", *arguments)["why"]


def test_a_held_key_names_who_holds_it(desk):
    desk.hold()
    assert re.fullmatch(r"t1 on w1@test holds it.*", why(desk, LOCK.text))


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({}, "its worker does not answer"),
        ({"w1@test": set()}, "but its worker does not run it"),
        ({"w1@test": {"t1"}}, "its lease has"),
    ],
)
def test_what_the_holders_worker_says_is_told(desk, answers, said, text):
    answers.update(said)
    desk.hold()
    assert text in why(desk, LOCK.text)


def test_a_key_that_was_released_is_free(desk):
    claim, token = desk.hold()
    desk.finish(claim, token)
    assert why(desk, LOCK.text) == "nobody holds it: a trigger that comes now runs"


def test_a_run_that_has_died_comes_up_for_rescue(desk):
    claim, _ = desk.hold()
    desk.expire(claim)
    assert desk.ask("explain", "t1")["triggers"][0]["state"] == "expired"
    assert "the sweeper of a worker is to publish it again" in why(desk, "t1")
    assert "without a finish: a trigger that comes now runs" in why(desk, LOCK.text)


def test_a_run_that_was_given_back_is_in_custody(desk):
    claim, _ = desk.hold()
    desk.store.abandon(claim.owner, claim.record, again=5.0)
    (trigger,) = desk.ask("explain", "t1")["triggers"]
    assert (trigger["state"], trigger["message_bytes"]) == ("in custody", len(MESSAGE))
    assert 4 < trigger["next_attention"] <= 5


def test_a_run_that_died_without_a_message_in_the_store_is_left_to_the_broker(desk):
    claim, _ = desk.hold(message=b"")
    desk.expire(claim)
    assert why(desk, "t1").startswith("its run has died, and the store has no message of it")


def test_a_trigger_that_waits_is_with_the_broker(desk):
    desk.hold()
    desk.store.enter(desk.claim("t2"))
    assert why(desk, "t2").startswith("it is with the broker: it waits its turn")


def test_a_skipped_trigger_names_its_blocker(desk):
    desk.hold()
    assert isinstance(desk.store.enter(desk.claim("t2", on_held="skip")), Ended)
    (trigger,) = desk.ask("explain", "t2")["triggers"]
    assert (trigger["ending"]["outcome"], trigger["ending"]["blocker_task_id"]) == ("skipped", "t1")
    (last,) = desk.ask("explain", LOCK.text)["last"]
    assert last["task_id"] == "t2"


def test_deaths_and_handouts_are_counted_until_the_dead_letter(desk):
    claim, _ = desk.hold(max_deliveries=2)
    desk.expire(claim)
    desk.store.rescue(claim.record)
    (trigger,) = desk.ask("explain", "t1")["triggers"]
    assert trigger["handouts"] == 1
    desk.expire(desk.hold(max_deliveries=2)[0])
    assert desk.ask("explain", "t1")["triggers"][0]["deaths"] == 1
    assert isinstance(desk.store.enter(desk.claim(max_deliveries=2)), Ended)
    assert "dead-lettered: 2 of its runs died with their process, the last on w1@test" in why(desk, "t1")


def test_an_explicit_execution_key_is_explained_by_itself_and_by_its_trigger(desk):
    claim, token = desk.hold(execution_key="pay:1")
    (trigger,) = desk.ask("explain", "t1")["triggers"]
    assert (trigger["execution_key"], trigger["state"], trigger["lock_key"]) == ("pay:1", "running", LOCK.text)
    assert desk.ask("explain", "pay:1", "--execution-key")["lock"]["holders"][0]["task_id"] == "t1"
    desk.finish(claim, token)
    assert "it has ended" in why(desk, "pay:1", "--execution-key")


def test_an_execution_key_is_found_where_the_store_keeps_no_message(desk):
    desk.hold(execution_key="pay:1", message=b"")
    assert desk.ask("explain", "t1")["triggers"][0]["execution_key"] == "pay:1"


def test_the_next_look_of_the_sweeper_is_told(desk):
    desk.hold()
    (trigger,) = desk.ask("explain", LOCK.text)["triggers"]
    assert 29 < trigger["next_attention"] <= 30


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_arguments_results_and_errors_are_never_shown(desk, as_json):
    claim, token = desk.hold()
    said = [desk.run("explain", "t1", *as_json).output]
    desk.finish(claim, token, Outcome.FAILED, reason=json.dumps(["ValueError('secret', 42)"]))
    said += [desk.run("explain", key, *as_json).output for key in ("t1", LOCK.text)]
    said += [desk.run("locks", *as_json).output]
    assert "secret" not in "".join(said)
    assert "ValueError(…)" in said[1] or "ValueError(\\u2026)" in said[1]


@pytest.mark.parametrize(
    ("stored", "shown"),
    [
        (json.dumps(["ValueError('secret', 42)"]), "ValueError(…)"),
        (json.dumps(["<HttpError 404 when asking for secret>"]), "…"),
        ("WorkerLostError('Worker exited prematurely: signal 9 (SIGKILL)')", "WorkerLostError(…)"),
        ("the hard time limit passed", "the hard time limit passed"),
        (json.dumps(["the hard time limit passed"]), "the hard time limit passed"),
        ("[]", ""),
    ],
)
def test_of_an_error_its_type_is_shown(desk, stored, shown):
    claim, token = desk.hold()
    desk.finish(claim, token, Outcome.FAILED, reason=stored)
    assert desk.ask("explain", "t1")["triggers"][0]["ending"]["reason"] == shown


@pytest.mark.parametrize(
    ("stored", "shown"),
    [
        (["coalesced", "t9"], "it has the outcome of t9"),
        (["replaced", "t9"], "by t9"),
        (["answered", None], "answered from the outcome of unknown"),
    ],
)
def test_of_one_that_did_not_run_itself_it_is_told_by_whom_it_ended(desk, stored, shown):
    claim, token = desk.hold()
    desk.finish(claim, token, Outcome.REPLACED, reason=json.dumps(stored))
    ending = desk.ask("explain", "t1")["triggers"][0]["ending"]
    assert (ending["reason"], ending["blocker_task_id"]) == (shown, stored[1])


@pytest.mark.parametrize(
    ("stored", "shown"),
    [
        (["task", "shop.bill"], "its execution key belongs to the task shop.bill"),
        (["payload", "shop.bill"], "its execution key was recorded by shop.bill with another payload"),
    ],
)
def test_of_one_that_was_refused_its_execution_key_it_is_told_whose_that_is(desk, stored, shown):
    claim, token = desk.hold()
    desk.finish(claim, token, Outcome.FAILED, reason=json.dumps(stored))
    ending = desk.ask("explain", "t1")["triggers"][0]["ending"]
    assert (ending["reason"], ending["blocker_task_id"]) == (shown, None)


def test_when_a_lease_was_renewed_follows_from_the_ttl_of_its_tasks(place):
    desk = Desk(place)

    def bill(account):
        """Not called."""

    place.task(bill, name="billing", lock_on=("account",), lease_ttl=40.0)
    desk.hold()
    (signs,) = desk.ask("explain", LOCK.text)["signs"]
    assert signs["renewed_ago"] == pytest.approx(10.0, abs=1.0)


def test_a_holder_that_is_no_worker_is_not_asked(desk):
    with lock(desk.app, "billing", "acct_1"):
        (signs,) = desk.ask("explain", LOCK.text)["signs"]
    assert (signs["worker_answers"], signs["renewed_ago"]) == (None, None)


# Keys that are not there, stores that are away.


def test_an_unknown_key_is_refused_and_the_nearest_is_named(desk):
    desk.hold()
    result = desk.run("explain", 'billing["acct_l"]')
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: expected a lock key that was held within the last day, or the id of a trigger")
    assert result.stderr.endswith(f"; nearest: {LOCK.text}\n")


def test_an_unknown_execution_key_and_an_unknown_lock_key_to_release_are_refused(desk):
    desk.hold(execution_key="pay:1")
    result = desk.run("explain", "pay:2", "--execution-key")
    assert (result.exit_code, result.stderr.rpartition("; ")[2]) == (1, "nearest: pay:1\n")
    assert desk.run("release", "nothing", "--token", 1).exit_code == 1


@pytest.mark.parametrize(
    "command", [["locks"], ["explain", "x"], ["uncertain"], ["resolve", "x", "rerun"], ["release", "x", "--token", "1"]]
)
def test_a_store_that_is_away_is_one_line_and_exit_code_2(command):
    app = Celery("away", set_as_current=False)
    app.conf.singleflight_url = "redis://:hidden@127.0.0.1:1/0"
    result = CliRunner().invoke(commands.singleflight, command, obj=CLIContext(app, no_color=True, workdir=None))
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(r"Error: the store does not answer: .*\n", result.stderr)
    assert "hidden" not in result.stderr


@pytest.mark.parametrize(
    ("setting", "text"),
    [("", "there is no store for leases"), ("mysql://host", "the store at mysql://host cannot be used")],
)
def test_an_app_without_a_store_is_told_what_is_expected(setting, text):
    app = Celery("none", set_as_current=False, broker="memory://")
    app.conf.singleflight_url = setting
    result = CliRunner().invoke(commands.singleflight, ["locks"], obj=CLIContext(app, no_color=True, workdir=None))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {text}")


# release


def release(desk, token, *more, key=LOCK.text):
    return desk.run("release", key, "--token", token, *more)


def test_an_expired_holder_is_released_and_its_trigger_comes_up_at_once(desk):
    claim, token = desk.hold()
    desk.expire(claim)
    desk.store.rescue(claim.record)
    assert desk.due()["t1"] > 5, "the message was handed out just now, and the next look was put off"

    result = release(desk, token)

    assert (result.exit_code, "published again at once" in result.stdout) == (0, True)
    assert desk.due()["t1"] <= 0
    assert desk.store.rescue(claim.record).message == MESSAGE
    assert desk.renew(claim, token) == "taken"
    assert desk.finish(claim, token) is not None
    (trigger,) = desk.ask("explain", "t1")["triggers"]
    assert (trigger["deaths"], trigger["is_released"]) == (1, True)


def test_a_live_holder_is_not_released_without_force(desk):
    claim, token = desk.hold()
    before = desk.client.hgetall(desk.store.names(claim.record)["lease"])
    result = release(desk, token)
    assert result.exit_code == 3
    assert re.search(r"t1 on w1@test holds it for 0\.\d s, its lease has (29|30)\.\d s left", result.stderr)
    assert desk.client.hgetall(desk.store.names(claim.record)["lease"]) == before
    assert desk.finish(claim, token) is None


def test_a_live_holder_is_released_by_force_and_nothing_of_it_counts_afterwards(desk):
    claim, token = desk.hold()
    assert release(desk, token, "--force").exit_code == 0
    assert desk.due()["t1"] <= 0
    assert desk.renew(claim, token) == "taken"
    assert desk.finish(claim, token) is not None
    # The holder gives back what it has lost: its message stays with the store.
    desk.store.abandon(claim.owner, claim.record)
    assert desk.store.rescue(claim.record).message == MESSAGE
    assert desk.ask("explain", "t1")["triggers"][0]["deaths"] == 0
    assert desk.hold()[1] > token


def test_a_token_that_is_not_the_holders_is_refused_even_by_force(desk):
    claim, token = desk.hold()
    result = release(desk, token + 1, "--force")
    assert (result.exit_code, "expected the --token of a holder" in result.stderr) == (3, True)
    assert desk.renew(claim, token) == ""


def test_a_key_that_nobody_holds_has_nothing_to_release(desk):
    claim, token = desk.hold()
    desk.finish(claim, token)
    result = release(desk, token, "--force")
    assert (result.exit_code, result.stderr.splitlines()[0]) == (3, f"{LOCK.text}: nobody holds it")


def test_a_refusal_is_a_json_document_too(desk):
    _, token = desk.hold()
    result = release(desk, token, "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["is_released"], found["why"], found["fencing_token"]) == (3, False, "live", token)
    assert found["holders"][0]["task_id"] == "t1"


def test_the_run_of_an_explicit_execution_key_is_released_as_a_whole(desk):
    claim, token = desk.hold(execution_key="pay:1")
    assert release(desk, token, "--force").exit_code == 0
    assert desk.due()["t1\npay:1"] <= 0
    assert desk.finish(claim, token) is not None
    again, token = desk.hold(execution_key="pay:1")
    assert desk.finish(again, token) is None


def test_what_a_released_holder_has_called_directly_under_its_lease_does_not_count_either(desk):
    claim, token = desk.hold()
    nested = claim._replace(record=Record(LOCK, claim.owner, "pay:1", has_trigger=False), message=b"")
    assert isinstance(desk.store.enter(nested), Acquired)
    assert release(desk, token, "--force").exit_code == 0
    assert desk.finish(nested, token, hold=None) is not None


def test_one_of_two_holders_is_released_and_the_other_stays(desk):
    (first, token), (second, other) = desk.hold("t1", limit=2), desk.hold("t2", limit=2)
    assert release(desk, token, "--force").exit_code == 0
    assert (desk.renew(first, token), desk.renew(second, other)) == ("taken", "")
    assert desk.finish(second, other) is None


def test_a_holder_without_a_message_in_the_store_is_released_with_a_warning(desk):
    claim, token = desk.hold(message=b"")
    desk.expire(claim)
    assert "the store has no message of it" in release(desk, token).stdout
    assert desk.due() == {}


def test_a_lock_of_a_script_can_be_taken_away(desk):
    with lock(desk.app, "billing", "acct_1") as lease:
        assert release(desk, lease.fencing_token, "--force").exit_code == 0
        assert desk.store.renew([(lease, Record(LOCK, lease.owner, None), 5.0)]) == [Renewal(lost="taken", stop_by="")]
        desk.hold()


def test_a_place_kept_by_min_hold_is_given_up_by_force(desk):
    claim, token = desk.hold()
    desk.finish(claim, token, hold=20.0)
    assert release(desk, token).exit_code == 3
    assert release(desk, token, "--force").exit_code == 0
    assert desk.ask("explain", "t1")["triggers"][0]["ending"]["outcome"] == "succeeded"
    desk.hold("t2")


def run_script(desk, claim, token, force):
    names = desk.store.names(claim.record)
    named = {"token": token, "task_id": claim.record.task_id, "member": claim.record.member, "force": force}
    named["lock_key"] = claim.record.lock_key.text
    return desk.store._run(_RELEASE, names, named)


def test_a_release_whose_reply_was_lost_gives_the_same_answer_again(desk):
    claim, token = desk.hold()
    assert run_script(desk, claim, token, 0).word == "live"
    assert run_script(desk, claim, token + 1, 1).word == "other", "somebody else came in since the operator looked"
    desk.expire(claim)
    assert [run_script(desk, claim, token, 0) for _ in range(2)] == [("released", b"stored")] * 2
    assert desk.ask("explain", "t1")["triggers"][0]["deaths"] == 1
    assert run_script(desk, claim, token + 1, 0).word == "other"


def test_whatever_release_leaves_goes_by_itself(desk):
    claim, token = desk.hold()
    desk.client.delete(desk.store.names(claim.record)["trigger"])
    assert release(desk, token, "--force").exit_code == 0
    # The index of what is due is bounded by the sweeper.
    assert [key for key in desk.client.scan_iter() if desk.client.ttl(key) < 0 and ":due:" not in key] == []


# How it is printed.


def test_without_a_terminal_there_is_no_colour_and_columns_are_aligned(desk):
    desk.expire(desk.hold()[0])
    output = desk.run("locks").output
    assert "\x1b" not in output
    first, second = output.splitlines()[:2]
    assert first.index("TRIGGER") == second.index("t1")


def test_with_rich_the_same_cells_are_shown_in_full(desk, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    desk.hold()
    with inspecting(desk.app) as inspection:
        showing.show_locks(inspection.locks(limit=10), showing.Paper(is_rich=True))
    printed = capsys.readouterr().out
    assert "LOCK" in printed
    assert " t1 " in printed
    assert "…" not in printed


@pytest.mark.parametrize(
    ("is_terminal", "no_color", "is_rich"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_rich_is_for_terminals_and_those_who_want_colour(monkeypatch, is_terminal, no_color, is_rich):
    papers = []
    monkeypatch.setattr(commands.sys, "stdout", SimpleNamespace(isatty=lambda: is_terminal))
    context = SimpleNamespace(obj=SimpleNamespace(no_color=no_color))
    commands._print(context, None, as_json=False, show=lambda _, paper: papers.append(paper._is_rich))
    assert papers == [is_rich]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.04, "0.0 s"), (99.9, "99.9 s"), (-3.21, "-3.2 s"), (100, "1 min 40 s"), (-7322, "-2 h 2 min")],
)
def test_durations_are_short(seconds, text):
    assert showing._seconds(seconds) == text


@pytest.mark.parametrize(
    ("hold_ms", "next_ms", "turns"),
    [
        (None, None, Turns(None, 0.0, 0)),
        (None, "14000", Turns(None, 4.0, None)),
        ("2000", "14000", Turns(2.0, 4.0, 2)),
        ("2000", "9000", Turns(2.0, 0.0, 0)),
    ],
)
def test_turns_tell_about_how_many_wait(hold_ms, next_ms, turns):
    assert Turns.of_pace(hold_ms, next_ms, 10_000) == turns


# The documents, as docs/reference/commands.md has them.

NAMED = [getattr(module, name) for module in (findings, doubts, replays) for name in module.__all__]
DOCUMENTS = [document for document in NAMED if dataclasses.is_dataclass(document)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.__name__)
def test_the_keys_of_a_json_document_are_documented(document):
    text = (Path(__file__).parents[2] / "docs/reference/commands.md").read_text(encoding="utf-8")
    rows = text.partition(f"<!-- keys: {document.__name__} -->")[2].partition("\n\n| ")[2].partition("\n\n")[0].splitlines()
    assert [row.strip("| ").split(" | ")[0].strip("`") for row in rows[2:]] == [
        field.name for field in dataclasses.fields(document)
    ]
