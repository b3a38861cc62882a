"""Why a trigger ended, as it may be shown to people."""

from __future__ import annotations

import json
import re
from typing import Final

from celery_singleflight.claims import Outcome

__all__ = ("told",)

#: Reasons that name the trigger by which another has ended, or the task that has its execution key.
_BY_ANOTHER: Final = {
    "answered": "answered from the outcome of {}",
    "coalesced": "it has the outcome of {}",
    "replaced": "by {}",
    "task": "its execution key belongs to the task {}",
    "payload": "its execution key was recorded by {} with another payload",
}
#: Longest text of a reason that is shown.
_LONGEST: Final = 200
_WORDS: Final = re.compile(r"[\w ]{0,200}")
_TYPE: Final = re.compile(r"[A-Za-z_]\w*(?=\()")


def told(outcome: str, reason: str) -> tuple[str, str | None, str | None]:
    """Return the reason of an outcome as it may be shown, and the blocker that it names."""
    try:
        parts = json.loads(reason or "[]")
    except ValueError:
        return _plain(outcome, reason), None, None
    if not isinstance(parts, list) or not parts:
        return "", None, None
    if len(parts) == 5:
        return _about_a_run(*parts)
    first, second = str(parts[0]), parts[1] if len(parts) == 2 else ""
    if len(parts) == 2 and first in _BY_ANOTHER:
        return _BY_ANOTHER[first].format(second or "unknown"), None if first in ("task", "payload") else second, None
    if len(parts) == 2 and first == "resolved":
        return _short(f"somebody knew: {second}" if second else "somebody knew"), None, None
    return _plain(outcome, first), None, None


def _about_a_run(what: str, task_id: str, worker: str, number: float, remaining: float) -> tuple[str, str | None, str | None]:
    """Return the same of a reason that names a run, which was in the way or has died."""
    if what == "died":
        return f"{number} of its runs died with their process, the last on {worker or 'unknown'}", None, None
    run = f"{task_id or 'unknown'} on {worker or 'unknown'}"
    if what == "uncertain":
        return f"nobody knew what the run of {run} had done, which had died {number / 1000:.1f} s before", task_id, worker
    return f"the {what} was held by {run} for {number / 1000:.1f} s, {remaining / 1000:.1f} s left", task_id, worker


def _plain(outcome: str, text: str) -> str:
    """Return a text as it may be shown: the repr of an error may quote what the task was called with."""
    if outcome == Outcome.FAILED and not _WORDS.fullmatch(text):
        named = _TYPE.match(text)
        return f"{named[0]}(…)" if named else "…"
    return _short(text)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
