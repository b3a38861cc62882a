"""Names of the message headers and properties of the package; documented for publishers that do not have it."""

from __future__ import annotations

from typing import Final

__all__ = (
    "CAUSED_BY",
    "COPY",
    "DIGEST",
    "EVENTS",
    "FIRST_SEEN",
    "FORCED",
    "KEY",
    "LINGER",
    "MESSAGE",
    "OF_A_WAIT",
    "OWNER",
    "PLACE",
    "PREVIOUS",
    "SERIALIZER",
    "SOURCE",
    "WAITS",
)

#: The lock key, and the digest of the arguments it was made from.
KEY: Final = "singleflight_key"
DIGEST: Final = "singleflight_digest"

#: The run whose body has published the message, as `Cause` reads it.
CAUSED_BY: Final = "singleflight_caused_by"
#: Where the trigger comes from, for people to read: "replay" when it is replayed; "beat" for beat's and "call" for others where
#: there is none. And whether the replay was forced.
SOURCE: Final = "singleflight_source"
FORCED: Final = "singleflight_forced"

#: Which copy of the message this is, and the copy it was made from.
COPY: Final = "singleflight_copy"
PREVIOUS: Final = "singleflight_previous"
#: How often the trigger has been requeued, and the store time in ms at which it first met contention.
WAITS: Final = "singleflight_waits"
FIRST_SEEN: Final = "singleflight_first_seen"
#: Of a message that the store has handed out: for how many seconds the trigger may wait in its slot because it was called ahead
#: of its turn, else 0.
LINGER: Final = "singleflight_linger"
#: Its place in the line of those who wait with the broker, as the store has written it.
PLACE: Final = "singleflight_place"
OF_A_WAIT: Final = (COPY, PREVIOUS, WAITS, FIRST_SEEN, LINGER, PLACE)

#: Properties that the worker's main process adds to a delivery; they do not travel with the message.
OWNER: Final = "singleflight_owner"
EVENTS: Final = "singleflight_events"
SERIALIZER: Final = "singleflight_content_type"
#: The message's headers, its body, content type and content encoding.
MESSAGE: Final = "singleflight_message"
