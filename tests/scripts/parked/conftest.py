from __future__ import annotations

import pytest
from queue_desk import QueueDesk

from celery_singleflight.keys import KeySpace
from celery_singleflight.store import Store


@pytest.fixture
def desk(place, watch, open_connections):
    """An empty store. Whoever still waits at the end of a test is looked after, and nothing else is left of waiting."""
    place.keyspace.clear()
    desk = QueueDesk(Store(watch, KeySpace("sf")), place.keyspace, open_connections)
    yield desk
    desk.check()
    place.keyspace.clear()
