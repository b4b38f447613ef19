"""Conversion between records and JSON lines.

    {"value": "...", "key": "...", "headers": {"name": "..."}, "tags": ["..."], "timestamp_ms": 0, "expire_at_ms": 0}

Only the value is required. `null` is a null value (a tombstone) or a null header; "" is empty. Bytes that are not UTF-8
are base64 under `value_base64`, `key_base64`, `headers_base64` and `tags_base64`. If a header name repeats, only its
last value is printed.
"""

from __future__ import annotations

import base64
from typing import Any, Final

import msgspec

from basaltmq.decoding import json_decoder
from basaltmq.errors import InvalidArgumentError
from basaltmq.log.batches.record import NEVER, UNSTAMPED, Record, StoredRecord


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """One input record. Exactly one of `value` and `value_base64` is required."""

    value: str | msgspec.UnsetType | None = msgspec.UNSET
    value_base64: str | None = None
    key: str | None = None
    key_base64: str | None = None
    headers: dict[str, str | None] = {}
    headers_base64: dict[str, str] = {}
    tags: list[str] = []
    tags_base64: list[str] = []
    timestamp_ms: int = UNSTAMPED
    expire_at_ms: int = NEVER
    topic: str | None = None
    """`read` prints topic, partition and offset; `append` ignores them."""
    partition: int | None = None
    offset: int | None = None


_decode: Final = json_decoder(Line)
_encoder = msgspec.json.Encoder()


def decode_record(number: int, line: bytes, *, raw: bool, key: str | None) -> Record:
    """Decode an input line. Errors name the line number."""
    if raw:
        return Record(line, None if key is None else key.encode())
    return to_record(number, read_line(number, line), key=key)


def read_line(number: int, line: bytes) -> Line:
    try:
        return _decode(line)
    except msgspec.DecodeError as error:
        raise InvalidArgumentError(
            f'line {number}: {error}; expected {{"value": "...", "key": "..."}}, or use --raw'
        ) from error


def to_record(number: int, line: Line, *, key: str | None = None) -> Record:
    """Convert a line to a record. `key` is the default for lines without a key."""
    fallback = None if key is None else key.encode()
    text = None if line.value is msgspec.UNSET else line.value
    value = _either(number, "value", text, line.value_base64)
    if value is None and line.value is not None:
        raise InvalidArgumentError(f"line {number}: a record needs value or value_base64")
    own_key = _either(number, "key", line.key, line.key_base64)
    return Record(
        value,
        fallback if own_key is None else own_key,
        (
            *((name, None if text is None else text.encode()) for name, text in line.headers.items()),
            *((name, _bytes(number, "headers_base64", text)) for name, text in line.headers_base64.items()),
        ),
        (
            *(tag.encode() for tag in line.tags),
            *(_bytes(number, "tags_base64", tag) for tag in line.tags_base64),
        ),
        line.timestamp_ms,
        line.expire_at_ms,
    )


def _either(number: int, name: str, text: str | None, encoded: str | None) -> bytes | None:
    if text is not None and encoded is not None:
        raise InvalidArgumentError(f"line {number}: give {name} or {name}_base64, not both")
    if text is not None:
        return text.encode()
    return None if encoded is None else _bytes(number, f"{name}_base64", encoded)


def _bytes(number: int, name: str, encoded: str) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise InvalidArgumentError(f"line {number}: {name}: {error}") from error


def encode_record(topic: str, partition: int, record: StoredRecord) -> bytes:
    """Encode a record as an output line, without absent fields."""
    return _encoder.encode({"topic": topic, "partition": partition, "offset": record.offset, **to_line(record)})


def to_line(record: Record) -> dict[str, Any]:
    """Return the JSON object of a record: the inverse of `to_record`."""
    line: dict[str, Any] = {}
    if record.timestamp_ms != UNSTAMPED:
        line["timestamp_ms"] = record.timestamp_ms
    if record.key is not None:
        _put(line, "key", record.key)
    if record.value is None:
        line["value"] = None
    else:
        _put(line, "value", record.value)
    for name, value in record.headers:
        text, suffix = (None, "") if value is None else _shown(value)
        line.setdefault(f"headers{suffix}", {})[name] = text
    for tag in record.tags:
        text, suffix = _shown(tag)
        line.setdefault(f"tags{suffix}", []).append(text)
    if record.expire_at_ms != NEVER:
        line["expire_at_ms"] = record.expire_at_ms
    return line


def raw_value(line: dict[str, Any]) -> bytes:
    """Return the value of a line as bytes; empty if it is null."""
    if "value_base64" in line:
        return base64.b64decode(line["value_base64"])
    return b"" if line["value"] is None else str(line["value"]).encode()


def _put(line: dict[str, Any], name: str, raw: bytes) -> None:
    text, suffix = _shown(raw)
    line[name + suffix] = text


def _shown(raw: bytes) -> tuple[str, str]:
    """Return the text and the suffix for its field name."""
    try:
        return raw.decode(), ""
    except UnicodeDecodeError:
        return base64.b64encode(raw).decode(), "_base64"
