"""A rebuilt index equals the one that the engine wrote, key by key."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import pytest
from tests.unit.streams.segment_rig import SegmentRig, explain
from tests.unit.streams.test_kafka_frames import batch as kafka_batch
from tests.unit.streams.test_kafka_frames import control
from tests.unit.streams.test_segment_model import make_record

from basaltmq.errors import StoreLockedError
from basaltmq.log.batches.record import Record
from basaltmq.pipeline.findings import Severity, exit_code
from basaltmq.pipeline.index import rebuild as module
from basaltmq.pipeline.index.rebuild import RebuildJob, rebuild_index
from basaltmq.pipeline.tasks import OnProgress
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.open import open_store
from basaltmq.streams.imports.stage import STAGING

T = TypeVar("T")
R = TypeVar("R")

pytestmark = [pytest.mark.spec("F2", "D3"), pytest.mark.promise("P6")]


class LocalTasks:
    """Runs items in the calling thread."""

    width = 2

    def run(self, function: Callable[[T], R], items: Sequence[T], progress: OnProgress | None = None) -> list[R]:
        return [function(item) for item in items]


def rig_of(path: Path, **settings: int) -> SegmentRig:
    return SegmentRig(path, store=open_store(path), **settings)


def shut(rig: SegmentRig) -> None:
    rig.close()
    rig.store.close()


def rows_of(path: Path) -> dict[bytes, bytes]:
    """Return the index on disk, without the synced position."""
    with closing(open_store(path)) as store:
        return {key: value for key, value in store.scan(Family.STREAM_INDEX) if key[:1] not in b"PUX"}


def fill(rig: SegmentRig, rng: random.Random, steps: int = 120) -> None:
    """Appends, deletes, trims, drops, compaction and cleaning."""
    plain: list[int] = []
    shards: list[int] = []

    def create() -> None:
        config = {
            "compact": rng.random() < 0.3,
            "tombstone_retention_ms": 200,
            "index_tags": rng.random() < 0.8,
            "index_times": rng.random() < 0.8,
            "index_keys": rng.random() < 0.8,
        }
        if config["compact"]:
            config["index_keys"] = True
        shards.append(rig.shard(**config))

    def write() -> None:
        shard = rng.choice(shards)
        expires = not rig.shards.get(shard).config.compact
        rig.put(shard, *(make_record(rng, rig.now_ms, expires) for _ in range(rng.randrange(1, 6))))

    def write_plain() -> None:
        # Timestamps vary, so that their order differs between segments.
        times_ms = [rig.now_ms + rng.randrange(-500, 500) for _ in range(rng.randrange(1, 5))]
        rig.put(rng.choice(plain), *(Record(bytes(rng.randrange(50)), timestamp_ms=time_ms) for time_ms in times_ms))

    def write_kafka() -> None:
        shard = rng.choice(shards)
        raw = control() if rng.random() < 0.1 else kafka_batch(b"x", b"y", key=b"k%d" % rng.randrange(3))
        rig.engine.append_kafka(shard, raw)

    def delete() -> None:
        shard = rng.choice(shards)
        end = rig.engine.shard_info(shard).next_offset
        rig.engine.delete_by_offset(shard, rng.sample(range(end + 2), min(3, end + 2)))

    def trim() -> None:
        shard = rng.choice(shards + plain)
        rig.engine.delete_records_before(shard, rng.randrange(rig.engine.shard_info(shard).next_offset + 1))

    def drop() -> None:
        if len(shards) > 2:
            rig.engine.delete_shard(shards.pop(rng.randrange(len(shards))))

    def tick() -> None:
        rig.now_ms += rng.choice([1, 30, 150, -40])
        rig.engine.retain(rig.now_ms)

    plain += [rig.shard(), rig.shard(index_times=False)]
    create()
    create()
    rare = [create, delete, trim, drop, tick, tick, rig.clean]
    for _ in range(steps):
        rng.choice([write] * 9 + [write_plain] * 9 + [write_kafka] * 4 + rare)()


@pytest.mark.parametrize("seed", range(3))
def test_rebuilt_index_equals_the_engine_index(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    monkeypatch.setattr("basaltmq.pipeline.index.runs.BATCH_ROWS", rng.choice([3, 20, 500]))
    rig = rig_of(tmp_path, segment_bytes=rng.choice([2000, 8000]), lanes=rng.choice([1, 2]))
    fill(rig, rng)
    before = rig.rows()
    shut(rig)
    job = RebuildJob(path=str(tmp_path))
    compared = rebuild_index(LocalTasks(), RebuildJob(path=str(tmp_path), compare=True))
    assert compared.findings == [], compared.findings
    done = rebuild_index(LocalTasks(), job)
    assert done.findings == []
    after = rows_of(tmp_path)
    assert after == before, explain(before, after)
    assert done.rows >= len(after)
    assert list((tmp_path / STAGING).iterdir()) == []
    again = rig_of(tmp_path, segment_bytes=3000)
    assert all(total == 0 for _, total in again.progress), "the next start has nothing to rebuild"
    again.put(again.shard(), b"on it goes")
    assert again.rebuilt() == again.rows()
    shut(again)


def test_store_open_for_writing_is_refused(tmp_path: Path) -> None:
    rig = rig_of(tmp_path)
    rig.put(rig.shard(), b"a")
    with pytest.raises(StoreLockedError):
        rebuild_index(LocalTasks(), RebuildJob(path=str(tmp_path)))
    shut(rig)


@pytest.mark.parametrize("point", ["scan_segment", "make_table", "ingest", "deleted"])
def test_interrupted_rebuild_leaves_the_old_index_or_a_rebuild_at_start(
    tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rig_of(tmp_path, segment_bytes=2000)
    fill(rig, random.Random(9), 40)
    before = rig.rows()
    shut(rig)

    class KilledError(BaseException):
        pass

    def kill(*_: object, **__: object) -> None:
        raise KilledError

    if point == "ingest":
        monkeypatch.setattr("basaltmq.store.rocks.RocksStore.ingest", kill)
    elif point == "deleted":
        monkeypatch.setattr("basaltmq.store.rocks.RocksStore.flush", kill)
    else:
        monkeypatch.setattr(module, point, kill)
    with pytest.raises(KilledError):
        rebuild_index(LocalTasks(), RebuildJob(path=str(tmp_path)))
    monkeypatch.undo()
    left = rows_of(tmp_path)
    assert left == ({} if point in ("ingest", "deleted") else before)
    again = rig_of(tmp_path, segment_bytes=2000)
    assert again.rows() == before
    shut(again)


def test_torn_tail_is_kept_and_damage_is_reported(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, segment_bytes=2000)
    shard = rig.shard()
    for number in range(40):
        rig.put(shard, Record(b"%d" % number * 20, b"k%d" % number))
    rig.clean()
    shut(rig)
    files = sorted((tmp_path / "log" / "0000").glob("*.log"))
    with open(files[-1], "ab") as torn:
        torn.write(b"half a frame")
    done = rebuild_index(LocalTasks(), RebuildJob(path=str(tmp_path)))
    assert [(each.severity, each.kind) for each in done.findings] == [(Severity.NOTE, "torn tail")]
    assert exit_code(done.findings) == 0
    raw = bytearray(files[0].read_bytes())
    raw[len(raw) // 2] ^= 1
    files[0].write_bytes(raw)
    done = rebuild_index(LocalTasks(), RebuildJob(path=str(tmp_path)))
    assert exit_code(done.findings) == 3
    assert {each.kind for each in done.findings} == {"torn tail", "damage", "gap"}
    after = rows_of(tmp_path)
    again = rig_of(tmp_path, segment_bytes=2000)
    assert again.rows() == after
    assert len(again.engine.quarantined) == 1
    assert again.rebuilt() == after
    shut(again)


def test_compare_finds_a_wrong_row(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, segment_bytes=2000)
    fill(rig, random.Random(3), 40)
    shut(rig)
    with closing(open_store(tmp_path)) as store:
        key, value = next(row for row in store.scan(Family.STREAM_INDEX, b"O"))
        batch = Batch()
        batch.put(Family.STREAM_INDEX, key, bytes(len(value)))
        batch.delete(Family.STREAM_INDEX, next(store.scan(Family.STREAM_INDEX, b"N"))[0])
        store.write(batch)
    found = rebuild_index(LocalTasks(), RebuildJob(path=str(tmp_path), compare=True)).findings
    assert sorted(each.detail.split(" ", 2)[2] for each in found) == ["differs", "is missing"]
    assert exit_code(found) == 2
    assert rebuild_index(LocalTasks(), RebuildJob(path=str(tmp_path))).findings == []
    assert rebuild_index(LocalTasks(), RebuildJob(path=str(tmp_path), compare=True)).findings == []
