"""What the settings of a store's server mean for the promises; said in the log when a worker starts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from celery_singleflight.errors import SingleflightError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

__all__ = ("risks", "warn_of_risks")

logger = logging.getLogger(__name__)


def warn_of_risks(client: Callable[[], AbstractContextManager[Any]]) -> None:
    """Log what the server's settings put at risk. A server that does not say is taken at its word by whoever set it up."""
    try:
        with client() as server:
            facts = {**server.info("memory"), **server.info("persistence")}
            saves = _saves(server)
    except (SingleflightError, TypeError, AttributeError) as error:
        logger.info("the store does not tell how durable it is: %s", error)
        return
    for risk in risks(facts, saves=saves):
        logger.warning("the store: %s", risk)


def risks(facts: Mapping[str, Any], *, saves: bool) -> list[str]:
    """Return what these facts of the server's INFO put at risk, for people to read; `saves` when it writes snapshots."""
    found = []
    policy = facts.get("maxmemory_policy", "noeviction")
    if int(facts.get("maxmemory", 0)) and policy != "noeviction":
        found.append(
            f"maxmemory-policy is {policy}: when its memory is full the server drops leases and outcomes, so that runs may "
            "overlap and completed executions may run again; set noeviction, or use a server that is not a cache"
        )
    if not int(facts.get("aof_enabled", 0)):
        lost = "since its last snapshot" if saves else "at all"
        found.append(
            f"it keeps no append-only file: after a restart it knows nothing {lost}, so what completed may run again, and what "
            "ran comes again only when the broker gives it out; set appendonly yes"
        )
    return found


def _saves(server: Any) -> bool:
    try:
        return bool(server.config_get("save").get("save"))
    except Exception:  # noqa: BLE001, a managed server refuses CONFIG in ways of its own
        return True
