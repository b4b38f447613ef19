"""A consumer group with clients that join, leave, become silent, lose responses or revoke late, and changing topics.

Clients follow the protocol. They own assigned partitions until they have revoked them, report changes of what they own,
and report everything after a lost response. At all times:

- no two members own the same partition, neither in fact nor in the group's state;
- the epochs of the group and of members only grow;
- without further changes, every partition is owned as in the target, and evenly with `uniform`.
"""

from __future__ import annotations

import random
from typing import Any
from uuid import UUID

import pytest

from basaltmq.protocols.kafka.groups import consumer_group as module
from basaltmq.protocols.kafka.groups.assignors import RANGE, UNIFORM, PartitionId, TopicSize
from basaltmq.protocols.kafka.groups.consumer_group import ConsumerGroup, State, Timing
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.errors import Refused

SEEDS = 40
STEPS = 250
QUIET_ROUNDS = 25
"""Heartbeats, one per second: a session timeout, the longest delay of a target, and a few more."""

TIMING = Timing(session_ms=10_000, heartbeat_ms=1_000)
NAMES = ("a", "b", "c", "other")
PATTERN = "[a-c]"
SUBSCRIPTIONS: tuple[tuple[list[str], str], ...] = ((["a"], ""), (["a", "b"], ""), ([*NAMES], ""), ([], PATTERN))


class Client:
    """A member, from the view of the client."""

    def __init__(self, name: str, instance: str | None, subscription: tuple[list[str], str], assignor: str) -> None:
        self.name = name
        self.instance = instance
        self.subscription = subscription
        self.assignor = assignor
        self.epoch = 0
        self.owned: frozenset[PartitionId] = frozenset()
        self.wanted: frozenset[PartitionId] = frozenset()
        """The assignment. The member owns more until it has revoked the rest."""
        self.said: frozenset[PartitionId] | None = None
        self.is_full = True
        self.is_alive = True

    def fenced(self) -> None:
        self.epoch = 0
        self.owned = self.wanted = frozenset()
        self.is_full = True

    def let_go(self) -> None:
        self.owned = self.wanted


class Harness:
    """A group, its clients and topics."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_ms = 0
        self.topics: dict[str, TopicSize] = {}
        self.made = 0
        self.group = ConsumerGroup("g", self.topics.get, timing=TIMING)
        self.clients: list[Client] = []
        self.assignors = self.rng.choice([[UNIFORM], [RANGE], [UNIFORM, RANGE]])
        self.subscriptions = self.rng.choice([SUBSCRIPTIONS, SUBSCRIPTIONS[:1], SUBSCRIPTIONS[3:]])
        for name in NAMES[: self.rng.randint(0, len(NAMES))]:
            self.make(name)

    def make(self, name: str) -> None:
        self.made += 1
        self.topics[name] = TopicSize(self.made.to_bytes(16, "big"), self.rng.randint(1, 8))
        list(self.group.topics_changing(frozenset((name,)), self.now_ms))

    def step(self) -> None:
        before = self.group.epoch
        choices = (
            [self.join] * 3 + [self.beat] * 20 + [self.let_go] * 8 + [self.leave, self.die, self.wait, self.change]
        )
        self.rng.choice([*choices, self.subscribe, self.away])()
        assert self.group.epoch >= before, "the group's epoch decreased"
        self.check()

    def join(self) -> None:
        if len(self.clients) >= 6:
            return
        self.made += 1
        instance = self.rng.choice([None, None, f"i{self.made}"])
        client = Client(f"m{self.made}", instance, self.rng.choice(self.subscriptions), self.rng.choice(self.assignors))
        self.clients.append(client)
        self.heartbeat(client)

    def beat(self) -> None:
        alive = [each for each in self.clients if each.is_alive]
        if alive:
            self.heartbeat(self.rng.choice(alive), is_lossy=True)

    def let_go(self) -> None:
        if self.clients:
            self.rng.choice(self.clients).let_go()

    def leave(self) -> None:
        if self.clients:
            client = self.rng.choice(self.clients)
            self.clients.remove(client)
            if client.epoch > 0:
                self.send(client, member_epoch=-1)

    def away(self) -> None:
        """Restart a static member with another id."""
        static = [each for each in self.clients if each.instance is not None and each.epoch > 0 and each.is_alive]
        if static:
            client = self.rng.choice(static)
            epoch, target = self.group.epoch, self.group.target.get(client.name, frozenset())
            is_same, was_waiting = not client.is_full, self.group.target_epoch < epoch
            answer = self.send(client, member_epoch=-2)
            client.fenced()
            if answer is None:
                return
            self.made += 1
            client.name = f"m{self.made}"
            if self.rng.random() < 0.7:
                self.heartbeat(client)
            if is_same and client.epoch:
                assert self.group.epoch == epoch, "the return of a static member caused a new assignment"
                assert was_waiting or self.group.target[client.name] == target

    def die(self) -> None:
        if self.clients:
            self.rng.choice(self.clients).is_alive = False

    def wait(self) -> None:
        self.now_ms += self.rng.choice([100, 1_000, 3_000, TIMING.session_ms + 1])
        gone = set(self.group.members)
        self.group.expire(self.now_ms)
        gone -= set(self.group.members)
        # Members that stay silent are not waited for. All others get the assignment in time.
        self.clients = [each for each in self.clients if each.is_alive or each.name in self.group.members]

    def change(self) -> None:
        name = self.rng.choice(NAMES)
        size = self.topics.get(name)
        if size is None:
            self.make(name)
        elif self.rng.random() < 0.4:
            del self.topics[name]
            list(self.group.topics_changing(frozenset((name,)), self.now_ms))
        else:
            self.topics[name] = size._replace(partitions=size.partitions + self.rng.randint(1, 3))
            list(self.group.topics_changing(frozenset((name,)), self.now_ms))

    def subscribe(self) -> None:
        if self.clients:
            client = self.rng.choice(self.clients)
            client.subscription = self.rng.choice(self.subscriptions)
            client.is_full = True

    def heartbeat(self, client: Client, *, is_lossy: bool = False) -> None:
        epoch = client.epoch
        answer = self.send(client)
        self.search()
        if answer is None:
            return
        if is_lossy and self.rng.random() < 0.1:
            # The response is lost, so the client reports everything again.
            client.is_full = True
            return
        assert answer["member_epoch"] >= epoch, "a member's epoch decreased"
        assert answer["member_epoch"] > 0
        client.epoch = answer["member_epoch"]
        client.is_full = False
        reported = answer.get("assignment")
        if reported is not None:
            client.wanted = places(reported)
            client.owned |= client.wanted
            if self.rng.random() < 0.7:
                client.let_go()

    def send(self, client: Client, member_epoch: int | None = None) -> dict[str, Any] | None:
        """Send a heartbeat. Return None if the member must rejoin, which it does."""
        epoch = client.epoch if member_epoch is None else member_epoch
        names, pattern = client.subscription
        is_full = client.is_full or epoch == 0
        says = is_full or client.owned != client.said
        asked = {
            "group_id": "g",
            "member_id": client.name,
            "member_epoch": epoch,
            "instance_id": client.instance,
            "rack_id": None,
            "rebalance_timeout_ms": 2_500 if is_full else -1,
            "subscribed_topic_names": names if is_full else None,
            "subscribed_topic_regex": pattern if is_full else None,
            "server_assignor": client.assignor if is_full else None,
            "topic_partitions": reports_of(client.owned) if says else None,
        }
        if says:
            client.said = client.owned
        try:
            if epoch < 0:
                return self.group.leave(asked, self.now_ms)
            return self.group.heartbeat(asked, "client", "host", lambda name: True, self.now_ms)
        except Refused as error:
            refused = error
        if refused.code not in (e.FENCED_MEMBER_EPOCH, e.UNKNOWN_MEMBER_ID, e.UNRELEASED_INSTANCE_ID):
            raise refused
        client.fenced()
        return None

    def search(self) -> None:
        for pattern in self.group.unsearched():
            self.group.found(pattern, pattern.among(self.topics), self.now_ms)

    def check(self) -> None:
        seen: dict[PartitionId, str] = {}
        for client in self.clients:
            member = self.group.members.get(client.name)
            if member is None:
                # The group removed the member, which owns nothing any more.
                continue
            for place in client.owned:
                assert seen.setdefault(place, client.name) == client.name, "two members own a partition"
                assert self.group.owner(place) == client.name, "the group considers an owned partition free"
            assert not member.assigned & member.revoking
            assert all(self.group.owner(place) == client.name for place in member.assigned | member.revoking)

    def come_to_rest(self) -> None:
        self.clients = [each for each in self.clients if each.is_alive]
        for _ in range(QUIET_ROUNDS):
            self.now_ms += TIMING.heartbeat_ms
            self.group.expire(self.now_ms)
            for client in self.clients:
                self.heartbeat(client)
                client.let_go()
                self.check()
        if not self.clients:
            self.group.expire(self.now_ms + TIMING.session_ms)
            assert self.group.state is State.EMPTY
            return
        assert self.group.state is State.STABLE, self.group.state
        assert {client.name for client in self.clients} == set(self.group.members)
        for client in self.clients:
            assert client.owned == self.group.target[client.name]
            assert client.epoch == self.group.epoch == self.group.target_epoch
        self.check_target()

    def check_target(self) -> None:
        wanted = {client.name: self.subscribed(client) for client in self.clients}
        every = {
            (self.topics[name].id, at)
            for names in wanted.values()
            for name in names
            for at in range(self.topics[name].partitions)
        }
        owned = [place for client in self.clients for place in client.owned]
        assert sorted(owned) == sorted(every), "a partition has no owner, or one that is not subscribed"
        named = {size.id: name for name, size in self.topics.items()}
        for client in self.clients:
            assert all(named[topic_id] in wanted[client.name] for topic_id, _ in client.owned)
            if self.group.inputs.assignor != UNIFORM:
                continue
            for other in self.clients:
                # Partition counts of members with the same topics differ by at most one.
                could = [place for place in client.owned if named[place[0]] in wanted[other.name]]
                assert not could or len(client.owned) - len(other.owned) <= 1

    def subscribed(self, client: Client) -> set[str]:
        names, pattern = client.subscription
        return {name for name in self.topics if name in names or (pattern and name in "abc")}


def places(reported: dict[str, Any]) -> frozenset[PartitionId]:
    return frozenset((each["topic_id"].bytes, at) for each in reported["topic_partitions"] for at in each["partitions"])


def reports_of(owned: frozenset[PartitionId]) -> list[dict[str, Any]]:
    return [{"topic_id": UUID(bytes=topic_id), "partitions": [at]} for topic_id, at in sorted(owned)]


@pytest.mark.spec("B7")
@pytest.mark.parametrize("is_gathered", [False, True], ids=["at once", "gathered"])
def test_partitions_have_one_owner_and_members_reach_the_target(
    is_gathered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_gathered:
        # Delay targets of ten partitions like those of a hundred thousand.
        monkeypatch.setattr(module, "RATE_LIMITED_PARTITIONS", 0)
        monkeypatch.setattr(module, "PARTITIONS_PER_MS", 0.02)
    first = random.SystemRandom().randrange(1 << 40)
    for seed in range(first, first + SEEDS):
        print(f"seed {seed}")
        harness = Harness(seed)
        for _ in range(STEPS):
            harness.step()
        harness.come_to_rest()
