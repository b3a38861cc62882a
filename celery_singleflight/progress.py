"""What the store keeps of the steps and cursors of an execution. Every write is that of the run that owns its record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from celery_singleflight.announcements import Announcements
from celery_singleflight.claims import Encoded, Outcome
from celery_singleflight.custody import as_text, milliseconds
from celery_singleflight.errors import LeaseLost
from celery_singleflight.script import Script, load

if TYPE_CHECKING:
    from celery_singleflight.claims import Record
    from celery_singleflight.lease import Lease

__all__ = ("Begun", "Changed", "Done", "Ending", "Progress", "Step", "Uncertain", "Undo", "Writer")

_BEGIN: Final = load("begin_step")
_RECORD: Final = load("record_step")
_READ: Final = load("read_cursor")
_MOVE: Final = load("move_cursor")
_UNDO: Final = load("undo_step")
_FIND_ENDING: Final = load("find_ending")
_FORGET: Final = load("forget_steps")
_RESOLVE: Final = load("resolve")
_RESOLVE_STEP: Final = load("resolve_step")

#: Seconds for which what is done is kept at least, counted from the last step: a retry may be that far away.
_KEEP: Final = 86400.0
_NOTHING: Final = Encoded("", "", b"")


class Writer(NamedTuple):
    """The run that writes: where it is recorded, by which lease it may, for how many seconds what it has done is to be kept."""

    record: Record
    lease: Lease
    run_id: str
    worker: str
    keep: float
    #: "rerun" or "hold".
    unsure_as: str


class Step(NamedTuple):
    """A step, as a run knows it before it is begun. The mark is of one call; digest and undo are empty for none."""

    name: str
    mark: str
    digest: str = ""
    undo: str = ""


class Begun(NamedTuple):
    """Its function is to be called, for that time; it is unsure whether an earlier call has done it."""

    times: int
    is_unsure: bool


class Done(NamedTuple):
    """It is done, with this result. The note says why that could not be stored."""

    value: Encoded
    note: str


class Uncertain(NamedTuple):
    """It was begun that often, last by that worker so many seconds ago, not recorded, and is held."""

    times: int
    worker: str
    age: float


class Changed(NamedTuple):
    """It was done with another payload. `value` is where a cursor stands."""

    value: Encoded


class Ending(NamedTuple):
    """How an execution ends whose steps are being undone."""

    outcome: Outcome
    reason: str
    value: Encoded


class Undo(NamedTuple):
    """The step to be undone next: how, and its result with the note why there is none.

    An empty `undo` means that an earlier call of it was never recorded, and it is left alone.
    """

    name: str
    undo: str
    is_unsure: bool
    note: str
    value: Encoded


class Progress(Announcements):
    """The steps and cursors of executions on one server."""

    __slots__ = ()

    def begin_step(self, writer: Writer, step: Step) -> Begun | Done | Uncertain | Changed:
        """Mark a step as begun, or say what has become of it. Raises `LeaseLost` when the run has been overtaken."""
        reply = self._write(
            _BEGIN,
            writer,
            name=step.name,
            mark=step.mark,
            worker=_line(writer.worker),
            digest=step.digest,
            undo=step.undo,
            unsure_as=writer.unsure_as,
        )
        if reply.word == "begun":
            return Begun(int(reply.times), bool(reply.unsure))
        if reply.word == "done":
            return Done(_encoded(reply), reply.note.decode())
        if reply.word == "changed":
            return Changed(_NOTHING)
        return Uncertain(int(reply.times), reply.worker.decode(), reply.age_ms / 1000)

    def record_step(self, writer: Writer, step: Step, value: Encoded | None, note: str = "") -> None:
        """Record that a step is done, with its value or the note why there is none; without either that it failed.

        Raises `LeaseLost` when the run has been overtaken.
        """
        content_type, content_encoding, body = value or _NOTHING
        self._write(
            _RECORD,
            writer,
            name=step.name,
            mark=step.mark,
            worker=_line(writer.worker),
            digest=step.digest,
            undo=step.undo,
            state="failed" if value is None else "done",
            note=_line(note),
            content_type=content_type,
            content_encoding=content_encoding,
            body=as_text(body),
        )

    def read_cursor(self, writer: Writer, name: str, digest: str, *, accepts: bool = False) -> Encoded | Changed | None:
        """Return where a cursor stands; None when it was never moved. Raises `LeaseLost` when the run has been overtaken.

        `accepts` is whether the caller goes on also when it was moved with another payload.
        """
        reply = self._write(_READ, writer, name=name, digest=digest, accepts=int(accepts))
        if reply.word == "nowhere":
            return None
        return Changed(_encoded(reply)) if reply.word == "changed" else _encoded(reply)

    def move_cursor(self, writer: Writer, name: str, digest: str, value: Encoded) -> None:
        """Move a cursor. Raises `LeaseLost` when the run has been overtaken."""
        content_type, content_encoding, body = value
        self._write(
            _MOVE,
            writer,
            name=name,
            digest=digest,
            content_type=content_type,
            content_encoding=content_encoding,
            body=as_text(body),
        )

    def undo_step(
        self, writer: Writer, mark: str, ending: Ending, *, undone: str = "", failed: bool = False, note: str = ""
    ) -> Undo | None:
        """Note what became of the undo of that step, if there was one before, and return what to undo next.

        Raises `LeaseLost` when the run has been overtaken.
        """
        reply = self._write(
            _UNDO,
            writer,
            mark=mark,
            unsure_as=writer.unsure_as,
            name=undone,
            state="undo failed" if failed else "undone",
            note=_line(note),
            outcome=ending.outcome.value,
            reason=ending.reason,
            content_type=ending.value.content_type,
            content_encoding=ending.value.content_encoding,
            body=as_text(ending.value.body),
        )
        if reply.word == "undone":
            return None
        if reply.word == "uncertain":
            return Undo(reply.name.decode(), "", is_unsure=True, note="", value=_NOTHING)
        return Undo(reply.name.decode(), reply.undo.decode(), bool(reply.unsure), reply.note.decode(), _encoded(reply))

    def find_ending(self, record: Record, run_id: str) -> Ending | int | None:
        """Return how an execution ends that is being undone; else how many of its steps would be, None when it has none."""
        reply = self._ask(_FIND_ENDING, record, run=run_id)
        if reply.word == "ending":
            return Ending(Outcome(reply.outcome.decode()), reply.reason.decode(), _encoded(reply))
        return None if reply.word == "nothing" else int(reply.undoable)

    def forget_steps(self, record: Record, run_id: str = "") -> bool:
        """Forget what that run of an execution has done, or whichever run it was; return whether there was anything."""
        return bool(self._ask(_FORGET, record, run=run_id).word == "forgotten")

    def resolve_step(self, record: Record, name: str, value: Encoded | None) -> tuple[str, str]:
        """Say that a step is done, with this value, or not; see the script for what is answered."""
        content_type, content_encoding, body = value or _NOTHING
        reply = self._ask(
            _RESOLVE_STEP,
            record,
            name=name,
            state="failed" if value is None else "done",
            content_type=content_type,
            content_encoding=content_encoding,
            body=as_text(body),
        )
        return reply.word, (reply[1].decode() if len(reply) > 1 else "")

    def resolve(
        self,
        record: Record,
        outcome: str,
        value: Encoded,
        *,
        owner: str = "",
        reason: str,
        keep: float,
        keeps_failure: bool,
    ) -> tuple[str, str]:
        """Say what a run has done that died; see the script for what is answered. The record is that of its trigger."""
        reply = self._ask(
            _RESOLVE,
            record,
            owner=owner,
            task_id=record.task_id,
            outcome=outcome,
            reason=reason,
            content_type=value.content_type,
            content_encoding=value.content_encoding,
            body=as_text(value.body),
            keep_ms=milliseconds(keep),
            failure="keep" if keeps_failure else "",
        )
        fact = reply[1] if len(reply) > 1 else ""
        return reply.word, fact.decode() if isinstance(fact, bytes) else str(fact)

    def _ask(self, script: Script, record: Record, **values: Any) -> Any:
        return self._run(script, self.names(record), values)

    def _write(self, script: Script, writer: Writer, **values: Any) -> Any:
        lease = writer.lease
        reply = self._run(
            script,
            self.names(writer.record),
            {
                "owner": lease.owner,
                "token": lease.token,
                "limit": lease.limit,
                "run": writer.run_id,
                "keep_ms": milliseconds(max(writer.keep, _KEEP)),
                **values,
            },
        )
        if reply.word == "refused":
            raise LeaseLost(lease.lock_key, "the run has ended" if reply.outcome else "it was taken over")
        return reply


def _encoded(reply: Any) -> Encoded:
    return Encoded(reply.content_type.decode(), reply.content_encoding.decode(), reply.body)


def _line(text: str) -> str:
    """Return a text as one line, which the script keeps among others."""
    return " ".join(text.split())[:1000]
