"""Jobs on one archive, one after the other: compact, replay and audit, which finds every planted fault."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession
from tests.unit.log.strategies import transactional
from tests.unit.protocols.kafka.test_kafka_transactions import Harness

import basaltmq
from basaltmq.cli.main import main
from basaltmq.embedded.database import Basalt, Settings
from basaltmq.log.batches.kafka import marker_batch
from basaltmq.log.batches.record import Record
from basaltmq.pipeline.archive.archive import ArchiveJob, archive
from basaltmq.pipeline.archive.compact import CompactJob, compact
from basaltmq.pipeline.archive.replay import ReplayJob, replay
from basaltmq.pipeline.audit.audit import Audited, AuditJob, audit
from basaltmq.pipeline.findings import exit_code
from basaltmq.pipeline.latency import latency
from basaltmq.pipeline.reports.pages import audit_page, latency_page
from basaltmq.queues.events.topic import EventSettings
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import streams as stream_keys
from basaltmq.store.open import open_store

pytestmark = [pytest.mark.spec("F2", "F3"), pytest.mark.timeout(500), pytest.mark.xdist_group("spark")]

DAY_MS = 86_400_000


def found(result: Audited) -> set[tuple[str, str, str]]:
    return {(each.severity.value, each.kind, each.subject) for each in result.findings if each.severity.value != "note"}


@contextmanager
def written_to(data: Path) -> Iterator[None]:
    """A store during writes: records, commits, deletes, and topics and messages that are created and deleted."""
    over = threading.Event()

    def write(db: Basalt) -> None:
        jobs = db.queue("jobs", attempts_max=1, dead_letter_queue="dead")
        topics = [db.topic("007"), db.topic("busy")]
        for turn in range(1 << 30):
            if over.is_set():
                return
            for topic in topics:
                with topic.consume("readers", wait=0) as consumer:
                    topic.append([b"more"] * 10, partition=0)
                    for _ in consumer:
                        pass
            topics[1].delete_before(0, 10 * turn)
            db.topic(f"short-{turn % 3}").append([b"x"])
            db.delete_topic(f"short-{turn % 3}")
            jobs.enqueue([b"small", b"x" * 10_000])
            leased = jobs.lease(2)
            jobs.ack(leased[:1])
            jobs.nack(leased[1:], "out of ink")

    with basaltmq.open(data) as db, ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write, db)
        try:
            yield
        finally:
            over.set()
            writing.result()


def test_an_audit_does_not_report_aborted_transactions_as_lost(spark: SparkSession, tmp_path: Path) -> None:
    """The index counts their records until they are cleaned, and readers skip them."""
    streams = Harness(tmp_path / "store")
    shard = streams.topic("t")
    engine, _ = streams.context.engine(streams.context.topic("t"), 0)
    engine.append_kafka(shard, transactional(1, 0, b"a", b"b"))
    engine.append_kafka(shard, marker_batch(1, 0, False, 1_700_000_000_000))
    engine.append_kafka(shard, transactional(1, 2, b"c"))
    engine.append_kafka(shard, marker_batch(1, 0, True, 1_700_000_000_000))
    streams.close()
    result = audit(spark, AuditJob(path=str(tmp_path / "store")))
    assert [(each.read, each.indexed) for each in result.partitions if each.topic == "t"] == [(1, 3)]
    assert result.findings == []


def test_an_archive_is_compacted_replayed_and_audited(spark: SparkSession, tmp_path: Path) -> None:
    data, root = tmp_path / "data", tmp_path / "archive"
    with basaltmq.open(data) as db:
        orders = db.topic("007", partitions=2)
        for i in range(60):
            record = Record(b"%d" % i, b"k%d" % (i % 4), (("n", b"%d" % i),), timestamp_ms=i * DAY_MS // 40)
            orders.append([record], partition=i % 2)
        db.topic("again", partitions=3)
    archive(spark, ArchiveJob(source={"path": str(data), "subscribe": "007"}, target=str(root), offsets_max=40))
    done = compact(spark, CompactJob(archive=str(root)))
    assert done.manifests >= 2
    assert (done.records, done.files_after) == (60, 4)
    assert len(list(root.rglob("*.parquet"))) == 4
    assert archive(spark, ArchiveJob(source={"path": str(data), "subscribe": "007"}, target=str(root))).records == 0

    class StopError(Exception):
        pass

    def stop_in_the_middle(steps: int, _: int) -> None:
        if steps == 1:
            raise StopError

    again = ReplayJob(
        topics=["007"],
        archive=str(root),
        target={"path": str(data)},
        target_topic="again",
        checkpoint=str(tmp_path / "replay"),
        where="CAST(value AS STRING) <> '7'",
        step_records=30,
    )
    with pytest.raises(StopError):
        replay(spark, again, stop_in_the_middle)
    rest = replay(spark, again)
    assert (rest.steps_before, rest.steps) == (1, 1)
    assert replay(spark, again).records == 0
    with basaltmq.open(data) as db:
        topic = db.topic("again")
        for key in range(4):
            values = [
                (int(record.value or b""), record.headers, record.timestamp_ms)
                for partition in range(3)
                for record in topic.read(partition, key=b"k%d" % key)
            ]
            wanted = [i for i in range(60) if i % 4 == key and i != 7]
            assert values == [(i, (("n", b"%d" % i),), i * DAY_MS // 40) for i in wanted]

    with written_to(data):
        clean = audit(spark, AuditJob(path=str(data), archive=str(root)))
    assert found(clean) == set(), clean.findings
    kept = [each for each in clean.partitions if each.topic in ("007", "again")]
    assert [each.read for each in kept] == [each.indexed for each in kept]
    assert [each.archived for each in kept if each.topic == "007"] == [30, 30]
    assert sum(bucket.in_archive for bucket in clean.buckets) == 60


def test_every_fault_that_is_planted_is_found_and_named(spark: SparkSession, tmp_path: Path) -> None:
    data, root, page = tmp_path / "data", tmp_path / "archive", tmp_path / "audit.html"
    with basaltmq.open(data) as db:
        orders = db.topic("007", partitions=2)
        for partition in (0, 1):
            records = [Record(b"%d" % i, timestamp_ms=i * DAY_MS // 20) for i in range(30)]
            orders.append(records, partition=partition)
        db.topic("torn").append([b"torn" * 100])
        db.topic("torn").append([b"whole"])
    archive(spark, ArchiveJob(source={"path": str(data), "subscribe": "007"}, target=str(root)))
    gone, named = plant(root)
    with basaltmq.open(data) as db:
        topic = db.streams.topics.get("007").id
        db.streams.offsets.commit("ahead", {(topic, 0): 10_000})
        db.streams.offsets.commit("slow", {(topic, 1): 1})
        orders = db.topic("007")
        orders.delete_before(1, 10)
    with closing(open_store(data)) as store:
        extra = Batch()
        extra.put(Family.STREAM_INDEX, stream_keys.stream_index_key(b"K", 1, 7, 7), b"")
        store.write(extra)
    (segment,) = (path for path in (data / "log").rglob("*.log") if b"torn" * 100 in path.read_bytes())
    segment.write_bytes(segment.read_bytes().replace(b"torn" * 100, b"Torn" + b"torn" * 99))
    flags = ["--archive", str(root), "--index", "--html", str(page), "--json"]
    reported = CliRunner().invoke(main, ["--data-dir", str(data), "pipeline", "audit", *flags])
    assert reported.exit_code == 3, reported.output
    findings = {(each["severity"], each["kind"], each["subject"]) for each in json.loads(reported.stdout)["findings"]}
    planted = {
        ("loss", "missing file", gone),
        ("fault", "orphan", gone.replace("/000000-", "/stray-")),
        ("loss", "missing", "007[0]"),
        ("fault", "duplicate", "007[0]"),
        ("loss", "count", next(path for path in named if "/000000-1-000000000000-" in path)),
        ("loss", "checksum", "batch 1"),
        ("loss", "missing", "007[1]"),
        ("loss", "differs", "007[1]"),
        ("fault", "gap", "007[1]"),
        ("loss", "file size", next(path for path in named if "/000000-1-000000000020-" in path)),
        ("note", "behind", "007[1]"),
        ("fault", "ahead", "ahead on 007[0]"),
        ("loss", "unread", "slow on 007[1]"),
        ("loss", "checksum", "log"),
        ("loss", "count", "torn[0]"),
        ("note", "behind", "torn[0]"),
    }
    assert planted <= findings, planted - findings
    # The surplus row, and the result of the index comparison for the torn frame.
    others = {each[1:] for each in findings - planted}
    assert ("index", "row") in others
    assert others <= {("index", "row"), ("index", "log"), ("damage", "lane 0"), ("gap", "log")}
    assert "<svg" in page.read_text()
    assert "Records are missing or damaged" in page.read_text()


def plant(root: Path) -> tuple[str, list[str]]:
    """Plant faults in two partitions with a file for each of two days. Return the missing files, and all files of the
    manifests."""
    path = root / "_manifests" / "000000.json"
    raw = json.loads(path.read_text())
    gone, twice, altered, longer = sorted(raw["files"], key=lambda file: (file["partition"], file["first_offset"]))
    stray = root / gone["path"].replace("/000000-", "/stray-")
    (root / gone["path"]).rename(stray)
    copy = twice | {"path": twice["path"].replace(".parquet", "-again.parquet")}
    shutil.copy(root / twice["path"], root / copy["path"])
    with open(root / longer["path"], "ab") as damaged:
        damaged.write(b"x")
    rows = pyarrow.parquet.ParquetFile(root / altered["path"]).read()
    values = [
        b"forged" if offset in (3, 12) else value for offset, value in enumerate(rows.column("value").to_pylist())
    ]
    column = pyarrow.array(values, rows.schema.field("value").type)
    rows = rows.set_column(rows.schema.get_field_index("value"), "value", column)
    # The log begins at 10, so it still has offset 15 but not 5.
    rows = rows.filter(pyarrow.array([offset not in (5, 15) for offset in rows.column("offset").to_pylist()]))
    # Spark cannot read nanoseconds, and an unreadable file would be another fault.
    pyarrow.parquet.write_table(rows, root / altered["path"], coerce_timestamps="us")
    forged = altered | {"size_bytes": (root / altered["path"]).stat().st_size}
    path.write_text(json.dumps(raw | {"files": [gone, longer]}))
    alone = raw | {"files": [twice, copy, forged], "batch": 1}
    path.with_name("000001.json").write_text(json.dumps(alone))
    # Hadoop's checksums of the changed files.
    for hidden in root.rglob(".*.crc"):
        hidden.unlink()
    return gone["path"], [file["path"] for file in raw["files"]]


def test_latency_is_computed_from_events(spark: SparkSession, tmp_path: Path) -> None:
    now_ns = 1_700_000_000_000_000_000

    def clock_ns() -> int:
        return now_ns

    settings = Settings(events=EventSettings(gather_s=0), clock_ns=clock_ns)
    with basaltmq.open(tmp_path / "data", settings=settings) as db:
        jobs = db.queue("jobs")
        for i in range(20):
            jobs.enqueue(b"%d" % i, fairness_key=f"tenant-{i % 2}")
        now_ns += 3_000_000
        leased = jobs.lease(20)
        now_ns += 5_000_000
        jobs.ack(leased[1:])
        jobs.nack(leased[0])
    result = latency(spark, str(tmp_path / "data"))
    (queue,) = result.queues
    assert (queue.enqueued, queue.acked, queue.failed) == (20, 19, 1)
    # Messages with the same time get positions one nanosecond apart.
    assert (queue.wait.p50_ms, queue.work.p99_ms, queue.total.p50_ms) == pytest.approx((3.0, 5.0, 8.0), abs=0.01)
    assert sorted(each.fairness_key or "" for each in result.keys) == ["tenant-0", "tenant-1"]
    assert sum(each.acked for each in result.minutes) == 19
    assert "<svg" in latency_page(result)
    assert exit_code([]) == 0
    assert "No inconsistency found" in audit_page(Audited("x", None, [], [], [], 0.0))
