"""A frame: one batch of one shard in the log, with its checksums.

     0        4            8          12           16     24           32     36
     | magic  | header crc | body crc | body bytes | shard | base offset | count | last delta |
     | u32    | u32        | u32      | u32        | u64   | u64         | u32   | u32        |
     40       48       56           64     65     66       68       72
     | min ts | max ts   | store time | kind | flags | 0 u16 | 0 u32 | body, zeros to a multiple of 8 |
     | i64    | i64      | i64        | u8   | u8    |       |       |                                |

All fields are little-endian. Frames start at multiples of 8, so the buffers of a columnar body are aligned in the file.
The header CRC32C covers the rest of the header, including the body's CRC and length. So an intact header identifies the
shard and the offsets of a damaged body. The CRC starts with the lane's seed, a secret number. So recovery, which
searches damaged bytes for the next frame, never mistakes a record's value for a frame. Reserved bytes are zero and
checked. Padding is not covered and has no meaning.

Kinds: COLUMNAR is a batch of records. KAFKA is a Kafka v2 record batch, stored unchanged (see `kafka`). DELETES lists
deleted offsets of the shard (i64 each). TRIM deletes the shard's records below its base offset. DROP deletes the shard.
Only COLUMNAR and KAFKA frames belong to the shard's offset sequence.

Flags: RELOCATED marks a later copy of a frame with the same last offset; REWRITTEN marks one from which compaction
removed records. AWAITED marks a write that requested durability in a shard whose writes are otherwise not synced.

Files are in `segment`, the handling of damage is in `recovery`. Encoding takes 5 us, of which 2.3 us are the CRC of 27
KB. Decoding takes the same plus a copy of the body, because the CRC function accepts only bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple, TypeAlias

import google_crc32c

from basaltmq.errors import CorruptionError
from basaltmq.log.batches import kafka
from basaltmq.log.batches.columnar import BODY_BYTES_MAX, ColumnBatch

MAGIC: Final = 0x4D465342
"""The bytes "BSFM"."""
MAGIC_BYTES: Final = MAGIC.to_bytes(4, "little")

HEADER_BYTES: Final = 72
ALIGNMENT: Final = 8

COLUMNAR: Final = 1
KAFKA: Final = 2
DELETES: Final = 3
TRIM: Final = 4
DROP: Final = 5

RELOCATED: Final = 1
REWRITTEN: Final = 2
AWAITED: Final = 4
"""The write requested durability in a shard whose writes are not synced. The frame and later ones stay invisible until
the sync."""

HEADER: Final = Struct("<IIIIQQIIqqqBBHI")
"""The whole header. `Header` omits magic, header CRC and reserved fields."""
PLAIN_HEADER: Final = Struct("<IIIIQQIIqqqQ")
"""The header with everything after the times as one number: COLUMNAR for a frame of records without flags."""
_COVERED: Final = Struct("<IIQQIIqqqBBHI")
_FRONT: Final = Struct("<II")
_KINDS: Final = range(COLUMNAR, DROP + 1)
_FLAGS: Final = RELOCATED | REWRITTEN | AWAITED
_ZEROS: Final = bytes(ALIGNMENT)
_crc32c = google_crc32c.value
_extend = google_crc32c.extend

HeaderFields: TypeAlias = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int, int, int]
"""The fields that HEADER unpacks."""
PlainFields: TypeAlias = tuple[int, int, int, int, int, int, int, int, int, int, int, int]
"""The fields that PLAIN_HEADER unpacks."""


class Header(NamedTuple):
    """The fields of a frame header, in byte order."""

    body_crc: int
    body_bytes: int
    shard: int
    base_offset: int
    records: int
    last_delta: int
    timestamp_min_ms: int
    timestamp_max_ms: int
    store_time_ms: int
    kind: int
    flags: int

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_delta

    @property
    def size_bytes(self) -> int:
        """Size of header, body and padding."""
        return frame_bytes(self.body_bytes)


def frame_bytes(body_bytes: int) -> int:
    """Return the size of a frame in the log."""
    return HEADER_BYTES + body_bytes + (-body_bytes & 7)


def encode_frame(
    seed: int,
    kind: int,
    shard: int,
    base_offset: int,
    records: int,
    last_delta: int,
    timestamp_min_ms: int,
    timestamp_max_ms: int,
    store_time_ms: int,
    body: bytes,
    flags: int = 0,
) -> tuple[bytes, ...]:
    """Return a frame as parts to write in order."""
    size = len(body)
    covered = _COVERED.pack(
        _crc32c(body),
        size,
        shard,
        base_offset,
        records,
        last_delta,
        timestamp_min_ms,
        timestamp_max_ms,
        store_time_ms,
        kind,
        flags,
        0,
        0,
    )
    header = _FRONT.pack(MAGIC, _extend(seed, covered)) + covered
    padding = -size & 7
    return (header, body, _ZEROS[:padding]) if padding else (header, body)


def encode_deletes(seed: int, shard: int, offsets: Sequence[int], store_time_ms: int) -> tuple[bytes, ...]:
    """Return a frame that lists deleted offsets in ascending order."""
    base = offsets[0]
    body = array("q", offsets).tobytes()
    return encode_frame(seed, DELETES, shard, base, len(offsets), offsets[-1] - base, 0, 0, store_time_ms, body)


def decode_deletes(body: bytes) -> list[int]:
    offsets = array("q")
    try:
        offsets.frombytes(body)
    except ValueError:
        raise CorruptionError(f"a list of deleted offsets has {len(body)} bytes, not a multiple of 8") from None
    return offsets.tolist()


def decode_header(seed: int, raw: bytes, at: int = 0) -> Header:
    """Return the header at `at`. Raises CorruptionError if it is not valid."""
    if len(raw) - at < HEADER_BYTES:
        raise CorruptionError(f"{len(raw) - at} bytes are too few for a frame header")
    fields = HEADER.unpack_from(raw, at)
    if fields[0] != MAGIC:
        raise CorruptionError("no frame starts here")
    if fields[1] != _extend(seed, raw[at + 8 : at + HEADER_BYTES]):
        raise CorruptionError("the frame header does not match its checksum")
    header = Header._make(fields[2:13])
    if not _is_supported(header) or fields[13] or fields[14]:
        raise CorruptionError(f"unsupported frame: kind {header.kind}, flags {header.flags}, {header.body_bytes} bytes")
    return header


def _is_supported(header: Header) -> bool:
    return header.body_bytes <= BODY_BYTES_MAX and header.kind in _KINDS and not header.flags & ~_FLAGS


def claimed_header(seed: int, raw: bytes, at: int = 0) -> Header | None:
    """Guess the content of a header that does not match its checksum. Use it only for reports.

    The guess holds if changing one byte makes the checksum match, or if the body that follows matches.
    """
    if len(raw) - at < HEADER_BYTES:
        return None
    covered = bytearray(raw[at + 8 : at + HEADER_BYTES])
    stored = int.from_bytes(raw[at + 4 : at + 8], "little")
    syndrome = stored ^ _extend(seed, bytes(covered))
    one_byte_of_the_checksum = sum(syndrome >> shift & 0xFF != 0 for shift in (0, 8, 16, 24)) <= 1
    change = _changes().get(syndrome)
    if change is not None:
        covered[change[0]] ^= change[1]
    header = Header._make(_COVERED.unpack(covered)[:11])
    if not _is_supported(header):
        # Zeros are not a header, although they match the checksum of an empty body.
        return None
    if change is not None or one_byte_of_the_checksum:
        return header
    body = raw[at + HEADER_BYTES : at + HEADER_BYTES + header.body_bytes]
    return header if len(body) == header.body_bytes and _crc32c(body) == header.body_crc else None


@lru_cache(maxsize=1)
def _changes() -> dict[int, tuple[int, int]]:
    """Map the effect of each one-byte change on a header's checksum, which is linear, to (byte, bits)."""
    size = _COVERED.size
    nothing = _crc32c(bytes(size))
    found: dict[int, tuple[int, int]] = {}
    for at in range(size):
        for bits in range(1, 256):
            changed = bytearray(size)
            changed[at] = bits
            found[_crc32c(bytes(changed)) ^ nothing] = (at, bits)
    return found


def check_body(header: Header, body: bytes) -> None:
    if len(body) != header.body_bytes or _crc32c(body) != header.body_crc:
        raise CorruptionError(
            f"the frame of shard {header.shard}, offsets {header.base_offset} to {header.last_offset}, does not match "
            "its checksum"
        )


def records_of(header: Header, body: bytes, record_bytes_max: int) -> ColumnBatch | None:
    """Return the records of a frame whose body was checked, None if it has none.

    Raises LimitExceededError if a Kafka batch is too large when decompressed, UnsupportedCodecError if it cannot be.
    """
    if not header.records:
        return None
    return kafka.columns(body, record_bytes_max) if header.kind == KAFKA else decode_batch(header, body)


def decode_batch(header: Header, body: bytes) -> ColumnBatch:
    """Return the records of a COLUMNAR frame whose body was checked."""
    if header.kind != COLUMNAR:
        raise CorruptionError(f"a frame of kind {header.kind} has no columns")
    batch = ColumnBatch.decode(
        body, verified=True, timestamp_min_ms=header.timestamp_min_ms, timestamp_max_ms=header.timestamp_max_ms
    )
    if batch.count != header.records:
        raise CorruptionError(f"the frame header has {header.records} records, its body has {batch.count}")
    return batch
