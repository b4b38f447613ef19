"""A killed process whose log then loses its end: lost offsets are not assigned again, and the loss is named.

The index on disk knows nothing of the records, because it was never flushed.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.crash.lost_tail_child import TOPICS

import basaltmq
from basaltmq.cli.main import main
from basaltmq.log.ends import ENDS, read_ceilings, read_ends
from basaltmq.streams.engines.segment.ceilings import BLOCK_MIN

pytestmark = [pytest.mark.promise("P3", "P7"), pytest.mark.spec("B6")]

BATCHES = 60
CHILD_S = 60


def killed(path: Path, batches: int = BATCHES, topics: Sequence[str] = TOPICS) -> dict[str, int]:
    """Run the child and return the offset after the last confirmed one, by topic."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.crash.lost_tail_child", str(path), str(batches), *topics],
        stdout=subprocess.PIPE,
        timeout=CHILD_S,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.returncode == -signal.SIGKILL, f"the child ended with status {process.returncode}"
    return dict(zip(topics, map(int, process.stdout.split()), strict=True))


def last_segment(lane: Path) -> Path:
    return max(lane.glob("*.log"))


def truncate(lane: Path) -> None:
    (lane / "RING").unlink(missing_ok=True)
    os.truncate(last_segment(lane), 500)


def truncate_inside_a_frame(lane: Path) -> None:
    (lane / "RING").unlink(missing_ok=True)
    path = last_segment(lane)
    os.truncate(path, path.stat().st_size // 2 + 20)


def remove_segment_and_ring(lane: Path) -> None:
    (lane / "RING").unlink(missing_ok=True)
    last_segment(lane).unlink()


def remove_segments_and_committed(lane: Path) -> None:
    (lane / "COMMITTED").unlink()
    remove_segment_and_ring(lane)


def remove_lane(lane: Path) -> None:
    shutil.rmtree(lane)


def remove_log(lane: Path) -> None:
    shutil.rmtree(lane.parent)


def destroy_the_last_headers(lane: Path) -> None:
    (lane / "RING").unlink(missing_ok=True)
    path = last_segment(lane)
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2] + bytes(len(raw) - len(raw) // 2))


DAMAGES = [
    truncate,
    truncate_inside_a_frame,
    remove_segment_and_ring,
    remove_segments_and_committed,
    remove_lane,
    remove_log,
    destroy_the_last_headers,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda each: each.__name__)
def test_lost_offsets_are_not_assigned_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    path = tmp_path / "data"
    following = killed(path)
    damage(path / "log" / "0000")
    verify = CliRunner().invoke(main, ["--data-dir", str(path), "store", "verify", "--json"])
    assert verify.exit_code == 2, verify.output
    for topic in TOPICS:
        assert f"topic '{topic}'" in verify.output
    assert "may have lost offsets" in verify.output
    first: dict[str, int] = {}
    with caplog.at_level(logging.ERROR), basaltmq.open(path) as db:
        for topic, least in following.items():
            kept = list(db.topic(topic).read())
            assert [record.offset for record in kept] == list(range(len(kept))), "only the end is lost"
            first[topic] = db.topic(topic).append(b"new").offset
            assert least <= first[topic] <= 2 * BLOCK_MIN + least
            after = list(db.topic(topic).read())
            assert [record.offset for record in after] == [*range(len(kept)), first[topic]]
    assert "may have lost offsets" in caplog.text
    losses = (path / "quarantine" / "log-losses.txt").read_text()
    assert "may have lost offsets" in losses
    caplog.clear()
    with caplog.at_level(logging.ERROR), basaltmq.open(path) as db:
        assert {topic: db.topic(topic).append(b"next").offset for topic in TOPICS} == {
            topic: offset + 1 for topic, offset in first.items()
        }
    assert not caplog.text, "a loss is reported once"


def test_a_killed_process_leaves_no_gap(tmp_path: Path) -> None:
    path = tmp_path / "data"
    following = killed(path)
    assert read_ceilings(path)
    with basaltmq.open(path) as db:
        assert {topic: db.topic(topic).append(b"new").offset for topic in TOPICS} == following


def test_a_second_crash_during_the_loss_is_no_second_chance(tmp_path: Path) -> None:
    """The first start after the loss is killed too. The process after it still finds the loss."""
    path = tmp_path / "data"
    following = killed(path)
    remove_segments_and_committed(path / "log" / "0000")
    again = killed(path, batches=1)
    assert all(again[topic] > following[topic] for topic in TOPICS)
    remove_segments_and_committed(path / "log" / "0000")
    with basaltmq.open(path) as db:
        assert all(db.topic(topic).append(b"new").offset >= again[topic] for topic in TOPICS)


def test_a_clean_close_leaves_no_ceiling(tmp_path: Path) -> None:
    path = tmp_path / "data"
    killed(path)
    with basaltmq.open(path) as db:
        db.topic("busy").append(b"new")
    assert not read_ceilings(path)
    remove_segment_and_ring(path / "log" / "0000")
    with basaltmq.open(path) as db:
        following = db.streams.drivers.info("busy", 0).next_offset
        assert following == BATCHES * 3 + 1, "the index on disk shows all offsets, so the gap is exact"


def test_a_damaged_file_of_ends_is_reported_and_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "data"
    following = killed(path)
    raw = bytearray((path / ENDS).read_bytes())
    raw[8] ^= 1
    raw[4096 + 16] ^= 1
    (path / ENDS).write_bytes(raw)
    verify = CliRunner().invoke(main, ["--data-dir", str(path), "store", "verify", "--json"])
    assert verify.exit_code == 2
    assert "the end of lane 0 does not match its checksum" in verify.output
    assert "the ceiling of shard 1 does not match its check" in verify.output
    with caplog.at_level(logging.WARNING), basaltmq.open(path) as db:
        assert {topic: db.topic(topic).append(b"new").offset for topic in TOPICS} == following
    assert "does not match its checksum" in caplog.text
    assert not read_ends(path).faults
