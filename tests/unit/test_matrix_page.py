"""The page of the matrix is what its declaration makes of it."""

from __future__ import annotations

import matrix
import matrix_page
import pytest
from matrix_axes import BROKERS, POLICIES, SITUATIONS


def test_the_page_of_the_matrix_is_made_from_the_declaration_of_its_tests():
    written = matrix_page.PAGE.read_text(encoding="utf-8")
    assert written == matrix_page.page(), "python tests/support/matrix_page.py --write"


@pytest.mark.parametrize("broker", BROKERS)
def test_a_cell_of_the_page_has_a_test_or_a_reason(broker):
    tested = {(feature.name, situation) for feature, situation in matrix.cells(broker)}
    for feature in matrix_page.features():
        for situation in SITUATIONS:
            has_reason = feature.text(broker, situation).startswith("none: ")
            assert has_reason != ((feature.name, situation) in tested), f"{feature}, {situation}"


def test_every_policy_and_broker_has_its_columns():
    header = next(line for line in matrix_page.page().splitlines() if line.startswith("| feature"))
    assert header.count("|") == 2 + len(BROKERS) * (1 + len(POLICIES))


def test_no_two_rows_have_one_name_or_one_title():
    rows = matrix_page.features()
    assert len({row.name for row in rows}) == len({row.title for row in rows}) == len(rows)
