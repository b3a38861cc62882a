"""What a type checker knows of the business boundary. Checked by mypy, never run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

from sqlalchemy import MetaData, Table

from celery_singleflight.sql import Boundary, ExecutionRecord, Outbox

if TYPE_CHECKING:
    from celery import Celery
    from celery.canvas import Signature
    from sqlalchemy import Connection, Engine
    from sqlalchemy.orm import Session, scoped_session

    from celery_singleflight import SingleflightTask
    from celery_singleflight.errors import ExecutionKeyReused, PayloadMismatch, SingleflightError, StaleToken


def a_boundary_is_made_with_names_of_the_callers(metadata: MetaData) -> None:
    boundary = Boundary(prefix="sf_", schema="work", metadata=metadata)
    assert_type(Boundary().metadata, MetaData)
    assert_type(boundary.execution, Table)
    assert_type(boundary.fence, Table)
    assert_type(boundary.outbox, Table)
    Boundary("sf_")  # type: ignore[call-arg]


def a_transaction_is_a_connection_or_a_session(
    boundary: Boundary, connection: Connection, session: Session, scoped: scoped_session[Session], engine: Engine
) -> None:
    assert_type(boundary.record_execution(connection, "k"), ExecutionRecord)
    assert_type(boundary.record_execution(session, "k", scope="s", task="t", payload=[1]), ExecutionRecord)
    boundary.check_fence(scoped, "r", 7)
    boundary.check_fence(engine, "r", 7)  # type: ignore[arg-type]
    boundary.check_fence(session, "r", "7")  # type: ignore[arg-type]


def a_run_claims(boundary: Boundary, session: Session, task: SingleflightTask) -> Any:
    execution = boundary.claim(session, task, resource="r", payload={"cents": 5})
    assert_type(execution.is_done, bool)
    assert_type(execution.key, str)
    execution.is_done = True  # type: ignore[misc]
    return execution.result if execution.is_done else execution.finish(5)


def what_is_sent_has_a_task_id(boundary: Boundary, session: Session, signature: Signature) -> None:
    assert_type(boundary.send(session, signature), str)


def an_outbox_takes_an_engine_or_makes_one(app: Celery, boundary: Boundary, engine: Engine) -> None:
    Outbox(app, boundary, engine)
    assert_type(Outbox(app, boundary, lambda: engine), Outbox)
    Outbox(app, boundary, "postgresql://")  # type: ignore[arg-type]


def the_errors_are_in_the_tree(stale: StaleToken, mismatch: PayloadMismatch) -> list[SingleflightError]:
    assert_type(stale.resource, str)
    assert_type(stale.token, int)
    assert_type(stale.seen, int)
    reused: ExecutionKeyReused = mismatch
    return [stale, reused]
