from __future__ import annotations

import pytest
from queue_desk import QueueDesk

from celery_singleflight.keys import KeySpace
from celery_singleflight.store import Store


@pytest.fixture
def desk(place, open_connections):
    """An empty store. Whoever still waits at the end of a test is looked after, and nothing else is left of waiting."""
    place.keyspace.clear()
    desk = QueueDesk(Store(open_connections, KeySpace("sf")), place.keyspace, open_connections)
    yield desk
    desk.check()
    place.keyspace.clear()


@pytest.fixture(params=["as asked", "reply lost"])
def disturb(request, desk):
    """Does what it says to the next script call, before the test looks at it."""
    lost = []

    def disturb():
        if request.param == "reply lost":
            lost.append(desk.lose_next_reply())

    yield disturb
    assert all(lost)
