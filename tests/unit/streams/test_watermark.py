"""High watermarks: a sync shows exactly the writes made before it began."""

from __future__ import annotations

import pytest

from basaltmq.durability import Durability
from basaltmq.streams.watermark import ShardOffsets, Watermarks


class Disk:
    def sync(self) -> None:
        pass

    def poison(self, error: BaseException) -> None:
        pass


def write(marks: Watermarks, shard: ShardOffsets, durability: Durability = Durability.SYNCED) -> int:
    with shard.lock:
        base = shard.next_offset
        shard.next_offset += 1
        return marks.written(shard, base, durability)


@pytest.mark.promise("P1", "P3")
def test_a_sync_does_not_show_writes_made_during_it() -> None:
    shard, other = ShardOffsets(0), ShardOffsets(0)
    seen: list[int] = []
    late: list[int] = []

    def sync_through_ring() -> None:
        late.append(write(marks, shard))
        seen.append(shard.high_watermark)

    marks = Watermarks(Disk(), sync_through_ring)
    first = [write(marks, shard), write(marks, other), write(marks, shard)]
    assert (shard.high_watermark, other.high_watermark) == (0, 0)
    assert len(set(first)) == 1
    marks.sync()
    assert seen == [0]
    assert late[0] > first[0]
    assert (shard.high_watermark, other.high_watermark) == (2, 1)
    write(marks, shard, Durability.WRITTEN)
    assert shard.high_watermark == 2
    marks.sync()
    assert shard.high_watermark == 4
    marks.sync()
    assert (shard.high_watermark, shard.next_offset) == (5, 6)
    marks.close()
