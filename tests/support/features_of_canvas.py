"""Features of Celery, as rows of the matrix: callbacks and canvas."""

from __future__ import annotations

from celery import chain, chord, group
from matrix_ends import end_of, ends_of
from matrix_feature import CONTENDED, Section
from nodes import wait_until

CANVAS = Section("Callbacks and canvas")

_IN_PLACE = "same; each call waits in its place in the worker"


@CANVAS(holds=("add",))
def link(t):
    """`link`, and no `link_error`."""
    called = [t.note.si(f"{t.key}-a"), t.note.si(f"{t.key}-b")]
    value = t.add.apply_async((1, 2), link=called, link_error=t.note.si(f"{t.key}-bad")).get(timeout=20)
    t.until_noted("-a", "-b")
    return value, t.noted("-a"), t.noted("-b"), t.noted("-bad")


@CANVAS(holds=("add",))
def link_with_the_result(t):
    """`link` that takes the result, with its own `link`."""
    linked = t.double.s().set(link=t.note_value.s(t.key))
    t.add.apply_async((1, 2), link=linked)
    return wait_until(lambda: [row["value"] for row in t.place.ledger.read(t.key)], what="the callback has run")


@CANVAS(holds=("fail",))
def link_error(t):
    """`link_error`, and no `link`."""
    result = t.fail.apply_async((), link=t.note.si(f"{t.key}-ok"), link_error=t.note.si(f"{t.key}-bad"))
    t.until_noted("-bad")
    return end_of(result), t.noted("-ok"), t.noted("-bad")


@CANVAS(holds=("note",))
def link_that_waits(t):
    """`link` whose callback meets contention itself."""
    value = t.add.apply_async((1, 2), link=t.note.si(t.key)).get(timeout=20)
    t.until_noted()
    return value, t.noted()


@CANVAS(holds=("note",))
def link_error_that_waits(t):
    """`link_error` whose errback meets contention itself."""
    end = end_of(t.fail.apply_async((), link_error=t.note.si(t.key)))
    t.until_noted()
    return end, t.noted()


@CANVAS(holds=("add",))
def chains(t):
    """`chain`, its first task contended."""
    return end_of(chain(t.add.s(1, 1), t.double.s(), t.add.s(3)).delay())


@CANVAS(holds=("double",))
def chains_in_the_middle(t):
    """`chain`, a task in its middle contended."""
    result = chain(t.add.s(1, 1), t.double.s(), t.add.s(3)).delay()
    return end_of(result), end_of(result.parent), end_of(result.parent.parent)


@CANVAS(holds=("fail",))
def failing_chain(t):
    """`chain` that fails in its middle."""
    result = chain(t.add.s(1, 1), t.fail.s(), t.add.s(3)).delay()
    return end_of(result.parent)["value"], result.parent.parent.get(timeout=20)


@CANVAS(holds=("add",), waiting=3)
def groups(t):
    """`group`."""
    return group(t.add.s(n, 1) for n in range(3)).delay().get(timeout=20)


@CANVAS(holds=("add",), waiting=3)
def chords(t):
    """`chord`, its header contended."""
    return end_of(chord([t.add.s(n, 1) for n in range(3)])(t.total.s()))


@CANVAS(holds=("total",))
def chords_whose_body_waits(t):
    """`chord`, its body contended."""
    return end_of(chord([t.add.s(n, 1) for n in range(3)])(t.total.s()))


@CANVAS(holds=("fail",))
def failing_chord(t):
    """`chord` with a member that fails."""
    result = chord([t.add.s(1, 1), t.fail.s()])(t.total.s())
    return wait_until(result.ready, 20, "the chord has ended"), result.state


@CANVAS(holds=("add", "total"), waiting=3)
def chord_of_chords(t):
    """`chord` of chords."""
    inner = chord([t.add.s(1, 1), t.add.s(2, 2)], t.total.s())
    return end_of(chord([inner, t.add.s(3, 3)])(t.total.s()))


@CANVAS(holds=("add",))
def chain_with_group_in_the_middle(t):
    """`chain` with a `group` in its middle."""
    return end_of(chain(t.add.s(1, 1), group(t.add.s(1), t.add.s(2)), t.total.s()).delay())


@CANVAS(holds=("double",), waiting=2)
def chain_in_a_chord(t):
    """`chord` with a `chain` in its header."""
    return end_of(chord([chain(t.add.s(1, 1), t.double.s()), t.double.s(4)])(t.total.s()))


@CANVAS(holds=("total",), in_place=True, says={(None, CONTENDED): _IN_PLACE})
def maps(t):
    """`map`."""
    return end_of(t.total.map([[1, 2], [3]]).delay())


@CANVAS(holds=("add",), in_place=True, says={(None, CONTENDED): _IN_PLACE})
def starmaps(t):
    """`starmap`."""
    return end_of(t.add.starmap([(1, 2), (3, 4)]).delay())


@CANVAS(holds=("add",), in_place=True, waiting=2, says={(None, CONTENDED): _IN_PLACE})
def chunks(t):
    """`chunks`."""
    result = t.add.chunks([(n, n) for n in range(4)], 2).apply_async()
    return ends_of(*result.results)


@CANVAS(holds=("replace_by_chain",))
def replaced_by_a_chain(t):
    """`self.replace()` by a chain."""
    return end_of(t.replace_by_chain.delay())


@CANVAS(holds=("add",))
def replaced_by_a_chain_that_waits(t):
    """`self.replace()` by a chain whose first task is contended."""
    return end_of(t.replace_by_chain.delay())


@CANVAS(holds=("replace_by_itself",))
def replaced_by_itself(t):
    """`self.replace()` by the same task, twice."""
    return end_of(t.replace_by_itself.delay(2))


@CANVAS(holds=("replace_by_chain",))
def replaced_in_a_chain(t):
    """`self.replace()` in a chain."""
    return end_of(chain(t.replace_by_chain.si(), t.double.s()).delay())


@CANVAS(holds=("replace_by_group",))
def replaced_by_a_group_in_a_chord(t):
    """`self.replace()` by a group, in the header of a chord."""
    return end_of(chord([t.replace_by_group.si(), t.add.s(5, 5)])(t.flat_total.s()))
