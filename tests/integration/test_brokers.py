"""A trigger that waited arrives as it was sent, also through Celery's own delays on quorum queues; the matrix has the rest."""

from __future__ import annotations

import matrix
import pytest
from matrix_axes import POLICIES
from matrix_place import start_twins


@pytest.fixture
def quorum(start_shared, valkey, rabbitmq):
    with start_twins(start_shared, valkey.url, rabbitmq, is_quorum=True) as place:
        yield place


@pytest.mark.parametrize("policy", POLICIES)
def test_a_trigger_that_waited_arrives_as_it_was_sent(quorum, policy, request):
    request.node.place = quorum
    matrix.check(quorum, matrix.feature("everything_at_once"), policy)
