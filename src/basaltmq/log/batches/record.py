"""A record: what a producer appends to a shard and a consumer reads back.

`Record` is what goes in, `StoredRecord` what comes out: the same with its offset. Both are immutable. This module
also holds the limits of one record and the check that enforces them; how records lie in bytes is `columnar`'s.

`timestamp_ms` is the producer's time; `UNSTAMPED` asks the engine for its clock's. `expire_at_ms` 0 means never.
Keys, values, header values and tags are any bytes, empty included. None is null: a record without a key, a tombstone
without a value, a header without a value. Null is kept apart from empty in every engine and format.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct, structs

from basaltmq.errors import InvalidArgumentError, LimitExceededError, TimestampRangeError

RECORD_BYTES_MAX: Final = 16 << 20
"""Value, key, headers and tags of one record together, unless configured otherwise: a large message, not a file."""

RECORD_BYTES_LIMIT: Final = 256 << 20
"""The most RECORD_BYTES_MAX can be configured to: a batch is held in memory whole, by writer and reader."""

HEADERS_MAX: Final = 1024
"""More headers than any protocol we speak sends by default."""

HEADER_NAME_BYTES_MAX: Final = 0xFFFF
"""What the length fields of the wire protocols can say."""

TAGS_MAX: Final = 256
"""Each tag is an index row; this bounds the rows one record can cost."""

TAG_BYTES_MAX: Final = 4096
"""A tag is a label to find records by, not content."""

UNSTAMPED: Final = -1
"""The producer gave no time; the engine puts its own."""

NEVER: Final = 0
"""An `expire_at_ms` that does not come."""

TIMESTAMP_MS_MAX: Final = 253_402_214_399_999
"""9999-12-30T23:59:59.999Z: one day before the last moment of Python's datetime, because Spark converts to local time.
Arrow's timestamp[us] ends later, in the year 294246. A record with a later time is refused; one that an older version
stored is shown with this time in Arrow."""

Headers = tuple[tuple[str, bytes | None], ...]


class Record(Struct, frozen=True, gc=False):
    """One record as a producer hands it over."""

    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    tags: tuple[bytes, ...] = ()
    timestamp_ms: int = UNSTAMPED
    expire_at_ms: int = NEVER


class StoredRecord(Record, frozen=True, gc=False, kw_only=True):
    """One record as a consumer reads it."""

    offset: int


def record_size_bytes(record: Record) -> int:
    """What counts towards RECORD_BYTES_MAX."""
    size = 0 if record.value is None else len(record.value)
    if record.key is not None:
        size += len(record.key)
    for tag in record.tags:
        size += len(tag)
    for name, value in record.headers:
        size += len(name.encode()) + (0 if value is None else len(value))
    return size


def check_record(record: Record, record_bytes_max: int = RECORD_BYTES_MAX) -> int:
    """Refuse a record of the wrong types or past a limit; return its size in bytes."""
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
    """The record with times that may be stored: an older version took any."""
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
    """Refuse a time that is no number, or that readers cannot represent."""
    if type(time_ms) is not int:
        raise InvalidArgumentError(f"{name} must be an int of milliseconds, not {type(time_ms).__name__}")
    if not least <= time_ms <= TIMESTAMP_MS_MAX:
        raise TimestampRangeError(
            f"{name} {time_ms} is out of range: {least} to {TIMESTAMP_MS_MAX} (year 9999); give milliseconds since 1970"
        )
