"""Ceilings of offsets: recorded in ENDS before an append needs them, used after the log lost bytes."""

from __future__ import annotations

import errno
import os
import sys
import threading
from pathlib import Path

import pytest
from tests.unit.streams.segment_rig import SegmentRig

from basaltmq.errors import InvalidArgumentError
from basaltmq.log.batches.record import StoredRecord
from basaltmq.log.ends import ENDS, EndsFile, read_ceilings
from basaltmq.log.recovery import Loss
from basaltmq.streams.engines.segment.ceilings import BLOCK_MAX, BLOCK_MIN, ceilings_of
from basaltmq.streams.shards import OFFSET_MAX

pytestmark = [pytest.mark.promise("P3"), pytest.mark.spec("B6")]


def faults_forbidden(fault: str) -> None:
    raise AssertionError(fault)


def ceilings(rig: SegmentRig) -> dict[int, int]:
    return ceilings_of(rig.store, rig.path, 0)


def test_a_block_is_as_large_as_the_shard_within_bounds(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard()
    rig.put(shard, b"a")
    assert ceilings(rig) == {shard: 1 + BLOCK_MIN}
    rig.put(shard, *[b"x"] * (BLOCK_MIN - 1))
    rig.put(shard, b"b")
    assert ceilings(rig) == {shard: 1 + BLOCK_MIN}, "nothing to write below the ceiling"
    rig.put(shard, b"c")
    assert ceilings(rig) == {shard: 3 + 2 * BLOCK_MIN}
    state = rig.engine._states.get(shard)
    rig.engine.ceilings.raise_above(state, 10_000_000)
    assert ceilings(rig) == {shard: 10_000_001 + BLOCK_MAX}
    rig.engine.ceilings.raise_above(state, OFFSET_MAX - 1)
    assert ceilings(rig) == {shard: OFFSET_MAX}
    with pytest.raises(InvalidArgumentError, match="no offsets left"):
        rig.engine.ceilings.raise_above(state, OFFSET_MAX)
    rig.close()


def test_ceilings_survive_a_crash_until_a_clean_close(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    shards = [rig.shard() for _ in range(3)]
    rig.put(shards[0], b"a")
    rig.put(shards[2], b"a")
    rig.crash()
    rig.open()
    assert ceilings(rig) == {shards[0]: 1 + BLOCK_MIN, shards[2]: 1 + BLOCK_MIN}
    rig.close()
    assert not ceilings(rig)


def test_only_shards_that_are_written_take_blocks_of_the_file(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    state = rig.engine._states.get(rig.shard())
    numbers = [1, 4095, 4096, 1_000_000, 50_000_000]
    for number in numbers:
        state.number = number
        rig.engine.ceilings.raise_above(state, 0)
    assert read_ceilings(tmp_path) == dict.fromkeys(numbers, 1 + BLOCK_MIN)
    assert (tmp_path / ENDS).stat().st_blocks * 512 <= 6 << 16
    rig.crash()
    faults: list[str] = []
    assert read_ceilings(tmp_path, faults) == dict.fromkeys(numbers, 1 + BLOCK_MIN)
    assert not faults


def test_ceilings_of_many_threads_are_all_there(tmp_path: Path) -> None:
    file = EndsFile(tmp_path, faults_forbidden)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def work(first: int) -> None:
        for shard in range(first, 200_000, 4):
            file.put(shard, shard + 7)

    try:
        threads = [threading.Thread(target=work, args=(at,)) for at in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert read_ceilings(tmp_path) == {shard: shard + 7 for shard in range(1, 200_000)}
    file.close(clear=False)


def test_a_flipped_bit_makes_a_ceiling_unknown(tmp_path: Path) -> None:
    file = EndsFile(tmp_path, faults_forbidden)
    file.put(3, 1025)
    file.put(4, 1025)
    file.close(clear=False)
    whole = (tmp_path / ENDS).read_bytes()
    for bit in range(128):
        raw = bytearray(whole)
        raw[4096 + 3 * 16 + bit // 8] ^= 1 << bit % 8
        (tmp_path / ENDS).write_bytes(raw)
        faults: list[str] = []
        assert read_ceilings(tmp_path, faults) == {4: 1025}
        assert len(faults) == 1
        assert "shard 3" in faults[0]


def test_without_space_for_the_file_the_log_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    rig = SegmentRig(tmp_path)
    shard = rig.shard()
    assert [rig.put(shard, b"a") for _ in range(3)] == [0, 1, 2]
    assert not ceilings(rig)
    rig.close()


def test_a_file_that_cannot_be_opened_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ENDS).mkdir()
    rig = SegmentRig(tmp_path)
    shard = rig.shard()
    assert rig.put(shard, b"a") == 0
    rig.close()
    assert "ENDS cannot be written" in caplog.text


def test_offsets_placed_by_a_migration_have_a_ceiling(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard()
    rig.engine.append_at(shard, [StoredRecord(b"a", offset=5_000)], 6_000)
    assert ceilings(rig)[shard] >= 6_000
    rig.close()


def test_a_damaged_last_frame_in_the_middle_of_the_log_keeps_its_offsets(tmp_path: Path) -> None:
    """Its header is intact, and frames of another shard follow it."""
    rig = SegmentRig(tmp_path)
    shard, other = rig.shard(), rig.shard()
    rig.put(shard, b"a", b"b")
    at = rig.engine.lanes[0].log.end
    rig.put(shard, b"lost " * 20)
    rig.put(other, b"c")
    rig.engine.lanes[0].log.sync()
    rig.crash()
    rig.wipe_index()
    with open(next((tmp_path / "log" / "0000").glob("*.log")), "r+b") as file:
        file.seek(at + 100)
        file.write(b"\xff" * 8)
    rig.open()
    assert Loss(shard, 2, 2) in rig.engine.losses
    assert rig.put(shard, b"new") == 3
    assert rig.put(other, b"new") == 1
    rig.close()


def test_a_shard_with_frames_behind_the_damage_continues_without_a_gap(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    shard, other = rig.shard(), rig.shard()
    rig.put(other, b"c")
    at = rig.engine.lanes[0].log.end
    rig.put(shard, b"lost " * 20)
    rig.put(other, b"c")
    rig.engine.lanes[0].log.sync()
    rig.crash()
    rig.wipe_index()
    with open(next((tmp_path / "log" / "0000").glob("*.log")), "r+b") as file:
        file.seek(at)
        file.write(bytes(72))
    rig.open()
    assert rig.put(other, b"new") == 2
    assert rig.put(shard, b"new") == 1 + BLOCK_MIN
    assert Loss(shard, 0, BLOCK_MIN, certain=False) in rig.engine.losses
    rig.close()
