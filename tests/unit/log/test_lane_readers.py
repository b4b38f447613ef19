"""Lock-free reads of a lane: a durable frame is complete at every step of the writer."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.log.test_ring import SEED, frame, gather, open_lane, ringed

from basaltmq.log.frame import HEADER_BYTES, check_body, decode_header
from basaltmq.log.lane import Lane
from basaltmq.log.mover import MOVED_BYTES_MIN, Mover
from basaltmq.log.ring import SLOT_BYTES
from basaltmq.log.segment import Listed

WAIT_S = 30.0
STRESS_S = 2.0
READERS = 3
RING_BYTES = 64 * SLOT_BYTES * (1 + MOVED_BYTES_MIN // SLOT_BYTES)


@pytest.fixture
def restless() -> Iterator[None]:
    """Switch threads after almost every bytecode."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def read_in_thread(lane: Lane, position: int, size_bytes: int) -> tuple[threading.Thread, list[bytes]]:
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(lane.read(position, size_bytes)))
    thread.start()
    return thread, found


@pytest.mark.promise("P7")
@pytest.mark.parametrize("size", [8, MOVED_BYTES_MIN])
def test_a_read_between_two_steps_of_the_writer_waits_for_the_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The frames are no longer gathered, and the mover has not started."""
    lane = ringed(tmp_path / "lane", ring_bytes=RING_BYTES)
    position = lane.end
    whole = gather(lane, 1, bytes(size))
    reads: list[tuple[threading.Thread, list[bytes]]] = []
    begin = Mover.begin

    def held_up(mover: Mover) -> None:
        if not reads:
            reads.append(read_in_thread(lane, position, len(whole)))
            # Long enough for a read that does not wait for the writer.
            reads[0][0].join(0.2)
        begin(mover)

    monkeypatch.setattr(Mover, "begin", held_up)
    lane.sync_through_ring()
    lane.move_ring_frames()
    ((thread, found),) = reads
    thread.join(WAIT_S)
    assert found == [whole]
    lane.close()


def test_write_gathered_returns_only_after_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is written after `write_gathered` returns, so it must not return early."""
    lane = ringed(tmp_path / "lane")
    gather(lane, 1)
    lane.sync_through_ring()
    end = lane.end
    path = lane.segments()[-1].path
    sizes: list[int] = []
    threads: list[threading.Thread] = []
    begin = Mover.begin

    def look() -> None:
        lane.write_gathered()
        sizes.append(path.stat().st_size)

    def held_up(mover: Mover) -> None:
        threads.append(threading.Thread(target=look))
        threads[0].start()
        threads[0].join(0.2)
        begin(mover)

    monkeypatch.setattr(Mover, "begin", held_up)
    lane.move_ring_frames()
    threads[0].join(WAIT_S)
    assert sizes == [end]
    lane.close()


@pytest.mark.promise("P7")
def test_readers_find_every_durable_frame_during_writes(tmp_path: Path, restless: None) -> None:
    lane = ringed(tmp_path / "lane", ring_bytes=RING_BYTES, segment_bytes=1 << 20)
    places: list[tuple[int, int]] = []
    faults: list[str] = []
    reads = [0] * READERS
    stop = threading.Event()

    def read(number: int) -> None:
        seen = 0
        while not stop.is_set() and not faults:
            # The newest frames are being moved from the ring to the segment.
            seen = max(seen, len(places) - 4)
            while seen < len(places):
                offset = seen
                position, size_bytes = places[offset]
                seen += 1
                raw = lane.read(position, size_bytes)
                try:
                    header = decode_header(SEED, raw)
                    check_body(header, raw[HEADER_BYTES : HEADER_BYTES + header.body_bytes])
                    assert header.base_offset == offset + 1
                except Exception as error:
                    faults.append(f"position {position}: {len(raw)} of {size_bytes} bytes, {error}")
                reads[number] += 1

    readers = [threading.Thread(target=read, args=(number,)) for number in range(READERS)]
    for reader in readers:
        reader.start()
    until = time.monotonic() + STRESS_S
    try:
        while time.monotonic() < until and not faults:
            added = []
            # Every eighth group is large enough for the mover's thread.
            for at in range(4):
                size = MOVED_BYTES_MIN // 2 if len(places) % 32 == 0 else 32
                position = lane.end
                whole = gather(lane, len(places) + at + 1, bytes(size))
                added.append((position, len(whole)))
            lane.sync_through_ring()
            places += added
            lane.move_ring_frames()
    finally:
        stop.set()
        for reader in readers:
            reader.join(WAIT_S)
    assert faults == []
    assert min(reads) > 0
    lane.close()


def test_a_published_list_of_segments_is_never_modified(tmp_path: Path) -> None:
    """Positions and segments are published together, so a reader never sees only one of them."""
    lane = open_lane(tmp_path / "lane")
    lane.append((frame(0),), len(frame(0)))
    before = lane._listed
    lane.roll()
    assert isinstance(before, Listed)
    assert [segment.start for segment in before.segments] == list(before.starts) == [0]
    assert len(lane._listed.starts) == len(lane._listed.segments) == 2
    lane.close()
