"""Frames: round trips, and detection of every flipped bit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.log_frames import encode_batch
from tests.unit.log.strategies import BATCHES

from basaltmq.errors import CorruptionError
from basaltmq.log import frame
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.record import Record
from basaltmq.log.frame import HEADER_BYTES, check_body, decode_batch, decode_deletes, decode_header

SEED = 0xC0FFEE


def whole(shard: int, base: int, records: list[Record], seed: int = SEED) -> bytes:
    return b"".join(encode_batch(seed, shard, base, ColumnBatch.from_records(records, 0), 1234))


def read_whole(raw: bytes) -> None:
    check_body(decode_header(SEED, raw), raw[HEADER_BYTES:])


@pytest.mark.spec("B6")
@given(BATCHES, st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 63) - 1))
def test_a_frame_decodes_to_its_batch(records: list[Record], shard: int, base: int) -> None:
    raw = whole(shard, base, records)
    header = decode_header(SEED, raw)
    body = raw[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
    check_body(header, body)
    assert (header.shard, header.base_offset, header.records) == (shard, base, len(records))
    assert header.last_offset == base + len(records) - 1
    assert header.store_time_ms == 1234
    assert header.size_bytes == len(raw)
    assert len(raw) % frame.ALIGNMENT == 0
    assert [record.value for record in decode_batch(header, body).records(0)] == [r.value for r in records]


@pytest.mark.promise("P7")
def test_every_flipped_bit_is_detected() -> None:
    raw = whole(3, 40, [Record(b"abc", timestamp_ms=1), Record(b"de", timestamp_ms=2)])
    for at in range(len(raw)):
        for bit in range(8):
            damaged = bytearray(raw)
            damaged[at] ^= 1 << bit
            with pytest.raises(CorruptionError):
                read_whole(bytes(damaged))


@pytest.mark.promise("P7")
def test_a_frame_of_another_lane_is_refused() -> None:
    raw = whole(3, 40, [Record(b"abc", timestamp_ms=1)], seed=SEED + 1)
    with pytest.raises(CorruptionError):
        decode_header(SEED, raw)


@given(st.lists(st.integers(0, (1 << 63) - 1), min_size=1, max_size=9, unique=True))
def test_deleted_offsets_survive_a_round_trip(offsets: list[int]) -> None:
    offsets = sorted(offsets)[:1] + [each for each in sorted(offsets)[1:] if each - min(offsets) < 1 << 32]
    raw = b"".join(frame.encode_deletes(SEED, 9, offsets, 5))
    header = decode_header(SEED, raw)
    assert (header.kind, header.shard, header.base_offset, header.last_offset) == (
        frame.DELETES,
        9,
        offsets[0],
        offsets[-1],
    )
    assert decode_deletes(raw[HEADER_BYTES:]) == offsets


@pytest.mark.promise("P7")
@given(st.binary(max_size=150))
def test_random_bytes_are_not_a_frame(noise: bytes) -> None:
    with pytest.raises(CorruptionError):
        decode_header(SEED, noise)


def test_a_list_of_deletes_of_odd_length_is_refused() -> None:
    with pytest.raises(CorruptionError, match="multiple of 8"):
        decode_deletes(b"123456789")
