"""What an audit finds in the rows of a store: every fault planted, and none where all is well."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from uuid import UUID

import pytest

import basaltmq
from basaltmq.pipeline.audit_store import audit_rows
from basaltmq.pipeline.findings import Finding, Severity, exit_code
from basaltmq.queues.stats import QueueStats
from basaltmq.store import keys
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.open import open_store
from basaltmq.streams import stage
from basaltmq.streams.imports import Imports, open_imports
from basaltmq.streams.stage import PartWriter, folder_of
from basaltmq.streams.view import StreamView

pytestmark = pytest.mark.spec("F2")


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
        jobs.enqueue(b"x" * (1 << 20))
        jobs.ack(jobs.lease(3))
        jobs.lease(2)


def kinds(path: Path) -> set[tuple[str, str]]:
    with StreamView.open(path) as view:
        return {(each.severity.value, each.kind) for each in audit_rows(path, view)}


def test_where_all_is_well_nothing_is_found(tmp_path: Path) -> None:
    fill(tmp_path)
    assert kinds(tmp_path) == set()


def test_faults_of_rows_are_found(tmp_path: Path) -> None:
    fill(tmp_path)
    with basaltmq.open(tmp_path) as db:
        topic = db.streams.topics.get("orders").id
        db.streams.offsets.commit("ahead", {(topic, 0): 1000})
        db.streams.offsets.commit("slow", {(topic, 0): 3})
        db.topic("orders").delete_before(0, 10)
    with closing(open_store(tmp_path)) as store:
        batch = Batch()
        batch.delete(Family.MESSAGES, next(key for key, _ in store.scan(Family.MESSAGES)))
        (body,) = [key for key, _ in store.scan(Family.BODIES)]
        batch.delete(Family.BODIES, body)
        call, row = next(store.scan(Family.LEASE_CALLS))
        batch.put(Family.LEASE_CALLS, keys.lease_call_key("nowhere", keys.decode_lease_call_key(call)[1]), row)
        commit = next(value for _, value in store.scan(Family.CONSUMER_OFFSETS))
        batch.put(Family.CONSUMER_OFFSETS, keys.consumer_offset_key("lost", UUID(int=7), 0), commit)
        stats = next(raw for _, raw in store.scan(Family.QUEUE_STATS))
        empty = QueueStats.decode("jobs", stats)
        empty.messages = 3
        batch.put(Family.QUEUE_STATS, keys.queue_stats_key("empty"), empty.encode())
        store.write(batch)
    assert kinds(tmp_path) == {
        ("fault", "ahead"),
        ("loss", "unread"),
        ("loss", "reference"),
        ("loss", "count"),
        ("fault", "orphan"),
    }


def test_an_import_left_in_the_middle_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa

    fill(tmp_path)
    writer = PartWriter(folder_of(tmp_path, "r", 0), 0)
    columns = [pa.nulls(1, pa.binary()), pa.array([b"x"]), pa.nulls(1, stage.SCHEMA.field(2).type)]
    columns.append(pa.array([1]).cast(stage.SCHEMA.field(3).type))
    writer.add("orders", 0, pa.RecordBatch.from_arrays(columns, schema=stage.SCHEMA), 1000)
    part = writer.finish()
    with open_imports(tmp_path) as imports, monkeypatch.context() as patch:
        patch.setattr(Imports, "_carry_out", lambda *_, **__: None)
        imports.run("r", 0, [part])
    assert kinds(tmp_path) == {("fault", "import")}


def test_a_damaged_frame_is_found(tmp_path: Path) -> None:
    fill(tmp_path)
    segment = max((tmp_path / "log").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else -1)
    raw = bytearray(segment.read_bytes())
    at = raw.index(b"2" * 100)
    raw[at] ^= 1
    segment.write_bytes(raw)
    with StreamView.open(tmp_path) as view:
        found = audit_rows(tmp_path, view)
    assert ("loss", "checksum") in {(each.severity.value, each.kind) for each in found}


def test_the_exit_code_is_that_of_the_worst() -> None:
    note, fault, loss = (Finding(severity, "k", "s", "t") for severity in Severity)
    assert [exit_code(each) for each in ([], [note], [note, fault], [fault, loss, note])] == [0, 0, 2, 3]
