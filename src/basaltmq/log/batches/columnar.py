"""The columnar body of a frame: the records of one batch as Arrow buffers.

    0            8                8 + 8b           each buffer 8-byte aligned, zeros between
    | count u32  | kind u16, 0u16 | buffer | buffer | ...
    | b u16, version u16 | length u32  (b times)    |

All fields are little-endian, as in Arrow. Buffers are in the order of their kinds, each kind at most once. The body
ends with the last buffer (padded). n is the count:

    1 value offsets i32[n+1]    2 value data
    3 key validity bits         4 key offsets i32[n+1]      5 key data          absent: no record has a key
    6 timestamp i64[n]          7 expire at i64[n]                              7 absent: none expires; 0: never
    8 tag lists i32[n+1]        9 tag offsets i32           10 tag data         absent: no record has tags
    11 header lists i32[n+1]    12 name offsets             13 name data
                                14 value offsets            15 value data       absent: no record has headers
    16 offset deltas i32[n]                                                     absent: dense, 0, 1, 2 ...
    17 value validity bits      18 header value validity bits                   absent: no value is null

A body has no absolute offset: the frame header has it, so a batch is encoded before its offset is known. Deltas exist
where cleaning removed records; they rise strictly.

Invariants: `decode` checks every length against the body and the ends of every offsets array against its data, so no
buffer reaches outside. It also checks that offsets rise, unless the caller states that a CRC `verified` the bytes. Then
wrong offsets could only cause wrong slices of plain records, never out-of-bounds access; `arrow` validates in full.

Cost for 100 records of 256 bytes: encode 25 us, decode 2 us, records 40 us. Arrow avoids record objects (see `arrow`).
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, compress, pairwise
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from basaltmq.errors import CorruptionError, InvalidArgumentError, LimitExceededError
from basaltmq.log.batches.record import RECORD_BYTES_MAX, UNSTAMPED, Headers, Record, StoredRecord

if TYPE_CHECKING:
    pass

BODY_BYTES_MAX: Final = 512 << 20
"""Limit of a frame's body: fits the largest record with its columns, and is far below the range of int32 offsets."""

BATCH_RECORDS_MAX: Final = 1 << 20
"""Records per batch: bounds what a reader unpacks at once."""

VERSION: Final = 1

VALUE_OFFSETS: Final = 1
VALUE_DATA: Final = 2
KEY_VALIDITY: Final = 3
KEY_OFFSETS: Final = 4
KEY_DATA: Final = 5
TIMESTAMPS: Final = 6
EXPIRIES: Final = 7
TAG_LISTS: Final = 8
TAG_OFFSETS: Final = 9
TAG_DATA: Final = 10
HEADER_LISTS: Final = 11
HEADER_NAME_OFFSETS: Final = 12
HEADER_NAMES: Final = 13
HEADER_VALUE_OFFSETS: Final = 14
HEADER_VALUES: Final = 15
OFFSET_DELTAS: Final = 16
VALUE_VALIDITY: Final = 17
HEADER_VALUE_VALIDITY: Final = 18
KINDS_MAX: Final = 18

DIRECTORIES_KEPT: Final = 1024
"""Cached directories. Batches of one producer are often alike. Parsing a directory costs more than a frame's CRC."""

SHAPES_KEPT: Final = 64
"""Cached sets of columns; few are in use."""

_GROUPS: Final = (
    (VALUE_OFFSETS, VALUE_DATA),
    (KEY_OFFSETS, KEY_DATA),
    (TAG_LISTS, TAG_OFFSETS, TAG_DATA),
    (HEADER_LISTS, HEADER_NAME_OFFSETS, HEADER_NAMES, HEADER_VALUE_OFFSETS, HEADER_VALUES),
)
"""Buffers that must occur together."""

_FIXED: Final = (
    (VALUE_OFFSETS, 4, 1),
    (KEY_OFFSETS, 4, 1),
    (TAG_LISTS, 4, 1),
    (HEADER_LISTS, 4, 1),
    (TIMESTAMPS, 8, 0),
    (EXPIRIES, 8, 0),
    (OFFSET_DELTAS, 4, 0),
)
"""Buffers whose length follows from the count: (kind, bytes per item, items in addition to the count)."""

_TARGETS: Final = (
    (VALUE_OFFSETS, VALUE_DATA, 1, 0),
    (KEY_OFFSETS, KEY_DATA, 1, 0),
    (TAG_LISTS, TAG_OFFSETS, 4, 4),
    (TAG_OFFSETS, TAG_DATA, 1, 0),
    (HEADER_LISTS, HEADER_NAME_OFFSETS, 4, 4),
    (HEADER_LISTS, HEADER_VALUE_OFFSETS, 4, 4),
    (HEADER_NAME_OFFSETS, HEADER_NAMES, 1, 0),
    (HEADER_VALUE_OFFSETS, HEADER_VALUES, 1, 0),
)
"""Targets of the offsets arrays: (kind, target, bytes per unit of its last offset, additional bytes)."""

_VALIDITIES: Final = (
    (KEY_VALIDITY, KEY_OFFSETS),
    (VALUE_VALIDITY, VALUE_OFFSETS),
    (HEADER_VALUE_VALIDITY, HEADER_VALUE_OFFSETS),
)
"""Null bitmaps and their columns."""

_DATA: Final = (VALUE_DATA, KEY_DATA, TAG_DATA, HEADER_NAMES, HEADER_VALUES)
"""Buffers that hold the records' own bytes."""

_HEAD: Final = Struct("<IHH")
_ENTRY: Final = Struct("<HHI")
_ZEROS: Final = bytes(8)
_SWAPPED: Final = sys.byteorder == "big"

Buffer: TypeAlias = "bytes | memoryview | array[int]"
Extent: TypeAlias = tuple[int, int]
"""Start and length of a buffer in its body, in bytes."""


class Directory(NamedTuple):
    """The parsed front of a body."""

    records: int
    extents: dict[int, Extent]
    size_bytes: int
    """Size of the whole body."""
    data_bytes: int
    """Bytes of values, keys, tags and headers of all records."""


class ColumnBatch:
    """Records of one shard as columns, in their on-disk bytes."""

    __slots__ = ("_body", "begin", "count", "extents", "source", "timestamp_max_ms", "timestamp_min_ms")

    def __init__(
        self,
        source: bytes,
        count: int,
        extents: dict[int, Extent],
        timestamp_min_ms: int,
        timestamp_max_ms: int,
        begin: int = 0,
        size_bytes: int = -1,
    ) -> None:
        """`source` is the body, or contains it at `begin`; then the body is sliced on demand."""
        self.source = source
        self.begin = begin
        self._body = source if size_bytes < 0 else size_bytes
        self.count = count
        self.extents = extents
        self.timestamp_min_ms = timestamp_min_ms
        self.timestamp_max_ms = timestamp_max_ms

    @property
    def body(self) -> bytes:
        body = self._body
        if isinstance(body, int):
            body = self._body = self.source[self.begin : self.begin + body]
        return body

    @property
    def last_delta(self) -> int:
        """Difference between the last offset and the base offset of the frame."""
        deltas = self.deltas()
        return self.count - 1 if deltas is None else deltas[-1]

    @classmethod
    def from_records(cls, records: Sequence[Record], stamp_ms: int, deltas: Sequence[int] | None = None) -> ColumnBatch:
        """Encode records that `check_record` accepted. Records without a time get `stamp_ms`."""
        count = len(records)
        if not 0 < count <= BATCH_RECORDS_MAX:
            raise LimitExceededError(f"a batch has 1 to {BATCH_RECORDS_MAX} records, not {count}; split it")
        times = [record.timestamp_ms for record in records]
        if UNSTAMPED in times:
            times = [stamp_ms if time_ms == UNSTAMPED else time_ms for time_ms in times]
        buffers: dict[int, Buffer] = {}
        value_bits = _put_nullable(buffers, VALUE_OFFSETS, VALUE_DATA, [record.value for record in records])
        keys = [record.key for record in records]
        if any(key is not None for key in keys):
            if None in keys:
                buffers[KEY_VALIDITY] = _bitmap([key is not None for key in keys])
            _put_binary(buffers, KEY_OFFSETS, KEY_DATA, [b"" if key is None else key for key in keys])
        buffers[TIMESTAMPS] = _pack("q", times)
        if any(record.expire_at_ms for record in records):
            buffers[EXPIRIES] = _pack("q", [record.expire_at_ms for record in records])
        tags = [record.tags for record in records]
        if any(tags):
            buffers[TAG_LISTS] = _pack("i", accumulate(map(len, tags), initial=0))
            _put_binary(buffers, TAG_OFFSETS, TAG_DATA, [tag for each in tags for tag in each])
        headers = [record.headers for record in records]
        header_bits: bytes | None = None
        if any(headers):
            buffers[HEADER_LISTS] = _pack("i", accumulate(map(len, headers), initial=0))
            _put_binary(
                buffers, HEADER_NAME_OFFSETS, HEADER_NAMES, [name.encode() for each in headers for name, _ in each]
            )
            contents = [value for each in headers for _, value in each]
            header_bits = _put_nullable(buffers, HEADER_VALUE_OFFSETS, HEADER_VALUES, contents)
        if deltas is not None:
            buffers[OFFSET_DELTAS] = _pack("i", deltas)
        if value_bits is not None:
            buffers[VALUE_VALIDITY] = value_bits
        if header_bits is not None:
            buffers[HEADER_VALUE_VALIDITY] = header_bits
        return assemble(count, buffers, min(times), max(times))

    def stamped(self, stamp_ms: int) -> ColumnBatch:
        """Return the batch with `stamp_ms` for records without a time."""
        begin, length = self.extents[TIMESTAMPS]
        times = [stamp_ms if time_ms == UNSTAMPED else time_ms for time_ms in self.timestamps()]
        body = b"".join((self.body[:begin], _pack("q", times), self.body[begin + length :]))
        return ColumnBatch(body, self.count, self.extents, min(times), max(times))

    @classmethod
    def decode(
        cls, body: bytes, *, verified: bool, timestamp_min_ms: int | None = None, timestamp_max_ms: int | None = None
    ) -> ColumnBatch:
        """Decode a frame's body. `verified`: a CRC over exactly these bytes was checked.

        The frame header has the times; without it they are read from the column.
        """
        count, extents, size, _ = directory_of(body)
        if size != len(body):
            raise CorruptionError(f"a batch of {len(body)} bytes claims {size} bytes")
        _check_ends(body, extents)
        batch = cls(body, count, extents, 0, 0)
        if not verified:
            batch.check_order()
        if timestamp_min_ms is None or timestamp_max_ms is None:
            times = batch.timestamps()
            timestamp_min_ms, timestamp_max_ms = min(times), max(times)
        batch.timestamp_min_ms = timestamp_min_ms
        batch.timestamp_max_ms = timestamp_max_ms
        return batch

    def records(self, base_offset: int) -> list[StoredRecord]:
        """Return every record with its offset."""
        count = self.count
        values = self.values()
        keys = self.keys()
        expiries = self.expiries() or [0] * count
        deltas = self.deltas() or range(count)
        times = self.timestamps()
        if TAG_LISTS not in self.extents and HEADER_LISTS not in self.extents:
            return [
                StoredRecord(value, key, (), (), time_ms, expire, offset=base_offset + delta)
                for value, key, time_ms, expire, delta in zip(values, keys, times, expiries, deltas, strict=True)
            ]
        return [
            StoredRecord(value, key, headers, tags, time_ms, expire, offset=base_offset + delta)
            for value, key, headers, tags, time_ms, expire, delta in zip(
                values, keys, self.headers(), self.tags(), times, expiries, deltas, strict=True
            )
        ]

    def values(self) -> Sequence[bytes | None]:
        return self._nullable(VALUE_OFFSETS, VALUE_DATA, VALUE_VALIDITY)

    def keys(self) -> Sequence[bytes | None]:
        if KEY_OFFSETS not in self.extents:
            return [None] * self.count
        return self._nullable(KEY_OFFSETS, KEY_DATA, KEY_VALIDITY)

    def tags(self) -> list[tuple[bytes, ...]]:
        if TAG_LISTS not in self.extents:
            return [()] * self.count
        items = self._binary(TAG_OFFSETS, TAG_DATA)
        return [tuple(items[begin:end]) for begin, end in pairwise(self._ints("i", TAG_LISTS))]

    def headers(self) -> list[Headers]:
        if HEADER_LISTS not in self.extents:
            return [()] * self.count
        try:
            names = [name.decode() for name in self._binary(HEADER_NAME_OFFSETS, HEADER_NAMES)]
        except UnicodeDecodeError:
            raise CorruptionError("a header name in a batch is not UTF-8") from None
        contents = self._nullable(HEADER_VALUE_OFFSETS, HEADER_VALUES, HEADER_VALUE_VALIDITY)
        items = list(zip(names, contents, strict=True))
        return [tuple(items[begin:end]) for begin, end in pairwise(self._ints("i", HEADER_LISTS))]

    def timestamps(self) -> Sequence[int]:
        return self._ints("q", TIMESTAMPS)

    def expiries(self) -> Sequence[int] | None:
        """Return the expiry time of each record (0: never), None if no record expires."""
        return self._ints("q", EXPIRIES) if EXPIRIES in self.extents else None

    def deltas(self) -> Sequence[int] | None:
        """Return offsets relative to the base, None if they are 0, 1, 2 ..."""
        return self._ints("i", OFFSET_DELTAS) if OFFSET_DELTAS in self.extents else None

    def count_below(self, delta: int) -> int:
        """Return how many records have an offset delta below the given one."""
        deltas = self.deltas()
        if deltas is None:
            return max(0, min(self.count, delta))
        return bisect_left(deltas, delta)

    def distinct_keys(self) -> set[bytes]:
        if KEY_OFFSETS not in self.extents:
            return set()
        if KEY_VALIDITY not in self.extents:
            return set(self._binary(KEY_OFFSETS, KEY_DATA))
        return {key for key in self.keys() if key is not None}

    def distinct_tags(self) -> set[bytes]:
        return set(self._binary(TAG_OFFSETS, TAG_DATA)) if TAG_LISTS in self.extents else set()

    def select(self, kept: Sequence[bool]) -> ColumnBatch | None:
        """Return the records marked in `kept` with their old offsets, None if there are none."""
        base = self.records(0)
        chosen = list(compress(base, kept))
        if not chosen:
            return None
        return ColumnBatch.from_records(chosen, 0, [record.offset for record in chosen])

    def check_sizes(self, record_bytes_max: int = RECORD_BYTES_MAX) -> None:
        """Reject a record over the limit. Check single records only if the whole batch is larger."""
        if len(self.body) <= record_bytes_max:
            return
        sizes = self.sizes()
        if max(sizes) > record_bytes_max:
            at = sizes.index(max(sizes))
            raise LimitExceededError(
                f"record {at} of the batch has {sizes[at]} bytes, over the limit of {record_bytes_max}; split it, "
                "store it elsewhere and send a reference, or raise record_bytes_max"
            )

    def sizes(self) -> list[int]:
        """Return the bytes of value, key, tags and headers of each record."""
        sizes = _lengths(self._ints("i", VALUE_OFFSETS))
        if KEY_OFFSETS in self.extents:
            sizes = [size + more for size, more in zip(sizes, _lengths(self._ints("i", KEY_OFFSETS)), strict=True)]
        for lists, *columns in ((TAG_LISTS, TAG_OFFSETS), (HEADER_LISTS, HEADER_NAME_OFFSETS, HEADER_VALUE_OFFSETS)):
            if lists not in self.extents:
                continue
            bounds = self._ints("i", lists)
            for column in columns:
                ends = self._ints("i", column)
                sizes = [
                    size + ends[end] - ends[begin] for size, (begin, end) in zip(sizes, pairwise(bounds), strict=True)
                ]
        return sizes

    def buffer(self, kind: int) -> memoryview | None:
        extent = self.extents.get(kind)
        if extent is None:
            return None
        begin, length = extent
        return memoryview(self.body)[begin : begin + length]

    def check_order(self) -> None:
        """Raise unless every offsets array rises from 0 and deltas rise strictly."""
        for kind in (
            VALUE_OFFSETS,
            KEY_OFFSETS,
            TAG_LISTS,
            TAG_OFFSETS,
            HEADER_LISTS,
            HEADER_NAME_OFFSETS,
            HEADER_VALUE_OFFSETS,
        ):
            if kind in self.extents:
                ends = self._ints("i", kind).tolist()
                # Sorting a sorted list is one pass in C.
                if ends != sorted(ends):
                    raise CorruptionError(f"buffer {kind} of a batch: offsets decrease")
        deltas = self.deltas()
        if deltas is not None and any(later <= earlier for earlier, later in pairwise(deltas)):
            raise CorruptionError("the offset deltas of a batch do not rise")

    def _ints(self, typecode: str, kind: int) -> array[int]:
        begin, length = self.extents[kind]
        ints = array(typecode)
        ints.frombytes(memoryview(self.body)[begin : begin + length])
        if _SWAPPED:
            ints.byteswap()
        return ints

    def _binary(self, offsets: int, data: int) -> list[bytes]:
        begin, _ = self.extents[data]
        body = self.body
        return [body[begin + start : begin + end] for start, end in pairwise(self._ints("i", offsets))]

    def _nullable(self, offsets: int, data: int, validity: int) -> Sequence[bytes | None]:
        items = self._binary(offsets, data)
        bitmap = self.buffer(validity)
        if bitmap is None:
            return items
        marks = f"{int.from_bytes(bitmap, 'little'):0{8 * len(bitmap)}b}"[::-1]
        return [item if mark == "1" else None for item, mark in zip(items, marks, strict=False)]


def assemble(count: int, buffers: dict[int, Buffer], timestamp_min_ms: int, timestamp_max_ms: int) -> ColumnBatch:
    """Build a batch from buffers in the order of their kinds."""
    parts: list[Buffer] = [_HEAD.pack(count, len(buffers), VERSION)]
    at = _HEAD.size + _ENTRY.size * len(buffers)
    extents: dict[int, Extent] = {}
    content: list[Buffer] = []
    for kind, data in buffers.items():
        length = memoryview(data).nbytes
        extents[kind] = (at, length)
        at += length
        if at > BODY_BYTES_MAX:
            raise LimitExceededError(f"a batch is over the limit of {BODY_BYTES_MAX} bytes; split it")
        parts.append(_ENTRY.pack(kind, 0, length))
        content.append(data)
        if at & 7:
            content.append(_ZEROS[: -at & 7])
            at += -at & 7
    return ColumnBatch(b"".join(parts + content), count, extents, timestamp_min_ms, timestamp_max_ms)


def directory_of(raw: bytes, begin: int = 0) -> Directory:
    """Return the directory of the body at `begin`."""
    if len(raw) - begin < _HEAD.size:
        raise CorruptionError(f"a batch of {len(raw) - begin} bytes is too short")
    kinds = raw[begin + 4] | raw[begin + 5] << 8
    return read_directory(raw[begin : begin + directory_bytes(kinds)])


def directory_bytes(buffers: int) -> int:
    """Return the size of a body's front with this many buffers."""
    return _HEAD.size + _ENTRY.size * buffers


@lru_cache(maxsize=DIRECTORIES_KEPT)
def read_directory(directory: bytes) -> Directory:
    """Parse a directory and check every length against the count. The caller must compare the total size."""
    count, buffers, version = _HEAD.unpack_from(directory)
    if version != VERSION:
        raise CorruptionError(f"a batch has version {version}; this Basalt reads version {VERSION}")
    if not 0 < count <= BATCH_RECORDS_MAX or not 0 < buffers <= KINDS_MAX:
        raise CorruptionError(f"a batch claims {count} records in {buffers} buffers, which is out of range")
    at = directory_bytes(buffers)
    if at != len(directory):
        raise CorruptionError(f"the directory of a batch has {len(directory)} bytes, too few for {buffers} buffers")
    numbers = _entries(buffers).unpack_from(directory, _HEAD.size)
    # A kind is read together with the reserved zero after it, so a non-zero reserved field makes it invalid.
    kinds, lengths = numbers[::2], numbers[1::2]
    fixed, data, offsets, validities = _shape(kinds)
    extents: dict[int, Extent] = {}
    for kind, length in zip(kinds, lengths, strict=True):
        extents[kind] = (at, length)
        at += length + (-length & 7)
    for place, unit, extra in fixed:
        if lengths[place] != unit * (count + extra):
            raise CorruptionError(
                f"buffer {kinds[place]} of a batch has {lengths[place]} bytes, not {unit * (count + extra)}"
            )
    for place in validities:
        items = _items(kinds[place], count, extents)
        if lengths[place] != (items + 7) // 8:
            raise CorruptionError(f"buffer {kinds[place]} of a batch has {lengths[place]} bytes for {items} bits")
    for place in offsets:
        if lengths[place] < 4 or lengths[place] % 4:
            raise CorruptionError(f"buffer {kinds[place]} of a batch has {lengths[place]} bytes, not an offsets array")
    data_bytes = 0
    for place in data:
        data_bytes += lengths[place]
    return Directory(count, extents, at, data_bytes)


def _items(validity: int, count: int, extents: dict[int, Extent]) -> int:
    """Return the number of items in a validity bitmap: records, or headers of all records."""
    return extents[HEADER_VALUE_OFFSETS][1] // 4 - 1 if validity == HEADER_VALUE_VALIDITY else count


@lru_cache(maxsize=KINDS_MAX)
def _entries(buffers: int) -> Struct:
    return Struct("<" + buffers * "II")


class Shape(NamedTuple):
    """Positions of buffers in the directory, derived from the kinds present."""

    fixed: tuple[tuple[int, int, int], ...]
    """Those in `_FIXED`, with their item sizes."""
    data: tuple[int, ...]
    """Those in `_DATA`."""
    offsets: tuple[int, ...]
    """Offsets arrays whose length does not follow from the count."""
    validities: tuple[int, ...]
    """Null bitmaps."""


@lru_cache(maxsize=SHAPES_KEPT)
def _shape(kinds: tuple[int, ...]) -> Shape:
    """Check that kinds are in order and columns complete, and return their positions."""
    if kinds[0] < 1 or kinds[-1] > KINDS_MAX or any(later <= kind for kind, later in pairwise(kinds)):
        raise CorruptionError(f"the directory of a batch is out of order: {kinds}")
    for group in _GROUPS:
        present = [kind for kind in group if kind in kinds]
        if present and len(present) != len(group):
            raise CorruptionError(f"a batch has buffers {present}, but requires all of {list(group)}")
    if VALUE_OFFSETS not in kinds or TIMESTAMPS not in kinds:
        raise CorruptionError("a batch has no values or no timestamps")
    for validity, column in _VALIDITIES:
        if validity in kinds and column not in kinds:
            raise CorruptionError(f"a batch has buffer {validity} without its column, buffer {column}")
    free = (TAG_OFFSETS, HEADER_NAME_OFFSETS, HEADER_VALUE_OFFSETS)
    return Shape(
        tuple((kinds.index(kind), unit, extra) for kind, unit, extra in _FIXED if kind in kinds),
        tuple(kinds.index(kind) for kind in _DATA if kind in kinds),
        tuple(kinds.index(kind) for kind in free if kind in kinds),
        tuple(kinds.index(validity) for validity, _ in _VALIDITIES if validity in kinds),
    )


def _check_ends(body: bytes, extents: dict[int, Extent]) -> None:
    """Raise unless every offsets array starts at 0 and ends at the end of its data."""
    for kind, target, unit, extra in _TARGETS:
        extent = extents.get(kind)
        if extent is None:
            continue
        begin, length = extent
        first = _int32(body, begin)
        last = _int32(body, begin + length - 4)
        if first != 0 or last * unit + extra != extents[target][1]:
            raise CorruptionError(f"buffer {kind} of a batch runs from {first} to {last}, outside buffer {target}")
    if OFFSET_DELTAS in extents and _int32(body, extents[OFFSET_DELTAS][0]) < 0:
        raise CorruptionError("the first offset delta of a batch is negative")


def _int32(body: bytes, at: int) -> int:
    return int.from_bytes(body[at : at + 4], "little", signed=True)


def _put_nullable(buffers: dict[int, Buffer], offsets: int, data: int, items: Sequence[bytes | None]) -> bytes | None:
    """Add a column and return its null bitmap, None if it has no nulls."""
    try:
        # Most columns have no nulls; `len` raises at the first one without a separate pass.
        _put_binary(buffers, offsets, data, items)  # type: ignore[arg-type]
        return None
    except TypeError:
        _put_binary(buffers, offsets, data, [b"" if item is None else item for item in items])
        return _bitmap([item is not None for item in items])


def _put_binary(buffers: dict[int, Buffer], offsets: int, data: int, items: Sequence[bytes]) -> None:
    sizes = list(map(len, items))
    try:
        buffers[offsets] = _pack("i", accumulate(sizes, initial=0))
    except OverflowError:
        raise LimitExceededError(f"a batch is over the limit of {BODY_BYTES_MAX} bytes; split it") from None
    buffers[data] = b"".join(items)


def _pack(typecode: str, ints: Iterable[int]) -> array[int]:
    try:
        packed = array(typecode, ints)
    except TypeError as error:
        raise InvalidArgumentError(f"an integer column has other values: {error}") from error
    if _SWAPPED:
        packed.byteswap()
    return packed


def _bitmap(bits: Sequence[bool]) -> bytes:
    text = "".join("1" if bit else "0" for bit in reversed(bits))
    return int(text, 2).to_bytes((len(bits) + 7) // 8, "little")


def _lengths(offsets: array[int]) -> list[int]:
    return [end - begin for begin, end in pairwise(offsets)]
