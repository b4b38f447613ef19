"""Topics archived to Parquet: exactly once, whichever process is killed, with correct manifests."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet
import pytest
from pyspark.sql import SparkSession

import basaltmq
from basaltmq.errors import InvalidArgumentError
from basaltmq.log.batches.record import TIMESTAMP_MS_MAX as MAX_MS
from basaltmq.log.batches.record import Record
from basaltmq.pipeline.archive.archive import ArchiveJob, archive
from basaltmq.pipeline.archive.manifest import CHECKSUM, read_manifests
from basaltmq.pipeline.archive.replay import ReplayJob, replay
from basaltmq.pipeline.audit.audit import AuditJob, audit
from basaltmq.pipeline.files import Files

pytestmark = [pytest.mark.spec("F2", "F3"), pytest.mark.timeout(400), pytest.mark.xdist_group("spark")]


def job(tmp_path: Path, **settings: object) -> ArchiveJob:
    source = {"path": str(tmp_path / "data"), "subscribe": "orders"}
    return ArchiveJob(source=source, target=str(tmp_path / "archive"), **settings)  # type: ignore[arg-type]


def archived(spark: SparkSession, tmp_path: Path) -> list[tuple[int, int, bytes]]:
    """Return the content of the files that manifests name, counted without Spark."""
    files = [file.path for manifest in manifests(spark, tmp_path) for file in manifest.files]
    return sorted(row for path in files for row in rows_of(tmp_path / "archive" / path))


def rows_of(path: Path) -> list[tuple[int, int, bytes]]:
    found = pyarrow.parquet.ParquetFile(path).read(["partition", "offset", "value"]).to_pydict()
    return list(zip(found["partition"], found["offset"], found["value"], strict=True))


def manifests(spark: SparkSession, tmp_path: Path):  # type: ignore[no-untyped-def]
    return read_manifests(Files(spark, str(tmp_path / "archive")), str(tmp_path / "archive"))


def test_every_record_is_archived_once_and_the_manifests_say_what_is_there(spark: SparkSession, tmp_path: Path) -> None:
    with basaltmq.open(tmp_path / "data") as db:
        orders = db.topic("orders", partitions=2)
        for partition in (0, 1):
            orders.append([b"%d-%d" % (partition, i) for i in range(60)], partition=partition)
        first = archive(spark, job(tmp_path, offsets_max=70))
        assert (first.records, first.rejected) == (120, 0)
        assert first.batches >= 2
        orders.append([b"0-60"], partition=0)
        assert archive(spark, job(tmp_path)).records == 1
    expected = [(p, i, b"%d-%d" % (p, i)) for p in (0, 1) for i in range(60 + (p == 0))]
    assert archived(spark, tmp_path) == expected
    for manifest in manifests(spark, tmp_path):
        for file in manifest.files:
            offsets = sorted(offset for _, offset, _ in rows_of(tmp_path / "archive" / file.path))
            assert offsets == list(range(file.first_offset, file.last_offset + 1))
            assert len(offsets) == file.records
        assert sum(file.records for file in manifest.files) == manifest.records
    paths = [str(tmp_path / "archive" / file.path) for file in manifests(spark, tmp_path)[0].files]
    frame = spark.read.option("basePath", str(tmp_path / "archive")).parquet(*paths)
    assert frame.selectExpr(CHECKSUM).collect()[0][0] == manifests(spark, tmp_path)[0].checksum


def test_what_a_killed_batch_left_is_removed_and_done_again(spark: SparkSession, tmp_path: Path) -> None:
    with basaltmq.open(tmp_path / "data") as db:
        db.topic("orders").append([b"0-%d" % i for i in range(20)])
    archive(spark, job(tmp_path))
    root = tmp_path / "archive"
    (root / "_manifests" / "000000.json").unlink()
    for path in (root / "_checkpoint" / "commits").iterdir():
        path.unlink()
    for path in (root / "_checkpoint" / "offsets").iterdir():
        if path.name != "0":
            path.unlink()
    stray = next((root / "topic=orders").rglob("*.parquet"))
    stray.rename(stray.with_name("000000-0-000000000099-000000000099.parquet"))
    archive(spark, job(tmp_path))
    assert archived(spark, tmp_path) == [(0, i, b"0-%d" % i) for i in range(20)]
    assert sum(len(rows_of(path)) for path in root.rglob("topic=*/*/*.parquet")) == 20


def test_values_that_do_not_parse_are_kept_apart(spark: SparkSession, tmp_path: Path) -> None:
    with basaltmq.open(tmp_path / "data") as db:
        db.topic("orders").append([b'{"id": 1, "sum": 2.5}', b"not json", b'{"id": "x"}', b'{"id": 4}'])
    done = archive(spark, job(tmp_path, value_schema="id INT, sum DOUBLE"))
    assert (done.records, done.rejected) == (4, 2)
    root = tmp_path / "archive"
    good = [pyarrow.parquet.ParquetFile(path).read(["parsed"]) for path in root.rglob("topic=*/*/*.parquet")]
    assert sorted((row["parsed"]["id"], row["parsed"]["sum"]) for each in good for row in each.to_pylist()) == [
        (1, 2.5),
        (4, None),
    ]
    bad = [row[2] for path in (root / "_rejected").rglob("*.parquet") for row in rows_of(path)]
    assert sorted(bad) == [b"not json", b'{"id": "x"}']


def test_null_and_empty_values_are_archived_and_replayed_as_they_are(spark: SparkSession, tmp_path: Path) -> None:
    headers = (("null", None), ("empty", b""))
    written = [Record(b"v", b"k"), Record(None, b"k", headers), Record(b"", None), Record(None, timestamp_ms=MAX_MS)]
    with basaltmq.open(tmp_path / "data") as db:
        db.topic("orders").append(written)
        db.topic("again")
    assert archive(spark, job(tmp_path)).records == 4
    assert [row[2] for row in archived(spark, tmp_path)] == [b"v", None, b"", None]
    location = {"path": str(tmp_path / "data")}
    replay(
        spark,
        ReplayJob(
            topics=["orders"],
            archive=str(tmp_path / "archive"),
            target=location,
            target_topic="again",
            checkpoint=str(tmp_path / "replay"),
        ),
    )
    with basaltmq.open(tmp_path / "data") as db:
        found = sorted(db.topic("again").read(0), key=lambda each: each.offset)
    assert [(each.value, each.key, each.headers) for each in found] == [
        (each.value, each.key, each.headers) for each in written
    ]
    assert found[3].timestamp_ms == MAX_MS
    report = audit(spark, AuditJob(path=str(tmp_path / "data"), archive=str(tmp_path / "archive")))
    assert [each for each in report.findings if each.severity.value != "note"] == []


def test_a_wrong_compression_is_named(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="unknown compression"):
        archive(spark, job(tmp_path, compression="zip"))


KILLS = int(os.environ.get("BASALT_KILLS", "0"))
"""Number of kills. Each costs a start of the JVM."""
SEED = int(os.environ.get("BASALT_SEED", str(random.SystemRandom().randrange(1 << 32))))


def traces(root: Path) -> int:
    """Return a number that grows with each step of an archive: planned offsets, staged files, manifests, finished
    batches."""
    try:
        return sum(1 for path in root.rglob("*") if path.is_file() and not path.name.startswith("."))
    except FileNotFoundError:
        return 0


@pytest.mark.timeout(120 * (KILLS + 2))
@pytest.mark.skipif(not KILLS, reason="a JVM per kill: set BASALT_KILLS; what a kill leaves is cleaned up above")
def test_killed_at_random_each_record_is_archived_once(spark: SparkSession, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    count, offsets_max = 300 * (KILLS + 1), 50
    with basaltmq.open(tmp_path / "data") as db:
        orders = db.topic("orders")
        for begin in range(0, count, 100):
            orders.append([b"0-%d" % i for i in range(begin, begin + 100)])
    root = tmp_path / "archive"
    reported = json.dumps({"data": str(tmp_path / "data"), "archive": str(root), "offsets_max": offsets_max})
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    killed = 0
    for _ in range(KILLS):
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.interop.spark.archive_child", reported],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        before, more = traces(root), rng.randrange(1, 12)
        deadline = time.monotonic() + 100
        while child.poll() is None and time.monotonic() < deadline:
            if abs(traces(root) - before) >= more:
                time.sleep(rng.random() * 0.3)
                break
            time.sleep(0.01)
        killed += child.poll() is None
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    done = len(list((root / "_manifests").glob("*.json")))
    print(f"killed {killed} times; {done} of {count // offsets_max} batches done before the last run")
    archive(spark, job(tmp_path, offsets_max=10 * offsets_max))
    assert archived(spark, tmp_path) == [(0, i, b"0-%d" % i) for i in range(count)]
    files = [path for path in root.rglob("*.parquet") if "_staging" not in path.parts]
    assert sum(pyarrow.parquet.read_metadata(path).num_rows for path in files) == count
