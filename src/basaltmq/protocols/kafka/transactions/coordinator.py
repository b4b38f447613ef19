"""Transaction coordinator: records in many partitions and offsets of groups commit or abort together.

    begin     A partition or a group is added. The row is durable before the response, and so before any record of the
              transaction. A transactional batch for a partition that was not added is rejected.
    decide    The row says PREPARE_COMMIT or PREPARE_ABORT. Once it is durable, the outcome is final.
    mark      A control batch (marker) is appended to every shard with records of the transaction, and synced.
    complete  One store batch: the groups' offsets, if it committed, and the row. Then clients get their responses.

After a crash, `recover` runs before any request. It marks and completes decided transactions. Open ones stay open until
their timeout, so that their producers can continue. The markers in the log alone determine which records are visible
(`Outcomes`). If the log lost a marker, the row shows whether the records belong to the last transaction of its id. If
they do and were committed, the marker is written again. Other records without a transaction are aborted: those of
earlier transactions, and those of a backup whose log is newer than its rows.

A producer is fenced by its producer epoch: each `initialize` raises it and aborts the open transaction. So does the
transaction timeout. Steps on one transaction do not overlap: additions wait for each other, and any other request gets
CONCURRENT_TRANSACTIONS. A step that has started continues if its client disconnects.

Only open and unfinished transactions are in memory. Others exist as rows, which are deleted after one week.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar
from uuid import UUID

import msgspec

from basaltmq.broker.vhost_streams import VHostStreams
from basaltmq.durability import Durability
from basaltmq.errors import (
    BasaltError,
    CorruptionError,
    ShardNotFoundError,
    StorageError,
    StoreStalledError,
)
from basaltmq.log.batches.kafka import KafkaHeader, marker_batch, read_header
from basaltmq.protocols.kafka.transactions.row import EPOCH_MAX, NO_EPOCH, State, Transaction
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.errors import Refused
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.adapter import Append
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.offsets import Commit, TopicPartition

TIMEOUT_MS_MAX: Final = 15 * 60_000
"""Maximum transaction timeout: Kafka's default of transaction.max.timeout.ms."""

IDLE_MS_MAX: Final = 7 * 24 * 3_600_000
"""How long the row of an unused id is kept: Kafka's default of transactional.id.expiration.ms."""

SWEEP_S: Final = 3_600.0
SWEEP_ROWS: Final = 10_000
"""Rows that one sweep reads at most, to bound its duration."""

ID_BYTES_MAX: Final = 1024
RETRY_S: Final = 0.05
"""Seconds before a retry, after a store stall or while another step runs."""

_FAMILY: Final = Family.TRANSACTIONS
_log: Final = logging.getLogger(__name__)

T = TypeVar("T")
OffsetKey = tuple[str, UUID, int]
"""Group, topic id and partition."""


class _Live:
    """A transaction that is open, or has a step running."""

    __slots__ = ("adding", "is_busy", "offsets", "row", "timer")

    def __init__(self, row: Transaction) -> None:
        self.row = row
        self.is_busy = False
        self.adding: asyncio.Task[Any] | None = None
        """The running step, if it only adds partitions, groups or offsets."""
        self.offsets: dict[OffsetKey, Commit] = {}
        """Offsets that its groups commit with it."""
        self.timer: asyncio.TimerHandle | None = None


class Transactions:
    """The transactions of one virtual host."""

    def __init__(
        self,
        streams: VHostStreams,
        new_id: Callable[[], int],
        clock_ms: Callable[[], int],
        *,
        decided: Callable[[Iterable[int]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """`decided` gets shards with newly visible records; `failed` gets storage errors."""
        self._streams = streams
        self._plane = streams.plane
        self._store = self._plane.store
        self._new_id = new_id
        self._clock_ms = clock_ms
        self._decided = decided
        self._failed = failed
        self._live: dict[str, _Live] = {}
        self._pending: Counter[OffsetKey] = Counter()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    def recover(self) -> None:
        """Finish decided transactions, load open ones, and abort those without a row. Durable on return."""
        for key, _ in list(self._store.scan(_FAMILY, *key_parts.prefix_range(stream_keys.busy_transaction_key("")))):
            try:
                row = self._row(stream_keys.decode_busy_transaction_key(key))
            except CorruptionError as error:
                _log.error("a transaction is lost, and its records without markers are aborted: %s", error)
                continue
            if row is None:
                continue
            live = _Live(row)
            self._live[row.id] = live
            for pending, raw in self._store.scan(
                _FAMILY, *key_parts.prefix_range(stream_keys.pending_offset_prefix(row.id))
            ):
                _, group, topic_id, partition = stream_keys.decode_pending_offset_key(pending)
                self._add_offsets(live, {(group, topic_id, partition): Commit.decode(raw)})
            if row.state.is_decided:
                self._wait(self._mark(row))
                self._complete(live)
            else:
                self._start_timeout(live)
        self._wait(self._end_unknown())
        self.sweep()

    def _end_unknown(self) -> list[Append]:
        """Append markers for records of transactions that are neither open nor being finished."""
        engine = self._engine()
        if engine is None:
            return []
        appends = []
        known = {(live.row.producer_id, shard) for live in self._live.values() for shard in live.row.shards}
        committed: set[tuple[int, int, int]] | None = None
        for shard in list(engine.index.outcomes.shards()):
            for producer_id, offset in self._undecided(engine, shard).items():
                if (producer_id, shard) not in known:
                    if committed is None:
                        committed = {(row.producer_id, *first) for row in self.all() for first in row.committed}
                    is_commit = (producer_id, shard, offset) in committed
                    _log.warning(
                        "shard %d: %s records of producer %d from offset %d, whose marker is missing",
                        shard,
                        "committing" if is_commit else "aborting",
                        producer_id,
                        offset,
                    )
                    epoch = max(0, read_header(engine.read_kafka(shard, offset).batches[0]).producer_epoch)
                    marker = marker_batch(producer_id, epoch, is_commit, self._clock_ms())
                    appends.append(engine.append_kafka(shard, marker, Durability.SYNCED))
        return appends

    def close(self) -> None:
        """Stop. `recover` finishes interrupted steps when the store is opened again."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for live in self._live.values():
            if live.timer is not None:
                live.timer.cancel()
        for task in self._tasks:
            task.cancel()

    async def initialize(
        self, transactional_id: str, timeout_ms: int, expected: tuple[int, int] | None = None
    ) -> tuple[int, int]:
        """Make the caller the only producer of this id. Return the producer id and producer epoch.

        `expected` is the caller's current pair, if it only requests a new epoch for itself.
        """
        if not transactional_id or len(transactional_id.encode()) > ID_BYTES_MAX:
            raise Refused(e.INVALID_REQUEST, f"a transactional id must have 1 to {ID_BYTES_MAX} bytes")
        if not 0 < timeout_ms <= TIMEOUT_MS_MAX:
            raise Refused(
                e.INVALID_TRANSACTION_TIMEOUT, f"transaction.timeout.ms must be 1 to {TIMEOUT_MS_MAX}, not {timeout_ms}"
            )
        live = self._find(transactional_id) or _Live(Transaction(transactional_id, -1))
        return await self._run_exclusive(live, lambda: self._initialize(live, timeout_ms, expected))

    async def _initialize(self, live: _Live, timeout_ms: int, expected: tuple[int, int] | None) -> tuple[int, int]:
        row = live.row
        if expected is not None and row.epoch != NO_EPOCH:
            producer_id, epoch = expected
            if producer_id != row.producer_id or epoch not in {row.epoch, row.previous_epoch} or epoch < 0:
                raise _fenced(row, epoch)
            if epoch == row.previous_epoch and row.state is State.EMPTY:
                # A retry, because the response was lost.
                return row.producer_id, row.epoch
        if row.state is State.ONGOING:
            await self._decide(live, State.PREPARE_ABORT, is_fenced=True)
            row = live.row
        is_exhausted = row.epoch >= EPOCH_MAX - 1
        changed = Transaction(
            row.id,
            self._new_id() if row.producer_id < 0 or is_exhausted else row.producer_id,
            0 if is_exhausted else row.epoch + 1,
            NO_EPOCH if expected is None or is_exhausted else row.epoch,
            State.EMPTY,
            timeout_ms,
            changed_ms=self._clock_ms(),
            committed=() if is_exhausted else row.committed,
        )
        self._write(changed)
        await self._durable()
        live.row = changed
        return changed.producer_id, changed.epoch

    async def add(
        self,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        *,
        shards: frozenset[int] = frozenset(),
        groups: frozenset[str] = frozenset(),
    ) -> None:
        """Add shards or groups to the transaction; the first addition begins it. Durable on return."""
        live = await self._after_additions(transactional_id, producer_id, epoch)
        row = live.row
        if row.state is State.ONGOING and shards <= row.shards and groups <= row.groups and not live.is_busy:
            return
        await self._run_exclusive(live, lambda: self._add(live, shards, groups), is_adding=True)

    async def _add(self, live: _Live, shards: frozenset[int], groups: frozenset[str]) -> None:
        row, now_ms = live.row, self._clock_ms()
        is_open = row.state is State.ONGOING
        changed = msgspec.structs.replace(
            row,
            state=State.ONGOING,
            began_ms=row.began_ms if is_open else now_ms,
            changed_ms=now_ms,
            shards=row.shards | shards if is_open else shards,
            groups=row.groups | groups if is_open else groups,
        )
        self._write(changed)
        await self._durable()
        live.row = changed
        if not is_open:
            self._start_timeout(live)

    async def commit_offsets(
        self, transactional_id: str, producer_id: int, epoch: int, group: str, commits: Mapping[TopicPartition, Commit]
    ) -> None:
        """Store offsets that the group commits if the transaction commits. Durable on return."""
        live = await self._after_additions(transactional_id, producer_id, epoch)
        if live.row.state is not State.ONGOING or group not in live.row.groups:
            raise Refused(e.INVALID_TXN_STATE, f"group {group!r} is not part of an open transaction; add it first")
        await self._run_exclusive(live, lambda: self._commit_offsets(live, group, commits), is_adding=True)

    async def _commit_offsets(self, live: _Live, group: str, commits: Mapping[TopicPartition, Commit]) -> None:
        offsets = {(group, topic_id, partition): commit for (topic_id, partition), commit in commits.items()}
        batch = Batch()
        for key, commit in offsets.items():
            batch.put(_FAMILY, stream_keys.pending_offset_key(live.row.id, *key), commit.encode())
        self._store.write(batch)
        self._add_offsets(live, offsets)
        await self._durable()

    async def end(self, transactional_id: str, producer_id: int, epoch: int, is_commit: bool) -> None:
        """Commit or abort. On return the outcome is visible to all consumers, and durable."""
        live = self._checked(transactional_id, producer_id, epoch)
        done = State.COMPLETE_COMMIT if is_commit else State.COMPLETE_ABORT
        if live.row.state is done and not live.is_busy:
            # A retry, because the response was lost.
            return
        if live.row.state is not State.ONGOING and not live.is_busy:
            raise Refused(e.INVALID_TXN_STATE, f"transaction {transactional_id!r} is not open: {live.row.state.label}")
        decision = State.PREPARE_COMMIT if is_commit else State.PREPARE_ABORT
        await self._run_exclusive(live, lambda: self._decide(live, decision))

    async def _decide(self, live: _Live, decision: State, *, is_fenced: bool = False) -> None:
        committed = self._firsts(live.row) if decision is State.PREPARE_COMMIT else ()
        row = msgspec.structs.replace(live.row, state=decision, changed_ms=self._clock_ms(), committed=committed)
        if is_fenced:
            row = msgspec.structs.replace(row, epoch=min(row.epoch + 1, EPOCH_MAX), previous_epoch=NO_EPOCH)
        self._write(row)
        live.row = row
        await self._durable()
        await self._finish(live)

    async def _finish(self, live: _Live) -> None:
        appends: list[Append] = []
        while True:
            try:
                appends += self._mark(live.row, appends.append)
                break
            except StoreStalledError:
                # The decision is final, so retry until it succeeds.
                await asyncio.sleep(RETRY_S)
        engine = self._engine()
        if engine is not None:
            await asyncio.gather(*(engine.confirmed(append) for append in appends))
        while True:
            try:
                return self._complete(live)
            except StoreStalledError:
                await asyncio.sleep(RETRY_S)

    def _mark(self, row: Transaction, done: Callable[[Append], None] | None = None) -> list[Append]:
        """Append the missing markers. Each append goes to `done` if given, else into the returned list."""
        engine = self._engine()
        appends: list[Append] = []
        marker = marker_batch(row.producer_id, row.epoch, row.state is State.PREPARE_COMMIT, self._clock_ms())
        for shard in sorted(row.shards):
            if engine is not None and row.producer_id in self._undecided(engine, shard):
                try:
                    (done or appends.append)(engine.append_kafka(shard, marker, Durability.SYNCED))
                except ShardNotFoundError:
                    # The shard was deleted in the meantime.
                    continue
        return appends

    def _firsts(self, row: Transaction) -> tuple[tuple[int, int], ...]:
        """Return the first offset of the open transaction in each shard with records of it."""
        engine = self._engine()
        if engine is None:
            return ()
        firsts = ((shard, self._undecided(engine, shard).get(row.producer_id)) for shard in sorted(row.shards))
        return tuple((shard, first) for shard, first in firsts if first is not None)

    def _complete(self, live: _Live) -> None:
        row = live.row
        is_commit = row.state is State.PREPARE_COMMIT
        state = State.COMPLETE_COMMIT if is_commit else State.COMPLETE_ABORT
        batch = Batch()
        for key in live.offsets:
            batch.delete(_FAMILY, stream_keys.pending_offset_key(row.id, *key))
        if is_commit:
            self._put_offsets(batch, live.offsets)
        changed = msgspec.structs.replace(
            row, state=state, changed_ms=self._clock_ms(), shards=frozenset(), groups=frozenset()
        )
        self._write(changed, batch)
        self._pending -= Counter(live.offsets.keys())
        live.row, live.offsets = changed, {}
        self._unload_finished(live)
        self._decided(row.shards)

    def _put_offsets(self, batch: Batch, offsets: Mapping[OffsetKey, Commit]) -> None:
        known = {topic_id: self._plane.topics.summary_of(topic_id) for topic_id in {each[1] for each in offsets}}
        for (group, topic_id, partition), commit in offsets.items():
            # A topic may have been deleted in the meantime, with its groups' offsets.
            if known[topic_id] is not None:
                self._plane.offsets.plan_commit(batch, group, {(topic_id, partition): commit})

    def check_produce(self, transactional_id: str | None, header: KafkaHeader, shard: int) -> None:
        """Raise Refused unless the batch belongs to an open transaction that includes its partition."""
        if not transactional_id:
            raise Refused(e.INVALID_REQUEST, "the request has a transactional batch but no transactional id")
        live = self._find(transactional_id)
        row = None if live is None else live.row
        if row is None or row.producer_id != header.producer_id:
            raise _unmapped(transactional_id, header.producer_id)
        if row.epoch != header.producer_epoch:
            raise Refused(
                e.INVALID_PRODUCER_EPOCH,
                f"producer epoch {header.producer_epoch} of {transactional_id!r} is fenced; the current is {row.epoch}",
            )
        if row.state is not State.ONGOING or shard not in row.shards:
            raise Refused(
                e.INVALID_TXN_STATE, f"the partition is not part of an open transaction of {transactional_id!r}; add it"
            )

    def is_pending(self, group: str, topic_id: UUID, partition: int) -> bool:
        """Whether an open transaction has an offset for this group and partition."""
        return (group, topic_id, partition) in self._pending

    def get(self, transactional_id: str) -> Transaction | None:
        live = self._find(transactional_id)
        return None if live is None else live.row

    def all(self) -> Iterator[Transaction]:
        """Yield every known transactional id, except those whose row is damaged."""
        for key, raw in self._store.scan(_FAMILY, *key_parts.prefix_range(stream_keys.transaction_key(""))):
            with suppress(CorruptionError):
                yield Transaction.decode(stream_keys.decode_transaction_key(key), raw)

    async def expire(self, transactional_id: str) -> None:
        """Abort a transaction after its timeout, and fence its producer."""
        live = self._live.get(transactional_id)
        if live is None or live.row.state is not State.ONGOING:
            return
        if live.is_busy or live.row.began_ms + live.row.timeout_ms > self._clock_ms():
            self._start_timeout(live, RETRY_S)
            return
        _log.info("transaction %r: aborting after its timeout of %d ms", transactional_id, live.row.timeout_ms)
        try:
            await self._run_exclusive(live, lambda: self._decide(live, State.PREPARE_ABORT, is_fenced=True))
        except StoreStalledError:
            self._start_timeout(live, RETRY_S)
        except BasaltError as error:
            _log.error("transaction %r: abort failed: %s", transactional_id, error)

    def sweep(self) -> int:
        """Delete the rows of ids that have expired. Return their number."""
        before_ms = self._clock_ms() - IDLE_MS_MAX
        batch = Batch()
        for looked, row in enumerate(self.all()):
            if looked >= SWEEP_ROWS:
                break
            if row.changed_ms < before_ms and row.id not in self._live:
                batch.delete(_FAMILY, stream_keys.transaction_key(row.id))
        if len(batch):
            self._store.write(batch)
        loop = _loop()
        if loop is not None:
            self._sweeper = loop.call_later(SWEEP_S, self._sweep_quietly)
        return len(batch)

    def _sweep_quietly(self) -> None:
        try:
            self.sweep()
        except BasaltError as error:
            _log.error("deleting expired transactional ids failed: %s", error)

    def _start_timeout(self, live: _Live, least_s: float = 0.0) -> None:
        loop = _loop()
        if live.timer is not None:
            live.timer.cancel()
        if loop is not None:
            left_s = (live.row.began_ms + live.row.timeout_ms - self._clock_ms()) / 1000
            live.timer = loop.call_later(max(left_s, least_s), self._timed_out, live.row.id)

    def _timed_out(self, transactional_id: str) -> None:
        self._spawn(self.expire(transactional_id))

    def _spawn(self, step: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(step)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Retrieve the exception, because the waiting client may be gone.
            task.exception()

    async def _after_additions(self, transactional_id: str, producer_id: int, epoch: int) -> _Live:
        """Return the producer's transaction after the additions in progress.

        Clients add partitions and offsets over two connections at once. An error would delay them by a 20 ms backoff.
        """
        live = self._checked(transactional_id, producer_id, epoch)
        while live.adding is not None:
            await asyncio.wait((live.adding,))
            live = self._checked(transactional_id, producer_id, epoch)
        return live

    async def _run_exclusive(
        self, live: _Live, step: Callable[[], Coroutine[Any, Any, T]], *, is_adding: bool = False
    ) -> T:
        """Run a step exclusively on a transaction, and to its end even if the caller is cancelled."""
        if live.is_busy:
            raise Refused(
                e.CONCURRENT_TRANSACTIONS, f"transaction {live.row.id!r} has another request in progress; retry"
            )
        live.is_busy = True
        self._live[live.row.id] = live
        task = self._spawn(self._run_step(live, step))
        if is_adding:
            live.adding = task
        return await asyncio.shield(task)

    async def _run_step(self, live: _Live, step: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            if live.row.state.is_decided:
                await self._finish(live)
            return await step()
        except StorageError as error:
            if not isinstance(error, StoreStalledError | CorruptionError):
                self._failed(error)
            raise
        finally:
            live.is_busy = False
            live.adding = None
            self._unload_finished(live)

    def _unload_finished(self, live: _Live) -> None:
        """Remove a transaction from memory unless it is open or has a step running."""
        is_open = live.row.state is State.ONGOING or live.row.state.is_decided
        if not is_open and live.timer is not None:
            live.timer.cancel()
            live.timer = None
        if not is_open and not live.is_busy and self._live.get(live.row.id) is live:
            del self._live[live.row.id]

    def _add_offsets(self, live: _Live, offsets: Mapping[OffsetKey, Commit]) -> None:
        self._pending.update(offsets.keys() - live.offsets.keys())
        live.offsets.update(offsets)

    def _write(self, row: Transaction, batch: Batch | None = None) -> None:
        batch = Batch() if batch is None else batch
        batch.put(_FAMILY, stream_keys.transaction_key(row.id), row.encode())
        if row.state is State.ONGOING or row.state.is_decided:
            batch.put(_FAMILY, stream_keys.busy_transaction_key(row.id), b"")
        else:
            batch.delete(_FAMILY, stream_keys.busy_transaction_key(row.id))
        self._store.write(batch)

    def _durable(self) -> asyncio.Future[None]:
        return self._plane.watermarks.group.durable()

    def _wait(self, appends: list[Append]) -> None:
        engine = self._engine()
        if engine is not None and appends:
            self._plane.watermarks.group.wait_durable()
            for append in appends:
                engine.wait(append)

    def _engine(self) -> SegmentEngine | None:
        return self._streams.segments()

    def _undecided(self, engine: SegmentEngine, shard: int) -> dict[int, int]:
        try:
            state = engine.state_of(shard)
        except ShardNotFoundError:
            return {}
        with state.lock:
            return dict(state.undecided or {})

    def _find(self, transactional_id: str) -> _Live | None:
        live = self._live.get(transactional_id)
        if live is None:
            row = self._row(transactional_id)
            live = None if row is None else _Live(row)
        return live

    def _row(self, transactional_id: str) -> Transaction | None:
        raw = self._store.get(_FAMILY, stream_keys.transaction_key(transactional_id))
        return None if raw is None else Transaction.decode(transactional_id, raw)

    def _checked(self, transactional_id: str, producer_id: int, epoch: int) -> _Live:
        if not transactional_id:
            raise Refused(e.INVALID_REQUEST, "the request has no transactional id")
        live = self._find(transactional_id)
        if live is None or live.row.producer_id != producer_id:
            raise _unmapped(transactional_id, producer_id)
        if live.row.epoch != epoch:
            raise _fenced(live.row, epoch)
        return live


def _unmapped(transactional_id: str, producer_id: int) -> Refused:
    return Refused(e.INVALID_PRODUCER_ID_MAPPING, f"producer id {producer_id} does not belong to {transactional_id!r}")


def _fenced(row: Transaction, epoch: int) -> Refused:
    return Refused(
        e.PRODUCER_FENCED, f"producer epoch {epoch} of transaction {row.id!r} is fenced; the current is {row.epoch}"
    )


def _loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
