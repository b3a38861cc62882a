"""Each feature of Celery on a broker on Redis: what it is on a plain task, also when somebody else holds the lock key first."""

from __future__ import annotations

import matrix
import pytest
from matrix_place import start_twins


@pytest.fixture(scope="module")
def twins(start_shared, valkey):
    with start_twins(start_shared, valkey.url) as place:
        yield place


@pytest.mark.parametrize(("feature", "situation"), matrix.parameters("redis"))
def test_a_feature_of_celery_on_redis_is_what_it_is_on_a_plain_task(twins, feature, situation, request):
    request.node.place = twins
    matrix.check(twins, feature, situation)


def test_nothing_is_left_on_redis_and_in_the_store(twins, request):
    request.node.place = twins
    matrix.check_that_nothing_is_left(twins)
