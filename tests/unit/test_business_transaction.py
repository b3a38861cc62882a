"""The how-to of the business transaction is executed, and its table says what happens."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from celery_singleflight import PayloadMismatch, StaleToken

DOCUMENT = Path(__file__).parents[2] / "docs/how-to/business-transaction.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def page(place, database, monkeypatch):
    """What the page defines, as a module with an app and a database of the test's own."""
    page = ModuleType("business_transaction_page")
    monkeypatch.setitem(sys.modules, page.__name__, page)
    monkeypatch.setattr(place.app, "task", partial(place.app.task, shared=False))  # the apps of other tests have no part in it
    page.app = place.app
    page.DATABASE_URL = database.url + (f"?options=-csearch_path%3D{database.schema}" if database.schema else "")
    for block in BLOCKS:
        exec(compile(block, DOCUMENT.name, "exec", dont_inherit=True), vars(page))
    place.app.finalize()
    yield page
    page.engine.dispose()
    if page.outbox._own:
        page.outbox._own[1].dispose()


def run(page, name, *args):
    return getattr(page, name).apply(args).get()


def charges(page, order_id):
    with Session(page.engine) as session:
        return list(session.scalars(select(page.Charge.cents).where(page.Charge.order_id == order_id)))


#: How many effects there are, by level.
AFTER_A_SECOND_TRIGGER = [("charge_under_lock", 2), ("charge_with_result", 1), ("charge", 1)]
AFTER_WORSE = [("charge_under_lock", 2), ("charge_with_result", 2), ("charge", 1)]


@pytest.mark.parametrize(("level", "effects"), AFTER_A_SECOND_TRIGGER)
def test_a_second_trigger_for_the_same_thing(page, level, effects):
    first, second = (run(page, level, "a", "o1", 5) for _ in range(2))
    assert first == second == (None if level == "charge_under_lock" else {"order": "o1", "cents": 5})
    assert charges(page, "o1") == [5] * effects


@pytest.mark.parametrize(("level", "effects"), AFTER_WORSE)
def test_a_death_before_the_outcome_is_recorded_or_a_store_that_forgets(page, place, level, effects):
    first = run(page, level, "a", "o1", 5)
    place.client.flushall()
    assert run(page, level, "a", "o1", 5) == first
    assert charges(page, "o1") == [5] * effects


@pytest.mark.parametrize(("level", "effects"), AFTER_WORSE)
def test_a_late_writer(page, level, effects):
    run(page, level, "a", "o1", 5)
    with page.engine.begin() as connection:
        # Another run, with a greater token, was here.
        connection.execute(update(page.boundary.fence).values(token=2**53))
    if level == "charge":
        with pytest.raises(StaleToken):
            run(page, level, "a", "o2", 5)
    else:
        run(page, level, "a", "o2", 5)
    assert charges(page, "o1") + charges(page, "o2") == [5] * effects


def test_another_payload_is_refused(page, place):
    run(page, "charge", "a", "o1", 5)
    place.client.flushall()
    with pytest.raises(PayloadMismatch):
        run(page, "charge", "a", "o1", 6)
    assert charges(page, "o1") == [5]


def test_what_follows_is_sent_when_the_transaction_is_committed(page, place):
    run(page, "order", "a", "o1", 5)
    assert place.messages() == []
    page.outbox.look(place.app)
    place.client.flushall()
    run(page, "order", "a", "o1", 5)
    page.outbox.look(place.app)
    (message,) = place.messages()
    assert (message.headers["task"], message.payload[0]) == (page.send_receipt.name, ["o1"])
    assert message.properties["priority"] == 3
    assert charges(page, "o1") == [5]


def test_the_tables_have_the_names_of_the_page(page):
    tables = page.boundary.execution, page.boundary.fence, page.boundary.outbox
    assert [table.name for table in tables] == ["singleflight_execution", "singleflight_fence", "singleflight_outbox"]
    assert all(f"`{table.name}`" in DOCUMENT.read_text(encoding="utf-8") for table in tables)
    with page.engine.connect() as connection:
        assert [connection.execute(select(table)).all() for table in tables] == [[], [], []]
