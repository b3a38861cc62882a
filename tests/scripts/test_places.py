"""`enter`, when it tells a trigger that waits with the broker its place in the line."""

from __future__ import annotations

from itertools import pairwise

import pytest
from desk import OTHER_LOCK

from celery_singleflight.claims import Acquired, Encoded, Ended, Held, Linger, Outcome, Waits

#: Seconds within which a script answers, at worst, on a busy machine.
SLACK = 5.0


class Line:
    """Triggers that wait for one lock key, each of which keeps its ticket as its message does."""

    def __init__(self, desk, **how):
        self.desk, self.how, self.tickets = desk, {"ttl": 300.0, **how}, {}

    def look(self, name, **how):
        answer = self.desk.store.enter(self.claim(name, **how))
        if isinstance(answer, Held):
            self.tickets[name] = answer.ticket
        return answer

    def claim(self, name, **how):
        return self.desk.claim(name, ticket=self.tickets.get(name, ""), **{**self.how, **how})

    def place(self, name):
        return self.look(name).place

    def hold(self, name="holder", since=0.0):
        """Let somebody hold the lock key since so many seconds."""
        claim = self.desk.claim(name, **self.how)
        token = self.desk.acquire(claim).token
        if since:
            self.begin(claim, since)
        return claim, token

    def begin(self, claim, since):
        """Let all that run have begun so many seconds ago."""
        lease, at = self.desk.lease_name(claim), self.desk.keyspace.now_ms() - since * 1000
        for owner, line in self.desk.client.hgetall(lease).items():
            ends, _, rest = line.split("\n", 2)
            self.desk.client.hset(lease, owner, f"{ends}\n{at:.0f}\n{rest}")

    def release(self, held):
        self.desk.abandon(held[0])

    def enter(self, name):
        """Let one that waits have the lock key, which is free, and give it back."""
        claim = self.claim(name)
        self.desk.acquire(claim)
        self.desk.abandon(claim)

    def knows(self, **facts):
        self.desk.client.hset(self.desk.pace_name(self.desk.claim("x", **self.how)), mapping=facts)

    def pace(self):
        return self.desk.client.hgetall(self.desk.pace_name(self.desk.claim("x", **self.how)))


@pytest.fixture
def line(desk):
    return Line(desk)


@pytest.fixture
def _parked(desk):
    """Take those away who are parked: a store keeps them for as long as they wait."""
    yield
    desk.keyspace.clear()


def test_each_that_waits_gets_the_next_place_and_keeps_it(line):
    line.hold()
    assert [line.place(name) for name in "abc"] == [1, 2, 3]
    assert [line.place(name) for name in "cab"] == [3, 1, 2]
    assert line.place("d") == 4


def test_one_that_has_died_comes_back_in_front_and_a_retry_behind(line, desk):
    """Its turn had come before theirs."""
    dead = line.hold("dead")[0]
    for name in "abc":
        line.look(name)
    desk.expire(dead)
    line.hold("next")
    assert line.place("dead") == 1
    assert [line.place(name) for name in "abc"] == [1, 2, 3]
    assert desk.enter(desk.claim("dead", **line.how, generation=1)).place == 4


def test_who_enters_lets_those_behind_move_up(line):
    held = line.hold()
    for name in "abcd":
        line.look(name)
    line.release(held)
    line.enter("a")
    line.hold("again")
    assert [line.place(name) for name in "bcd"] == [1, 2, 3]


def test_a_newcomer_that_finds_the_key_free_moves_nobody(line):
    held = line.hold()
    for name in "ab":
        line.look(name)
    line.release(held)
    line.hold("newcomer")
    assert [line.place(name) for name in "ab"] == [1, 2]


def test_who_has_waited_long_enough_lets_those_behind_move_up(line):
    line.hold()
    for name in "abc":
        line.look(name)
    assert line.look("a", wait=1.0, first_ms="1").outcome is Outcome.TIMED_OUT
    assert [line.place(name) for name in "bc"] == [1, 2]


def test_those_who_never_come_back_hold_up_nobody_for_long(line):
    """Revoked, expired or lost: fifty numbers that stay out. The last hundred enter one after the other."""
    held = line.hold()
    names = [f"w{n}" for n in range(150)]
    for name in names:
        line.look(name)
    line.release(held)
    places = []
    for name in names[50:]:
        line.enter(name)
        held = line.hold(f"after {name}")
        places.append(line.look(names[-1]).place - (150 - int(name[1:]) - 1))
        line.release(held)
        if name == names[-2]:
            break
    assert places[0] > 40
    assert places[60] < 5


def test_when_the_last_of_a_line_has_entered_the_next_line_begins_at_its_first_place(line):
    held = line.hold()
    for name in "abcd":
        line.look(name)
    line.release(held)
    line.enter("d")
    line.hold("again")
    assert line.place("e") == 1


def test_places_of_another_lock_key_are_others(line, desk):
    line.hold()
    line.look("a")
    other = Line(desk, lock_key=OTHER_LOCK)
    other.hold("other")
    assert other.place("b") == 1


@pytest.mark.parametrize("loss", ["forgotten", "begun anew"])
def test_a_ticket_of_a_line_that_the_store_has_forgotten_gives_a_new_place(line, desk, loss):
    line.hold()
    for name in "abcdefgh":
        line.look(name)
    old = dict(line.tickets)
    desk.client.delete(desk.pace_name(desk.claim("x")))
    if loss == "begun anew":
        assert line.place("z") == 1
    first = 2 if loss == "begun anew" else 1
    assert line.place("h") == first
    assert line.place("a") == first + 1
    assert line.tickets["h"].split(":")[0] != old["h"].split(":")[0]


def test_who_enters_with_a_ticket_of_another_line_moves_nobody(line, desk):
    held = line.hold()
    for name in "abc":
        line.look(name)
    desk.client.delete(desk.pace_name(desk.claim("x")))
    assert line.place("z") == 1
    line.release(held)
    line.enter("c")
    assert float(line.pace()["head"]) == 0.0
    desk.client.delete(desk.pace_name(desk.claim("x")))
    line.enter("b")
    assert line.pace() == {}


@pytest.mark.parametrize("ticket", ["nonsense", "1:2", "a:b:c:d:e", "1:2:3:4:5\n"])
def test_a_ticket_that_means_nothing_does_no_harm(line, ticket):
    held = line.hold()
    line.look("a")
    line.tickets["b"] = ticket
    assert line.place("b") == 2
    line.tickets["c"] = ticket
    line.release(held)
    line.enter("c")


def test_a_number_that_a_failover_has_taken_back_is_given_to_nobody_else(line):
    line.hold()
    for name in "abcdef":
        line.look(name)
    line.knows(issued="2")
    assert line.place("f") == 6
    assert line.place("g") == 7


def test_who_only_asks_takes_no_place(line):
    line.hold()
    assert line.look("a", on_held="ask").place == 0
    assert line.pace() == {}


@pytest.mark.parametrize("on_held", ["wait", "skip"])
def test_one_that_waits_for_its_own_run_takes_no_place_and_keeps_what_it_has(line, on_held):
    line.hold("a")
    line.tickets["a"] = "1:7:0:1:0.00"
    held = line.look("a", on_held=on_held)
    assert (held.what, held.place, held.ticket) == ("own", 0, "1:7:0:1:0.00")
    assert line.pace() == {}


def test_one_that_waits_for_an_execution_takes_no_place_until_it_meets_the_lock(line, desk):
    running = desk.claim("holder", execution_key="invoice:1", lock_key=OTHER_LOCK)
    desk.acquire(running)
    held = line.look("a", execution_key="invoice:1")
    assert (held.what, held.place) == ("execution", 0)
    desk.abandon(running, forget=True)
    line.hold("b")
    assert line.place("c") == 1
    assert line.look("a", execution_key="invoice:1").place == 2


# When it will be one's turn.


def test_the_first_comes_when_the_run_ends_and_each_other_one_hold_time_later(line):
    line.hold(since=10.0)
    line.look("a")
    line.knows(hold_ms="40000", front_ms="0")
    turns = [line.look(name).turn for name in "abcde"]
    assert turns[0] == pytest.approx(30.0, abs=SLACK)
    assert [line.look(name).hold for name in "ab"] == [40.0, 40.0]
    assert turns[1] - turns[0] == pytest.approx(40.0, abs=SLACK)
    assert turns[2] == pytest.approx(90.0, abs=SLACK)
    assert [later - turn for turn, later in pairwise(turns[2:])] == pytest.approx([40.0, 40.0], abs=SLACK)


def test_with_a_limit_of_two_turns_are_twice_as_dense(desk):
    line = Line(desk, limit=2)
    line.hold("h1")
    line.hold("h2")
    line.look("a")
    line.knows(hold_ms="40000", front_ms="0")
    turns = [line.look(name).turn for name in "abcde"]
    assert turns[4] - turns[3] == pytest.approx(20.0, abs=SLACK)
    assert turns[0] <= 20.0 + SLACK


def test_many_in_front_get_one_turn_after_the_other(line):
    """Numbers are in no strict order: more than one may think that it is next."""
    line.hold()
    for n in range(6):
        line.look(f"w{n}")
    line.knows(hold_ms="40000", head="6.00", front_ms="0")
    turns = [line.look(f"w{n}").turn for n in range(3)]
    assert turns == pytest.approx([40.0, 81.5, 123.0], abs=SLACK)


def test_a_latecomer_does_not_push_those_behind_back(line):
    held = line.hold()
    for n in range(10):
        line.look(f"w{n}")
    line.knows(head="8.00")
    line.release(held)
    line.enter("w0")
    assert line.pace()["head"] == "9.00"


def test_who_waits_alone_is_not_kept_away_by_the_turn_it_had_before(line):
    line.hold(since=990.0)
    line.look("a")
    line.knows(hold_ms="1000000", front_ms="0")
    assert [line.look("a").turn for _ in range(3)] == pytest.approx([10.0, 10.0, 10.0], abs=SLACK)


def test_a_guess_of_how_long_a_run_hangs_keeps_nobody_away_once_it_has_ended(line):
    held = line.hold(since=250.0)
    for name in "abc":
        line.look(name)
    line.knows(hold_ms="1000", front_ms="0")
    assert [line.look(name).turn > 200.0 for name in "ab"] == [True, True]
    line.release(held)
    line.hold("next", since=-60.0)
    assert line.look("a").turn < 5.0


def test_who_meets_a_run_that_takes_longer_than_those_before_waits_as_long_again(line):
    line.hold(since=20.0)
    line.look("a")
    line.knows(hold_ms="1000", front_ms="0")
    assert line.look("a").turn == pytest.approx(19.0, abs=SLACK)


def test_nobody_waits_longer_than_for_the_end_of_a_lease_that_is_not_renewed(desk):
    line = Line(desk, ttl=9.0)
    line.hold(since=60.0)
    line.look("a")
    line.knows(hold_ms="1000", front_ms="0")
    assert line.look("a").turn <= 9.1


def test_tries_count_how_often_one_looks_in_vain(line):
    held = line.hold(since=1.0)
    assert [line.look("a").tries for _ in range(4)] == [0, 1, 2, 3]
    assert line.look("b").tries == 0
    line.release(held)
    line.enter("b")
    line.hold("again", since=1.0)
    assert [line.look("a").tries for _ in range(2)] == [0, 1]


def test_who_comes_a_little_early_has_not_looked_in_vain(line):
    line.hold(since=100.0)
    line.look("a")
    line.knows(hold_ms="95000")
    assert [line.look("a").tries for _ in range(3)] == [0, 0, 0]


def test_the_line_is_only_kept_while_somebody_waits(line, desk):
    line.hold()
    name = desk.pace_name(desk.claim("x"))
    assert not desk.client.exists(name)
    line.look("a")
    assert 590_000 < desk.client.pttl(name) <= 600_000


@pytest.mark.usefixtures("_parked")
def test_what_those_need_who_are_parked_is_not_made_to_expire(line, desk):
    line.hold()
    assert line.look("p", on_held="queue", message=b"a message").how == "line"
    name = desk.pace_name(desk.claim("x"))
    assert desk.client.pttl(name) == -1
    line.look("a")
    assert desk.client.pttl(name) == -1


# Waiting in the slot.


def lingering(line, name):
    answer = line.look(name, waits=Waits(linger=0.4))
    if isinstance(answer, Linger):
        # For however long a test takes.
        line.knows(lingers_until=str(line.desk.keyspace.now_ms() + 60_000))
    return answer


@pytest.fixture
def short(line):
    """A line of three for a lock key with short runs."""
    line.held = line.hold()
    for name in "abc":
        line.look(name)
    line.knows(hold_ms="10000", front_ms="0")
    line.release(line.held)
    line.knows(hold_ms="100")
    # Begun in a minute: however long a test takes, the run has not outstayed its time.
    line.held = line.hold("next", since=-60.0)
    return line


def test_one_that_is_back_in_front_of_short_runs_may_wait_in_its_slot_and_is_the_only_one(short):
    answer = lingering(short, "a")
    assert isinstance(answer, Linger)
    assert 0.0 < answer.seconds <= 0.4
    assert isinstance(lingering(short, "b"), Held)
    assert isinstance(lingering(short, "a"), Linger)


def test_the_end_of_the_run_tells_whoever_waits_in_its_slot(short, desk):
    lingering(short, "a")
    claim, token = short.held
    assert not desk.take_baton()
    short.begin(claim, 0.1)
    desk.store.finish(desk.lease(claim, token), claim.record, Outcome.SUCCEEDED, Encoded("", "", b""), reason="[]", keep=60.0)
    asks = short.claim("a", waits=Waits(linger=0.4))
    assert isinstance(desk.store.enter_after_baton(asks, SLACK, lambda: True), Acquired)
    assert not desk.take_baton()
    short.knows(hold_ms="100")
    short.begin(desk.claim("a"), -60.0)
    assert isinstance(lingering(short, "b"), Linger)


def test_one_that_gives_up_leaves_the_slot_to_another(short):
    lingering(short, "a")
    assert isinstance(short.look("a"), Held)
    assert isinstance(lingering(short, "b"), Linger)


def test_nobody_waits_in_a_slot_for_a_long_run_nor_far_behind_nor_as_a_newcomer(short):
    assert isinstance(lingering(short, "newcomer"), Held)
    short.knows(head="0.00", issued="90")
    short.tickets["far"] = short.tickets["a"].replace(":1:", ":80:", 1)
    assert short.look("far").place == 80
    assert isinstance(lingering(short, "far"), Held)
    short.knows(hold_ms="5000")
    assert isinstance(lingering(short, "a"), Held)


@pytest.mark.usefixtures("_parked")
def test_nobody_waits_in_a_slot_behind_those_who_are_parked(short):
    assert short.look("p", on_held="queue", message=b"a message").how == "line"
    assert isinstance(lingering(short, "a"), Held)


def test_one_that_skips_takes_no_place(line):
    line.hold()
    assert isinstance(line.look("a", on_held="skip"), Ended)
    assert line.pace() == {}
