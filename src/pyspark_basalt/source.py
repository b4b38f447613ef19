"""The data source Spark sees: `basalt`, for batch and streaming reads; writers are in `sink`."""

from __future__ import annotations

from collections.abc import Iterator
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
from pyspark_basalt.events import take_apart
from pyspark_basalt.offsets import Json, Offsets
from pyspark_basalt.options import ReadOptions
from pyspark_basalt.plan import Piece, limited, partitions_of, pieces, resolve
from pyspark_basalt.rows import HEADERS, SCHEMA, read_piece
from pyspark_basalt.sink import BatchWriter, StreamWriter
from pyspark_basalt.views import view_of
from pyspark_basalt.write_options import parse_write


class PiecePartition(InputPartition):
    """A piece on its way to a task."""

    def __init__(self, piece: Piece) -> None:
        super().__init__(piece)


class BasaltDataSource(DataSource):
    """Format `basalt`."""

    @classmethod
    def name(cls) -> str:
        return "basalt"

    def schema(self) -> str:
        if self._is_on("explodeEvents"):
            return EVENTS
        include = self._is_on("includeHeaders")
        return SCHEMA + HEADERS if include else SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        options = option_names.parse(self.options)
        self._require_schema(schema)
        return BatchReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        options = option_names.parse(self.options, is_streaming=True)
        self._require_schema(schema)
        return StreamReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        if overwrite:
            raise InvalidArgumentError('a topic is appended to, never overwritten: write with .mode("append")')
        return BatchWriter(parse_write(self.options, schema, is_streaming=False))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        if overwrite:
            raise InvalidArgumentError("a topic is appended to: write with outputMode append or update")
        return StreamWriter(parse_write(self.options, schema, is_streaming=True))

    def _is_on(self, option: str) -> bool:
        return str(self.options.get(option, "false")).strip().lower() == "true"

    def _require_schema(self, schema: StructType) -> None:
        if schema.fieldNames() != [field.split()[0] for field in self.schema().split(", ")]:
            raise InvalidArgumentError(
                f"the schema of the basalt source is {self.schema()}; read it and select or cast after that"
            )


class _Reader:
    """What both readers do in a task."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        piece = cast("Piece | None", partition.value)
        if piece is None:
            return iter(())
        rows = read_piece(view_of(self.options.path, self.options.vhost), piece, self.options)
        return take_apart(rows) if self.options.explode_events else rows


class BatchReader(_Reader, DataSourceReader):
    """Reads what there is, once."""

    def partitions(self) -> list[InputPartition]:
        view = view_of(self.options.path, self.options.vhost, refresh=True)
        which = partitions_of(view, self.options)
        start = resolve(view, self.options.start, which, which_end="from")
        end = resolve(view, self.options.end, which, which_end="to")
        return [PiecePartition(piece) for piece in pieces(view, start, end, self.options)]


class StreamReader(_Reader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads on, batch by batch. Lives in one process on the driver; `read` runs in tasks on copies of it."""

    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options)
        self._target: Offsets | None = None

    def initialOffset(self) -> dict[str, object]:  # noqa: N802
        view = view_of(self.options.path, self.options.vhost, refresh=True)
        which = partitions_of(view, self.options)
        return offset_json.initial(resolve(view, self.options.start, which, which_end="from"))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        count = self.options.offsets_per_trigger_max
        return ReadAllAvailable() if count is None else ReadMaxRows(count)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._latest()

    def latestOffset(self, start: dict[str, object], limit: ReadLimit) -> dict[str, object]:  # noqa: N802
        begin = offset_json.from_json(start)
        latest = self._target or self._latest()
        # A topic that was deleted, or is not listed any more, stays where it was: offsets never go back.
        ends: Offsets = {topic: dict(of) for topic, of in begin.items()}
        begins: Offsets = {topic: dict(of) for topic, of in begin.items()}
        view = view_of(self.options.path, self.options.vhost)
        for topic, of in latest.items():
            for number, to in of.items():
                known = begins.setdefault(topic, {})
                if number not in known:
                    known[number] = view.info(topic, number).start_offset
                ends.setdefault(topic, {})[number] = max(to, known[number])
        if isinstance(limit, ReadMaxRows):
            ends = limited(begins, ends, limit.max_rows)
        return offset_json.end_of(start, ends)

    def reportLatestOffset(self) -> dict[str, object]:  # noqa: N802
        return offset_json.to_json(self._latest())

    def partitions(self, start: Json, end: Json) -> list[InputPartition]:
        view = view_of(self.options.path, self.options.vhost, refresh=True)
        begin = offset_json.begin_of(start, end)
        found = pieces(view, begin, offset_json.from_json(end), self.options)
        return [PiecePartition(piece) for piece in found]

    def commit(self, end: Json) -> None:
        """Nothing is held for a batch, so there is nothing to let go."""

    def _latest(self) -> Offsets:
        view = view_of(self.options.path, self.options.vhost, refresh=True)
        return resolve(view, self.options.end, partitions_of(view, self.options), which_end="to")
