"""A lane that lost its end: segments removed or cut off behind what was durable."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import basaltmq
from basaltmq.log.verify import verify_log

pytestmark = pytest.mark.promise("P7")


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    with basaltmq.open(tmp_path / "data") as db:
        for at in range(5):
            db.topic("orders").append([b"%d" % at])
    assert verify_log(tmp_path / "data" / "log") == []
    return next((tmp_path / "data" / "log" / "0000").glob("*.log"))


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_segment_that_is_gone_is_named_by_verify_and_by_the_next_start(
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


def test_what_only_the_ring_holds_is_not_lost(tmp_path: Path) -> None:
    """A store that nobody closes: its last frames may lie in the ring alone."""
    db = basaltmq.open(tmp_path / "data")
    try:
        for at in range(50):
            db.topic("orders").append([b"%d" % at])
        assert verify_log(tmp_path / "data" / "log") == []
    finally:
        db.close()
