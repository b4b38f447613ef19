"""State machine of one KIP-848 consumer group: the broker assigns, and members reconcile at their heartbeats.

    a change ─> group epoch + 1 ─> target assignment of that epoch
                                        │  at each heartbeat of a member
                     assigned ⊄ target:  the member must revoke, and keeps its epoch until its heartbeat confirms it
                     else:               the member moves to the target epoch with the partitions of its target that
                                         are free, and gets the others as soon as their owners release them

A large target is computed in a thread. Until it is there, members keep what they have and heartbeat more often.

A target changes when members join or leave, and when subscriptions, assignors or topics change. Only these inputs are
compared. So a returning static member or a heartbeat without changes moves no partition.

A member identifies itself by member id and member epoch. It is removed when its session timeout passes without a
heartbeat, or when it does not revoke within its rebalance timeout. An unknown or fenced member gets an error, revokes
everything, and rejoins with epoch 0. Epoch -1 leaves. Epoch -2 keeps a static member's place for its session timeout.

The class has no clock and no event loop: callers pass the time. `ConsumerGroups` owns timers and rows. Invariants: a
partition has at most one owner (`Ownership`), and epochs only increase. When nothing changes, every member reaches its
target assignment after a few heartbeats.
"""

from __future__ import annotations

import enum
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple
from uuid import UUID

from basaltmq.protocols.kafka.groups.assignors import ASSIGNORS, EMPTY, UNIFORM, Assignment, PartitionId, TopicSize
from basaltmq.protocols.kafka.groups.consumer_member import JOINING, NEVER_MS, STATIC_LEAVE, ConsumerMember
from basaltmq.protocols.kafka.groups.ownership import Ownership
from basaltmq.protocols.kafka.groups.topic_pattern import TopicPattern
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.errors import Refused
from basaltmq.protocols.kafka.wire.schema import Fields

MEMBERS_MAX: Final = 10_000
WAITING_HEARTBEAT_MS: Final = 500
"""Heartbeat interval of a member that waits for partitions, because it gets them only in a heartbeat response."""

RATE_LIMITED_PARTITIONS: Final = 5_000
"""Partition count above which targets are rate limited. A target for 100,000 partitions takes 0.2 s, and 1000 members
that start together would compute 1000 of them."""

PARTITIONS_PER_MS: Final = 50
"""Rate limit: minimum time between targets is 1 ms per this many partitions."""

ASSIGNED_HERE_MAX: Final = 2_000
"""Partition count up to which a target is computed at once, which takes up to 5 ms."""

LONG_AGO_MS: Final = -(1 << 62)

Lookup = Callable[[str], TopicSize | None]


class State(enum.StrEnum):
    EMPTY = "Empty"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"


class Timing(NamedTuple):
    """Session timeout and heartbeat interval of the members."""

    session_ms: int = 45_000
    heartbeat_ms: int = 5_000


class TargetInputs(NamedTuple):
    """The inputs of a target assignment."""

    assignor: str
    subscriptions: Mapping[str, frozenset[str]]
    topics: Mapping[str, TopicSize]


class ConsumerGroup:
    """A KIP-848 consumer group."""

    def __init__(
        self,
        name: str,
        lookup: Lookup,
        epoch: int = 0,
        timing: Timing | None = None,
        compute: Callable[[ConsumerGroup], object] | None = None,
    ) -> None:
        """`compute` computes a large target elsewhere: it calls `assignment` there, and then `assigned` here."""
        self.name = name
        self.timing = timing or Timing()
        self.epoch = epoch
        self.target: dict[str, Assignment] = {}
        self.target_epoch = epoch
        self.members: dict[str, ConsumerMember] = {}
        self.patterns: dict[str, TopicPattern] = {}
        self.inputs = TargetInputs(UNIFORM, {}, {})
        self._lookup = lookup
        self._compute = compute
        self.is_computing = False
        """Whether `compute` is to call `assigned`."""
        self._static: dict[str, str] = {}
        self._owners = Ownership()
        self._subscribed_names: frozenset[str] = frozenset()
        """Topics that members subscribe to by name, whether they exist or not."""
        self._assigned_at_ms = LONG_AGO_MS

    @property
    def state(self) -> State:
        if not self.members:
            return State.EMPTY
        if self.target_epoch != self.epoch:
            return State.ASSIGNING
        is_stable = all(
            each.has_reached(self.target_epoch, self.target.get(each.id, EMPTY)) for each in self.members.values()
        )
        return State.STABLE if is_stable else State.RECONCILING

    def heartbeat(self, body: Fields, client_id: str, host: str, may: Callable[[str], bool], now_ms: int) -> Fields:
        """Handle a heartbeat or a join. Return the response, or raise Refused with nothing changed."""
        owned = _owned(body)
        pattern = self._pattern(body["subscribed_topic_regex"], may)
        member = self._resolve_member(body, owned)
        if pattern is not None:
            self.patterns[pattern.text], pattern.may = pattern, may
        assigned = member.assigned
        if owned is not None:
            member.owned = owned
        is_changed = member.update(body) | (member.id not in self.members)
        member.client_id, member.host = client_id, host
        member.session_ends_at_ms = now_ms + self.timing.session_ms
        if member.id not in self.members:
            self.members[member.id] = member
        if member.instance is not None:
            self._static[member.instance] = member.id
        if is_changed:
            self._refresh(now_ms)
        elif self.target_epoch != self.epoch:
            self._update_target(now_ms)
        self._reconcile(member, now_ms)
        response: Fields = {
            "member_id": member.id,
            "member_epoch": member.epoch,
            "heartbeat_interval_ms": self._interval_ms(member),
        }
        is_full = body["rebalance_timeout_ms"] != -1 and owned is not None and _has_subscription(body)
        if is_full or body["member_epoch"] == JOINING or member.assigned != assigned:
            response["assignment"] = {"topic_partitions": by_topic(member.assigned)}
        return response

    def leave(self, body: Fields, now_ms: int) -> Fields:
        """Remove a member, or mark a static member as away."""
        member = self._known_member(body["member_id"], body["instance_id"])
        if body["member_epoch"] == STATIC_LEAVE:
            self._owners.release(member.id, member.revoking)
            member.revoking, member.revoke_deadline_ms = EMPTY, NEVER_MS
            member.epoch = STATIC_LEAVE
            member.session_ends_at_ms = now_ms + self.timing.session_ms
        else:
            self._drop(member)
            self._refresh(now_ms)
        return {"member_id": member.id, "member_epoch": body["member_epoch"]}

    def expire(self, now_ms: int) -> int:
        """Remove the members whose deadline has passed. Return their number."""
        late = [member for member in self.members.values() if member.deadline_ms <= now_ms]
        for member in late:
            self._drop(member)
        if late:
            self._refresh(now_ms)
        return len(late)

    def deadline_ms(self) -> int:
        """Return the earliest deadline of any member."""
        return min((member.deadline_ms for member in self.members.values()), default=NEVER_MS)

    def topics_changing(self, names: frozenset[str], now_ms: int) -> Iterator[None]:
        """Handle changed topics in steps of one pattern and one name, because a match may take 10 ms."""
        is_touched = not self._subscribed_names.isdisjoint(names)
        for pattern in list(self.patterns.values()):
            for name in names:
                is_touched |= pattern.changed((name,), self._topic_exists)
                yield
        if is_touched:
            self._refresh(now_ms)

    def found(self, pattern: TopicPattern, names: frozenset[str], now_ms: int) -> None:
        """Store the topics that a search for a pattern has found."""
        pattern.found(names, self._topic_exists)
        self._refresh(now_ms)

    def unsearched(self) -> list[TopicPattern]:
        return [each for each in self.patterns.values() if each.topics is None and not each.is_searching]

    def epoch_error(self, member_id: str | None, epoch: int) -> int:
        """Return the error code if the member is unknown or in another epoch, else NONE."""
        member = self.members.get(member_id or "")
        if member is None:
            return e.UNKNOWN_MEMBER_ID
        return e.NONE if JOINING < epoch == member.epoch else e.STALE_MEMBER_EPOCH

    def is_subscribed(self, topic: str) -> bool:
        return any(topic in names for names in self.inputs.subscriptions.values())

    def owner(self, partition_id: PartitionId) -> str | None:
        return self._owners.owner(partition_id)

    def _pattern(self, text: str | None, may: Callable[[str], bool]) -> TopicPattern | None:
        """Return the pattern of a heartbeat; Refused if it is invalid."""
        if not text:
            return None
        return self.patterns.get(text) or TopicPattern(text, may)

    def _resolve_member(self, body: Fields, owned: Assignment | None) -> ConsumerMember:
        """Return the member that sent the heartbeat, known or new."""
        member_id, instance = body["member_id"], body["instance_id"]
        if body["member_epoch"] != JOINING:
            member = self._known_member(member_id, instance)
            _check_epoch(member, body["member_epoch"], owned)
            return member
        if instance is not None and self._static.get(instance, member_id) != member_id:
            return self._replace_static(self.members[self._static[instance]], member_id)
        known = self.members.get(member_id)
        if known is not None:
            self._reset_member(known, instance)
            return known
        if len(self.members) >= MEMBERS_MAX:
            raise Refused(
                e.GROUP_MAX_SIZE_REACHED, f"group {self.name!r} has reached the limit of {MEMBERS_MAX} members"
            )
        return ConsumerMember(member_id or str(uuid.uuid4()))

    def _known_member(self, member_id: str, instance: str | None) -> ConsumerMember:
        if instance is not None:
            owner = self._static.get(instance)
            if owner is None:
                raise Refused(e.UNKNOWN_MEMBER_ID, f"group {self.name!r} has no member with instance id {instance!r}")
            if owner != member_id:
                raise Refused(
                    e.FENCED_INSTANCE_ID, f"instance id {instance!r} belongs to member {owner!r}, not {member_id!r}"
                )
        member = self.members.get(member_id)
        if member is None:
            raise Refused(e.UNKNOWN_MEMBER_ID, f"group {self.name!r} has no member {member_id!r}; rejoin with epoch 0")
        return member

    def _replace_static(self, old: ConsumerMember, member_id: str) -> ConsumerMember:
        """Replace a static member that returns with a new member id. Its partitions become free."""
        if old.epoch != STATIC_LEAVE:
            raise Refused(
                e.UNRELEASED_INSTANCE_ID,
                f"instance id {old.instance!r} belongs to the active member {old.id!r}; let it leave or time out first",
            )
        if member_id in self.members:
            raise Refused(e.INVALID_REQUEST, f"member {member_id!r} already exists with another instance id")
        del self.members[old.id]
        self._owners.release(old.id, old.assigned)
        member = ConsumerMember(member_id or str(uuid.uuid4()))
        for field in ("instance", "rack", "rebalance_ms", "names", "pattern", "assignor"):
            setattr(member, field, getattr(old, field))
        self.target[member.id] = self.target.pop(old.id, EMPTY)
        self.members[member.id] = member
        subscriptions = dict(self.inputs.subscriptions)
        if old.id in subscriptions:
            subscriptions[member.id] = subscriptions.pop(old.id)
        self.inputs = self.inputs._replace(subscriptions=subscriptions)
        return member

    def _reset_member(self, member: ConsumerMember, instance: str | None) -> None:
        """Reset a known member that joins again: it owns nothing."""
        self._owners.release(member.id, member.assigned)
        self._owners.release(member.id, member.revoking)
        member.assigned = member.revoking = member.owned = EMPTY
        member.revoke_deadline_ms = NEVER_MS
        member.epoch = member.previous_epoch = JOINING
        if member.instance is not None and member.instance != instance:
            del self._static[member.instance]
            member.instance = None

    def _drop(self, member: ConsumerMember) -> None:
        del self.members[member.id]
        self.target.pop(member.id, None)
        self._owners.release(member.id, member.assigned)
        self._owners.release(member.id, member.revoking)
        if member.instance is not None:
            del self._static[member.instance]

    def _refresh(self, now_ms: int) -> None:
        """Start a new group epoch if the inputs of the target have changed."""
        used = {member.pattern for member in self.members.values()}
        for text in [text for text in self.patterns if text not in used]:
            del self.patterns[text]
        self._subscribed_names = frozenset().union(*(member.names for member in self.members.values()))
        inputs = self._current_inputs()
        if inputs != self.inputs:
            self.inputs = inputs
            self.epoch += 1
        if self.target_epoch != self.epoch:
            self._update_target(now_ms)

    def _current_inputs(self) -> TargetInputs:
        wanted: dict[tuple[frozenset[str], str], frozenset[str]] = {}
        topics: dict[str, TopicSize] = {}
        subscriptions: dict[str, frozenset[str]] = {}
        votes: Counter[str] = Counter()
        for member in self.members.values():
            names = wanted.get((member.names, member.pattern))
            if names is None:
                names = wanted[member.names, member.pattern] = self._existing_topics(member, topics)
            subscriptions[member.id] = names
            if member.assignor is not None:
                votes[member.assignor] += 1
        assignor = max(votes, key=lambda name: (votes[name], name), default=UNIFORM)
        return TargetInputs(assignor, subscriptions, topics)

    def _existing_topics(self, member: ConsumerMember, topics: dict[str, TopicSize]) -> frozenset[str]:
        """Return the existing topics of a member's subscription, and add them to `topics`."""
        pattern = self.patterns.get(member.pattern)
        matching = frozenset() if pattern is None or pattern.topics is None else pattern.topics
        found = []
        for name in member.names | matching:
            size = topics.get(name) or self._lookup(name)
            if size is not None:
                topics[name] = size
                found.append(name)
        return frozenset(found)

    def _topic_exists(self, name: str) -> bool:
        return self._lookup(name) is not None

    def _update_target(self, now_ms: int) -> None:
        """Compute the target of this epoch, or leave it to a later heartbeat if the rate limit demands it."""
        partitions = sum(topic.partitions for topic in self.inputs.topics.values())
        wait_ms = partitions // PARTITIONS_PER_MS if partitions > RATE_LIMITED_PARTITIONS else 0
        if self.target_epoch and now_ms < self._assigned_at_ms + wait_ms:
            return
        if partitions > ASSIGNED_HERE_MAX and self._compute is not None:
            if not self.is_computing:
                self.is_computing = True
                self._compute(self)
            return
        self._set_target(self.assignment()(), now_ms)

    def _set_target(self, target: dict[str, Assignment], now_ms: int) -> None:
        self.target = target
        self.target_epoch = self.epoch
        self._assigned_at_ms = now_ms

    def assignment(self) -> Callable[[], dict[str, Assignment]]:
        """Return a function that computes the target of this epoch. It may run in another thread."""
        inputs = self.inputs
        return partial(ASSIGNORS[inputs.assignor], inputs.subscriptions, inputs.topics, dict(self.target))

    def assigned(self, inputs: TargetInputs, target: dict[str, Assignment], now_ms: int) -> None:
        """Apply a target that was computed elsewhere for `inputs`. If they have changed since, compute another one."""
        self.is_computing = False
        if inputs is self.inputs:
            self._set_target(target, now_ms)
        elif self.members:
            self._update_target(now_ms)

    def _reconcile(self, member: ConsumerMember, now_ms: int) -> None:
        """Move a member as close to its target as its own and other members' revocations allow."""
        target = self.target.get(member.id, EMPTY)
        if member.assigned is target and member.epoch == self.target_epoch and not member.revoking:
            return
        # Only partitions revoked in an earlier response: the client may be about to take what it was assigned last.
        released = member.revoking - member.owned
        self._owners.release(member.id, released)
        going = member.assigned - target
        member.assigned -= going
        member.revoking = member.revoking - released | going
        if member.revoking:
            if going or released:
                member.revoke_deadline_ms = now_ms + member.rebalance_ms
            return
        member.revoke_deadline_ms = NEVER_MS
        coming = self._owners.free(target - member.assigned)
        self._owners.take(member.id, coming)
        assigned = member.assigned | coming
        member.assigned = target if len(assigned) == len(target) else assigned
        member.reach(self.target_epoch)

    def _interval_ms(self, member: ConsumerMember) -> int:
        is_waiting = self.target_epoch != self.epoch or (
            not member.revoking and len(member.assigned) != len(self.target.get(member.id, EMPTY))
        )
        return min(WAITING_HEARTBEAT_MS, self.timing.heartbeat_ms) if is_waiting else self.timing.heartbeat_ms


def _owned(body: Fields) -> Assignment | None:
    if body["topic_partitions"] is None:
        return None
    return frozenset((each["topic_id"].bytes, at) for each in body["topic_partitions"] for at in each["partitions"])


def _has_subscription(body: Fields) -> bool:
    return body["subscribed_topic_names"] is not None or body["subscribed_topic_regex"] is not None


def _check_epoch(member: ConsumerMember, epoch: int, owned: Assignment | None) -> None:
    if epoch == member.epoch:
        return
    # The response with the current epoch may have been lost. Then the member owns only partitions assigned to it.
    is_one_behind = epoch == member.previous_epoch and epoch < member.epoch
    if not is_one_behind or owned is None or not owned <= member.assigned:
        raise Refused(
            e.FENCED_MEMBER_EPOCH,
            f"member {member.id!r} is in epoch {member.epoch}, not {epoch}; revoke everything and rejoin with epoch 0",
        )


def by_topic(partition_ids: Iterable[PartitionId]) -> list[Fields]:
    """Group partitions by topic, in the form of a response."""
    found: dict[bytes, list[int]] = {}
    for topic_id, at in sorted(partition_ids):
        found.setdefault(topic_id, []).append(at)
    return [{"topic_id": UUID(bytes=topic_id), "partitions": partitions} for topic_id, partitions in found.items()]
