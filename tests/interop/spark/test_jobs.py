"""Jobs on one archive, one after the other: compact, replay and audit, which finds every fault that is planted."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

import basaltmq
from basaltmq.cli.main import main
from basaltmq.embedded.database import Settings
from basaltmq.pipeline.archive import ArchiveJob, archive
from basaltmq.pipeline.audit import Audited, AuditJob, audit
from basaltmq.pipeline.compact import CompactJob, compact
from basaltmq.pipeline.files import Files
from basaltmq.pipeline.findings import exit_code
from basaltmq.pipeline.latency import latency
from basaltmq.pipeline.manifest import read_manifests
from basaltmq.pipeline.replay import ReplayJob, replay
from basaltmq.pipeline.reports import audit_page, latency_page
from basaltmq.queues.event_topic import EventSettings
from basaltmq.store import keys
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.open import open_store

pytestmark = [pytest.mark.spec("F2", "F3"), pytest.mark.timeout(500), pytest.mark.xdist_group("spark")]

DAY_MS = 86_400_000


def found(result: Audited) -> set[tuple[str, str]]:
    return {(each.severity.value, each.kind) for each in result.findings if each.severity.value != "note"}


def test_an_archive_is_compacted_replayed_and_audited(spark: SparkSession, tmp_path: Path) -> None:
    data, root = tmp_path / "data", tmp_path / "archive"
    with basaltmq.open(data) as db:
        orders = db.topic("007", partitions=2)
        for i in range(60):
            orders.append(b"%d" % i, key=b"k%d" % (i % 5), headers={"n": b"%d" % i}, timestamp_ms=i * DAY_MS // 40)
        db.topic("again", partitions=3)
        with orders.consume("readers", wait=0) as consumer:
            for _ in consumer:
                pass
    archive(spark, ArchiveJob(source={"path": str(data), "subscribe": "007"}, target=str(root), offsets_max=40))
    job = AuditJob(path=str(data), archive=str(root))
    clean = audit(spark, job)
    assert found(clean) == set(), clean.findings
    assert [(each.read, each.archived) for each in clean.partitions if each.topic == "007"] == [
        (each.indexed, each.indexed) for each in clean.partitions if each.topic == "007"
    ]
    assert sum(bucket.in_log for bucket in clean.buckets) == sum(b.in_archive for b in clean.buckets) == 60

    done = compact(spark, CompactJob(archive=str(root)))
    assert done.manifests >= 2
    assert (done.records, done.files_after) == (60, 4)
    assert len(list(root.rglob("*.parquet"))) == 4
    assert archive(spark, ArchiveJob(source={"path": str(data), "subscribe": "007"}, target=str(root))).records == 0

    class StopError(Exception):
        pass

    def stop_in_the_middle(steps: int, _: int) -> None:
        if steps == 2:
            raise StopError

    again = ReplayJob(
        topics=["007"],
        archive=str(root),
        target={"path": str(data)},
        target_topic="again",
        checkpoint=str(tmp_path / "replay"),
        where="CAST(value AS STRING) <> '7'",
        step_records=20,
    )
    with pytest.raises(StopError):
        replay(spark, again, stop_in_the_middle)
    rest = replay(spark, again)
    assert (rest.steps_before, rest.steps) == (2, 1)
    assert replay(spark, again).records == 0
    with basaltmq.open(data) as db:
        topic = db.topic("again")
        for key in range(5):
            values = [
                (int(record.value), record.headers, record.timestamp_ms)
                for partition in range(3)
                for record in topic.read(partition, key=b"k%d" % key)
            ]
            wanted = [i for i in range(60) if i % 5 == key and i != 7]
            assert values == [(i, (("n", b"%d" % i),), i * DAY_MS // 40) for i in wanted]
    assert found(audit(spark, job)) == set()

    plant(spark, root)
    with basaltmq.open(data) as db:
        db.streams.offsets.commit("readers", {(db.streams.topics.get("007").id, 0): 10_000})
        db.topic("007").delete_before(1, 3)
        db.streams.offsets.commit("slow", {(db.streams.topics.get("007").id, 1): 1})
    with closing(open_store(data)) as store:
        batch = Batch()
        batch.put(Family.STREAM_INDEX, keys.stream_index_key(b"K", 1, 7, 7), b"")
        store.write(batch)
    page = tmp_path / "audit.html"
    told = CliRunner().invoke(
        main,
        [
            "--data-dir",
            str(data),
            "pipeline",
            "audit",
            "--archive",
            str(root),
            "--index",
            "--html",
            str(page),
            "--json",
        ],
    )
    assert told.exit_code == 3, told.output
    kinds = {(each["severity"], each["kind"]) for each in json.loads(told.stdout)["findings"]}
    assert {
        ("fault", "orphan"),
        ("loss", "missing file"),
        ("loss", "file size"),
        ("fault", "duplicate"),
        ("loss", "count"),
        ("loss", "checksum"),
        ("fault", "ahead"),
        ("loss", "unread"),
        ("fault", "index"),
    } <= kinds, told.stdout
    assert "<svg" in page.read_text()
    assert "Records are missing or damaged" in page.read_text()


def plant(spark: SparkSession, root: Path) -> None:
    """Of four files: one goes and a stray one comes, one is there twice, one is longer, one is another's."""
    files = Files(spark, str(root))
    (manifest,) = read_manifests(files, str(root))
    path = root / "_manifests" / f"{manifest.batch:06d}.json"
    raw = json.loads(path.read_text())
    gone, twice, longer, other = raw["files"]
    (root / gone["path"]).rename((root / gone["path"]).with_name("stray.parquet"))
    copy = twice | {"path": twice["path"].replace(".parquet", "-again.parquet")}
    shutil.copy(root / twice["path"], root / copy["path"])
    with open(root / longer["path"], "ab") as damaged:
        damaged.write(b"x")
    rows = pyarrow.parquet.ParquetFile(root / other["path"]).read()
    values = rows.column("value").to_pylist()
    column = pyarrow.array([b"forged", *values[1:]], rows.schema.field("value").type)
    pyarrow.parquet.write_table(
        rows.set_column(rows.schema.get_field_index("value"), "value", column), root / other["path"]
    )
    forged = other | {"size_bytes": (root / other["path"]).stat().st_size}
    path.write_text(json.dumps(raw | {"files": [gone, longer]}))
    alone = raw | {"files": [twice, copy, forged], "batch": raw["batch"] + 1, "replaces": []}
    path.with_name(f"{alone['batch']:06d}.json").write_text(json.dumps(alone))
    # Hadoop's checksums of what was changed.
    for hidden in root.rglob(".*.crc"):
        hidden.unlink()


def test_latency_is_told_from_events(spark: SparkSession, tmp_path: Path) -> None:
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
    # Messages of one moment get places a nanosecond apart.
    assert (queue.wait.p50_ms, queue.work.p99_ms, queue.total.p50_ms) == pytest.approx((3.0, 5.0, 8.0), abs=0.01)
    assert sorted(each.fairness_key or "" for each in result.keys) == ["tenant-0", "tenant-1"]
    assert sum(each.acked for each in result.minutes) == 19
    assert "<svg" in latency_page(result)
    assert exit_code([]) == 0
    assert "Everything fits" in audit_page(Audited("x", None, [], [], [], 0.0))
