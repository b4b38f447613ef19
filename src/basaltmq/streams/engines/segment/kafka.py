"""Reading a shard the way a Kafka listener does: as record batches, as they were appended where possible.

A batch that came from a Kafka producer is handed out as it lies in the log, compressed or not, control batches
included; its checksum was checked with its frame's. Anything else is put into a batch: records that came some other
way, and what is left of a batch of which records were deleted or have expired. As in Kafka, the first batch may begin
before the offset asked for: consumers skip what they did not ask for.

Batches that lie side by side are taken one after the other without asking the index for each (`log.kafka_run`), and a
read that was full leaves a bookmark for the one that goes on. `take_ahead` does the work of that one before it is asked
for. What it found is used only where the read would find the very same: bytes of a log do not change, so that is where
nothing of the shard was deleted or rewritten, and where the read ends for want of room and not at the watermark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from basaltmq.errors import CorruptionError, DamagedFrameError, LimitExceededError, UnsupportedCodecError
from basaltmq.log.batches.kafka import KafkaHeader, encode_records, read_header
from basaltmq.log.batches.kafka_run import TakenBatches, take_batches
from basaltmq.log.frame import ALIGNMENT, HEADER_BYTES, KAFKA, Header, records_of
from basaltmq.streams.adapter import READ_BYTES, READ_BYTES_MAX, check_offset, is_expired
from basaltmq.streams.engines.segment.index.rows import IN_TRANSACTION, Entry
from basaltmq.streams.engines.segment.read import Place
from basaltmq.streams.engines.segment.state import SegmentShard

if TYPE_CHECKING:
    from basaltmq.streams.engines.segment.reader import SegmentReader

FRAMES_MAX: Final = 10_000
"""Frames one read looks at, so that none takes for ever where little is left of many."""


class KafkaRead(NamedTuple):
    """What a read found."""

    batches: list[bytes]
    next_offset: int
    start_offset: int
    high_watermark: int


class Ahead(NamedTuple):
    """What a read will find that goes on at a bookmark."""

    place: Place
    bytes_max: int
    taken: TakenBatches

    def fits(self, offset: int, end: int, bytes_max: int) -> bool:
        """Is it what a read from here to below `end` finds, with so much room? It is full, so it need only be below."""
        return self.place.base_offset == offset and self.bytes_max == bytes_max and self.taken.next_offset < end


def take_ahead(reader: SegmentReader, shard: int, offset: int, max_bytes: int) -> Ahead | None:
    """What `read_batches` will find, if it goes on where one stopped and is full again."""
    state = reader.state_of(shard)
    with state.lock:
        end = state.high_watermark
        is_plain = not state.deleted and not state.rewritten
    place = reader.bookmarks.take(shard, offset) if is_plain else None
    if place is None:
        return None
    reader.bookmarks.leave(shard, place)
    bytes_max = min(max_bytes, READ_BYTES_MAX)
    log = reader.lanes[state.lane].log
    # A first batch that is over the limit is left to the read: it may be as large as there are.
    taken = take_batches(
        log, shard, offset, end, place.position, bytes_max, likely_bytes=place.size_bytes, is_first=False
    )
    return Ahead(place, bytes_max, taken) if taken.is_next and taken.batches else None


def read_batches(
    reader: SegmentReader,
    shard: int,
    offset: int,
    max_bytes: int = READ_BYTES,
    *,
    is_decided: bool = False,
    ahead: Ahead | None = None,
) -> KafkaRead:
    """Batches from the one that holds `offset` on, the first whatever its size; empty at the high watermark.

    With `is_decided` it stands where the first transaction begins that is not; aborted batches are given all the same.
    """
    state = reader.state_of(shard)
    with state.lock:
        start, end = state.start_offset, state.stable_offset if is_decided else state.high_watermark
        # As in `SegmentReader`: without these, what lies in the log is what the index says.
        is_plain = not state.deleted and not state.rewritten
    check_offset(shard, offset, start, end)
    found = _Reading(reader, state, start, end, min(max_bytes, READ_BYTES_MAX))
    try:
        next_offset = found.read(offset, is_plain, ahead)
    except DamagedFrameError:
        # What comes before the damage is given; the next read begins with it, and says so.
        if not found.batches:
            raise
        next_offset = found.at
    return KafkaRead(found.batches, next_offset, start, end)


def producers_batches(reader: SegmentReader, shard: int, offset: int) -> list[KafkaHeader]:
    """The headers of batches of idempotent producers from `offset` on, whether or not their records were deleted."""
    state = reader.state_of(shard)
    with state.lock:
        end = state.high_watermark
    found = []
    for entry in reader.index.entries(shard, offset):
        if entry.base_offset >= end:
            break
        if entry.base_offset < offset:
            continue
        header, body = _framed(reader, state, entry)
        if header.kind == KAFKA:
            batch = read_header(body)
            if batch.producer_id >= 0 and not batch.is_control:
                found.append(batch)
    return found


class _Reading:
    """One read on its way."""

    def __init__(self, reader: SegmentReader, state: SegmentShard, start: int, end: int, bytes_max: int) -> None:
        self._reader = reader
        self._state = state
        self._log = reader.lanes[state.lane].log
        self._start = start
        self._end = end
        self._left = bytes_max
        self._frames = 0
        self.batches: list[bytes] = []
        self.at = 0
        """Where to go on."""

    def read(self, offset: int, is_plain: bool, ahead: Ahead | None) -> int:
        """Fill `batches`; the offset after all that was looked at."""
        self.at = offset
        state, end = self._state, self._end
        if is_plain and offset < end:
            place = self._reader.bookmarks.take(state.number, offset)
            if ahead is not None and ahead.fits(offset, end, self._left):
                self._took(ahead.place, ahead.taken)
                return self.at
            if place is not None and self._walk(place):
                return self.at
        while self.at < end:
            before = self.at
            for entry in self._reader.index.entries(state.number, before):
                if entry.base_offset >= end:
                    return max(self.at, end)
                if self._frames >= FRAMES_MAX or (self.batches and _body_bytes_min(entry) > self._left):
                    self._leave(Place(entry.base_offset, entry.position, entry.size_bytes, entry.records))
                    return self.at
                if is_plain:
                    if self._walk(Place(entry.base_offset, entry.position, entry.size_bytes, entry.records)):
                        return self.at
                    if self.at > entry.last_offset + 1:
                        # Neighbours were taken that this look at the index does not know of.
                        break
                    # They lie apart, or are something else: each is looked up.
                    is_plain = False
                    if self.at == entry.last_offset + 1:
                        continue
                if not self._take(entry):
                    return self.at
            else:
                return max(self.at, end)
        return max(self.at, end)

    def _walk(self, place: Place) -> bool:
        """Take batches that lie side by side; is the read full?"""
        taken = take_batches(
            self._log,
            self._state.number,
            place.base_offset,
            self._end,
            place.position,
            self._left,
            likely_bytes=place.size_bytes,
            is_first=not self.batches,
        )
        self._took(place, taken)
        return taken.is_next

    def _took(self, place: Place, taken: TakenBatches) -> None:
        if taken.batches:
            self.batches += taken.batches
            self._frames += len(taken.batches)
            self._left -= taken.size_bytes
            self.at = taken.next_offset
        if taken.is_next:
            self._leave(Place(taken.next_offset, taken.position, place.size_bytes, place.records))

    def _leave(self, place: Place) -> None:
        if place.base_offset == self.at:
            self._reader.bookmarks.leave(self._state.number, place)

    def _take(self, entry: Entry) -> bool:
        """Take a frame, or what is left of it; False if there is no room."""
        self._frames += 1
        raw = _batch(self._reader, self._state, entry, self._start)
        if raw is not None:
            if self.batches and len(raw) > self._left:
                return False
            self.batches.append(raw)
            self._left -= len(raw)
        self.at = entry.last_offset + 1
        return True


def _body_bytes_min(entry: Entry) -> int:
    """What a frame's body has at least, without its padding."""
    return entry.size_bytes - HEADER_BYTES - ALIGNMENT + 1


def _framed(reader: SegmentReader, state: SegmentShard, entry: Entry) -> tuple[Header, bytes]:
    try:
        return reader.frame_of(state, entry)
    except CorruptionError as error:
        raise reader.damaged(state, entry, error) from error


def _batch(reader: SegmentReader, state: SegmentShard, entry: Entry, start: int) -> bytes | None:
    """A frame as a batch; None if nothing of it is left."""
    try:
        header, body = reader.frame_of(state, entry)
        deleted = reader.index.deleted(state.number, entry.base_offset, entry.last_offset) if state.deleted else []
        if header.kind == KAFKA and not deleted:
            return body
        is_aborted = entry.flags & IN_TRANSACTION and reader.index.outcomes.is_aborted(state.number, entry)
        columns = None if is_aborted else records_of(header, body, state.config.record_bytes_max)
    except (LimitExceededError, UnsupportedCodecError):
        # What cannot be looked into is given whole, with its deleted records, as before a cleaning.
        return body
    except CorruptionError as error:
        raise reader.damaged(state, entry, error) from error
    if columns is None:
        return None
    gone = set(deleted)
    now_ms = reader.now_ms()
    kept = [
        record
        for record in columns.records(entry.base_offset)
        if record.offset >= start and record.offset not in gone and not is_expired(record, now_ms)
    ]
    return encode_records(kept) if kept else None
