"""Kafka batches of one shard that follow one another in the log, taken as they lie there.

A consumer that goes through a partition mostly meets batches of one producer, end to end. `take_batches` reads them in
pieces, checks each frame with both its checksums and hands out the bodies; the index is not asked. A large body is read
by itself, into the bytes that go to the socket; small ones are read together and cut out.

Anything out of the ordinary ends the taking: another shard or kind of frame, a gap, a copy made by cleaning, damage,
the end of the segment. What it is, is for the caller to find out with care.

Invariants: batches are dense and lie below `end`; together they have at most `bytes_max` bytes, but for the first of
all. Budget: 75 us per MiB for the checksum and 60 us for the copy out of the page cache.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import google_crc32c

from basaltmq.errors import SegmentGoneError
from basaltmq.log.frame import AWAITED, HEADER, HEADER_BYTES, KAFKA, MAGIC
from basaltmq.log.lane import Lane

PIECE_BYTES: Final = 256 << 10
"""Read at once where frames are small: enough to make the call cheap, little enough to stay in the cache."""

LARGE_BYTES: Final = 64 << 10
"""A frame above it is read by itself: a call more costs less than to copy it."""

_crc32c = google_crc32c.value
_extend = google_crc32c.extend


class TakenBatches(NamedTuple):
    """What `take_batches` found."""

    batches: list[bytes]
    next_offset: int
    position: int
    """Where it stopped."""
    size_bytes: int
    """Of the batches."""
    is_next: bool
    """A batch of the shard comes next, and is over the limit."""


def take_batches(
    log: Lane,
    shard: int,
    base_offset: int,
    end: int,
    position: int,
    bytes_max: int,
    *,
    likely_bytes: int,
    is_first: bool,
) -> TakenBatches:
    """The batches from the frame at `position` on, which should begin with `base_offset`, to below `end`.

    `likely_bytes` is what a frame may have; with `is_first` the first batch is taken whatever its size.
    """
    seed = log.seed
    batches: list[bytes] = []
    expected = base_offset
    left = bytes_max
    raw = b""
    at = 0
    is_next = False
    while expected < end:
        if at + HEADER_BYTES > len(raw):
            position += at
            at = 0
            is_large = likely_bytes > LARGE_BYTES
            raw = _read(
                log, position, HEADER_BYTES if is_large else max(HEADER_BYTES, min(PIECE_BYTES, left + LARGE_BYTES))
            )
            if len(raw) < HEADER_BYTES:
                break
        begin = at + HEADER_BYTES
        magic, header_crc, body_crc, length, of, base, _, last_delta, _, _, _, kind, flags, _, _ = HEADER.unpack_from(
            raw, at
        )
        if base != expected or of != shard or flags & ~AWAITED or kind != KAFKA or magic != MAGIC:
            break
        if header_crc != _extend(seed, raw[at + 8 : begin]):
            break
        if length > left and not (is_first and not batches):
            is_next = True
            break
        likely_bytes = HEADER_BYTES + length + (-length & 7)
        if begin + length > len(raw):
            if likely_bytes <= LARGE_BYTES and at:
                # Cut off by the end of the piece: the next one begins with it.
                position += at
                at = 0
                raw = b""
                continue
            body = _read(log, position + begin, length)
        else:
            body = raw[begin : begin + length]
        if len(body) != length or _crc32c(body) != body_crc:
            break
        batches.append(body)
        left -= length
        expected += last_delta + 1
        at += likely_bytes
        if at > len(raw):
            position += at
            at = 0
            raw = b""
    return TakenBatches(batches, expected, position + at, bytes_max - left, is_next)


def _read(log: Lane, position: int, size_bytes: int) -> bytes:
    """Bytes of the log, none where its segment ends."""
    try:
        return log.read(position, size_bytes)
    except SegmentGoneError:
        return b""
