"""Readers and the cleaner of the segment engine during writes, and after damage."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest
from tests.unit.streams.segment_rig import SegmentRig

from basaltmq.durability import Durability
from basaltmq.errors import DamagedFrameError, StorePoisonedError
from basaltmq.log.batches.record import Record
from basaltmq.log.lane_options import SEGMENT_AGE_MS

WAIT_S = 30.0


@pytest.mark.promise("P7")
def test_damage_found_by_a_reader_is_logged_once_with_lane_and_position(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard()
    rig.put(shard, b"first")
    rig.put(shard, b"second")
    rig.engine.index.settle()
    entry = next(rig.engine.index.entries(shard, 1))
    log = rig.engine.lanes[0].log
    path = log.segment_at(entry.position).path
    raw = bytearray(path.read_bytes())
    raw[entry.position + 80] ^= 1
    path.write_bytes(raw)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            with pytest.raises(DamagedFrameError):
                rig.engine.read_by_offset(shard, 1)
            with pytest.raises(DamagedFrameError):
                rig.engine.read_kafka(shard, 1)
    (line,) = [each.getMessage() for each in caplog.records if "damaged frame" in each.getMessage()]
    assert f"lane {log.path} at position {entry.position}" in line
    assert f"shard {shard}, offsets 1 to 1" in line
    rig.close()


def test_the_cleaner_does_not_roll_a_segment_between_an_append_and_its_index_entry(tmp_path: Path) -> None:
    """The entry is counted for the active segment, so the frame must be in that segment."""
    rig = SegmentRig(tmp_path)
    shard = rig.shard()
    rig.put(shard, b"first")
    rig.now_ms += SEGMENT_AGE_MS + 1
    lane = rig.engine.lanes[0]
    with lane.lock:
        cleaning = threading.Thread(target=rig.engine._cleaner.clean)
        cleaning.start()
        cleaning.join(0.2)
        assert lane.log.active_start == 0
    cleaning.join(WAIT_S)
    assert lane.log.active_start > 0
    rig.close()


def test_an_engine_whose_lane_failed_closes_all_descriptors(tmp_path: Path) -> None:
    """An open descriptor keeps the space of a segment that the next writer has deleted."""
    rig = SegmentRig(tmp_path)
    shard = rig.shard(durability=Durability.SYNCED)
    rig.engine.wait(rig.engine.batch_write(shard, [Record(b"kept")]))
    rig.engine.read_by_offset(shard, 0)
    rig.engine.lanes[0].log.poison(OSError(28, "No space left on device"))
    with pytest.raises(StorePoisonedError, match="No space left"):
        rig.engine.close()
    held = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink() and each.exists()]
    assert [each for each in held if str(tmp_path) in each] == []
    rig.watermarks.close()
