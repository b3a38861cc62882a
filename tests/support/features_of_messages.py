"""Features of Celery, as rows of the matrix: routing, and what a message carries."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from celery import chain
from celery.canvas import StampingVisitor
from matrix_ends import end_of, ends_of
from matrix_feature import CONTENDED, Section

ROUTING = Section("Queues and exchanges")
MESSAGES = Section("What a message carries")

#: The same for each kind, so that it can be compared. RabbitMQ refuses a message that expires in more than 49 days.
_LATER = datetime.now(UTC) + timedelta(hours=1)


class Stamp(StampingVisitor):
    def on_signature(self, sig, **headers):
        return {"mark": "blue", "stamped_headers": ["mark"]}


@ROUTING(holds=("double",))
def another_queue(t):
    """`queue`."""
    return end_of(t.double.apply_async((2,), queue=t.place.queues["other"]))


@ROUTING(holds=("double",))
def topic_exchange(t):
    """A topic exchange, by `queue` and `routing_key`."""
    return end_of(t.double.apply_async((2,), queue=t.place.queues["topic"], routing_key="work.some"))


@ROUTING(holds=("double",))
def fanout_exchange(t):
    """A fanout exchange."""
    return end_of(t.double.apply_async((2,), queue=t.place.queues["fanout"]))


@ROUTING(
    holds=("double",),
    absent={("redis", None): "kombu's Redis transport has no headers exchange"},
)
def headers_exchange(t):
    """A headers exchange."""
    return end_of(t.double.apply_async((2,), queue=t.place.queues["headers"], headers={"colour": "blue"}))


@ROUTING(holds=("double",))
def priority(t):
    """`priority`, on a queue with priorities."""
    return end_of(t.double.apply_async((2,), queue=t.place.queues["priority"], priority=6))


@ROUTING(
    holds=("retry_twice",),
    absent={
        ("redis", None): "Celery itself loses a retry to a topic exchange: the pool process does not know the exchange's type"
    },
)
def retry_to_a_topic_exchange(t):
    """`self.retry()` of a message that came through a topic exchange."""
    return end_of(t.retry_twice.apply_async(queue=t.place.queues["topic"], routing_key="work.some"))


@MESSAGES(holds=("echo",))
def keyword_arguments(t):
    """Keyword arguments."""
    return end_of(t.echo.apply_async((1,), {"x": {"y": None}}))


@MESSAGES(holds=("double",))
def headers(t):
    """`headers`."""
    return end_of(t.double.apply_async((2,), headers={"custom": "kept", "number": 3}))


@MESSAGES(holds=("double",))
def options(t):
    """`shadow`, `expires`, `time_limit`, `soft_time_limit`."""
    sent = {"shadow": "shade", "expires": _LATER, "time_limit": 300, "soft_time_limit": 200}
    return end_of(t.double.apply_async((2,), **sent))


@MESSAGES(holds=("double",))
def stamps(t):
    """Stamps, of a call."""
    signature = t.double.s(2)
    signature.stamp(Stamp())
    return end_of(signature.apply_async())


@MESSAGES(holds=("double",))
def stamps_in_a_chain(t):
    """Stamps, of a chain, its second task contended."""
    canvas = chain(t.add.s(1, 1), t.double.s(), t.add.s(3))
    canvas.stamp(Stamp())
    return end_of(canvas.apply_async())


def _serialised(t, name):
    return ends_of(t.echo.apply_async(({"a": [1, None, 0.5]}, "text"), {"b": "ü"}, serializer=name))


@MESSAGES(holds=("echo",))
def json_serializer(t):
    """`serializer="json"`."""
    return _serialised(t, "json")


@MESSAGES(holds=("echo",))
def yaml_serializer(t):
    """`serializer="yaml"`."""
    return _serialised(t, "yaml")


@MESSAGES(holds=("echo",))
def msgpack_serializer(t):
    """`serializer="msgpack"`."""
    return _serialised(t, "msgpack")


@MESSAGES(holds=("echo",))
def pickle_serializer(t):
    """`serializer="pickle"`."""
    return _serialised(t, "pickle")


@MESSAGES(holds=("echo",))
def compression(t):
    """`compression="zlib"`."""
    return end_of(t.echo.apply_async(("x" * 5000,), compression="zlib"))


@MESSAGES(holds=("echo",))
def compressed_msgpack(t):
    """`compression="bzip2"` of `serializer="msgpack"`."""
    return end_of(t.echo.apply_async(("x" * 5000,), compression="bzip2", serializer="msgpack"))


@MESSAGES(
    holds=("echo",), looks_again=True, says={(None, CONTENDED): "same, after it has waited as often as the policy lets it"}
)
def everything_at_once(t):
    """All of it in one message, through a topic exchange."""
    signature = t.echo.s({"key": t.key})
    signature.stamp(Stamp())
    result = signature.apply_async(
        # What has waited went through the delay exchanges of quorum queues, as after any countdown.
        countdown=1 if t.place.is_quorum and not t.is_contended else None,
        queue=t.place.queues["topic"],
        routing_key="work.some",
        shadow="shade",
        priority=3,
        headers={"custom": "kept"},
        time_limit=300,
        soft_time_limit=200,
        expires=_LATER,
        link=t.note.si(t.key),
        link_error=t.note.si(f"{t.key}-bad"),
        serializer="pickle",
        compression="zlib",
    )
    value = result.get(timeout=30)["args"] == [{"key": t.key}]
    t.until_noted()
    return value, t.noted(), t.noted("-bad")
