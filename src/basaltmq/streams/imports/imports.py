"""Bulk imports: appends staged records to topics, each batch of a run exactly once.

    files are staged (`stage`)
      -> intent: the run's row lists the files and the first offset in each partition; synced
      -> appends: chunk after chunk, each atomic; then one wait until all are durable and visible
      -> done: the run's row records this batch as the last one done; synced
      -> the stage is removed

A batch number at or below the last one done is a duplicate and is ignored. A crash before the intent leaves no effect.
After a crash past the intent, the next import into the store completes the batch. It uses the files of the intent.
Files that were staged again may hold the same records in another order.

The partitions themselves show how far an import came. A chunk is one append, so its records are contiguous. It starts
at or after the intent's offset, and after the previous chunk. In a broker, other clients may append in between. A chunk
is present if some position holds its records with equal timestamps. Deleted records count as equal, because a chunk
that is completely gone was deleted too. A false match needs foreign records with equal key, value, headers and
millisecond.

Visibility: readers see nothing of a batch before its first sync, which covers a whole lane. After a crash they may see
the durable part until the import is completed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from uuid import UUID

import msgspec

from basaltmq.clock import now_ms
from basaltmq.decoding import msgpack_decoder
from basaltmq.durability import Durability
from basaltmq.errors import (
    BasaltError,
    CorruptionError,
    InvalidArgumentError,
    PreconditionFailedError,
    StoreLockedError,
    StoreStalledError,
)
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import streams as stream_keys
from basaltmq.store.open import open_store
from basaltmq.streams.adapter import READ_BYTES_MAX, READ_RECORDS_MAX, Append, Clock
from basaltmq.streams.imports import stage
from basaltmq.streams.imports.stage import Part, StagedPart
from basaltmq.streams.plane import StreamPlane
from basaltmq.streams.shards import Engine
from basaltmq.streams.stored import StoredStreams

NONE_DONE: Final = -1

ONCE: Final = "once-"
"""Prefix of runs with a single batch that cannot be repeated. Their rows are deleted after the import."""

LAYOUT: Final = 1

SEARCH_BYTES: Final = 4 << 20
"""Bytes per read in the search for a chunk among the records of other clients."""

_log = logging.getLogger("basaltmq.streams")


class Base(msgspec.Struct, frozen=True):
    """The first offset of an import in a partition."""

    topic: str
    topic_id: UUID
    partition: int
    offset: int


class Intent(msgspec.Struct, frozen=True):
    """A batch whose import has started."""

    batch: int
    parts: list[Part]
    bases: list[Base]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run, stored as a row."""

    layout: int = LAYOUT
    last_batch: int = NONE_DONE
    intent: Intent | None = None
    at_ms: int = 0
    owner: str = ""
    """User who started the run through a broker; empty for runs of local processes and of earlier versions."""


_decode_run: Final = msgpack_decoder(Run)


class Imported(msgspec.Struct, frozen=True):
    """The result of an import."""

    records: int
    """0 if the batch was a duplicate."""
    was_done: bool = False


def read_run(store: Store, run: str) -> Run:
    """Return the state of a run. `store` may be a read-only view."""
    raw = store.get(Family.IMPORTS, stream_keys.import_key(run))
    return Run() if raw is None else _decode(run, raw)


def runs(store: Store) -> Iterator[tuple[str, Run]]:
    """Yield every run, ordered by name."""
    for key, raw in store.scan(Family.IMPORTS):
        run = stream_keys.decode_import_key(key)
        yield run, _decode(run, raw)


def forget_run(store: Store, run: str) -> None:
    """Delete the row of a run whose batches cannot come again. An interrupted import must be completed first."""
    if read_run(store, run).intent is not None:
        raise PreconditionFailedError(f"an import of run {run!r} was interrupted; send its batch again to complete it")
    batch = Batch()
    batch.delete(Family.IMPORTS, stream_keys.import_key(run))
    store.write(batch)
    store.sync()


def _decode(run: str, raw: bytes) -> Run:
    try:
        found = _decode_run(raw)
    except msgspec.DecodeError as error:
        raise CorruptionError(f"the row of import run {run!r} cannot be decoded: {error}") from None
    if found.layout > LAYOUT:
        raise CorruptionError(f"import run {run!r} has layout {found.layout}; this version reads {LAYOUT}")
    return found


class Imports:
    """Imports into the topics of an open store. The callers ensure that only one import runs at a time."""

    def __init__(self, path: Path, store: Store, streams: StreamPlane, clock_ms: Clock) -> None:
        self._path = path
        self._store = store
        self._streams = streams
        self._clock_ms = clock_ms

    def run(self, run: str, batch: int, parts: Sequence[Part], *, owner: str = "") -> Imported:
        """Import a staged batch, unless it is a duplicate. Durable on return; the stage is removed.

        `owner` becomes the owner of a run that has none.
        """
        folder = stage.folder_of(self._path, run, batch)
        self._finish_all(but=run)
        self._finish(run)
        state = read_run(self._store, run)
        if batch <= state.last_batch:
            stage.remove(folder)
            return Imported(0, was_done=True)
        chunked = [part for part in parts if part.chunks]
        # Open and check the files before writing the intent, which needs them.
        opened = [StagedPart(folder, part) for part in chunked]
        intent = Intent(batch, chunked, self._bases(chunked))
        self._save(run, msgspec.structs.replace(state, intent=intent, owner=state.owner or owner))
        self._execute(run, intent, opened, is_resumed=False)
        stage.expire(self._path, self._needed(), self._clock_ms() / 1000)
        return Imported(sum(chunk.records for part in parts for chunk in part.chunks))

    def _bases(self, parts: Sequence[Part]) -> list[Base]:
        bases = []
        for name, number in sorted({(chunk.topic, chunk.partition) for part in parts for chunk in part.chunks}):
            topic = self._streams.topics.get(name)
            if topic.config.engine is Engine.MEMORY:
                raise InvalidArgumentError(
                    f"topic {name!r} uses the memory engine, which loses records in a crash; import into another engine"
                )
            bases.append(Base(name, topic.id, number, self._streams.drivers.info(name, number).next_offset))
        return bases

    def _finish_all(self, but: str) -> None:
        """Complete interrupted imports of other runs. A failure is logged here and raised by the run itself."""
        for run, state in list(runs(self._store)):
            if state.intent is not None and run != but:
                try:
                    self._finish(run)
                except BasaltError as error:
                    _log.warning("the interrupted import %s cannot be completed: %s", run, error)

    def _finish(self, run: str) -> None:
        intent = read_run(self._store, run).intent
        if intent is not None:
            folder = stage.folder_of(self._path, run, intent.batch)
            self._execute(run, intent, [StagedPart(folder, part) for part in intent.parts], is_resumed=True)

    def _execute(self, run: str, intent: Intent, parts: Sequence[StagedPart], *, is_resumed: bool) -> None:
        appends: list[Append] = []
        for base in intent.bases:
            appends += self._append(base, intent, parts, is_resumed=is_resumed)
        for append in appends:
            self._streams.drivers.wait(append)
        if run.startswith(ONCE):
            batch = Batch()
            batch.delete(Family.IMPORTS, stream_keys.import_key(run))
            self._store.write(batch)
            self._store.sync()
        else:
            state = read_run(self._store, run)
            self._save(run, msgspec.structs.replace(state, last_batch=intent.batch, intent=None))
        stage.remove(stage.folder_of(self._path, run, intent.batch))

    def _append(self, base: Base, intent: Intent, parts: Sequence[StagedPart], *, is_resumed: bool) -> Iterator[Append]:
        drivers = self._streams.drivers
        if is_resumed and self._streams.topics.get(base.topic).id != base.topic_id:
            # A new topic of this name contains nothing of the import.
            is_resumed = False
        at = base.offset
        for part, staged in zip(intent.parts, parts, strict=True):
            for index, chunk in enumerate(part.chunks):
                if (chunk.topic, chunk.partition) != (base.topic, base.partition):
                    continue
                columns = staged.chunk(index)
                place = self._find(base, at, columns) if is_resumed else None
                if place is not None:
                    at = place + chunk.records
                    continue
                # Chunks after a missing chunk are missing too.
                is_resumed = False
                yield from (
                    append
                    for _, append in drivers.append_batch(
                        base.topic, columns, partition=base.partition, durability=Durability.SYNCED
                    )
                )

    def _find(self, base: Base, at: int, columns: ColumnBatch) -> int | None:
        """Return the offset of these records, at `at` or after records of other clients. None if they are missing."""
        if self._contains(base, at, columns):
            return at
        info = self._streams.drivers.info(base.topic, base.partition)
        if info.next_offset - at < columns.count:
            return None
        first = columns.records(0)[0]
        offset = max(at, info.start_offset)
        while True:
            found = self._streams.drivers.read(base.topic, base.partition, offset, READ_RECORDS_MAX, SEARCH_BYTES)
            for record in found.records():
                if msgspec.structs.replace(record, offset=0) == first and self._contains(base, record.offset, columns):
                    return record.offset
            if found.next_offset <= offset:
                break
            offset = found.next_offset
        if offset < info.next_offset:
            # Some records are not visible yet. Assuming that they are foreign could import a chunk twice.
            raise StoreStalledError(
                f"partition {base.partition} of topic {base.topic!r} has records from offset {offset} on that are not "
                "durable or belong to an open transaction, so the progress of the import is unknown; "
                "try again"
            )
        return None

    def _contains(self, base: Base, at: int, columns: ColumnBatch) -> bool:
        """Whether the offsets from `at` on hold these records. Deleted records count as equal."""
        drivers = self._streams.drivers
        end = at + columns.count
        info = drivers.info(base.topic, base.partition)
        if info.next_offset < end:
            return False
        expected = columns.records(at)
        offset = max(at, info.start_offset)
        while offset < end:
            found = drivers.read(base.topic, base.partition, offset, end - offset, READ_BYTES_MAX)
            for record in found.records():
                if record.offset < end and record != expected[record.offset - at]:
                    return False
            if found.next_offset <= offset:
                return False
            offset = found.next_offset
        return True

    def _needed(self) -> set[tuple[str, int]]:
        return {(run, state.intent.batch) for run, state in runs(self._store) if state.intent is not None}

    def _save(self, run: str, state: Run) -> None:
        batch = Batch()
        state = msgspec.structs.replace(state, at_ms=self._clock_ms())
        batch.put(Family.IMPORTS, stream_keys.import_key(run), msgspec.msgpack.encode(state))
        self._store.write(batch)
        self._store.sync()


@contextmanager
def open_imports(path: Path, clock_ms: Callable[[], int] = now_ms) -> Iterator[Imports]:
    """Open the store at `path` for an import. Raises StoreLockedError if another process has it open."""
    try:
        store = open_store(path, create=False)
    except StoreLockedError as error:
        raise StoreLockedError(
            f"{error}. A write by path needs exclusive access to the store: write through its broker with "
            'server="http://host:15672", or when no process has it open for writing'
        ) from None
    try:
        streams = StoredStreams(store, path, clock_ms)
        try:
            yield Imports(path, store, streams.plane, clock_ms)
        finally:
            streams.close()
    finally:
        store.close()
