"""Log replay: bulk replay gives the same rows, losses and damage as single frames."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from tests.unit.streams.segment_rig import INDEX, SegmentRig, explain

from basaltmq.durability import Durability
from basaltmq.log import recovery
from basaltmq.log.batches.record import Record
from basaltmq.log.lane_options import LaneOptions
from basaltmq.log.ring import SLOT_BYTES
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.engines.segment.index.index import StreamIndex
from basaltmq.streams.engines.segment.reader import LogLane
from basaltmq.streams.engines.segment.replay import Replay


def written(path: Path, seed: int) -> SegmentRig:
    """Write a log in which plain frames alternate with all other kinds."""
    rng = random.Random(seed)
    rig = SegmentRig(path, segment_bytes=3000)
    shards = [rig.shard(), rig.shard(index_times=False), rig.shard(retention_records=40), rig.shard()]
    for step in range(150):
        shard = rng.choice(shards)
        rig.now_ms += rng.choice((-3, 0, 1, 50))
        plain = [Record(rng.randbytes(rng.randrange(40))) for _ in range(rng.randrange(1, 6))]
        what = rng.random()
        if what < 0.7:
            rig.put(shard, *plain)
        elif what < 0.75:
            rig.engine.wait(rig.engine.batch_write(shard, plain, Durability.SYNCED))
        elif what < 0.80:
            rig.put(shard, Record(b"v", b"key", tags=(b"t",)))
        elif what < 0.84:
            rig.put(shard, Record(b"v", expire_at_ms=rig.now_ms + 10))
        elif what < 0.9:
            info = rig.engine.shard_info(shard)
            rig.engine.delete_by_offset(shard, list(range(info.start_offset, info.next_offset, 3)))
        elif what < 0.93:
            rig.engine.delete_records_before(shard, rig.engine.shard_info(shard).start_offset + 3)
        elif what < 0.96:
            rig.engine.retain(rig.now_ms)
        elif step > 60 and len(shards) > 1:
            gone = shards.pop()
            rig.engine.delete_shard(gone)
    return rig


@pytest.mark.promise("P6")
@pytest.mark.parametrize("chunk_bytes", [300, 1000, 4 << 20])
@pytest.mark.parametrize("seed", range(4))
def test_bulk_replay_gives_the_same_rows_as_single_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, chunk_bytes: int
) -> None:
    rig = written(tmp_path, seed)
    before = rig.rows()
    monkeypatch.setattr(recovery, "CHUNK_BYTES", chunk_bytes)
    taken: list[int] = []
    real = Replay.take

    def take(self: Replay, raw: bytes, at: int, stop: int, position: int) -> int:
        taken.append(real(self, raw, at, stop, position))
        return taken[-1]

    monkeypatch.setattr(Replay, "take", take)
    in_bulk = rig.rebuilt()
    assert any(taken), f"seed {seed}"
    monkeypatch.setattr(Replay, "take", lambda *_: 0)
    assert rig.rebuilt() == in_bulk == before, f"seed {seed}"
    rig.close()


@pytest.mark.promise("P7")
@pytest.mark.parametrize("seed", range(3))
def test_bulk_replay_reports_the_same_damage_and_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rig = written(tmp_path, seed)
    rig.close()
    rng = random.Random(seed)
    for path in sorted((tmp_path / "log" / "0000").glob("*.log")):
        raw = bytearray(path.read_bytes())
        if len(raw) > 400:
            raw[rng.randrange(len(raw) - 300)] ^= 0x20
            path.write_bytes(raw)
    shard_rows = list(rig.store.scan(Family.SHARDS))
    rig.wipe_index()
    rig.open()
    in_bulk = rig.rows(), rig.engine.damages, rig.engine.losses
    assert in_bulk[1]
    rig.close()
    monkeypatch.setattr(Replay, "take", lambda *_: 0)
    rig.wipe_index()
    # Without the floors that the first start set.
    batch = Batch()
    batch.put_many(Family.SHARDS, [key for key, _ in shard_rows], [raw for _, raw in shard_rows])
    rig.store.write(batch)
    rig.open()
    assert in_bulk == (rig.rows(), rig.engine.damages, rig.engine.losses), f"seed {seed}"
    rig.close()


@pytest.mark.promise("P9")
def test_a_tail_torn_inside_a_run_is_cut_after_the_last_complete_frame(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path, segment_bytes=1 << 20)
    shard = rig.shard()
    for _ in range(20):
        rig.put(shard, b"x" * 100)
    end = rig.engine.lanes[0].log.end
    rig.close()
    path = next((tmp_path / "log" / "0000").glob("*.log"))
    path.write_bytes(path.read_bytes()[:-50])
    rig.wipe_index()
    rig.open()
    assert rig.engine.shard_info(shard).next_offset == 20, "offset 19 was confirmed and is not reused"
    assert rig.engine.lanes[0].log.end == end // 20 * 19
    assert [record.offset for record in rig.drained(shard)] == list(range(19))
    rig.close()


def indexed_until(rig: SegmentRig) -> int:
    """Return the position up to which the index on disk reaches after a crash."""
    return int.from_bytes(
        dict(rig.store.scan(INDEX, *key_parts.prefix_range(b"C")))[stream_keys.log_checkpoint_key(0)], "big"
    )


@pytest.mark.promise("P1", "P9")
def test_after_a_kill_frames_after_the_checkpoint_are_replayed(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path, segment_bytes=1 << 20)
    shard = rig.shard()
    rig.put(shard, b"before")
    rig.engine.checkpoint()
    for number in range(5):
        rig.put(shard, b"after %d" % number)
    rig.put(shard, Record(b"keyed", b"key"))
    log = rig.engine.lanes[0].log
    assert indexed_until(rig) < log.end
    rig.crash()
    rig.open()
    values = [b"before", *(b"after %d" % number for number in range(5)), b"keyed"]
    assert [record.value for record in rig.drained(shard)] == values
    assert [record.offset for record in rig.engine.read_by_key(shard, b"key", 0).records()] == [6]
    assert rig.put(shard, b"next") == 7
    rig.close()


@pytest.mark.promise("P1", "P9")
def test_after_a_power_loss_frames_in_the_ring_are_restored(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path, segment_bytes=1 << 20)
    rig.close()
    rig.options = LaneOptions(segment_bytes=1 << 20, ring_bytes=16 * SLOT_BYTES, ring_after=1)
    rig.open()
    shard = rig.shard(durability=Durability.SYNCED)
    log = rig.engine.lanes[0].log
    rig.engine.wait(rig.engine.batch_write(shard, [Record(b"makes the ring")]))
    assert log._worker is not None
    log._worker.join(30)
    rig.engine.checkpoint()
    kept = log.end
    for number in range(3):
        rig.engine.wait(rig.engine.batch_write(shard, [Record(b"%d" % number)]))
    assert log._ring is not None
    assert log._ring.used_bytes
    assert indexed_until(rig) == kept
    rig.crash()
    os.truncate(log.segments()[-1].path, kept)
    rig.open()
    assert [record.value for record in rig.drained(shard)] == [b"makes the ring", b"0", b"1", b"2"]
    assert rig.put(shard, b"next") == 4
    rig.close()


def power_cut(rig: SegmentRig, rng: random.Random, synced: int, how: str) -> int:
    """Truncate the log at a random point after the synced position, and keep the index. Return the point."""
    rig.engine.index.settle()
    log = rig.engine.lanes[0].log
    # Complete segments are synced in the background.
    synced = max(synced, log.synced_position)
    places = [synced, *(each.position for each in recovery.scan(log, synced) if each.position > synced)]
    at = rng.choice(places)
    rig.crash()
    for path in sorted((rig.path / "log" / "0000").glob("*.log")):
        start = int(path.stem)
        raw = path.read_bytes()
        if start + len(raw) <= at:
            continue
        if how == "cut":
            if start > at:
                path.unlink()
            else:
                path.write_bytes(raw[: at - start + rng.randrange(60)])
        elif start <= at:
            # Pages in the middle are lost, but later ones reached the disk.
            size = rng.randrange(8, 400)
            path.write_bytes(raw[: at - start] + bytes(len(raw[at - start :][:size])) + raw[at - start + size :])
    return at


@pytest.mark.promise("P6", "P9")
@pytest.mark.parametrize("how", ["cut", "hole"])
@pytest.mark.parametrize("seed", range(12))
def test_an_index_ahead_of_the_log_after_a_power_loss_is_rolled_back_without_a_rebuild(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, how: str
) -> None:
    rng = random.Random(seed)
    rig = written(tmp_path, seed)
    shards = [meta.number for meta in (info.meta for info in rig.engine.list_shard())]
    for lane in rig.engine.lanes:
        lane.log.sync()
    rig.engine.index.settle()
    synced = rig.engine.lanes[0].log.end
    for step in range(rng.randrange(1, 40)):
        rig.now_ms += rng.choice((-3, 0, 1, 50))
        shard = rng.choice(shards)
        if step % 3:
            rig.put(shard, *(rng.randbytes(rng.randrange(30)) for _ in range(rng.randrange(1, 4))))
        else:
            expiry = rig.now_ms + 10**6 * (step % 2)
            rig.put(shard, Record(b"v", rng.choice((b"a", b"b")), tags=(b"t",), expire_at_ms=expiry))
        if step % 7 == 0:
            rig.engine.index.flush()
    at = power_cut(rig, rng, synced, how)
    monkeypatch.setattr(StreamIndex, "wipe", lambda self: pytest.fail(f"seed {seed}: built again"))
    rig.open()
    assert rig.progress[-1][1] <= rig.engine.lanes[0].log.end - at + 400, f"seed {seed}"
    monkeypatch.undo()
    before = rig.rows()
    read = {shard: rig.drained(shard) for shard in shards}
    for shard in shards:
        rig.put(shard, b"after")
    rig.engine.checkpoint()
    assert not [key for key, _ in rig.store.scan(INDEX) if key[:1] == b"U"], "nothing is unsynced"
    for shard in shards:
        assert rig.drained(shard)[:-1] == read[shard]
    with_more = rig.rows()
    rebuilt = rig.rebuilt()
    assert rebuilt == with_more, f"seed {seed}: {explain(with_more, rebuilt)}"
    assert before.keys() != with_more.keys()
    rig.close()


@pytest.mark.promise("P6", "P9")
@pytest.mark.parametrize("what", ["deletes", "trim"])
def test_a_lost_change_that_cannot_be_undone_triggers_a_rebuild(tmp_path: Path, what: str) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard()
    for _ in range(5):
        rig.put(shard, b"a", b"b")
    rig.engine.checkpoint()
    rig.put(shard, b"later")
    at = rig.engine.lanes[0].log.end
    state = rig.engine.state_of(shard)
    if what == "deletes":
        rig.engine.append_deletes(state, [2, 3], rig.now_ms)
    else:
        rig.engine.delete_records_before(shard, 4)
    rig.engine.index.settle()
    rig.crash()
    path = next((tmp_path / "log" / "0000").glob("*.log"))
    path.write_bytes(path.read_bytes()[:at])
    rig.open()
    assert rig.progress[-1][1] == at, "the whole log is read"
    expected = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10] if what == "deletes" else [4, 5, 6, 7, 8, 9, 10]
    assert [record.offset for record in rig.drained(shard)] == expected
    before = rig.rows()
    assert rig.rebuilt() == before
    rig.close()


@pytest.mark.promise("P7")
def test_a_log_that_lost_synced_bytes_triggers_a_rebuild(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard()
    for _ in range(5):
        rig.put(shard, b"a", b"b")
    third = next(rig.engine.index.entries(shard, 6)).position
    rig.close()
    path = next((tmp_path / "log" / "0000").glob("*.log"))
    path.write_bytes(path.read_bytes()[:third])
    rig.open()
    assert rig.engine.shard_info(shard).next_offset == 10, "confirmed offsets are not reused"
    before = rig.rows()
    assert rig.rebuilt() == before
    rig.close()


@pytest.mark.promise("P6")
def test_a_segment_that_lost_all_its_frames_in_a_power_loss_has_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first frame of a segment triggers a background sync of the previous one, which may include it.
    monkeypatch.setattr(LogLane, "sync_soon", lambda self: None)
    rig = SegmentRig(tmp_path)
    shard = rig.shard()
    for _ in range(5):
        rig.put(shard, b"a", b"b")
    log = rig.engine.lanes[0].log
    log.roll()
    log.sync()
    rig.engine.index.settle()
    begin = log.end
    rig.put(shard, b"lost")
    rig.engine.index.settle()
    assert log.active_start == begin, "the lost frame is the first of its segment"
    rig.crash()
    os.truncate(tmp_path / "log" / "0000" / f"{begin:020d}.log", 0)
    rig.open()
    assert len(rig.drained(shard)) == 10
    before = rig.rows()
    rebuilt = rig.rebuilt()
    assert rebuilt == before, explain(before, rebuilt)
    rig.close()
