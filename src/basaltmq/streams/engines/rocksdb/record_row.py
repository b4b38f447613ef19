"""Row format of a record in the RocksDB engine.

    | crc32c u32 | version u8 | flags u8 | tags u16 | headers u16 | key length i32, -1: no key |
    | stored ms i64 | timestamp ms i64 | expire at ms i64 |
    | per tag: length u16 | per header: name length u16, value length u32 | key | tags | names, values | value |

The CRC covers the row's key (shard and offset) and all bytes after the CRC. So it detects flipped bits and misplaced
rows. All lengths precede all bytes.

Flag 1: the value is null. A header value length of 0xffffffff: the header's value is null.
"""

from __future__ import annotations

import struct
from struct import Struct as Layout
from typing import Final

import google_crc32c

from basaltmq.errors import CorruptionError
from basaltmq.log.batches.record import Headers, Record, StoredRecord
from basaltmq.store.keys.streams import decode_stream_record_key

ROW_VERSION: Final = 1
NULL_VALUE: Final = 1
NULL_BYTES: Final = 0xFFFFFFFF
_HEAD: Final = Layout(">IBBHHiqqq")
_CRC: Final = Layout(">I")
_TAG: Final = Layout(">H")
_HEADER: Final = Layout(">HI")
_TIMES: Final = Layout(">qqq")
_TIMES_AT: Final = 14


def encode_row(row_key: bytes, record: Record, stored_ms: int) -> bytes:
    key = record.key
    value = record.value
    head = _HEAD.pack(
        0,
        ROW_VERSION,
        NULL_VALUE if value is None else 0,
        len(record.tags),
        len(record.headers),
        -1 if key is None else len(key),
        stored_ms,
        record.timestamp_ms,
        record.expire_at_ms,
    )
    parts = [head[4:]]
    if record.tags or record.headers:
        named = [(name.encode(), content) for name, content in record.headers]
        parts += [_TAG.pack(len(tag)) for tag in record.tags]
        parts += [_HEADER.pack(len(name), NULL_BYTES if content is None else len(content)) for name, content in named]
        parts.append(key or b"")
        parts += record.tags
        for name, content in named:
            parts += (name, content or b"")
        parts.append(value or b"")
    else:
        parts += (key or b"", value or b"")
    body = b"".join(parts)
    return _CRC.pack(google_crc32c.extend(google_crc32c.value(row_key), body)) + body


def decode_row(row_key: bytes, raw: bytes) -> StoredRecord:
    shard, offset = decode_stream_record_key(row_key)
    try:
        crc, version, flags, tag_count, header_count, key_bytes, _, timestamp_ms, expire_at_ms = _HEAD.unpack_from(raw)
    except struct.error:
        raise CorruptionError(f"record {offset} of shard {shard} has only {len(raw)} bytes") from None
    if crc != google_crc32c.extend(google_crc32c.value(row_key), raw[4:]):
        raise CorruptionError(f"record {offset} of shard {shard} does not match its checksum")
    if version != ROW_VERSION:
        raise CorruptionError(f"record {offset} of shard {shard} has row version {version}, not {ROW_VERSION}")
    at = _HEAD.size
    tags: tuple[bytes, ...] = ()
    headers: Headers = ()
    tag_sizes: list[int] = []
    header_sizes: list[tuple[int, int]] = []
    if tag_count or header_count:
        tag_sizes = [size for (size,) in _TAG.iter_unpack(raw[at : at + 2 * tag_count])]
        at += 2 * tag_count
        header_sizes = list(_HEADER.iter_unpack(raw[at : at + 6 * header_count]))
        at += 6 * header_count
    key: bytes | None = None
    if key_bytes >= 0:
        key = raw[at : at + key_bytes]
        at += key_bytes
    if tag_sizes:
        found = []
        for size in tag_sizes:
            found.append(raw[at : at + size])
            at += size
        tags = tuple(found)
    if header_sizes:
        pairs: list[tuple[str, bytes | None]] = []
        for name_bytes, value_bytes in header_sizes:
            name = raw[at : at + name_bytes].decode()
            at += name_bytes
            if value_bytes == NULL_BYTES:
                pairs.append((name, None))
                continue
            pairs.append((name, raw[at : at + value_bytes]))
            at += value_bytes
        headers = tuple(pairs)
    return StoredRecord(
        value=None if flags & NULL_VALUE else raw[at:],
        key=key,
        headers=headers,
        tags=tags,
        timestamp_ms=timestamp_ms,
        expire_at_ms=expire_at_ms,
        offset=offset,
    )


def row_times(raw: bytes) -> tuple[int, int, int]:
    """Return (stored, timestamp, expire at) of a row without a CRC check, because retention reads many rows."""
    if len(raw) < _HEAD.size:
        raise CorruptionError(f"a record's row has only {len(raw)} bytes")
    stored_ms, timestamp_ms, expire_at_ms = _TIMES.unpack_from(raw, _TIMES_AT)
    return stored_ms, timestamp_ms, expire_at_ms
