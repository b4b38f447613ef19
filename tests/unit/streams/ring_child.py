"""A process that is killed after the ring has a confirmed batch and before the segment has it.

It prints the first offset of that batch.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from tests.unit.streams.view_child import SEGMENT_BYTES
from tests.unit.streams.view_rig import Writer

TOPIC = "safe"
CONFIRMED = (b"a", b"b", b"c", b"d")
RING_WAIT_S = 30


def main(path: Path) -> None:
    writer = Writer(path, segment_bytes=SEGMENT_BYTES)
    writer.create(TOPIC)
    deadline = time.monotonic() + RING_WAIT_S
    writer.put(TOPIC, b"before")
    lane = writer.engine.lanes[0]
    while lane.log._ring is None or not lane.log._ring.taken:
        assert time.monotonic() < deadline, "a lane with frequent syncs does not use a ring"
        writer.put(TOPIC, b"before")
    # Stop the sync thread between the notification of the writer and the write to the segment.
    lane.watermarks.group._finish = threading.Event().wait  # type: ignore[assignment]
    print(writer.put(TOPIC, *CONFIRMED), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
