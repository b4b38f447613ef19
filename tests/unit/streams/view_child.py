"""A process that writes until it is killed and prints each confirmed record as a line `topic offset value`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.unit.streams.view_rig import Writer

from basaltmq.log.batches.record import Record

TOPICS = ("safe", "quick", "rocks")
SEGMENT_BYTES = 16_384


def main(path: Path) -> None:
    writer = Writer(path, segment_bytes=SEGMENT_BYTES)
    if writer.plane.topics.find("safe") is None:
        writer.create("safe")
        writer.create("quick", durability="written")
        writer.create("rocks", engine="rocksdb")
        writer.create("churn", retention_records=10)
    step = 0
    while True:
        step += 1
        for topic in TOPICS:
            offset = writer.put(topic, *(Record(b"%d" % at, b"k%d" % (at % 7)) for at in range(step % 5 + 1)))
            for at in range(step % 5 + 1):
                print(topic, offset + at, at, flush=True)
        writer.put("churn", b"x" * 1500)
        if step % 5 == 0:
            writer.engine.retain(writer.now_ms)
        if step % 23 == 0:
            if writer.plane.topics.find("temporary") is None:
                writer.create("temporary")
                writer.put("temporary", b"here")
            else:
                writer.plane.topics.delete("temporary")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
