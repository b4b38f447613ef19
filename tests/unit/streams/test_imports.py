"""Imports: every batch exactly once, wherever the importer is killed, and despite changes before it resumes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from tests.crash.harness import Forge

import basaltmq
from basaltmq.errors import (
    BasaltError,
    CorruptionError,
    InvalidArgumentError,
    LimitExceededError,
    StoreLockedError,
    StoreStalledError,
    TopicNotFoundError,
)
from basaltmq.log.batches.record import Record
from basaltmq.streams.adapter import RecordsRead
from basaltmq.streams.imports import stage
from basaltmq.streams.imports.imports import open_imports, read_run, runs
from basaltmq.streams.imports.stage import Part, PartWriter, folder_of

CHILD = "tests.unit.streams.import_child:run"

pytestmark = pytest.mark.spec("F3")


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    with Forge() as forge:
        yield forge


def batch_of(values: list[bytes], key: bytes | None = None, time_ms: int = 1000) -> pa.RecordBatch:
    count = len(values)
    columns = [
        pa.array([key] * count, pa.binary()),
        pa.array(values, pa.binary()),
        pa.array([[{"key": "from", "value": b"test"}]] * count, stage.SCHEMA.field("headers").type),
        pa.array([time_ms] * count, pa.int64()).cast(stage.SCHEMA.field("timestamp").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=stage.SCHEMA)


def staged(path: Path, run: str, batch: int, chunks: list[tuple[int, list[bytes]]], number: int = 0) -> Part:
    writer = PartWriter(folder_of(path, run, batch), number)
    for partition, values in chunks:
        writer.add("orders", partition, batch_of(values), 1 << 20)
    return writer.finish()


def store(path: Path, **settings: object) -> None:
    with basaltmq.open(path) as db:
        orders = db.topic("orders", partitions=2, **settings)  # type: ignore[arg-type]
        orders.append([b"before"], partition=0)


def values(path: Path) -> list[list[bytes]]:
    with basaltmq.open(path) as db:
        return [[(record.value or b"") for record in db.topic("orders").read(partition)] for partition in (0, 1)]


CHUNKS = [(0, [b"a", b"b"]), (1, [b"c"]), (0, [b"d"]), (1, [b"e", b"f"])]
ONCE = [[b"before", b"a", b"b", b"d"], [b"c", b"e", b"f"]]


@pytest.mark.parametrize("engine", ["segment", "rocksdb"])
def test_a_batch_is_imported_once_and_its_stage_is_removed(tmp_path: Path, engine: str) -> None:
    store(tmp_path, engine=engine)
    part = staged(tmp_path, "q", 0, CHUNKS)
    with open_imports(tmp_path) as imports:
        assert imports.run("q", 0, [part]).records == 6
        again = staged(tmp_path, "q", 0, CHUNKS)
        done = imports.run("q", 0, [again])
        assert (done.records, done.was_done) == (0, True)
    assert values(tmp_path) == ONCE
    assert not (tmp_path / stage.STAGING).exists()
    with basaltmq.open(tmp_path) as db:
        record = next(db.topic("orders").read(1))
        assert (record.key, record.headers, record.timestamp_ms) == (None, (("from", b"test"),), 1000)
        assert read_run(db.store, "q").last_batch == 0


def test_the_row_of_a_single_batch_run_is_deleted(tmp_path: Path) -> None:
    store(tmp_path)
    with open_imports(tmp_path) as imports:
        assert imports.run("once-1", 0, [staged(tmp_path, "once-1", 0, CHUNKS)]).records == 6
    assert values(tmp_path) == ONCE
    with basaltmq.open(tmp_path) as db:
        assert list(runs(db.store)) == []


def test_runs_are_independent_and_their_batches_are_ordered(tmp_path: Path) -> None:
    store(tmp_path)
    with open_imports(tmp_path) as imports:
        for run, batch in (("a", 0), ("b", 0), ("a", 1), ("a", 0), ("b", 0)):
            imports.run(run, batch, [staged(tmp_path, run, batch, [(1, [f"{run}{batch}".encode()])])])
    assert values(tmp_path)[1] == [b"a0", b"b0", b"a1"]


@pytest.mark.parametrize(("engine", "every"), [("segment", 1), ("rocksdb", 4)])
def test_an_import_killed_at_any_step_has_every_record_exactly_once(
    tmp_path: Path, forge: Forge, engine: str, every: int
) -> None:
    fresh = _prepared(tmp_path / "fresh", engine)
    reported = forge.run(CHILD, str(shutil.copytree(fresh, tmp_path / "all")), "q", 3, _parts(tmp_path), 0)
    assert reported.count("appended") == len(CHUNKS)
    assert (reported[0], reported[-1]) == ("saved", "removed")
    for step in range(1, len(reported) + 1, every):
        path = shutil.copytree(fresh, tmp_path / str(step))
        child = forge.start(CHILD, str(path), "q", 3, _parts(tmp_path), step)
        assert list(child.lines(60)) == reported[:step]
        child.kill()
        child.close()
        extra: list[bytes] = []
        if step % 2:
            # Other clients append before the query resumes, starting with the same record as the import.
            extra = [b"a", b"x"]
            with basaltmq.open(path) as db:
                db.topic("orders").append(extra, partition=0)
        # The resumed query stages the records again, in another order.
        again = staged(path, "q", 3, list(reversed(CHUNKS)))
        with open_imports(path) as imports:
            imports.run("q", 3, [again])
        found = values(path)
        assert sorted(found[0]) == sorted(ONCE[0] + extra), f"killed after step {step}, {reported[step - 1]}"
        assert found[1] == ONCE[1]
        if not extra:
            assert found == ONCE
        assert not (path / stage.STAGING).exists()


def _prepared(path: Path, engine: str) -> Path:
    store(path, engine=engine)
    part = staged(path, "q", 3, CHUNKS)
    (path.parent / "parts").write_bytes(msgspec.json.encode([part]))
    return path


def _parts(tmp_path: Path) -> str:
    return (tmp_path / "parts").read_text()


def test_an_interrupted_import_of_another_run_is_completed_first(tmp_path: Path, forge: Forge) -> None:
    path = _prepared(tmp_path / "data", "segment")
    child = forge.start(CHILD, str(path), "q", 3, _parts(tmp_path), 2)
    assert len(list(child.lines(60))) == 2
    child.kill()
    child.close()
    with open_imports(path) as imports:
        imports.run("other", 0, [staged(path, "other", 0, [(0, [b"z"])])])
    assert values(path) == [[*ONCE[0], b"z"], ONCE[1]]


def test_a_topic_created_again_gets_the_whole_batch(tmp_path: Path, forge: Forge) -> None:
    path = _prepared(tmp_path / "data", "segment")
    child = forge.start(CHILD, str(path), "q", 3, _parts(tmp_path), 3)
    assert len(list(child.lines(60))) == 3
    child.kill()
    child.close()
    with basaltmq.open(path) as db:
        db.delete_topic("orders")
        # Its records equal the start of the import, at the same offsets, but are foreign.
        alike = [Record(value, None, (("from", b"test"),), timestamp_ms=1000) for value in (b"a", b"b")]
        db.topic("orders", partitions=2).append([b"before", *alike], partition=0)
    with open_imports(path) as imports:
        imports.run("q", 3, [])
    assert values(path) == [[b"before", b"a", b"b", b"a", b"b", b"d"], ONCE[1]]


def test_a_changed_stage_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    store(tmp_path)
    part = staged(tmp_path, "q", 0, CHUNKS)
    file = folder_of(tmp_path, "q", 0) / part.file
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    with open_imports(tmp_path) as imports, pytest.raises(CorruptionError, match="has changed since it was staged"):
        imports.run("q", 0, [part])
    assert values(tmp_path) == [[b"before"], []]


def test_records_that_a_topic_would_refuse_are_refused_while_staging(tmp_path: Path) -> None:
    store(tmp_path)
    writer = PartWriter(folder_of(tmp_path, "q", 0), 0)
    with pytest.raises(LimitExceededError):
        writer.add("orders", 0, batch_of([b"x" * 100]), 50)
    writer.discard()
    with basaltmq.open(tmp_path) as db:
        db.topic("fleeting", engine="memory")
    for topic, error in (("none", TopicNotFoundError), ("fleeting", InvalidArgumentError)):
        writer = PartWriter(folder_of(tmp_path, "q", 0), 0)
        writer.add(topic, 0, batch_of([b"x"]), 50)
        kind: type[BasaltError] = error
        with open_imports(tmp_path) as imports, pytest.raises(kind):
            imports.run("q", 0, [writer.finish()])
        with basaltmq.open(tmp_path) as db:
            assert read_run(db.store, "q").intent is None


def test_a_store_in_use_is_refused_with_a_remedy(tmp_path: Path) -> None:
    store(tmp_path)
    with basaltmq.open(tmp_path), pytest.raises(StoreLockedError, match="exclusive access"), open_imports(tmp_path):
        pass


def test_unfinished_stages_expire(tmp_path: Path) -> None:
    store(tmp_path)
    staged(tmp_path, "old", 4, CHUNKS)
    staged(tmp_path, "needed", 1, CHUNKS)
    staged(tmp_path, "fresh", 0, CHUNKS)
    for run, batch in (("old", 4), ("needed", 1)):
        folder = folder_of(tmp_path, run, batch)
        os.utime(folder, (1000, 1000))
    now_s = folder_of(tmp_path, "fresh", 0).stat().st_mtime + 10
    assert stage.expire(tmp_path, {("needed", 1)}, now_s) == 1
    assert sorted(path.name for path in (tmp_path / stage.STAGING).iterdir()) == ["fresh", "needed"]


@pytest.mark.parametrize("run", ["", "../up", "a/b", "x" * 101, ".hidden"])
def test_a_run_name_is_a_valid_directory_name(tmp_path: Path, run: str) -> None:
    with pytest.raises(InvalidArgumentError, match="a run name has"):
        folder_of(tmp_path, run, 0)


def test_an_interrupted_batch_is_completed_once_despite_foreign_appends_between_its_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tmp_path)
    part = staged(tmp_path, "run", 0, [(0, [b"a", b"b"]), (0, [b"c"]), (0, [b"other"]), (1, [b"d"])])
    with open_imports(tmp_path) as imports:
        drivers = imports._streams.drivers
        append, left = drivers.append_batch, iter((False, True))

        def append_concurrently(topic: str, records: Any, **given: Any) -> Any:
            done = append(topic, records, **given)
            append(topic, [Record(b"other")], partition=given["partition"])
            if next(left):
                raise KeyboardInterrupt
            return done

        monkeypatch.setattr(drivers, "append_batch", append_concurrently)
        with pytest.raises(KeyboardInterrupt):
            imports.run("run", 0, [part])
    with basaltmq.open(tmp_path) as db:
        begun = [[record.value for record in db.topic("orders").read(p)] for p in (0, 1)]
    with open_imports(tmp_path) as imports:
        assert imports.run("run", 0, [part]).was_done
    with basaltmq.open(tmp_path) as db:
        found = [[record.value for record in db.topic("orders").read(p)] for p in (0, 1)]
    assert begun[0][-5:] == [b"a", b"b", b"other", b"c", b"other"]
    # Foreign records with the same value have another time, so they do not match the chunk.
    assert found == [[*begun[0], b"other"], [*begun[1], b"d"]]


def test_an_interrupted_batch_is_not_completed_while_earlier_records_are_undecided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tmp_path)
    part = staged(tmp_path, "run", 0, [(0, [b"a", b"b"])])

    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    with open_imports(tmp_path) as imports:
        monkeypatch.setattr(imports._streams.drivers, "wait", cut)
        with pytest.raises(KeyboardInterrupt):
            imports.run("run", 0, [part])
    with open_imports(tmp_path) as imports:
        drivers = imports._streams.drivers
        begin = drivers.info("orders", 0).next_offset - 2
        monkeypatch.setattr(drivers, "read", lambda _topic, _number, at, *_: RecordsRead([], at, 0, begin))
        with pytest.raises(StoreStalledError, match=rf"from offset {begin} on .* open transaction"):
            imports.run("run", 0, [part])
    with open_imports(tmp_path) as imports:
        assert imports.run("run", 0, [part]).was_done
    with basaltmq.open(tmp_path) as db:
        found = [record.value for record in db.topic("orders").read(0)]
    assert (len(found), found[-2:]) == (begin + 2, [b"a", b"b"])
