"""The segment engine compared with a plain model, through crashes, rebuilds and cleaning."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.unit.streams.segment_rig import SegmentRig, explain

from basaltmq.log.batches.record import Record

KEYS = [b"a", b"b", b"\x00\xff", b"", None]
TAGS = [b"t", b"u\x00", b""]


class Model:
    """Shards as dicts of offset to record."""

    def __init__(self) -> None:
        self.records: dict[int, dict[int, Record]] = {}
        self.start: dict[int, int] = {}
        self.next: dict[int, int] = {}

    def kept(self, shard: int, now_ms: int) -> dict[int, Record]:
        return {
            offset: record
            for offset, record in self.records[shard].items()
            if offset >= self.start[shard] and not 0 < record.expire_at_ms <= now_ms
        }


def make_record(rng: random.Random, now_ms: int, expires: bool) -> Record:
    return Record(
        rng.randbytes(rng.choice([0, 5, 60])),
        rng.choice(KEYS),
        (("h", b"1"),) if rng.random() < 0.2 else (),
        tuple(rng.sample(TAGS, rng.randrange(3))),
        now_ms + rng.randrange(-50, 50),
        now_ms + rng.randrange(1, 400) if expires and rng.random() < 0.2 else 0,
    )


@pytest.mark.spec("B2", "B5", "B6", "B10", "D2", "D3", "D4")
@pytest.mark.promise("P3", "P6", "P10")
@pytest.mark.parametrize("seed", range(12))
def test_random_operations_keep_records_correct_and_a_rebuilt_index_identical(tmp_path: Path, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    rig = SegmentRig(tmp_path, segment_bytes=rng.choice([600, 2000]), lanes=rng.choice([1, 2]))
    model = Model()
    compacted: set[int] = set()
    superseded: set[tuple[int, int]] = set()

    def create() -> None:
        shard = rig.shard(
            compact=rng.random() < 0.3,
            tombstone_retention_ms=200,
            index_tags=rng.random() < 0.8,
            index_times=rng.random() < 0.8,
            index_keys=True,
        )
        if rig.shards.get(shard).config.compact:
            compacted.add(shard)
        model.records[shard], model.start[shard], model.next[shard] = {}, 0, 0

    def write() -> None:
        shard = rng.choice(list(model.records))
        records = [make_record(rng, rig.now_ms, shard not in compacted) for _ in range(rng.randrange(1, 6))]
        base = rig.put(shard, *records)
        assert base == model.next[shard]
        model.records[shard].update(enumerate(records, base))
        model.next[shard] += len(records)

    def delete_offsets() -> None:
        shard = rng.choice(list(model.records))
        chosen = rng.sample(range(model.next[shard] + 2), min(3, model.next[shard] + 2))
        rig.engine.delete_by_offset(shard, chosen)
        for offset in chosen:
            if offset >= model.start[shard]:
                model.records[shard].pop(offset, None)

    def delete_key() -> None:
        shard = rng.choice(list(model.records))
        key = rng.choice([b"a", b""])
        rig.engine.delete_by_key(shard, key)
        for offset in [at for at, record in model.records[shard].items() if record.key == key]:
            del model.records[shard][offset]

    def trim() -> None:
        shard = rng.choice(list(model.records))
        target = rng.randrange(model.next[shard] + 1)
        model.start[shard] = max(model.start[shard], target)
        assert rig.engine.delete_records_before(shard, target) == model.start[shard]

    def drop() -> None:
        if len(model.records) > 2:
            shard = rng.choice(list(model.records))
            rig.engine.delete_shard(shard)
            del model.records[shard]

    def tick() -> None:
        rig.now_ms += rng.choice([1, 30, 150, -40])
        rig.engine.retain(rig.now_ms)
        # Removed records do not reappear when the clock goes back.
        for shard in model.records:
            kept = model.records[shard] = model.kept(shard, rig.now_ms)
            latest = {record.key: offset for offset, record in sorted(kept.items())}
            superseded.update((shard, offset) for offset, record in kept.items() if latest[record.key] != offset)

    def clean() -> None:
        rig.clean()

    def crash() -> None:
        rig.crash()
        rig.open()

    def rebuild() -> None:
        before = rig.rows()
        after = rig.rebuilt()
        assert after == before, explain(before, after)

    def check() -> None:
        for shard in model.records:
            kept = model.kept(shard, rig.now_ms)
            found = {record.offset: record for record in rig.drained(shard)}
            if shard in compacted:
                latest = {record.key: offset for offset, record in sorted(kept.items()) if record.key is not None}
                needed = {
                    offset
                    for offset, record in kept.items()
                    if record.key is None
                    or (latest[record.key] == offset and record.value and (shard, offset) not in superseded)
                }
                assert needed <= set(found) <= set(kept)
            else:
                assert set(found) == set(kept)
            for offset, record in found.items():
                assert (record.value, record.key, record.tags) == (
                    kept[offset].value,
                    kept[offset].key,
                    kept[offset].tags,
                )
            for key in (b"a", b"\x00\xff"):
                by_key = {each.offset for each in rig.engine.read_by_key(shard, key, model.start[shard]).records()}
                assert by_key == {offset for offset, record in found.items() if record.key == key}
            by_tag = {each.offset for each in rig.engine.read_by_tag(shard, b"u\x00", model.start[shard]).records()}
            assert by_tag == {offset for offset, record in found.items() if b"u\x00" in record.tags}
            info = rig.engine.shard_info(shard)
            assert (info.start_offset, info.next_offset) == (model.start[shard], model.next[shard])
            assert info.records >= len(found)

    create()
    create()
    actions = (
        [create] + [write] * 14 + [delete_offsets, delete_key, trim, drop, tick, tick, clean, crash, rebuild, check]
    )
    for _ in range(150):
        rng.choice(actions)()
    crash()
    check()
    rebuild()
    check()
    rig.close()
