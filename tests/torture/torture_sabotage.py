"""Ways to break the package in the workers, so that the judge can be judged: each must make the verdict red."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_singleflight import custody, heartbeat, script, store, sweeper

if TYPE_CHECKING:
    from collections.abc import Callable


def _change(module: object, name: str, old: str, new: str) -> None:
    """Change the text of a loaded script; a text that is not there any more is an error."""
    whole: script.Script = getattr(module, name)
    header, _, text = whole.source.partition("\n")
    if old not in text:
        raise ValueError(f"script {whole.name} has no {old!r}")
    setattr(module, name, script.Script(whole.name, text.replace(old, new)))
    if not getattr(module, name).source.startswith(header):
        raise ValueError(f"script {whole.name} is not declared as before")


def finish_without_owner() -> None:
    """A run that was overtaken records its outcome all the same, and frees the key whoever holds it."""
    _change(store, "_FINISH", "return {'refused', holder or by or '', done or ''}", "redis.call('DEL', lease)")
    _change(store, "_FINISH", "return {'refused', ended_by or '', ended}", "redis.call('DEL', lease)")
    _change(store, "_FINISH", "return {'refused', '', ''}", "redis.call('DEL', lease)")


def no_sweeper() -> None:
    """Nobody looks for what the dead have left."""
    sweeper.Sweeper._sweep = lambda self: None


def no_renewal() -> None:
    """Leases are not renewed, and nobody minds."""
    heartbeat.Heartbeat._renew = lambda self: None
    store.Store.finish = _never_refused(store.Store.finish)


def _never_refused(finish: Callable[..., object]) -> Callable[..., None]:
    def finish_anyway(self, *args, **kwargs):
        finish(self, *args, **kwargs)

    return finish_anyway


def no_memory() -> None:
    """What has succeeded is run again for the next trigger with its execution key."""
    _change(store, "_ENTER", "if is_own_outcome or done then", "if is_own_outcome then")


def same_token() -> None:
    """Fencing tokens do not grow."""
    _change(store, "_ENTER", "token = clock[1] * 1000000 + clock[2]", "token = 4000000000000000 - math.floor(clock[1])")
    _change(store, "_ENTER", "token = last + 1", "token = last - 1")


def unsettled_is_settled() -> None:
    """What follows an outcome is taken for sent when it is not: nobody sends the tail of a chain whose head was killed."""
    _change(store, "_FINISH", "'ended_ms', ended_ms,", "'ended_ms', ended_ms, 'settled', '1',")


def no_takeover_on_death() -> None:
    """The message of a killed child is not given back, and the store does not know it either."""
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
