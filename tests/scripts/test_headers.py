"""The header of a script is its declaration: what it names is what Python must give and what the body may answer."""

from __future__ import annotations

import re
from contextlib import suppress
from copy import copy
from importlib.resources import files

import pytest
from desk import LOCK, Desk
from step_desk import VALUE, Run

from celery_singleflight.announcements import Announcement
from celery_singleflight.claims import Outcome, Terms, Waits
from celery_singleflight.custody import Settled
from celery_singleflight.errors import ExecutionKeyReused, LeaseLost, ScriptError
from celery_singleflight.script import Script, load
from celery_singleflight.store import Store

TRIGGER = ("execution", "trigger")
#: What belongs to those who wait for a lock key.
WAITING = ("pace", "line", "called", "parked", "followers", "baton")
ENCODED = ("content_type", "content_encoding", "body")
#: What every write of a run is given, and how it is told that somebody has taken over.
PROGRESS = ("lease", "fence", *TRIGGER, "steps")
WRITES = ("owner", "token", "limit", "run", "keep_ms")
TAKEN_OVER = {"refused": ("owner", "outcome")}
HEADERS = {
    "enter": (
        ("lease", "fence", *WAITING, *TRIGGER, "due", "steps"),
        (
            *("owner", "task_id", "worker", "lock_key", "run", "copy", "previous", "generation", "limit", "ttl_ms", "keep_ms"),
            *("on_held", "wait_ms", "first_ms", "grace_ms", "message", "member", "deaths", "task", "waits", "ticket", "terms"),
        ),
        {
            "acquired": ("fence", "run", "attempt", "unsure", "calls"),
            "held": (
                *("what", "holder", "age_ms", "remaining_ms", "hold_ms", "turn_ms", "now_ms", "first_ms"),
                *("place", "tries", "ticket"),
            ),
            "parked": ("how", "holder", "age_ms", "remaining_ms", "place", "ticket", "calls"),
            "linger": ("ms", "ticket", "calls"),
            "led": ("by",),
            "merge": ("by", "copy", "message"),
            "ended": ("outcome", "settled", "reason", *ENCODED, "calls"),
            "died": (),
            "surplus": ("why",),
            "reused": ("by_task", "what"),
            "uncertain": ("how", "holder", "age_ms", "calls"),
        },
    ),
    "renew": (
        ("lease", *TRIGGER, "pace"),
        ("owner", "ttl_ms"),
        {"renewed": ("remaining_ms", "stop_by"), "lost": ("why",)},
    ),
    "finish": (
        ("lease", "fence", *WAITING, *TRIGGER, "due"),
        (
            *("owner", "lock_key", "member", "token", "limit", "outcome", "reason", *ENCODED),
            *("keep_ms", "hold_ms", "remember_ms", "failure"),
        ),
        {"finished": ("calls",), "refused": ("owner", "outcome")},
    ),
    "abandon": (
        ("lease", *WAITING, *TRIGGER, "due"),
        ("owner", "lock_key", "generation", "forget", "hold_ms", "member", "again_ms", "died", "cut_off"),
        {"abandoned": ("calls",)},
    ),
    "conclude": (
        ("lease", *WAITING, *TRIGGER, "due"),
        (
            *("owner", "lock_key", "task_id", "outcome", "reason", "keep_ms", "release", "member", "patience_ms", *ENCODED),
            *("execution_as", "keeps"),
        ),
        {"concluded": ("calls",), "refused": ("outcome",)},
    ),
    "follow": (
        ("lease", *WAITING, "trigger", "leader", "execution", "due"),
        ("owner", "lock_key", "member", "by", "copy", "generation", "grace_ms", "keep_ms", "message"),
        {"ended": ("outcome", "settled", "reason", *ENCODED, "ended_as", "calls"), "gone": ()},
    ),
    "settle": (("places",), ("facts",), {"settled": ("count",)}),
    "sweep": (("places",), ("facts",), {"due": ("members",), "wait": ("left_ms",)}),
    "rescue": (
        ("trigger", "execution", "due"),
        ("member", "task_id", "patience_ms", "pause_ms"),
        {"later": (), "gone": (), "parked": ("lock_key",), "message": ("message", "copy", "outcome", "times", "first_ms")},
    ),
    "recall": (
        ("lease", *WAITING, "trigger", "due"),
        ("lock_key", "member", "pause_ms"),
        {"message": ("message", "copy", "first_ms"), "later": (), "gone": ()},
    ),
    "attend": (("lease", *WAITING, "due"), ("lock_key",), {"attended": ("calls",)}),
    "find": (("places",), ("none",), {"found": ("parked",)}),
    "announce": (
        ("execution", "announcement", "trigger"),
        ("task_id", "task", "payload", "seen", "reserve_ms"),
        {
            "answered": ("task_id", "how"),
            "announced": ("task_id",),
            "busy": ("left_ms",),
            "reserved": (),
            "unknown": (),
            "reused": ("by_task",),
            "mismatched": ("by_task",),
        },
    ),
    "confirm": (
        ("announcement",),
        ("task_id", "task", "payload", "keep_ms"),
        {"confirmed": (), "other": ("by",)},
    ),
    "withdraw": (("announcement",), ("task_id",), {"withdrawn": (), "other": ()}),
    "release": (
        ("lease", "fence", *TRIGGER, "parked", "due"),
        ("token", "task_id", "member", "force", "lock_key"),
        {"released": ("message",), "live": ("worker", "age_ms", "remaining_ms"), "other": ()},
    ),
    "begin_step": (
        PROGRESS,
        (*WRITES, "name", "mark", "worker", "digest", "undo", "unsure_as"),
        {
            "begun": ("times", "unsure"),
            "done": ("note", *ENCODED),
            "uncertain": ("times", "worker", "age_ms"),
            "changed": (),
            **TAKEN_OVER,
        },
    ),
    "record_step": (
        PROGRESS,
        (*WRITES, "name", "mark", "state", "worker", "digest", "undo", "note", *ENCODED),
        {"recorded": (), **TAKEN_OVER},
    ),
    "read_cursor": (
        PROGRESS,
        (*WRITES, "name", "digest", "accepts"),
        {"nowhere": (), "at": ENCODED, "changed": ENCODED, **TAKEN_OVER},
    ),
    "move_cursor": (PROGRESS, (*WRITES, "name", "digest", *ENCODED), {"moved": (), **TAKEN_OVER}),
    "undo_step": (
        PROGRESS,
        (*WRITES, "mark", "unsure_as", "name", "state", "note", "outcome", "reason", *ENCODED),
        {"undo": ("name", "undo", "unsure", "note", *ENCODED), "uncertain": ("name",), "undone": (), **TAKEN_OVER},
    ),
    "find_ending": (
        ("steps",),
        ("run",),
        {"going": ("undoable",), "ending": ("outcome", "reason", *ENCODED), "nothing": ()},
    ),
    "forget_steps": (("execution", "steps"), ("run",), {"forgotten": (), "other": ()}),
    "resolve": (
        (*TRIGGER, "due"),
        ("owner", "task_id", "outcome", "reason", *ENCODED, "keep_ms", "failure"),
        {
            "resolved": ("waiting",),
            "running": ("worker",),
            "ended": ("outcome",),
            "certain": (),
            "other": ("task_id",),
            "unknown": (),
        },
    ),
    "resolve_step": (
        ("execution", "steps"),
        ("name", "state", *ENCODED),
        {"resolved": (), "running": ("worker",), "certain": ("state",)},
    ),
    "replay": (
        (*TRIGGER, "steps", "due"),
        ("replay", "member", "force", "reason", "unsure_as", "seen", "message", "generation", "again_ms"),
        {
            "replayed": (),
            "recorded": ("seen", "outcome", "message", "generation"),
            "running": ("task_id", "worker"),
            "waiting": ("message",),
            "ending": ("outcome",),
            "succeeded": ("outcome",),
            "uncertain": ("step",),
            "bare": ("outcome",),
            "unknown": (),
        },
    ),
}


def text_of(name):
    return (files("celery_singleflight") / "scripts" / f"{name}.lua").read_text()


def shared_by(name):
    """Return the names of the files that a script uses, in the order in which its body has them."""
    return [
        used for names in re.findall(r"^ *-- Uses ([a-z, ]+)\.$", text_of(name), re.MULTILINE) for used in names.split(", ")
    ]


def names_in(*parts):
    folder = files("celery_singleflight").joinpath("scripts", *parts)
    return {path.name.removesuffix(".lua") for path in folder.iterdir() if path.name.endswith(".lua")}


def test_every_script_of_the_package_is_tested_here():
    assert names_in() == HEADERS.keys()


def test_every_shared_file_of_the_package_is_used():
    assert {used for name in HEADERS for used in shared_by(name)} == names_in("shared")


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_declares_the_inputs_and_the_replies(name):
    script = load(name)
    keys, values, replies = HEADERS[name]

    assert (script.keys, script.values) == (keys, values)
    assert script.replies == tuple(replies)
    for word, fields in replies.items():
        reply = script.reply([word.encode(), *range(len(fields))])
        assert reply._fields == ("word", *fields)
        assert reply == (word, *range(len(fields)))


def waiting(desk, task_id="t2", *, on_held="queue", **how):
    """Return a claim by which the store takes the message."""
    return desk.claim(task_id, on_held=on_held, message=b"a message", **how)


def acquired(desk):
    desk.acquire(desk.claim())


def held(desk):
    acquired(desk)
    desk.enter(desk.claim("t2"))


def ended(desk):
    desk.run(desk.claim())
    desk.enter(desk.claim())


def died_by_enter(desk):
    first = desk.claim()
    desk.acquire(first)
    desk.enter(first._replace(run_id="in another process"))


def surplus(desk):
    desk.acquire(desk.claim(generation=1))
    desk.enter(desk.claim())


def reused(desk):
    desk.acquire(desk.claim(execution_key="invoice:1"))
    with suppress(ExecutionKeyReused):
        desk.enter(desk.claim(execution_key="invoice:1", task="shop.ship"))


def parked_by_enter(desk):
    acquired(desk)
    desk.enter(waiting(desk))


def linger(desk):
    parked_by_enter(desk)
    claim = waiting(desk, waits=Waits(linger=0.2))
    desk.client.hset(desk.pace_name(claim), "hold_ms", 20)
    desk.enter(claim)


def led(desk):
    leader, follower = (waiting(desk, task_id, on_held="join", waits=Waits(digest="same")) for task_id in ("t1", "t2"))
    token = desk.acquire(leader).token
    desk.enter(follower)
    desk.finish(leader, token)
    desk.enter(follower)
    return follower


def merge(desk):
    acquired(desk)
    for task_id in ("t2", "t3"):
        desk.enter(waiting(desk, task_id, on_held="coalesce", waits=Waits(which="merged")))


def renewed(desk):
    claim = desk.claim()
    desk.renew(claim, desk.acquire(claim).token)


def lost(desk):
    desk.renew(desk.claim())


def finished(desk):
    desk.run(desk.claim(), Outcome.FAILED)


def refused_by_finish(desk):
    claim = desk.claim()
    token = desk.acquire(claim).token
    desk.expire(claim)
    desk.acquire(desk.claim())
    desk.finish(claim, token)


def abandoned(desk):
    desk.abandon(desk.claim())


def concluded(desk):
    claim = desk.claim()
    desk.acquire(claim)
    desk.conclude(claim)


def refused_by_conclude(desk):
    desk.conclude(desk.claim())


def ended_by_follow(desk):
    desk.store.follow(led(desk), "t1")


def gone_by_follow(desk):
    desk.store.follow(desk.claim(), "unknown")


def settled(desk):
    desk.settle(desk.claim())


def due(desk):
    desk.sweep()


def wait(desk):
    for _ in range(2):
        desk.store.due(["billing"], limit=10, interval=60.0)


def later(desk):
    claim = desk.claim(message=b"a message")
    desk.acquire(claim)
    desk.rescue(claim)


def gone(desk):
    desk.rescue(desk.claim())


def parked_by_rescue(desk):
    parked_by_enter(desk)
    desk.rescue(waiting(desk))


def message(desk):
    claim = desk.claim(message=b"a message")
    desk.die(claim)
    desk.rescue(claim)


def message_by_recall(desk):
    parked_by_enter(desk)
    claim = waiting(desk)
    names = desk.store.names(claim.record)
    desk.client.zadd(names["called"], {claim.record.member: 1})
    desk.rescue(claim)


def later_by_recall(desk):
    parked_by_rescue(desk)


def gone_by_recall(desk):
    desk.store._recall(desk.claim().record)


def attended(desk):
    desk.store.attend(LOCK)


def found(desk):
    desk.store.parked("t2", [LOCK.name])


def released(desk):
    claim = desk.claim()
    desk.release(claim, desk.acquire(claim).token, force=True)


def live(desk):
    claim = desk.claim()
    desk.release(claim, desk.acquire(claim).token)


def other(desk):
    desk.release(desk.claim(), 1)


# Steps, cursors and undos.


def begun(desk, **how):
    run = Run(desk, **how)
    run.begin(run.step("charge", digest="d1", undo="m:undo"))
    return run


def begun_by_a_run(desk):
    begun(desk)


def recorded(desk):
    run = Run(desk)
    run.do("charge", digest="d1", undo="m:undo")
    return run


def done(desk):
    run = recorded(desk)
    run.begin(run.step("charge"))


def uncertain_by_begin(desk):
    after = begun(desk, unsure_as="hold").next()
    after.begin(after.step("charge"))
    return after


def changed_by_begin(desk):
    run = recorded(desk)
    run.begin(run.step("charge", digest="d2"))


def overtaken(desk):
    run = begun(desk)
    run.next()
    return run


def refused_by_begin(desk):
    run = overtaken(desk)
    with suppress(LeaseLost):
        run.begin(run.step("other"))


def recorded_by_a_run(desk):
    recorded(desk)


def refused_by_record(desk):
    run = overtaken(desk)
    with suppress(LeaseLost):
        run.record(run.step("charge"))


def moved(desk):
    run = Run(desk)
    desk.store.move_cursor(run.writer, "page", "d1", VALUE)
    return run


def moved_by_a_run(desk):
    moved(desk)


def refused_by_move(desk):
    with suppress(LeaseLost):
        desk.store.move_cursor(overtaken(desk).writer, "page", "", VALUE)


def nowhere(desk):
    desk.store.read_cursor(Run(desk).writer, "page", "")


def at(desk):
    desk.store.read_cursor(moved(desk).writer, "page", "d1")


def changed_by_read(desk):
    desk.store.read_cursor(moved(desk).writer, "page", "d2")


def refused_by_read(desk):
    with suppress(LeaseLost):
        desk.store.read_cursor(overtaken(desk).writer, "page", "")


def undo(desk, **how):
    run = Run(desk, **how)
    run.do("charge", undo="m:undo")
    run.undo()
    return run


def undo_by_a_run(desk):
    undo(desk)


def uncertain_by_undo(desk):
    undo(desk, unsure_as="hold").next().undo()


def undone(desk):
    undo(desk).undo(undone="charge")


def refused_by_undo(desk):
    with suppress(LeaseLost):
        overtaken(desk).undo()


def find_ending(desk, run):
    desk.store.find_ending(run.claim.record, run.acquired.run_id)


def going(desk):
    find_ending(desk, recorded(desk))


def ending(desk):
    find_ending(desk, undo(desk))


def nothing(desk):
    find_ending(desk, Run(desk))


def forgotten(desk):
    desk.store.forget_steps(recorded(desk).claim.record)


def other_by_forget(desk):
    desk.store.forget_steps(desk.claim().record)


def resolved(desk):
    run = uncertain_by_begin(desk)
    desk.store.resolve_step(run.claim.record, "charge", VALUE)


def running(desk):
    desk.store.resolve_step(begun(desk).claim.record, "charge", VALUE)


def certain(desk):
    desk.store.resolve_step(recorded(desk).claim.record, "charge", VALUE)


HOLDS = Terms(holds=True)


def died(desk, **how):
    """Return the claim of a run that has died under "hold"."""
    claim = desk.claim(message=b"a message", terms=HOLDS, **how)
    desk.acquire(claim)
    desk.store.abandon(claim.owner, claim.record, again=5.0, died=True)
    return claim


def uncertain(desk):
    desk.enter(died(desk)._replace(owner="another"))


def resolve(desk, record, outcome="rerun"):
    desk.store.resolve(record, outcome, VALUE, reason="[]", keep=600.0, keeps_failure=False)


def resolved_by_a_person(desk):
    resolve(desk, died(desk).record)


def running_by_resolve(desk):
    claim = desk.claim()
    desk.acquire(claim)
    resolve(desk, claim.record)


def ended_by_resolve(desk):
    claim = desk.claim()
    desk.run(claim)
    resolve(desk, claim.record)


def certain_by_resolve(desk):
    claim = desk.claim()
    desk.acquire(claim)
    desk.store.abandon(claim.owner, claim.record, generation=1)
    resolve(desk, claim.record)


def other_by_resolve(desk):
    resolve(desk, died(desk, execution_key="invoice:1").record._replace(task_id="t2"))


def unknown(desk):
    resolve(desk, desk.claim().record)


def called(desk, task_id="a1", task="shop.bill", payload="d1"):
    """What a publisher says of the trigger that it would send; the store is asked for it."""
    said = Announcement("billing", "invoice:1", task_id, task, payload)
    with suppress(ExecutionKeyReused):
        desk.store.announce(said, reserve=2.0)
    return said


def confirmed(desk):
    said = called(desk)
    desk.store.confirm(said, 300.0)
    return said


def answered(desk):
    desk.acquire(desk.claim(execution_key="invoice:1"))
    called(desk)


def announced(desk):
    keys = desk.store.keys
    confirmed(desk)
    names = {name: getattr(keys, name)("billing", "invoice:1") for name in ("execution", "announcement")}
    said = {"task_id": "a2", "task": "shop.bill", "payload": "d1", "seen": "", "reserve_ms": 2000}
    # Asked by hand, as the store asks again at once.
    desk.store._run(load("announce"), {**names, "trigger": keys.trigger("billing", "a2")}, said)


def busy(desk):
    called(desk)
    called(desk, "a2")


def reserved(desk):
    called(desk)


def unknown_by_announce(desk):
    desk.store.announce(Announcement("billing", "invoice:1", "a1", "shop.bill", ""), reserve=0.0)


def reused_by_announce(desk):
    confirmed(desk)
    called(desk, "a2", task="shop.ship")


def mismatched_by_announce(desk):
    confirmed(desk)
    called(desk, "a2", payload="d2")


def other_by_confirm(desk):
    confirmed(desk)
    desk.store.confirm(called(desk, "a2"), 300.0)


def withdrawn(desk):
    desk.store.withdraw(called(desk))


def other_by_withdraw(desk):
    confirmed(desk)
    desk.store.withdraw(Announcement("billing", "invoice:1", "a2", "shop.bill", ""))


# A trigger that is replayed.


def replay(desk, claim, mark="replay 1", *, force=False, **how):
    return desk.store.replay(claim.record, mark, force=force, reason="asked for", holds=True, **how)


def over(desk, outcome=Outcome.FAILED, **how):
    claim = desk.claim(message=b"a message", **how)
    desk.run(claim, outcome)
    desk.store.settle([Settled(claim.record, claim.owner, is_done=True, keeps="failed")])
    return claim


def recorded_by_replay(desk):
    claim = over(desk)
    return claim, replay(desk, claim)


def replayed(desk):
    claim, told = recorded_by_replay(desk)
    replay(desk, claim, seen=told.seen.decode(), message=b"the same message", generation=1 << 20)


def running_by_replay(desk):
    claim = desk.claim()
    desk.acquire(claim)
    replay(desk, claim)


def waiting_by_replay(desk):
    claim = desk.claim(message=b"a message")
    desk.die(claim)
    replay(desk, claim)


def ending_by_replay(desk):
    claim = desk.claim(message=b"a message")
    desk.run(claim, Outcome.FAILED)
    replay(desk, claim)


def succeeded_by_replay(desk):
    replay(desk, over(desk, Outcome.SUCCEEDED))


def uncertain_by_replay(desk):
    run = uncertain_by_begin(desk)
    run.finish()
    desk.settle(run.claim)
    replay(desk, run.claim)


def bare_by_replay(desk):
    replay(desk, over(desk, Outcome.SUCCEEDED), force=True)


def unknown_by_replay(desk):
    replay(desk, desk.claim())


#: What makes a script give a reply.
SCENES = {
    "enter": (acquired, held, parked_by_enter, linger, led, merge, ended, died_by_enter, surplus, reused, uncertain),
    "renew": (renewed, lost),
    "finish": (finished, refused_by_finish),
    "abandon": (abandoned,),
    "conclude": (concluded, refused_by_conclude),
    "follow": (ended_by_follow, gone_by_follow),
    "settle": (settled,),
    "sweep": (due, wait),
    "rescue": (later, gone, parked_by_rescue, message),
    "recall": (message_by_recall, later_by_recall, gone_by_recall),
    "attend": (attended,),
    "find": (found,),
    "announce": (answered, announced, busy, reserved, unknown_by_announce, reused_by_announce, mismatched_by_announce),
    "confirm": (confirmed, other_by_confirm),
    "withdraw": (withdrawn, other_by_withdraw),
    "release": (released, live, other),
    "begin_step": (begun_by_a_run, done, uncertain_by_begin, changed_by_begin, refused_by_begin),
    "record_step": (recorded_by_a_run, refused_by_record),
    "read_cursor": (nowhere, at, changed_by_read, refused_by_read),
    "move_cursor": (moved_by_a_run, refused_by_move),
    "undo_step": (undo_by_a_run, uncertain_by_undo, undone, refused_by_undo),
    "find_ending": (going, ending, nothing),
    "forget_steps": (forgotten, other_by_forget),
    "resolve": (
        *(resolved_by_a_person, running_by_resolve, ended_by_resolve, certain_by_resolve),
        *(other_by_resolve, unknown),
    ),
    "resolve_step": (resolved, running, certain),
    "replay": (
        replayed,
        recorded_by_replay,
        running_by_replay,
        waiting_by_replay,
        ending_by_replay,
        succeeded_by_replay,
        uncertain_by_replay,
        bare_by_replay,
        unknown_by_replay,
    ),
}


def test_every_declared_reply_has_its_scene():
    assert {name: [scene.__name__.partition("_")[0] for scene in scenes] for name, scenes in SCENES.items()} == {
        name: list(load(name).replies) for name in HEADERS
    }


@pytest.mark.parametrize(
    ("name", "scene"),
    [pytest.param(name, scene, id=f"{name} {scene.__name__}") for name, scenes in SCENES.items() for scene in scenes],
)
def test_every_declared_reply_is_given_and_has_its_declared_fields(desk, name, scene):
    seen = []

    class Listening:
        """Connections that tell what the server said."""

        spans_slots = desk.connections.spans_slots

        def run(self, script, keys, values):
            raw = desk.connections.run(script, keys, values)
            seen.append((script.name, raw))
            return raw

        def run_many(self, script, keys, calls):
            return [self.run(script, keys, values) for values in calls]

    scene(Desk(Store(Listening(), desk.store.keys), desk.keyspace, desk.connections))

    word = scene.__name__.partition("_")[0]
    raw = [reply for script, reply in seen if script == name][-1]
    raw = raw.split(b"\n") if isinstance(raw, bytes) else raw
    assert raw[0].decode() == word
    assert len(raw) == 1 + len(HEADERS[name][2][word])


@pytest.mark.parametrize("name", HEADERS)
def test_a_body_begins_its_replies_with_no_other_words(name):
    body = text_of(name) + "".join(text_of(f"shared/{used}") for used in shared_by(name))
    said = re.findall(r"return (?:table\.concat\()?\{?'(\w+)'", body)
    either = re.findall(r"return \{\w+ and '(\w+)' or '(\w+)'", body)
    assert {*said, *sum(either, ())} == set(load(name).replies)


@pytest.mark.parametrize("name", [name for name in HEADERS if not load(name).many])
def test_inputs_are_put_in_the_order_of_the_header(name):
    script = load(name)
    places = {name: name for name in ("another", *reversed(script.keys))}
    named = {name: name for name in reversed(script.values)}
    assert script.arguments(places, named) == [*script.keys, *script.values]


def test_a_missing_and_an_undeclared_input_are_named():
    script = load("renew")
    places, named = dict.fromkeys(script.keys, ""), dict.fromkeys(script.values, "")
    del named["owner"]
    with pytest.raises(TypeError, match=r"^script renew: missing \['owner'\], not declared \[\]$"):
        script.arguments(places, named)
    with pytest.raises(TypeError, match=r"^script renew: missing \['owner'\], not declared \['ownr'\]$"):
        script.arguments(places, {**named, "ownr": ""})
    del places["lease"]
    with pytest.raises(TypeError, match=r"^script renew: missing \['lease'\], not declared \[\]$"):
        script.arguments(places, {**named, "owner": ""})


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ([b"vanished"], "b'vanished' and 0 more"),
        ([b"lost"], "b'lost' and 0 more"),
        ([b"lost", b"taken", b"a secret"], "b'lost' and 2 more"),
        ([], "[]"),
        (b"lost", "b'lost' and 0 more"),
        (None, "None"),
        (["lost", b"taken"], "'str' and 1 more"),
    ],
)
def test_a_reply_that_the_header_does_not_declare_is_an_error_that_shows_its_word(raw, said):
    with pytest.raises(ScriptError) as raised:
        load("renew").reply(raw)
    assert str(raised.value) == f"script renew answered {said}, expected one of ['lost', 'renewed']"


@pytest.mark.parametrize(
    ("header", "kind", "numbers"),
    [
        ("-- KEYS[1] a\n-- KEYS[3] b", "KEYS", "['1', '3']"),
        ("-- KEYS[2] a\n-- KEYS[1] b", "KEYS", "['2', '1']"),
        ("-- KEYS[1] a\n-- KEYS[1] b", "KEYS", "['1', '1']"),
        ("-- KEYS[0] a", "KEYS", "['0']"),
        ("-- KEYS[1] a\n-- ARGV[2] b", "ARGV", "['2']"),
        ("-- KEYS[*] a\n-- KEYS[1] b", "KEYS", "['*', '1']"),
    ],
)
def test_a_misnumbered_header_is_refused(header, kind, numbers):
    with pytest.raises(ScriptError, match=re.escape(f"script odd: {kind} are numbered {numbers}, expected 1 to ")):
        Script("odd", f'{header}\n--\n-- Returns {{"done"}}\nreturn {{"done"}}')


def test_the_names_of_the_header_are_the_locals_of_the_body(desk):
    script = Script(
        "echo",
        "-- Say what came.\n--\n-- KEYS[1] first\n-- KEYS[2] second\n-- ARGV[1] value  some text\n--\n"
        '-- Returns {"said", a, b, c}\nreturn {"said", first, second, value}',
    )
    places = {"first": "{x}1", "second": "{x}2"}

    raw = desk.connections.run(script, len(script.keys), script.arguments(places, {"value": b"\x00\xff"}))

    assert script.reply(raw) == ("said", b"{x}1", b"{x}2", b"\x00\xff")


def test_what_a_header_uses_is_there_in_the_body(desk):
    script = Script(
        "clock",
        "-- Tell the time.\n--\n-- Uses time, holders.\n--\n-- KEYS[1] lease\n--\n"
        '-- Returns {"told", ms, live}\nreturn {"told", text(now), (holders_now())}',
    )
    before = desk.keyspace.now_ms()

    told = script.reply(desk.connections.run(script, 1, script.arguments({"lease": "{x}lease"}, {})))

    assert before <= int(told.ms) <= desk.keyspace.now_ms()
    assert told.live == 0


def test_what_a_body_uses_further_down_is_made_by_the_calls_that_get_there(desk):
    script = Script(
        "late",
        "-- Tell the time, if asked for.\n--\n-- KEYS[1] lease\n-- ARGV[1] asked\n--\n"
        '-- Returns {"told", ms}\n--      or {"quiet", is_there}\n'
        "local is_there = pcall(function() return text(1) end)\nif asked == '' then return {'quiet', tostring(is_there)} end\n"
        "-- Uses time.\nreturn {'told', text(now)}",
    )

    quiet, told = (
        script.reply(desk.connections.run(script, 1, script.arguments({"lease": "{x}lease"}, {"asked": asked})))
        for asked in ("", "1")
    )

    assert quiet.is_there == b"false"
    assert int(told.ms) <= desk.keyspace.now_ms()


def test_a_script_runs_with_the_text_of_every_file_that_it_uses():
    assert shared_by("enter") == [
        *("time", "taking", "holders", "waiting", "parking", "places", "states", "uncertain", "answering", "awaiting")
    ]
    for name in HEADERS:
        assert [used for used in sorted(names_in("shared")) if text_of(f"shared/{used}") in load(name).source] == sorted(
            shared_by(name)
        )


def test_a_header_that_uses_what_is_not_there_is_refused():
    script = Script("odd", '-- Uses nothing.\n--\n-- KEYS[1] a\n--\n-- Returns {"done"}\nreturn {"done"}')
    with pytest.raises(FileNotFoundError, match="nothing"):
        _ = script.source
    with pytest.raises(AttributeError, match="a script has no sauce"):
        _ = script.sauce


def test_a_script_can_be_copied_before_it_is_used():
    script = Script("odd", '-- KEYS[1] a\n--\n-- Returns {"done"}\nreturn {"done"}')
    assert copy(script).sha == script.sha


def test_what_a_reply_means_may_stand_behind_it():
    text = '-- KEYS[1] a\n--\n-- Returns {"done", a}  also {"again", b}, said twice\n--      or {"not"}  done\nreturn {"done"}'
    script = Script("odd", text)
    assert script.replies == ("done", "not")
    assert script.reply([b"done", b"x"]) == ("done", b"x")


def test_a_change_of_the_header_is_another_script():
    text = '-- KEYS[1] a\n--\n-- Returns {"done"}\nreturn {"done"}'
    assert Script("x", text).sha != Script("x", text.replace("KEYS[1] a", "KEYS[1] b")).sha
