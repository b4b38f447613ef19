"""Server-side assignors of KIP-848 consumer groups: which member reads which partition.

Each assignor is a deterministic function of the members' subscriptions, the existing topics and the previous target.

    uniform    Member loads differ by at most one, and members keep their partitions where that allows it. If members
               subscribe to different topics: no member that could take over a partition has two fewer than its owner.
    range      Each topic is split into ranges, one per subscriber. Topics with the same subscribers and partition
               count are split alike, so partitions with the same number go to the same member.

Topics with the same subscribers form one pool. Members usually have equal subscriptions, so there is usually one pool,
whatever the number of topics. Cost: one step per partition and member, and a few steps per partition that moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heapreplace
from typing import Final, NamedTuple, TypeAlias

PartitionId: TypeAlias = tuple[bytes, int]
"""Topic id and partition number."""

Assignment: TypeAlias = frozenset[PartitionId]

EMPTY: Final[Assignment] = frozenset()
UNIFORM: Final = "uniform"
RANGE: Final = "range"
_NO_PARTITION: Final = 1 << 31


class TopicSize(NamedTuple):
    """Id and partition count of a topic."""

    id: bytes
    partitions: int


Subscriptions: TypeAlias = Mapping[str, frozenset[str]]
"""Names of existing topics, by member id."""

Assignor: TypeAlias = Callable[
    [Subscriptions, Mapping[str, TopicSize], Mapping[str, Assignment]], dict[str, Assignment]
]


class _Pool(NamedTuple):
    members: list[str]
    topics: list[TopicSize]


def uniform(
    subscriptions: Subscriptions, topics: Mapping[str, TopicSize], previous: Mapping[str, Assignment]
) -> dict[str, Assignment]:
    owners = {partition_id: member for member, partition_ids in previous.items() for partition_id in partition_ids}
    loads = dict.fromkeys(subscriptions, 0)
    per_pool: list[dict[str, list[PartitionId]]] = []
    unassigned: list[list[PartitionId]] = []
    # Members of small pools have fewer partitions to choose from, so distribute the free ones of small pools first.
    for pool in sorted(_pools(subscriptions, topics), key=lambda each: len(each.members)):
        assigned: dict[str, list[PartitionId]] = {member: [] for member in pool.members}
        free: list[PartitionId] = []
        for topic_id, partitions in pool.topics:
            for at in range(partitions):
                assigned.get(owners.get((topic_id, at), ""), free).append((topic_id, at))
        for member, partition_ids in assigned.items():
            loads[member] += len(partition_ids)
        per_pool.append(assigned)
        unassigned.append(free)
    for assigned, free in zip(per_pool, unassigned, strict=True):
        _distribute(assigned, free, loads)
    while any(_balance(assigned, loads) for assigned in per_pool):
        # Terminates, because every move reduces the difference of two loads.
        pass
    assignments: dict[str, list[PartitionId]] = {member: [] for member in subscriptions}
    for assigned in per_pool:
        for member, partition_ids in assigned.items():
            assignments[member] += partition_ids
    return {member: frozenset(partition_ids) for member, partition_ids in assignments.items()}


def _distribute(assigned: dict[str, list[PartitionId]], free: Iterable[PartitionId], loads: dict[str, int]) -> None:
    """Assign free partitions one by one to the members with the lowest load."""
    waiting = iter(free)
    order = sorted(assigned, key=lambda member: (loads[member], member))
    level = loads[order[0]]
    count = 1
    while True:
        while count < len(order) and loads[order[count]] <= level:
            count += 1
        for member in order[:count]:
            partition_id = next(waiting, None)
            if partition_id is None:
                return
            assigned[member].append(partition_id)
            loads[member] += 1
        level += 1


def _balance(assigned: dict[str, list[PartitionId]], loads: dict[str, int]) -> bool:
    """Move partitions from the members with the highest load to those with the lowest. Return whether any moved."""
    has_moved = False
    low = [(loads[member], member) for member in assigned]
    high = [(-loads[member], member) for member, partition_ids in assigned.items() if partition_ids]
    heapify(low)
    heapify(high)
    while high:
        most, donor = high[0]
        if not assigned[donor]:
            heappop(high)
            continue
        if -most != loads[donor]:
            heapreplace(high, (-loads[donor], donor))
            continue
        least, member = low[0]
        if least != loads[member]:
            heapreplace(low, (loads[member], member))
            continue
        if -most - least <= 1:
            break
        assigned[member].append(assigned[donor].pop())
        loads[donor] -= 1
        loads[member] += 1
        has_moved = True
    return has_moved


def by_range(
    subscriptions: Subscriptions, topics: Mapping[str, TopicSize], previous: Mapping[str, Assignment]
) -> dict[str, Assignment]:
    # Members keep their order by lowest partition, so that a new member moves few partitions of the others.
    firsts = {
        member: min((at for _, at in partition_ids), default=_NO_PARTITION)
        for member, partition_ids in previous.items()
    }
    assignments: dict[str, list[PartitionId]] = {member: [] for member in subscriptions}
    for pool in _pools(subscriptions, topics):
        order = sorted(pool.members, key=lambda member: (firsts.get(member, _NO_PARTITION), member))
        for topic_id, partitions in pool.topics:
            size, larger = divmod(partitions, len(order))
            begin = 0
            for number, member in enumerate(order[:partitions]):
                end = begin + size + (number < larger)
                assignments[member] += ((topic_id, at) for at in range(begin, end))
                begin = end
    return {member: frozenset(partition_ids) for member, partition_ids in assignments.items()}


def _pools(subscriptions: Subscriptions, topics: Mapping[str, TopicSize]) -> list[_Pool]:
    """Group the subscribed topics by their set of subscribers."""
    alike: dict[frozenset[str], list[str]] = {}
    for member in sorted(subscriptions):
        alike.setdefault(subscriptions[member], []).append(member)
    subscribers: dict[str, tuple[int, ...]] = {}
    for number, names in enumerate(alike):
        for name in names:
            subscribers[name] = (*subscribers.get(name, ()), number)
    members = list(alike.values())
    pools: dict[tuple[int, ...], _Pool] = {}
    for name in sorted(subscribers):
        numbers = subscribers[name]
        pool = pools.get(numbers)
        if pool is None:
            pool = pools[numbers] = _Pool([member for number in numbers for member in members[number]], [])
        pool.topics.append(topics[name])
    return list(pools.values())


ASSIGNORS: Final[Mapping[str, Assignor]] = {UNIFORM: uniform, RANGE: by_range}
