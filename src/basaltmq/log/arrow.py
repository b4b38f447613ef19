"""Conversion between record batches and Arrow, without a Python object per record.

Only this module and `codecs` import pyarrow (the `arrow` extra). Reading copies the bytes of a batch once, into the
body of an IPC message (see `ipc`), and the arrays point into it. Offsets are generated, and an expiry of 0 becomes
null. Writing uses the buffers of an Arrow batch as they are. Sliced arrays are first moved to offset 0, other types
are cast.

Null keys, values and header values are null on both sides. Reading returns nulls for a column that a batch lacks
(empty lists for headers and tags). Writing omits missing columns, except the timestamp, which the engine sets, and
ignores `offset`, which the shard assigns. A time above TIMESTAMP_MS_MAX, stored by older versions, is returned as
TIMESTAMP_MS_MAX, because conversion to microseconds or `datetime` would fail.

Budget for 100 records of 256 bytes: 8 us to read, 30 us to write; 3 us to read within a joined batch of 4,000.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

from basaltmq import errors
from basaltmq.errors import CorruptionError, InvalidArgumentError, LimitExceededError, TimestampRangeError
from basaltmq.log.batches import columnar
from basaltmq.log.batches.columnar import BATCH_RECORDS_MAX, BODY_BYTES_MAX, Buffer, ColumnBatch
from basaltmq.log.batches.ipc import MessageHead
from basaltmq.log.batches.record import TIMESTAMP_MS_MAX, UNSTAMPED, StoredRecord
from basaltmq.log.run import Run

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.ipc
except ImportError:
    raise errors.EnvironmentMissingError(f"Arrow columns need pyarrow: {errors.install_hint('arrow')}") from None

_MS: Final = pa.timestamp("ms", tz="UTC")
_BINARY: Final = pa.binary()
_INT64: Final = pa.int64()
_INT32: Final = pa.int32()
_HEADER: Final = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
_HEADERS: Final = pa.list_(_HEADER)
_TAGS: Final = pa.list_(pa.binary())

SCHEMA: Final = pa.schema(
    [
        pa.field("offset", _INT64, nullable=False),
        pa.field("timestamp", _MS, nullable=False),
        pa.field("key", _BINARY),
        pa.field("value", _BINARY),
        pa.field("headers", _HEADERS),
        pa.field("tags", _TAGS),
        pa.field("expire_at", _MS),
    ]
)
"""The Arrow schema of a stream."""

HEADS_KEPT: Final = 1024
"""Cached IPC heads, about 2 KB each. Batches of one producer tend to be alike."""

_SIMPLE: Final = frozenset(
    (
        columnar.VALUE_OFFSETS,
        columnar.VALUE_DATA,
        columnar.TIMESTAMPS,
        columnar.KEY_VALIDITY,
        columnar.KEY_OFFSETS,
        columnar.KEY_DATA,
    )
)
"""Buffers of batches that are joined column by column."""

_VALIDITIES: Final = frozenset((columnar.KEY_VALIDITY, columnar.VALUE_VALIDITY, columnar.HEADER_VALUE_VALIDITY))

STEPS_KEPT: Final = 32
"""Cached offsets of uniform runs, 16 to 64 KB each, because a reader meets the same layout repeatedly."""

OFFSETS_WINDOW: Final = 1 << 16
WINDOWS_KEPT: Final = 64
"""Cached windows of consecutive offsets, 512 KB each, because readers of one shard stay in a window for a while."""


def to_arrow(batch: ColumnBatch, base_offset: int, *, verified: bool = True) -> pa.RecordBatch:
    """Convert a batch to Arrow. Unverified bytes are validated in full."""
    extents = batch.extents
    nulls = _nulls(batch)
    body = batch.body
    head = _head(body[: columnar.directory_bytes(len(extents))], nulls)
    offsets = _offsets(batch, base_offset)
    result = pa.ipc.read_record_batch(pa.py_buffer(b"".join((head, body, offsets))), SCHEMA)
    if columnar.EXPIRIES in extents:
        times = pa.Array.from_buffers(
            _INT64, batch.count, [None, pa.py_buffer(body).slice(*extents[columnar.EXPIRIES])]
        )
        times = pc.if_else(pc.equal(times, pa.scalar(0, _INT64)), pa.scalar(None, _INT64), times).cast(_MS)
        result = result.set_column(6, SCHEMA.field(6), _in_range(times))
    if batch.timestamp_max_ms > TIMESTAMP_MS_MAX:
        result = result.set_column(1, SCHEMA.field(1), _in_range(result.column(1)))
    if not verified:
        try:
            result.validate(full=True)
        except pa.ArrowInvalid as error:
            raise CorruptionError(f"a batch at offset {base_offset} is not valid Arrow: {error}") from error
    return result


def _nulls(batch: ColumnBatch) -> tuple[int, int, int]:
    """Return the number of null keys, values and header values."""
    extents = batch.extents
    if not extents.keys() & _VALIDITIES:
        return 0, 0, 0
    headers = extents[columnar.HEADER_VALUE_OFFSETS][1] // 4 - 1 if columnar.HEADER_LISTS in extents else 0
    return (
        _unset(batch, columnar.KEY_VALIDITY, batch.count),
        _unset(batch, columnar.VALUE_VALIDITY, batch.count),
        _unset(batch, columnar.HEADER_VALUE_VALIDITY, headers),
    )


def _unset(batch: ColumnBatch, validity: int, items: int) -> int:
    bits = batch.buffer(validity)
    return 0 if bits is None else items - int.from_bytes(bits, "little").bit_count()


def _in_range(times: Any) -> Any:
    """Clamp times to the range that every reader can represent."""
    return pc.min_element_wise(times.cast(_INT64), pa.scalar(TIMESTAMP_MS_MAX, _INT64), skip_nulls=False).cast(_MS)


def cutter(raw: bytes) -> Callable[[int, int], bytes]:
    """Return a function that slices `raw` by (begin, length) without a copy, for checksum functions."""
    cut: Callable[[int, int], bytes] = pa.py_buffer(raw).slice
    return cut


def joined(runs: Sequence[Run]) -> pa.RecordBatch:
    """Join runs into one Arrow batch. Their bytes are copied once, directly from the source."""
    if not runs:
        return _nothing()
    kinds: set[int] = set().union(*(run.extents for run in runs))
    if not kinds <= _SIMPLE:
        return concatenated([to_arrow(batch, base) for run in runs for base, batch in run.batches()])
    values = _Joined(columnar.VALUE_OFFSETS, columnar.VALUE_DATA)
    keys = None
    if columnar.KEY_OFFSETS in kinds and all(_has_all_keys(run) for run in runs):
        keys = _Joined(columnar.KEY_OFFSETS, columnar.KEY_DATA)
    times: list[memoryview] = []
    count = 0
    expected = runs[0].base_offset
    is_one_run = True
    for run in runs:
        view = memoryview(run.source)
        begin, length = run.extents[columnar.TIMESTAMPS]
        end = begin + length
        times += [view[at + begin : at + end] for at in run.begins]
        values.add(view, run)
        if keys is not None:
            keys.add(view, run)
        if run.base_offset != expected:
            is_one_run = False
        records = len(run)
        count += records
        expected = run.base_offset + records
    if keys is not None:
        key_column = keys.array(count)
    else:
        key_column = _keys_of(runs) if columnar.KEY_OFFSETS in kinds else pa.nulls(count, _BINARY)
    return pa.RecordBatch.from_arrays(
        [
            _consecutive_array(runs[0].base_offset, count) if is_one_run else _offsets_of(runs),
            pa.Array.from_buffers(_MS, count, [None, pa.py_buffer(b"".join(times))]),
            key_column,
            values.array(count),
            *_empty_lists(count),
            pa.nulls(count, _MS),
        ],
        schema=SCHEMA,
    )


def _has_all_keys(run: Run) -> bool:
    return columnar.KEY_OFFSETS in run.extents and columnar.KEY_VALIDITY not in run.extents


class _Joined:
    """A binary column over several runs: data is concatenated, offsets are shifted."""

    __slots__ = ("_data", "_data_kind", "_is_moved", "_offsets", "_offsets_kind", "_size", "_steps")

    def __init__(self, offsets_kind: int, data_kind: int) -> None:
        self._offsets_kind = offsets_kind
        self._data_kind = data_kind
        self._data: list[memoryview] = []
        self._offsets: list[memoryview | bytes] = [bytes(4)]
        self._steps: list[array[int] | bytes] = [array("i", (0,))]
        self._is_moved = True
        """Whether all offsets are already shifted."""
        self._size = 0

    def add(self, view: memoryview, run: Run) -> None:
        begins = run.begins
        begin, length = run.extents[self._offsets_kind]
        end = begin + length
        # The first offset of each frame equals the last one of the frame before.
        begin += 4
        if len(begins) == 1:
            at = begins[0]
            self._offsets.append(view[at + begin : at + end])
            begin, length = run.extents[self._data_kind]
            at += begin
            self._data.append(view[at : at + length])
            self._steps.append(array("i", (self._size,)) * run.frame_records)
            self._is_moved = False
            self._size += length
            return
        source = run.source
        offsets = [source[at + begin : at + end] for at in begins]
        begin, length = run.extents[self._data_kind]
        end = begin + length
        self._data += [view[at + begin : at + end] for at in begins]
        records = run.frame_records
        first = self._size
        self._size = first + length * len(begins)
        if offsets.count(offsets[0]) == len(offsets):
            # All frames have values of the same sizes, as with fixed rows, so the result is cached.
            self._offsets.append(_repeated(offsets[0], first, length, len(begins)))
            self._steps.append(bytes(4 * records * len(begins)))
            return
        self._is_moved = False
        self._offsets += offsets
        self._steps.append(_steps(first, length, records, len(begins)))

    def array(self, count: int) -> Any:
        build = pa.Array.from_buffers
        data = pa.py_buffer(b"".join(self._data))
        ends = pa.py_buffer(b"".join(self._offsets))
        if self._is_moved:
            return build(_BINARY, count, [None, ends, data])
        own = build(_INT32, count + 1, [None, ends])
        steps = build(_INT32, count + 1, [None, pa.py_buffer(b"".join(self._steps))])
        offsets = _add().call([own, steps]).buffers()[1]
        return build(_BINARY, count, [None, offsets, data])


@lru_cache(maxsize=STEPS_KEPT)
def _steps(first: int, length: int, records: int, frames: int) -> bytes:
    """Return the shifts of the offsets of frames with `length` bytes each, of which the first starts at `first`."""
    return b"".join([(array("i", (first + at * length,)) * records).tobytes() for at in range(frames)])


@lru_cache(maxsize=STEPS_KEPT)
def _repeated(offsets: bytes, first: int, length: int, frames: int) -> bytes:
    """Return these offsets for each frame, shifted to the start of its data."""
    own = array("i")
    own.frombytes(offsets)
    return b"".join([array("i", [at + first + number * length for at in own]).tobytes() for number in range(frames)])


@lru_cache(maxsize=1)
def _add() -> Any:
    """Return Arrow's add function without its Python wrappers."""
    return pc.get_function("add")


def _keys_of(runs: Sequence[Run]) -> Any:
    """Return the key column if some keys are null: bitmaps cannot be concatenated bytewise."""
    columns = []
    for run in runs:
        if columnar.KEY_OFFSETS not in run.extents:
            columns.append(pa.nulls(len(run), _BINARY))
            continue
        kinds = (columnar.KEY_VALIDITY, columnar.KEY_OFFSETS, columnar.KEY_DATA)
        places = [run.extents.get(kind) for kind in kinds]
        cut = pa.py_buffer(run.source).slice
        for at in run.begins:
            buffers = [None if place is None else cut(at + place[0], place[1]) for place in places]
            columns.append(pa.Array.from_buffers(_BINARY, run.frame_records, buffers))
    return pa.concat_arrays(columns)


def _consecutive_array(first: int, count: int) -> Any:
    """Return consecutive numbers, built from cached windows."""
    end = first + count
    pieces = []
    while first < end:
        window, at = divmod(first, OFFSETS_WINDOW)
        taken = min(end - first, OFFSETS_WINDOW - at)
        pieces.append(memoryview(_consecutive(window))[8 * at : 8 * (at + taken)])
        first += taken
    content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    return pa.Array.from_buffers(_INT64, count, [None, pa.py_buffer(content)])


def _offsets_of(runs: Sequence[Run]) -> Any:
    return pa.concat_arrays([_consecutive_array(run.base_offset, len(run)) for run in runs])


def _empty_lists(count: int) -> tuple[Any, Any]:
    """Return empty headers and tags."""
    zeros = pa.py_buffer(bytes(4 * (count + 1)))
    headers, tags = _no_items()
    build = pa.Array.from_buffers
    return build(_HEADERS, count, [None, zeros], children=[headers]), build(
        _TAGS, count, [None, zeros], children=[tags]
    )


@lru_cache(maxsize=1)
def _no_items() -> tuple[Any, Any]:
    return pa.array([], _HEADER), pa.array([], _BINARY)


def records_to_arrow(records: Sequence[StoredRecord]) -> pa.RecordBatch:
    """Convert records with their offsets to Arrow."""
    if not records:
        return _nothing()
    base = records[0].offset
    return to_arrow(ColumnBatch.from_records(records, 0, [record.offset - base for record in records]), base)


def concatenated(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Concatenate batches. Their bytes are copied unless there is only one batch."""
    if len(batches) == 1:
        return batches[0]
    return pa.concat_batches(batches) if batches else _nothing()


def masked(batch: pa.RecordBatch, marks: Sequence[bool]) -> pa.RecordBatch:
    """Return the marked rows."""
    return batch.filter(pa.array(marks, pa.bool_()))


def from_arrow(batch: pa.RecordBatch, stamp_ms: int) -> ColumnBatch:
    """Convert an Arrow batch. `value` is required. Records without a time get `stamp_ms`."""
    count = batch.num_rows
    if not 0 < count <= BATCH_RECORDS_MAX:
        raise LimitExceededError(f"a batch has 1 to {BATCH_RECORDS_MAX} records, not {count}; split it")
    names = batch.schema.names
    unknown = set(names) - set(SCHEMA.names)
    if unknown or "value" not in names or len(set(names)) != len(names):
        raise InvalidArgumentError(
            f"an Arrow batch for a stream must have a value column and may have {', '.join(SCHEMA.names)}; "
            f"this one has {', '.join(names) or 'none'}"
        )
    buffers: dict[int, Buffer] = {}
    try:
        # Validate here: later readers trust bytes with a checksum.
        batch.validate(full=True)
        value_bits = _put_values(buffers, batch)
        header_bits: Buffer | None = None
        if "key" in names:
            _put_keys(buffers, batch.column("key"))
        times = _put_times(buffers, batch, stamp_ms)
        if "expire_at" in names:
            _put_expiries(buffers, batch.column("expire_at"))
        if "tags" in names:
            _put_tags(buffers, batch.column("tags"))
        if "headers" in names:
            header_bits = _put_headers(buffers, batch.column("headers"))
        if value_bits is not None:
            buffers[columnar.VALUE_VALIDITY] = value_bits
        if header_bits is not None:
            buffers[columnar.HEADER_VALUE_VALIDITY] = header_bits
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise InvalidArgumentError(f"an Arrow batch does not match the stream schema: {error}") from error
    return columnar.assemble(count, buffers, *times)


def _nothing() -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=SCHEMA)


@lru_cache(maxsize=1)
def _template() -> MessageHead:
    row = {
        "offset": 0,
        "timestamp": 0,
        "key": b"k",
        "value": b"v",
        "headers": [("h", b"")],
        "tags": [b"t"],
        "expire_at": 1,
    }
    sample = pa.RecordBatch.from_pylist([row], schema=SCHEMA)
    return MessageHead(sample.serialize().to_pybytes())


@lru_cache(maxsize=HEADS_KEPT)
def _head(directory: bytes, nulls: tuple[int, int, int]) -> bytes:
    """Return the IPC head for a body with this directory and these numbers of null keys, values and header values."""
    key_nulls, value_nulls, header_nulls = nulls
    count, extents, size, _ = columnar.read_directory(directory)
    get = extents.get
    none = (0, 0)
    values = (get(columnar.VALUE_OFFSETS, none), get(columnar.VALUE_DATA, none))
    keys = (get(columnar.KEY_VALIDITY, none), get(columnar.KEY_OFFSETS, none), get(columnar.KEY_DATA, none))
    names = (get(columnar.HEADER_NAME_OFFSETS, none), get(columnar.HEADER_NAMES, none))
    contents = (get(columnar.HEADER_VALUE_OFFSETS, none), get(columnar.HEADER_VALUES, none))
    tags = (get(columnar.TAG_OFFSETS, none), get(columnar.TAG_DATA, none))
    headers = max(0, names[0][1] // 4 - 1)
    items = max(0, tags[0][1] // 4 - 1)
    if columnar.KEY_OFFSETS not in extents:
        key_nulls = count
    # Schema fields depth first, each with its buffers; an omitted buffer has length 0. Null columns and the offsets of
    # empty lists need zeroed memory of the right length and share the zeros at the end.
    offsets_bytes = 8 * count
    zeros_at = size + offsets_bytes
    offset_zeros = (zeros_at, 4 * (count + 1))
    bit_zeros = (zeros_at, (count + 7) // 8)
    time_zeros = (zeros_at, 8 * count)
    has_keys = columnar.KEY_OFFSETS in extents
    layout = [
        (count, 0, (none, (size, offsets_bytes))),
        (count, 0, (none, extents[columnar.TIMESTAMPS])),
        (count, key_nulls, keys if has_keys else (bit_zeros, offset_zeros, none)),
        (count, value_nulls, (get(columnar.VALUE_VALIDITY, none), *values)),
        (count, 0, (none, get(columnar.HEADER_LISTS, offset_zeros))),
        (headers, 0, (none,)),
        (headers, 0, (none, *names)),
        (headers, header_nulls, (get(columnar.HEADER_VALUE_VALIDITY, none), *contents)),
        (count, 0, (none, get(columnar.TAG_LISTS, offset_zeros))),
        (items, 0, (none, *tags)),
        (count, count, (bit_zeros, time_zeros)),
    ]
    return _template().fill(
        count,
        [number for length, nulls, _ in layout for number in (length, nulls)],
        [number for _, _, buffers in layout for extent in buffers for number in extent],
        zeros_at + 8 * (count + 1),
    )


def _offsets(batch: ColumnBatch, base_offset: int) -> bytes:
    """Return the offset column, followed by the zeros for absent columns."""
    count = batch.count
    zeros = bytes(8 * (count + 1))
    if columnar.OFFSET_DELTAS in batch.extents:
        deltas = batch.deltas() or ()
        return array("q", [base_offset + delta for delta in deltas]).tobytes() + zeros
    window, at = divmod(base_offset, OFFSETS_WINDOW)
    if at + count > OFFSETS_WINDOW:
        return array("q", range(base_offset, base_offset + count)).tobytes() + zeros
    return _consecutive(window)[8 * at : 8 * (at + count)] + zeros


@lru_cache(maxsize=WINDOWS_KEPT)
def _consecutive(window: int) -> bytes:
    """Return all offsets of a window as int64. Arrow computes them, because a Python loop costs more than the batches.

    Arrow's functions get scalars, because with plain numbers they look for numpy at every call.
    """
    return bytes(pc.add(_first_window(), pa.scalar(window * OFFSETS_WINDOW, _INT64)).buffers()[1])


@lru_cache(maxsize=1)
def _first_window() -> Any:
    return pa.array(range(OFFSETS_WINDOW), _INT64)


def _put_values(buffers: dict[int, Buffer], batch: pa.RecordBatch) -> Buffer | None:
    """Add the values and return their null bitmap, which goes to the end of the body."""
    bits, values = _split(_as(batch.column("value"), _BINARY))
    buffers[columnar.VALUE_OFFSETS], buffers[columnar.VALUE_DATA] = _binary(values)
    return bits


def _put_keys(buffers: dict[int, Buffer], keys: Any) -> None:
    keys = _as(keys, _BINARY)
    if keys.null_count == len(keys):
        return
    bits, keys = _split(keys)
    if bits is not None:
        buffers[columnar.KEY_VALIDITY] = bits
    buffers[columnar.KEY_OFFSETS], buffers[columnar.KEY_DATA] = _binary(keys)


def _split(column: Any) -> tuple[Buffer | None, Any]:
    """Return (null bitmap or None, column with empty bytes for nulls)."""
    if not column.null_count:
        return None, column
    column = _from_start(column)
    bits = bytearray(memoryview(column.buffers()[0])[: (len(column) + 7) // 8])
    if len(column) % 8:
        # Arrow does not define bits after the end; here the number of set bits counts.
        bits[-1] &= (1 << len(column) % 8) - 1
    return bytes(bits), column.fill_null(b"")


def _put_times(buffers: dict[int, Buffer], batch: pa.RecordBatch, stamp_ms: int) -> tuple[int, int]:
    if "timestamp" not in batch.schema.names:
        buffers[columnar.TIMESTAMPS] = array("q", [stamp_ms]) * batch.num_rows
        return stamp_ms, stamp_ms
    times = _milliseconds(batch.column("timestamp"))
    if times.null_count:
        times = times.fill_null(pa.scalar(UNSTAMPED, _INT64))
    bounds = pc.min_max(times)
    least: int = bounds["min"].as_py()
    if least < 0:
        if least < UNSTAMPED:
            raise TimestampRangeError(f"timestamp {least} is out of range: it must not be before 1970")
        times = pc.if_else(pc.equal(times, pa.scalar(UNSTAMPED, _INT64)), pa.scalar(stamp_ms, _INT64), times)
        bounds = pc.min_max(times)
    largest: int = bounds["max"].as_py()
    if largest > TIMESTAMP_MS_MAX:
        raise TimestampRangeError(f"timestamp {largest} is out of range: at most {TIMESTAMP_MS_MAX} ms (year 9999)")
    buffers[columnar.TIMESTAMPS] = _fixed(times)
    return bounds["min"].as_py(), largest


def _put_expiries(buffers: dict[int, Buffer], expiries: Any) -> None:
    if expiries.null_count == len(expiries):
        return
    times = _milliseconds(expiries).fill_null(pa.scalar(0, _INT64))
    bounds = pc.min_max(times)
    if bounds["min"].as_py() < 0 or bounds["max"].as_py() > TIMESTAMP_MS_MAX:
        raise TimestampRangeError("expire_at is out of range: it must be between 1970 and 9999")
    buffers[columnar.EXPIRIES] = _fixed(times)


def _put_tags(buffers: dict[int, Buffer], tags: Any) -> None:
    lists, items = _list(tags, _TAGS)
    if not len(items):
        return
    if items.null_count:
        raise InvalidArgumentError("a tag must not be null")
    buffers[columnar.TAG_LISTS] = lists
    buffers[columnar.TAG_OFFSETS], buffers[columnar.TAG_DATA] = _binary(items)


def _put_headers(buffers: dict[int, Buffer], headers: Any) -> Buffer | None:
    """Add the headers and return the null bitmap of their values, which goes to the end of the body."""
    lists, items = _list(headers, _HEADERS)
    if not len(items):
        return None
    names = items.field(0)
    values = items.field(1)
    if items.null_count or names.null_count:
        raise InvalidArgumentError("a header and its key must not be null")
    bits, values = _split(values)
    buffers[columnar.HEADER_LISTS] = lists
    buffers[columnar.HEADER_NAME_OFFSETS], buffers[columnar.HEADER_NAMES] = _binary(names)
    buffers[columnar.HEADER_VALUE_OFFSETS], buffers[columnar.HEADER_VALUES] = _binary(values)
    return bits


def _as(column: Any, wanted: Any) -> Any:
    if column.nbytes > BODY_BYTES_MAX:
        raise LimitExceededError(f"a batch is over the limit of {BODY_BYTES_MAX} bytes; split it")
    return column if column.type == wanted else column.cast(wanted)


def _milliseconds(column: Any) -> Any:
    """Convert a time column of any unit to int64 milliseconds. Integers are milliseconds."""
    if pa.types.is_timestamp(column.type) and column.type.unit != "ms":
        column = pc.cast(column, pa.timestamp("ms", tz=column.type.tz), safe=False)
    return column.cast(_INT64)


def _from_start(column: Any) -> Any:
    """Return the array with offset 0, so that its buffers are exactly its content."""
    return column if column.offset == 0 else pa.concat_arrays([column, column[:0]])


def _list(column: Any, wanted: Any) -> tuple[Buffer, Any]:
    """Return offsets that start at 0, and their items."""
    column = _as(column, wanted)
    if column.null_count:
        column = pc.if_else(column.is_valid(), column, pa.scalar([], wanted))
    column = _from_start(column)
    items = column.flatten()
    lengths = array("i")
    lengths.frombytes(memoryview(column.buffers()[1])[: 4 * (len(column) + 1)])
    if lengths[0] != 0:
        lengths = array("i", [end - lengths[0] for end in lengths])
    return lengths, items


def _binary(column: Any) -> tuple[Buffer, Buffer]:
    """Return offsets that start at 0, and their data."""
    at = column.offset
    count = len(column)
    _, offsets, data = column.buffers()
    window = memoryview(offsets)[4 * at : 4 * (at + count + 1)]
    begin = int.from_bytes(window[:4], "little")
    end = int.from_bytes(window[-4:], "little")
    content = b"" if data is None else memoryview(data)[begin:end]
    if begin:
        shifted = array("i", bytes(window))
        return array("i", [each - begin for each in shifted]), content
    return window, content


def _fixed(column: Any) -> Buffer:
    return memoryview(column.buffers()[1])[8 * column.offset : 8 * (column.offset + len(column))]
