"""A lane that lost durable bytes: segments removed or truncated, at its end or between others."""

from __future__ import annotations

import logging
import shutil
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

import basaltmq
from basaltmq.cli.main import main
from basaltmq.embedded.database import Basalt, Settings
from basaltmq.log.lane import Lane
from basaltmq.log.ring import SLOT_BYTES
from basaltmq.log.verify import verify_log
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.shards import Engine

pytestmark = pytest.mark.promise("P7")


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    with basaltmq.open(tmp_path / "data") as db:
        for at in range(5):
            db.topic("orders").append([b"%d" % at])
    assert verify_log(tmp_path / "data" / "log") == []
    return next((tmp_path / "data" / "log" / "0000").glob("*.log"))


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_missing_segment_is_named_by_verify_and_by_the_next_start(
    tmp_path: Path, segment: Path, caplog: pytest.LogCaptureFixture, is_removed: bool
) -> None:
    size = segment.stat().st_size
    if is_removed:
        segment.unlink()
    else:
        with open(segment, "r+b") as file:
            file.truncate(size // 2)
    faults = verify_log(tmp_path / "data" / "log")
    assert f"durable up to byte {size}: confirmed records are lost" in "\n".join(faults)
    with caplog.at_level(logging.ERROR), basaltmq.open(tmp_path / "data") as db:
        assert len(list(db.topic("orders").read())) < 5
    assert f"durable up to byte {size}: confirmed records are lost" in caplog.text


def test_frames_that_are_only_in_the_ring_are_not_lost(tmp_path: Path) -> None:
    """The store is not closed, so its last frames may be only in the ring."""
    db = basaltmq.open(tmp_path / "data")
    try:
        for at in range(50):
            db.topic("orders").append([b"%d" % at])
        assert verify_log(tmp_path / "data" / "log") == []
    finally:
        db.close()


def lane_of(db: Basalt) -> Lane:
    engine = db.streams.engines.get(Engine.SEGMENT)
    assert isinstance(engine, SegmentEngine)
    return engine.lanes[0].log


def killed_with_ring(tmp_path: Path) -> tuple[Path, Path]:
    """Return a store after SIGKILL with frames in the ring: its directory and its last segment."""
    # No maintenance: the files are copied while the store is open.
    with basaltmq.open(tmp_path / "open", settings=Settings(maintenance_interval_s=3600.0)) as db:
        topic = db.topic("orders")
        topic.append([b"0"])
        lane = lane_of(db)
        lane.roll()
        count = 1
        while lane._ring is None or lane._ring.used_bytes < 4 * SLOT_BYTES:
            topic.append([b"%d" % count])
            count += 1
            assert count < 100_000, "the lane has no ring"
        shutil.copytree(tmp_path / "open", tmp_path / "killed")
    return tmp_path / "killed", max((tmp_path / "killed" / "log" / "0000").glob("*.log"))


def test_durable_bytes_missing_from_lane_and_ring_are_named(tmp_path: Path) -> None:
    path, segment = killed_with_ring(tmp_path)
    begin, size = int(segment.stem), segment.stat().st_size
    with open(segment, "r+b") as file:
        file.truncate(100)
    [line] = [each for each in verify_log(path / "log") if "were durable" in each]
    held = int(line.split(" to ")[1].split(",")[0])
    assert f"lacks the bytes {begin + 100} to {held}, which were durable" in line
    assert begin + 100 < held < begin + size


def test_frames_of_a_removed_segment_are_restored_from_the_ring(tmp_path: Path) -> None:
    path, segment = killed_with_ring(tmp_path)
    with basaltmq.open(tmp_path / "open") as db:
        last = db.streams.drivers.info("orders", 0).high_watermark - 1
    segment.unlink()
    with basaltmq.open(path) as db:
        records = db.streams.drivers.read("orders", 0, last).records()
        assert [record.value for record in records] == [b"%d" % last]


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_missing_middle_segment_is_named_and_its_offsets_are_not_reused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_removed: bool
) -> None:
    path = tmp_path / "data"
    with basaltmq.open(path) as db:
        db.topic("busy").append([b"x"])
        lane_of(db).roll()
        begin = lane_of(db).end
        db.topic("idle").append([b"x"] * 7)
        lane_of(db).roll()
        end = lane_of(db).end
        db.topic("busy").append([b"x"])
    verify = partial(CliRunner().invoke, main, ["--data-dir", str(path), "store", "verify", "--json"])
    assert verify().exit_code == 0, verify().output
    segment = path / "log" / "0000" / f"{begin:020d}.log"
    if is_removed:
        segment.unlink()
    else:
        with open(segment, "r+b") as file:
            file.truncate(0)
    said = f"lacks the bytes {begin} to {end}, which were durable"
    assert said in verify().output
    with caplog.at_level(logging.ERROR), basaltmq.open(path) as db:
        info = db.streams.drivers.info("idle", 0)
        assert (info.high_watermark, info.records) == (7, 0)
    assert said in caplog.text
    assert "has lost offsets 0 to 6" in caplog.text


def test_segments_that_cleaning_deleted_are_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with basaltmq.open(path) as db:
        db.topic("kept").append([b"x"])
        db.topic("dropped").append([b"x" * 4096] * 50)
        lane_of(db).roll()
        db.topic("kept").append([b"x"])
        before = sorted(path.glob("log/0000/*.log"))
        db.delete_topic("dropped")
        db.streams.engines.retain(0)
        assert sorted(path.glob("log/0000/*.log")) != before
    verify = CliRunner().invoke(main, ["--data-dir", str(path), "store", "verify", "--json"])
    assert verify.exit_code == 0, verify.output


def test_zeros_are_not_reported_as_a_frame(tmp_path: Path, segment: Path) -> None:
    raw = segment.read_bytes()
    # Five frames of the same size.
    begin, end = len(raw) // 5, len(raw) * 3 // 5
    segment.write_bytes(raw[:begin] + bytes(end - begin) + raw[end:])
    [fault] = verify_log(tmp_path / "data" / "log")
    assert fault.endswith(f"bytes {begin} to {end}: no frame starts here")
