"""Tables of the documentation say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from record_states import TRANSITIONS

import celery_singleflight
from celery_singleflight import errors, headers, signals
from celery_singleflight.options import CALL_OPTIONS, OPTIONS, SETTINGS

ROOT = Path(__file__).parents[2]


def rows(document: str, after: str = "") -> list[list[str]]:
    """The cells of the first table behind a text."""
    text = (ROOT / document).read_text(encoding="utf-8").partition(after)[2] if after else (ROOT / document).read_text()
    lines = text[text.index("\n| ") + 1 :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def test_the_options_of_the_readme_are_the_options_of_the_code():
    table = {row[0].split("`")[1]: row for row in rows("README.md", "<!-- options")}
    assert list(table) == list(OPTIONS)
    for name, option in OPTIONS.items():
        if option.default is not None:
            assert f"`{option.default!r}`".replace("'", '"') == table[name][1], name


def test_the_readme_marks_what_can_be_given_per_call():
    marked = {row[0].split("`")[1] for row in rows("README.md", "<!-- options") if "call" in row[0]}
    assert marked == set(CALL_OPTIONS)


def test_the_settings_of_the_readme_are_the_settings_of_the_code():
    assert [row[0].strip("`") for row in rows("README.md", "`result_compression`")] == list(SETTINGS)


def test_every_header_is_documented():
    documented = {row[0].strip("`") for row in rows("docs/reference/messages.md")}
    own = {headers.KEY, headers.DIGEST, headers.CAUSED_BY, headers.SOURCE, headers.FORCED, *headers.OF_A_WAIT}
    assert documented == own | {option.header for option in CALL_OPTIONS.values()}


def test_every_signal_is_documented_with_what_it_passes():
    documented = {row[0].strip("`"): set(row[1].replace("`", "").split(", ")) for row in rows("docs/reference/signals.md")}
    assert documented == {name: set(getattr(signals, name).providing_args) for name in signals.__all__}


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_exported_and_says_what_it_means(name):
    assert getattr(celery_singleflight, name) is getattr(errors, name)
    assert getattr(errors, name).__doc__


def references(document: str) -> list[tuple[str, str]]:
    """The tests that a document names."""
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / document).read_text(encoding="utf-8"))


GUARANTEES, FLOWS = "docs/explanation/guarantees.md", "docs/explanation/flows.md"


def test_the_guarantees_name_their_tests():
    assert len(references(GUARANTEES)) > 20


@pytest.mark.parametrize(("path", "name"), sorted({*references(GUARANTEES), *references(FLOWS)}))
def test_a_test_that_a_guarantee_or_a_flow_names_is_there(path, name):
    assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")


def flows() -> dict[str, str]:
    """The sections of the flows, by their headings."""
    _, *sections = re.split(r"^## ", (ROOT / FLOWS).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {section.partition("\n")[0].lower(): section for section in sections}


def test_every_flow_of_the_list_is_drawn():
    assert list(flows()) == [row[0].partition("]")[0].strip("[") for row in rows(FLOWS)]
    assert {"miss", "hit", "concurrent", "expired", "failed", "uncertain", "replay"} <= set(flows())


@pytest.mark.parametrize("flow", flows())
def test_a_flow_is_one_picture_and_names_its_tests(flow):
    (picture,) = re.findall(r"^```mermaid\nsequenceDiagram\n(.*?)^```", flows()[flow], re.MULTILINE | re.DOTALL)
    lines = [line.strip() for line in picture.splitlines()]
    participants = {"P": "publisher", "B": "broker", "W": "worker", "S": "store", "X": "body and provider"}
    assert lines[:5] == [f"participant {name} as {what}" for name, what in participants.items()]
    opened = 0
    step = re.compile(r"[PBWSX](->>|-->>|--x)[PBWSX]: [^;#]+|Note over [PBWSX]: [^;#]+|(alt|else|loop|opt) [^;#]+|end")
    for line in lines[5:]:
        assert step.fullmatch(line), line
        opened += line.startswith(("alt ", "loop ", "opt ")) - (line == "end")
        assert opened >= line.startswith("else ")
    assert opened == 0
    assert re.search(r"^Proved by `tests/", flows()[flow], re.MULTILINE)


def test_the_pictures_of_the_run_record_are_the_table_of_its_transitions():
    text = (ROOT / "docs/explanation/run-record.md").read_text(encoding="utf-8")
    pictures = re.findall(r"```mermaid\nstateDiagram-v2\n(.*?)```", text, re.DOTALL)
    drawn = []
    for picture in pictures:
        names = {short: name for name, short in re.findall(r'state "([^"]+)" as (\w+)', picture)}
        arrows = re.findall(r"^    (\w+) --> (\w+): (.+)$", picture, re.MULTILINE)
        assert len(arrows) + len(names) == len(picture.splitlines())
        drawn += [((names.get(one, one), names.get(other, other)), frozenset(by.split(", "))) for one, other, by in arrows]
    assert len(drawn) == len(TRANSITIONS)
    assert dict(drawn) == TRANSITIONS


def test_the_states_of_the_run_record_are_those_of_its_transitions():
    told = {state for row in rows("docs/explanation/run-record.md") for state in row[0].split(", ")}
    assert told == {state for transition in TRANSITIONS for state in transition}


def test_the_fields_of_the_run_record_are_those_that_the_scripts_write():
    text = (ROOT / "docs/explanation/run-record.md").read_text(encoding="utf-8").partition("## Fields")[2]
    told = {name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)", row)}
    scripts = (ROOT / "celery_singleflight/scripts").rglob("*.lua")
    code = "\n".join(re.sub(r"--.*", "", path.read_text(encoding="utf-8")) for path in scripts)
    calls = re.findall(r"(?:'HSET', (?:execution|trigger),|remember\(|local (?:record|ended) = \{|note\()([^)}]*)", code)
    written = {name for call in calls for name in re.findall(r"'(\w+)'", call)}
    written |= set(re.findall(r"'HINCRBY', trigger, '(\w+)'", code)) | {"awaits"}
    assert told >= written - {"1", "answered", "coalesced", "failed"}
    assert all(f"'{name}" in code for name in told)
