"""What a type checker knows of steps, checkpoints and cursors. Checked by mypy, never run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

from celery_singleflight import CurrentStep, Cursor, SingleflightTask, current_step, forget_steps, resolve_step

if TYPE_CHECKING:
    from celery import Celery


def charge(amount: int, *, currency: str = "EUR") -> str:
    return f"{amount} {currency}"


def refund(charge_id: str) -> None:
    """Give it back."""


def a_step_returns_what_its_function_returns(task: SingleflightTask) -> None:
    assert_type(task.step("charge", charge, 7, currency="USD", compensate=refund), str)
    assert_type(task.step("charge", charge, 7), str)
    task.step(5, charge, 7)  # type: ignore[arg-type]
    task.step("charge")  # type: ignore[call-arg]
    task.step("charge", charge, 7, compensate="refund")  # type: ignore[arg-type]


def a_checkpoint_yields_the_parts(task: SingleflightTask) -> None:
    for part in task.checkpoint([1, 2, 3], every=10, name="numbers", on_change=lambda done: done - 1):
        assert_type(part, int)
    task.checkpoint(5)  # type: ignore[arg-type]
    task.checkpoint([1], every="2")  # type: ignore[arg-type]


def a_cursor_can_be_read_and_moved(task: SingleflightTask) -> None:
    cursor = task.cursor("page", on_change=lambda _: None)
    assert_type(cursor, Cursor)
    assert_type(cursor.get(), Any)
    cursor.set({"after": 7})


def a_step_can_be_asked_and_resolved(app: Celery) -> None:
    step = current_step()
    assert_type(step, CurrentStep | None)
    if step:
        assert_type(step.key, str)
        assert_type(step.attempt, int)
        assert_type(step.is_unsure, bool)
    resolve_step(app, "shop.pay", "charge", execution_key="pay:7", happened=True, result="ch_1")
    resolve_step(app, "shop.pay", "charge", task_id="t1", happened=False)
    resolve_step(app, "shop.pay", "charge", task_id="t1")  # type: ignore[call-arg]
    assert_type(forget_steps(app, "shop.pay", task_id="t1"), bool)
