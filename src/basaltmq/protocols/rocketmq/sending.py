"""SendMessage: appends messages to the partition that the client chose, and answers after the sync.

A delayed message is a scheduled record until it is due. A message of a transaction is a half record until the
transaction is decided.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from basaltmq.broker.guard import Guard
from basaltmq.errors import BasaltError, StorageError, StoreStalledError
from basaltmq.log.batches.record import Record
from basaltmq.protocols.grpc.server.immediate_future import ImmediateFuture
from basaltmq.protocols.rocketmq.methods import Caller
from basaltmq.protocols.rocketmq.recalls import encode_recall
from basaltmq.protocols.rocketmq.records import record_of
from basaltmq.protocols.rocketmq.routes import accepted_types
from basaltmq.protocols.rocketmq.rules.messages import MESSAGES_MAX, MessageLimits, check_message, message_type, millis
from basaltmq.protocols.rocketmq.rules.names import DEAD_LETTERS, topic_name
from basaltmq.protocols.rocketmq.rules.status import OK, Refused, status_of
from basaltmq.protocols.rocketmq.transactions import UNDECIDED_MS_MAX
from basaltmq.streams.scheduled import Half, Scheduled, put_half
from basaltmq.streams.topics import Topic
from basaltmq.wire import rocketmq_wire_pb2 as wire


def send_message(
    request: wire.SendMessageRequest, caller: Caller
) -> ImmediateFuture[wire.SendMessageResponse] | Coroutine[Any, Any, wire.SendMessageResponse]:
    host = caller.host
    if not request.messages:
        raise Refused(wire.MESSAGE_CORRUPTED, "the request has no message")
    if len(request.messages) > MESSAGES_MAX:
        raise Refused(wire.PAYLOAD_TOO_LARGE, f"a request has at most {MESSAGES_MAX} messages")
    name = topic_name(request.messages[0].topic)
    for message in request.messages[1:]:
        if topic_name(message.topic) != name:
            raise Refused(wire.MESSAGE_CORRUPTED, "all messages of a request must have the same topic")
    if name.startswith(DEAD_LETTERS):
        raise Refused(wire.ILLEGAL_TOPIC, f"clients must not send to {name!r}")
    caller.check_write(name)
    host.check_publishing()
    topic = host.topic(name)
    limits = MessageLimits(host.settings.body_bytes_max, host.settings.delay_ms_max)
    accepted = accepted_types(topic)
    for message in request.messages:
        if message_type(message) not in accepted:
            raise Refused(
                wire.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
                f"topic {name!r} accepts messages of type {topic.config.message_type or 'NORMAL to PRIORITY'} only",
            )
        check_message(message, limits, host.now_ms())
    lites = {each.system_properties.lite_topic for each in request.messages}
    if lites == {""}:
        return _Sending(caller, topic, request).start()
    if len(lites) > 1:
        raise Refused(wire.MESSAGE_CORRUPTED, "all messages of a request must have the same lite topic")
    (lite,) = lites
    found = host.lites.find(topic, lite)
    return _send_to_new(topic, lite, request, caller) if found is None else _Sending(caller, found, request).start()


async def _send_to_new(
    topic: Topic, lite: str, request: wire.SendMessageRequest, caller: Caller
) -> wire.SendMessageResponse:
    """Send the first messages of a lite topic."""
    (made,) = await caller.host.lites.get(topic, [lite])
    done: asyncio.Future[ImmediateFuture[wire.SendMessageResponse]] = caller.host.loop.create_future()
    _Sending(caller, made, request).start().then(lambda sent: None if done.done() else done.set_result(sent))
    return (await done).result()


def partition_of(message: wire.Message, topic: Topic) -> int:
    """Return the partition of a message: the queue that the client chose, or that of its priority."""
    count, system = len(topic.shards), message.system_properties
    if message_type(message) == wire.PRIORITY:
        # Receive calls read the last partition first.
        return min(system.priority, count - 1)
    return system.queue_id % count


class _Sending:
    """The messages of a request that wait for their syncs: appends, and rows of delayed and half messages."""

    def __init__(self, caller: Caller, topic: Topic, request: wire.SendMessageRequest) -> None:
        self._host = caller.host
        self._topic = topic
        self._messages = request.messages
        self._response = wire.SendMessageResponse()
        for message in request.messages:
            self._response.entries.add(message_id=message.system_properties.message_id)
        self._left = 1
        """Syncs that the response waits for, and `start` itself."""
        self._has_appended = False
        self._error: BaseException | None = None
        self._answer: ImmediateFuture[wire.SendMessageResponse] = ImmediateFuture()

    def start(self) -> ImmediateFuture[wire.SendMessageResponse]:
        host = self._host
        now_ms = host.now_ms()
        by_partition: dict[int, list[tuple[int, Record]]] = {}
        has_rows = False
        for at, message in enumerate(self._messages):
            kind, system = message_type(message), message.system_properties
            partition, record = partition_of(message, self._topic), record_of(message)
            if kind == wire.DELAY and (due_ms := millis(system.delivery_timestamp)) > now_ms:
                self._delay(at, due_ms, partition, record)
                has_rows = True
            elif kind == wire.TRANSACTION:
                self._begin(at, message, partition, record)
                has_rows = True
            else:
                by_partition.setdefault(partition, []).append((at, record))
        if has_rows:
            self._left += 1
            host.write_soon(self._one)
        for partition, records in by_partition.items():
            self._append(partition, records)
        self._one(None)
        return self._answer

    def _delay(self, at: int, due_ms: int, partition: int, record: Record) -> None:
        record_id = self._host.new_id()
        self._host.schedule_record(due_ms, record_id, self._scheduled(partition, record))
        self._response.entries[at].recall_handle = encode_recall(due_ms, record_id)

    def _begin(self, at: int, message: wire.Message, partition: int, record: Record) -> None:
        host, system = self._host, message.system_properties
        now_ms, record_id = host.now_ms(), host.new_id()
        after_ms = host.settings.transaction_check_ms
        if system.HasField("orphaned_transaction_recovery_duration"):
            after_ms = min(max(millis(system.orphaned_transaction_recovery_duration), 0), UNDECIDED_MS_MAX) or after_ms
        put_half(host.rows, record_id, Half(self._scheduled(partition, record), now_ms, now_ms + after_ms))
        self._response.entries[at].transaction_id = record_id.hex()
        host.schedule.due_at(now_ms + after_ms)

    def _scheduled(self, partition: int, record: Record) -> Scheduled:
        return Scheduled(self._topic.name, self._topic.id.bytes, partition, record)

    def _append(self, partition: int, records: list[tuple[int, Record]]) -> None:
        host = self._host
        self._left += 1
        try:
            with Guard(host.vhost):
                engine, shard = host.route(self._topic, partition)
                append = engine.batch_write(shard, [record for _, record in records])
        except BasaltError as error:
            self._one(error)
            return
        self._has_appended = True
        for number, (at, _) in enumerate(records):
            self._response.entries[at].offset = append.base_offset + number
        host.when_confirmed(engine, append, self._one)

    def _one(self, error: BaseException | None) -> None:
        """Callback of one sync: durable, or failed."""
        self._left -= 1
        self._error = error or self._error
        if self._left:
            return
        if isinstance(self._error, StorageError) and not isinstance(self._error, StoreStalledError):
            self._host.vhost.fail(self._error)
        elif self._has_appended:
            self._host.vhost.streams.notify(self._topic.name)
        status = OK if self._error is None else status_of(self._error)
        self._response.status.CopyFrom(status)
        for entry in self._response.entries:
            entry.status.CopyFrom(status)
        self._answer.set_result(self._response)
