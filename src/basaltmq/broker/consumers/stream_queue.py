"""Queues of type stream: kept by the stream plane, read by offset, by any number of consumers, without being consumed.

A stream is a topic of one partition with the queue's name. What was declared is a row of the queue plane like that of
any other queue, so that queues are listed in one place. A record's value is the body; its one header, `amqp`, is the
envelope a delivery is made from; `stream_envelope` makes one for records of other protocols. Publishing appends and is
confirmed after the sync, and consumers see it then.

A consumer begins where its argument `x-stream-offset` says: `first`, `last`, `next` (the default), an offset, a time,
or an interval such as `1h`. It must acknowledge and have a prefetch: an acknowledgement moves nothing and gives credit
back. Every delivery carries its offset in the header `x-stream-offset`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from struct import Struct
from typing import Any, Final

import msgspec

from basaltmq.broker.consumers.consumer import Consumer
from basaltmq.broker.consumers.queue import BrokerQueue
from basaltmq.broker.message import amqp_table
from basaltmq.broker.message.amqp_table import Timestamp
from basaltmq.broker.message.properties import HAS_CONTENT_ENCODING, HAS_CONTENT_TYPE, HAS_HEADERS, properties_start
from basaltmq.broker.message.stream_envelope import ENVELOPE, envelope_of
from basaltmq.broker.routing.arguments import QueueSettings, age_ms
from basaltmq.errors import (
    BasaltError,
    DamagedFrameError,
    OffsetOutOfRangeError,
    PreconditionFailedError,
    StorageError,
    StoreStalledError,
)
from basaltmq.log.batches.record import Record
from basaltmq.log.segment import SUFFIX
from basaltmq.store.api import Store
from basaltmq.store.directory import QUARANTINE
from basaltmq.store.rocks import RocksStore
from basaltmq.streams.adapter import Clock, Otherwise, StorageAdapter
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.leaders import Leaders
from basaltmq.streams.offsets import Offsets
from basaltmq.streams.plane import EngineMaker, StreamPlane
from basaltmq.streams.shards import Engine, Shards
from basaltmq.streams.topics import TopicConfig

OFFSET_HEADER: Final = "x-stream-offset"
READ_MAX: Final = 256
READ_BYTES: Final = 1 << 20
"""One read for one consumer; further ones wait for their turn."""

STALL_RETRY_S: Final = 0.02
"""Between two tries while the store is behind."""

LOG: Final = "log"
"""The directory of the streams' log beside the store's."""

_OFFSET_FIELD: Final = amqp_table.encode_name(OFFSET_HEADER) + b"l"
_U32: Final = Struct(">I")
_I64: Final = Struct(">q")
_log: Final = logging.getLogger(__name__)


class StreamDelivery(msgspec.Struct, frozen=True, gc=False):
    """A record in the hands of a consumer."""

    id: bytes
    properties: bytes
    payload: bytes
    token: int = 0
    redelivered: bool = False

    def content(self) -> tuple[bytes, bytes]:
        """Properties and payload."""
        return self.properties, self.payload


def with_offset(envelope: bytes, offset: int) -> bytes:
    """An envelope whose headers say the offset; nothing else of it is touched."""
    field = _OFFSET_FIELD + _I64.pack(offset)
    start = properties_start(envelope)
    flags = envelope[start] << 8 | envelope[start + 1]
    at = start + 2
    if flags & HAS_CONTENT_TYPE:
        at += 1 + envelope[at]
    if flags & HAS_CONTENT_ENCODING:
        at += 1 + envelope[at]
    if not flags & HAS_HEADERS:
        head = envelope[:start] + bytes(((flags | HAS_HEADERS) >> 8, flags & 0xFF)) + envelope[start + 2 : at]
        return head + _U32.pack(len(field)) + field + envelope[at:]
    size = _U32.unpack_from(envelope, at)[0]
    end = at + 4 + size
    if OFFSET_HEADER.encode() in envelope[at:end]:
        edited = amqp_table.edit(envelope[at:end], {OFFSET_HEADER: amqp_table.Long(offset)})
        return envelope[:at] + edited + envelope[end:]
    return envelope[:at] + _U32.pack(size + len(field)) + envelope[at + 4 : end] + field + envelope[end:]


class Stream:
    """One stream queue that is open: its shard, and its consumers' places.

    What the store is too far behind to take waits here, in order, and is tried again; its publishers wait for their
    confirms meanwhile.
    """

    __slots__ = ("_engine", "_queue", "_shard", "_waiting")

    def __init__(self, queue: BrokerQueue, engine: StorageAdapter, shard: int) -> None:
        self._queue = queue
        self._engine = engine
        self._shard = shard
        self._waiting: deque[tuple[list[Record], asyncio.Future[None]]] = deque()

    def append(self, messages: Sequence[tuple[bytes, bytes]]) -> asyncio.Future[None]:
        records = [Record(body, headers=((ENVELOPE, envelope),)) for envelope, body in messages]
        if not self._waiting:
            try:
                return self._write(records)
            except StoreStalledError:
                asyncio.get_running_loop().call_later(STALL_RETRY_S, self._try_again)
            except BasaltError as error:
                failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                failed.set_exception(error)
                return failed
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((records, future))
        return future

    def _write(self, records: list[Record]) -> asyncio.Future[None]:
        return self._engine.confirmed(self._engine.batch_write(self._shard, records))

    def _try_again(self) -> None:
        while self._waiting:
            records, future = self._waiting[0]
            try:
                self._write(records).add_done_callback(partial(_pass_on, future))
            except StoreStalledError:
                asyncio.get_running_loop().call_later(STALL_RETRY_S, self._try_again)
                return
            except BasaltError as error:
                if not future.done():
                    future.set_exception(error)
            self._waiting.popleft()

    def depth(self) -> int:
        return self._engine.shard_info(self._shard).records

    def begin(self, consumer: Consumer, now_ms: int) -> None:
        """Put a consumer where it asked to begin."""
        info = self._engine.shard_info(self._shard)
        wanted = consumer.arguments.get(OFFSET_HEADER, "next")
        if wanted == "first":
            consumer.offset = info.start_offset
        elif wanted == "next":
            consumer.offset = info.high_watermark
        elif wanted == "last":
            consumer.offset = max(info.start_offset, info.high_watermark - 1)
        elif isinstance(wanted, Timestamp):
            consumer.offset = self._at(int(wanted) * 1000)
        elif isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 0:
            consumer.offset = max(info.start_offset, int(wanted))
        elif isinstance(wanted, str):
            try:
                consumer.offset = self._at(now_ms - age_ms(wanted))
            except ValueError:
                raise _bad_offset(wanted) from None
        else:
            raise _bad_offset(wanted)

    def _at(self, time_ms: int) -> int:
        return self._engine.get_offset_by_timestamp(self._shard, max(0, time_ms), Otherwise.LATEST)

    def deliver(self) -> bool:
        """Hand every consumer a piece of what it has not seen; True if there is more for one of them."""
        more = False
        for consumer in self._queue.consumers:
            if consumer.can_take():
                more = self._deliver_to(consumer) or more
        return more

    def _deliver_to(self, consumer: Consumer) -> bool:
        count = min(consumer.credit_left, READ_MAX)
        try:
            batch = self._engine.read_by_offset(self._shard, consumer.offset, count, READ_BYTES)
        except OffsetOutOfRangeError as error:
            consumer.offset = error.earliest
            return True
        except DamagedFrameError as error:
            _log.error("stream %r: %s", self._queue.name, error)
            consumer.offset = error.last_offset + 1
            return True
        moved = batch.next_offset > consumer.offset
        consumer.offset = batch.next_offset
        deliveries = [
            StreamDelivery(
                record.offset.to_bytes(8, "big"), with_offset(envelope_of(record), record.offset), record.value or b""
            )
            for record in batch.records()
        ]
        if deliveries:
            consumer.credit_left -= len(deliveries)
            consumer.delivered += len(deliveries)
            self._queue.delivered += len(deliveries)
            consumer.sink.deliver(consumer, deliveries)
        return moved and consumer.can_take() and consumer.offset < batch.high_watermark


def _pass_on(future: asyncio.Future[None], done: asyncio.Future[None]) -> None:
    if future.done() or done.cancelled():
        return
    error = done.exception()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _bad_offset(wanted: object) -> PreconditionFailedError:
    return PreconditionFailedError(
        f"invalid arg '{OFFSET_HEADER}': it is first, last, next, an offset, a time or an interval such as 1h, "
        f"not {wanted!r:.80}"
    )


class StreamQueues:
    """The stream queues of a virtual host. The plane below is opened when the first one is used."""

    def __init__(
        self,
        store: Store,
        path: Path | None,
        clock_ms: Clock,
        *,
        visible: Callable[[BrokerQueue], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """`path`: where the log goes; without it records are kept in the store. `visible`: consumers can read on."""
        self._failed = failed
        self._store = store
        self._path = path
        self._clock_ms = clock_ms
        self._visible = visible
        self._plane: StreamPlane | None = None
        self._listeners: list[Callable[[str], None]] = []
        self.cleaning = threading.Lock()
        """Held while retention works; a backup holds it so that no segment goes away under its copy."""

    @property
    def plane(self) -> StreamPlane:
        if self._plane is None:
            makers: dict[Engine, EngineMaker] = {}
            if self._path is not None and isinstance(self._store, RocksStore):
                makers[Engine.SEGMENT] = partial(_segment_engine, self._store, self._path)
            self._plane = StreamPlane(self._store, self._clock_ms, makers=makers)
        return self._plane

    @property
    def is_open(self) -> bool:
        return self._plane is not None

    def on_visible(self, listener: Callable[[str], None]) -> Callable[[], None]:
        """Have `listener` called, on the loop, with the name of a stream whose consumers can read on; how to stop."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def create(self, queue: BrokerQueue) -> None:
        topics = self.plane.topics
        found = topics.find(queue.name)
        if found is None:
            topics.create(queue.name, self._config(queue.settings))
        elif found.config.partitions == 1:
            # Made by a declaration that a crash cut off, or by clients of another protocol, whose records stay.
            self.alter(queue, queue.settings)
        else:
            raise PreconditionFailedError(
                f"the topic '{queue.name}' has {found.config.partitions} partitions; a stream has one"
            )
        self.attach(queue)

    def _config(self, settings: QueueSettings) -> TopicConfig:
        has_log = self._path is not None and isinstance(self._store, RocksStore)
        return TopicConfig(
            engine=Engine.SEGMENT if has_log else Engine.ROCKSDB,
            retention_ms=settings.age_ms_max,
            retention_bytes=settings.bytes_max,
            index_keys=False,
            index_tags=False,
        )

    def attach(self, queue: BrokerQueue) -> None:
        engine, shard = self.plane.drivers.route(self.plane.topics.get(queue.name), 0)
        queue.stream = Stream(queue, engine, shard)

    def alter(self, queue: BrokerQueue, settings: QueueSettings) -> None:
        self.plane.topics.alter(queue.name, retention_ms=settings.age_ms_max, retention_bytes=settings.bytes_max)

    def delete(self, queue: BrokerQueue) -> None:
        queue.stream = None
        if self.plane.topics.find(queue.name) is not None:
            self.plane.topics.delete(queue.name)

    def depth(self, queue: BrokerQueue) -> int:
        depth: int = queue.stream.depth()
        return depth

    def append(self, queue: BrokerQueue, messages: Sequence[tuple[bytes, bytes]]) -> asyncio.Future[None]:
        future: asyncio.Future[None] = queue.stream.append(messages)
        queue.published += len(messages)
        future.add_done_callback(partial(self._appended, queue))
        return future

    def _appended(self, queue: BrokerQueue, done: asyncio.Future[Any]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if isinstance(error, StorageError):
            self._failed(error)
        elif error is None and queue.stream is not None:
            self.came(queue.name, queue)

    def came(self, topic: str, queue: BrokerQueue | None) -> None:
        """Tell whoever waits that records can be read in a topic, which is that of a stream queue if one is given."""
        if queue is not None and queue.stream is not None:
            self._visible(queue)
        for listener in self._listeners:
            listener(topic)

    def grew(self, queue: BrokerQueue) -> None:
        """More can be read in a stream that was written to through another door."""
        if queue.stream is not None:
            self._visible(queue)

    def retain(self) -> int:
        """A bounded piece of retention; may be called from any thread."""
        if self._plane is None:
            return 0
        with self.cleaning:
            return self._plane.engines.retain(self._clock_ms())

    def reclaim(self, is_enough: Callable[[], bool]) -> None:
        """Free the space of records that are gone: a bounded piece; may be called from any thread."""
        plane = self._plane
        if plane is not None:
            with self.cleaning:
                for engine in plane.engines.in_use():
                    if isinstance(engine, SegmentEngine):
                        engine.reclaim(is_enough)

    def log_bytes(self) -> int:
        """Bytes of the log, whether or not it is in use."""
        plane = self._plane
        if plane is not None:
            engines = plane.engines.in_use()
            found = [engine.log_bytes() for engine in engines if isinstance(engine, SegmentEngine)]
            if found:
                return sum(found)
        if self._path is None:
            return 0
        return sum(file.stat().st_size for file in (self._path / LOG).glob(f"*/*{SUFFIX}"))

    def close(self) -> None:
        if self._plane is not None:
            self._plane.close()


def _segment_engine(
    managed: RocksStore, path: Path, store: Store, shards: Shards, offsets: Offsets, clock_ms: Clock, leaders: Leaders
) -> SegmentEngine:
    assert store is managed, "the plane makes its engines on the store it was given"
    engine = SegmentEngine(managed, shards, offsets, clock_ms, leaders, path=path / LOG, quarantine=path / QUARANTINE)
    for loss in engine.losses:
        _log.error("the log at %s lost records: %s", path / LOG, loss)
    return engine
