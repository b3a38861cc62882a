from __future__ import annotations

import importlib.util
import os
import re
import sqlite3
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest
from celery import Celery
from nodes import PACKAGE, ProcessContainer, wait_until

from celery_singleflight import Contended, lock

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLE = PACKAGE / "example_project"
TENANTS = {"north", "south", "west"}


class Vendors:
    """The vendors' servers: `acorn` answers when the gate is open, `birch` at once."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.asked: Counter[str] = Counter()
        self.busy = 0
        self.most_at_once = 0
        self._guard = threading.Lock()
        vendors = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                vendor = self.path.strip("/")
                vendors.enter(vendor)
                if vendor == "acorn":
                    vendors.gate.wait(60)
                vendors.leave(vendor)
                body = b'{"apples": 120, "pears": 150}'
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def enter(self, vendor: str) -> None:
        with self._guard:
            self.asked[vendor] += 1
            if vendor == "acorn":
                self.busy += 1
                self.most_at_once = max(self.most_at_once, self.busy)

    def leave(self, vendor: str) -> None:
        with self._guard:
            self.busy -= vendor == "acorn"

    def close(self) -> None:
        self.gate.set()
        self.server.shutdown()
        self.server.server_close()


class Shop:
    """The project as its README runs it: a worker and a beat in processes, and what can be seen of them."""

    def __init__(self, redis_url: str, directory: Path) -> None:
        self.vendors = Vendors()
        self.books = directory / "books.sqlite3"
        env = {
            "SHOP_REDIS_URL": redis_url,
            "SHOP_BOOKS": str(self.books),
            "SHOP_BANK_SECONDS": "0.3",
            "SHOP_VENDOR_URL": self.vendors.url,
            "SHOP_SETTLE_EVERY": "0.5",
            "SHOP_SYNC_EVERY": "0.5",
            "PYTHONPATH": os.pathsep.join([str(EXAMPLE), str(PACKAGE), os.environ.get("PYTHONPATH", "")]),
        }
        celery = [sys.executable, "-m", "celery", "-A", "shop"]
        self.worker = ProcessContainer("shop-worker", [*celery, "worker", "-l", "info", "-c", "4"], env)
        schedule = str(directory / "celerybeat-schedule")
        self.beat = ProcessContainer("shop-beat", [*celery, "beat", "-l", "info", "-s", schedule, "--pidfile="], env)
        self.app = Celery("customers", broker=redis_url, backend=redis_url, set_as_current=False)
        self.app.conf.update(task_default_queue="shop", singleflight_url=redis_url, singleflight_key_prefix="shop")

    def send(self, task: str, *args):
        return self.app.send_task(f"shop.{task}", args=args)

    def rows(self, query: str, *values) -> list[tuple]:
        connection = sqlite3.connect(f"file:{self.books}?mode=ro", uri=True, timeout=30)
        try:
            return connection.execute(query, values).fetchall()
        finally:
            connection.close()

    def count_in_log(self, pattern: str) -> int:
        return len(re.findall(pattern, self.worker.logs()))

    def close(self) -> None:
        self.vendors.close()
        self.beat.teardown()
        self.worker.teardown()


@pytest.fixture(scope="module")
def shop(valkey, tmp_path_factory):
    shop = Shop(f"{valkey.url}/5", tmp_path_factory.mktemp("shop"))
    try:
        wait_until(lambda: " ready." in shop.worker.logs() and shop.beat.ready(), 30, "the shop is open")
        yield shop
    finally:
        shop.close()


@pytest.fixture
def books(tmp_path, monkeypatch):
    """The module of the books alone, with a file of the test's own."""
    monkeypatch.setenv("SHOP_BOOKS", str(tmp_path / "books.sqlite3"))
    spec = importlib.util.spec_from_file_location("shop_books", EXAMPLE / "shop" / "books.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_beat_settles_each_tenant_and_day_once_however_often_it_ticks(shop):
    ticks = r"Task shop\.settlement\.settle_yesterday\[\S+\] succeeded"
    answers = r"shop\.settlement\.settle_day\[\S+\] does not run, succeeded: answered from the stored outcome of settle:"
    wait_until(lambda: shop.count_in_log(ticks) >= 4, 30, "beat has ticked four times")
    wait_until(lambda: shop.count_in_log(answers) >= 3 * len(TENANTS), 30, "later ticks were answered")
    settled = Counter(shop.rows("SELECT tenant, day FROM settlements"))
    assert {tenant for tenant, _ in settled} == TENANTS
    assert set(settled.values()) == {1}


def test_an_invoice_asked_for_twice_is_written_once(shop):
    order = {"id": "o-17", "amount": 1990}
    first, second = shop.send("invoices.invoice", order), shop.send("invoices.invoice", order)
    number = first.get(timeout=30)
    assert second.get(timeout=30) == number
    assert shop.send("invoices.invoice", order).get(timeout=30) == number
    assert shop.rows("SELECT number, amount FROM invoices WHERE order_id = ?", "o-17") == [(number, 1990)]


def test_invoices_of_many_orders_at_once_have_numbers_without_gaps(shop):
    sent = [shop.send("invoices.invoice", {"id": f"many-{n % 8}", "amount": n % 8}) for n in range(16)]
    numbers = [result.get(timeout=60) for result in sent]
    assert numbers[:8] == numbers[8:]
    written = [number for (number,) in shop.rows("SELECT number FROM invoices ORDER BY number")]
    assert written == list(range(1, len(written) + 1))
    assert set(numbers) <= set(written)


def test_while_a_vendor_is_asked_further_syncs_are_skipped_and_publish_nothing(shop):
    skips = r"shop\.vendors\.sync_vendor\[\S+\] does not run, skipped: vendor\[\"acorn\"\] is held by"
    wait_until(lambda: shop.vendors.busy, 30, "a sync has reached the vendor")
    wait_until(lambda: shop.count_in_log(skips) >= 4, 30, "further syncs were skipped")
    assert (shop.vendors.asked["acorn"], shop.vendors.most_at_once) == (1, 1)
    assert shop.rows("SELECT * FROM prices WHERE vendor = 'acorn'") == []
    wait_until(lambda: shop.rows("SELECT * FROM prices WHERE vendor = 'birch'"), 30, "another vendor is not held up")

    shop.vendors.gate.set()
    published = [("apples", 120), ("pears", 150)]
    query = "SELECT article, price FROM prices WHERE vendor = 'acorn' ORDER BY article"
    wait_until(lambda: shop.rows(query) == published, 30, "what the sync brought is published")
    wait_until(lambda: shop.vendors.asked["acorn"] >= 3, 30, "later ticks sync again")
    assert shop.vendors.most_at_once == 1
    assert shop.count_in_log(r"shop\.vendors\.publish_prices\[\S+\] raised") == 0


def test_closing_the_month_of_a_busy_account_is_rejected_at_once(shop):
    with lock(shop.app, "account", "north", wait=20), pytest.raises(Contended, match='account\\["north"\\] is held by'):
        shop.send("settlement.close_month", "north", "2026-11").get(timeout=30)
    shop.send("settlement.settle_day", "north", "1999-12-31").get(timeout=30)
    with lock(shop.app, "account", "south", wait=20):  # another tenant's account is none of its business
        amount = wait_for_success(lambda: shop.send("settlement.close_month", "north", "1999-12"))
    assert [(amount,)] == shop.rows("SELECT amount FROM settlements WHERE tenant = 'north' AND day = '1999-12-31'")


def test_no_move_of_an_article_is_lost_and_customers_are_shown_the_end_of_a_flurry(shop):
    moves = [shop.send("shelves.move", "apples", 1) for _ in range(20)]
    assert sorted(move.get(timeout=60) for move in moves) == list(range(1, 21))
    shown = "SELECT shown FROM shelves WHERE article = 'apples'"
    wait_until(lambda: shop.rows(shown) == [(20,)], 30, "customers see all of them")
    wait_until(lambda: shop.count_in_log(r"Task shop\.shelves\.show\[\S+\] succeeded") >= 20, 30, "each was answered")
    assert shop.count_in_log(r"shop\.shelves\.show\[\S+\] does not run, coalesced") >= 10


def test_one_report_is_made_for_all_who_ask_while_it_is_made(shop):
    asked = [shop.send("shelves.takings", "1999-01-01") for _ in range(5)]
    assert [answer.get(timeout=30) for answer in asked] == [0] * 5
    assert shop.count_in_log(r"shop\.shelves\.takings\[\S+\] does not run, succeeded") == 4


def test_a_newer_motto_stops_the_dressing_of_the_window(shop):
    first = shop.send("shelves.dress_window", "autumn")
    wait_until(lambda: shop.count_in_log(r"Task shop\.shelves\.dress_window\[\S+\] received"), 30, "it is at the worker")
    second = shop.send("shelves.dress_window", "winter")
    assert second.get(timeout=30) == "winter"
    wait_until(lambda: first.state == "REVOKED", 30, "the first is revoked")


def test_the_books_refuse_a_writer_with_a_smaller_token(books):
    books.settle("north", "2026-11-01", 100, token=7)
    books.settle("north", "2026-11-02", 200, token=8)
    books.settle("north", "2026-11-03", 300, token=8)
    with pytest.raises(books.StaleWriter):
        books.settle("north", "2026-11-04", 400, token=7)
    books.settle("south", "2026-11-01", 500, token=1)  # tokens compare within one account
    assert books.month("north", "2026-11", token=9) == 600


def wait_for_success(send) -> int:
    """Send until beat's own settlement is not in the way."""

    def answered():
        result = send()
        try:
            return [result.get(timeout=30)]
        except Contended:
            return None

    return wait_until(answered, 30, "the account is free")[0]
