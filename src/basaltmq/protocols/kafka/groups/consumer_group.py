"""One consumer group of Kafka's second protocol (KIP-848): the broker deals out, and members follow one by one.

    something changed ─> group epoch + 1 ─> a target for that epoch: who is to have what
                                                 │  at each heartbeat of a member
                     assigned ⊄ target:  it is told to let go, and stays in its epoch until it says it did
                     else:               it reaches the target's epoch with what nobody else holds of its share,
                                         and gets the rest when that is let go of

What changes a target are members that come and go, subscriptions, assignors, and topics that are made, widened or
deleted: exactly these are compared, so a static member that comes back, or a heartbeat that says nothing, moves nobody.

A member proves itself by its id and its epoch. One that is silent for its session, or does not let go within its
rebalance timeout, is no member any more. Who is not one, or is in another epoch, is told so, lets go of everything and
joins again with epoch 0; epoch -1 leaves, and -2 keeps a static member's place until its session is over.

Everything here happens at the time it is told, without a clock or a loop of its own; timers, rows and requests are in
`consumer_groups`. Invariants: a partition is held by one member at most (`ownership`), epochs only grow, and once
nothing changes any more and every member has been heard of a few times, everybody has its share of the target.
"""

from __future__ import annotations

import enum
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple
from uuid import UUID

from basaltmq.protocols.kafka.groups.assignors import ASSIGNORS, EMPTY, UNIFORM, Place, Share, TopicSize
from basaltmq.protocols.kafka.groups.consumer_member import AWAY, JOINING, NEVER_MS, ConsumerMember
from basaltmq.protocols.kafka.groups.ownership import Ownership
from basaltmq.protocols.kafka.groups.topic_pattern import TopicPattern
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.errors import Refused
from basaltmq.protocols.kafka.wire.schema import Fields

MEMBERS_MAX: Final = 10_000
WAITING_MS: Final = 500
"""Between two heartbeats of a member that waits for what others have to let go of: it is only told when it asks."""

GATHERED_MIN: Final = 5_000
"""Partitions from which targets are not made for every change by itself: one of 100,000 takes a fifth of a second, and
a thousand members that start together would ask for a thousand."""

GATHERED_PER_MS: Final = 50
"""So many partitions make a target wait a millisecond after the one before it."""

LONG_AGO_MS: Final = -(1 << 62)

Lookup = Callable[[str], TopicSize | None]


class State(enum.StrEnum):
    EMPTY = "Empty"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"


class Timing(NamedTuple):
    """What members are told to keep to, and are held to."""

    session_ms: int = 45_000
    heartbeat_ms: int = 5_000


class Basis(NamedTuple):
    """What a target follows from."""

    assignor: str
    subscriptions: Mapping[str, frozenset[str]]
    topics: Mapping[str, TopicSize]


class ConsumerGroup:
    """One group."""

    def __init__(self, name: str, lookup: Lookup, epoch: int = 0, timing: Timing | None = None) -> None:
        self.name = name
        self.timing = timing or Timing()
        self.epoch = epoch
        self.target: dict[str, Share] = {}
        self.target_epoch = epoch
        self.members: dict[str, ConsumerMember] = {}
        self.patterns: dict[str, TopicPattern] = {}
        self.basis = Basis(UNIFORM, {}, {})
        self._lookup = lookup
        self._static: dict[str, str] = {}
        self._holders = Ownership()
        self._named: frozenset[str] = frozenset()
        """Topics somebody subscribes to by name, those that are not there too."""
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

    def heartbeat(self, asked: Fields, client_id: str, host: str, may: Callable[[str], bool], now_ms: int) -> Fields:
        """A heartbeat of a member, or of one that joins; the answer, or Refused with nothing changed."""
        owned = _owned(asked)
        pattern = self._pattern(asked["subscribed_topic_regex"], may)
        member = self._found(asked, owned)
        if pattern is not None:
            self.patterns[pattern.text], pattern.may = pattern, may
        assigned = member.assigned
        if owned is not None:
            member.owned = owned
        is_changed = member.update(asked) | (member.id not in self.members)
        member.client_id, member.host = client_id, host
        member.silent_at_ms = now_ms + self.timing.session_ms
        if member.id not in self.members:
            self.members[member.id] = member
        if member.instance is not None:
            self._static[member.instance] = member.id
        if is_changed:
            self._refresh(now_ms)
        elif self.target_epoch != self.epoch:
            self._aim(now_ms)
        self._reconcile(member, now_ms)
        answer: Fields = {
            "member_id": member.id,
            "member_epoch": member.epoch,
            "heartbeat_interval_ms": self._interval_ms(member),
        }
        is_full = asked["rebalance_timeout_ms"] != -1 and owned is not None and _has_subscription(asked)
        if is_full or asked["member_epoch"] == JOINING or member.assigned != assigned:
            answer["assignment"] = {"topic_partitions": by_topic(member.assigned)}
        return answer

    def leave(self, asked: Fields, now_ms: int) -> Fields:
        """A member goes, or says it will be back."""
        member = self._known(asked["member_id"], asked["instance_id"])
        if asked["member_epoch"] == AWAY:
            self._holders.release(member.id, member.revoking)
            member.revoking, member.revoke_by_ms = EMPTY, NEVER_MS
            member.epoch = AWAY
            member.silent_at_ms = now_ms + self.timing.session_ms
        else:
            self._drop(member)
            self._refresh(now_ms)
        return {"member_id": member.id, "member_epoch": asked["member_epoch"]}

    def expire(self, now_ms: int) -> int:
        """Members whose time is over go; how many that were."""
        late = [member for member in self.members.values() if member.due_ms <= now_ms]
        for member in late:
            self._drop(member)
        if late:
            self._refresh(now_ms)
        return len(late)

    def due_ms(self) -> int:
        """When the first member's time is over."""
        return min((member.due_ms for member in self.members.values()), default=NEVER_MS)

    def topics_changed(self, names: frozenset[str], now_ms: int) -> None:
        """Topics of these names were made, altered or deleted."""
        touched = [pattern.changed(names, self._is_there) for pattern in self.patterns.values()]
        if any(touched) or not self._named.isdisjoint(names):
            self._refresh(now_ms)

    def found(self, pattern: TopicPattern, names: frozenset[str], now_ms: int) -> None:
        """The search for the topics of a pattern is over."""
        pattern.found(names, self._is_there)
        self._refresh(now_ms)

    def unsearched(self) -> list[TopicPattern]:
        return [each for each in self.patterns.values() if each.topics is None and not each.is_searching]

    def wrong(self, member_id: str | None, epoch: int) -> int:
        """Why somebody may not act for a member in its epoch; none if they may."""
        member = self.members.get(member_id or "")
        if member is None:
            return e.UNKNOWN_MEMBER_ID
        return e.NONE if JOINING < epoch == member.epoch else e.STALE_MEMBER_EPOCH

    def is_subscribed(self, topic: str) -> bool:
        return any(topic in names for names in self.basis.subscriptions.values())

    def holder(self, place: Place) -> str | None:
        return self._holders.holder(place)

    def _pattern(self, text: str | None, may: Callable[[str], bool]) -> TopicPattern | None:
        """The pattern a heartbeat names; Refused if it is none."""
        if not text:
            return None
        return self.patterns.get(text) or TopicPattern(text, may)

    def _found(self, asked: Fields, owned: Share | None) -> ConsumerMember:
        """The member that speaks: one that is known and in its epoch, or one that joins."""
        member_id, instance = asked["member_id"], asked["instance_id"]
        if asked["member_epoch"] != JOINING:
            member = self._known(member_id, instance)
            _check_epoch(member, asked["member_epoch"], owned)
            return member
        if instance is not None and self._static.get(instance, member_id) != member_id:
            return self._replaced(self.members[self._static[instance]], member_id)
        known = self.members.get(member_id)
        if known is not None:
            self._start_over(known, instance)
            return known
        if len(self.members) >= MEMBERS_MAX:
            raise Refused(e.GROUP_MAX_SIZE_REACHED, f"group {self.name!r} has {MEMBERS_MAX} members, and takes no more")
        return ConsumerMember(member_id or str(uuid.uuid4()))

    def _known(self, member_id: str, instance: str | None) -> ConsumerMember:
        if instance is not None:
            holder = self._static.get(instance)
            if holder is None:
                raise Refused(e.UNKNOWN_MEMBER_ID, f"group {self.name!r} has no member with the instance {instance!r}")
            if holder != member_id:
                raise Refused(
                    e.FENCED_INSTANCE_ID, f"the instance {instance!r} is member {holder!r}, not {member_id!r}"
                )
        member = self.members.get(member_id)
        if member is None:
            raise Refused(e.UNKNOWN_MEMBER_ID, f"group {self.name!r} has no member {member_id!r}; join with epoch 0")
        return member

    def _replaced(self, old: ConsumerMember, member_id: str) -> ConsumerMember:
        """A static member is back under another id: the share of its former self is its own, and free to be taken."""
        if old.epoch != AWAY:
            raise Refused(
                e.UNRELEASED_INSTANCE_ID,
                f"the instance {old.instance!r} is member {old.id!r}, which has neither left nor been silent for long",
            )
        if member_id in self.members:
            raise Refused(e.INVALID_REQUEST, f"{member_id!r} is a member with another instance")
        del self.members[old.id]
        self._holders.release(old.id, old.assigned)
        member = ConsumerMember(member_id or str(uuid.uuid4()))
        for field in ("instance", "rack", "rebalance_ms", "names", "pattern", "assignor"):
            setattr(member, field, getattr(old, field))
        self.target[member.id] = self.target.pop(old.id, EMPTY)
        self.members[member.id] = member
        subscriptions = dict(self.basis.subscriptions)
        if old.id in subscriptions:
            subscriptions[member.id] = subscriptions.pop(old.id)
        self.basis = self.basis._replace(subscriptions=subscriptions)
        return member

    def _start_over(self, member: ConsumerMember, instance: str | None) -> None:
        """A member joins that is one: it has nothing, whatever it had."""
        self._holders.release(member.id, member.assigned)
        self._holders.release(member.id, member.revoking)
        member.assigned = member.revoking = member.owned = EMPTY
        member.revoke_by_ms = NEVER_MS
        member.epoch = member.epoch_before = JOINING
        if member.instance is not None and member.instance != instance:
            del self._static[member.instance]
            member.instance = None

    def _drop(self, member: ConsumerMember) -> None:
        del self.members[member.id]
        self.target.pop(member.id, None)
        self._holders.release(member.id, member.assigned)
        self._holders.release(member.id, member.revoking)
        if member.instance is not None:
            del self._static[member.instance]

    def _refresh(self, now_ms: int) -> None:
        """Begin another epoch if what the target follows from is not what it was."""
        used = {member.pattern for member in self.members.values()}
        for text in [text for text in self.patterns if text not in used]:
            del self.patterns[text]
        self._named = frozenset().union(*(member.names for member in self.members.values()))
        basis = self._basis()
        if basis != self.basis:
            self.basis = basis
            self.epoch += 1
        if self.target_epoch != self.epoch:
            self._aim(now_ms)

    def _basis(self) -> Basis:
        wanted: dict[tuple[frozenset[str], str], frozenset[str]] = {}
        topics: dict[str, TopicSize] = {}
        subscriptions: dict[str, frozenset[str]] = {}
        votes: Counter[str] = Counter()
        for member in self.members.values():
            names = wanted.get((member.names, member.pattern))
            if names is None:
                names = wanted[member.names, member.pattern] = self._there(member, topics)
            subscriptions[member.id] = names
            if member.assignor is not None:
                votes[member.assignor] += 1
        assignor = max(votes, key=lambda name: (votes[name], name), default=UNIFORM)
        return Basis(assignor, subscriptions, topics)

    def _there(self, member: ConsumerMember, topics: dict[str, TopicSize]) -> frozenset[str]:
        """The topics of a member's subscription that are there, noted with their sizes."""
        pattern = self.patterns.get(member.pattern)
        matching = frozenset() if pattern is None or pattern.topics is None else pattern.topics
        found = []
        for name in member.names | matching:
            size = topics.get(name) or self._lookup(name)
            if size is not None:
                topics[name] = size
                found.append(name)
        return frozenset(found)

    def _is_there(self, name: str) -> bool:
        return self._lookup(name) is not None

    def _aim(self, now_ms: int) -> None:
        """Make the target of this epoch, or leave it to a later heartbeat where many partitions come too soon."""
        partitions = sum(topic.partitions for topic in self.basis.topics.values())
        wait_ms = partitions // GATHERED_PER_MS if partitions > GATHERED_MIN else 0
        if self.target_epoch and now_ms < self._assigned_at_ms + wait_ms:
            return
        assignor = ASSIGNORS[self.basis.assignor]
        self.target = assignor(self.basis.subscriptions, self.basis.topics, self.target)
        self.target_epoch = self.epoch
        self._assigned_at_ms = now_ms

    def _reconcile(self, member: ConsumerMember, now_ms: int) -> None:
        """Bring a member as near to the target as it and others allow."""
        target = self.target.get(member.id, EMPTY)
        if member.assigned is target and member.epoch == self.target_epoch and not member.revoking:
            return
        # Only what it was told in an answer before this heartbeat: it may be about to take what it was given last.
        released = member.revoking - member.owned
        self._holders.release(member.id, released)
        going = member.assigned - target
        member.assigned -= going
        member.revoking = member.revoking - released | going
        if member.revoking:
            if going or released:
                member.revoke_by_ms = now_ms + member.rebalance_ms
            return
        member.revoke_by_ms = NEVER_MS
        coming = self._holders.free(target - member.assigned)
        self._holders.take(member.id, coming)
        assigned = member.assigned | coming
        member.assigned = target if len(assigned) == len(target) else assigned
        member.reach(self.target_epoch)

    def _interval_ms(self, member: ConsumerMember) -> int:
        is_waiting = self.target_epoch != self.epoch or (
            not member.revoking and len(member.assigned) != len(self.target.get(member.id, EMPTY))
        )
        return min(WAITING_MS, self.timing.heartbeat_ms) if is_waiting else self.timing.heartbeat_ms


def _owned(asked: Fields) -> Share | None:
    if asked["topic_partitions"] is None:
        return None
    return frozenset((each["topic_id"].bytes, at) for each in asked["topic_partitions"] for at in each["partitions"])


def _has_subscription(asked: Fields) -> bool:
    return asked["subscribed_topic_names"] is not None or asked["subscribed_topic_regex"] is not None


def _check_epoch(member: ConsumerMember, epoch: int, owned: Share | None) -> None:
    if epoch == member.epoch:
        return
    # An answer with the next epoch may not have reached it: then it has nothing yet that is not its own.
    is_one_behind = epoch == member.epoch_before and epoch < member.epoch
    if not is_one_behind or owned is None or not owned <= member.assigned:
        raise Refused(
            e.FENCED_MEMBER_EPOCH,
            f"member {member.id!r} is in epoch {member.epoch}, not {epoch}; let go of all partitions and join again",
        )


def by_topic(places: Iterable[Place]) -> list[Fields]:
    """Partitions as answers have them."""
    found: dict[bytes, list[int]] = {}
    for topic_id, at in sorted(places):
        found.setdefault(topic_id, []).append(at)
    return [{"topic_id": UUID(bytes=topic_id), "partitions": partitions} for topic_id, partitions in found.items()]
