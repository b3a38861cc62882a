"""What the scripts share: who waits, who is called, who follows. Named as in `scripts/shared`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_state import NONE
from model_waits import NO_GROUP, Call, Waiter

if TYPE_CHECKING:
    from model_rules import Asked, Reply, Rules
    from model_state import Store
    from model_waits import Waits


class Parking:
    """One method for each function of `waiting.lua` and `parking.lua`."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    # What broken variants override.

    def is_next(self, store: Store, trigger: int, free: int) -> bool:
        """Whether nobody who waits comes first for a place of those that are free."""
        waits = store.waits
        if free <= 0:
            return False
        if not waits.parked:
            return True
        if waits.follows(trigger):
            return False
        before = waits.line[: waits.line.index(trigger)] if trigger in waits.line else waits.line
        if self.kept(store, before) >= free:
            return False
        return waits.is_called(trigger) or all(waits.is_called(other) for other in before)

    def kept(self, store: Store, before: tuple[int, ...]) -> int:
        """For how many of these a place is kept: they are called, and have not been passed."""
        called = [
            (waiter, store.waits.is_reserved(waiter.trigger)) for waiter in store.waits.parked if waiter.trigger in before
        ]
        return sum(
            store.waits.is_called(waiter.trigger) and self.is_kept(waiter, is_reserved=is_reserved)
            for waiter, is_reserved in called
        )

    def is_kept(self, waiter: Waiter, *, is_reserved: bool) -> bool:
        return is_reserved or not waiter.again

    def reserve(self, store: Store, trigger: int) -> Store:
        return store._replace(waits=store.waits.call(trigger))

    def hand_out(self, store: Store, calls: list[Call], waiter: Waiter, *, is_ahead: bool = False) -> Store:
        calls.append(Call(waiter.trigger, waiter.copy, waiter.generation, is_ahead=is_ahead))
        return store.set_due(waiter.trigger, is_due=True)

    def is_given_back(self, store: Store) -> bool:
        """Whether one that has lingered gives back the baton: a place is free, and not for it."""
        return sum(line.is_live for line in store.lease) < self.rules.limit

    def call_again(self, waiter: Waiter) -> bool:
        """Whether one that has not come is called once more before anybody behind it."""
        return not waiter.again

    def look_later(self, store: Store, trigger: int) -> Store:
        """A sweeper looks at whoever waits, sooner or later."""
        return store.set_due(trigger, is_due=True)

    def end_group(self, store: Store, calls: list[Call], group: int, leader: int, outcome: str) -> Store:
        """The one that leads a group has its outcome: its followers get the same, or one of them becomes the next to run."""
        followers = [follower for follower, its in store.waits.followers if its == group]
        if not group or not followers:
            return store
        first = store.waits.waiter(followers[0])
        assert first
        if outcome == "succeeded" or (outcome == "failed" and first.kind == "coalesce"):
            for follower in followers:
                waiter = store.waits.waiter(follower)
                assert waiter
                store = store._replace(waits=store.waits.unfollow(follower).put(waiter._replace(leader=leader)))
                store = self.hand_out(store, calls, waiter)
            return store
        return self.lead(store, first, group)

    def lead(self, store: Store, waiter: Waiter, group: int) -> Store:
        """One of those who wait for the outcome of a group becomes the next to run, for the others too."""
        waits = store.waits.unfollow(waiter.trigger).put(waiter._replace(group=group))
        waits = waits._replace(line=(waiter.trigger, *waits.line))
        if waiter.kind == "coalesce" and waits.gathers == NONE:
            waits = waits._replace(gathers=waiter.trigger)
        return store._replace(waits=waits)

    def is_left_alone(self, store: Store, group: int) -> bool:
        return not store.waits.line and not any(line.is_live and line.group == group for line in store.lease)

    # waiting.lua

    def call_next(self, store: Store, calls: list[Call], ahead: int) -> Store:
        waits = store.waits
        if not waits.line:
            if not waits.parked:
                waits = waits._replace(is_attended=False, pace=waits.pace and "goes")
                return store if waits == store.waits else store._replace(waits=waits)
            return store
        if not (waits.knows_hold and self.rules.is_short) or waits.no_slot:
            ahead = 0
        free = max(self.rules.limit - sum(line.is_live for line in store.lease), 0)
        lingers = waits.lingers if waits.is_lingering else NONE
        if lingers in waits.line and self.kept(store, waits.line[: waits.line.index(lingers)]) < free:
            waits = waits._replace(has_baton=True)
        store = store._replace(waits=waits._replace(is_attended=True))
        valid = sum(is_reserved for _, is_reserved in waits.called)
        wanted = self.wanted(waits, free + ahead - valid)
        for waiter in wanted:
            valid += 1
            store = self.reserve(store, waiter.trigger)
            if waits.is_called(waiter.trigger):
                store = store._replace(waits=store.waits.put(waiter._replace(again=True)))
            if valid > free:
                store = store._replace(waits=store.waits._replace(lingers=waiter.trigger, is_lingering=True))
                store = self.hand_out(store, calls, waiter, is_ahead=True)
            elif waiter.trigger != lingers:
                store = self.hand_out(store, calls, waiter)
        return store

    def wanted(self, waits: Waits, want: int) -> list[Waiter]:
        """So many of those in line: first those who were called and have not come, then those who were not called."""
        in_line = [waits.waiter(trigger) for trigger in waits.line]
        waiters = [waiter for waiter in in_line if waiter]
        late = [w for w in waiters if waits.is_called(w.trigger) and not waits.is_reserved(w.trigger) and self.call_again(w)]
        uncalled = [waiter for waiter in waiters if not waits.is_called(waiter.trigger)]
        return [*late, *uncalled][: max(want, 0)]

    # parking.lua

    def leave_line(self, store: Store, ask: Asked, ending: str = "", group: int = NO_GROUP) -> Store:
        """It waits no longer: who is behind it may be next; who follows it goes on to, when it has ended."""
        waiter = store.waits.waiter(ask.trigger)
        is_waited_for = bool(store.waits.parked)
        if waiter:
            store = store._replace(waits=store.waits.forget(ask.trigger))
            if waiter.group and not ending:
                store = store.change(ask.trigger, group=waiter.group)
        if not is_waited_for:
            return store
        if ending:
            store = self.end_group(store, ask.calls, waiter.group if waiter and waiter.group else group, ask.trigger, ending)
        return self.call_next(store, ask.calls, 0)

    def step_aside(self, store: Store, ask: Asked) -> Store:
        """It waits no longer, and a sweeper calls those who are next."""
        waiter = store.waits.waiter(ask.trigger)
        if waiter is None:
            return store
        if waiter.group:
            store = store.change(ask.trigger, group=waiter.group)
        return store._replace(waits=store.waits.forget(ask.trigger)._replace(is_attended=True))

    def leave_message(self, store: Store, trigger: int) -> Store:
        if store.records[trigger].message == NONE:
            return store
        return store.change(trigger, message=NONE).set_due(trigger, is_due=False)

    def put_by(self, store: Store, ask: Asked, group: int = NO_GROUP) -> Store:
        """Put the trigger's message into the store's custody."""
        message, old = ask.message, store.waits.waiter(ask.trigger)
        store = store.change(ask.trigger, generation=message.generation, copy=message.copy, is_parked=True)
        store = self.leave_message(store, ask.trigger)
        kind = ask.before.kind if ask.before else ask.on_held
        group = group or (old.group if old else NO_GROUP)
        waiter = Waiter(ask.trigger, message.copy, message.generation, ask.process.owner, kind, group)
        store = store._replace(waits=store.waits.put(waiter)._replace(pace="lasts"))
        return self.look_later(store, ask.trigger)

    def group_of(self, store: Store, trigger: int) -> tuple[Store, int]:
        """The group of those who get the outcome of a waiting trigger."""
        waiter = store.waits.waiter(trigger)
        assert waiter
        if waiter.group:
            return store, waiter.group
        group = store.waits.groups + 1
        return store._replace(waits=store.waits.put(waiter._replace(group=group))._replace(groups=group)), group

    def follow_group(self, store: Store, ask: Asked, group: int) -> tuple[Store, Reply]:
        store = self.put_by(store, ask)
        return self.parked_reply(store._replace(waits=store.waits.follow(ask.trigger, group)), ask, "group")

    def parked_reply(self, store: Store, ask: Asked, how: str) -> tuple[Store, Reply]:
        return self.call_next(store, ask.calls, 0), ("parked", how)

    def park(self, store: Store, ask: Asked, *, has_died: bool) -> tuple[Store, Reply]:
        """Wait in line, or in the slot where that is worth it: only one does, and never somebody with others before it.

        One of which a run has died had its turn, and is in front.
        """
        trigger = ask.trigger
        is_called = ask.before is not None and store.waits.is_called(trigger)
        store = self.put_by(store, ask)
        waits = store.waits
        if trigger not in waits.line:
            waits = waits._replace(line=(trigger, *waits.line) if has_died else (*waits.line, trigger))
        other = waits.lingers if waits.is_lingering else NONE
        if other == trigger and self.is_given_back(store):
            waits = waits._replace(has_baton=True)
        may_linger = waits.knows_hold and self.rules.is_short and (is_called or waits.line[0] == trigger)
        if ask.may_linger and may_linger and other in (NONE, trigger):
            waits = waits._replace(has_baton=waits.has_baton and other != NONE, lingers=trigger, is_lingering=True)
            return self.call_next(store._replace(waits=waits.call(trigger)), ask.calls, 0), ("linger",)
        if is_called and may_linger and not ask.may_linger:
            waits = waits._replace(no_slot=True)
        waits = waits.uncall(trigger)
        if other == trigger:
            waits = waits.linger_no_more()
        is_again = ask.before is not None and ask.before.copy == ask.message.copy and ask.before.by != ask.process.owner
        return self.parked_reply(store._replace(waits=waits), ask, "again" if is_again else "line")

    def gather(self, store: Store, ask: Asked) -> tuple[Store, Reply | None]:
        """Take the place of the waiting trigger into which others are coalesced, or follow it."""
        current, trigger = store.waits.gathers, ask.trigger
        if current not in store.waits.line:
            return store, None
        store, group = self.group_of(store, current)
        if self.rules.policies[trigger] == "coalesce first":
            return self.follow_group(store, ask, group)
        place, is_reserved = store.waits.line.index(current), dict(store.waits.called).get(current)
        waiter = store.waits.waiter(current)
        assert waiter
        waits = store.waits.leave_line(current).follow(current, group).put(waiter._replace(group=NO_GROUP))
        store = store._replace(waits=waits.linger_no_more() if waits.lingers == current else waits)
        store = self.put_by(store, ask, group)
        line = store.waits.line
        waits = store.waits._replace(line=(*line[:place], trigger, *line[place:]), gathers=trigger)
        if is_reserved is not None:
            waits = waits.call(trigger, is_reserved=is_reserved)
        return store._replace(waits=waits), None

    def wait_for(self, store: Store, ask: Asked, *, has_died: bool) -> tuple[Store, Reply]:
        """Wait as the policy says, when a place is free."""
        trigger, waits = ask.trigger, store.waits
        if ask.before and waits.follows(trigger):
            return self.parked_reply(store, ask, "group" if ask.before.by == ask.process.owner else "again")
        if ask.on_held == "join":
            digest = self.rules.digest(trigger)
            for line in store.lease:
                if line.is_live and line.group and self.rules.digest(line.trigger) == digest:
                    return self.follow_group(store, ask, line.group)
            twin = dict(waits.joins).get(digest, NONE)
            if twin in waits.line:
                return self.follow_group(*self._with_group_of(store, ask, twin))
            joins = tuple(sorted({**dict(waits.joins), digest: trigger}.items()))
            store = store._replace(waits=waits._replace(joins=joins))
        elif ask.on_held == "coalesce" and waits.waiter(trigger) is None:
            store = store._replace(waits=waits._replace(gathers=trigger))
        return self.park(store, ask, has_died=has_died)

    def _with_group_of(self, store: Store, ask: Asked, trigger: int) -> tuple[Store, Asked, int]:
        store, group = self.group_of(store, trigger)
        return store, ask, group
