"""Damaged durable frames at the end of a lane are reported by verify and by the next open."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import basaltmq
from basaltmq.cli.main import main
from basaltmq.embedded.database import Basalt
from basaltmq.errors import BasaltError
from basaltmq.log import ring
from basaltmq.log.committed import read_mark
from basaltmq.log.lane import Lane
from basaltmq.log.marker import read_seed
from basaltmq.log.verify import verify_log
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.shards import Engine

FRAMES_MAX = 5_000


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """Create a store as SIGKILL leaves it, with two frames of one shard and then one of another."""
    with basaltmq.open(tmp_path / "open") as db:
        topic = db.topic("orders", partitions=2)
        for partition in (0, 0, 1):
            topic.append(b"x" * 100, partition=partition)
        shutil.copytree(tmp_path / "open", tmp_path / "killed")
    return tmp_path / "killed"


def segment_of(path: Path) -> Path:
    (segment,) = (path / "log").glob("*/*.log")
    return segment


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.mark.promise("P1", "P7")
def test_damaged_last_frame_is_reported_by_verify_and_open(killed: Path, caplog: pytest.LogCaptureFixture) -> None:
    segment = segment_of(killed)
    end = len(segment.read_bytes())
    flip(segment, end - 20)
    (fault,) = verify_log(killed / "log")
    assert "lost: shard 2, offsets 0 to 0" in fault
    with caplog.at_level(logging.ERROR), basaltmq.open(killed) as db:
        assert [record.offset for record in db.topic("orders", create=False).read(0)] == [0, 1]
    assert "lost: shard 2, offsets 0 to 0" in caplog.text


@pytest.mark.promise("P7")
@pytest.mark.parametrize("how", ["zeros", "truncated"])
def test_verify_reports_every_record_in_damaged_bytes(tmp_path: Path, how: str) -> None:
    """A page of zeros hides the headers of all later frames. A truncated file hides all."""
    path = tmp_path / "data"
    with basaltmq.open(path) as db:
        topic = db.topic("orders", partitions=2)
        for at in range(20):
            topic.append(b"x" * 100, partition=at % 2)
    segment = segment_of(path)
    raw = segment.read_bytes()
    begin = len(raw) // 2
    segment.write_bytes(raw[:begin] + (bytes(1000) + raw[begin + 1000 :] if how == "zeros" else b""))
    answer = CliRunner().invoke(main, ["--data-dir", str(path), "store", "verify", "--json"])
    said = {
        int(shard): (int(first), int(last), topic)
        for shard, first, last, topic in re.findall(
            r"lost: shard (\d+), offsets (\d+) to (\d+) \((topic 'orders'\[\d\])\)", answer.output
        )
    }
    with basaltmq.open(path, create=False) as db:
        topic = db.topic("orders", create=False)
        for partition in range(2):
            first, last, name = said[partition + 1]
            assert name == f"topic 'orders'[{partition}]"
            readable = set()
            for offset in range(10):
                with contextlib.suppress(BasaltError):
                    readable |= {record.offset for record in topic.read(partition, offset, limit=1)}
            assert set(range(first, last + 1)) == set(range(10)) - readable


@pytest.mark.promise("P7")
def test_damaged_last_frame_of_a_shard_is_reported_without_an_index(
    killed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The index is lost, so the open reads the whole log."""
    segment = segment_of(killed)
    flip(segment, len(segment.read_bytes()) * 2 // 3 - 20)
    with caplog.at_level(logging.ERROR), basaltmq.open(killed) as db:
        assert [record.offset for record in db.topic("orders", create=False).read(1)] == [0]
    assert "lost: shard 1, offsets 1 to 1" in caplog.text


@pytest.mark.promise("P7")
def test_missing_bytes_in_the_middle_are_reported(killed: Path, caplog: pytest.LogCaptureFixture) -> None:
    segment = segment_of(killed)
    raw = segment.read_bytes()
    segment.write_bytes(raw[:10] + raw[13:])
    with caplog.at_level(logging.ERROR), basaltmq.open(killed):
        pass
    assert f"{segment} bytes 0 to {len(raw) - 3}" in caplog.text


@pytest.mark.promise("P7")
def test_torn_tail_that_was_not_durable_is_no_fault(killed: Path, caplog: pytest.LogCaptureFixture) -> None:
    segment = segment_of(killed)
    mark = read_mark(segment.parent)
    assert mark is not None
    assert mark.synced_position == len(segment.read_bytes())
    with open(segment, "ab") as file:
        file.write(b"half a frame")
    assert verify_log(killed / "log") == []
    with caplog.at_level(logging.ERROR), basaltmq.open(killed) as db:
        assert len(list(db.topic("orders", create=False).read(0))) == 2
    assert caplog.text == ""


@pytest.mark.promise("P7")
@pytest.mark.parametrize("what", ["the directory", "the lane"])
def test_missing_log_is_reported_at_open(tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str) -> None:
    """The file COMMITTED is lost too. The index holds the durable end of the log."""
    with basaltmq.open(tmp_path / "data") as db:
        db.topic("orders").append([b"x"] * 10)
    end = len(segment_of(tmp_path / "data").read_bytes())
    shutil.rmtree(tmp_path / "data" / "log" / ("" if what == "the directory" else "0000"))
    with caplog.at_level(logging.ERROR), basaltmq.open(tmp_path / "data") as db:
        assert list(db.topic("orders", create=False).read()) == []
    assert f"ends at byte 0, but was durable up to byte {end}" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.ERROR), basaltmq.open(tmp_path / "data"):
        pass
    assert caplog.text == ""


@pytest.mark.promise("P1", "P7")
def test_torn_tail_that_the_ring_holds_is_no_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A power loss may tear a segment although the ring has made its frames durable."""
    with basaltmq.open(tmp_path / "open") as db:
        topic = db.topic("orders", partitions=1)
        lane = tmp_path / "open" / "log" / "0000"
        seed = read_seed(lane)
        count = size = 0
        # The ring is created in the background. Reads also write the frames to the segment.
        while not size or ring.gaps(lane, seed, size - 50, size):
            topic.append(b"x" * 100, partition=0)
            count += 1
            assert count < FRAMES_MAX, "the lane has no ring"
            assert len(list(topic.read(0))) == count
            size = segment_of(tmp_path / "open").stat().st_size
        shutil.copytree(tmp_path / "open", tmp_path / "killed")
    path = tmp_path / "killed"
    segment = segment_of(path)
    assert ring.gaps(segment.parent, seed, 0, size + 4096)[-1] == (size, size + 4096)
    flip(segment, size - 50)
    assert verify_log(path / "log") == []
    with caplog.at_level(logging.ERROR), basaltmq.open(path) as db:
        assert len(list(db.topic("orders", create=False).read(0))) == count
    assert caplog.text == ""


def log_of(db: Basalt) -> Lane:
    engine = db.streams.engines.get(Engine.SEGMENT)
    assert isinstance(engine, SegmentEngine)
    return engine.lanes[0].log


@pytest.mark.promise("P7")
@pytest.mark.parametrize(("is_copy", "is_indexed"), [(True, False), (False, False), (False, True)])
def test_exchanged_or_copied_segments_keep_records_and_offsets(tmp_path: Path, is_copy: bool, is_indexed: bool) -> None:
    with basaltmq.open(tmp_path / "open") as db:
        topic = db.topic("orders", partitions=1)
        for at in range(3):
            topic.append([b"%02d" % (10 * at + each) for each in range(10)], partition=0)
            log_of(db).roll()
            if is_indexed and at == 1:
                # The index on disk covers the first exchanged segment.
                db.streams.engines.get(Engine.SEGMENT).checkpoint()  # type: ignore[attr-defined]
        # As SIGKILL leaves it: the index is built from the log.
        shutil.copytree(tmp_path / "open", tmp_path / "killed")
    path = tmp_path / "killed"
    _, one, two, last = sorted((path / "log" / "0000").glob("*.log"))
    if is_copy:
        shutil.copyfile(one, last)
    else:
        raw = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(raw)
    [fault] = verify_log(path / "log")
    assert "segments were exchanged or copied" in fault
    expected = [b"%02d" % at for at in range(30)]
    for _ in range(2):
        with basaltmq.open(path) as db:
            assert [record.value for record in db.topic("orders", create=False).read(0)] == expected
            assert db.streams.drivers.info("orders", 0).records == len(expected)
            db.topic("orders", create=False).append(b"next", partition=0)
            expected.append(b"next")
