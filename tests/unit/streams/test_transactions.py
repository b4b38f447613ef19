"""Frames of transactions: every kind of read shows committed records and never aborted ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.unit.log.strategies import transactional
from tests.unit.streams.segment_rig import SegmentRig, explain
from tests.unit.streams.view_rig import Writer, seen

from basaltmq.durability import Durability
from basaltmq.errors import CorruptionError
from basaltmq.log.batches.kafka import check_batch, marker_batch, read_header, read_marker, records
from basaltmq.log.batches.record import Record
from basaltmq.streams.adapter import IfAllOlder
from basaltmq.streams.engines.segment import cleaner as segment_cleaner
from basaltmq.streams.view import StreamView


def values(found: Sequence[Record]) -> list[bytes]:
    return [(record.value or b"") for record in found]


def end(rig: SegmentRig, shard: int, producer: int, is_commit: bool) -> int:
    append = rig.engine.append_kafka(shard, marker_batch(producer, 0, is_commit, rig.now_ms), Durability.SYNCED)
    rig.engine.wait(append)
    return append.base_offset


@pytest.mark.spec("B6")
def test_a_marker_has_an_outcome_and_is_not_a_record(tmp_path: Path) -> None:
    for is_commit in (True, False):
        raw = marker_batch(7, 3, is_commit, 1_700_000_000_000)
        header = read_header(raw)
        assert (header.producer_id, header.producer_epoch, header.base_sequence) == (7, 3, -1)
        assert header.is_control
        assert header.is_transactional
        assert read_marker(raw) is is_commit
        (record,) = records(raw)
        assert (record.key, record.value) == (b"\0\0\0\1" if is_commit else b"\0\0\0\0", b"\0\0\0\0\0\0")
    with pytest.raises(CorruptionError):
        read_marker(raw[:-3])


@pytest.mark.promise("P3")
@pytest.mark.parametrize("index_keys", [False, True])
def test_readers_stop_before_open_transactions_and_skip_aborted_ones(tmp_path: Path, index_keys: bool) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard(index_keys=index_keys)
    rig.put(shard, Record(b"before", b"k", timestamp_ms=rig.now_ms))
    rig.engine.append_kafka(shard, transactional(1, 0, b"one", key=b"k"))
    rig.engine.append_kafka(shard, transactional(2, 0, b"two", key=b"k"))
    rig.put(shard, Record(b"between", b"k", timestamp_ms=rig.now_ms))
    assert values(rig.drained(shard)) == [b"before"]
    info = rig.engine.shard_info(shard)
    assert (info.high_watermark, info.next_offset) == (1, 4)
    assert rig.engine.state_of(shard).high_watermark == 4
    assert len(rig.engine.read_kafka(shard, 0).batches) == 4
    assert len(rig.engine.read_kafka(shard, 0, is_decided=True).batches) == 1
    end(rig, shard, 2, False)
    assert values(rig.drained(shard)) == [b"before"], "the first transaction is still open"
    end(rig, shard, 1, True)
    wanted = [b"before", b"one", b"between"]
    assert values(rig.drained(shard)) == wanted
    assert values(rig.engine.read_by_key(shard, b"k", 0).records()) == wanted
    assert rig.engine.read_by_offset(shard, 0).arrow().column("value").to_pylist() == wanted
    assert rig.engine.read_by_offset(shard, 2, 1).records()[0].value == b"between"
    assert rig.engine.get_offset_by_timestamp(shard, rig.now_ms, IfAllOlder.LATEST) == 0
    assert len(rig.engine.read_kafka(shard, 0, is_decided=True).batches) == 6, (
        "Kafka clients skip aborted batches themselves"
    )
    assert rig.engine.delete_by_key(shard, b"k") == 3
    assert rig.drained(shard) == []
    rig.close()


@pytest.mark.promise("P6")
@pytest.mark.parametrize("is_killed", [False, True])
def test_outcomes_survive_a_restart_and_a_rebuild_from_unordered_frames(tmp_path: Path, is_killed: bool) -> None:
    rig = SegmentRig(tmp_path, segment_bytes=900)
    shard = rig.shard(index_keys=False)
    other = rig.shard(index_keys=False)
    filler = bytes(200)
    for number in range(12):
        # Short-lived frames are mixed with long-lived ones, so that cleaning copies the latter behind newer frames.
        rig.put(other, filler, filler)
        rig.engine.append_kafka(shard, transactional(number % 3, number, b"%d" % number))
        if number % 3 == 2:
            for producer in range(3):
                end(rig, shard, producer, (number + producer) % 2 == 0)
    rig.engine.append_kafka(shard, transactional(1, 12, b"open"))
    rig.put(shard, b"behind")
    wanted = [b"%d" % number for number in range(12) if (number // 3 * 3 + 2 + number % 3) % 2 == 0]
    open_at = rig.engine.shard_info(shard).high_watermark
    assert values(rig.drained(shard)) == wanted
    rig.engine.delete_records_before(other, rig.engine.shard_info(other).next_offset)
    rig.clean()
    before = rig.rows()
    if is_killed:
        rig.crash()
        rig.open()
        assert values(rig.drained(shard)) == wanted
    found = rig.rebuilt()
    assert found == before, explain(before, found)
    assert values(rig.drained(shard)) == wanted
    state = rig.engine.state_of(shard)
    assert (state.stable_offset, state.undecided) == (open_at, {1: open_at})
    end(rig, shard, 1, True)
    assert values(rig.drained(shard)) == [*wanted, b"open", b"behind"]
    rig.engine.delete_shard(shard)
    assert not [key for key in rig.rows() if key[:1] in b"QM"]
    rig.close()


@pytest.mark.spec("B10")
@pytest.mark.promise("P6")
@pytest.mark.parametrize("index_keys", [True, False])
def test_compaction_drops_aborted_records_and_keeps_the_ones_before_them(tmp_path: Path, index_keys: bool) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard(compact=True, index_keys=index_keys)
    rig.engine.append_kafka(shard, transactional(1, 0, b"old", key=b"k"))
    end(rig, shard, 1, True)
    rig.engine.append_kafka(shard, transactional(1, 1, b"undone", key=b"k"))
    end(rig, shard, 1, False)
    rig.engine.append_kafka(shard, transactional(2, 0, b"a", key=b"j"))
    rig.engine.append_kafka(shard, transactional(2, 1, b"b", key=b"j"))
    end(rig, shard, 2, True)
    rig.engine.append_kafka(shard, transactional(3, 0, b"not yet", key=b"k"))
    for _ in range(4):
        rig.engine.retain(rig.now_ms)
        rig.engine._cleaner._passes._passes.clear()
    assert values(rig.drained(shard)) == [b"old", b"b"]
    assert b"undone" not in b"".join(rig.engine.read_kafka(shard, 0).batches)
    before = rig.rows()
    found = rig.rebuilt()
    assert found == before, explain(before, found)
    assert values(rig.drained(shard)) == [b"old", b"b"]
    end(rig, shard, 3, True)
    for _ in range(4):
        rig.engine.retain(rig.now_ms)
        rig.engine._cleaner._passes._passes.clear()
    assert values(rig.drained(shard)) == [b"b", b"not yet"]
    rig.close()


@pytest.mark.spec("B10")
def test_a_marker_is_kept_as_long_as_the_frames_that_it_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_cleaner, "MERGED_FRAMES_MAX", 2)
    rig = SegmentRig(tmp_path)
    shard = rig.shard(compact=True)
    for producer in (1, 2):
        rig.engine.append_kafka(shard, transactional(producer, 0, b"v%d" % producer, key=b"k%d" % producer))
    for producer in (1, 2):
        end(rig, shard, producer, True)
    for at in range(4):
        rig.put(shard, Record(b"%d" % at, b"other", timestamp_ms=rig.now_ms))
    for _ in range(4):
        rig.engine.retain(rig.now_ms)
        rig.engine._cleaner._passes._passes.clear()
    assert values(rig.drained(shard)) == [b"v1", b"v2", b"3"]
    rig.reopen()
    assert values(rig.drained(shard)) == [b"v1", b"v2", b"3"]
    rig.close()


@pytest.mark.promise("P3")
def test_a_view_shows_the_same_transactions(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "data")
    writer.create("orders")
    engine = writer.engine
    shard = writer.plane.topics.get("orders").shards[0]

    def append(raw: bytes) -> None:
        engine.wait(engine.append_kafka(shard, raw))

    append(transactional(1, 0, b"kept"))
    append(transactional(2, 0, b"undone"))
    with StreamView.open(writer.path, clock_ms=writer.clock_ms) as view:
        assert seen(view, "orders") == []
        assert view.info("orders", 0).high_watermark == 0
        append(marker_batch(2, 0, False, 1))
        append(marker_batch(1, 0, True, 1))
        append(transactional(2, 1, b"open"))
        view.refresh()
        assert values(seen(view, "orders")) == [b"kept"]
        assert view.info("orders", 0) == writer.plane.drivers.info("orders", 0)
        assert view.info("orders", 0).high_watermark == 4
        engine.checkpoint()
        view.refresh()
        assert values(seen(view, "orders")) == [b"kept"]
    writer.close()


@pytest.mark.promise("P3", "P6")
def test_any_interleaving_of_transactions_matches_a_plain_model(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    rig = SegmentRig(tmp_path, segment_bytes=1500)
    shard = rig.shard(index_keys=bool(seed & 1))
    log: list[tuple[int, bytes | bool]] = []
    sequences = [0, 0, 0]
    for step in range(120):
        producer = chance.randrange(4)
        what = chance.random()
        if producer == 3:
            rig.put(shard, b"p%d" % step)
            log.append((-1, b"p%d" % step))
        elif what < 0.6:
            rig.engine.append_kafka(shard, transactional(producer, sequences[producer], b"t%d" % step))
            sequences[producer] += 1
            log.append((producer, b"t%d" % step))
        else:
            is_commit = chance.random() < 0.5
            end(rig, shard, producer, is_commit)
            log.append((producer, is_commit))
        if step % 40 == 39:
            rig.crash()
            rig.open()
        if step % 10 == 9:
            assert values(rig.drained(shard)) == model(log)
    before = rig.rows()
    assert rig.rebuilt() == before
    assert values(rig.drained(shard)) == model(log)
    rig.close()


def model(log: list[tuple[int, bytes | bool]]) -> list[bytes]:
    """Return the values that a reader sees of a sequence of (producer, value or outcome)."""
    seen_values: list[bytes] = []
    for at, (producer, said) in enumerate(log):
        if isinstance(said, bool):
            continue
        outcome_roll: bytes | bool | None = True
        if producer >= 0:
            outcome_roll = next((it for who, it in log[at:] if who == producer and isinstance(it, bool)), None)
        if outcome_roll is None:
            return seen_values
        if outcome_roll:
            seen_values.append(said)
    return seen_values


@pytest.mark.promise("P7")
@pytest.mark.parametrize("is_commit", [True, False])
def test_a_damaged_marker_is_encoded_again_for_readers_that_skip_damage(tmp_path: Path, is_commit: bool) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard(index_keys=False)
    rig.engine.append_kafka(shard, transactional(7, 0, b"one"))
    at = end(rig, shard, 7, is_commit)
    rig.engine.append_kafka(shard, transactional(7, 1, b"two"))
    end(rig, shard, 7, True)
    path = next((tmp_path / "log" / "0000").glob("*.log"))
    raw = bytearray(path.read_bytes())
    raw[next(rig.engine.index.entries(shard, at)).position + 100] ^= 1
    path.write_bytes(raw)
    batches = rig.engine.read_kafka(shard, 0, is_decided=True, is_skipping=True).batches
    headers = [read_header(each) for each in batches]
    assert [header.base_offset for header in headers] == [0, 1, 2, 3]
    assert headers[1].is_control
    assert headers[1].producer_id == 7
    assert read_marker(batches[1]) is is_commit
    check_batch(batches[1])
    rig.close()
