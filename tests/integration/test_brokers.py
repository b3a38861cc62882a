"""A trigger that waited arrives as it was sent, also through Celery's own delays on quorum queues; the matrix has the rest."""

from __future__ import annotations

import matrix
import pytest
from matrix_axes import POLICIES
from matrix_ends import end_of
from matrix_feature import Section
from matrix_place import start_twins

QUORUM = Section("Quorum queues")


@QUORUM(holds=("double",))
def queue_that_is_not_the_default(t):
    """A quorum queue that is not the default one, compared with a plain countdown."""
    return end_of(t.double.apply_async((2,), queue=t.place.queues["second"], countdown=None if t.is_contended else 1))


@QUORUM(holds=("double",))
def queue_that_is_not_the_default_and_no_delay(t):
    """A quorum queue that is not the default one."""
    return end_of(t.double.apply_async((2,), queue=t.place.queues["second"]))


@pytest.fixture(scope="module")
def quorum(start_shared, valkey, rabbitmq):
    with start_twins(start_shared, valkey.url, rabbitmq, is_quorum=True) as place:
        yield place


def test_a_trigger_that_waited_arrives_as_it_was_sent(quorum, request):
    """As after a plain countdown: what goes back to the broker comes through Celery's delays."""
    request.node.place = quorum
    matrix.check(quorum, matrix.feature("everything_at_once"), "requeue")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_trigger_that_waited_comes_through_the_quorum_queue_it_was_sent_to(quorum, policy, request):
    request.node.place = quorum
    through_delays, directly = QUORUM.features
    matrix.check(quorum, through_delays if policy == "requeue" else directly, policy)
