"""Messages of queues as JSON lines, both ways, and as rows of a table.

`payload` is text, or base64 under `payload_base64` when it is not UTF-8. What `peek` and `lease` print, `enqueue`
takes: what only a queue can say (id, token, attempts, times) is read over.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final
from uuid import UUID

import msgspec

from basaltmq.decoding import json_decoder
from basaltmq.errors import InvalidArgumentError
from basaltmq.queues.draft import FAIRNESS_KEY_DEFAULT, Draft
from basaltmq.queues.message import Message

PREVIEW_CHARS: Final = 60
"""Of a payload in a table; the whole of it is in the JSON."""

_MS: Final = 1_000_000


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """One message of the input. Exactly one of `payload` and `payload_base64`."""

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
    """What a queue prints and `enqueue` has no use for."""
    token: int | None = None
    queue: str | None = None
    attempts: int | None = None
    enqueued_ms: int | None = None
    expires_ms: int | None = None


_decode: Final = json_decoder(Line)
_encoder = msgspec.json.Encoder()


def decode_draft(number: int, line: bytes, defaults: dict[str, Any], *, raw: bool) -> Draft:
    """The message of an input line; errors name the line."""
    if raw:
        return Draft(payload=line, **defaults)
    try:
        said = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f'line {number}: {error}; expected {{"payload": "...", "headers": {{...}}}}, or use --raw'
        ) from error
    own = {name: getattr(said, name) for name in ("fairness_key", "priority", "ttl_ms", "delay_ms")}
    fields = defaults | {name: value for name, value in own.items() if value is not None}
    return Draft(
        payload=_payload(number, said),
        headers=said.headers,
        weight=said.weight,
        throttle_keys=said.throttle_keys,
        dedup_id=said.dedup_id.encode(),
        **fields,
    )


def _payload(number: int, said: Line) -> bytes:
    if (said.payload is None) == (said.payload_base64 is None):
        raise InvalidArgumentError(f"line {number}: a message has either payload or payload_base64")
    if said.payload is not None:
        return said.payload.encode()
    try:
        return base64.b64decode(said.payload_base64 or "", validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidArgumentError(f"line {number}: payload_base64: {error}") from error


def encode_message(message: Message, token: int | None = None) -> bytes:
    """The output line of a message, without what it does not have."""
    line: dict[str, Any] = {"queue": message.queue, "id": str(UUID(bytes=message.id))}
    if token is not None:
        line["token"] = token
    line |= {"enqueued_ms": message.enqueued_ns // _MS, "attempts": message.attempts}
    if message.fairness_key != FAIRNESS_KEY_DEFAULT:
        line["fairness_key"] = message.fairness_key
    if message.priority:
        line["priority"] = message.priority
    if message.weight != 1:
        line["weight"] = message.weight
    if message.throttle_keys:
        line["throttle_keys"] = message.throttle_keys
    if message.expires_ns:
        line["expires_ms"] = message.expires_ns // _MS
    if message.headers:
        line["headers"] = message.headers
    try:
        line["payload"] = message.payload.decode()
    except UnicodeDecodeError:
        line["payload_base64"] = base64.b64encode(message.payload).decode()
    return _encoder.encode(line)


def message_row(message: Message, now_ns: int) -> dict[str, object]:
    """A message as a row of a table."""
    return {
        "id": str(UUID(bytes=message.id)),
        "age s": max(0, now_ns - message.enqueued_ns) // (1000 * _MS),
        "attempts": message.attempts,
        "fairness key": message.fairness_key,
        "bytes": len(message.payload),
        "payload": preview(message.payload),
    }


def preview(payload: bytes) -> str:
    """The beginning of a payload in one line that a terminal can show: nothing in it moves the cursor."""
    text = payload[: 4 * PREVIEW_CHARS].decode("utf-8", "backslashreplace")
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return shown if len(shown) <= PREVIEW_CHARS else shown[: PREVIEW_CHARS - 1] + "…"
