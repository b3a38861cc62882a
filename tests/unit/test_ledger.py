"""The judge outside reads what others write at the same time, or die over."""

from __future__ import annotations

import json

import pytest
from ledger import Ledger


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path)


def test_a_line_that_is_being_written_is_left_to_the_next_look(ledger):
    ledger.write("key", "begin", run="one")
    line = "\n" + json.dumps({"key": "key", "what": "end", "at": 1.0, "pid": 1}) + "\n"
    with ledger.path.open("a") as file:
        for part in (line[:1], line[1:9], line[9:-1]):
            file.write(part)
            file.flush()
            assert [row["what"] for row in ledger.read("key")] == ["begin"]
        file.write(line[-1:])
    assert [row["what"] for row in ledger.read("key")] == ["begin", "end"]


def test_a_line_that_was_cut_short_takes_no_other_along(ledger):
    with ledger.path.open("a") as file:
        file.write('\n{"key": "ke')
    ledger.write("key", "begin", run="one")
    assert [row["run"] for row in ledger.read("key", "begin")] == ["one"]


def test_what_others_write_is_seen_by_key_and_by_kind(ledger, tmp_path):
    assert ledger.read("key") == ledger.rows("begin") == []
    other = Ledger(tmp_path)
    other.write("key", "begin", n=1)
    assert [row["n"] for row in ledger.rows("begin")] == [1]
    other.write("key", "end", n=2)
    other.write("another", "begin", n=3)
    assert [row["n"] for row in ledger.read("key")] == [1, 2]
    assert [row["n"] for row in ledger.rows("begin")] == [1, 3]
