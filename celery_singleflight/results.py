"""Results and errors as the store keeps them: made by the app's own result serializer, read with what the app accepts."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from celery.exceptions import SoftTimeLimitExceeded
from kombu.serialization import dumps, loads, prepare_accept_content

from celery_singleflight.claims import Encoded
from celery_singleflight.errors import ResultUnavailable

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("decode", "decode_error", "encode", "encode_error")


def encode(app: Celery, value: Any) -> tuple[Encoded, str]:
    """Return the stored form of a value, and why there is none: "" when there is.

    A value that does not serialise is no reason to run again: the outcome is stored without it.
    """
    serializer = app.backend.serializer
    if value is None:
        return _encoded_none(serializer), ""
    try:
        content_type, content_encoding, body = dumps(value, serializer=serializer)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # noqa: BLE001, serializers raise what they like
        return Encoded("", "", b""), f"{type(value).__name__} does not serialise as {serializer}: {error}"
    return Encoded(content_type, content_encoding, body.encode() if isinstance(body, str) else body), ""


@functools.cache
def _encoded_none(serializer: str) -> Encoded:
    """Return the stored form of the result that most tasks have."""
    content_type, content_encoding, body = dumps(None, serializer=serializer)
    return Encoded(content_type, content_encoding, body.encode() if isinstance(body, str) else body)


def decode(app: Celery, value: Encoded, execution_key: str, reason: str) -> Any:
    """Return a stored value. Raises `ResultUnavailable` when only its outcome was stored."""
    if not value.content_type:
        raise ResultUnavailable(execution_key, reason)
    accept = prepare_accept_content(app.conf.result_accept_content or app.conf.accept_content)
    return loads(value.body, value.content_type, value.content_encoding, accept=accept)


def encode_error(app: Celery, error: BaseException) -> Encoded:
    """Return the stored form of an error, as Celery's result backends make it."""
    encoded, why_not = encode(app, app.backend.prepare_exception(error))
    if why_not:
        encoded, _ = encode(
            app, {"exc_type": type(error).__name__, "exc_module": type(error).__module__, "exc_message": [str(error)]}
        )
    return encoded


def decode_error(app: Celery, value: Encoded, execution_key: str, reason: str) -> BaseException:
    """Return a stored error, of its own class where that can be imported."""
    error = app.backend.exception_to_python(decode(app, value, execution_key, reason))
    return error if isinstance(error, BaseException) else ResultUnavailable(execution_key, f"it failed: {error!r}")
