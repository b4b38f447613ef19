"""A frame: one batch of one shard in the log, with its checksums.

     0        4            8          12           16     24           32     36
     | magic  | header crc | body crc | body bytes | shard | base offset | count | last delta |
     | u32    | u32        | u32      | u32        | u64   | u64         | u32   | u32        |
     40       48       56           64     65     66       68       72
     | min ts | max ts   | store time | kind | flags | 0 u16 | 0 u32 | body, zeros to a multiple of 8 |
     | i64    | i64      | i64        | u8   | u8    |       |       |                                |

All little-endian. Frames begin at multiples of 8, so a columnar body's buffers are aligned in the file. The header
CRC32C covers the header after itself (the body's CRC and length included), so an intact header names the shard and the
offsets that a damaged body has lost. It begins with the lane's seed, a secret number: a record whose value looks like
a frame cannot be taken for one when recovery searches damaged bytes for the next frame. Reserved bytes are zero and
are checked; padding is not covered, and nothing depends on it.

Kinds: COLUMNAR is a batch of records; KAFKA a Kafka v2 record batch kept as it came (see `kafka`); DELETES a list of
deleted offsets of the shard (i64 each); TRIM says the shard's records below its base offset are gone; DROP that the
shard is. Only the first two take part in the shard's run of offsets. A frame whose bit RELOCATED is set is a later
copy of one with the same last offset: with fewer records (REWRITTEN) where compaction took some out. AWAITED is set
where a write asked to be durable in a shard whose writes do not.

Not here: files (`segment`), what to do with damage (`recovery`). Budget: encode 5 us, of which 2.3 are the CRC of
27 KB; decode the same and one copy of the body, because the CRC function takes bytes only.
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
"""Asked to be durable, in a shard whose writes are not: it and what follows it is not to be seen before."""

HEADER: Final = Struct("<IIIIQQIIqqqBBHI")
"""All of a header; `Header` without magic, its own checksum and what is reserved."""
PLAIN_HEADER: Final = Struct("<IIIIQQIIqqqQ")
"""The same with all that follows the times as one number, which is COLUMNAR for a frame of records without flags."""
_COVERED: Final = Struct("<IIQQIIqqqBBHI")
_FRONT: Final = Struct("<II")
_KINDS: Final = range(COLUMNAR, DROP + 1)
_FLAGS: Final = RELOCATED | REWRITTEN | AWAITED
_ZEROS: Final = bytes(ALIGNMENT)
_crc32c = google_crc32c.value
_extend = google_crc32c.extend


HeaderFields: TypeAlias = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int, int, int]
"""What HEADER unpacks."""
PlainFields: TypeAlias = tuple[int, int, int, int, int, int, int, int, int, int, int, int]
"""What PLAIN_HEADER unpacks."""


class Header(NamedTuple):
    """What a frame's header says, in the order of its bytes."""

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
        """Header, body and padding."""
        return frame_bytes(self.body_bytes)


def frame_bytes(body_bytes: int) -> int:
    """What a frame takes in the log."""
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
    """A frame in parts, to be written one after the other."""
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


def encode_batch(
    seed: int, shard: int, base_offset: int, batch: ColumnBatch, store_time_ms: int, flags: int = 0
) -> tuple[bytes, ...]:
    """A frame of records."""
    return encode_frame(
        seed,
        COLUMNAR,
        shard,
        base_offset,
        batch.count,
        batch.last_delta,
        batch.timestamp_min_ms,
        batch.timestamp_max_ms,
        store_time_ms,
        batch.body,
        flags,
    )


def encode_deletes(seed: int, shard: int, offsets: Sequence[int], store_time_ms: int) -> tuple[bytes, ...]:
    """A frame that says which offsets (ascending) are deleted."""
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
    """The header at `at`; CorruptionError if it is not one."""
    if len(raw) - at < HEADER_BYTES:
        raise CorruptionError(f"{len(raw) - at} bytes are too few for a frame's header")
    fields = HEADER.unpack_from(raw, at)
    if fields[0] != MAGIC:
        raise CorruptionError("no frame begins here")
    if fields[1] != _extend(seed, raw[at + 8 : at + HEADER_BYTES]):
        raise CorruptionError("a frame's header does not match its checksum")
    header = Header._make(fields[2:13])
    if (
        header.body_bytes > BODY_BYTES_MAX
        or header.kind not in _KINDS
        or header.flags & ~_FLAGS
        or fields[13]
        or fields[14]
    ):
        raise CorruptionError(
            f"a frame of kind {header.kind}, flags {header.flags} and {header.body_bytes} bytes is not of this version"
        )
    return header


def claimed_header(seed: int, raw: bytes, at: int = 0) -> Header | None:
    """What a header that does not match its checksum most likely said: for a report, no more.

    Taken to be so if changing one byte makes it match, or if the body that follows matches it.
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
    if change is not None or one_byte_of_the_checksum:
        return header
    body = raw[at + HEADER_BYTES : at + HEADER_BYTES + header.body_bytes]
    return header if len(body) == header.body_bytes and _crc32c(body) == header.body_crc else None


@lru_cache(maxsize=1)
def _changes() -> dict[int, tuple[int, int]]:
    """What each change of one byte does to a header's checksum, which is linear: (byte, bits) by their effect."""
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
    """What a frame of records, whose body was checked, has for a reader; None if nothing.

    LimitExceededError for a Kafka batch that is too large when decompressed, UnsupportedCodecError if it cannot be.
    """
    if not header.records:
        return None
    return kafka.columns(body, record_bytes_max) if header.kind == KAFKA else decode_batch(header, body)


def decode_batch(header: Header, body: bytes) -> ColumnBatch:
    """The records of a COLUMNAR frame whose body was checked."""
    if header.kind != COLUMNAR:
        raise CorruptionError(f"a frame of kind {header.kind} has no columns")
    batch = ColumnBatch.decode(
        body, verified=True, timestamp_min_ms=header.timestamp_min_ms, timestamp_max_ms=header.timestamp_max_ms
    )
    if batch.count != header.records:
        raise CorruptionError(f"a frame says {header.records} records, its body has {batch.count}")
    return batch
