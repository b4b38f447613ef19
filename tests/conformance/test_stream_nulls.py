"""Null values and extreme timestamps, for every stream engine (SPEC B2, B10)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conformance.stream_engines import ENGINES, Rig, offsets

from basaltmq.errors import TimestampRangeError
from basaltmq.log.batches import record as record_module
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.record import TIMESTAMP_MS_MAX, Record


@pytest.fixture(params=sorted(ENGINES))
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(request.param, tmp_path)
    yield made
    made.close()


def reopened(rig: Rig) -> Iterator[None]:
    """Yield the engine, and then the reopened engine if its records survive that."""
    yield
    if rig.is_durable:
        rig.reopen()
        yield


@pytest.mark.spec("B2")
def test_null_is_distinguished_from_empty(rig: Rig) -> None:
    shard = rig.shard()
    headers = (("null", None), ("empty", b""), ("full", b"x"))
    written = [Record(None, b"k", headers), Record(b"", b""), Record(None), Record(b"v", headers=(("h", b""),))]
    rig.engine.batch_write(shard, written)
    rig.engine.write(shard, Record(None, b"alone"))
    for _ in reopened(rig):
        found = rig.engine.read_by_offset(shard, 0)
        assert [(each.value, each.key, each.headers) for each in found.records()] == [
            (each.value, each.key, each.headers) for each in (*written, Record(None, b"alone"))
        ]
        rows = found.arrow()
        rows.validate(full=True)
        assert rows.column("value").to_pylist() == [None, b"", None, b"v", None]
        assert rows.column("key").to_pylist() == [b"k", b"", None, None, b"alone"]
        assert rows.column("headers").to_pylist()[0] == [{"key": name, "value": value} for name, value in headers]


@pytest.mark.spec("B2")
def test_unrepresentable_timestamps_are_refused(rig: Rig) -> None:
    shard = rig.shard()
    rig.engine.write(shard, Record(b"last", timestamp_ms=TIMESTAMP_MS_MAX, expire_at_ms=TIMESTAMP_MS_MAX))
    for wrong in (TIMESTAMP_MS_MAX + 1, 1 << 62, -2):
        with pytest.raises(TimestampRangeError, match=rf"timestamp_ms {wrong} is out of range"):
            rig.engine.write(shard, Record(b"x", timestamp_ms=wrong))
    with pytest.raises(TimestampRangeError, match="expire_at_ms"):
        rig.engine.write(shard, Record(b"x", expire_at_ms=TIMESTAMP_MS_MAX + 1))
    rows = rig.engine.read_by_offset(shard, 0).arrow().to_pylist()
    assert [row["timestamp"].isoformat() for row in rows] == ["9999-12-30T23:59:59.999000+00:00"]


@pytest.mark.spec("B2")
def test_stored_timestamp_over_the_limit_is_shown_as_the_maximum(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = rig.shard()
    with monkeypatch.context() as older:
        older.setattr(record_module, "TIMESTAMP_MS_MAX", (1 << 63) - 1)
        rig.engine.write(shard, Record(b"a", timestamp_ms=5))
        rig.engine.write(shard, Record(b"b", timestamp_ms=(1 << 63) - 1, expire_at_ms=1 << 62))
        rig.engine.write(shard, Record(b"c", timestamp_ms=7))
    for _ in reopened(rig):
        found = rig.engine.read_by_offset(shard, 0)
        assert [each.value for each in found.records()] == [b"a", b"b", b"c"]
        rows = found.arrow()
        assert rows.column("timestamp").cast("int64").to_pylist() == [5, TIMESTAMP_MS_MAX, 7]
        assert rows.to_pylist()[1]["expire_at"].year == 9999


@pytest.mark.spec("B2")
def test_column_batch_is_checked(rig: Rig) -> None:
    shard = rig.shard()
    for wrong in (TIMESTAMP_MS_MAX + 1, -2):
        columns = ColumnBatch.from_records([Record(b"x", timestamp_ms=wrong), Record(b"y", timestamp_ms=1)], 0)
        with pytest.raises(TimestampRangeError):
            rig.engine.batch_write(shard, columns)


@pytest.mark.spec("B10")
def test_empty_value_is_no_tombstone(rig: Rig) -> None:
    shard = rig.shard(compact=True, tombstone_retention_ms=1_000)
    for value in (b"old", b""):
        rig.engine.write(shard, Record(value, b"empty"))
    for later in (b"old", None):
        rig.engine.write(shard, Record(later, b"null"))
    for _ in range(2):
        rig.engine.retain(rig.clock.now_ms)
        rig.clock.now_ms += 1_000
    rig.engine.retain(rig.clock.now_ms)
    assert offsets(rig, shard) == [1]
    assert rig.engine.read_by_offset(shard, 1).records()[0].value == b""
