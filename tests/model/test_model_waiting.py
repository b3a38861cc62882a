"""The promises hold for those who wait in the store, and a hand-over with one thing wrong is caught."""

from __future__ import annotations

import model_variants_waits as wrong
import pytest
from explore import explore
from model_scripts import Scripts
from model_world import World
from model_worlds import WAITING

#: What happens in some world, or the model shows nothing.
MET = [
    ("enter", "parked", "line"),
    ("enter", "parked", "again"),
    ("enter", "parked", "group"),
    ("enter lingering", "linger"),
    ("enter", "led"),
    ("enter", "held", "execution"),
    ("enter", "ended", "revoked"),
    ("enter", "surplus", "copy"),
    ("baton",),
    ("linger no more",),
    ("call",),
    ("attend", "attended"),
    ("rescue", "parked"),
    ("recall", "message"),
    ("recall", "gone"),
    ("recall", "later"),
    ("conclude revoked", "concluded"),
    ("conclude revoked", "refused"),
    ("follow", "ended", "succeeded"),
    ("follow", "ended", "coalesced"),
    ("follow, reply lost", "ended", "succeeded"),
    ("reserved",),
]

#: The promise that each breaks, and the world in which it is caught.
VARIANTS = [
    (wrong.CalledIsOutOfLine, "P3 vanished", "a line of three"),
    (wrong.ParkInTwoSteps, "P3 no call", "a line of three"),
    (wrong.NewcomerPasses, "order: trigger 2 takes a place that is reserved", "a line of three"),
    (wrong.CalledPasses, "order: trigger 2 takes a place that is reserved", "a line of short runs, a late message"),
    (wrong.PassedAtOnce, "order: trigger 0 takes a place that is reserved", "a queue, any fault"),
    (wrong.KeptForEver, "P3 kept out", "a line, late messages"),
    (wrong.LookedAtNever, "P3 no call", "a line of three"),
    (wrong.FollowersForgotten, "P4 unanswered", "join, any fault"),
    (wrong.RecallLetsGo, "P3 no rescue", "a queue, any fault"),
    (wrong.AbandonLetsGo, "P3 no call", "a queue, any fault"),
    (wrong.FinishBesideTheParked, "P3 no call", "a queue, any fault"),
    (wrong.RevokedLeavesFacts, "left over", "join, one revoked"),
    (wrong.FactsGo, "P3 forgotten", "a line beside one that goes back"),
]


@pytest.fixture(scope="module")
def met():
    return set()


@pytest.mark.parametrize("name", WAITING)
def test_the_promises_hold_for_those_who_wait(name, met):
    seen = explore(WAITING[name])
    met.update(seen.answers)
    assert seen.accident is None, str(seen.accident)


def test_everything_that_matters_happens_to_those_who_wait(met):
    assert [words for words in MET if words not in met] == []


@pytest.mark.parametrize(("variant", "promise", "world"), VARIANTS, ids=[variant.__name__ for variant, *_ in VARIANTS])
def test_what_is_wrong_with_the_hand_over_is_caught(variant, promise, world):
    if issubclass(variant, Scripts):
        seen = explore(WAITING[world], variant)
    else:
        assert issubclass(variant, World)
        seen = explore(WAITING[world], world=variant)
    assert seen.accident is not None
    assert seen.accident.promise.startswith(promise), str(seen.accident)
