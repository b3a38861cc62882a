"""The verdict: what the evidence outside says, beside what the guarantees allow. Nothing here touches a process or a server."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torture_faults import Struck

#: Before the first fault.
CALM = "none yet"
#: Faults that make a recovery under way take longer than promised, and for how many seconds after their end.
_IN_THE_WAY = {
    "kill worker": 0.0,
    "warm shutdown": 0.0,
    "broker cut": 2.0,
    "short stall": 2.0,
    "long stall": 4.0,
    "store restart": 4.0,
    "empty restart": 4.0,
    "flushall": 0.0,
}
#: Recoveries of which the median says something: when a pool notices is anywhere within some seconds.
_MEDIAN_OF = 20
#: Faults during which nothing can be recorded.
_AWAY = {"short stall", "long stall", "store restart", "empty restart"}
#: Last words of a worker on a trigger whose message is with the broker.
_SENT = (" retry: Retry in ", " published again", " ignored")
_FINAL = {"SUCCESS", "FAILURE", "REVOKED"}
_STATES = {
    "succeeded": "SUCCESS",
    "skipped": "SUCCESS",
    "failed": "FAILURE",
    "dead-lettered": "FAILURE",
    "timed out waiting": "FAILURE",
    "rejected": "FAILURE",
    "revoked": "REVOKED",
}
#: Seconds that processes of a busy machine may take for what is done at once.
_SLACK = 0.75
#: Seconds from publication to a body, for half of the triggers, above which the machine does not follow.
_BEHIND = 0.75


@dataclass(frozen=True)
class Expected:
    """A trigger that was published, and must have an outcome."""

    id: str
    kind: str
    at: float
    execution: str


@dataclass
class Run:
    """One body."""

    run: str
    id: str
    lock: str
    key: str
    execution: str
    kind: str
    token: int
    pid: int
    begin: float
    end: float | None = None
    error: str = ""
    effect: float | None = None
    deaf: float | None = None
    #: When its process was killed with it, by a fault.
    died: float | None = None
    last_sign: float = 0.0
    #: Its outcome was taken by the store, then.
    recorded: float | None = None
    outcome: str = ""
    #: From when until when Celery had still to send what follows.
    linger: float | None = None
    lingered: float | None = None

    @property
    def until(self) -> float:
        return self.end or self.died or self.last_sign

    @property
    def unit(self) -> tuple[str, str]:
        """What must not happen twice."""
        return self.lock, self.execution


@dataclass
class Line:
    """The numbers of one class of faults."""

    faults: int = 0
    triggers: int = 0
    outcomes: int = 0
    lost: int = 0
    lost_by_broker: int = 0
    overlaps: int = 0
    overlaps_allowed: int = 0
    stale_refused: int = 0
    stale_accepted: int = 0
    second_effects: int = 0
    second_allowed: int = 0
    reruns: int = 0
    deaths: int = 0
    recoveries: list[float] = field(default_factory=list)
    #: Those that took longer than promised, and something else was in the way.
    disturbed: list[float] = field(default_factory=list)
    late: int = 0


@dataclass
class Verdict:
    lines: dict[str, Line]
    checks: list[tuple[str, str, str, bool]]
    #: What is against the guarantees, in words: for whoever has to find out why.
    violations: list[str]
    kinds: Counter[str]
    excuses: Counter[str]
    #: Each recovery: what it was from, how long it took, of what, and whether something else was in the way.
    recoveries: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not self.violations and all(is_good for *_, is_good in self.checks)


def promised(kind: str, ttl: float) -> tuple[float, float] | None:
    """Seconds within which half of the triggers that a fault has hit run again, and all of them; None where none are said."""
    return {
        "kill child": (2.0, 6.0),
        "kill worker": (ttl + 2, ttl + 2 + _SLACK),
        "stop child": (ttl + 2, ttl + 2 + _SLACK),
    }.get(kind)


class Judge:
    """Reads the evidence once.

    `states` are Celery's, `records` the store's, both by task id; `logs` those of all workers; `wall` is the wall clock's time
    when the monotonic clock was at 0.
    """

    def __init__(
        self,
        rows: Iterable[dict[str, Any]],
        expected: Iterable[Expected],
        struck: Iterable[Struck],
        states: dict[str, tuple[str, Any]],
        records: dict[str, dict[str, str]],
        *,
        ttl: float,
        logs: str = "",
        wall: float = 0.0,
    ) -> None:
        self.rows = sorted(rows, key=lambda row: row["at"])
        self.expected = {each.id: each for each in expected}
        self.struck = sorted(struck, key=lambda each: each.at)
        self.states, self.records, self.ttl, self.logs = states, records, ttl, logs
        self.wall = wall
        self.lines: dict[str, Line] = defaultdict(Line)
        self.violations: list[str] = []
        self.excuses: Counter[str] = Counter()
        self.told_recoveries: list[str] = []
        #: Workers that were killed with a message that no one else had.
        self._took_along: list[Struck] = []
        self.start = min([row["at"] for row in self.rows] + [each.at for each in self.expected.values()], default=0.0)
        self.runs = self._runs()
        #: When a trigger first began or ended.
        self.first_seen: dict[str, float] = {}
        for row in self.rows:
            if row["what"] in ("begin", "ended"):
                self.first_seen.setdefault(row["id"], row["at"])
        self.by_unit: dict[tuple[str, str], list[Run]] = defaultdict(list)
        for run in self.runs.values():
            self.by_unit[run.unit].append(run)

    def verdict(self, checks: Iterable[tuple[str, str, str, bool]] = ()) -> Verdict:
        for struck in self.struck:
            self.lines[struck.kind].faults += 1
            if struck.note.startswith("Traceback"):
                self._violated("", f"the fault {struck.kind!r} could not be made", struck.note)
        self._triggers()
        self._overlaps()
        self._tokens()
        self._effects()
        self._cut_endings()
        self._outcomes()
        self._recoveries()
        kinds = Counter(each.kind for each in self.expected.values())
        return Verdict(dict(self.lines), list(checks), self.violations, kinds, self.excuses, self.told_recoveries)

    # What happened.

    def _runs(self) -> dict[str, Run]:  # noqa: C901, one kind of row after the other
        runs: dict[str, Run] = {}
        for row in self.rows:
            if row["what"] == "begin":
                names = ("run", "id", "lock", "key", "execution", "kind", "token", "pid")
                runs[row["run"]] = Run(**{name: row[name] for name in names}, begin=row["at"], last_sign=row["at"])
            run = runs.get(row.get("run", ""))
            if run is None:
                continue
            run.last_sign = max(run.last_sign, row["at"])
            if row["what"] == "end":
                run.end, run.error = row["at"], row["error"]
            elif row["what"] in ("effect", "deaf", "linger", "lingered"):
                setattr(run, row["what"], row["at"])
            elif row["what"] == "ended" and row["ran"]:
                run.recorded, run.outcome = row["at"], row["outcome"]
        for struck in self.struck:
            for pid, at in struck.killed.items():
                for run in runs.values():
                    if run.pid == pid and run.begin <= at and run.end is None and run.died is None:
                        run.died = at
        return runs

    def class_at(self, at: float) -> str:
        """The class of the fault that had happened last."""
        kind = CALM
        for struck in self.struck:
            if struck.at > at:
                break
            kind = struck.kind
        return kind

    def _forgot(self, since: float, until: float) -> bool:
        return any(each.forgot is not None and since <= each.forgot <= until for each in self.struck)

    def _stood_still(self, run: Run, since: float, until: float) -> tuple[float, float] | None:
        """When the process of the run stood still in that time."""
        found = [each.stopped[run.pid] for each in self.struck if run.pid in each.stopped]
        return next(((a, b) for a, b in found if a <= until and b >= since), None)

    def _violated(self, kind: str, what: str, *facts: Any) -> None:
        self.violations.append(": ".join([f"[{kind}] {what}" if kind else what, *map(str, facts)]))

    def _told(self, run: Run) -> str:
        def at(moment: float | None) -> str:
            return "-" if moment is None else f"{moment - self.start:.3f}"

        return (
            f"run {run.run} of {run.kind} {run.id} key {run.key} token {run.token} pid {run.pid}: begin {at(run.begin)} effect "
            f"{at(run.effect)} deaf {at(run.deaf)} end {at(run.end)} {run.error} died {at(run.died)} recorded "
            f"{at(run.recorded)} {run.outcome}"
        )

    # Judgement.

    def _triggers(self) -> None:
        for each in sorted(self.expected.values(), key=lambda each: each.at):
            kind = self.class_at(each.at)
            line = self.lines[kind]
            line.triggers += 1
            state = self.states.get(each.id, ("PENDING", None))[0]
            if state in _FINAL:
                line.outcomes += 1
            elif state == "RETRY" and self._is_overwritten(each):
                line.outcomes += 1
                self.excuses[f"Celery wrote RETRY after the outcome of the retry ({each.id})"] += 1
            elif self._is_lost_by_broker(each):
                line.lost_by_broker += 1
                self.excuses[f"lost by the broker, on its way to a worker that was killed ({each.id})"] += 1
            else:
                line.lost += 1
                told = [self._told(run) for run in self.runs.values() if run.id == each.id]
                known = {name: value[:200] for name, value in self.records.get(each.id, {}).items() if name != "message"}
                self._violated(kind, f"lost, {state}", each, f"published at {each.at - self.start:.3f}", known, *told)

    def _is_overwritten(self, each: Expected) -> bool:
        """Whether the retry was done before Celery had written that there is one: a race of Celery's own."""
        runs = sorted((run for run in self.runs.values() if run.id == each.id), key=lambda run: run.begin)
        return any(
            before.error == "OSError" and after.recorded is not None and after.recorded - before.until < _SLACK
            for before, after in pairwise(runs)
        )

    def _is_lost_by_broker(self, each: Expected) -> bool:
        """Whether its message went with a worker that was killed, on its way from the broker.

        kombu's BRPOP takes a message off its list before it is noted as delivered, so a worker that is killed in between takes
        along one at most. It may be the first message of the trigger, or one with which it was to retry or had to wait.
        """
        sent, said = self._last_word(each)
        if said and not any(words in said for words in _SENT):
            return False
        for struck in self.struck:
            # A tail is published some time after its head.
            is_near = sent - _SLACK < struck.at < sent + (inf if each.kind == "tail" and not said else 10.0)
            if struck.kind == "kill worker" and struck.killed and is_near and struck not in self._took_along:
                self._took_along.append(struck)
                return True
        return False

    def _last_word(self, each: Expected) -> tuple[float, str]:
        """What a worker said last of the trigger, and when; else when it was published."""
        lines = [line for line in self.logs.splitlines() if f"[{each.id}]" in line or f"{each.id} of " in line]
        if not lines:
            return each.at, ""
        last = max(lines, key=lambda line: line[1:24])
        return datetime.strptime(last[1:24], "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp() - self.wall, last

    def _overlaps(self) -> None:
        """Bodies that begin while as many as may hold the key, or the execution, are at it."""
        groups: dict[tuple[str, ...], list[Run]] = defaultdict(list)
        for run in self.runs.values():
            groups[("key", run.lock, run.key)].append(run)
            groups[("execution", *run.unit)].append(run)
        for (what, *_), runs in groups.items():
            limit = 2 if what == "key" and runs[0].kind == "limited" else 1
            runs.sort(key=lambda run: run.begin)
            for n, run in enumerate(runs):
                there = [other for other in runs[:n] if other.until > run.begin]
                if len(there) < limit:
                    continue
                line = self.lines[self.class_at(run.begin)]
                excuses = [self._excuse(other, run) for other in there]
                if excuses.count("") >= limit:
                    line.overlaps += 1
                    facts = [self._told(other) for other, excuse in zip(there, excuses, strict=True) if not excuse]
                    self._violated(self.class_at(run.begin), f"overlap of one {what}", self._told(run), "beside", *facts)
                elif what == "key":
                    line.overlaps_allowed += 1
                    self.excuses.update({f"overlap with one that {excuse}" for excuse in excuses if excuse})

    def _excuse(self, former: Run, latter: Run) -> str:
        """Why the former may still have been at it when the latter began; "" for no reason."""
        still = self._stood_still(former, former.begin - _SLACK, latter.begin)
        if still and (former.until <= still[1] + _SLACK or former.deaf):
            return "stood still"
        late = self._stood_still(latter, latter.begin - 4 * self.ttl, latter.begin)
        if late and late[1] >= latter.begin - _SLACK:
            return "stood still before its body"
        if former.deaf and former.deaf <= latter.begin + _SLACK:
            return "was told that its lease is lost, and went on"
        # One more renewal finds that the lease is gone.
        if self._forgot(former.begin - _SLACK, latter.begin) and (
            former.deaf or not self._outlived_oblivion(former, latter.begin)
        ):
            return "the store had forgotten"
        return ""

    def _outlived_oblivion(self, run: Run, at: float) -> bool:
        last = max(
            each.until if each.kind == "empty restart" else each.forgot
            for each in self.struck
            if each.forgot is not None and each.forgot <= at
        )
        return run.until > last + self.ttl + _SLACK

    def _tokens(self) -> None:
        highest: dict[str, tuple[int, str]] = {}
        for row in self.rows:
            if row["what"] == "begin":
                place = f"{row['lock']}/{row['key']}"
                highest[place] = max(highest.get(place, (0, "")), (row["token"], row["run"]))
            elif row["what"] == "offer":
                kind = self.class_at(row["at"])
                run, (top, by) = self.runs[row["run"]], highest[row["key"]]
                if row["taken"] and row["token"] < top:
                    self.lines[kind].stale_accepted += 1
                    self._violated(kind, "stale write accepted", self._told(run), "after", self._told(self.runs[by]))
                elif not row["taken"]:
                    self.lines[kind].stale_refused += 1
                    is_fresh = row["when"] == "begin" and not self._stood_still(run, run.begin - 4 * self.ttl, run.begin)
                    if is_fresh:
                        self._violated(kind, f"a token is not greater than {row['highest']}", self._told(run))

    def _cut_endings(self) -> None:
        """Of those that died between their record and Celery's result: each must have been answered from the record."""
        for run in self.runs.values():
            if run.linger and not run.lingered and any(run.pid in each.killed for each in self.struck):
                self.excuses["killed between its record and Celery's result, and what follows came all the same"] += 1

    def _effects(self) -> None:
        for unit, runs in self.by_unit.items():
            runs.sort(key=lambda run: run.begin)
            recorded = [run for run in runs if run.recorded is not None and run.outcome == "succeeded"]
            for run in runs:
                for other in recorded:
                    if other is not run and run.effect and run.effect > other.recorded:
                        self._second(unit, run, other)
            for before, after in pairwise(runs):
                self._rerun(before, after)
            for run in runs:
                if run.effect and run.recorded is None and self._cause(run):
                    self.lines[self._class_of(run)].deaths += 1

    def _second(self, unit: tuple[str, str], run: Run, recorded: Run) -> None:
        kind = self.class_at(run.effect or run.begin)
        was_passed = run.begin < recorded.begin and self._excuse(run, recorded) == "the store had forgotten"
        if was_passed or self._forgot(recorded.begin, run.begin):
            excuse = "the store had forgotten"
        elif run.begin < recorded.recorded and self._stood_still(run, run.begin - self.ttl, run.effect):
            excuse = "stood still"
        elif run.begin < recorded.recorded and run.deaf:
            excuse = "was told that its lease is lost, and went on"
        else:
            self.lines[kind].second_effects += 1
            self._violated(
                kind, f"second effect of {unit} after a durable record", self._told(run), "after", self._told(recorded)
            )
            return
        self.lines[kind].second_allowed += 1
        self.excuses[f"second effect: {excuse}"] += 1

    def _rerun(self, before: Run, after: Run) -> None:
        """Of a run that had its effect and no record, another one only because of a death."""
        if not before.effect or (before.recorded is not None and before.recorded < after.begin):
            return
        kind = self._class_of(before)
        self.lines[kind].reruns += 1
        is_forgotten = self._forgot(before.begin - _SLACK, after.begin)
        if not self._cause(before) and not is_forgotten:
            self._violated(kind, "a second run without a death", self._told(before), "then", self._told(after))
        elif not self._cause(before):
            self.lines[kind].deaths += 1

    def _cause(self, run: Run) -> bool:
        """Whether a run that had its effect had a reason not to be recorded."""
        return bool(
            run.died
            or run.error
            or run.deaf
            or (run.end is None and run.kind == "overrun")
            or self._stood_still(run, run.begin - _SLACK, run.until + _SLACK)
            or self._died_just_after(run)
            or self._store_was_away(run)
        )

    def _store_was_away(self, run: Run) -> bool:
        """Whether its outcome came so late to the store that another run may have come before it."""
        return any(each.kind in _AWAY and each.at <= run.until + _SLACK <= each.until + 2 * _SLACK for each in self.struck)

    def _died_just_after(self, run: Run) -> bool:
        """Whether its process was killed between the end of its body and the store's word that this is recorded.

        While nothing gets through to the store and back it waits for that word; what it has said may be recorded all the same.
        """
        latest = run.until + 2 * self.ttl
        for each in self.struck:
            if each.kind in _AWAY and each.until >= run.until and each.at <= latest:
                latest += each.until - max(each.at, run.until)
        # The pool of a main process that was killed is ended by the kernel, a moment later.
        return any(run.pid in each.killed and run.until - _SLACK <= each.killed[run.pid] <= latest for each in self.struck)

    def _class_of(self, run: Run) -> str:
        for struck in self.struck:
            if run.died is not None and struck.killed.get(run.pid) == run.died:
                return struck.kind
            still = struck.stopped.get(run.pid)
            if still and still[0] <= run.until and still[1] >= run.begin:
                return struck.kind
        return self.class_at(run.until)

    def _outcomes(self) -> None:  # noqa: C901, one rule after the other
        """Each trigger has one outcome, the same for Celery and the store, and the value of the run that counts."""
        ended: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in self.rows:
            if row["what"] == "ended":
                ended[row["id"]].append(row)
        for each in self.expected.values():
            state, value = self.states.get(each.id, ("PENDING", None))
            if state not in _FINAL:
                continue
            kind = self.class_at(each.at)
            ran = [row for row in ended[each.id] if row["ran"]]
            for first, second in pairwise(ran):
                if not self._forgot(first["at"] - self.ttl, second["at"]):
                    self._violated(kind, "two outcomes of runs", each, first, second)
            for run in (run for run in self.runs.values() if run.id == each.id):
                if any(row["at"] < run.begin and not self._forgot(row["at"] - self.ttl, run.begin) for row in ran):
                    self._violated(kind, "a run after the outcome", each, self._told(run))
            record = self.records.get(each.id, {})
            outcome = record.get("outcome")
            if outcome is None:
                if not self._forgot(each.at, inf):
                    self._violated(kind, f"Celery says {state}, and the store has no outcome", each, record)
            elif _STATES[outcome] != state:
                self._violated(kind, f"Celery says {state}, the store {outcome}", each, value, record.get("reason"))
            if state == "SUCCESS" and value != "skipped":
                self._value(each, kind, str(value))

    def _value(self, each: Expected, kind: str, value: str) -> None:
        run = self.runs.get(value)
        if run is None or run.execution != each.execution:
            self._violated(kind, "a result that no run of it has returned", each, value)
        elif run.recorded is None and not self._died_just_after(run) and not self._forgot(run.begin, inf):
            self._violated(kind, "the result of a run that does not count", each, self._told(run))

    def _recoveries(self) -> None:
        begins: dict[tuple[str, str], list[float]] = defaultdict(list)
        for run in self.runs.values():
            begins[run.unit].append(run.begin)
            if run.recorded:
                begins[run.unit].append(run.recorded)
        for struck in self.struck:
            for run, since in self._hit(struck):
                again = min((at for at in begins[run.unit] if at > since), default=None)
                is_overtaken = any(run.begin < at <= since for at in begins[run.unit])
                if again is None or is_overtaken:
                    continue  # it has another outcome or run already, or it is lost, which is said elsewhere
                line = self.lines[struck.kind]
                limits = promised(struck.kind, self.ttl)
                is_late = limits is not None and again - since > limits[1]
                is_disturbed = is_late and self._is_disturbed(struck, run, since, again)
                (line.disturbed if is_disturbed else line.recoveries).append(again - since)
                told = f"{struck.kind} at {struck.at - self.start:.2f}, {since - self.start:.2f} + {again - since:.2f} s"
                self.told_recoveries.append(f"{told}{', disturbed' if is_disturbed else ''}: {self._told(run)}")
                if is_late and not is_disturbed:
                    line.late += 1
                    self._violated(struck.kind, f"ran again only after {again - since:.2f} s", self._told(run))
        for kind, line in self.lines.items():
            limits = promised(kind, self.ttl)
            if limits and len(line.recoveries) >= _MEDIAN_OF and percentile(line.recoveries, 0.5) > limits[0]:
                self._violated(kind, f"recovery p50 {percentile(line.recoveries, 0.5):.2f} s", f"{limits[0]:.2f} s allowed")

    def _hit(self, struck: Struck) -> Iterable[tuple[Run, float]]:
        """Runs that the fault has ended, and since when another one could be waited for."""
        for run in self.runs.values():
            if run.kind == "overrun":
                continue  # it may have its outcome from the main process, which writes no rows
            if run.died is not None and struck.killed.get(run.pid) == run.died:
                yield run, run.died
            elif run.pid in struck.stopped:
                since, until = struck.stopped[run.pid]
                if run.begin <= since <= run.until and run.until >= until and since + self.ttl < until:
                    yield run, since
            elif struck.killed or struck.stopped or run.error != "LeaseLost" or self._class_of(run) != struck.kind:
                continue
            elif struck.at <= run.until <= struck.until + self.ttl:
                yield run, max(run.until, struck.until)

    def _is_disturbed(self, struck: Struck, run: Run, since: float, again: float) -> bool:
        """Whether something else was in the way: another fault, or somebody who held the key."""
        for other in self.struck:
            after = _IN_THE_WAY.get(other.kind)
            if other is not struck and after is not None and other.at <= again and other.until + after >= since:
                return True
        is_held = any(
            other is not run and (other.lock, other.key) == (run.lock, run.key) and since < other.until and other.begin < again
            for other in self.runs.values()
        )
        return is_held or self._are_behind(since, again)

    def _are_behind(self, since: float, until: float) -> bool:
        """Whether messages stood in a queue then: what is published anew has to stand in it too."""
        waits = [self.first_seen.get(each.id, inf) - each.at for each in self.expected.values() if since <= each.at <= until]
        return bool(waits) and percentile(waits, 0.5) > _BEHIND


def percentile(values: list[float], part: float) -> float:
    """The value that this part of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]
