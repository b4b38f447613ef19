"""Batch and stream readers of queues. They read messages without consuming them.

A queue has no offsets. Messages are read by their enqueue time in nanoseconds, and a checkpoint holds the first time
not read: {"jobs": {"0": 1763251200000000001}}. Messages that are consumed before a query reads them are not seen; this
is not a loss, because a queue is not a log. A batch ends at the newest message, not at the present time: messages in
progress get a later time.

    Kafka's columns with  key: the fairness key, topic: the queue, partition: 0, offset: the enqueue time in ns
    and                   messageId binary, attempts int, priority int
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final, cast

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow

from basaltmq.errors import InvalidArgumentError, QueueNotFoundError
from basaltmq.queues.browsing.arrow import to_arrow
from basaltmq.queues.browsing.browse import ALL_NS, browse, queues_of, times_of
from pyspark_basalt import offsets as offset_json
from pyspark_basalt.offsets import EARLIEST, Json
from pyspark_basalt.options import Bound, ReadOptions
from pyspark_basalt.rows import CREATE_TIME
from pyspark_basalt.rows import SCHEMA as KAFKA
from pyspark_basalt.views import remote_of, rows_of

SCHEMA: Final = KAFKA + ", messageId binary, attempts int, priority int"

_COLUMNS: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")


class Span(msgspec.Struct, frozen=True):
    """Enqueue times [from_ns, to_ns) that one task reads."""

    from_ns: int
    to_ns: int


class SpanPartition(InputPartition):
    """A span, as Spark sends it to a task."""

    def __init__(self, span: Span) -> None:
        super().__init__(span)


class _QueueReader:
    """Common code of both readers."""

    def __init__(self, options: ReadOptions) -> None:
        assert options.queue is not None, "a reader of queues has one"
        self.options = options
        self.queue = options.queue

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        span = cast("Span | None", partition.value)
        if span is None:
            return
        for batch in self._messages(span):
            yield _rows(batch, self.queue, self.options)

    def _messages(self, span: Span) -> Iterator[pa.RecordBatch]:
        location = self.options.location
        if location.login is not None:
            yield from remote_of(location.login, in_task=True).messages(self.queue, span.from_ns, span.to_ns)
            return
        seen = rows_of(location.path, location.vhost)
        after, is_last = b"", False
        while not is_last:
            page = browse(seen, self.queue, span.from_ns, span.to_ns, after=after)
            is_last = page.is_last
            if page.messages:
                after = page.cursors[-1]
                yield to_arrow(page)

    def _times(self) -> tuple[int, int]:
        """Return the enqueue times of the oldest and the newest message in ns."""
        location = self.options.location
        if location.login is not None:
            return remote_of(location.login).queue_times(self.queue)
        seen = rows_of(location.path, location.vhost)
        try:
            return times_of(seen, self.queue)
        except QueueNotFoundError:
            known = queues_of(seen, 10)
            existing = f"; there are {', '.join(known)}" if known else "; the store has no queues at all"
            raise QueueNotFoundError(f"there is no queue {self.queue!r} in {location}{existing}") from None

    def _start_ns(self, bound: Bound) -> int:
        if bound.timestamp_ms is not None:
            return min(bound.timestamp_ms * 1_000_000, ALL_NS)
        oldest, newest = self._times()
        return oldest if bound.position == EARLIEST else newest + 1

    def _spans(self, from_ns: int, to_ns: int) -> list[InputPartition]:
        if from_ns >= to_ns:
            return []
        parts = min(self.options.partitions_min or 1, to_ns - from_ns)
        cuts = [from_ns + (to_ns - from_ns) * index // parts for index in range(parts + 1)]
        return [SpanPartition(Span(begin, end)) for begin, end in pairwise(cuts)]


class QueueBatchReader(_QueueReader, DataSourceReader):
    """Reads the messages of a queue once."""

    def partitions(self) -> list[InputPartition]:
        end = self.options.end
        to_ns = self._times()[1] + 1 if end.timestamp_ms is None else min(end.timestamp_ms * 1_000_000, ALL_NS)
        return self._spans(self._start_ns(self.options.start), to_ns)


class QueueStreamReader(_QueueReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads new messages batch by batch."""

    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options)
        self._target: int | None = None

    def initialOffset(self) -> dict[str, object]:  # noqa: N802
        return offset_json.initial({self.queue: {0: self._start_ns(self.options.start)}})

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._times()[1] + 1

    def latestOffset(self, start: dict[str, object], limit: ReadLimit) -> dict[str, object]:  # noqa: N802
        begin = self._at(offset_json.from_json(start))
        latest = self._times()[1] + 1 if self._target is None else self._target
        # An empty queue has no newest message. The position stays.
        if latest <= begin and not offset_json.is_initial(start):
            return start
        return offset_json.end_of(start, {self.queue: {0: max(begin, latest)}})

    def reportLatestOffset(self) -> dict[str, object]:  # noqa: N802
        return offset_json.to_json({self.queue: {0: self._times()[1] + 1}})

    def partitions(self, start: Json, end: Json) -> list[InputPartition]:
        begin = offset_json.from_json(offset_json.begin_of(start, end))
        return self._spans(self._at(begin), self._at(offset_json.from_json(end)))

    def commit(self, end: Json) -> None:
        """Does nothing: no resource is held per batch."""

    def _at(self, offsets: offset_json.Offsets) -> int:
        try:
            return offsets[self.queue][0]
        except KeyError:
            raise InvalidArgumentError(
                f"the checkpoint belongs to {', '.join(offsets) or 'nothing'}, not to queue {self.queue!r}: use a "
                "separate checkpointLocation for each query"
            ) from None


def _rows(batch: pa.RecordBatch, queue: str, options: ReadOptions) -> pa.RecordBatch:
    count = batch.num_rows
    columns = {name: batch.column(name) for name in ("key", "value", "offset", "timestamp")}
    columns["topic"] = pa.repeat(pa.scalar(queue, pa.string()), count)
    columns["partition"] = pa.repeat(pa.scalar(0, pa.int32()), count)
    columns["timestampType"] = pa.repeat(pa.scalar(CREATE_TIME, pa.int32()), count)
    names = [*_COLUMNS, "messageId", "attempts", "priority"] + (["headers"] if options.include_headers else [])
    arrays = [columns[name] if name in columns else batch.column(name) for name in names]
    return pa.RecordBatch.from_arrays(arrays, names=names)
