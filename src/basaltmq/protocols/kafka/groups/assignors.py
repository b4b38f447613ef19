"""Who is to read which partition: the assignors a consumer group can ask for by name.

Both are functions of the members' subscriptions, the topics there are and what members were to read before. Nothing in
them is random: the same question has the same answer.

    uniform    shares differ by one at most, and what a member has it keeps where that allows it. Where members
               subscribe to different topics, nobody who could take a partition of a member has two fewer than it.
    range      every topic is cut into runs, one for each of its subscribers; topics with the same subscribers and as
               many partitions are cut alike, so that partitions of the same number meet in one member.

Topics with the same subscribers are one pool: members that subscribe to the same topics, which is nearly always all of
them, make one pool whatever the number of topics. Cost: one step for each partition and member, and a few for each
partition that moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heapreplace
from typing import Final, NamedTuple, TypeAlias

Place: TypeAlias = tuple[bytes, int]
"""A topic's id and a partition of it."""

Share: TypeAlias = frozenset[Place]

EMPTY: Final[Share] = frozenset()
UNIFORM: Final = "uniform"
RANGE: Final = "range"
_NOWHERE: Final = 1 << 31


class TopicSize(NamedTuple):
    """A topic as far as assignors care."""

    id: bytes
    partitions: int


Subscriptions: TypeAlias = Mapping[str, frozenset[str]]
"""Names of topics that are there, by member."""

Assignor: TypeAlias = Callable[[Subscriptions, Mapping[str, TopicSize], Mapping[str, Share]], dict[str, Share]]


class _Pool(NamedTuple):
    members: list[str]
    topics: list[TopicSize]


def uniform(
    subscriptions: Subscriptions, topics: Mapping[str, TopicSize], held: Mapping[str, Share]
) -> dict[str, Share]:
    holders = {place: member for member, places in held.items() for place in places}
    loads = dict.fromkeys(subscriptions, 0)
    hands: list[dict[str, list[Place]]] = []
    loose: list[list[Place]] = []
    # Members of small pools have fewer to take from, so what is loose there is dealt out first.
    for pool in sorted(_pools(subscriptions, topics), key=lambda each: len(each.members)):
        hand: dict[str, list[Place]] = {member: [] for member in pool.members}
        free: list[Place] = []
        for topic_id, partitions in pool.topics:
            for at in range(partitions):
                hand.get(holders.get((topic_id, at), ""), free).append((topic_id, at))
        for member, places in hand.items():
            loads[member] += len(places)
        hands.append(hand)
        loose.append(free)
    for hand, free in zip(hands, loose, strict=True):
        _deal(hand, free, loads)
    while any(_level(hand, loads) for hand in hands):
        # Every move brings two loads closer together, so this ends.
        pass
    shares: dict[str, list[Place]] = {member: [] for member in subscriptions}
    for hand in hands:
        for member, places in hand.items():
            shares[member] += places
    return {member: frozenset(places) for member, places in shares.items()}


def _deal(hand: dict[str, list[Place]], free: Iterable[Place], loads: dict[str, int]) -> None:
    """Deal out what nobody has, one to each of those with least, round after round."""
    waiting = iter(free)
    order = sorted(hand, key=lambda member: (loads[member], member))
    level = loads[order[0]]
    count = 1
    while True:
        while count < len(order) and loads[order[count]] <= level:
            count += 1
        for member in order[:count]:
            place = next(waiting, None)
            if place is None:
                return
            hand[member].append(place)
            loads[member] += 1
        level += 1


def _level(hand: dict[str, list[Place]], loads: dict[str, int]) -> bool:
    """Let those with most give to those with least; whether anything moved."""
    has_moved = False
    low = [(loads[member], member) for member in hand]
    high = [(-loads[member], member) for member, places in hand.items() if places]
    heapify(low)
    heapify(high)
    while high:
        most, giver = high[0]
        if not hand[giver]:
            heappop(high)
            continue
        if -most != loads[giver]:
            heapreplace(high, (-loads[giver], giver))
            continue
        least, taker = low[0]
        if least != loads[taker]:
            heapreplace(low, (loads[taker], taker))
            continue
        if -most - least <= 1:
            break
        hand[taker].append(hand[giver].pop())
        loads[giver] -= 1
        loads[taker] += 1
        has_moved = True
    return has_moved


def by_range(
    subscriptions: Subscriptions, topics: Mapping[str, TopicSize], held: Mapping[str, Share]
) -> dict[str, Share]:
    # Whoever has low numbers goes on having them, so that a member that comes shifts the others by little.
    firsts = {member: min((at for _, at in places), default=_NOWHERE) for member, places in held.items()}
    shares: dict[str, list[Place]] = {member: [] for member in subscriptions}
    for pool in _pools(subscriptions, topics):
        order = sorted(pool.members, key=lambda member: (firsts.get(member, _NOWHERE), member))
        for topic_id, partitions in pool.topics:
            size, larger = divmod(partitions, len(order))
            begin = 0
            for number, member in enumerate(order[:partitions]):
                end = begin + size + (number < larger)
                shares[member] += ((topic_id, at) for at in range(begin, end))
                begin = end
    return {member: frozenset(places) for member, places in shares.items()}


def _pools(subscriptions: Subscriptions, topics: Mapping[str, TopicSize]) -> list[_Pool]:
    """Topics that somebody subscribes to, put together where their subscribers are the same."""
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
