"""The header of a script is its declaration: what it names is what Python must give and what the body may answer."""

from __future__ import annotations

import re
from contextlib import suppress
from importlib.resources import files

import pytest
from desk import Desk

from celery_singleflight.claims import Outcome
from celery_singleflight.errors import ExecutionKeyReused, ScriptError
from celery_singleflight.script import Script, load
from celery_singleflight.store import Store

TRIGGER = ("execution", "trigger")
HEADERS = {
    "enter": (
        ("lease", "fence", "pace", *TRIGGER, "due"),
        (
            *("owner", "task_id", "worker", "lock_key", "run", "copy", "previous", "generation"),
            *(
                "limit",
                "ttl_ms",
                "keep_ms",
                "on_held",
                "wait_ms",
                "first_ms",
                "grace_ms",
                "message",
                "member",
                "deaths",
                "task",
            ),
        ),
        {
            "acquired": ("fence", "run", "attempt"),
            "held": ("what", "holder", "age_ms", "remaining_ms", "hold_ms", "turn_ms", "now_ms", "first_ms"),
            "ended": ("outcome", "settled", "reason", "content_type", "content_encoding", "body"),
            "surplus": ("why",),
            "reused": ("by_task",),
        },
    ),
    "renew": (
        ("lease", *TRIGGER),
        ("owner", "ttl_ms"),
        {"renewed": ("remaining_ms",), "lost": ("why",)},
    ),
    "finish": (
        ("lease", "fence", "pace", *TRIGGER),
        (
            "owner",
            "token",
            "limit",
            "outcome",
            "reason",
            "content_type",
            "content_encoding",
            "body",
            "keep_ms",
            "hold_ms",
            "remember_ms",
        ),
        {"finished": (), "refused": ("owner", "outcome")},
    ),
    "abandon": (
        ("lease", *TRIGGER, "due"),
        ("owner", "generation", "forget", "hold_ms", "member", "again_ms", "died"),
        {"abandoned": ()},
    ),
    "conclude": (
        ("lease", *TRIGGER, "due"),
        (
            *("owner", "task_id", "outcome", "reason", "keep_ms", "release", "member"),
            *("patience_ms", "content_type", "content_encoding", "body"),
        ),
        {"concluded": (), "refused": ("outcome",)},
    ),
    "settle": (("places",), ("facts",), {"settled": ("count",)}),
    "sweep": (("places",), ("facts",), {"due": ("members",), "wait": ("left_ms",)}),
    "rescue": (
        ("trigger", "execution", "due"),
        ("member", "task_id", "patience_ms", "pause_ms"),
        {"later": (), "gone": (), "message": ("message", "copy", "outcome", "times")},
    ),
    "release": (
        ("lease", "fence", *TRIGGER, "due"),
        ("token", "task_id", "member", "force"),
        {"released": ("message",), "live": ("worker", "age_ms", "remaining_ms"), "other": ()},
    ),
}


def text_of(name):
    return (files("celery_singleflight") / "scripts" / f"{name}.lua").read_text()


def test_every_script_of_the_package_is_tested_here():
    folder = files("celery_singleflight") / "scripts"
    assert {path.name for path in folder.iterdir() if path.name.endswith(".lua")} == {f"{name}.lua" for name in HEADERS}


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


def acquired(desk):
    desk.acquire(desk.claim())


def held(desk):
    acquired(desk)
    desk.enter(desk.claim("t2"))


def ended(desk):
    desk.run(desk.claim())
    desk.enter(desk.claim())


def surplus(desk):
    desk.acquire(desk.claim(generation=1))
    desk.enter(desk.claim())


def reused(desk):
    desk.acquire(desk.claim(execution_key="invoice:1"))
    with suppress(ExecutionKeyReused):
        desk.enter(desk.claim(execution_key="invoice:1", task="shop.ship"))


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


def message(desk):
    claim = desk.claim(message=b"a message")
    desk.die(claim)
    desk.rescue(claim)


def released(desk):
    claim = desk.claim()
    desk.release(claim, desk.acquire(claim).token, force=True)


def live(desk):
    claim = desk.claim()
    desk.release(claim, desk.acquire(claim).token)


def other(desk):
    desk.release(desk.claim(), 1)


#: What makes a script give a reply.
SCENES = {
    "enter": (acquired, held, ended, surplus, reused),
    "renew": (renewed, lost),
    "finish": (finished, refused_by_finish),
    "abandon": (abandoned,),
    "conclude": (concluded, refused_by_conclude),
    "settle": (settled,),
    "sweep": (due, wait),
    "rescue": (later, gone, message),
    "release": (released, live, other),
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
    said, raw = seen[-1]
    raw = raw.split(b"\n") if isinstance(raw, bytes) else raw
    assert (said, raw[0].decode()) == (name, word)
    assert len(raw) == 1 + len(HEADERS[name][2][word])


@pytest.mark.parametrize("name", HEADERS)
def test_a_body_begins_its_replies_with_no_other_words(name):
    said = re.findall(r"return (?:table\.concat\()?\{?'(\w+)'", text_of(name))
    assert set(said) == set(load(name).replies)


@pytest.mark.parametrize("name", [name for name in HEADERS if not load(name).many])
def test_inputs_are_put_in_the_order_of_the_header(name):
    script = load(name)
    names = script.keys + script.values
    assert script.arguments({name: name for name in reversed(names)}) == list(names)


def test_a_missing_and_an_undeclared_input_are_named():
    script = load("renew")
    named = dict.fromkeys(script.keys + script.values, "")
    del named["owner"]
    with pytest.raises(TypeError, match=r"^script renew: missing \['owner'\], not declared \[\]$"):
        script.arguments(named)
    with pytest.raises(TypeError, match=r"^script renew: missing \['owner'\], not declared \['ownr'\]$"):
        script.arguments({**named, "ownr": ""})


@pytest.mark.parametrize(
    "raw",
    [[b"vanished"], [b"lost"], [b"lost", b"taken", b"more"], [], b"lost", None, ["lost", b"taken"]],
    ids=repr,
)
def test_a_reply_that_the_header_does_not_declare_is_an_error(raw):
    with pytest.raises(ScriptError) as raised:
        load("renew").reply(raw)
    assert str(raised.value) == f"script renew answered {raw!r}, expected one of ['lost', 'renewed']"


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
    names = {"first": "{x}1", "second": "{x}2", "value": b"\x00\xff"}

    raw = desk.connections.run(script, len(script.keys), script.arguments(names))

    assert script.reply(raw) == ("said", b"{x}1", b"{x}2", b"\x00\xff")


def test_a_change_of_the_header_is_another_script():
    text = '-- KEYS[1] a\n--\n-- Returns {"done"}\nreturn {"done"}'
    assert Script("x", text).sha != Script("x", text.replace("KEYS[1] a", "KEYS[1] b")).sha
