"""The promises hold in every state of small worlds, and a script with one thing wrong is caught."""

from __future__ import annotations

import model_variants as wrong
import pytest
from explore import explore
from model_scripts import Scripts
from model_world import World
from model_worlds import SMALL

#: What happens in some world, or the model shows nothing.
MET = [
    ("effect", "in order", "accepted"),
    ("effect", "stale", "refused"),
    ("enter", "held", "lock"),
    ("enter", "held", "own"),
    ("enter", "held", "execution"),
    ("enter", "held", "predecessor"),
    ("enter", "ended", "succeeded"),
    ("enter", "ended", "failed"),
    ("enter", "ended", "skipped"),
    ("enter", "ended", "dead-lettered"),
    ("enter", "surplus", "copy"),
    ("enter", "surplus", "generation"),
    ("renew", "lost", "expired"),
    ("renew", "lost", "taken"),
    ("finish succeeded", "finished"),
    ("finish succeeded", "refused"),
    ("finish succeeded, reply lost", "finished"),
    ("conclude", "concluded"),
    ("conclude gone", "concluded"),
    ("conclude told", "concluded"),
    ("rescue", "message", ""),
    ("rescue", "message", "succeeded"),
    ("rescue", "later"),
    ("worker and message die",),
    ("forget",),
]

#: The promise that each breaks, and the world in which it is caught.
VARIANTS = [
    (wrong.FinishWithoutOwner, "P4 a second recorded success", "one execution key"),
    (wrong.ReleaseWithoutOwner, "P1 more bodies under leases than the limit", "two triggers, any fault"),
    (wrong.EnterByTaskId, "P1 more bodies under leases than the limit", "one trigger, any two faults"),
    (wrong.EnterWithoutOutcome, "P4 a body starts after the recorded success", "two triggers, any fault"),
    (wrong.TokenByCounter, "P2 a token that is not greater than the last", "a store that forgets"),
    (wrong.RenewRevives, "P1 more live leases than the limit", "one trigger, any two faults"),
    (wrong.RescueUnderLease, "P1 more bodies under leases than the limit", "one trigger, any two faults"),
    (wrong.RescueOnce, "P3 no rescue", "one trigger, any two faults"),
    (wrong.AnyCopy, "P3 copies multiply", "one trigger, any two faults"),
    (wrong.NewestCopyOnly, "P3 vanished", "one trigger, any two faults"),
    (wrong.LetGoOfTheDead, "P3 vanished", "one trigger, any two faults"),
    (wrong.SettleFirst, "P3 no end", "one trigger, any two faults"),
    (wrong.AcknowledgeFirst, "P3 vanished", "two triggers, any fault"),
]


@pytest.fixture(scope="module")
def met():
    return set()


@pytest.mark.parametrize("name", SMALL)
def test_the_promises_hold_in_every_state(name, met):
    seen = explore(SMALL[name])
    met.update(seen.answers)
    assert seen.accident is None, str(seen.accident)


def test_everything_that_matters_happens_in_some_world(met):
    assert [words for words in MET if words not in met] == []


def test_a_resource_that_looks_at_no_token_takes_a_stale_write(met):
    """Fencing is there for something: without it, what the model calls stale would have been written."""
    assert ("effect", "stale", "refused") in met


@pytest.mark.parametrize(("variant", "promise", "world"), VARIANTS, ids=[variant.__name__ for variant, *_ in VARIANTS])
def test_what_is_wrong_is_caught(variant, promise, world):
    if issubclass(variant, Scripts):
        seen = explore(SMALL[world], variant)
    else:
        assert issubclass(variant, World)
        seen = explore(SMALL[world], world=variant)
    assert seen.accident is not None
    assert seen.accident.promise.startswith(promise), str(seen.accident)
