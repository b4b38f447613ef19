"""Records and their limits."""

from __future__ import annotations

from typing import Any

import pytest

from basaltmq.errors import InvalidArgumentError, LimitExceededError
from basaltmq.log.batches.record import (
    HEADERS_MAX,
    RECORD_BYTES_MAX,
    TAG_BYTES_MAX,
    TAGS_MAX,
    TIMESTAMP_MS_MAX,
    Record,
    StoredRecord,
    check_record,
    record_size_bytes,
)


def test_a_stored_record_is_a_record_with_its_offset() -> None:
    stored = StoredRecord(b"v", b"k", (("h", b"1"),), (b"t",), 5, 9, offset=7)
    assert isinstance(stored, Record)
    assert (stored.value, stored.key, stored.offset) == (b"v", b"k", 7)
    with pytest.raises(AttributeError):
        stored.value = b""  # type: ignore[misc]


@pytest.mark.spec("B6")
def test_the_size_counts_value_key_headers_and_tags() -> None:
    record = Record(b"vvv", b"kk", (("hé", b"1"),), (b"t", b""), 1)
    assert check_record(record) == record_size_bytes(record) == 3 + 2 + 4 + 1


@pytest.mark.spec("B6")
def test_a_record_over_the_limit_is_refused_with_both_sizes() -> None:
    assert check_record(Record(bytes(RECORD_BYTES_MAX))) == RECORD_BYTES_MAX
    assert check_record(Record(b"")) == 0
    with pytest.raises(LimitExceededError, match=f"{RECORD_BYTES_MAX + 1} bytes.*{RECORD_BYTES_MAX}"):
        check_record(Record(bytes(RECORD_BYTES_MAX), key=b"k"))


@pytest.mark.parametrize(
    "fields",
    [
        {"value": "text"},
        {"value": bytearray(b"x")},
        {"value": b"", "key": "k"},
        {"value": b"", "tags": [b"t"]},
        {"value": b"", "tags": ("t",)},
        {"value": b"", "headers": {"a": b"b"}},
        {"value": b"", "headers": (("a",),)},
        {"value": b"", "headers": ((b"a", b"b"),)},
        {"value": b"", "headers": (("\ud800", b"b"),)},
        {"value": b"", "timestamp_ms": 1.5},
        {"value": b"", "timestamp_ms": -2},
        {"value": b"", "timestamp_ms": 1 << 63},
        {"value": b"", "timestamp_ms": TIMESTAMP_MS_MAX + 1},
        {"value": b"", "expire_at_ms": TIMESTAMP_MS_MAX + 1},
        {"value": b"", "headers": (("a", "text"),)},
        {"value": b"", "expire_at_ms": -1},
        {"value": b"", "expire_at_ms": True},
    ],
)
def test_wrong_types_and_ranges_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        check_record(Record(**fields))


@pytest.mark.promise("P8")
@pytest.mark.parametrize(
    "fields",
    [
        {"tags": (b"t",) * (TAGS_MAX + 1)},
        {"tags": (bytes(TAG_BYTES_MAX + 1),)},
        {"headers": (("h", b""),) * (HEADERS_MAX + 1)},
        {"headers": (("h" * 65_536, b""),)},
    ],
)
def test_too_many_or_too_long_parts_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(LimitExceededError):
        check_record(Record(b"", **fields))
