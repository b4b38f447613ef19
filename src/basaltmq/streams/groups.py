"""Consumer groups: what they have read, what is left, and consumers that share a topic's partitions.

`Groups` is the operator's view: list, lag, reset, delete. `GroupMembers` is the group inside one process: consumers
join, every partition of the topics they ask for belongs to exactly one of them, and each change of members begins a
generation in which partitions are dealt out anew. A consumer reads its partitions in turns and commits where it
stands. After a change of members it goes on from what was committed; what another consumer has been given it may no
longer commit (StaleMemberError), so two of them never write over each other's place.

Delivery is at least once: what was read and not committed is read again by whoever gets the partition.
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
from basaltmq.streams.adapter import READ_BYTES, Otherwise
from basaltmq.streams.drivers import Drivers
from basaltmq.streams.offsets import Commit, Offsets, TopicPartition
from basaltmq.streams.topics import Topics

GROUPS_LISTED_MAX: Final = 1_000
"""Groups in one page."""

Place = tuple[str, int]
"""A topic's name and a partition."""


class Reset(enum.StrEnum):
    """Where a group begins when it has no offset, or one that is no longer kept."""

    EARLIEST = "earliest"
    LATEST = "latest"
    NONE = "none"
    """Nowhere: the error is raised."""


class PartitionLag(msgspec.Struct, frozen=True):
    """Where a group stands in one partition."""

    topic: str
    partition: int
    committed: int
    start_offset: int
    end_offset: int
    """The high watermark."""
    lag: int
    """Offsets that can still be read; what retention took is not counted."""
    metadata: str = ""


class Delivered(msgspec.Struct, frozen=True, gc=False):
    """A record with where it came from."""

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
    """The groups of one store, as an operator sees them."""

    def __init__(self, offsets: Offsets, topics: Topics, drivers: Drivers) -> None:
        self._offsets = offsets
        self._topics = topics
        self._drivers = drivers

    def page(self, *, start_after: str | None = None, limit: int = GROUPS_LISTED_MAX) -> list[str]:
        """Names of groups, in the order of their rows."""
        return list(islice(self._offsets.groups(start_after), min(limit, GROUPS_LISTED_MAX)))

    def lag(self, group: str) -> list[PartitionLag]:
        """Where a group stands, by topic and partition. Offsets of topics that are gone are not shown."""
        committed = self._offsets.of_group(group)
        if not committed:
            raise GroupNotFoundError(f"the group {group!r} has committed nothing")
        found = []
        for (topic_id, partition), commit in committed.items():
            topic = self._topics.by_id(topic_id)
            if topic is not None and partition < topic.config.partitions:
                found.append(self._lag(topic.name, partition, commit))
        return sorted(found, key=lambda each: (each.topic, each.partition))

    def reset(
        self, group: str, topic: str, to: Reset | int, *, partition: int | None = None, timestamp_ms: int | None = None
    ) -> dict[int, int]:
        """Move a group: to the ends, to an offset, or to a time (then `to` is for partitions without such records)."""
        found = self._topics.get(topic)
        partitions = range(found.config.partitions) if partition is None else (partition,)
        chosen: dict[int, int] = {}
        for each in partitions:
            info = self._drivers.info(topic, each)
            if timestamp_ms is not None:
                otherwise = Otherwise.EARLIEST if to is Reset.EARLIEST else Otherwise.LATEST
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
                raise InvalidArgumentError(
                    f"cannot reset group {group!r} to {to!r}; give earliest, latest or an offset"
                )
        self._offsets.commit(group, {(found.id, each): offset for each, offset in chosen.items()})
        return chosen

    def delete(self, group: str) -> int:
        """Forget a group's offsets, in all topics; how many there were."""
        gone = self._offsets.delete(group)
        if not gone:
            raise GroupNotFoundError(f"the group {group!r} has committed nothing")
        return gone

    def _lag(self, topic: str, partition: int, commit: Commit) -> PartitionLag:
        info = self._drivers.info(topic, partition)
        lag = max(0, info.high_watermark - max(commit.offset, info.start_offset))
        return PartitionLag(
            topic, partition, commit.offset, info.start_offset, info.high_watermark, lag, commit.metadata
        )


def assigned(partitions: Mapping[str, int], wishes: Mapping[int, frozenset[str]]) -> dict[int, list[Place]]:
    """Deal out partitions: per topic in turns over the members that want it, shares differing by at most one.

    Members are dealt to in the order of how little they have, so that many small topics spread as well.
    """
    dealt: dict[int, list[Place]] = {member: [] for member in wishes}
    for topic in sorted(partitions):
        wanting = [member for member in sorted(wishes) if topic in wishes[member]]
        for partition in range(partitions[topic]):
            least = min(wanting, key=lambda member: (len(dealt[member]), member))
            dealt[least].append((topic, partition))
    return dealt


class GroupMembers:
    """One group inside this process."""

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
        """A consumer that shares the topics with the group's others."""
        if not topics:
            raise InvalidArgumentError("a consumer reads at least one topic")
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
        """Deal the partitions out anew: after members or the number of partitions changed."""
        with self._lock:
            self.generation += 1
            wishes = {number: consumer.topics for number, consumer in self._members.items()}
            partitions = {}
            for name in set().union(*wishes.values()):
                topic = self._topics.find(name)
                if topic is not None:
                    partitions[name] = topic.config.partitions
            for number, places in assigned(partitions, wishes).items():
                self._members[number].take(places)

    def commit(self, member: int, places: Mapping[Place, int]) -> None:
        """Commit for a member that owns the places. Under the lock, so that no partition changes hands meanwhile."""
        with self._lock:
            consumer = self._members.get(member)
            stale = [place for place in places if consumer is None or place not in consumer.assignment]
            if stale:
                topic, partition = stale[0]
                raise StaleMemberError(
                    f"partition {partition} of topic {topic!r} belongs to another consumer of group {self.group!r}; "
                    "what was read of it will be read there"
                )
            commits: dict[TopicPartition, int | Commit] = {
                (self._topics.get(topic).id, partition): offset for (topic, partition), offset in places.items()
            }
            self._offsets.commit(self.group, commits)

    def committed(self, place: Place) -> int | None:
        topic = self._topics.get(place[0])
        at = (topic.id, place[1])
        found = self._offsets.committed(self.group, [at]).get(at)
        return None if found is None else found.offset


class GroupConsumer:
    """One consumer. Used by one thread at a time; the group may take partitions from it at any time."""

    def __init__(
        self, members: GroupMembers, number: int, topics: frozenset[str], reset: Reset, drivers: Drivers
    ) -> None:
        self.topics = topics
        self._members = members
        self._number = number
        self._reset = reset
        self._drivers = drivers
        self._lock = threading.Lock()
        self._positions: dict[Place, int | None] = {}
        self._read: dict[Place, int] = {}
        self._turn = 0
        self._closed = False

    @property
    def assignment(self) -> frozenset[Place]:
        return frozenset(self._positions)

    def take(self, places: Sequence[Place]) -> None:
        """The group deals out: keep the place in what stays, start afresh in what comes, drop what goes."""
        with self._lock:
            self._positions = {place: self._positions.get(place) for place in places}
            self._read = {place: offset for place, offset in self._read.items() if place in self._positions}

    def poll(self, max_records: int = 500, max_bytes: int = READ_BYTES) -> list[Delivered]:
        """The next records of this consumer's partitions, in turns; empty if there are none at the moment."""
        self._require_open()
        found: list[Delivered] = []
        places = sorted(self.assignment)
        self._turn += 1
        for at in range(len(places)):
            place = places[(at + self._turn) % len(places)]
            try:
                found += self._poll_one(place, max_records - len(found), max_bytes)
            except TopicNotFoundError:
                # Deleted while it was read: there is nothing more to come.
                self._members.rebalance()
            if len(found) >= max_records:
                break
        return found

    def _poll_one(self, place: Place, max_records: int, max_bytes: int) -> list[Delivered]:
        position = self.position(place)
        topic, partition = place
        try:
            batch = self._drivers.read(topic, partition, position, max_records, max_bytes)
        except OffsetOutOfRangeError as error:
            if self._reset is Reset.NONE:
                raise
            position = error.earliest if self._reset is Reset.EARLIEST else error.latest
            batch = self._drivers.read(topic, partition, position, max_records, max_bytes)
        with self._lock:
            if place not in self._positions:
                return []
            self._positions[place] = self._read[place] = batch.next_offset
        return [Delivered(topic, partition, record) for record in batch.records()]

    def position(self, place: Place) -> int:
        """The offset read next."""
        known = self._positions.get(place)
        if known is not None:
            return known
        committed = self._members.committed(place)
        if committed is not None:
            return committed
        info = self._drivers.info(*place)
        if self._reset is Reset.NONE:
            raise InvalidArgumentError(
                f"group {self._members.group!r} has no offset in partition {place[1]} of topic {place[0]!r}; "
                "reset it, or begin at earliest or latest"
            )
        return info.start_offset if self._reset is Reset.EARLIEST else info.high_watermark

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Read on from another offset."""
        with self._lock:
            if (topic, partition) not in self._positions:
                raise StaleMemberError(f"partition {partition} of topic {topic!r} is not this consumer's")
            self._positions[topic, partition] = self._read[topic, partition] = offset

    def commit(self, places: Mapping[Place, int] | None = None) -> None:
        """Commit what was read, or the offsets given (the next ones to read)."""
        self._require_open()
        with self._lock:
            chosen = dict(self._read) if places is None else dict(places)
        if chosen:
            self._members.commit(self._number, chosen)
            with self._lock:
                for place, offset in chosen.items():
                    if self._read.get(place) == offset:
                        del self._read[place]

    def close(self, *, commit: bool = False) -> None:
        """Leave the group. Closing twice is fine."""
        if self._closed:
            return
        if commit:
            self.commit()
        self._closed = True
        self._members.leave(self._number)

    def _require_open(self) -> None:
        if self._closed:
            raise StaleMemberError(f"the consumer has left group {self._members.group!r}; join again")
