"""What the store knows of those who wait for the lock key, parked with their messages."""

from __future__ import annotations

from typing import Final, NamedTuple

#: No trigger, as in `model_state`.
NONE: Final = -2
#: Groups are counted from 1.
NO_GROUP: Final = 0


class Call(NamedTuple):
    """What somebody has in hand: the message of a trigger, to be published as a copy made from `copy`; or what a sweeper
    is about to do with a parked trigger, to "recall" its message or to "revoke" it.
    """

    trigger: int
    copy: int = NONE
    generation: int = NONE
    what: str = "message"
    #: Whether it is called ahead of its turn, and may wait in its slot before it asks.
    is_ahead: bool = False


class Waiter(NamedTuple):
    """A parked trigger: which copy of its message the store has."""

    trigger: int
    copy: int
    generation: int
    #: The owner token of the delivery that brought it.
    by: int
    #: Its policy when it was parked first.
    kind: str
    #: Those who get its outcome.
    group: int = NO_GROUP
    #: Whose outcome it gets.
    leader: int = NONE
    #: Whether it was called twice.
    again: bool = False


class Waits(NamedTuple):
    """Who waits for the lock key."""

    parked: tuple[Waiter, ...] = ()
    #: Triggers in the order of their tickets.
    line: tuple[int, ...] = ()
    #: Triggers whose message is under way, and whether a place is still reserved for each.
    called: tuple[tuple[int, bool], ...] = ()
    #: Triggers, and the group whose outcome each gets.
    followers: tuple[tuple[int, int], ...] = ()
    #: Who waits in its slot or is called to, and whether its time has not run out.
    lingers: int = NONE
    is_lingering: bool = False
    has_baton: bool = False
    #: The waiting trigger that others are coalesced into; and of each payload the waiting one that others join.
    gathers: int = NONE
    joins: tuple[tuple[str, int], ...] = ()
    #: Whether a sweeper looks at this lock key.
    is_attended: bool = False
    #: Whether the recent hold time is known, and since when there was no slot to linger in.
    knows_hold: bool = False
    no_slot: bool = False
    #: Whether the hash `pace` exists: "", "goes" by itself, or "lasts".
    pace: str = ""
    #: The last name that was given to a group.
    groups: int = NO_GROUP

    def waiter(self, trigger: int) -> Waiter | None:
        return next((waiter for waiter in self.parked if waiter.trigger == trigger), None)

    def is_called(self, trigger: int) -> bool:
        return any(called == trigger for called, _ in self.called)

    def is_reserved(self, trigger: int) -> bool:
        return (trigger, True) in self.called

    def follows(self, trigger: int) -> bool:
        return any(follower == trigger for follower, _ in self.followers)

    def put(self, waiter: Waiter) -> Waits:
        others = [other for other in self.parked if other.trigger != waiter.trigger]
        return self._replace(parked=tuple(sorted([*others, waiter])))

    def call(self, trigger: int, *, is_reserved: bool = True) -> Waits:
        called = {**dict(self.called), trigger: is_reserved}
        return self._replace(called=tuple(sorted(called.items())))

    def uncall(self, trigger: int) -> Waits:
        return self._replace(called=tuple(call for call in self.called if call[0] != trigger))

    def leave_line(self, trigger: int) -> Waits:
        return self.uncall(trigger)._replace(line=tuple(other for other in self.line if other != trigger))

    def follow(self, trigger: int, group: int) -> Waits:
        return self._replace(followers=tuple(sorted({**dict(self.followers), trigger: group}.items())))

    def unfollow(self, trigger: int) -> Waits:
        return self._replace(followers=tuple(follower for follower in self.followers if follower[0] != trigger))

    def linger_no_more(self) -> Waits:
        return self._replace(lingers=NONE, is_lingering=False)

    def forget(self, trigger: int) -> Waits:
        """Nobody waits any more by this name."""
        waits = self.leave_line(trigger).unfollow(trigger)
        if waits.lingers == trigger:
            waits = waits.linger_no_more()
        return waits._replace(
            parked=tuple(waiter for waiter in waits.parked if waiter.trigger != trigger),
            gathers=NONE if waits.gathers == trigger else waits.gathers,
            joins=tuple(join for join in waits.joins if join[1] != trigger),
        )


NOBODY_WAITS: Final = Waits()
