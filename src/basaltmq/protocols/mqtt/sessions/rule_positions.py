"""The positions up to which a rule has copied, so that a crash appends no message twice.

    queue `mqtt.rule.NAME` ─> append, durable ─> one batch: acknowledgement, and position of the partition

A crash between an append and its acknowledgement leaves the message in the queue and its record in the stream. The
record has the id of the message as a header. The position of a partition is at or below the offset of every
unacknowledged append of the rule. At the next start, the rule reads each partition from there and remembers the ids
that it finds. A message with such an id is acknowledged without another append.

A position may be behind, for example after a power loss. Then the rule reads more records, and still copies nothing
twice. It is never ahead, because it is written with or after the acknowledgements before it. While no append of the
rule is in flight, a position that is far behind is renewed. So the rule reads few records, however much other producers
append to the partition.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from basaltmq.broker.message.operations import Row, RowChange
from basaltmq.broker.vhost import VHost
from basaltmq.log.batches.record import Record
from basaltmq.store.families import Family
from basaltmq.store.keys import mqtt as keys
from basaltmq.store.keys.parts import U64, prefix_range
from basaltmq.streams.adapter import Append

ID_HEADER: Final = "message-id"
"""Header of a record: the id of its message in the rule's queue."""

RENEWED_OFFSETS: Final = 10_000
"""Records of other producers after which the position of an idle partition is renewed."""


class RulePositions:
    """The positions of one rule in the partitions of its topic."""

    def __init__(self, vhost: VHost, rule: str, topic: str) -> None:
        self._vhost = vhost
        self._rule = rule
        self._topic = topic
        self._by_shard = {
            keys.decode_rule_position_key(key)[1]: U64.unpack(raw)[0] for key, raw in self._scan(vhost, rule)
        }
        self._in_flight: dict[int, list[int]] = {}
        """First offsets of the appends that are not acknowledged, by shard."""
        self.copied: set[bytes] = set()
        """Ids of messages that the stream has, although the queue has them too."""

    @staticmethod
    def _scan(vhost: VHost, rule: str) -> Iterator[tuple[bytes, bytes]]:
        return vhost.store.scan(Family.MQTT_SESSIONS, *prefix_range(keys.rule_positions_prefix(rule)))

    @classmethod
    def deletions(cls, vhost: VHost, rule: str) -> list[Row]:
        """Return the deletion of all positions of a rule."""
        return [(Family.MQTT_SESSIONS, key, None) for key, _ in cls._scan(vhost, rule)]

    def find_copied(self, *, is_queue_empty: bool) -> None:
        """Read the ids of the records after the positions, unless no message waits that could be one of them.

        A partition without a position begins at its end.
        """
        plane = self._vhost.streams.plane
        topic = plane.topics.get(self._topic)
        renewed: list[Row] = []
        for partition, shard in enumerate(topic.shards):
            engine, _ = plane.drivers.route(topic, partition)
            info = engine.shard_info(shard)
            at = self._by_shard.get(shard)
            if at is None or is_queue_empty:
                if at != info.next_offset:
                    renewed.append(self._row(shard, info.next_offset))
                continue
            at = max(at, info.start_offset)
            while at < info.high_watermark:
                page = engine.read_by_offset(shard, at)
                for record in page.records():
                    self._note(record)
                at = page.next_offset
        if renewed:
            # Before the first append: a crash in between must not leave a partition without a position.
            self._vhost.write_rows(RowChange(renewed))
            self._vhost.tick.flush()

    def _note(self, record: Record) -> None:
        for name, value in record.headers:
            if name == ID_HEADER and value is not None:
                self.copied.add(value)

    def appended(self, append: Append) -> None:
        """Record an append that is not acknowledged yet."""
        shard, base = append.shard, append.base_offset
        in_flight = self._in_flight.setdefault(shard, [])
        if not in_flight and base - self._by_shard.get(shard, 0) >= RENEWED_OFFSETS:
            self._vhost.write_rows(RowChange([self._row(shard, base)]))
        in_flight.append(base)

    def acknowledged(self, append: Append) -> RowChange:
        """Record that an append is acknowledged in this turn. Return the row to write after the acknowledgements."""
        in_flight = self._in_flight[append.shard]
        in_flight.remove(append.base_offset)
        return RowChange([self._row(append.shard, min(in_flight, default=append.last_offset + 1))])

    def failed(self, append: Append) -> None:
        """Record that an append failed. Its messages will be appended again."""
        self._in_flight[append.shard].remove(append.base_offset)

    def _row(self, shard: int, offset: int) -> Row:
        self._by_shard[shard] = offset
        return Family.MQTT_SESSIONS, keys.rule_position_key(self._rule, shard), U64.pack(offset)
