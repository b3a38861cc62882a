"""Ways to break the package in the workers, so that the judge can be judged: each must make the verdict red."""

from __future__ import annotations

import re
from copy import copy
from hashlib import sha1
from typing import Any

from celery_singleflight import custody, heartbeat, script, store, sweeper


def _change(module: object, name: str, old: str, new: str) -> None:
    """Change the text of a loaded script, by a pattern; one that is not there any more is an error."""
    changed: script.Script = copy(getattr(module, name))
    changed.source, count = re.subn(old, new, changed.source)
    if not count:
        raise ValueError(f"script {changed.name} has no {old!r}")
    changed.sha = sha1(changed.source.encode(), usedforsecurity=False).hexdigest()
    setattr(module, name, changed)


def _change_finish(**changed: Any) -> None:
    finish = store.Store.finish

    def changed_finish(self, *args, **kwargs):
        return finish(self, *args, **{**kwargs, **changed})

    store.Store.finish = changed_finish


def finish_without_owner() -> None:
    """A run that was overtaken records its outcome all the same, and frees the key whoever holds it."""
    _change(store, "_FINISH", r"return \{'refused'.*\}", "redis.call('DEL', lease)")


def no_sweeper() -> None:
    """Nobody looks for what the dead have left."""
    sweeper.Sweeper._sweep = lambda self: None


def no_renewal() -> None:
    """Leases are not renewed, and nobody minds."""
    heartbeat.Heartbeat._renew = lambda self: None


def no_memory() -> None:
    """What has succeeded is forgotten at once."""
    _change_finish(keep=0.001)


def same_token() -> None:
    """Fencing tokens do not grow."""
    _change(store, "_ENTER", r"token = clock\[1\] \* 1000000 \+ clock\[2\]", "token = 4000000000000000 - clock[1]")
    _change(store, "_ENTER", r"token = last \+ 1", "token = last - 1")


def no_callbacks_after_death() -> None:
    """What follows an outcome is taken for sent when it is not."""
    _change(store, "_FINISH", r"return 'finished\\n'", r"redis.call('HSET', trigger, 'settled', '1') return 'finished\\n'")


def no_handout() -> None:
    """The sweeper looks, and finds nothing to rescue."""
    _change(custody, "_RESCUE", "if not message or settled then", "if true then")


SABOTAGES = {
    name.replace("_", "-"): act
    for name, act in list(globals().items())
    if callable(act) and not name.startswith("_") and getattr(act, "__module__", "") == __name__
}


def sabotage(name: str) -> None:
    """Break what is named; nothing for an empty name."""
    if name:
        SABOTAGES[name]()
