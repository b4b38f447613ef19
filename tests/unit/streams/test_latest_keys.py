"""Compaction without a key index keeps the same records as with one, in bounded steps and after crashes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.log_frames import encode_plain
from tests.unit.log.strategies import transactional
from tests.unit.streams.segment_rig import SegmentRig, explain

from basaltmq.log.batches.kafka import marker_batch
from basaltmq.log.batches.record import Record, StoredRecord
from basaltmq.streams.engines import retention
from basaltmq.streams.engines.segment import cleaner as segment_cleaner
from basaltmq.streams.engines.segment import latest_keys

KEYS = (None, b"", b"a", b"b", b"c", b"d" * 15, b"e" * 16, b"e" * 40, b"f" * 40)


def shown(records: list[StoredRecord]) -> list[tuple[int, bytes | None, bytes]]:
    return [(each.offset, each.key, (each.value or b"")) for each in records]


def settle(rig: SegmentRig) -> None:
    """Run steps until nothing is removed and no pass is running."""
    cleaner = rig.engine._cleaner
    quiet = 0
    while quiet < 60:
        gone = rig.engine.retain(rig.now_ms)
        is_busy = cleaner._latest is not None or any(each.is_running for each in cleaner._passes._passes.values())
        quiet = 0 if gone or is_busy else quiet + 1


ONE = st.tuples(st.sampled_from(KEYS), st.binary(max_size=3))
WRITE = st.lists(ONE, min_size=1, max_size=4)


@settings(max_examples=25, deadline=None)
@given(
    writes=st.lists(st.tuples(st.sampled_from(["columns", "kafka", "committed", "aborted"]), WRITE), max_size=14),
    limit=st.sampled_from([1, 3, 1000]),
    portion=st.sampled_from([1, 2, 1000]),
)
def test_compaction_keeps_the_same_records_as_with_a_key_index(
    tmp_path_factory: pytest.TempPathFactory,
    writes: list[tuple[str, list[tuple[bytes | None, bytes]]]],
    limit: int,
    portion: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latest_keys, "KEYS_MAX", portion)
        patch.setattr(segment_cleaner, "RECORDS_PER_STEP", limit)
        patch.setattr(retention, "RECORDS_PER_STEP", limit)
        rig = SegmentRig(tmp_path_factory.mktemp("rig"))
        shards = [rig.shard(compact=True, index_keys=is_indexed) for is_indexed in (True, False, False)]
        sequence = 0
        for kind, write in writes:
            records = [Record(value, key, timestamp_ms=rig.now_ms) for key, value in write]
            for shard in shards:
                if kind == "columns":
                    rig.put(shard, *records)
                elif kind == "kafka":
                    rig.engine.append_kafka(shard, encode_plain(records))
                else:
                    for at, (key, value) in enumerate(write):
                        rig.engine.append_kafka(shard, transactional(1, sequence + at, value, key=key))
                    rig.engine.append_kafka(shard, marker_batch(1, 0, kind == "committed", rig.now_ms))
            sequence += len(write) * (kind in ("committed", "aborted"))
            rig.engine.retain(rig.now_ms)
        # Enough records that one more pass is due in each shard.
        for shard in shards:
            rig.put(shard, *[Record(b"", timestamp_ms=rig.now_ms)] * (1 + sum(1 + len(write) for _, write in writes)))
        settle(rig)
        indexed, *others = (shown(rig.drained(shard)) for shard in shards)
        assert others == [indexed, indexed]
        assert rig.engine._cleaner._latest is None
        before = rig.rows()
        after = rig.rebuilt()
        assert after == before, explain(before, after)
        rig.close()


def test_a_deleted_or_uncompacted_shard_does_not_block_compaction_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_cleaner, "RECORDS_PER_STEP", 1)
    monkeypatch.setattr(retention, "RECORDS_PER_STEP", 1)
    rig = SegmentRig(tmp_path)
    shards = [rig.shard(compact=True, index_keys=False) for _ in range(3)]
    for shard in shards:
        for number in range(20):
            rig.put(shard, Record(b"%d" % number, b"k", timestamp_ms=rig.now_ms))
    rig.engine.retain(rig.now_ms)
    noted = rig.engine._cleaner._latest
    assert noted is not None
    assert (noted.shard, noted.is_whole) == (shards[0], False)
    rig.engine.delete_shard(shards[0])
    settle(rig)
    assert [[each.value for each in rig.drained(shard)] for shard in shards[1:]] == [[b"19"], [b"19"]]
    rig.close()
