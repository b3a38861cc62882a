"""Results and errors as the store keeps them: made by the app's own result serializer, read with what the app accepts."""

from __future__ import annotations

import bz2
import functools
import logging
import lzma
import re
import zlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from celery.exceptions import SoftTimeLimitExceeded
from kombu.compression import compress, get_decoder
from kombu.serialization import dumps, loads, prepare_accept_content

from celery_singleflight.claims import Encoded
from celery_singleflight.discretion import kind
from celery_singleflight.errors import ResultUnavailable
from celery_singleflight.options import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery import Celery

__all__ = ("Bounds", "decode", "decode_error", "encode", "encode_error")

logger = logging.getLogger(__name__)

#: Bytes below which compression costs more than it saves.
_WORTH_IT: Final = 1024
#: Bytes that a compressed value may have when it is read, and therefore when it is made.
_LARGEST: Final = 1 << 26
#: Stands in the content type of a compressed value, before that of the compression. Who does not know it refuses the whole.
_COMPRESSED: Final = "; compression="
#: What JSON says of a value that is none of its own, and that tells nothing of the value.
_NAMES_A_TYPE: Final = re.compile(r"Object of type \w+ is not JSON serializable")
#: What reads a compression no further than it is told to; by the content type that kombu has for it.
_READERS: Final[dict[str, Callable[[], Any]]] = {
    "application/x-gzip": zlib.decompressobj,
    "application/x-bz2": bz2.BZ2Decompressor,
    "application/x-lzma": lzma.LZMADecompressor,
}


class Bounds(NamedTuple):
    """How large a stored value may be, in bytes, `inf` for any size, and how it is compressed, if it is."""

    limit: float = OPTIONS["result_limit"].default
    compression: str | None = None


def encode(app: Celery, value: Any, bounds: Bounds) -> tuple[Encoded, str]:
    """Return the stored form of a value, and why there is none: "" when there is.

    A value that does not serialise, or is too large, is no reason to run again: the outcome is stored without it. The reason
    tells nothing of the value but its type and size.
    """
    serializer = app.backend.serializer
    if value is None:
        return _encoded_none(serializer), ""
    try:
        encoded = _compressed(_serialised(value, serializer), bounds.compression)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:
        logger.debug("a %s does not serialise:", type(value).__name__, exc_info=error)
        why = str(error) if _NAMES_A_TYPE.fullmatch(str(error)) else kind(error)
        return Encoded("", "", b""), f"{type(value).__name__} does not serialise as {serializer}: {why}"
    if len(encoded.body) > bounds.limit:
        return Encoded("", "", b""), f"its stored form has {len(encoded.body)} bytes, result_limit is {bounds.limit}"
    return encoded, ""


def _serialised(value: Any, serializer: str) -> Encoded:
    content_type, content_encoding, body = dumps(value, serializer=serializer)
    return Encoded(content_type, content_encoding, body.encode() if isinstance(body, str) else body)


@functools.cache
def _encoded_none(serializer: str) -> Encoded:
    """Return the stored form of the result that most tasks have."""
    return _serialised(None, serializer)


def _compressed(value: Encoded, compression: str | None) -> Encoded:
    """Return a value compressed, where that makes it smaller."""
    if compression is None or not _WORTH_IT <= len(value.body) <= _LARGEST:
        return value
    body, how = compress(value.body, compression)
    if len(body) >= len(value.body):
        return value
    return Encoded(f"{value.content_type}{_COMPRESSED}{how}", value.content_encoding, body)


def decode(app: Celery, value: Encoded, execution_key: str, reason: str) -> Any:
    """Return a stored value.

    Raises `ResultUnavailable` when only its outcome was stored, or when its compression cannot be read here; what kombu raises
    for content that the app does not accept.
    """
    if not value.content_type:
        raise ResultUnavailable(execution_key, reason)
    content_type, _, how = value.content_type.partition(_COMPRESSED)
    body = _expanded(value.body, how, execution_key) if how else value.body
    accept = prepare_accept_content(app.conf.result_accept_content or app.conf.accept_content)
    return loads(body, content_type, value.content_encoding, accept=accept)


def _expanded(body: bytes, how: str, execution_key: str) -> bytes:
    """Return what was compressed. Raises `ResultUnavailable`."""
    try:
        if how in _READERS:
            reader = _READERS[how]()
            expanded: bytes = reader.decompress(body, _LARGEST + 1)
            is_whole = reader.eof
        else:
            expanded = get_decoder(how)(body)
            is_whole = True
    except KeyError:
        raise ResultUnavailable(execution_key, f"it is compressed as {how}, which kombu cannot read here") from None
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:
        raise ResultUnavailable(execution_key, f"it cannot be expanded from {how}: {kind(error)}") from error
    if not is_whole or len(expanded) > _LARGEST:
        raise ResultUnavailable(execution_key, f"it is not whole, or expands from {how} to more than {_LARGEST} bytes")
    return expanded


def encode_error(app: Celery, error: BaseException, bounds: Bounds) -> Encoded:
    """Return the stored form of an error, as Celery's result backends make it.

    One that does not serialise, or is too large, is stored with its text instead of its arguments, as much of it as there is
    room for.
    """
    encoded, why_not = encode(app, app.backend.prepare_exception(error), bounds)
    if not why_not:
        return encoded
    text = str(error)
    length = int(min(len(text), bounds.limit))
    while True:
        said = text if length == len(text) else f"{text[:length]}… ({len(text)} characters)"
        facts = {"exc_type": type(error).__name__, "exc_module": type(error).__module__, "exc_message": [said]}
        encoded = _compressed(_serialised(facts, app.backend.serializer), bounds.compression)
        if not length or len(encoded.body) <= bounds.limit:
            return encoded
        length //= 2


def decode_error(app: Celery, value: Encoded, execution_key: str, reason: str) -> BaseException:
    """Return a stored error, of its own class where that can be imported."""
    error = app.backend.exception_to_python(decode(app, value, execution_key, reason))
    return error if isinstance(error, BaseException) else ResultUnavailable(execution_key, f"it failed: {type(error).__name__}")
