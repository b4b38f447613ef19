"""Views of streams after crashes, on damaged files, on backups and on empty stores."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.streams.view_rig import Writer, seen, values

import basaltmq
from basaltmq.errors import (
    CorruptionError,
    GroupNotFoundError,
    StorageError,
    StoreNotFoundError,
    StoreStalledError,
    TopicNotFoundError,
)
from basaltmq.log.committed import NAME
from basaltmq.streams.view import StreamView


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    made = Writer(tmp_path / "data")
    yield made
    made.close()


def open_view(writer: Writer) -> StreamView:
    return StreamView.open(writer.path, clock_ms=writer.clock_ms)


def test_a_missing_segment_is_reported_and_the_read_ends(writer: Writer) -> None:
    writer.create("orders")
    for at in range(60):
        writer.put("orders", b"%d" % at * 100)
    writer.engine.checkpoint()
    with open_view(writer) as view:
        os.unlink(writer.engine.lanes[0].log.segments()[0].path)
        with pytest.raises((StoreStalledError, CorruptionError)):
            view.read("orders", 0, 0)
        assert view.read("orders", 0, 59).records()[0].value == b"59" * 100


@pytest.mark.promise("P7")
def test_a_view_of_a_crashed_store_omits_the_torn_tail_and_changes_nothing(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "data")
    writer.create("orders")
    writer.create("quick", durability="written")
    for at in range(10):
        writer.put("orders", b"%d" % at)
        writer.put("quick", b"%d" % at)
    last = writer.engine.lanes[0].log.segments()[-1].path
    writer.kill()
    with open(last, "ab") as file:
        file.write(b"BSFM and half a frame")
    before = listing(tmp_path / "data")
    with open_view(writer) as view:
        assert values(view, "orders") == values(view, "quick") == [b"%d" % at for at in range(10)]
        assert not view.wait(0)
    assert listing(tmp_path / "data") == before


def listing(path: Path) -> list[tuple[str, int, int]]:
    return sorted(
        (str(each.relative_to(path)), each.stat().st_size, each.stat().st_mtime_ns) for each in path.rglob("*")
    )


@pytest.mark.promise("P7")
def test_damage_in_the_middle_loses_only_that_frame(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "data")
    writer.create("orders")
    for at in range(10):
        writer.put("orders", b"%d" % at * 50)
    log = writer.engine.lanes[0].log
    entry = next(writer.engine.index.entries(writer.plane.topics.get("orders").shards[0], 4))
    writer.kill()
    with open(log.segments()[0].path, "r+b") as file:
        file.seek(entry.position + 90)
        file.write(b"\xff\xff")
    with open_view(writer) as view:
        assert [record.offset for record in seen(view, "orders")] == [0, 1, 2, 3, 5, 6, 7, 8, 9]
        assert view._segments is not None
        assert len(view._segments.damages) == 1


@pytest.mark.parametrize("damage", ["missing", "empty", "flipped"])
@pytest.mark.promise("P3")
def test_without_a_mark_of_the_writer_a_view_syncs_what_it_shows(
    writer: Writer, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.create("orders")
    writer.put("orders", b"one")
    mark = writer.engine.lanes[0].log.path / NAME
    if damage == "missing":
        mark.unlink()
    elif damage == "empty":
        os.truncate(mark, 0)
    else:
        mark.write_bytes(b"\xff" + mark.read_bytes()[1:])
    writer.put("orders", b"two", wait=False)
    # Written to the file, but not synced.
    writer.engine.lanes[0].log.write_gathered()
    synced: list[str] = []
    real = os.fdatasync

    def watched(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fdatasync", watched)
    with open_view(writer) as view:
        assert values(view, "orders") == [b"one", b"two"]
        assert synced == [str(segment.path) for segment in writer.engine.lanes[0].log.segments()]


@pytest.mark.promise("P3")
def test_records_of_a_rocksdb_topic_in_a_view_are_durable(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.create("rocks", engine="rocksdb")
    writer.put("rocks", b"one", wait=False)
    synced: list[str] = []
    real = os.fdatasync

    def watched(fd: int) -> None:
        synced.append(os.path.splitext(os.readlink(f"/proc/self/fd/{fd}"))[1])
        real(fd)

    with open_view(writer) as view:
        monkeypatch.setattr(os, "fdatasync", watched)
        assert values(view, "rocks") == [b"one"]
        assert synced
        assert set(synced) == {".log"}


@pytest.mark.promise("P3")
def test_a_log_truncated_by_a_restarted_writer_is_read_again(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "data")
    writer.create("orders", durability="written")
    for at in range(5):
        writer.put("orders", b"old%d" % at)
    with open_view(writer) as view:
        assert len(values(view, "orders")) == 5
        entry = next(writer.engine.index.entries(writer.plane.topics.get("orders").shards[0], 3))
        path = writer.engine.lanes[0].log.segments()[0].path
        writer.kill()
        # The last two frames are damaged. Recovery truncates them, and other records replace them.
        with open(path, "r+b") as file:
            file.seek(entry.position)
            file.write(b"\xff" * 400)
        writer.open()
        writer.put("orders", b"new")
        assert [record.value for record in writer.read_all("orders")] == [b"old0", b"old1", b"old2", b"new"]
        view.refresh()
        assert values(view, "orders") == [b"old0", b"old1", b"old2", b"new"]
        writer.close()
        view.refresh()
        assert values(view, "orders") == [b"old0", b"old1", b"old2", b"new"]


def test_a_backup_with_its_log_is_readable_and_one_without_names_the_missing_log(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path / "data") as db:
        db.topic("orders").append([b"one", b"two"])
        db.topic("rocks", engine="rocksdb").append(b"three")
        db.backup(tmp_path / "backup")
        db.store.checkpoint(tmp_path / "bare")
    with StreamView.open(tmp_path / "backup") as view:
        assert values(view, "orders") == [b"one", b"two"]
        assert values(view, "rocks") == [b"three"]
        assert not view.wait(0)
    with StreamView.open(tmp_path / "bare") as view:
        assert values(view, "rocks") == [b"three"]
        assert view.info("orders", 0).records == 0
        assert view.topic("orders").name == "orders"


def test_an_index_without_its_log_names_the_missing_directory(writer: Writer) -> None:
    writer.create("orders")
    writer.put("orders", b"one")
    writer.engine.checkpoint()
    bare = writer.path.parent / "bare"
    writer.store.checkpoint(bare)
    with StreamView.open(bare) as view:
        info = view.info("orders", 0)
        assert (info.high_watermark, info.records, info.size_bytes) == (1, 0, 0)
        with pytest.raises(StorageError, match="log/0000 does not exist"):
            view.read("orders", 0, 0)


def test_an_empty_store_and_one_without_a_log_can_be_viewed(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        StreamView.open(tmp_path / "nothing")
    basaltmq.open(tmp_path / "data").close()
    shutil.rmtree(tmp_path / "data" / "log", ignore_errors=True)
    with StreamView.open(tmp_path / "data") as view:
        assert list(view.topics()) == []
        assert list(view.groups()) == []
        with pytest.raises(GroupNotFoundError):
            view.lag("g")
        with pytest.raises(TopicNotFoundError):
            view.topic("orders")
        writer = Writer(tmp_path / "data")
        writer.create("orders")
        writer.put("orders", b"one")
        view.refresh()
        assert values(view, "orders") == [b"one"]
        writer.close()
