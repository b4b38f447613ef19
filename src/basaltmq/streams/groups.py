"""Consumer groups: committed offsets, lag, and consumers that share a topic's partitions.

`Groups` is the administrative interface: list, lag, reset, delete. `GroupMembers` is one group inside this process.
Each partition of the subscribed topics is assigned to exactly one consumer. Each membership change starts a new
generation and rebalances the partitions. A consumer reads its partitions round robin and commits its offsets. After a
rebalance, a consumer starts a newly assigned partition at its committed offset. Committing a partition that is assigned
to another consumer raises `StaleMemberError`, so consumers never overwrite each other's offsets.

Delivery is at least once: records read but not committed are read again by the partition's next owner.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec

from basaltmq.errors import (
    GroupNotFoundError,
    InvalidArgumentError,
    OffsetOutOfRangeError,
    StaleMemberError,
    TopicNotFoundError,
)
from basaltmq.log.batches.record import StoredRecord
from basaltmq.streams.adapter import READ_BYTES, IfAllOlder
from basaltmq.streams.drivers import Drivers
from basaltmq.streams.offsets import Commit, Offsets, TopicPartition
from basaltmq.streams.topics import Topics

GROUPS_LISTED_MAX: Final = 1_000
"""Maximum groups per page."""

NamedPartition = tuple[str, int]
"""(topic name, partition)."""


class Reset(enum.StrEnum):
    """Where a group starts when it has no offset, or when its offset is out of range."""

    EARLIEST = "earliest"
    LATEST = "latest"
    NONE = "none"
    """Raise an error instead."""


class PartitionLag(msgspec.Struct, frozen=True):
    """The committed offset and lag of a group in one partition."""

    topic: str
    partition: int
    committed: int
    start_offset: int
    end_offset: int
    """The high watermark."""
    lag: int
    """Offsets left to read. Offsets removed by retention do not count."""
    metadata: str = ""


class Delivered(msgspec.Struct, frozen=True, gc=False):
    """A record with its topic and partition."""

    topic: str
    partition: int
    record: StoredRecord

    @property
    def offset(self) -> int:
        return self.record.offset

    @property
    def key(self) -> bytes | None:
        return self.record.key

    @property
    def value(self) -> bytes | None:
        return self.record.value


class Groups:
    """Administration of the groups of one store."""

    def __init__(self, offsets: Offsets, topics: Topics, drivers: Drivers) -> None:
        self._offsets = offsets
        self._topics = topics
        self._drivers = drivers

    def page(self, *, start_after: str | None = None, limit: int = GROUPS_LISTED_MAX) -> list[str]:
        """Return group names in key order: by length, then by bytes."""
        return list(islice(self._offsets.groups(start_after), min(limit, GROUPS_LISTED_MAX)))

    def lag(self, group: str) -> list[PartitionLag]:
        """Return the group's lag by topic and partition. Offsets of deleted topics are omitted."""
        committed = self._offsets.of_group(group)
        if not committed:
            raise GroupNotFoundError(f"group {group!r} has no committed offsets")
        found = []
        topics = {topic_id: self._topics.summary_of(topic_id) for topic_id in {each for each, _ in committed}}
        for (topic_id, partition), commit in committed.items():
            topic = topics[topic_id]
            if topic is not None and partition < topic.partitions:
                found.append(self._lag(topic.name, partition, commit))
        return sorted(found, key=lambda each: (each.topic, each.partition))

    def reset(
        self, group: str, topic: str, to: Reset | int, *, partition: int | None = None, timestamp_ms: int | None = None
    ) -> dict[int, int]:
        """Set a group's offsets to the start, the end, an offset or a timestamp. Return them by partition.

        With `timestamp_ms`, `to` applies to partitions without records at or after that time.
        """
        found = self._topics.get(topic)
        partitions = range(found.config.partitions) if partition is None else (partition,)
        chosen: dict[int, int] = {}
        for each in partitions:
            info = self._drivers.info(topic, each)
            if timestamp_ms is not None:
                otherwise = IfAllOlder.EARLIEST if to is Reset.EARLIEST else IfAllOlder.LATEST
                chosen[each] = self._drivers.offset_at(topic, each, timestamp_ms, otherwise)
            elif to is Reset.EARLIEST:
                chosen[each] = info.start_offset
            elif to is Reset.LATEST:
                chosen[each] = info.high_watermark
            elif isinstance(to, int):
                if not info.start_offset <= to <= info.high_watermark:
                    raise OffsetOutOfRangeError(info.meta.number, to, info.start_offset, info.high_watermark)
                chosen[each] = to
            else:
                raise InvalidArgumentError(f"cannot reset group {group!r} to {to!r}; use earliest, latest or an offset")
        self._offsets.commit(group, {(found.id, each): offset for each, offset in chosen.items()})
        return chosen

    def delete(self, group: str) -> int:
        """Delete a group's offsets in all topics. Return how many there were."""
        gone = self._offsets.delete(group)
        if not gone:
            raise GroupNotFoundError(f"group {group!r} has no committed offsets")
        return gone

    def _lag(self, topic: str, partition: int, commit: Commit) -> PartitionLag:
        info = self._drivers.info(topic, partition)
        lag = max(0, info.high_watermark - max(commit.offset, info.start_offset))
        return PartitionLag(
            topic, partition, commit.offset, info.start_offset, info.high_watermark, lag, commit.metadata
        )


def assign_partitions(
    partitions: Mapping[str, int], subscriptions: Mapping[int, frozenset[str]]
) -> dict[int, list[NamedPartition]]:
    """Assign each partition to the subscribed member with the fewest partitions so far.

    For equal subscriptions, the shares differ by at most one, also with many small topics.
    """
    assignment: dict[int, list[NamedPartition]] = {member: [] for member in subscriptions}
    for topic in sorted(partitions):
        subscribers = [member for member in sorted(subscriptions) if topic in subscriptions[member]]
        for partition in range(partitions[topic]):
            least = min(subscribers, key=lambda member: (len(assignment[member]), member))
            assignment[least].append((topic, partition))
    return assignment


class GroupMembers:
    """The consumers of one group in this process."""

    def __init__(self, group: str, offsets: Offsets, topics: Topics, drivers: Drivers) -> None:
        self.group = group
        self.generation = 0
        self._offsets = offsets
        self._topics = topics
        self._drivers = drivers
        self._lock = threading.RLock()
        self._members: dict[int, GroupConsumer] = {}
        self._next_member = 0

    def join(self, topics: Sequence[str], reset: Reset = Reset.EARLIEST) -> GroupConsumer:
        """Add a consumer to the group, rebalance, and return the consumer."""
        if not topics:
            raise InvalidArgumentError("a consumer needs at least one topic")
        for topic in topics:
            self._topics.get(topic)
        with self._lock:
            consumer = GroupConsumer(self, self._next_member, frozenset(topics), reset, self._drivers)
            self._members[self._next_member] = consumer
            self._next_member += 1
            self.rebalance()
        return consumer

    def leave(self, member: int) -> None:
        with self._lock:
            if self._members.pop(member, None) is not None:
                self.rebalance()

    def rebalance(self) -> None:
        """Reassign the partitions. Needed after a change of the members or of the number of partitions."""
        with self._lock:
            self.generation += 1
            subscriptions = {number: consumer.topics for number, consumer in self._members.items()}
            partitions = {}
            for name in set().union(*subscriptions.values()):
                topic = self._topics.find(name)
                if topic is not None:
                    partitions[name] = topic.config.partitions
            for number, tps in assign_partitions(partitions, subscriptions).items():
                self._members[number].assign(tps)

    def commit(self, member: int, offsets: Mapping[NamedPartition, int]) -> None:
        """Commit for a member that owns the partitions. The lock excludes a concurrent rebalance."""
        with self._lock:
            consumer = self._members.get(member)
            stale = [tp for tp in offsets if consumer is None or tp not in consumer.assignment]
            if stale:
                topic, partition = stale[0]
                raise StaleMemberError(
                    f"partition {partition} of topic {topic!r} is not assigned to this member of group {self.group!r}; "
                    "its owner will read the uncommitted records again"
                )
            commits: dict[TopicPartition, int | Commit] = {
                (self._topics.get(topic).id, partition): offset for (topic, partition), offset in offsets.items()
            }
            self._offsets.commit(self.group, commits)

    def committed(self, tp: NamedPartition) -> int | None:
        topic = self._topics.get(tp[0])
        at = (topic.id, tp[1])
        found = self._offsets.committed(self.group, [at]).get(at)
        return None if found is None else found.offset


class GroupConsumer:
    """One consumer. Used by one thread at a time; a rebalance may revoke its partitions at any time."""

    def __init__(
        self, members: GroupMembers, number: int, topics: frozenset[str], reset: Reset, drivers: Drivers
    ) -> None:
        self.topics = topics
        self._members = members
        self._number = number
        self._reset = reset
        self._drivers = drivers
        self._lock = threading.Lock()
        self._positions: dict[NamedPartition, int | None] = {}
        self._read: dict[NamedPartition, int] = {}
        self._turn = 0
        self._closed = False

    @property
    def assignment(self) -> frozenset[NamedPartition]:
        return frozenset(self._positions)

    def assign(self, tps: Sequence[NamedPartition]) -> None:
        """Apply a new assignment. Partitions that stay keep their positions."""
        with self._lock:
            self._positions = {tp: self._positions.get(tp) for tp in tps}
            self._read = {tp: offset for tp, offset in self._read.items() if tp in self._positions}

    def poll(self, max_records: int = 500, max_bytes: int = READ_BYTES) -> list[Delivered]:
        """Return the next records of this consumer's partitions, round robin. Empty if there are none now."""
        self._require_open()
        found: list[Delivered] = []
        tps = sorted(self.assignment)
        self._turn += 1
        for at in range(len(tps)):
            tp = tps[(at + self._turn) % len(tps)]
            try:
                found += self._poll_one(tp, max_records - len(found), max_bytes)
            except TopicNotFoundError:
                # The topic was deleted while it was read.
                self._members.rebalance()
            if len(found) >= max_records:
                break
        return found

    def _poll_one(self, tp: NamedPartition, max_records: int, max_bytes: int) -> list[Delivered]:
        position = self.position(tp)
        topic, partition = tp
        try:
            batch = self._drivers.read(topic, partition, position, max_records, max_bytes)
        except OffsetOutOfRangeError as error:
            if self._reset is Reset.NONE:
                raise
            position = error.earliest if self._reset is Reset.EARLIEST else error.latest
            batch = self._drivers.read(topic, partition, position, max_records, max_bytes)
        with self._lock:
            if tp not in self._positions:
                return []
            self._positions[tp] = self._read[tp] = batch.next_offset
        return [Delivered(topic, partition, record) for record in batch.records()]

    def position(self, tp: NamedPartition) -> int:
        """Return the offset to read next."""
        known = self._positions.get(tp)
        if known is not None:
            return known
        committed = self._members.committed(tp)
        if committed is not None:
            return committed
        info = self._drivers.info(*tp)
        if self._reset is Reset.NONE:
            raise InvalidArgumentError(
                f"group {self._members.group!r} has no offset in partition {tp[1]} of topic {tp[0]!r}; "
                "reset the group, or join with earliest or latest"
            )
        return info.start_offset if self._reset is Reset.EARLIEST else info.high_watermark

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Continue reading at another offset."""
        with self._lock:
            if (topic, partition) not in self._positions:
                raise StaleMemberError(f"partition {partition} of topic {topic!r} is not assigned to this consumer")
            self._positions[topic, partition] = self._read[topic, partition] = offset

    def commit(self, offsets: Mapping[NamedPartition, int] | None = None) -> None:
        """Commit the positions read so far, or the given next offsets to read."""
        self._require_open()
        with self._lock:
            chosen = dict(self._read) if offsets is None else dict(offsets)
        if chosen:
            self._members.commit(self._number, chosen)
            with self._lock:
                for tp, offset in chosen.items():
                    if self._read.get(tp) == offset:
                        del self._read[tp]

    def close(self, *, commit: bool = False) -> None:
        """Leave the group. Idempotent."""
        if self._closed:
            return
        if commit:
            self.commit()
        self._closed = True
        self._members.leave(self._number)

    def _require_open(self) -> None:
        if self._closed:
            raise StaleMemberError(f"the consumer has left group {self._members.group!r}; join again")
