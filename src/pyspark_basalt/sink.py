"""Batch and stream writers: tasks stage rows, and the driver imports them, each batch of a query exactly once.

Tasks write their rows to the stage next to the store and report the file to the driver. The driver opens the store for
the duration of the import; no other process may have it open for writing. With `server`, tasks send their rows in parts
to the broker's stage, and the driver requests the import (remote_sink.py).

The run of a stream is its query id, which is in its checkpoint, and its batches have Spark's numbers. So a batch that
is repeated after a crash is recognised. Each batch write is a new run, unless `runId` and `batchId` are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from basaltmq.clock import now_ms
from basaltmq.errors import BasaltError, InvalidArgumentError
from basaltmq.pipeline.remote import RemoteView
from basaltmq.pipeline.store_path import store_path
from basaltmq.streams.imports.imports import open_imports
from basaltmq.streams.imports.stage import Part, PartWriter, folder_of
from basaltmq.streams.topics import Topic
from basaltmq.streams.view import StreamView
from pyspark_basalt.chunks import ChunkSplitter
from pyspark_basalt.remote_sink import send_rows
from pyspark_basalt.views import remote_of, topics_at, view_of
from pyspark_basalt.write_options import WriteOptions

QUERY: str = "sql.streaming.queryId"
BATCH: str = "streaming.sql.batchId"
"""Spark's local properties in a task of a streaming query."""


@dataclass
class Staged(WriterCommitMessage):
    """The report of a task to the driver."""

    run: str
    number: int
    part: Part | None
    sent: tuple[dict[str, Any], ...] = ()
    """Parts staged at a broker."""


class _Writer:
    """Common code of both writers."""

    def __init__(self, options: WriteOptions) -> None:
        self.options = options
        self.store = Path()
        location = options.location
        if location.login is None:
            self.store = store_path(location.path, location.vhost)
        if options.topic is not None:
            # Fail here rather than in the first task.
            topics_at(location, refresh=True, is_first=True).topic(options.topic)

    def stage(self, rows: Iterator[pa.RecordBatch], run: str, batch: int) -> Staged:
        context = TaskContext.get()
        number = 0 if context is None else context.partitionId()
        location = self.options.location
        if location.login is not None:
            remote = remote_of(location.login, in_task=True, refresh=True)
            return Staged(run, number, None, tuple(send_rows(rows, remote, run, batch, number, self.options.topic)))
        view = view_of(location.path, location.vhost, refresh=True)
        return stage_rows(rows, self.store, run, batch, number, view, self.options.topic)

    def publish(self, messages: list[WriterCommitMessage | None], run: str, batch: int) -> None:
        reports = sorted((each for each in messages if isinstance(each, Staged)), key=lambda each: each.number)
        login = self.options.location.login
        if login is None:
            with open_imports(self.store) as imports:
                imports.run(run, batch, [each.part for each in reports if each.part is not None])
            return
        remote = remote_of(login, in_task=True)
        remote.commit_batch(run, batch, [part for each in reports for part in each.sent])
        if self.options.is_single_write:
            remote.forget_run(run)

    def discard(self, messages: list[WriterCommitMessage | None], run: str, batch: int) -> None:
        """Delete staged files. Files of tasks that did not report expire."""
        login = self.options.location.login
        if login is not None:
            # A failed abort must not mask the original error.
            with suppress(BasaltError):
                RemoteView(msgspec.structs.replace(login, retry_s=0.0)).discard_batch(run, batch)
            return
        folder = folder_of(self.store, run, batch)
        for each in messages:
            if isinstance(each, Staged) and each.part is not None:
                (folder / each.part.file).unlink(missing_ok=True)


def stage_rows(
    rows: Iterator[pa.RecordBatch],
    store: Path,
    run: str,
    batch: int,
    number: int,
    view: StreamView,
    topic: str | None,
    clock_ms: Callable[[], int] = now_ms,
) -> Staged:
    """Stage the rows of task `number`."""
    topics: dict[str, Topic] = {}

    def found(name: str) -> Topic:
        if name not in topics:
            topics[name] = view.topic(name)
        return topics[name]

    splitter = ChunkSplitter(lambda name: found(name).config.partitions, topic, clock_ms(), turn=number)
    writer: PartWriter | None = None
    try:
        for name, partition, records in splitter.chunks(rows):
            writer = writer or PartWriter(folder_of(store, run, batch), number)
            writer.add(name, partition, records, found(name).config.record_bytes_max)
        return Staged(run, number, None if writer is None else writer.finish())
    except BaseException:
        if writer is not None:
            writer.discard()
        raise


class BatchWriter(_Writer, DataSourceArrowWriter):
    """Writes a frame once."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self.stage(iterator, self.options.run, self.options.batch)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self.publish(messages, self.options.run, self.options.batch)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self.discard(messages, self.options.run, self.options.batch)


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Writes the batches of a query."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        query = None if context is None else context.getLocalProperty(QUERY)
        batch = None if context is None else context.getLocalProperty(BATCH)
        if not query or not batch:
            raise InvalidArgumentError("Spark did not pass the query and the batch to the task; use Spark 4.2 or later")
        return self.stage(iterator, query, int(batch))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        run = next((each.run for each in messages if isinstance(each, Staged)), None)
        if run is not None:
            self.publish(messages, run, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        run = next((each.run for each in messages if isinstance(each, Staged)), None)
        if run is not None:
            self.discard(messages, run, batchId)
