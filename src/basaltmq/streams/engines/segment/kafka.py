"""Reads of a shard as Kafka record batches, unchanged where possible.

A batch of a Kafka producer is returned as it is in the log, compressed or not, control batches included. The frame's
checksum covers it. Everything else is encoded as a batch: records from other sources, and the rest of a batch with
deleted or expired records. As in Kafka, the first batch may start before the requested offset; consumers skip the
records before it.

A damaged frame raises, or is skipped if the caller asks for it. Its records are lost, but a transaction marker is not:
the index has its outcome. A read_committed consumer drops the batches of an aborted transaction up to its marker, so a
skipped marker would hide the producer's next transaction. Therefore the marker is encoded again.

Adjacent batches are read without an index lookup for each (`log.kafka_run`). A read that reached its size limit saves a
bookmark for the next read. `take_ahead` prefetches that next read. Log bytes never change. So the prefetched result is
valid if no record of the shard was deleted or rewritten, and if it ended at the size limit, not at the watermark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from basaltmq.errors import CorruptionError, DamagedFrameError, LimitExceededError, UnsupportedCodecError
from basaltmq.log.batches.kafka import KafkaHeader, encode_records, incoming, marker_batch, read_header
from basaltmq.log.frame import ALIGNMENT, HEADER_BYTES, KAFKA, records_of
from basaltmq.log.kafka_run import TakenBatches, take_batches
from basaltmq.streams.adapter import READ_BYTES, READ_BYTES_MAX, check_offset, is_expired
from basaltmq.streams.engines.segment.index.rows import IN_TRANSACTION, IS_MARKER, Entry
from basaltmq.streams.engines.segment.read_result import FramePosition
from basaltmq.streams.engines.segment.state import SegmentShard

if TYPE_CHECKING:
    from basaltmq.streams.engines.segment.reader import SegmentReader

FRAMES_MAX: Final = 10_000
"""Maximum frames per read. Bounds the time where few records of many frames are left."""


class KafkaRead(NamedTuple):
    """The result of a read."""

    batches: list[bytes]
    next_offset: int
    start_offset: int
    high_watermark: int
    skipped: tuple[tuple[int, int], ...] = ()
    """First and last offset of each damaged frame that was skipped."""


class Ahead(NamedTuple):
    """The prefetched result of a read that continues at a bookmark."""

    frame_position: FramePosition
    bytes_max: int
    taken: TakenBatches

    def fits(self, offset: int, end: int, bytes_max: int) -> bool:
        """Whether a read with these arguments gives this result. It is full, so it only needs to end below `end`."""
        return (
            self.frame_position.base_offset == offset and self.bytes_max == bytes_max and self.taken.next_offset < end
        )


def take_ahead(reader: SegmentReader, shard: int, offset: int, max_bytes: int) -> Ahead | None:
    """Prefetch the result of a `read_batches` that continues at a bookmark and reaches its size limit again."""
    state = reader.state_of(shard)
    with state.lock:
        end = state.high_watermark
        is_plain = not state.deleted and not state.rewritten
    frame_position = reader.bookmarks.take(shard, offset) if is_plain else None
    if frame_position is None:
        return None
    reader.bookmarks.save(shard, frame_position)
    bytes_max = min(max_bytes, READ_BYTES_MAX)
    log = reader.lanes[state.lane].log
    # Leave an oversized first batch to the read itself, because it may have any size.
    taken = take_batches(
        log,
        shard,
        offset,
        end,
        frame_position.position,
        bytes_max,
        likely_bytes=frame_position.size_bytes,
        is_first=False,
    )
    return Ahead(frame_position, bytes_max, taken) if taken.is_next and taken.batches else None


def read_batches(
    reader: SegmentReader,
    shard: int,
    offset: int,
    max_bytes: int = READ_BYTES,
    *,
    is_decided: bool = False,
    is_skipping: bool = False,
    ahead: Ahead | None = None,
) -> KafkaRead:
    """Return batches from the one with `offset` on; the first one regardless of its size. Empty at the high watermark.

    With `is_decided`, the read ends at the last stable offset. Aborted batches are included.
    With `is_skipping`, damaged frames are skipped.
    """
    state = reader.state_of(shard)
    with state.lock:
        start, end = state.start_offset, state.stable_offset if is_decided else state.high_watermark
        # As in `SegmentReader`: without deletes and rewrites, the log matches the index.
        is_plain = not state.deleted and not state.rewritten
    check_offset(shard, offset, start, end)
    found = _Reading(reader, state, start, end, min(max_bytes, READ_BYTES_MAX), is_skipping)
    try:
        next_offset = found.read(offset, is_plain, ahead)
    except DamagedFrameError:
        # Return the batches before the damage. The next read starts at it and raises the error.
        if not found.batches:
            raise
        next_offset = found.at
    return KafkaRead(found.batches, next_offset, start, end, tuple(found.skipped))


def producers_batches(reader: SegmentReader, shard: int, offset: int) -> list[KafkaHeader]:
    """Return the headers of idempotent producers' batches from `offset` on, including deleted records.

    Damaged batches are skipped. If the producer of one continues, it gets an error for its next sequence number.
    """
    state = reader.state_of(shard)
    with state.lock:
        end = state.high_watermark
    found = []
    for entry in reader.index.entries(shard, offset):
        if entry.base_offset >= end:
            break
        if entry.base_offset < offset:
            continue
        try:
            header, body = reader.frame_of(state, entry)
        except CorruptionError as error:
            reader.damaged(state, entry, error)
            continue
        if header.kind == KAFKA:
            batch = read_header(body)
            if batch.producer_id >= 0 and not batch.is_control:
                found.append(batch)
    return found


class _Reading:
    """The state of one read."""

    def __init__(
        self, reader: SegmentReader, state: SegmentShard, start: int, end: int, bytes_max: int, is_skipping: bool
    ) -> None:
        self._is_skipping = is_skipping
        self.skipped: list[tuple[int, int]] = []
        self._reader = reader
        self._state = state
        self._log = reader.lanes[state.lane].log
        self._start = start
        self._end = end
        self._left = bytes_max
        self._frames = 0
        self.batches: list[bytes] = []
        self.at = 0
        """The offset at which to continue."""

    def read(self, offset: int, is_plain: bool, ahead: Ahead | None) -> int:
        """Fill `batches`. Return the offset after all frames examined."""
        self.at = offset
        state, end = self._state, self._end
        if is_plain and offset < end:
            frame_position = self._reader.bookmarks.take(state.number, offset)
            if ahead is not None and ahead.fits(offset, end, self._left):
                self._took(ahead.frame_position, ahead.taken)
                return self.at
            if frame_position is not None and self._walk(frame_position):
                return self.at
        while self.at < end:
            before = self.at
            for entry in self._reader.index.entries(state.number, before):
                if entry.base_offset >= end:
                    return max(self.at, end)
                if self._frames >= FRAMES_MAX or (self.batches and _body_bytes_min(entry) > self._left):
                    self._save_bookmark(_position_of(entry))
                    return self.at
                if is_plain:
                    if self._walk(_position_of(entry)):
                        return self.at
                    if self.at > entry.last_offset + 1:
                        # Adjacent batches beyond this index iterator were read.
                        break
                    # The frames are not adjacent or not plain, so look up each one.
                    is_plain = False
                    if self.at == entry.last_offset + 1:
                        continue
                if not self._take(entry):
                    return self.at
            else:
                return max(self.at, end)
        return max(self.at, end)

    def _walk(self, frame_position: FramePosition) -> bool:
        """Read adjacent batches. Return whether the size limit is reached."""
        taken = take_batches(
            self._log,
            self._state.number,
            frame_position.base_offset,
            self._end,
            frame_position.position,
            self._left,
            likely_bytes=frame_position.size_bytes,
            is_first=not self.batches,
        )
        self._took(frame_position, taken)
        return taken.is_next

    def _took(self, frame_position: FramePosition, taken: TakenBatches) -> None:
        if taken.batches:
            self.batches += taken.batches
            self._frames += len(taken.batches)
            self._left -= taken.size_bytes
            self.at = taken.next_offset
        if taken.is_next:
            self._save_bookmark(
                FramePosition(taken.next_offset, taken.position, frame_position.size_bytes, frame_position.records)
            )

    def _save_bookmark(self, frame_position: FramePosition) -> None:
        if frame_position.base_offset == self.at:
            self._reader.bookmarks.save(self._state.number, frame_position)

    def _take(self, entry: Entry) -> bool:
        """Add a frame, or what is left of it. Return False if it does not fit."""
        self._frames += 1
        try:
            raw = _batch(self._reader, self._state, entry, self._start)
        except DamagedFrameError as error:
            if not self._is_skipping:
                raise
            self.skipped.append((error.base_offset, error.last_offset))
            raw = _marker_again(self._reader, self._state, entry)
        if raw is not None:
            if self.batches and len(raw) > self._left:
                return False
            self.batches.append(raw)
            self._left -= len(raw)
        self.at = entry.last_offset + 1
        return True


def _position_of(entry: Entry) -> FramePosition:
    return FramePosition(entry.base_offset, entry.position, entry.size_bytes, entry.records)


def _body_bytes_min(entry: Entry) -> int:
    """Return the minimum size of a frame's body, without padding."""
    return entry.size_bytes - HEADER_BYTES - ALIGNMENT + 1


def _marker_again(reader: SegmentReader, state: SegmentShard, entry: Entry) -> bytes | None:
    """Return the transaction marker that a damaged frame held, or None if it held records.

    The index has the producer and the outcome. The epoch is unknown, and consumers do not use it.
    """
    if not entry.flags & IS_MARKER:
        return None
    marker = reader.index.outcomes.marker(state.number, entry.tag_mask, entry.last_offset)
    if marker is None or marker[0] != entry.last_offset:
        return None
    return (
        incoming(marker_batch(entry.tag_mask, 0, marker[1], entry.store_time_ms), entry.store_time_ms)
        .placed(entry.base_offset)
        .body
    )


def _batch(reader: SegmentReader, state: SegmentShard, entry: Entry, start: int) -> bytes | None:
    """Return a frame as a Kafka batch, or None if no record of it is left."""
    try:
        header, body = reader.frame_of(state, entry)
        deleted = reader.index.deleted(state.number, entry.base_offset, entry.last_offset) if state.deleted else []
        if header.kind == KAFKA and not deleted:
            return body
        is_aborted = entry.flags & IN_TRANSACTION and reader.index.outcomes.is_aborted(state.number, entry)
        columns = None if is_aborted else records_of(header, body, state.config.record_bytes_max)
    except (LimitExceededError, UnsupportedCodecError):
        # A batch that cannot be decoded is returned whole, with its deleted records, as before compaction.
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
