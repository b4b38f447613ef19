"""Spark through a broker: reads, writes and queues over the network, and a broker killed under a streaming query."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from tests.interop.server import Broker, running

from basaltmq.errors import (
    AuthenticationError,
    BasaltError,
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    QueueNotFoundError,
    StoreLockedError,
    TopicNotFoundError,
    UnavailableError,
)
from basaltmq.http_client import Login, path
from basaltmq.pipeline import dlq
from basaltmq.pipeline.dlq import RedriveJob, RedrivePlan
from basaltmq.pipeline.remote import RemoteView
from pyspark_basalt.options import parse
from pyspark_basalt.queue_source import QueueBatchReader, QueueStreamReader
from pyspark_basalt.source import BatchReader

pytestmark = [pytest.mark.spec("F1", "F3"), pytest.mark.timeout(900), pytest.mark.xdist_group("spark")]

WAIT_S = 300.0
WRONG = "s3same"
ROWS = 600


SLOW_START = "failed to connect back"
"""Spark gives a worker of a streaming source ten seconds to start, which a busy machine may not keep."""


class Copier:
    """A query that is restarted from its checkpoint if the machine was too slow for Spark to start a worker."""

    def __init__(self, stream: DataStreamWriter) -> None:
        self._stream = stream
        self.query: StreamingQuery = stream.start()

    def until(self, what: Callable[[], bool]) -> None:
        """Wait for an effect of the query. If the query fails, raise its error."""
        deadline_s = time.monotonic() + WAIT_S
        while not what():
            failure = self.query.exception()
            if failure is not None and SLOW_START in str(failure):
                self.query = self._stream.start()
            else:
                assert failure is None, failure
            assert time.monotonic() < deadline_s, f"it did not come about in time: {self.query.status}"
            threading.Event().wait(0.2)


def contents(view: RemoteView, topic: str) -> list[bytes]:
    view.refresh()
    partitions = range(len(view.topic(topic).shards))
    batches = (batch for number in partitions for batch in view.records(topic, number, 0, 1 << 40))
    return [value for batch in batches for value in batch.column("value").to_pylist()]


def write(spark: SparkSession, server: str, low: int, high: int) -> None:
    frame = spark.range(low, high, numPartitions=2).selectExpr("concat('k', id % 7) AS key", "concat('v', id) AS value")
    frame.write.format("basalt").mode("append").options(server=server, topic="in").save()


def test_a_query_outlives_its_broker_and_each_record_is_there_once(spark: SparkSession, tmp_path: Path) -> None:
    with running(tmp_path / "data") as broker:
        server = broker.url("admin")
        view = RemoteView(Login(server))
        for topic in ("in", "out"):
            broker.call("PUT", path("topics", "/", topic), {"partitions": 2})
        write(spark, server, 0, ROWS)
        copier = Copier(
            spark.readStream.format("basalt")
            .options(server=server, subscribe="in", startingOffsets="earliest", maxOffsetsPerTrigger="300")
            .option("commitGroup", "copier")
            .load()
            .select("key", "value", "timestamp")
            .writeStream.format("basalt")
            .options(server=server, topic="out", checkpointLocation=str(tmp_path / "checkpoint"))
        )
        try:
            copier.until(lambda: len(contents(view, "out")) > 0)
            broker.kill()
            broker.start()
            write(spark, server, ROWS, ROWS + 100)
            copier.until(lambda: len(contents(view, "out")) >= ROWS + 100)
            # The group gets the last batch too, although Spark does not report that batch to the source.
            copier.until(lambda: sum(each.lag for each in view.lag("copier")) == 0)
            assert copier.query.exception() is None
        finally:
            copier.query.stop()
        assert sorted(contents(view, "out")) == sorted(b"v%d" % i for i in range(ROWS + 100))
        assert not list((broker.data_dir / "vhosts").glob("*/store/staging/*"))
        reported = copier.query.lastProgress
        assert reported is not None
        assert '"latestOffset"' in reported.json
        found = spark.read.format("basalt").options(server=server, subscribe="in", minPartitions="4").load()
        assert found.where("offset >= 0").count() == ROWS + 100
        refused = spark.read.format("basalt").options(server=server, subscribe="in", password=WRONG).load()
        with pytest.raises((AnalysisException, PySparkException), match="refused user 'guest'") as caught:
            refused.count()
        plan = refused._jdf.queryExecution().toString()
        for text in (str(caught.value), plan, broker.log()):
            assert WRONG not in text


def rows_of(reader: BatchReader | QueueBatchReader) -> list[dict[str, Any]]:
    batches = (batch for part in reader.partitions() for batch in reader.read(part))
    return [row for batch in batches for row in batch.to_pylist()]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with running(tmp_path_factory.mktemp("broker") / "data") as started:
        started.call("PUT", path("topics", "/", "orders"), {"partitions": 2})
        started.call("PUT", path("queues", "/", "jobs"), {"durable": True})
        yield started


def enqueue(broker: Broker, *payloads: str, queue: str = "jobs") -> None:
    for payload in payloads:
        body = {"properties": {"delivery_mode": 2}, "routing_key": queue, "payload": payload}
        broker.call("POST", path("exchanges", "/", "amq.default", "publish"), {**body, "payload_encoding": "string"})


def test_a_queue_is_read_by_path_and_by_server_and_read_on_from_a_checkpoint(broker: Broker) -> None:
    places = ({"server": broker.url("admin")}, {"path": str(broker.data_dir)})
    streams = [
        QueueStreamReader(parse({"queue": "jobs", "startingOffsets": "earliest", **location}, is_streaming=True))
        for location in places
    ]
    enqueue(broker, "m0", "m1", "m2")
    ends = []
    for location, stream in zip(places, streams, strict=True):
        for pieces in ("1", "3"):
            rows = rows_of(QueueBatchReader(parse({"queue": "jobs", "minPartitions": pieces, **location})))
            assert sorted(row["value"] for row in rows) == [b"m0", b"m1", b"m2"]
        start = stream.initialOffset()
        ends.append(stream.latestOffset(start, ReadAllAvailable()))
        assert len(stream.partitions(start, ends[-1])) == 1
    assert ends[0] == ends[1]
    enqueue(broker, "m3")
    for stream, end in zip(streams, ends, strict=True):
        later = stream.latestOffset(end, ReadAllAvailable())
        (part,) = stream.partitions(end, later)
        rows = [row for batch in stream.read(part) for row in batch.to_pylist()]
        assert [(row["value"], row["topic"], row["attempts"]) for row in rows] == [(b"m3", "jobs", 0)]
        assert stream.latestOffset(later, ReadAllAvailable()) is later
    assert broker.call("GET", path("queues", "/", "jobs"))["messages"] == 4


def test_dead_letters_are_sent_back_by_the_broker_that_has_them_once(broker: Broker, tmp_path: Path) -> None:
    for name in ("dead", "again"):
        broker.call("PUT", path("queues", "/", name), {"durable": True})
    enqueue(broker, "m0", "m1", "m2", "m3", queue="dead")
    location = {"server": broker.url("admin")}
    rows = rows_of(QueueBatchReader(parse({"queue": "dead", **location})))
    ids = {row["messageId"] for row in rows if row["value"] != b"m2"}
    job = RedriveJob(broker=location, queue="dead", to="again", rate_per_s=1000, checkpoint=str(tmp_path))
    plan = RedrivePlan("run-1", "dead", "again", None)
    assert dlq._move_remote(job, plan, ids, None) == (3, 0)
    assert dlq._move_remote(job, plan, ids, None) == (0, 0), "what went is not there to go twice"
    with pytest.raises(QueueNotFoundError, match="gone"):
        dlq._move_remote(job, RedrivePlan("run-1", "dead", "gone", None), {rows[0]["messageId"]}, None)
    moved = rows_of(QueueBatchReader(parse({"queue": "again", "includeHeaders": "true", **location})))
    assert sorted(row["value"] for row in moved) == [b"m0", b"m1", b"m3"]
    assert all({"key": dlq.STAMP, "value": b"run-1"} in row["headers"] for row in moved)
    # Back in the queue, as if dead-lettered again. Their stamp shows that the run has already moved them.
    back = RedriveJob(broker=location, queue="again", to="dead", checkpoint=str(tmp_path))
    assert dlq._move_remote(back, RedrivePlan("run-1", "again", "dead", None), ids, None) == (0, 0)
    with pytest.raises(StoreLockedError, match="use the broker with --server"):
        dlq._move(RedriveJob(path=str(broker.data_dir), queue="dead", checkpoint=str(tmp_path)), plan, ids, None)


def test_errors_are_reported_in_one_line_before_any_task_runs(broker: Broker) -> None:
    server = broker.url("admin")
    wrong: list[tuple[dict[str, str], type[BasaltError], str]] = [
        ({"subscribe": "order"}, TopicNotFoundError, f"there is no topic 'order' in {server}; there are"),
        ({"subscribe": "orders", "password": WRONG}, AuthenticationError, "refused user 'guest'"),
        ({"subscribe": "orders", "vhost": "v"}, NotFoundError, "there is no vhost 'v'"),
        ({"subscribe": "orders", "startingOffsets": '{"orders": {"0": 9}}'}, InvalidArgumentError, "from offset 9"),
        ({"subscribe": "orders", "server": "127.0.0.1:1", "retryTimeoutMs": "0"}, UnavailableError, "no broker"),
    ]
    for options, error, reported in wrong:
        with pytest.raises(error, match=reported) as caught:
            BatchReader(parse({"server": server, **options})).partitions()
        assert "\n" not in str(caught.value)
        assert WRONG not in str(caught.value)
    with pytest.raises(QueueNotFoundError, match="queue 'job' does not exist"):
        QueueBatchReader(parse({"server": server, "queue": "job"})).partitions()
    with pytest.raises(QueueNotFoundError, match=r"there is no queue 'job' in .*; there are .*jobs"):
        QueueBatchReader(parse({"path": str(broker.data_dir), "queue": "job"})).partitions()


@pytest.mark.promise("P7")
def test_a_damaged_frame_of_a_broker_ends_a_read_or_is_passed_over_as_asked(broker: Broker) -> None:
    topic = path("topics", "/", "hurt")
    broker.call("PUT", topic, {"durability": "written"})
    values = [uuid4().hex for _ in range(3)]
    for value in values:
        broker.call("POST", topic, {"records": [{"value": value}]})
    assert [each for each in broker.data_dir.rglob("log/**/*") if each.is_file() and hurt(each, values[1])]
    options = {"server": broker.url("admin"), "subscribe": "hurt"}
    with pytest.raises(DataLossError, match=r"hurt\[0\], offsets 1 to 1, .* With failOnDataLoss=false"):
        rows_of(BatchReader(parse(options)))
    rows = rows_of(BatchReader(parse({**options, "failOnDataLoss": "false"})))
    assert [row["value"].decode() for row in rows] == [values[0], values[2]]


def hurt(file: Path, value: str) -> bool:
    """Change a byte of a value in a file. Return whether the value was found."""
    at = file.read_bytes().find(value.encode())
    if at >= 0:
        with open(file, "r+b") as opened:
            opened.seek(at)
            opened.write(b"z")
    return at >= 0
