"""A stream record: the data that a producer appends to a shard and a consumer reads.

`Record` is the input; `StoredRecord` adds the offset. Both are immutable. This module also holds the limits of one
record and checks them. `columnar` defines the byte layout.

`timestamp_ms` is the producer's time; with `UNSTAMPED` the engine uses its clock. An `expire_at_ms` of 0 means never.
Keys, values, header values and tags are arbitrary bytes, including empty ones. None is null: a record without a key, a
tombstone without a value, a header without a value. Every engine and format distinguishes null from empty.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct, structs

from basaltmq.errors import InvalidArgumentError, LimitExceededError, TimestampRangeError

RECORD_BYTES_MAX: Final = 16 << 20
"""Default limit for value, key, headers and tags of one record together: enough for a large message, not for a file."""

RECORD_BYTES_LIMIT: Final = 256 << 20
"""Upper bound for the configured RECORD_BYTES_MAX, because writer and reader hold a whole batch in memory."""

HEADERS_MAX: Final = 1024
"""More headers than any supported protocol sends by default."""

HEADER_NAME_BYTES_MAX: Final = 0xFFFF
"""The maximum of the length fields in the wire protocols."""

TAGS_MAX: Final = 256
"""Bounds the index rows of one record: each tag is one row."""

TAG_BYTES_MAX: Final = 4096
"""A tag is a label to find records by, not content."""

UNSTAMPED: Final = -1
"""The producer gave no time; the engine sets its own."""

NEVER: Final = 0
"""The `expire_at_ms` of a record that never expires."""

TIMESTAMP_MS_MAX: Final = 253_402_214_399_999
"""9999-12-30T23:59:59.999Z: one day before the end of Python's datetime, because Spark converts to local time. Arrow's
timestamp[us] ends later, in the year 294246. Later times are rejected. Arrow output clamps later times that an older
version stored."""

Headers = tuple[tuple[str, bytes | None], ...]


class Record(Struct, frozen=True, gc=False):
    """A record from a producer."""

    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    tags: tuple[bytes, ...] = ()
    timestamp_ms: int = UNSTAMPED
    expire_at_ms: int = NEVER


class StoredRecord(Record, frozen=True, gc=False, kw_only=True):
    """A record for a consumer."""

    offset: int


def record_size_bytes(record: Record) -> int:
    """Return the size that counts towards RECORD_BYTES_MAX."""
    size = 0 if record.value is None else len(record.value)
    if record.key is not None:
        size += len(record.key)
    for tag in record.tags:
        size += len(tag)
    for name, value in record.headers:
        size += len(name.encode()) + (0 if value is None else len(value))
    return size


def check_record(record: Record, record_bytes_max: int = RECORD_BYTES_MAX) -> int:
    """Reject a record with wrong types or over a limit. Return its size in bytes."""
    value = record.value
    key = record.key
    size = 0
    if type(value) is bytes:
        size = len(value)
    elif value is not None:
        raise InvalidArgumentError(f"a record's value must be bytes or None, not {type(value).__name__}")
    if key is not None:
        if type(key) is not bytes:
            raise InvalidArgumentError(f"a record's key must be bytes or None, not {type(key).__name__}")
        size += len(key)
    if record.tags:
        size += _check_tags(record.tags)
    if record.headers:
        size += _check_headers(record.headers)
    check_time("timestamp_ms", record.timestamp_ms, UNSTAMPED)
    check_time("expire_at_ms", record.expire_at_ms, NEVER)
    if size > record_bytes_max:
        raise LimitExceededError(
            f"a record of {size} bytes is over the limit of {record_bytes_max}; split it, store it elsewhere and "
            "send a reference, or raise record_bytes_max"
        )
    return size


def clamped(record: StoredRecord) -> StoredRecord:
    """Return the record with times clamped to the valid range, because an older version accepted any time."""
    if record.timestamp_ms <= TIMESTAMP_MS_MAX and record.expire_at_ms <= TIMESTAMP_MS_MAX:
        return record
    return structs.replace(
        record,
        timestamp_ms=min(record.timestamp_ms, TIMESTAMP_MS_MAX),
        expire_at_ms=min(record.expire_at_ms, TIMESTAMP_MS_MAX),
    )


def _check_tags(tags: tuple[bytes, ...]) -> int:
    if type(tags) is not tuple:
        raise InvalidArgumentError(f"a record's tags must be a tuple of bytes, not {type(tags).__name__}")
    if len(tags) > TAGS_MAX:
        raise LimitExceededError(f"a record has {len(tags)} tags, at most {TAGS_MAX} are allowed")
    size = 0
    for tag in tags:
        if type(tag) is not bytes:
            raise InvalidArgumentError(f"a tag must be bytes, not {type(tag).__name__}")
        if len(tag) > TAG_BYTES_MAX:
            raise LimitExceededError(f"a tag of {len(tag)} bytes is over the limit of {TAG_BYTES_MAX}")
        size += len(tag)
    return size


def _check_headers(headers: Headers) -> int:
    if type(headers) is not tuple:
        raise InvalidArgumentError(f"a record's headers must be a tuple of (str, bytes), not {type(headers).__name__}")
    if len(headers) > HEADERS_MAX:
        raise LimitExceededError(f"a record has {len(headers)} headers, at most {HEADERS_MAX} are allowed")
    size = 0
    for header in headers:
        if (
            type(header) is not tuple
            or len(header) != 2
            or type(header[0]) is not str
            or (type(header[1]) is not bytes and header[1] is not None)
        ):
            raise InvalidArgumentError(f"a header must be a tuple (str, bytes or None), not {header!r:.80}")
        try:
            name_bytes = len(header[0].encode())
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(f"the header name {header[0]!r:.80} is not valid Unicode") from error
        if name_bytes > HEADER_NAME_BYTES_MAX:
            raise LimitExceededError(
                f"a header name of {name_bytes} bytes is over the limit of {HEADER_NAME_BYTES_MAX}"
            )
        size += name_bytes + (0 if header[1] is None else len(header[1]))
    return size


def check_time(name: str, time_ms: int, least: int) -> None:
    """Reject a time that is not an int or that readers cannot represent."""
    if type(time_ms) is not int:
        raise InvalidArgumentError(f"{name} must be an int of milliseconds, not {type(time_ms).__name__}")
    if not least <= time_ms <= TIMESTAMP_MS_MAX:
        raise TimestampRangeError(
            f"{name} {time_ms} is out of range: {least} to {TIMESTAMP_MS_MAX} (year 9999); give milliseconds since 1970"
        )
