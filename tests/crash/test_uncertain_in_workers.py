"""The process dies between the charge and its record: nobody charges again until somebody knows, and then all get an answer."""

from __future__ import annotations

import json

import pytest
import uncertain_app
from aftermath import assert_nothing_is_left, delete_queue, kill_child, kill_worker, messages_with, queue_on_rabbitmq
from celery import chain, chord, states
from celery.bin.base import CLIContext
from celery.exceptions import TimeLimitExceeded
from click.testing import CliRunner
from nodes import redis_settings, wait_until
from uncertain_app import let_bank_answer

from celery_singleflight import ExecutionUncertain, MaxHoldExceeded, commands, resolve


@pytest.fixture(scope="module")
def crowd(start_shared, valkey):
    """Two workers of two processes, on a broker that delivers again after an hour."""
    settings = redis_settings(valkey.url, singleflight_lease_ttl=2, broker_transport_options={"visibility_timeout": 3600})
    return start_shared(settings, app_module=uncertain_app)


@pytest.fixture
def place(crowd, request):
    request.node.place = crowd
    return crowd


def charges(place, key):
    return len(place.ledger.read(key, "charge"))


def waits_for_word(result):
    return result.state == states.RETRY and isinstance(result.result, ExecutionUncertain)


def held(place, result):
    wait_until(lambda: waits_for_word(result), 20, "it waits for word")


def say(place, name, outcome, key, **how):
    return resolve(place.app, f"protected_app.{name}", outcome, execution_key=f"pay:{key}", **how)


def test_twenty_later_triggers_do_not_charge_and_all_get_what_a_person_says(place, key):
    first = place.task("charge").delay(key)
    held(place, first)
    later = [place.task("charge").delay(key) for _ in range(20)]
    for result in later:
        held(place, result)
    assert charges(place, key) == 1
    wait_until(lambda: messages_with(place, key) == 0, 10, "they wait in the store, and take no slot")

    assert say(place, "charge", "succeeded", key, result="charged, says the bank") == 21
    assert {result.get(timeout=20) for result in (first, *later)} == {"charged, says the bank"}
    assert charges(place, key) == 1
    for result in (first, *later):
        assert_nothing_is_left(place, result.id, key)


def operator(place, *arguments):
    obj = CLIContext(app=place.app, no_color=True, workdir=None)
    said = CliRunner().invoke(commands.singleflight, [*arguments, "--json"], obj=obj)
    assert said.exit_code == 0, said.output
    return json.loads(said.stdout)


def test_an_operator_sees_what_is_uncertain_and_says_what_it_has_done(place, key):
    first = place.task("charge").delay(key)
    held(place, first)
    later = place.task("charge").delay(key)
    held(place, later)

    found = operator(place, "uncertain", "--name", "protected_app.charge")["executions"]
    (one,) = [one for one in found if one["execution_key"] == f"pay:{key}"]
    assert (one["task_id"], one["task"], one["waiting"]) == (first.id, "protected_app.charge", 2)
    states_of = [operator(place, "explain", result.id)["triggers"][0]["state"] for result in (first, later)]
    assert states_of == ["uncertain", "waits for word"]

    assert operator(place, "resolve", f"pay:{key}", "succeeded", "--result", '"charged"')["waiting"] == 2
    assert {first.get(timeout=20), later.get(timeout=20)} == {"charged"}
    assert charges(place, key) == 1


def test_twenty_later_triggers_wait_for_the_reconciler_and_all_get_what_it_finds(place, key):
    let_bank_answer(place.ledger, key, "unknown")
    first = place.task("charge_reconciled").delay(key)
    held(place, first)
    later = [place.task("charge_reconciled").delay(key) for _ in range(20)]
    for result in later:
        held(place, result)
    assert charges(place, key) == 1

    let_bank_answer(place.ledger, key, "charged")
    assert {result.get(timeout=30) for result in (first, *later)} == {"found at the bank"}
    assert charges(place, key) == 1
    asked = place.ledger.read(key, "asked")
    assert [row["tries"] for row in asked] == list(range(1, len(asked) + 1))
    assert {(row["execution"], row["died"]) for row in asked} == {(f"pay:{key}", first.id)}


def test_a_reconciler_that_dies_is_asked_again_by_another(place, key):
    let_bank_answer(place.ledger, key, "die", "die", "charged")
    result = place.task("charge_reconciled").delay(key)
    assert result.get(timeout=40) == "found at the bank"
    assert [row["tries"] for row in place.ledger.read(key, "asked")] == [1, 2, 3]
    assert charges(place, key) == 1


def test_what_the_bank_does_not_know_is_charged_once_more(place, key):
    let_bank_answer(place.ledger, key, "not charged")
    results = [place.task("charge_reconciled").delay(key) for _ in range(5)]
    assert len({result.get(timeout=30) for result in results}) == 1
    assert charges(place, key) == 2


def test_under_rerun_the_next_attempt_is_told(place, key):
    result = place.task("charge_or_rerun").delay(key)
    assert result.get(timeout=20) == "charged by attempt 2"
    first, second = place.ledger.read(key, "charge")
    assert (first["told"], second["told"]) == (False, True)
    assert first["run"] == second["run"]


def test_the_rest_of_a_chain_and_a_chord_come_with_what_is_said(place, key):
    work, note = place.task("charge_by_id"), place.task("work")
    in_chain = chain(work.si(key), note.si(f"{key}-tail", "tail"))
    in_chord = chord([work.si(f"{key}-1")], note.si(f"{key}-body", "body"))
    chained, chorded = in_chain.delay(), in_chord.delay()
    member = chorded.parent.results[0]
    for result, each in ((chained.parent, key), (member, f"{key}-1")):
        held(place, result)
        resolve(place.app, work.name, "succeeded", task_id=result.id, result=f"said of {each}")
    assert chained.get(timeout=20) == "tail"
    assert chorded.get(timeout=20) == "body"
    assert charges(place, key) == charges(place, f"{key}-1") == 1


@pytest.mark.parametrize(("name", "error"), [("charge_in_time", TimeLimitExceeded), ("charge_and_hold", MaxHoldExceeded)])
def test_a_run_that_is_cut_off_fails_its_trigger_and_leaves_its_execution_uncertain(place, key, name, error):
    first = place.task(name).delay(key, then="stand")
    with pytest.raises(error):
        first.get(timeout=20)
    later = place.task(name).delay(key, then="stand")
    held(place, later)
    assert charges(place, key) == 1
    say(place, name, "failed", key, reason="the bank has refused")
    assert later.get(timeout=20) == "charged by attempt 1", "under forget it runs again, as its own attempt"
    assert charges(place, key) == 2


def test_one_that_is_revoked_while_it_waits_for_word_ends(place, key):
    first = place.task("charge").delay(key)
    held(place, first)
    later = place.task("charge").delay(key)
    held(place, later)
    place.app.control.revoke(later.id)
    wait_until(lambda: later.state == states.REVOKED, 20, "it is revoked")
    assert say(place, "charge", "succeeded", key, result="charged") >= 1
    assert first.get(timeout=20) == "charged"
    assert charges(place, key) == 1


def test_one_whose_wait_timeout_passes_ends_as_uncertain(place, key):
    held(place, place.task("charge").delay(key))
    later = place.task("charge").apply_async((key,), wait_timeout=1)
    with pytest.raises(ExecutionUncertain):
        later.get(timeout=20)
    assert charges(place, key) == 1


@pytest.fixture
def place_on_rabbitmq(start_place, valkey, rabbitmq):
    settings = redis_settings(valkey.url, singleflight_lease_ttl=2, **queue_on_rabbitmq(rabbitmq, "quorum"))
    place = start_place(settings, app_module=uncertain_app, workers=2, concurrency=1)
    yield place
    for worker in place.workers:
        worker.teardown()
    delete_queue(place)


@pytest.mark.parametrize("found_by", ["its main process", "nobody before its lease ends"])
def test_on_rabbitmq_a_killed_process_leaves_the_same(place_on_rabbitmq, key, found_by):
    place = place_on_rabbitmq
    first = place.task("charge").delay(key, then="stand")
    (charge,) = wait_until(lambda: place.ledger.read(key, "charge"), 20)
    if found_by == "its main process":
        kill_child(place, charge["pid"])
    else:
        kill_worker(place, charge["pid"])
    held(place, first)
    later = place.task("charge").delay(key, then="stand")
    held(place, later)
    assert say(place, "charge", "succeeded", key, result="charged") == 2
    assert {first.get(timeout=20), later.get(timeout=20)} == {"charged"}
    assert charges(place, key) == 1
