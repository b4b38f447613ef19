"""Assignors: every partition goes to a subscribed member, evenly, and as few partitions as possible move."""

from __future__ import annotations

import random
from uuid import UUID

from basaltmq.protocols.kafka.groups.assignors import Assignment, TopicSize, by_range, uniform


def topics(**partitions: int) -> dict[str, TopicSize]:
    return {name: TopicSize(UUID(int=number).bytes, count) for number, (name, count) in enumerate(partitions.items())}


def everybody(names: str, *subscribed: str) -> dict[str, frozenset[str]]:
    return dict.fromkeys(names, frozenset(subscribed))


def moved(before: dict[str, Assignment], after: dict[str, Assignment]) -> int:
    """Return the partitions whose owner changed."""
    held = {place: member for member, places in before.items() for place in places}
    return sum(held.get(place, member) != member for member, places in after.items() for place in places)


def test_the_uniform_assignor_moves_as_few_partitions_as_possible() -> None:
    there = topics(t=7, u=5)
    before = uniform(everybody("abc", "t", "u"), there, {})
    assert sorted(map(len, before.values())) == [4, 4, 4]
    joined = uniform(everybody("abcd", "t", "u"), there, before)
    assert (sorted(map(len, joined.values())), moved(before, joined)) == ([3, 3, 3, 3], 3)
    left = uniform(everybody("abd", "t", "u"), there, {name: joined[name] for name in "abd"})
    assert (sorted(map(len, left.values())), moved(joined, left)) == ([4, 4, 4], 3)
    assert uniform(everybody("abd", "t", "u"), there, left) == left
    wider = uniform(everybody("abd", "t", "u"), topics(t=8, u=5), left)
    assert (sorted(map(len, wider.values())), moved(left, wider)) == ([4, 4, 5], 0)


def test_the_uniform_assignor_spreads_one_topic_over_all_members() -> None:
    found = uniform(everybody("abcd", "t", "u"), topics(t=4, u=4), {})
    for share in found.values():
        assert {topic_id for topic_id, _ in share} == {UUID(int=0).bytes, UUID(int=1).bytes}


def test_assignment_is_balanced_for_any_subscriptions() -> None:
    seed = random.SystemRandom().randrange(1 << 40)
    print(f"seed {seed}")
    rng = random.Random(seed)
    held: dict[str, Assignment] = {}
    for _ in range(300):
        there = topics(**{name: rng.randint(1, 9) for name in "tuvw"})
        subscriptions = {
            name: frozenset(rng.sample("tuvw", rng.randint(0, 4))) for name in "abcdef"[: rng.randint(1, 6)]
        }
        held = uniform(subscriptions, there, {name: held.get(name, frozenset()) for name in subscriptions})
        assert set(held) == set(subscriptions)
        names = {size.id: name for name, size in there.items()}
        dealt = [place for share in held.values() for place in share]
        asked = frozenset[str]().union(*subscriptions.values())
        assert sorted(dealt) == sorted((there[name].id, at) for name in asked for at in range(there[name].partitions))
        for member, share in held.items():
            assert all(names[topic_id] in subscriptions[member] for topic_id, _ in share)
            for other, less in held.items():
                could = any(names[topic_id] in subscriptions[other] for topic_id, _ in share)
                assert not could or len(share) - len(less) <= 1


def test_the_range_assignor_splits_topics_alike_and_keeps_low_partitions_in_place() -> None:
    there = topics(t=5, u=5, small=1)
    before = by_range(everybody("ab", "t", "u", "small"), there, {})
    assert {at for _, at in before["a"]} == {0, 1, 2}
    assert sorted(at for _, at in before["b"]) == [3, 3, 4, 4]
    joined = by_range(everybody("Zab", "t", "u", "small"), there, before)
    assert sorted(at for _, at in joined["a"]) == [0, 0, 0, 1, 1]
    assert sorted(at for _, at in joined["b"]) == [2, 2, 3, 3]
    assert sorted(at for _, at in joined["Z"]) == [4, 4], "who comes last is last, whatever its name"
