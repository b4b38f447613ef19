"""Imports: staged records into topics, each batch of a run exactly once.

    files are staged (stage)
      -> intent: the run's row says which files, and from which offset on in which partition; synced
      -> appends: chunk after chunk, each atomic; then one wait until all are durable, which is when readers see them
      -> done: the run's row says that this batch is the last one done; synced
      -> the stage is removed

A batch whose number is not above the last one done is done: nothing happens. Killed before the intent, nothing did.
Killed after it, the import is finished by whoever imports next into this store, from the files of the intent, not from
those staged again meanwhile, which may hold the same records in another order.

How far it came is told by the partitions themselves. A chunk is one append, so its records lie one after the other
from the offset of the intent on, behind the chunk before it: right behind it, or behind what others appended in
between, in a broker whose clients write to the same topic. It is there if such a place holds its records, time and all.
Records that were removed since count as equal: a chunk of which nothing is left would have been removed as well. What
could be mistaken is a run of records of others that are equal in key, value, headers and millisecond.

Visible as one: readers see nothing of a batch before its first sync, which covers a whole lane. After a crash in the
middle they may see the part that was durable until the import is finished.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final
from uuid import UUID

import msgspec

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
from basaltmq.store.directory import QUARANTINE
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys
from basaltmq.store.open import open_store
from basaltmq.store.rocks import RocksStore
from basaltmq.streams.adapter import READ_BYTES_MAX, READ_RECORDS_MAX, Append, Clock
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.imports import stage
from basaltmq.streams.imports.stage import Part, StagedPart
from basaltmq.streams.leaders import Leaders
from basaltmq.streams.offsets import Offsets
from basaltmq.streams.plane import StreamPlane
from basaltmq.streams.shards import Engine, Shards
from basaltmq.streams.view import LOG

NONE_DONE: Final = -1

ONCE: Final = "once-"
"""Runs named so have one batch that nobody can bring again, so nothing of them is remembered."""

LAYOUT: Final = 1

SEARCH_BYTES: Final = 4 << 20
"""Read at once when a chunk is looked for among the records of others."""

_log = logging.getLogger("basaltmq.streams")


class Base(msgspec.Struct, frozen=True):
    """Where the records of an import begin in a partition."""

    topic: str
    topic_id: UUID
    partition: int
    offset: int


class Intent(msgspec.Struct, frozen=True):
    """A batch that is being imported."""

    batch: int
    parts: list[Part]
    bases: list[Base]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The row of a run."""

    layout: int = LAYOUT
    last_batch: int = NONE_DONE
    intent: Intent | None = None
    at_ms: int = 0
    owner: str = ""
    """User who began the run through a broker; empty for runs of local processes and of earlier versions."""


_decode_run: Final = msgpack_decoder(Run)


class Imported(msgspec.Struct, frozen=True):
    """What an import did."""

    records: int
    """0 if the batch had been done before."""
    was_done: bool = False


def read_run(store: Store, run: str) -> Run:
    """What a run has done; works on a view too."""
    raw = store.get(Family.IMPORTS, keys.import_key(run))
    return Run() if raw is None else _decode(run, raw)


def runs(store: Store) -> Iterator[tuple[str, Run]]:
    """Every run, in the order of names."""
    for key, raw in store.scan(Family.IMPORTS):
        run = keys.decode_import_key(key)
        yield run, _decode(run, raw)


def forget_run(store: Store, run: str) -> None:
    """Remember nothing of a run, whose batches cannot come again; one that a crash cut off is finished first."""
    if read_run(store, run).intent is not None:
        raise PreconditionFailedError(f"an import of the run {run!r} was cut off; send its batch again to finish it")
    batch = Batch()
    batch.delete(Family.IMPORTS, keys.import_key(run))
    store.write(batch)
    store.sync()


def _decode(run: str, raw: bytes) -> Run:
    try:
        found = _decode_run(raw)
    except msgspec.DecodeError as error:
        raise CorruptionError(f"the row of the import {run!r} cannot be read: {error}") from None
    if found.layout > LAYOUT:
        raise CorruptionError(f"the import {run!r} is of layout {found.layout}; this version knows {LAYOUT}")
    return found


class Imports:
    """Imports into the topics of a store that this process has open. One at a time: its callers see to that."""

    def __init__(self, path: Path, store: Store, streams: StreamPlane, clock_ms: Clock) -> None:
        self._path = path
        self._store = store
        self._streams = streams
        self._clock_ms = clock_ms

    def run(self, run: str, batch: int, parts: Sequence[Part], *, owner: str = "") -> Imported:
        """Import a staged batch, unless that was done before. Durable on return; the stage is gone.

        A run without an owner becomes the property of `owner`.
        """
        folder = stage.folder_of(self._path, run, batch)
        self._finish_all(but=run)
        self._finish(run)
        state = read_run(self._store, run)
        if batch <= state.last_batch:
            stage.remove(folder)
            return Imported(0, was_done=True)
        chunked = [part for part in parts if part.chunks]
        # Opened, and so checked, before the intent, which could never be carried out without them.
        opened = [StagedPart(folder, part) for part in chunked]
        intent = Intent(batch, chunked, self._bases(chunked))
        self._save(run, msgspec.structs.replace(state, intent=intent, owner=state.owner or owner))
        self._carry_out(run, intent, opened, is_resumed=False)
        stage.expire(self._path, self._needed(), self._clock_ms() / 1000)
        return Imported(sum(chunk.records for part in parts for chunk in part.chunks))

    def _bases(self, parts: Sequence[Part]) -> list[Base]:
        bases = []
        for name, number in sorted({(chunk.topic, chunk.partition) for part in parts for chunk in part.chunks}):
            topic = self._streams.topics.get(name)
            if topic.config.engine is Engine.MEMORY:
                raise InvalidArgumentError(
                    f"topic {name!r} is kept by the memory engine: an import survives a crash, and it does not"
                )
            bases.append(Base(name, topic.id, number, self._streams.drivers.info(name, number).next_offset))
        return bases

    def _finish_all(self, but: str) -> None:
        """Finish what others left; one that cannot be finished is its own run's to tell."""
        for run, state in list(runs(self._store)):
            if state.intent is not None and run != but:
                try:
                    self._finish(run)
                except BasaltError as error:
                    _log.warning("the import %s was left in the middle and cannot be finished: %s", run, error)

    def _finish(self, run: str) -> None:
        intent = read_run(self._store, run).intent
        if intent is not None:
            folder = stage.folder_of(self._path, run, intent.batch)
            self._carry_out(run, intent, [StagedPart(folder, part) for part in intent.parts], is_resumed=True)

    def _carry_out(self, run: str, intent: Intent, parts: Sequence[StagedPart], *, is_resumed: bool) -> None:
        appends: list[Append] = []
        for base in intent.bases:
            appends += self._append(base, intent, parts, is_resumed=is_resumed)
        for append in appends:
            self._streams.drivers.wait(append)
        if run.startswith(ONCE):
            batch = Batch()
            batch.delete(Family.IMPORTS, keys.import_key(run))
            self._store.write(batch)
            self._store.sync()
        else:
            state = read_run(self._store, run)
            self._save(run, msgspec.structs.replace(state, last_batch=intent.batch, intent=None))
        stage.remove(stage.folder_of(self._path, run, intent.batch))

    def _append(self, base: Base, intent: Intent, parts: Sequence[StagedPart], *, is_resumed: bool) -> Iterator[Append]:
        drivers = self._streams.drivers
        if is_resumed and self._streams.topics.get(base.topic).id != base.topic_id:
            # Another topic of this name: nothing of the import can be in it.
            is_resumed = False
        at = base.offset
        for part, staged in zip(intent.parts, parts, strict=True):
            for index, chunk in enumerate(part.chunks):
                if (chunk.topic, chunk.partition) != (base.topic, base.partition):
                    continue
                columns = staged.chunk(index)
                place = self._place(base, at, columns) if is_resumed else None
                if place is not None:
                    at = place + chunk.records
                    continue
                # What follows a chunk that is not there is not there either.
                is_resumed = False
                yield from (
                    append
                    for _, append in drivers.append_batch(
                        base.topic, columns, partition=base.partition, durability=Durability.SYNCED
                    )
                )

    def _place(self, base: Base, at: int, columns: ColumnBatch) -> int | None:
        """From where on the partition holds these records: at `at`, or behind what others appended after that."""
        if self._is_there(base, at, columns):
            return at
        info = self._streams.drivers.info(base.topic, base.partition)
        if info.next_offset - at < columns.count:
            return None
        first = columns.records(0)[0]
        offset = max(at, info.start_offset)
        while True:
            found = self._streams.drivers.read(base.topic, base.partition, offset, READ_RECORDS_MAX, SEARCH_BYTES)
            for record in found.records():
                if msgspec.structs.replace(record, offset=0) == first and self._is_there(base, record.offset, columns):
                    return record.offset
            if found.next_offset <= offset:
                break
            offset = found.next_offset
        if offset < info.next_offset:
            # Something lies behind what readers are shown: to guess that it is not ours could double it.
            raise StoreStalledError(
                f"partition {base.partition} of topic {base.topic!r} holds records from offset {offset} on that are "
                "not durable, or of a transaction that is not decided: how far an import came is known when they are; "
                "try again"
            )
        return None

    def _is_there(self, base: Base, at: int, columns: ColumnBatch) -> bool:
        """Do the offsets from `at` on hold these records, as far as they hold any?"""
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
        batch.put(Family.IMPORTS, keys.import_key(run), msgspec.msgpack.encode(state))
        self._store.write(batch)
        self._store.sync()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


@contextmanager
def open_imports(path: Path, clock_ms: Callable[[], int] = _now_ms) -> Iterator[Imports]:
    """The store at `path`, for an import; StoreLockedError if another process has it."""
    try:
        store = open_store(path, create=False)
    except StoreLockedError as error:
        raise StoreLockedError(
            f"{error}. A write by path needs the store for a moment: write through the broker that has it, with "
            'server="http://host:15672", or when nobody has it open for writing'
        ) from None
    try:
        streams = StreamPlane(store, clock_ms, makers={Engine.SEGMENT: partial(_segment_engine, store, path)})
        try:
            yield Imports(path, store, streams, clock_ms)
        finally:
            streams.close()
    finally:
        store.close()


def _segment_engine(
    managed: RocksStore,
    path: Path,
    store: Store,
    shards: Shards,
    offsets: Offsets,
    clock_ms: Clock,
    leaders: Leaders,
) -> SegmentEngine:
    assert store is managed, "the plane makes its engines on the store it was given"
    return SegmentEngine(managed, shards, offsets, clock_ms, leaders, path=path / LOG, quarantine=path / QUARANTINE)
