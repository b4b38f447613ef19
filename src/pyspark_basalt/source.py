"""The data source `basalt` with its batch and stream readers. The writers are in sink.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import cast

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from basaltmq.errors import InvalidArgumentError
from pyspark_basalt import offsets as offset_json
from pyspark_basalt import options as option_names
from pyspark_basalt.events import SCHEMA as EVENTS
from pyspark_basalt.events import explode
from pyspark_basalt.groups import commit_group
from pyspark_basalt.offsets import Json, Offsets
from pyspark_basalt.options import Bound, ReadOptions
from pyspark_basalt.plan import Piece, limited, partitions_of, pieces, resolve
from pyspark_basalt.progress import Position, advance
from pyspark_basalt.queue_source import SCHEMA as QUEUE
from pyspark_basalt.queue_source import QueueBatchReader, QueueStreamReader
from pyspark_basalt.remote_rows import read_remote
from pyspark_basalt.rows import HEADERS, SCHEMA, read_piece
from pyspark_basalt.sink import BatchWriter, StreamWriter
from pyspark_basalt.views import remote_of, topics_at, view_of
from pyspark_basalt.write_options import parse_write


class PiecePartition(InputPartition):
    """A piece, as Spark sends it to a task."""

    def __init__(self, piece: Piece) -> None:
        super().__init__(piece)


class BasaltDataSource(DataSource):
    """The Spark format `basalt`."""

    @classmethod
    def name(cls) -> str:
        return "basalt"

    def schema(self) -> str:
        if self.options.get("queue") is not None:
            return QUEUE + (HEADERS if self._is_on("includeHeaders") else "")
        if self._is_on("explodeEvents"):
            return EVENTS
        include = self._is_on("includeHeaders")
        return SCHEMA + HEADERS if include else SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        options = option_names.parse(self.options)
        self._require_schema(schema)
        return BatchReader(options) if options.queue is None else QueueBatchReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        options = option_names.parse(self.options, is_streaming=True)
        self._require_schema(schema)
        return StreamReader(options) if options.queue is None else QueueStreamReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        if overwrite:
            raise InvalidArgumentError('a topic cannot be overwritten: write with .mode("append")')
        return BatchWriter(parse_write(self.options, schema, is_streaming=False))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        if overwrite:
            raise InvalidArgumentError("a topic cannot be overwritten: write with outputMode append or update")
        return StreamWriter(parse_write(self.options, schema, is_streaming=True))

    def _is_on(self, option: str) -> bool:
        return str(self.options.get(option, "false")).strip().lower() == "true"

    def _require_schema(self, schema: StructType) -> None:
        if schema.fieldNames() != [field.split()[0] for field in self.schema().split(", ")]:
            raise InvalidArgumentError(
                f"the schema of the basalt source is {self.schema()}; read with it, then select or cast"
            )


class _Reader:
    def __init__(self, options: ReadOptions) -> None:
        self.options = options

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        piece = cast("Piece | None", partition.value)
        if piece is None:
            return iter(())
        location = self.options.location
        if location.login is not None:
            rows = read_remote(remote_of(location.login, in_task=True), piece, self.options)
        else:
            rows = read_piece(view_of(location.path, location.vhost), piece, self.options)
        return explode(rows) if self.options.explode_events else rows


class BatchReader(_Reader, DataSourceReader):
    """Reads the existing records once."""

    def partitions(self) -> list[InputPartition]:
        view = topics_at(self.options.location, refresh=True, is_first=True)
        which = partitions_of(view, self.options)
        is_pattern = self.options.pattern is not None
        start, ids = resolve(view, self.options.start, which, which_end="from", may_be_gone=is_pattern)
        end, _ = resolve(view, self.options.end, which, which_end="to", may_be_gone=is_pattern)
        existing = {topic: of for topic, of in end.items() if topic in start}
        return [PiecePartition(piece) for piece in pieces(view, start, existing, self.options, ids, ids)]


class StreamReader(_Reader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads records batch by batch. It lives in one process on the driver; `read` runs on copies in tasks.

    Spark calls `commit` for a batch only after it has planned the next one, and never for the last. But it plans a
    batch from the end of the previous one, which is finished then, and calls `latestOffset` even without new records.
    So the consumer group is committed in `latestOffset`.
    """

    def __init__(self, options: ReadOptions, clock_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__(options)
        self._target: Position | None = None
        self._clock_s = clock_s
        self._batch_s: float | None = None
        """Time at which the last batch was planned."""
        self._committed: Offsets = {}
        """Offsets that were committed to the group last."""

    def initialOffset(self) -> dict[str, object]:  # noqa: N802
        return offset_json.initial(*self._position(self.options.start, "from"))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        count = self.options.offsets_per_trigger_max
        return ReadAllAvailable() if count is None else ReadMaxRows(count)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._latest()

    def latestOffset(self, start: dict[str, object], limit: ReadLimit) -> dict[str, object]:  # noqa: N802
        stored = Position(offset_json.from_json(start), offset_json.ids_of(start))
        latest = self._target or self._latest()
        self._commit_group(stored, latest)
        begins, (ends, ids), is_corrected = advance(topics_at(self.options.location), stored, latest, self.options)
        if ends == stored.offsets and not is_corrected and not offset_json.is_initial(start):
            # Return the same object, so that Spark sees no change.
            return start
        if not is_corrected and self._is_too_little(begins, ends):
            # Plan an empty first batch, so that the checkpoint contains the start of the query.
            return offset_json.end_of(start, *stored) if offset_json.is_initial(start) else start
        self._batch_s = self._clock_s()
        if isinstance(limit, ReadMaxRows):
            ends = limited(begins, ends, limit.max_rows)
        return offset_json.end_of(start, ends, ids)

    def _is_too_little(self, begins: Offsets, ends: Offsets) -> bool:
        least = self.options.offsets_per_trigger_min
        if least is None or self._target is not None:
            return False
        behind = sum(to - begins[topic][number] for topic, of in ends.items() for number, to in of.items())
        if self._batch_s is None:
            self._batch_s = self._clock_s()
        waited_ms = (self._clock_s() - self._batch_s) * 1000
        return behind < least and waited_ms < self.options.trigger_delay_ms_max

    def _commit_group(self, done: Position, latest: Position) -> None:
        """Commit the ends of finished batches of topics that still exist."""
        if self.options.commit_group is None:
            return
        known: Offsets = {}
        for topic, of in done.offsets.items():
            actual = latest.ids.get(topic)
            ends = latest.offsets.get(topic, {})
            if actual is not None and done.ids.get(topic, actual) == actual:
                known[topic] = {number: at for number, at in of.items() if at <= ends.get(number, -1)}
        if known and known != self._committed:
            commit_group(self.options.location, self.options.commit_group, known)
            self._committed = known

    def reportLatestOffset(self) -> dict[str, object]:  # noqa: N802
        return offset_json.to_json(self._latest().offsets)

    def partitions(self, start: Json, end: Json) -> list[InputPartition]:
        view = topics_at(self.options.location, refresh=True)
        begin = offset_json.begin_of(start, end)
        found = pieces(
            view,
            offset_json.from_json(begin),
            offset_json.from_json(end),
            self.options,
            offset_json.ids_of(begin),
            offset_json.ids_of(end),
        )
        return [PiecePartition(piece) for piece in found]

    def commit(self, end: Json) -> None:
        """Does nothing: `latestOffset` commits the group, and no resource is held per batch."""

    def _latest(self) -> Position:
        return self._position(self.options.end, "to")

    def _position(self, bound: Bound, which_end: str) -> Position:
        view = topics_at(self.options.location, refresh=True)
        which = partitions_of(view, self.options)
        is_pattern = self.options.pattern is not None
        return Position(*resolve(view, bound, which, which_end=which_end, may_be_gone=is_pattern))
