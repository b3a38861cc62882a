"""Features of Celery, as rows of the matrix: retries."""

from __future__ import annotations

from matrix_ends import end_of
from matrix_feature import Section
from nodes import wait_until

RETRIES = Section("Retries")


@RETRIES(holds=("retry_twice",))
def retry(t):
    """`self.retry()`: value, number of attempts, hooks."""
    result = t.retry_twice.delay()
    return end_of(result), sorted(t.hooks(result, 7))


@RETRIES(holds=("retry_for_ever",))
def retries_run_out(t):
    """`max_retries` runs out: waiting takes nothing of it."""
    return end_of(t.retry_for_ever.delay())


@RETRIES(holds=("autoretry",))
def autoretry(t):
    """`autoretry_for`."""
    return end_of(t.autoretry.delay())


@RETRIES(holds=("retry_with_arguments",))
def retry_with_arguments(t):
    """`self.retry(args=…)`."""
    return end_of(t.retry_with_arguments.delay("first"))


def _retries_and_goes_on(t, name, callbacks):
    result = getattr(t, name).apply_async((t.key,), link=t.note.si(f"{t.key}-link"))
    wait_until(lambda: len([hook for hook in t.hooks(result, 0) if "after_return" in hook]) == 2, what="both runs have ended")
    wait_until(lambda: t.noted("-link") == callbacks, what="the callbacks have run")
    # Not what `result` has heard: the first of the two outcomes may have come first.
    return t.place.app.AsyncResult(result.id).state, sorted(t.hooks(result, 0)), t.noted()


@RETRIES(holds=("retry_and_return",))
def retry_that_returns(t):
    """`self.retry(throw=False)`, and a value all the same."""
    return _retries_and_goes_on(t, "retry_and_return", 2)


@RETRIES(holds=("retry_and_eat_it",))
def retry_that_is_eaten(t):
    """`self.retry()` under `except Exception`."""
    return _retries_and_goes_on(t, "retry_and_eat_it", 2)


@RETRIES(holds=("retry_and_fail",))
def retry_that_fails(t):
    """`self.retry(throw=False)`, and a failure all the same."""
    # Which of its two outcomes a plain task stores last is a matter of luck.
    return _retries_and_goes_on(t, "retry_and_fail", 1)[1:]
