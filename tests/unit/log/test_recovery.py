"""Recovery of a lane with every flipped byte and every truncation."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.log_frames import encode_batch
from tests.unit.log.test_lane import open_lane

from basaltmq.log import recovery
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.record import Record
from basaltmq.log.lane import Lane
from basaltmq.log.recovery import Damage, Found, repair, scan

FRAMES = [(1, 0, 2), (2, 0, 1), (1, 2, 3), (2, 1, 2), (1, 5, 1), (2, 3, 1)]
"""(shard, base offset, records) of a small log."""


def frame_of(lane: Lane, shard: int, base: int, count: int) -> bytes:
    batch = ColumnBatch.from_records([Record(b"%d:%d" % (shard, base + at), timestamp_ms=at) for at in range(count)], 0)
    return b"".join(encode_batch(lane.seed, shard, base, batch, 7))


def write_log(path: Path, segment_bytes: int = 1 << 20) -> list[tuple[int, int]]:
    """Write a small log. Return (position, size) of each frame."""
    lane = open_lane(path, segment_bytes=segment_bytes)
    placed = []
    for shard, base, count in FRAMES:
        raw = frame_of(lane, shard, base, count)
        placed.append((lane.append((raw,), len(raw)), len(raw)))
    lane.close()
    return placed


def keys_of(found: list[Found]) -> list[tuple[int, int, int]]:
    return [(each.header.shard, each.header.base_offset, each.header.records) for each in found]


@pytest.fixture
def log(tmp_path: Path) -> tuple[Path, list[tuple[int, int]], bytes]:
    path = tmp_path / "lane"
    placed = write_log(path)
    return path, placed, next(path.glob("*.log")).read_bytes()


def covered(damages: list[Damage], found: list[Found]) -> set[tuple[int, int]]:
    """Return (shard, offset) of the losses named by headers and by gaps."""
    named = {
        (damage.shard, offset)
        for damage in damages
        if damage.shard is not None and damage.base_offset is not None and damage.last_offset is not None
        for offset in range(damage.base_offset, min(damage.last_offset, damage.base_offset + 50) + 1)
    }
    following: dict[int, int] = {}
    for header in (each.header for each in found):
        named |= {(header.shard, offset) for offset in range(following.get(header.shard, 0), header.base_offset)}
        following[header.shard] = header.last_offset + 1
    return named


@pytest.mark.promise("P7")
def test_every_flipped_byte_loses_one_frame_and_is_named(log: tuple[Path, list[tuple[int, int]], bytes]) -> None:
    path, placed, raw = log
    file = next(path.glob("*.log"))
    for at in range(len(raw)):
        file.write_bytes(raw[:at] + bytes((raw[at] ^ 0x41,)) + raw[at + 1 :])
        lane = open_lane(path)
        damages: list[Damage] = []
        found = list(scan(lane, 0, damages))
        hit = next(n for n, (begin, size) in enumerate(placed) if begin <= at < begin + size)
        assert keys_of(found) == FRAMES[:hit] + FRAMES[hit + 1 :], f"byte {at}"
        assert len(damages) == 1
        begin, size = placed[hit]
        assert (damages[0].begin, damages[0].end) == (begin, begin + size)
        assert file.name in str(damages[0])
        shard, base, count = FRAMES[hit]
        lost = {(shard, offset) for offset in range(base, base + count)}
        assert lost <= covered(damages, found), f"byte {at}"
        lane.close()


@pytest.mark.promise("P7")
def test_every_truncation_is_cut_to_the_last_complete_frame(
    log: tuple[Path, list[tuple[int, int]], bytes], tmp_path: Path
) -> None:
    path, placed, raw = log
    file = next(path.glob("*.log"))
    ends = [begin + size for begin, size in placed]
    for length in range(len(raw) + 1):
        file.write_bytes(raw[:length])
        lane = open_lane(path)
        found: list[Found] = []
        repaired = repair(lane, 0, tmp_path / "quarantine", found.append)
        whole = sum(end <= length for end in ends)
        assert keys_of(found) == FRAMES[:whole]
        assert lane.end == ([0, *ends])[whole]
        if lane.end == length:
            assert repaired.cut is None
            assert not repaired.damages
        else:
            assert repaired.cut is not None
            assert repaired.cut.read_bytes() == raw[lane.end : length]
            repaired.cut.unlink()
            if length - lane.end >= 72:
                damage = repaired.damages[0]
                shard, base, count = FRAMES[whole]
                assert (damage.shard, damage.base_offset, damage.last_offset) == (shard, base, base + count - 1)
                assert damage.certain
        again = frame_of(lane, 9, 0, 1)
        assert lane.append((again,), len(again)) == ([0, *ends])[whole]
        assert keys_of(list(scan(lane, 0))) == [*FRAMES[:whole], (9, 0, 1)]
        lane.close()


@pytest.mark.promise("P7")
@pytest.mark.parametrize("junk", [bytes(64), b"\xff" * 72, b"BSFM" * 40])
def test_a_tail_of_random_bytes_goes_to_quarantine(
    log: tuple[Path, list[tuple[int, int]], bytes], tmp_path: Path, junk: bytes
) -> None:
    path, _, raw = log
    next(path.glob("*.log")).write_bytes(raw + junk)
    lane = open_lane(path)
    repaired = repair(lane, 0, tmp_path / "quarantine")
    assert repaired.cut is not None
    assert repaired.cut.read_bytes() == junk
    assert lane.end == len(raw)
    lane.close()


@pytest.mark.promise("P7")
def test_a_hole_of_zeros_is_skipped_and_later_frames_are_kept(log: tuple[Path, list[tuple[int, int]], bytes]) -> None:
    path, placed, raw = log
    begin, end = placed[2][0] + 20, placed[3][0] + 90
    next(path.glob("*.log")).write_bytes(raw[:begin] + bytes(end - begin) + raw[end:])
    lane = open_lane(path)
    damages: list[Damage] = []
    found = list(scan(lane, 0, damages))
    assert keys_of(found) == FRAMES[:2] + FRAMES[4:]
    assert {(1, 2), (1, 3), (1, 4), (2, 1), (2, 2)} <= covered(damages, found)
    lane.close()


@pytest.mark.promise("P7")
def test_a_record_with_the_bytes_of_a_frame_is_not_parsed_as_one(tmp_path: Path) -> None:
    path = tmp_path / "lane"
    lane = open_lane(path)
    stranger = Lane.open(tmp_path / "other", clock_ms=lambda: 0, random_u32=lambda: 78)
    forged = frame_of(stranger, 666, 0, 1)
    batch = ColumnBatch.from_records([Record(bytes(pad) + forged, timestamp_ms=0) for pad in range(8)], 0)
    raw = b"".join(encode_batch(lane.seed, 1, 0, batch, 7))
    lane.append((raw,), len(raw))
    good = frame_of(lane, 1, 8, 1)
    lane.append((good,), len(good))
    lane.close()
    stranger.close()
    file = next(path.glob("*.log"))
    file.write_bytes(bytes(8) + file.read_bytes()[8:])
    again = open_lane(path)
    assert keys_of(list(scan(again, 0))) == [(1, 8, 1)]
    again.close()


def test_a_scan_starts_at_any_frame_and_crosses_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placed = write_log(tmp_path, segment_bytes=300)
    # So small that frames cross chunks.
    monkeypatch.setattr(recovery, "CHUNK_BYTES", 80)
    lane = open_lane(tmp_path)
    assert len(lane.segments()) > 2
    for number, (position, _) in enumerate(placed):
        assert keys_of(list(scan(lane, position))) == FRAMES[number:]
        assert keys_of(list(scan(lane, 0, end=position))) == FRAMES[:number]
    lane.close()


@pytest.mark.promise("P7")
def test_the_search_for_the_next_frame_crosses_chunks(
    log: tuple[Path, list[tuple[int, int]], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _, raw = log
    monkeypatch.setattr(recovery, "CHUNK_BYTES", 76)
    file = next(path.glob("*.log"))
    file.write_bytes(bytes(16) + raw[16:])
    lane = open_lane(path)
    assert keys_of(list(scan(lane, 0))) == FRAMES[1:]
    lane.close()


def test_foreign_files_are_quarantined(log: tuple[Path, list[tuple[int, int]], bytes], tmp_path: Path) -> None:
    path, _, _ = log
    (path / "notes.txt").write_text("mine")
    lane = open_lane(path)
    repaired = repair(lane, 0, tmp_path / "quarantine")
    assert [moved.read_text() for moved in repaired.quarantined] == ["mine"]
    assert not (path / "notes.txt").exists()
    lane.close()
