"""Backups of a store with streams, taken while it is written to, and the check of a log."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import basaltmq
from basaltmq.embedded.database import LOG, Basalt
from basaltmq.errors import AlreadyExistsError
from basaltmq.log.verify import verify_log
from basaltmq.store.checkpoint import restore
from basaltmq.store.salvage.verify import verify

pytestmark = [pytest.mark.spec("A10"), pytest.mark.promise("P7")]


def values(db: Basalt, name: str, partition: int = 0) -> list[bytes]:
    return [(record.value or b"") for record in db.topic(name, create=False).read(partition)]


def test_a_backup_under_writers_holds_everything_confirmed_before_it(tmp_path: Path) -> None:
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
def test_no_topic_appears_between_the_copies_of_rows_and_log(tmp_path: Path) -> None:
    """Its shard's number would be given out again in the restored store, and its frames taken for another's."""
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


def test_a_flip_in_the_log_of_a_backup_is_named(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path / "data") as db:
        db.topic("t").append([b"x" * 100] * 50)
        db.backup(tmp_path / "backup")
    (segment,) = (tmp_path / "backup" / LOG / "0000").glob("*.log")
    flip(segment, 1000)
    (fault,) = verify(tmp_path / "backup")
    assert str(segment.relative_to(tmp_path / "backup")) in fault


def test_the_log_of_a_store_is_verified_frame_by_frame(tmp_path: Path) -> None:
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


def test_there_is_nothing_to_verify_without_a_log(tmp_path: Path) -> None:
    assert verify_log(tmp_path / LOG) == []


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)
