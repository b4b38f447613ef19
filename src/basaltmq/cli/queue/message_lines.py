"""Encodes and decodes messages as JSON lines, and as rows of a table.

`payload` is text; a payload that is not UTF-8 is in `payload_base64`. `enqueue` accepts what `peek` and `lease` print
and ignores the fields that a queue assigns: id, token, attempts and times.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final
from uuid import UUID

import msgspec

from basaltmq.clock import NS_PER_MS
from basaltmq.decoding import json_decoder
from basaltmq.errors import InvalidArgumentError
from basaltmq.queues.draft import FAIRNESS_KEY_DEFAULT, Draft
from basaltmq.queues.message import Message

PREVIEW_CHARS: Final = 60
"""Characters of a payload in a table. The JSON output has all of it."""


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """One line of input. Exactly one of `payload` and `payload_base64` must be set."""

    payload: str | None = None
    payload_base64: str | None = None
    headers: dict[str, str] = {}
    fairness_key: str | None = None
    weight: int = 1
    throttle_keys: tuple[str, ...] = ()
    priority: int | None = None
    ttl_ms: int | None = None
    delay_ms: int | None = None
    dedup_id: str = ""
    id: str | None = None
    """This and the following fields are printed by a queue and ignored by `enqueue`."""
    token: int | None = None
    queue: str | None = None
    attempts: int | None = None
    enqueued_ms: int | None = None
    expires_ms: int | None = None


_decode: Final = json_decoder(Line)
_encoder = msgspec.json.Encoder()


def decode_draft(number: int, line: bytes, defaults: dict[str, Any], *, raw: bool) -> Draft:
    """Return the message of an input line. Errors name the line."""
    if raw:
        return Draft(payload=line, **defaults)
    try:
        parsed = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f'line {number}: {error}; expected {{"payload": "...", "headers": {{...}}}}, or use --raw'
        ) from error
    own = {name: getattr(parsed, name) for name in ("fairness_key", "priority", "ttl_ms", "delay_ms")}
    fields = defaults | {name: value for name, value in own.items() if value is not None}
    return Draft(
        payload=_payload(number, parsed),
        headers=parsed.headers,
        weight=parsed.weight,
        throttle_keys=parsed.throttle_keys,
        dedup_id=parsed.dedup_id.encode(),
        **fields,
    )


def _payload(number: int, line: Line) -> bytes:
    if (line.payload is None) == (line.payload_base64 is None):
        raise InvalidArgumentError(f"line {number}: set exactly one of payload and payload_base64")
    if line.payload is not None:
        return line.payload.encode()
    try:
        return base64.b64decode(line.payload_base64 or "", validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidArgumentError(f"line {number}: payload_base64: {error}") from error


def encode_message(message: Message, token: int | None = None) -> bytes:
    """Return the JSON line of a message. Fields with default values are omitted."""
    line: dict[str, Any] = {"queue": message.queue, "id": str(UUID(bytes=message.id))}
    if token is not None:
        line["token"] = token
    line |= {"enqueued_ms": message.enqueued_ns // NS_PER_MS, "attempts": message.attempts}
    if message.fairness_key != FAIRNESS_KEY_DEFAULT:
        line["fairness_key"] = message.fairness_key
    if message.priority:
        line["priority"] = message.priority
    if message.weight != 1:
        line["weight"] = message.weight
    if message.throttle_keys:
        line["throttle_keys"] = message.throttle_keys
    if message.expires_ns:
        line["expires_ms"] = message.expires_ns // NS_PER_MS
    if message.headers:
        line["headers"] = message.headers
    try:
        line["payload"] = message.payload.decode()
    except UnicodeDecodeError:
        line["payload_base64"] = base64.b64encode(message.payload).decode()
    return _encoder.encode(line)


def message_row(message: Message, now_ns: int) -> dict[str, object]:
    return {
        "id": str(UUID(bytes=message.id)),
        "age s": max(0, now_ns - message.enqueued_ns) // (1000 * NS_PER_MS),
        "attempts": message.attempts,
        "fairness key": message.fairness_key,
        "bytes": len(message.payload),
        "payload": preview(message.payload),
    }


def preview(payload: bytes) -> str:
    """Return the beginning of a payload in one line, with control characters escaped."""
    text = payload[: 4 * PREVIEW_CHARS].decode("utf-8", "backslashreplace")
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return shown if len(shown) <= PREVIEW_CHARS else shown[: PREVIEW_CHARS - 1] + "…"
