"""Reads the write batches in a WAL file without RocksDB.

sequence u64 | count u32 | changes ...                                     little-endian

change   kind u8 | family varint, if the kind has one | key, and value or end of the range: varint length, bytes
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from basaltmq.varints import read_varint

_HEAD_BYTES: Final = 12
_KINDS: Final = {
    0: (False, False),
    1: (False, True),
    4: (True, False),
    5: (True, True),
    7: (False, False),
    8: (True, False),
    14: (True, True),
    15: (False, True),
}
"""Kind -> (names a family, has a second text after the key)."""


class Change(NamedTuple):
    """One row change."""

    family: int
    key: bytes
    value: bytes
    """Empty for a deletion."""


def changes(payload: bytes) -> Iterator[Change]:
    """Yield the changes of a batch up to the first that cannot be parsed."""
    at = _HEAD_BYTES
    try:
        while at < len(payload):
            kind = payload[at]
            at += 1
            if kind not in _KINDS:
                return
            has_family, has_value = _KINDS[kind]
            family = 0
            if has_family:
                family, at = read_varint(payload, at)
            key, at = _text(payload, at)
            value = b""
            if has_value:
                value, at = _text(payload, at)
            yield Change(family, key, value)
    except IndexError:
        return


def last_sequence_of(payload: bytes) -> int:
    """Return the sequence number of the last change of a batch."""
    count = int.from_bytes(payload[8:_HEAD_BYTES], "little")
    return int.from_bytes(payload[:8], "little") + max(count, 1) - 1


def _text(data: bytes, at: int) -> tuple[bytes, int]:
    length, at = read_varint(data, at)
    if at + length > len(data):
        raise IndexError
    return data[at : at + length], at + length
