"""The books: an SQLite file that refuses stale writers.

A worker that was suspended, or cut off from Redis, may wake up when its lease has long gone to another one. Nothing but the
resource itself can stop its last write. So each writer hands over the fencing token of its lease, and the books keep the
greatest they have seen of each account: a smaller one comes from the past.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, contextmanager
from os import environ
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PATH = environ.get("SHOP_BOOKS", "books.sqlite3")

# Settlements and invoices are not unique here: were one made twice, it would be seen twice.
TABLES = """
CREATE TABLE IF NOT EXISTS fences (account TEXT PRIMARY KEY, token INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS settlements (tenant TEXT NOT NULL, day TEXT NOT NULL, amount INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS invoices (number INTEGER NOT NULL, order_id TEXT NOT NULL, amount INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS shelves (article TEXT PRIMARY KEY, pieces INTEGER NOT NULL, shown INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS prices (vendor TEXT NOT NULL, article TEXT NOT NULL, price INTEGER NOT NULL);
"""


class StaleWriter(Exception):
    """Somebody with a greater fencing token has written to this account since."""


@contextmanager
def writing(account: str, token: int) -> Iterator[sqlite3.Connection]:
    """Open the books for one transaction on an account. Raises `StaleWriter`, and then nothing is written."""
    connection = sqlite3.connect(PATH, timeout=30, isolation_level=None)
    try:
        connection.executescript(TABLES)
        connection.execute("BEGIN IMMEDIATE")
        accepted = connection.execute(
            "INSERT INTO fences VALUES (?, ?) ON CONFLICT (account) DO UPDATE SET token = excluded.token"
            " WHERE excluded.token >= token",
            (account, token),
        ).rowcount
        if not accepted:
            raise StaleWriter(account, token)
        yield connection
        connection.execute("COMMIT")
    finally:
        connection.close()  # without a COMMIT this undoes


def settle(tenant: str, day: str, amount: int, *, token: int) -> None:
    """Enter the settlement of a tenant's day."""
    with writing(f"tenant {tenant}", token) as db:
        db.execute("INSERT INTO settlements VALUES (?, ?, ?)", (tenant, day, amount))


def month(tenant: str, month: str, *, token: int) -> int:
    """Return what was settled for a tenant in a month such as `2026-11`."""
    with writing(f"tenant {tenant}", token) as db:
        row = db.execute("SELECT sum(amount) FROM settlements WHERE tenant = ? AND day LIKE ?", (tenant, f"{month}-%"))
        return row.fetchone()[0] or 0


def invoice(order_id: str, amount: int, *, token: int) -> int:
    """Enter an invoice under the next number, and return the number. Numbers have no gaps."""
    with writing("invoices", token) as db:
        (last,) = db.execute("SELECT coalesce(max(number), 0) FROM invoices").fetchone()
        db.execute("INSERT INTO invoices VALUES (?, ?, ?)", (last + 1, order_id, amount))
        return last + 1


def move(article: str, pieces: int, *, token: int) -> int:
    """Put pieces of an article on its shelf, or take some away; return how many there are."""
    with writing(f"shelf {article}", token) as db:
        db.execute(
            "INSERT INTO shelves (article, pieces) VALUES (?, ?)"
            " ON CONFLICT (article) DO UPDATE SET pieces = pieces + excluded.pieces",
            (article, pieces),
        )
        return db.execute("SELECT pieces FROM shelves WHERE article = ?", (article,)).fetchone()[0]


def show(article: str, *, token: int) -> int:
    """Show customers how many pieces of an article there are, and return that."""
    with writing(f"shown {article}", token) as db:
        db.execute("UPDATE shelves SET shown = pieces WHERE article = ?", (article,))
        return db.execute("SELECT coalesce(max(shown), 0) FROM shelves WHERE article = ?", (article,)).fetchone()[0]


def takings(day: str) -> int:
    """Return what was settled on a day for all tenants."""
    with closing(sqlite3.connect(PATH, timeout=30)) as db:
        db.executescript(TABLES)
        return db.execute("SELECT coalesce(sum(amount), 0) FROM settlements WHERE day = ?", (day,)).fetchone()[0]


def publish_prices(vendor: str, prices: dict[str, int], *, token: int) -> None:
    """Replace the prices of a vendor."""
    with writing(f"vendor {vendor}", token) as db:
        db.execute("DELETE FROM prices WHERE vendor = ?", (vendor,))
        db.executemany("INSERT INTO prices VALUES (?, ?, ?)", [(vendor, *item) for item in prices.items()])
