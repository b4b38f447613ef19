"""Audit of the rows of a store: finds every planted fault, and nothing in a consistent store."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pytest
from tests.unit.streams.segment_rig import SegmentRig

import basaltmq
from basaltmq.errors import CorruptionError
from basaltmq.pipeline.audit.queues import audit_queues
from basaltmq.pipeline.audit.store import audit_rows
from basaltmq.pipeline.findings import Finding, Severity, exit_code
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.stats import QueueStats
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as queue_keys
from basaltmq.store.keys import streams as stream_keys
from basaltmq.store.memory import MemoryStore
from basaltmq.store.open import open_store, open_view
from basaltmq.store.sync.group_commit import GroupCommit
from basaltmq.streams.imports import stage
from basaltmq.streams.imports.imports import Imports, open_imports
from basaltmq.streams.imports.stage import PartWriter, folder_of
from basaltmq.streams.view import StreamView

pytestmark = pytest.mark.spec("F2")

MESSAGES = (
    Family.MESSAGES,
    Family.DELAYED,
    Family.MESSAGE_CONTENT,
    Family.CONTENT_REFS,
    Family.QUEUE_STATS,
    Family.LEASES,
)
Rows = list[tuple[Family, bytes, bytes]]

LARGE = b"x" * 10_000
"""A body that is stored separately."""


def fill(path: Path) -> None:
    with basaltmq.open(path) as db:
        orders = db.topic("orders")
        orders.append([b"%d" % i * 100 for i in range(50)])
        db.topic("gone").append([b"x"])
        with orders.consume("readers", wait=0) as consumer:
            for _ in consumer:
                pass
        jobs = db.queue("jobs")
        jobs.enqueue([b"%d" % i for i in range(10)])
        jobs.enqueue(LARGE)
        jobs.enqueue(b"later", delay_ms=1 << 40)
        jobs.ack(jobs.lease(3))
        jobs.lease(2)
        for name in ("left", "right"):
            db.queue(name)
    with closing(open_store(path)) as store, closing(GroupCommit(store)) as group, QueuePlane(store, group) as plane:
        plane.publish(["left", "right"], LARGE)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("healthy") / "data"
    fill(path)
    return path


@pytest.fixture
def data(healthy: Path, tmp_path: Path) -> Path:
    shutil.copytree(healthy, tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture(scope="module")
def rows(healthy: Path) -> Rows:
    """Return all rows of messages."""
    with closing(open_view(healthy)) as store:
        return [(family, key, row) for family in MESSAGES for key, row in store.scan(family)]


def findings(path: Path) -> list[Finding]:
    with StreamView.open(path) as view:
        return audit_rows(path, view)


def test_audit_of_a_consistent_store_finds_nothing(data: Path) -> None:
    assert findings(data) == []


def test_unreclaimed_rows_of_a_deleted_queue_are_no_finding(data: Path) -> None:
    with closing(open_store(data)) as store:
        batch = Batch()
        batch.put(Family.DELETED_QUEUES, queue_keys.deleted_queue_key("right"), ((1 << 64) - 1).to_bytes(8, "big"))
        for family, key in ((Family.QUEUES, queue_keys.queue_key), (Family.QUEUE_STATS, queue_keys.queue_stats_key)):
            batch.delete(family, key("right"))
        store.write(batch)
    assert findings(data) == []


Plant = Callable[[Store, Batch], None]


def first(family: Family, skip: int = 0) -> Plant:
    """Delete a row of a family."""

    def plant(store: Store, batch: Batch) -> None:
        batch.delete(family, [key for key, _ in store.scan(family)][skip])

    return plant


def recount(**counts: int) -> Plant:
    def plant(store: Store, batch: Batch) -> None:
        key = queue_keys.queue_stats_key("jobs")
        stats = QueueStats.decode("jobs", store.get(Family.QUEUE_STATS, key) or b"")
        for name, by in counts.items():
            setattr(stats, name, getattr(stats, name) + by)
        batch.put(Family.QUEUE_STATS, key, stats.encode())

    return plant


def shorten_body(store: Store, batch: Batch) -> None:
    key, body = next(store.scan(Family.MESSAGE_CONTENT))
    batch.put(Family.MESSAGE_CONTENT, key, body[:-1])


def lease_of_nothing(store: Store, batch: Batch) -> None:
    key, row = next(store.scan(Family.LEASES))
    batch.put(Family.LEASES, queue_keys.lease_key("nowhere", queue_keys.decode_lease_key(key)[1]), row)


def damage_row(store: Store, batch: Batch) -> None:
    key, _ = next(store.scan(Family.MESSAGES))
    batch.put(Family.MESSAGES, key, b"\x80short")


def put(family: Family, key: bytes, row: bytes = b"row") -> Plant:
    return lambda store, batch: batch.put(family, key, row)


@pytest.mark.parametrize(
    ("plant", "severity", "kind", "subject", "said"),
    [
        (first(Family.MESSAGES), "loss", "count", "queue jobs", "counts 8 messages, but has 7"),
        (recount(messages=-1), "fault", "count", "queue jobs", "counts 7 messages, but has 8"),
        (recount(delayed=1), "loss", "count", "queue jobs", "counts 2 delayed messages, but has 1"),
        (first(Family.DELAYED), "loss", "count", "queue jobs", "counts 1 delayed messages, but has 0"),
        (damage_row, "loss", "checksum", "queue jobs", "1 rows of messages are unreadable"),
        (first(Family.MESSAGE_CONTENT), "loss", "reference", "queue jobs", "1 bodies of its messages are missing"),
        (shorten_body, "loss", "reference", "queue jobs", "1 bodies of its messages are missing or have"),
        (put(Family.MESSAGE_CONTENT, b"b" * 16), "fault", "orphan", "bodies", "1 bodies belong to no message: 6262"),
        (
            first(Family.CONTENT_REFS),
            "fault",
            "reference",
            "references to bodies",
            "1 messages share a body without",
        ),
        (
            put(Family.CONTENT_REFS, b"b" * 32, b""),
            "fault",
            "orphan",
            "references to bodies",
            "1 references belong to missing messages",
        ),
        (lease_of_nothing, "fault", "orphan", "queue nowhere", "1 leases of a queue without counters"),
        (first(Family.QUEUE_STATS, 1), "fault", "orphan", "queue left", "1 messages of a queue without counters"),
    ],
)
def test_audit_finds_every_fault_of_rows(
    rows: Rows, plant: Plant, severity: str, kind: str, subject: str, said: str
) -> None:
    store = MemoryStore()
    batch = Batch()
    for family, key, row in rows:
        batch.put(family, key, row)
    store.write(batch)
    assert not list(audit_queues(store))
    batch = Batch()
    plant(store, batch)
    store.write(batch)
    found = list(audit_queues(store))
    assert (found[0].severity.value, found[0].kind, found[0].subject) == (severity, kind, subject)
    assert found[0].detail.startswith(said)
    # Further findings describe the same fault.
    assert {each.subject for each in found} == {subject}


def test_audit_finds_groups_with_impossible_or_lost_offsets(data: Path) -> None:
    with basaltmq.open(data) as db:
        topic = db.streams.topics.get("orders").id
        db.streams.offsets.commit("ahead", {(topic, 0): 1000})
        db.streams.offsets.commit("slow", {(topic, 0): 3})
        db.topic("orders").delete_before(0, 10)
    with closing(open_store(data)) as store:
        batch = Batch()
        _, row = next(store.scan(Family.CONSUMER_OFFSETS))
        batch.put(Family.CONSUMER_OFFSETS, stream_keys.consumer_offset_key("lost", UUID(int=7), 0), row)
        store.write(batch)
    assert [(each.severity.value, each.kind, each.subject, each.detail) for each in findings(data)] == [
        ("loss", "unread", "slow on orders[0]", "7 offsets before 10 were deleted before the group read them"),
        ("fault", "ahead", "ahead on orders[0]", "committed 1000, but the partition ends at 50"),
        ("fault", "orphan", "lost", "1 offsets belong to topics that do not exist"),
    ]


def test_group_that_commits_new_records_is_not_ahead(data: Path) -> None:
    with StreamView.open(data) as view:
        with basaltmq.open(data) as db:
            db.topic("orders").append([b"more"])
            db.topic("fresh").append([b"x"])
            for name, offset in (("orders", 51), ("fresh", 1)):
                db.streams.offsets.commit("quick", {(db.streams.topics.get(name).id, 0): offset})
        seen = view.lag

        def early(group: str) -> list[object]:
            return [type(each)("orders", 0, 51, 0, 50, 0) for each in seen("readers")]

        # A view reads the log before the commits.
        view.lag = early  # type: ignore[assignment, method-assign]
        assert audit_rows(data, view) == []


def test_audit_finds_an_unfinished_import(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = PartWriter(folder_of(data, "r", 0), 0)
    columns = [pa.nulls(1, pa.binary()), pa.array([b"x"]), pa.nulls(1, stage.SCHEMA.field(2).type)]
    columns.append(pa.array([1]).cast(stage.SCHEMA.field(3).type))
    writer.add("orders", 0, pa.RecordBatch.from_arrays(columns, schema=stage.SCHEMA), 1000)
    part = writer.finish()
    with open_imports(data) as imports, monkeypatch.context() as patch:
        patch.setattr(Imports, "_execute", lambda *_, **__: None)
        imports.run("r", 0, [part])
    assert [(each.severity.value, each.kind, each.subject) for each in findings(data)] == [("fault", "import", "r")]


def test_audit_finds_a_damaged_frame(data: Path) -> None:
    segment = max((data / "log").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else -1)
    raw = bytearray(segment.read_bytes())
    at = raw.index(b"2" * 100)
    raw[at] ^= 1
    segment.write_bytes(raw)
    assert ("loss", "checksum", "log") in {(each.severity.value, each.kind, each.subject) for each in findings(data)}


@pytest.mark.parametrize("which", [3, -1])
def test_audit_finds_a_missing_segment_and_readers_name_the_remedy(tmp_path: Path, which: int) -> None:
    with basaltmq.open(tmp_path) as db:
        db.topic("orders", durability="written")
        (shard,) = db.streams.topics.get("orders").shards
    with closing(open_store(tmp_path)) as store:
        rig = SegmentRig(tmp_path, store=store, segment_bytes=2000)
        for at in range(40):
            rig.put(shard, b"%d" % at * 100)
        rig.close()
    assert findings(tmp_path) == []
    segments = sorted((tmp_path / "log").rglob("*.log"))
    segments[which].unlink()
    name = str(segments[which].relative_to(tmp_path))
    found = [(each.severity.value, each.kind, each.subject) for each in findings(tmp_path)]
    # Without its last segment the log also ends below its durable end.
    assert found == [("loss", "missing segment", name), *([("loss", "checksum", "log")] if which == -1 else [])]
    if which != -1:
        with (
            StreamView.open(tmp_path) as view,
            pytest.raises(CorruptionError, match="restore the file from a backup") as reported,
        ):
            [view.read("orders", 0, offset) for offset in range(40)]
        assert "\n" not in str(reported.value)


def test_exit_code_is_that_of_the_worst_finding() -> None:
    note, fault, loss = (Finding(severity, "k", "s", "t") for severity in Severity)
    assert [exit_code(each) for each in ([], [note], [note, fault], [fault, loss, note])] == [0, 0, 2, 3]
