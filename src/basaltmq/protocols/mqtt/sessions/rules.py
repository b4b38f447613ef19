"""Rules: messages of a topic filter are copied to a stream, so that devices fill a partitioned topic.

    sensors/#  ->  topic `readings`, key = level 2

    publish ─> queue `mqtt.rule.NAME` ─> append to the partition of the key ─> durable ─> acknowledge

A rule has a durable queue that is bound to the topic exchange. So a message is confirmed like any other, is in the same
batch as its QoS 2 identifier, and waits in the queue while the stream cannot be written. Publishers of all protocols
and wills reach the stream. Messages keep their order. Each is appended exactly once, also if the broker crashes between
the append and its acknowledgement (`rule_positions.py`).

A record has the payload as its value, the time of the publish, and these headers:

    topic          the topic of the message
    message-id     16 bytes, different for each message
    content-type   if there is one
    others         user properties, or text headers of AMQP
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import msgspec

from basaltmq.broker.consumers.consumer import Consumer
from basaltmq.broker.message import properties as amqp
from basaltmq.broker.message.operations import ACK, REQUEUE, RowChange, Settlement
from basaltmq.broker.message.text_headers import envelope_of
from basaltmq.broker.vhost import VHost
from basaltmq.clock import NS_PER_MS
from basaltmq.errors import BasaltError, InvalidArgumentError, NotFoundError, StorageError
from basaltmq.log.batches.record import Record
from basaltmq.protocols.mqtt.sessions import rows
from basaltmq.protocols.mqtt.sessions.message import Decoded
from basaltmq.protocols.mqtt.sessions.rows import RuleRow
from basaltmq.protocols.mqtt.sessions.rule_positions import ID_HEADER, RulePositions
from basaltmq.protocols.mqtt.wire import topics
from basaltmq.protocols.mqtt.wire.errors import MqttError
from basaltmq.queues.leases.delivery import Delivery
from basaltmq.store.families import Family
from basaltmq.store.keys import mqtt as keys
from basaltmq.store.keys.parts import prefix_range
from basaltmq.streams.adapter import Append
from basaltmq.streams.partitions import Partitioner, partition_of_key

QUEUE_PREFIX: Final = "mqtt.rule."
NAME_BYTES_MAX: Final = 200
RULES_MAX: Final = 1000
"""Rules of a virtual host. Each has a queue and a consumer."""

NO_KEY: Final = "none"
TOPIC_KEY: Final = "topic"
LEVEL_KEY: Final = "level "
"""Keys of a record: none, the whole topic, or one level of it, counted from 1."""

PREFETCH: Final = 256
APPEND_BYTES: Final = 1 << 20
"""Bodies per append, or one larger message."""

RETRY_S: Final = 0.05
"""Delay before the next try while a stream cannot be written, for example because it was deleted."""

_OWN_HEADERS: Final = "x-mqtt-"
_log: Final = logging.getLogger(__name__)


class Rule(msgspec.Struct, frozen=True):
    """Messages of `filter` are appended to the stream `topic`."""

    name: str
    filter: str
    topic: str
    key: str = NO_KEY

    def check(self) -> None:
        """Raise InvalidArgumentError if a field is invalid."""
        if not 0 < len(self.name.encode()) <= NAME_BYTES_MAX:
            raise InvalidArgumentError(f"the name of a rule must have 1 to {NAME_BYTES_MAX} bytes")
        try:
            topics.check_filter(self.filter)
        except MqttError as error:
            raise InvalidArgumentError(f"rule {self.name!r}: {error.text}") from None
        if self.filter.startswith("$"):
            raise InvalidArgumentError(f"rule {self.name!r}: the filter must not begin with '$'")
        level = self.key.removeprefix(LEVEL_KEY)
        has_level = level != self.key and level.isascii() and level.isdigit()
        if self.key not in (NO_KEY, TOPIC_KEY) and not (has_level and 1 <= int(level) <= topics.TOPIC_LEVELS_MAX):
            raise InvalidArgumentError(
                f"rule {self.name!r}: the key must be 'none', 'topic' or 'level N' with N from 1 to "
                f"{topics.TOPIC_LEVELS_MAX}, not {self.key!r:.80}"
            )

    def key_of(self, topic: str) -> bytes | None:
        """Return the key of a record. A topic without the level has none."""
        if self.key == NO_KEY:
            return None
        if self.key == TOPIC_KEY:
            return topic.encode()
        levels, level = topic.split("/"), int(self.key.removeprefix(LEVEL_KEY))
        return levels[level - 1].encode() if level <= len(levels) else None

    @property
    def queue(self) -> str:
        return QUEUE_PREFIX + self.name


class Rules:
    """The rules of a virtual host."""

    def __init__(self, vhost: VHost, exchange: str, decoded: Decoded) -> None:
        self._vhost = vhost
        self._exchange = exchange
        self._decoded = decoded
        self._running: dict[str, Forwarder] = {}

    def load(self) -> None:
        """Start the rules of the store."""
        for key, raw in self._vhost.store.scan(Family.MQTT_SESSIONS, *prefix_range(keys.RULE)):
            row = rows.decode(RuleRow, raw)
            try:
                self._start(Rule(keys.decode_client_key(key), row.filter, row.topic, row.key))
            except BasaltError as error:
                _log.error("vhost %r: MQTT rule %r: %s", self._vhost.name, keys.decode_client_key(key), error)

    def list(self) -> list[Rule]:
        return [self._running[name].rule for name in sorted(self._running)]

    def get(self, name: str) -> Rule:
        found = self._running.get(name)
        if found is None:
            raise NotFoundError(f"there is no MQTT rule {name!r:.80} in vhost {self._vhost.name!r}")
        return found.rule

    def counts(self, name: str) -> tuple[int, int]:
        """Return how many messages wait, and how many were appended since the start."""
        found = self._running[name]
        return self._vhost.plane.stats(found.rule.queue)["messages"], found.appended

    def set(self, rule: Rule) -> None:
        """Create or replace a rule. Its topic must exist."""
        rule.check()
        self._vhost.streams.plane.topics.get(rule.topic)
        known = self._running.get(rule.name)
        if known is None and len(self._running) >= RULES_MAX:
            raise InvalidArgumentError(f"the limit of {RULES_MAX} MQTT rules is reached")
        if known is not None:
            self._stop(known)
        key = keys.client_key(keys.RULE, rule.name)
        self._vhost.write_rows(RowChange([rows.put(key, RuleRow(rule.filter, rule.topic, rule.key))]))
        self._start(rule)

    def delete(self, name: str) -> None:
        """Delete a rule and the messages that wait for it."""
        self.get(name)
        forwarder = self._running.pop(name)
        forwarder.stop()
        deleted = [rows.delete(keys.client_key(keys.RULE, name)), *RulePositions.deletions(self._vhost, name)]
        self._vhost.write_rows(RowChange(deleted))
        self._vhost.delete_queue(forwarder.rule.queue)

    def close(self) -> None:
        for forwarder in self._running.values():
            forwarder.stop()
        self._running = {}

    def _start(self, rule: Rule) -> None:
        self._vhost.declare_queue(rule.queue, durable=True)
        wanted = topics.binding_key(rule.filter)
        self._vhost.bind_queue(rule.queue, self._exchange, wanted)
        self._running[rule.name] = Forwarder(self._vhost, rule, self._decoded)

    def _stop(self, forwarder: Forwarder) -> None:
        """Stop a rule that is replaced. Messages that wait in its queue follow the new one."""
        forwarder.stop()
        old = forwarder.rule
        self._vhost.unbind_queue(old.queue, self._exchange, topics.binding_key(old.filter))


class Forwarder:
    """Moves the messages of one rule from its queue to its stream."""

    def __init__(self, vhost: VHost, rule: Rule, decoded: Decoded) -> None:
        self._vhost = vhost
        self.rule = rule
        self._decoded = decoded
        self._partitioner = Partitioner()
        self._waiting: deque[Delivery] = deque()
        """Deliveries that are not appended yet."""
        self._retry: asyncio.TimerHandle | None = None
        self._positions = RulePositions(vhost, rule.name, rule.topic)
        self._has_positions = False
        """Whether the records after the positions were read."""
        self._is_stuck = False
        """Whether the last append failed. Only the first failure in a row is logged."""
        self._is_stopped = False
        self._consumer = vhost.subscribe(rule.queue, self, tag=rule.queue, prefetch=PREFETCH, owner=self)
        self.appended = 0
        with suppress(BasaltError):
            # Without the topic, once it exists.
            self._find_copied()

    def deliver(self, consumer: Consumer, deliveries: Sequence[Any]) -> None:
        hidden = [each for each in deliveries if topics.hides(self.rule.filter, self._topic(each))]
        if hidden:
            # The exchange does not know that `#` and `+` exclude topics that begin with `$`.
            self._settle(hidden, ACK)
            consumer.credit(len(hidden))
            deliveries = [each for each in deliveries if each not in hidden]
        self._waiting += deliveries
        if self._retry is None:
            self._append()

    def cancelled(self, consumer: Consumer) -> None:
        """The queue was deleted. It is created again when the virtual host or the broker starts."""
        if not self._is_stopped:
            _log.error(
                "vhost %r: the queue of MQTT rule %r was deleted; set the rule again", self._vhost.name, self.rule.name
            )

    def stop(self) -> None:
        """Return the messages that are not appended to the queue."""
        self._is_stopped = True
        if self._retry is not None:
            self._retry.cancel()
        if not self._vhost.is_up:
            return
        self._consumer.cancel()
        self._settle(list(self._waiting), REQUEUE)
        self._waiting.clear()
        self._vhost.release_owner(self)

    def _append(self) -> None:
        """Append what waits. Messages of one partition keep their order."""
        self._retry = None
        while self._waiting:
            left = self._take()
            try:
                self._find_copied()
                left = self._without_copied(left)
                topic = self._vhost.streams.plane.topics.get(self.rule.topic)
                for partition, part in self._split(left, topic.config.partitions).items():
                    engine, shard = self._vhost.streams.plane.drivers.route(topic, partition)
                    append = engine.batch_write(shard, [record for _, record in part])
                    self._positions.appended(append)
                    moved = [delivery for delivery, _ in part]
                    engine.confirmed(append).add_done_callback(partial(self._appended, moved, append))
                    gone = {each.id for each in moved}
                    left = [each for each in left if each.id not in gone]
            except BasaltError as error:
                self._try_again(left, error)
                return
            self._is_stuck = False

    def _find_copied(self) -> None:
        if not self._has_positions:
            waiting = self._vhost.plane.stats(self.rule.queue)["messages"]
            self._positions.find_copied(is_queue_empty=not waiting)
            self._has_positions = True

    def _without_copied(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Acknowledge messages that were appended before a crash. Return the others."""
        known = self._positions.copied
        copied = [each for each in deliveries if each.id in known] if known else []
        if not copied:
            return deliveries
        self._settle(copied, ACK)
        self._consumer.credit(len(copied))
        return [each for each in deliveries if each.id not in known]

    def _try_again(self, deliveries: list[Delivery], error: BasaltError) -> None:
        if self._is_stopped:
            self._settle(deliveries, REQUEUE)
            return
        self._waiting.extendleft(reversed(deliveries))
        if not self._is_stuck:
            _log.warning("vhost %r: MQTT rule %r waits: %s", self._vhost.name, self.rule.name, error)
        self._is_stuck = True
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._append)

    def _take(self) -> list[Delivery]:
        """Remove the first deliveries, up to `APPEND_BYTES` but at least one."""
        taken = [self._waiting.popleft()]
        size_bytes = len(taken[0].payload)
        while self._waiting and size_bytes + len(self._waiting[0].payload) <= APPEND_BYTES:
            taken.append(self._waiting.popleft())
            size_bytes += len(taken[-1].payload)
        return taken

    def _split(self, deliveries: list[Delivery], partitions: int) -> dict[int, list[tuple[Delivery, Record]]]:
        """Group by partition. Records without a key stay together."""
        parts: dict[int, list[tuple[Delivery, Record]]] = {}
        turn = self._partitioner.in_turn(partitions)
        for delivery in deliveries:
            record = self._record(delivery)
            chosen = turn if record.key is None else partition_of_key(record.key, partitions)
            parts.setdefault(chosen, []).append((delivery, record))
        return parts

    def _topic(self, delivery: Delivery) -> str:
        return self._decoded.get(delivery.properties or envelope_of(delivery.headers)).topic

    def _record(self, delivery: Delivery) -> Record:
        envelope, body = delivery.content()
        envelope = envelope or envelope_of(delivery.headers)
        topic = self._decoded.get(envelope).topic
        found = amqp.parse(amqp.decode_envelope(envelope)[2])
        headers: list[tuple[str, bytes | None]] = [("topic", topic.encode()), (ID_HEADER, delivery.id)]
        if found.content_type is not None:
            headers.append(("content-type", found.content_type.encode(errors="replace")))
        for name, value in found.headers.items():
            if isinstance(value, str) and not name.startswith(_OWN_HEADERS):
                headers.append((name, value.encode(errors="surrogateescape")))
        time_ms = delivery.message().enqueued_ns // NS_PER_MS
        return Record(body, key=self.rule.key_of(topic), headers=tuple(headers), timestamp_ms=time_ms)

    def _appended(self, moved: list[Delivery], append: Append, done: asyncio.Future[None]) -> None:
        if done.cancelled() or not self._vhost.is_up:
            return
        error = done.exception()
        if isinstance(error, StorageError):
            self._vhost.fail(error)
        elif isinstance(error, BasaltError):
            self._positions.failed(append)
            self._try_again(moved, error)
        else:
            self.appended += len(moved)
            self._settle(moved, ACK)
            self._vhost.write_rows(self._positions.acknowledged(append))
            if not self._is_stopped:
                self._consumer.credit(len(moved))
            self._vhost.streams.notify(self.rule.topic)

    def _settle(self, deliveries: list[Delivery], outcome: str) -> None:
        by_token: dict[int, list[bytes]] = {}
        for delivery in deliveries:
            by_token.setdefault(delivery.token, []).append(delivery.id)
        if by_token:
            queue = self.rule.queue
            self._vhost.settle([Settlement(queue, token, ids, outcome) for token, ids in by_token.items()])
