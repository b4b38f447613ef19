"""Stream queues: stored in the stream plane and read by offset, non-destructively, by any number of consumers.

A stream is a topic with one partition and the queue's name. Its declaration is a row of the queue plane, as for every
queue, so all queues are listed in one place. A record's value is the message body. Its only header, `amqp`, is the
envelope of the delivery; `stream_envelope` creates one for records of other protocols. A publish appends a record.
After the sync it is confirmed and visible to consumers.

The consumer argument `x-stream-offset` selects the start: `first`, `last`, `next` (the default), an offset, a time, or
an interval such as `1h`. A consumer must acknowledge and set a prefetch. An acknowledgement only returns credit. Every
delivery carries its offset in the header `x-stream-offset`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from struct import Struct
from time import perf_counter
from typing import Any, Final

import msgspec

from basaltmq.broker.consumers.consumer import Consumer
from basaltmq.broker.consumers.queue import BrokerQueue
from basaltmq.broker.message import amqp_table
from basaltmq.broker.message.amqp_table import Timestamp
from basaltmq.broker.message.properties import (
    HAS_CONTENT_ENCODING,
    HAS_CONTENT_TYPE,
    HAS_HEADERS,
    properties_start,
)
from basaltmq.broker.message.stream_envelope import ENVELOPE, envelope_of
from basaltmq.broker.routing.arguments import QueueSettings, age_ms
from basaltmq.broker.vhost_streams import VHostStreams
from basaltmq.errors import (
    BasaltError,
    DamagedFrameError,
    OffsetOutOfRangeError,
    PreconditionFailedError,
    StorageError,
    StoreStalledError,
)
from basaltmq.log.batches.record import Record
from basaltmq.streams.adapter import IfAllOlder, StorageAdapter
from basaltmq.streams.topics import TopicConfig

OFFSET_HEADER: Final = "x-stream-offset"
READ_MAX: Final = 256
READ_BYTES: Final = 1 << 20
"""Limits of one read for one consumer, in records and bytes. Further reads wait for the next turn."""

FILTER_S: Final = 0.002
"""Time per read for the filter of a consumer. The next read starts with the record after the last one evaluated."""

STALL_RETRY_S: Final = 0.02
"""Delay between tries while the store is stalled."""

_OFFSET_FIELD: Final = amqp_table.encode_name(OFFSET_HEADER) + b"l"
_U32: Final = Struct(">I")
_I64: Final = Struct(">q")
_log: Final = logging.getLogger(__name__)


class StreamDelivery(msgspec.Struct, frozen=True, gc=False):
    """A record delivered to a consumer."""

    id: bytes
    properties: bytes
    payload: bytes
    token: int = 0
    redelivered: bool = False

    def content(self) -> tuple[bytes, bytes]:
        """Return properties and payload."""
        return self.properties, self.payload


def with_offset(envelope: bytes, offset: int) -> bytes:
    """Return the envelope with the offset header set and everything else unchanged."""
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
    """An open stream queue: appends to its shard and delivers to its consumers.

    While the store is stalled, appends wait here in order and are retried. Their confirms wait too.
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
        """Set the start offset of a consumer from its arguments."""
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
        return self._engine.get_offset_by_timestamp(self._shard, max(0, time_ms), IfAllOlder.LATEST)

    def deliver(self) -> bool:
        """Deliver one batch of new records to each ready consumer; True if one of them can read more."""
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
        if consumer.selection is not None and consumer.selection.accepts is not None:
            deliveries, end = _accepted(deliveries, consumer.selection.accepts)
            if end is not None:
                consumer.offset = end
        if deliveries:
            consumer.credit_left -= len(deliveries)
            consumer.delivered += len(deliveries)
            self._queue.delivered += len(deliveries)
            consumer.sink.deliver(consumer, deliveries)
        return moved and consumer.can_take() and consumer.offset < batch.high_watermark


def _accepted(read: list[StreamDelivery], accepts: Callable[[Any], bool]) -> tuple[list[StreamDelivery], int | None]:
    """Return the accepted records. If there is no time for all, also return the offset at which to continue."""
    until_s = perf_counter() + FILTER_S
    found = []
    for number, each in enumerate(read, 1):
        if accepts(each):
            found.append(each)
        if number < len(read) and perf_counter() >= until_s:
            return found, int.from_bytes(read[number].id, "big")
    return found, None


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
        f"invalid arg '{OFFSET_HEADER}': expected first, last, next, an offset, a time or an interval such as 1h, "
        f"got {wanted!r:.80}"
    )


class StreamQueues:
    """The stream queues of a virtual host."""

    def __init__(
        self,
        streams: VHostStreams,
        queues: Mapping[str, BrokerQueue],
        *,
        failed: Callable[[BaseException], None],
    ) -> None:
        """`failed` is called for a disk error."""
        self._streams = streams
        self._queues = queues
        self._failed = failed
        self._wake: Callable[[BrokerQueue], None] = lambda queue: None
        streams.listen(self._grew)

    def listen(self, wake: Callable[[BrokerQueue], None]) -> None:
        """Call `wake` for a queue whose consumers can read more."""
        self._wake = wake

    def create(self, queue: BrokerQueue) -> None:
        topics = self._streams.plane.topics
        found = topics.find(queue.name)
        if found is None:
            topics.create(queue.name, self._config(queue.settings))
        elif found.config.partitions == 1:
            # A crash interrupted a declaration, or a client of another protocol created the topic. Keep its records.
            self.alter(queue, queue.settings)
        else:
            raise PreconditionFailedError(
                f"cannot declare stream '{queue.name}': a topic of that name has {found.config.partitions} partitions, "
                "a stream has one; choose another name"
            )
        self.attach(queue)

    def _config(self, settings: QueueSettings) -> TopicConfig:
        return TopicConfig(
            engine=self._streams.default_engine,
            retention_ms=settings.age_ms_max,
            retention_bytes=settings.bytes_max,
            index_keys=False,
            index_tags=False,
        )

    def attach(self, queue: BrokerQueue) -> None:
        plane = self._streams.plane
        engine, shard = plane.drivers.route(plane.topics.get(queue.name), 0)
        queue.stream = Stream(queue, engine, shard)

    def alter(self, queue: BrokerQueue, settings: QueueSettings) -> None:
        topics = self._streams.plane.topics
        topics.alter(queue.name, retention_ms=settings.age_ms_max, retention_bytes=settings.bytes_max)

    def delete(self, queue: BrokerQueue) -> None:
        queue.stream = None
        topics = self._streams.plane.topics
        if topics.find(queue.name) is not None:
            topics.delete(queue.name)

    def depth(self, queue: BrokerQueue) -> int:
        depth: int = queue.stream.depth()
        return depth

    def append(self, queue: BrokerQueue, messages: Sequence[tuple[bytes, bytes]]) -> asyncio.Future[None]:
        """Append (envelope, body) pairs; the future resolves when they are durable."""
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
            self._streams.notify(queue.name)

    def _grew(self, topic: str) -> None:
        """Wake the consumers of a stream queue after an append of any protocol."""
        queue = self._queues.get(topic)
        if queue is not None and queue.stream is not None:
            self._wake(queue)
