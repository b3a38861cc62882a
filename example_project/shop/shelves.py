"""What is on the shelves, and what customers see of it: each waits for its lock key in the way that suits it."""

from __future__ import annotations

import time

from celery_singleflight import SingleflightTask
from shop import app, books


@app.task(base=SingleflightTask, bind=True, lock_name="shelf", lock_on=("article",), contention_policy="queue")
def move(self: SingleflightTask, article: str, pieces: int) -> int:
    """Put pieces of an article on its shelf, or take some away, one after the other in the order they came. Returns how many
    there are.
    """
    left = books.move(article, pieces, token=self.lease.fencing_token)
    show.delay(article)
    return left


@app.task(
    base=SingleflightTask, bind=True, lock_on=("article",), contention_policy="coalesce", coalesce_delay=0.5, coalesce_within=5
)
def show(self: SingleflightTask, article: str) -> int:
    """Show customers how many pieces there are, once after a flurry of moves. Returns the number that is shown."""
    return books.show(article, token=self.lease.fencing_token)


@app.task(base=SingleflightTask, lock_on=("day",), contention_policy="join")
def takings(day: str) -> int:
    """Add up a day, once for all who ask while it is added up."""
    time.sleep(1)
    return books.takings(day)


@app.task(base=SingleflightTask, lock_on=(), contention_policy="replace")
def dress_window(motto: str) -> str:
    """Dress the shop window, which takes a while; whoever comes with a newer motto stops it."""
    for _ in range(50):
        time.sleep(0.1)
    return motto
