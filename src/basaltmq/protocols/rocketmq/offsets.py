"""PullMessage, UpdateOffset, GetOffset, QueryOffset: reading a queue by offset, without leases.

The offsets of a group are those of the stream plane. Updating the offset of a group that receives under leases moves
its cursor.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

from basaltmq.errors import OffsetOutOfRangeError
from basaltmq.log.batches.record import TIMESTAMP_MS_MAX, StoredRecord
from basaltmq.protocols.grpc.server.immediate_future import ImmediateFuture
from basaltmq.protocols.rocketmq.consumption import READ_BYTES, SCANNED_MAX
from basaltmq.protocols.rocketmq.methods import Caller
from basaltmq.protocols.rocketmq.records import message_of
from basaltmq.protocols.rocketmq.routes import BROKER
from basaltmq.protocols.rocketmq.rules.filters import filter_of
from basaltmq.protocols.rocketmq.rules.messages import millis
from basaltmq.protocols.rocketmq.rules.names import group_name, topic_name
from basaltmq.protocols.rocketmq.rules.status import OK, Refused, status_of
from basaltmq.protocols.rocketmq.sessions import LONG_POLLING_S, RECEIVE_BATCH
from basaltmq.store.batch import Batch
from basaltmq.streams.adapter import IfAllOlder
from basaltmq.streams.offsets import Commit, put_commit
from basaltmq.streams.shards import OFFSET_MAX
from basaltmq.streams.topics import Topic
from basaltmq.wire import rocketmq_wire_pb2 as wire


class _Arrival:
    """A pull call that waits for a record."""

    def __init__(self, topic: Topic, future: asyncio.Future[None]) -> None:
        self.topic = topic
        self.future = future

    def wake(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


async def pull_message(
    request: wire.PullMessageRequest, caller: Caller
) -> AsyncGenerator[wire.PullMessageResponse, None]:
    host = caller.host
    topic, partition = _queue(request.message_queue, caller)
    caller.check_read(group_name(request.group))
    if request.batch_size <= 0:
        raise Refused(wire.BAD_REQUEST, f"the batch size must be above 0, not {request.batch_size}")
    wanted = filter_of(request.filter_expression)
    count = min(request.batch_size, RECEIVE_BATCH)
    until_s = host.loop.time() + min(millis(request.long_polling_timeout) / 1000, LONG_POLLING_S)
    engine, shard = host.route(topic, partition)
    offset = request.offset
    found: list[StoredRecord] = []
    while True:
        try:
            with host.guard():
                batch = engine.read_by_offset(shard, offset, SCANNED_MAX if wanted is not None else count, READ_BYTES)
                records = batch.records()
        except OffsetOutOfRangeError as error:
            yield wire.PullMessageResponse(status=status_of(error))
            yield wire.PullMessageResponse(next_offset=error.earliest)
            return
        next_offset = batch.next_offset
        for record in records:
            if wanted is None or wanted.matches(record):
                if len(found) == count:
                    next_offset = record.offset
                    break
                found.append(record)
        left_s = until_s - host.loop.time()
        is_end = next_offset >= batch.high_watermark
        offset = next_offset
        if found or (is_end and left_s <= 0) or host.is_stopping or not host.vhost.is_up:
            break
        if is_end:
            arrival = _Arrival(topic, host.loop.create_future())
            await _wait(caller, arrival, left_s)
        else:
            await asyncio.sleep(0)
    if found:
        yield wire.PullMessageResponse(status=OK)
    else:
        yield wire.PullMessageResponse(status=wire.Status(code=wire.MESSAGE_NOT_FOUND, message="no new message"))
    for record in found:
        message = message_of(record, shard, partition, BROKER)
        message.topic.CopyFrom(request.message_queue.topic)
        yield wire.PullMessageResponse(message=message)
    yield wire.PullMessageResponse(next_offset=offset)


async def _wait(caller: Caller, arrival: _Arrival, timeout_s: float) -> None:
    host = caller.host
    host.waits(arrival, is_waited=True)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await arrival.future
    finally:
        host.waits(arrival, is_waited=False)


def update_offset(request: wire.UpdateOffsetRequest, caller: Caller) -> ImmediateFuture[wire.UpdateOffsetResponse]:
    host = caller.host
    topic, partition = _queue(request.message_queue, caller)
    group = group_name(request.group)
    caller.check_read(group)
    if not 0 <= request.offset <= OFFSET_MAX:
        raise Refused(wire.ILLEGAL_OFFSET, f"an offset must be 0 or more, not {request.offset}")
    batch = Batch()
    put_commit(batch, group, topic.id, partition, Commit(request.offset, host.now_ms()))
    answer: ImmediateFuture[wire.UpdateOffsetResponse] = ImmediateFuture()
    host.write_now(
        batch,
        lambda error: answer.set_result(wire.UpdateOffsetResponse(status=OK if error is None else status_of(error))),
    )
    return answer


def get_offset(request: wire.GetOffsetRequest, caller: Caller) -> wire.GetOffsetResponse:
    topic, partition = _queue(request.message_queue, caller)
    group = group_name(request.group)
    caller.check_read(group)
    with caller.host.guard():
        found = caller.host.plane.offsets.committed(group, [(topic.id, partition)])
    if not found:
        raise Refused(wire.OFFSET_NOT_FOUND, f"group {group!r} has no offset in queue {partition} of {topic.name!r}")
    return wire.GetOffsetResponse(status=OK, offset=found[topic.id, partition].offset)


def query_offset(request: wire.QueryOffsetRequest, caller: Caller) -> wire.QueryOffsetResponse:
    host = caller.host
    topic, partition = _queue(request.message_queue, caller)
    policy = request.query_offset_policy
    with host.guard():
        info = host.plane.drivers.info(topic.name, partition)
        if policy == wire.TIMESTAMP:
            if not request.HasField("timestamp"):
                raise Refused(wire.BAD_REQUEST, "the policy TIMESTAMP needs a timestamp")
            at_ms = min(max(0, millis(request.timestamp)), TIMESTAMP_MS_MAX)
            offset = host.plane.drivers.offset_at(topic.name, partition, at_ms, IfAllOlder.LATEST)
        else:
            offset = info.start_offset if policy == wire.BEGINNING else info.high_watermark
    return wire.QueryOffsetResponse(status=OK, offset=offset)


def _queue(queue: wire.MessageQueue, caller: Caller) -> tuple[Topic, int]:
    """Return the topic and the partition of a queue."""
    name = topic_name(queue.topic)
    caller.check_read(name)
    topic = caller.host.topic(name)
    if not 0 <= queue.id < len(topic.shards):
        raise Refused(wire.BAD_REQUEST, f"topic {name!r} has no queue {queue.id}")
    return topic, queue.id
