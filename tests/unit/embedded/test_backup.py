"""Backups of a store with streams during writes, and log verification."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import basaltmq
from basaltmq.embedded.database import Basalt
from basaltmq.errors import AlreadyExistsError
from basaltmq.log.verify import verify_log
from basaltmq.store.checkpoint import restore
from basaltmq.store.directory import LOG
from basaltmq.store.salvage.verify import verify

pytestmark = [pytest.mark.spec("A10"), pytest.mark.promise("P7")]


def values(db: Basalt, name: str, partition: int = 0) -> list[bytes]:
    return [(record.value or b"") for record in db.topic(name, create=False).read(partition)]


def test_backup_beside_writers_has_all_records_confirmed_before(tmp_path: Path) -> None:
    stop = threading.Event()
    confirmed: list[int] = []

    def write(db: Basalt) -> None:
        topic = db.topic("t")
        number = 0
        while not stop.is_set():
            topic.append([b"%06d" % (number + each) for each in range(10)], durability="written")
            number += 10
            confirmed.append(number)

    with basaltmq.open(tmp_path / "data") as db:
        db.topic("kept", engine="rocksdb").append(b"row")
        db.topic("t")
        writer = threading.Thread(target=write, args=(db,))
        writer.start()
        while len(confirmed) < 20:
            stop.wait(0.01)
        before = confirmed[-1]
        db.backup(tmp_path / "backup")
        stop.set()
        writer.join()
        with pytest.raises(AlreadyExistsError):
            db.backup(tmp_path / "backup")
    assert verify(tmp_path / "backup") == []
    restore(tmp_path / "backup", tmp_path / "restored")
    with basaltmq.open(tmp_path / "restored", create=False) as db:
        found = values(db, "t")
        assert len(found) >= before
        assert found == [b"%06d" % number for number in range(len(found))]
        assert values(db, "kept") == [b"row"]
        position = db.topic("t").append(b"on")
        assert position.offset == len(found)


@pytest.mark.promise("P10")
def test_topic_creation_waits_until_a_backup_has_copied_the_log(tmp_path: Path) -> None:
    """Otherwise the restored store would reuse the shard number, and the new shard would inherit frames."""
    began = threading.Event()
    with basaltmq.open(tmp_path / "data") as db:
        db.topic("t").append(b"x")
        checkpoint = db.store.checkpoint

        def slow(target: Path, *, add_files: Callable[[Path], None]) -> None:
            def later(draft: Path) -> None:
                began.set()
                creator.join(0.5)
                assert creator.is_alive(), "a topic was created between the two copies"
                add_files(draft)

            checkpoint(target, add_files=later)

        def create() -> None:
            assert began.wait(30)
            db.topic("late").append(b"y")

        creator = threading.Thread(target=create)
        creator.start()
        db.store.checkpoint = slow  # type: ignore[method-assign, assignment]
        db.backup(tmp_path / "backup")
        creator.join(30)
        assert values(db, "late") == [b"y"]
    with basaltmq.open(tmp_path / "backup", create=False) as db:
        assert [topic.name for topic in db.topics()] == ["t"]


def test_bit_flip_in_a_backup_log_is_reported(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path / "data") as db:
        db.topic("t").append([b"x" * 100] * 50)
        db.backup(tmp_path / "backup")
    (segment,) = (tmp_path / "backup" / LOG / "0000").glob("*.log")
    flip(segment, 1000)
    (fault,) = verify(tmp_path / "backup")
    assert str(segment.relative_to(tmp_path / "backup")) in fault


def test_log_is_verified_frame_by_frame(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path / "data") as db:
        topic = db.topic("t")
        for number in range(5):
            topic.append([b"%d" % number * 100] * 20)
        assert verify_log(tmp_path / "data" / LOG) == []
        shard = topic.info().meta.number
    (segment,) = (tmp_path / "data" / LOG / "0000").glob("*.log")
    flip(segment, segment.stat().st_size // 2)
    (fault,) = verify_log(tmp_path / "data" / LOG)
    assert str(segment) in fault
    assert f"shard {shard}, offsets 40 to 59" in fault


def test_verify_without_a_log_finds_nothing(tmp_path: Path) -> None:
    assert verify_log(tmp_path / LOG) == []


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)
