"""Kafka record batches (format v2): stored unchanged, placed in a shard, and decoded on demand.

     0             8              12             16      17    21           23                27
     | base offset | batch length | leader epoch | magic | crc | attributes | last offset delta | ...
     | i64         | i32          | i32          | i8, 2 | u32 | i16        | i32               |
     27               35              43            51               53              57             61
     | base timestamp | max timestamp | producer id | producer epoch | base sequence | record count | records |
     | i64            | i64           | i64         | i16            | i32           | i32          |         |

Big-endian. The batch length counts the bytes after it. The CRC32C covers everything from the attributes on, so a broker
can set the base offset and the leader epoch without a new CRC. Only log-append time changes covered bytes.

    record   | length | attributes i8 | timestamp delta | offset delta | key length, key | value length, value |
             | headers | (name length, name | value length, value)* |        all numbers zigzag varints, -1 for null

The header has everything a frame needs (count, offsets, times). So appending, recovery, rebuild, verification and
retention never decode records. `RecordReader` and `columns` do. Control batches (transaction markers) have no records
for readers: their frames count only offsets. Null keys, values and header values stay null.

The largest time is the header's. The smallest is assumed to be the base timestamp, that of the first record, which may
not be the smallest. Checking and placing a batch of 27 KB takes 3 us; decoding takes 3 us per record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Final, NamedTuple

import google_crc32c

from basaltmq.errors import CorruptionError, InvalidArgumentError, LimitExceededError, TimestampRangeError
from basaltmq.log.batches.codecs import NONE, compress, pieces
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.record import RECORD_BYTES_MAX, TIMESTAMP_MS_MAX, Headers, StoredRecord
from basaltmq.varints import varint

MAGIC: Final = 2
HEADER_BYTES: Final = 61

COMPRESSION: Final = 0x07
LOG_APPEND_TIME: Final = 0x08
TRANSACTIONAL: Final = 0x10
CONTROL: Final = 0x20

RECORDS_MAX: Final = 100_000
"""Most records in an appended batch, the same as for all other protocols. Batches of older versions may have more."""

DECOMPRESSED_BYTES_MIN: Final = 32 << 20
"""Smallest limit of a decompressed batch: twice the default record limit. Producers fill batches of 16 KiB to 1 MiB,
counted before compression."""

RECORD_FRAMING_BYTES: Final = 64 << 10
"""Room for lengths and numbers of a record in addition to its content: enough for 1,024 headers."""

VARINT_BYTES_MAX: Final = 10
"""Bytes of a varint with 64 bits."""

NO_TIMESTAMP: Final = -1
NO_PRODUCER: Final = -1

ABORT: Final = 0
COMMIT: Final = 1
"""Outcome of a transaction, in the key of the marker's only record."""

_HEADER: Final = Struct(">qiibIhiqqqhii")
_OFFSET: Final = Struct(">q")
_MARKER_KEY: Final = Struct(">hh")
"""Version and kind."""
_MARKER_VALUE: Final = Struct(">hi")
"""Version and coordinator epoch."""
_UNCOVERED: Final = Struct(">qiibI")
_COVERED: Final = Struct(">hiqqqhii")
_CRC: Final = Struct(">I")
_CRC_AT: Final = 17
_COVERED_AT: Final = 21
_PREFIX_BYTES: Final = 12
"""Base offset and batch length, which the length does not count."""

_crc32c = google_crc32c.value


class KafkaHeader(NamedTuple):
    """The header of a batch."""

    base_offset: int
    batch_length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    records: int

    @property
    def size_bytes(self) -> int:
        return _PREFIX_BYTES + self.batch_length

    @property
    def codec(self) -> int:
        return self.attributes & COMPRESSION

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL) and self.producer_id >= 0


class KafkaBatch:
    """A batch to append, in the form that the segment engine appends."""

    __slots__ = ("body", "count", "extents", "offsets", "timestamp_max_ms", "timestamp_min_ms")

    def __init__(self, body: bytes, count: int, offsets: int, timestamp_min_ms: int, timestamp_max_ms: int) -> None:
        self.body = body
        self.count = count
        """Records for readers: none in a control batch."""
        self.offsets = offsets
        """Number of offsets used."""
        self.timestamp_min_ms = timestamp_min_ms
        self.timestamp_max_ms = timestamp_max_ms
        self.extents: dict[int, tuple[int, int]] = {}
        """Empty: a Kafka batch has no columns."""

    def placed(self, base_offset: int) -> KafkaBatch:
        """Return the batch at a base offset of the shard."""
        body = _OFFSET.pack(base_offset) + self.body[_OFFSET.size :]
        return KafkaBatch(body, self.count, self.offsets, self.timestamp_min_ms, self.timestamp_max_ms)


def read_header(raw: bytes) -> KafkaHeader:
    """Return the header of a batch, without further checks."""
    if len(raw) < HEADER_BYTES:
        raise CorruptionError(f"{len(raw)} bytes are too few for a Kafka record batch")
    return KafkaHeader._make(_HEADER.unpack_from(raw))


def check_batch(raw: bytes) -> KafkaHeader:
    """Reject anything but one complete, valid producer batch of this format."""
    header = read_header(raw)
    if header.magic != MAGIC:
        raise InvalidArgumentError(
            f"a record batch has format {header.magic}; this broker accepts format {MAGIC} (Kafka 0.11 or later)"
        )
    if header.size_bytes != len(raw):
        raise CorruptionError(f"a record batch of {len(raw)} bytes claims {header.size_bytes} bytes")
    if _crc32c(raw[_COVERED_AT:]) != header.crc:
        raise CorruptionError("a record batch does not match its checksum; it was damaged in transit")
    if not 0 < header.records <= RECORDS_MAX or header.last_offset_delta != header.records - 1:
        raise InvalidArgumentError(
            f"a record batch has {header.records} records and last offset delta {header.last_offset_delta}; "
            f"send 1 to {RECORDS_MAX} records without gaps"
        )
    for time_ms in (header.base_timestamp_ms, header.max_timestamp_ms):
        if not NO_TIMESTAMP <= time_ms <= TIMESTAMP_MS_MAX:
            raise TimestampRangeError(
                f"timestamp {time_ms} of a record batch is out of range: 0 to {TIMESTAMP_MS_MAX} ms (year 9999)"
            )
    return header


def incoming(raw: bytes, now_ms: int, *, is_append_time: bool = False) -> KafkaBatch:
    """Check a producer's batch and return it. With log-append time its records get the broker's time."""
    header = check_batch(raw)
    least_ms, largest_ms = header.base_timestamp_ms, header.max_timestamp_ms
    if is_append_time:
        raw = _stamped(raw, header, now_ms)
    if is_append_time or largest_ms < 0:
        least_ms = largest_ms = now_ms
    elif not 0 <= least_ms < largest_ms:
        least_ms = largest_ms
    count = 0 if header.is_control else header.records
    return KafkaBatch(raw, count, header.records, least_ms, largest_ms)


def _stamped(raw: bytes, header: KafkaHeader, now_ms: int) -> bytes:
    covered = _COVERED.pack(header.attributes | LOG_APPEND_TIME, *header[6:8], now_ms, *header[9:]) + raw[HEADER_BYTES:]
    return raw[:_CRC_AT] + _CRC.pack(_crc32c(covered)) + covered


def recompressed(raw: bytes, codec: int, level: int | None, record_bytes_max: int) -> bytes:
    """Return a producer's batch compressed with another codec."""
    header = check_batch(raw)
    content = raw[HEADER_BYTES:]
    if header.codec != NONE:
        content = b"".join(pieces(header.codec, content, decompressed_bytes_max(record_bytes_max)))
    content = compress(codec, content, level)
    covered = _COVERED.pack(header.attributes & ~COMPRESSION | codec, *header[6:]) + content
    return _assembled(header.base_offset, header.leader_epoch, covered)


def _assembled(base_offset: int, leader_epoch: int, covered: bytes) -> bytes:
    """Return a batch from the part that its CRC covers."""
    size = _COVERED_AT - _PREFIX_BYTES + len(covered)
    return _UNCOVERED.pack(base_offset, size, leader_epoch, MAGIC, _crc32c(covered)) + covered


def decompressed_bytes_max(record_bytes_max: int) -> int:
    """Return the limit of a decompressed batch in a topic with this record limit."""
    return max(DECOMPRESSED_BYTES_MIN, 2 * record_bytes_max)


def columns(raw: bytes, record_bytes_max: int = RECORD_BYTES_MAX) -> ColumnBatch:
    """Return the records of a checked batch as columns."""
    header = read_header(raw)
    found = records(raw, record_bytes_max)
    deltas = [record.offset - header.base_offset for record in found]
    is_dense = deltas == list(range(len(found)))
    return ColumnBatch.from_records(found, max(0, header.max_timestamp_ms), None if is_dense else deltas)


def records(raw: bytes, record_bytes_max: int = RECORD_BYTES_MAX) -> list[StoredRecord]:
    """Return every record of a batch with its offset, including markers of control batches."""
    return list(RecordReader(raw, record_bytes_max))


class RecordReader:
    """Reads the records of a batch in order, one at a time, and decompresses only as much as required.

    Memory is bounded by the batch, one piece and the largest record.
    """

    __slots__ = (
        "_append_ms",
        "_at",
        "_base_ms",
        "_base_offset",
        "_data",
        "_is_dense",
        "_is_plain",
        "_last_offset",
        "_left",
        "_pieces",
        "_record_bytes_max",
        "next",
    )

    def __init__(self, raw: bytes, record_bytes_max: int = RECORD_BYTES_MAX) -> None:
        header = read_header(raw)
        content = raw[HEADER_BYTES : header.size_bytes]
        self._is_plain = header.codec == NONE
        self._data = content if self._is_plain else b""
        self._pieces: Iterator[bytes] = iter(())
        if not self._is_plain:
            self._pieces = pieces(header.codec, content, decompressed_bytes_max(record_bytes_max))
        self._record_bytes_max = record_bytes_max + RECORD_FRAMING_BYTES
        self._at = 0
        self._left = header.records
        self._is_dense = header.last_offset_delta == header.records - 1
        self._base_offset = header.base_offset
        self._last_offset = header.base_offset + header.last_offset_delta
        self._base_ms = header.base_timestamp_ms
        self._append_ms = header.max_timestamp_ms if header.attributes & LOG_APPEND_TIME else None
        self.next = header.base_offset
        """The smallest possible offset of the next record."""

    def __iter__(self) -> Iterator[StoredRecord]:
        return self

    def __next__(self) -> StoredRecord:
        if not self._left:
            # Read to the end of compressed data, which has the checksum.
            for _ in self._pieces:
                pass
            raise StopIteration
        length = self._length()
        if length > self._record_bytes_max:
            self._check_length(length)
        if self._at + length > len(self._data):
            self._need(length)
        self._left -= 1
        data, end = self._data, self._at + length
        try:
            time_delta, at = _varint(data, self._at + 1)
            delta, at = _varint(data, at)
            key, at = _bytes(data, at, end)
            value, at = _bytes(data, at, end)
            headers, at = _headers(data, at, end)
        except IndexError:
            raise CorruptionError("a record batch ends inside a record") from None
        if at != end:
            raise CorruptionError(f"a record ends at byte {at}, but its length requires {end}")
        offset = self._base_offset + delta
        if offset > self._last_offset or (offset != self.next if self._is_dense else offset < self.next):
            raise CorruptionError(f"a record at offset {offset} follows one at {self.next - 1}")
        time_ms = self._base_ms + time_delta if self._append_ms is None else self._append_ms
        # Only the header is checked on arrival. Wrong times in records must not make the batch unreadable.
        time_ms = min(max(NO_TIMESTAMP, time_ms), TIMESTAMP_MS_MAX)
        self.next = offset + 1
        self._at = end
        return StoredRecord(value, key, headers, (), time_ms, 0, offset=offset)

    def _check_length(self, length: int) -> None:
        if not self._is_plain:
            raise LimitExceededError(
                f"the record at offset {self.next} has {length} bytes when decompressed, over the limit of "
                f"{self._record_bytes_max}; send smaller records, or raise the topic's max.message.bytes"
            )

    def skip_to(self, offset: int) -> None:
        """Skip the records below an offset. Without offset gaps they are not decoded."""
        if not self._is_dense:
            return
        while self.next < offset and self._left:
            length = self._length()
            while self._at + length > len(self._data):
                length -= len(self._data) - self._at
                self._data, self._at = next(self._pieces, b""), 0
                if not self._data:
                    raise CorruptionError("a record batch ends inside a record")
            self._at += length
            self._left -= 1
            self.next += 1

    def _length(self) -> int:
        """Read the length of the next record."""
        if len(self._data) - self._at < VARINT_BYTES_MAX and not self._is_plain:
            self._need(VARINT_BYTES_MAX, is_exact=False)
        try:
            length, self._at = _varint(self._data, self._at)
        except IndexError:
            raise CorruptionError("a record batch ends inside a record") from None
        if length < 0:
            raise CorruptionError(f"a record has a negative length of {length} bytes")
        return length

    def _need(self, size_bytes: int, *, is_exact: bool = True) -> None:
        """Load `size_bytes` from `_at` on, or fewer at the end unless `is_exact`."""
        have = len(self._data) - self._at
        if have >= size_bytes:
            return
        gathered = [self._data[self._at :]]
        while have < size_bytes:
            piece = next(self._pieces, None)
            if piece is None:
                if is_exact:
                    raise CorruptionError(f"a record of {size_bytes} bytes exceeds its batch")
                break
            gathered.append(piece)
            have += len(piece)
        self._data, self._at = b"".join(gathered), 0


def encode_records(found: Sequence[StoredRecord], leader_epoch: int = 0) -> bytes:
    """Encode one or more ascending records as an uncompressed batch. Offset gaps are kept."""
    base = found[0].offset
    base_ms = found[0].timestamp_ms
    parts: list[bytes] = []
    for record in found:
        body = b"".join(
            (
                b"\x00",
                _zigzag(record.timestamp_ms - base_ms),
                _zigzag(record.offset - base),
                _prefixed(record.key),
                _prefixed(record.value),
                _zigzag(len(record.headers)),
                *(part for name, value in record.headers for part in (_prefixed(name.encode()), _prefixed(value))),
            )
        )
        parts += (_zigzag(len(body)), body)
    largest_ms = max(record.timestamp_ms for record in found)
    covered = _COVERED.pack(
        0, found[-1].offset - base, base_ms, largest_ms, NO_PRODUCER, NO_PRODUCER, NO_PRODUCER, len(found)
    ) + b"".join(parts)
    return _assembled(base, leader_epoch, covered)


def empty_batch(base_offset: int, last_offset_delta: int) -> bytes:
    """Return a batch that uses offsets but has no records, for a batch whose records were all deleted."""
    covered = _COVERED.pack(0, last_offset_delta, NO_TIMESTAMP, NO_TIMESTAMP, NO_PRODUCER, NO_PRODUCER, NO_PRODUCER, 0)
    return _assembled(base_offset, 0, covered)


def marker_batch(producer_id: int, producer_epoch: int, is_commit: bool, now_ms: int) -> bytes:
    """Return the control batch that ends a producer's transaction in a shard."""
    key = _prefixed(_MARKER_KEY.pack(0, COMMIT if is_commit else ABORT))
    record = b"\x00\x00\x00" + key + _prefixed(_MARKER_VALUE.pack(0, 0)) + b"\x00"
    attributes = TRANSACTIONAL | CONTROL
    covered = _COVERED.pack(attributes, 0, now_ms, now_ms, producer_id, producer_epoch, NO_PRODUCER, 1)
    covered += _zigzag(len(record)) + record
    return _assembled(0, 0, covered)


def read_marker(raw: bytes) -> bool | None:
    """Whether a control batch commits its producer's transaction. None if it is not a transaction marker."""
    found = records(raw)
    key = found[0].key if found else None
    if key is None or len(key) < _MARKER_KEY.size:
        return None
    kind = _MARKER_KEY.unpack_from(key)[1]
    return kind == COMMIT if kind in {ABORT, COMMIT} else None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    at += 1
    if byte < 0x80:
        return byte >> 1 ^ -(byte & 1), at
    number = byte & 0x7F
    shift = 7
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number >> 1 ^ -(number & 1), at
        shift += 7
        if shift > 63:
            raise CorruptionError("a number in a record batch has more than 64 bits")


def _bytes(data: bytes, at: int, end: int) -> tuple[bytes | None, int]:
    length, at = _varint(data, at)
    if length < 0:
        return None, at
    if length > end - at:
        raise CorruptionError(f"a field of {length} bytes at byte {at} exceeds its record")
    return data[at : at + length], at + length


def _headers(data: bytes, at: int, end: int) -> tuple[Headers, int]:
    count, at = _varint(data, at)
    if count == 0:
        return (), at
    if not 0 < count <= end - at:
        raise CorruptionError(f"a record claims {count} headers in {end - at} bytes")
    headers = []
    for _ in range(count):
        name, at = _bytes(data, at, end)
        value, at = _bytes(data, at, end)
        try:
            headers.append(((name or b"").decode(), value))
        except UnicodeDecodeError:
            raise CorruptionError("a header name in a record batch is not UTF-8") from None
    return tuple(headers), at


def _zigzag(number: int) -> bytes:
    return varint(number << 1 if number >= 0 else (-number << 1) - 1)


def _prefixed(content: bytes | None) -> bytes:
    return b"\x01" if content is None else _zigzag(len(content)) + content
