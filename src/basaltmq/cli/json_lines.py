"""Records as JSON lines, both ways. Bytes that are not UTF-8 are base64 under a name that says so."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec

from basaltmq.errors import InvalidArgumentError
from basaltmq.log.record import NEVER, UNSTAMPED, Record, StoredRecord


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """One record of the input. Exactly one of `value` and `value_base64`."""

    value: str | None = None
    value_base64: str | None = None
    key: str | None = None
    key_base64: str | None = None
    headers: dict[str, str] = {}
    tags: list[str] = []
    timestamp_ms: int = UNSTAMPED
    expire_at_ms: int = NEVER
    topic: str | None = None
    """What `read` prints and `append` has no use for."""
    partition: int | None = None
    offset: int | None = None


_decoder = msgspec.json.Decoder(Line)
_encoder = msgspec.json.Encoder()


def decode_record(number: int, line: bytes, *, raw: bool, key: str | None) -> Record:
    """The record of an input line; errors name the line."""
    fallback = None if key is None else key.encode()
    if raw:
        return Record(line, fallback)
    try:
        said = _decoder.decode(line)
    except msgspec.DecodeError as error:
        raise InvalidArgumentError(
            f'line {number}: {error}; expected {{"value": "...", "key": "..."}}, or use --raw'
        ) from error
    value = _either(number, "value", said.value, said.value_base64)
    if value is None:
        raise InvalidArgumentError(f"line {number}: a record needs value or value_base64")
    own_key = _either(number, "key", said.key, said.key_base64)
    return Record(
        value,
        fallback if own_key is None else own_key,
        tuple((name, text.encode()) for name, text in said.headers.items()),
        tuple(tag.encode() for tag in said.tags),
        said.timestamp_ms,
        said.expire_at_ms,
    )


def _either(number: int, name: str, text: str | None, encoded: str | None) -> bytes | None:
    if text is not None and encoded is not None:
        raise InvalidArgumentError(f"line {number}: give {name} or {name}_base64, not both")
    if text is not None:
        return text.encode()
    if encoded is None:
        return None
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise InvalidArgumentError(f"line {number}: {name}_base64: {error}") from error


def encode_record(topic: str, partition: int, record: StoredRecord) -> bytes:
    """The output line of a record, without what it does not have."""
    line: dict[str, Any] = {"topic": topic, "partition": partition, "offset": record.offset}
    line["timestamp_ms"] = record.timestamp_ms
    if record.key is not None:
        _put(line, "key", record.key)
    _put(line, "value", record.value)
    if record.headers:
        line["headers"] = {name: value.decode("utf-8", "backslashreplace") for name, value in record.headers}
    if record.tags:
        line["tags"] = [tag.decode("utf-8", "backslashreplace") for tag in record.tags]
    if record.expire_at_ms != NEVER:
        line["expire_at_ms"] = record.expire_at_ms
    return _encoder.encode(line)


def _put(line: dict[str, Any], name: str, raw: bytes) -> None:
    try:
        line[name] = raw.decode()
    except UnicodeDecodeError:
        line[f"{name}_base64"] = base64.b64encode(raw).decode()
