"""One consumer group of the classic protocol: members, generations, and who waits for what.

    Empty ──join──> PreparingRebalance ──all joined, or time over──> CompletingRebalance ──leader syncs──> Stable
      ^                    ^  ^                                            │                                 │
      └── the last leaves  │  └──── a member comes, goes or asks anew ─────┴─────────────────────────────────┘

In PreparingRebalance members wait in JoinGroup; when all are there, or the longest rebalance timeout is over, a
generation begins: one protocol all of them know is chosen by vote, and one of them, the leader, gets everybody's
metadata. In CompletingRebalance they wait in SyncGroup for what the leader deals out. A member that is silent for its
session timeout goes; one that waits for an answer is not silent.

A static member (with an instance id) that comes back under the same name takes its place, without a rebalance if the
group is stable; whoever had that place before is fenced. Static members are not taken out when they miss a rebalance,
only when their session is over.

Nothing of this is on the disk: after a restart members are unknown, join again, and go on from what was committed.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Callable
from typing import Final

from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.schema import Fields

FIRST_WAIT_S: Final = 0.1
"""How long an empty group waits for more members before its first generation: those of one start come together."""

MEMBERS_MAX: Final = 10_000
SESSION_MS_MIN: Final = 1_000
SESSION_MS_MAX: Final = 1_800_000
SKIPS_SINCE: Final = 9
"""The version of JoinGroup in which a leader can be told not to deal out."""

ID_REQUIRED_SINCE: Final = 4


class State(enum.StrEnum):
    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


class Member:
    """One member."""

    def __init__(self, member_id: str, asked: Fields, client_id: str, host: str) -> None:
        self.id = member_id
        self.instance: str | None = asked["group_instance_id"]
        self.client_id = client_id
        self.host = host
        self.assignment = b""
        self.join: asyncio.Future[Fields] | None = None
        self.sync: asyncio.Future[Fields] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.has_synced = False
        self.update(asked)

    def update(self, asked: Fields) -> None:
        self.session_s = asked["session_timeout_ms"] / 1000
        rebalance_ms = asked["rebalance_timeout_ms"]
        self.rebalance_s = self.session_s if rebalance_ms < 0 else rebalance_ms / 1000
        self.protocols: dict[str, bytes] = {each["name"]: each["metadata"] for each in asked["protocols"]}

    @property
    def is_waiting(self) -> bool:
        """In a JoinGroup or SyncGroup that is not answered."""
        return any(future is not None and not future.done() for future in (self.join, self.sync))


class Group:
    """One group. All calls from one loop."""

    def __init__(self, name: str, new_id: Callable[[str], str], emptied: Callable[[Group], None]) -> None:
        self.name = name
        self.state = State.EMPTY
        self.generation = 0
        self.protocol_type = ""
        self.protocol = ""
        self.leader = ""
        self.members: dict[str, Member] = {}
        self._static: dict[str, str] = {}
        self._pending: dict[str, asyncio.TimerHandle] = {}
        """Ids that were given out and not used yet."""
        self._new_id = new_id
        self._emptied = emptied
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_first = False
        """The rebalance under way is an empty group's first: it waits its time out."""

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    async def join(self, asked: Fields, version: int, client_id: str, host: str) -> Fields:
        """JoinGroup, answered when a generation begins."""
        member_id, instance = asked["member_id"], asked["group_instance_id"]
        refused = self._refusal(asked)
        if refused:
            return {"error_code": refused, "member_id": member_id}
        if not member_id and instance is not None and instance in self._static:
            return await self._replace(asked, version, client_id, host)
        if not member_id:
            if len(self.members) + len(self._pending) >= MEMBERS_MAX:
                return {"error_code": e.GROUP_MAX_SIZE_REACHED}
            member_id = self._new_id(instance or client_id)
            if version >= ID_REQUIRED_SINCE and instance is None:
                self._pending[member_id] = self._loop.call_later(
                    asked["session_timeout_ms"] / 1000, self._forget_pending, member_id
                )
                return {"error_code": e.MEMBER_ID_REQUIRED, "member_id": member_id}
            return await self._add(member_id, asked, client_id, host)
        if member_id in self._pending:
            self._pending.pop(member_id).cancel()
            return await self._add(member_id, asked, client_id, host)
        wrong = self.wrong_member(member_id, instance)
        if wrong:
            return {"error_code": wrong, "member_id": member_id}
        return await self._again(self.members[member_id], asked)

    def _refusal(self, asked: Fields) -> int:
        if not SESSION_MS_MIN <= asked["session_timeout_ms"] <= SESSION_MS_MAX:
            return e.INVALID_SESSION_TIMEOUT
        if not asked["protocols"] or not asked["protocol_type"]:
            return e.INCONSISTENT_GROUP_PROTOCOL
        others = [each for each in self.members.values() if each.id != asked["member_id"]]
        if others:
            offered = {each["name"] for each in asked["protocols"]}
            common = set.intersection(*(set(each.protocols) for each in others))
            if asked["protocol_type"] != self.protocol_type or not offered & common:
                return e.INCONSISTENT_GROUP_PROTOCOL
        return e.NONE

    async def _add(self, member_id: str, asked: Fields, client_id: str, host: str) -> Fields:
        member = self.members[member_id] = Member(member_id, asked, client_id, host)
        if member.instance is not None:
            self._static[member.instance] = member_id
        self.protocol_type = asked["protocol_type"]
        return await self._wait_joined(member)

    async def _again(self, member: Member, asked: Fields) -> Fields:
        before = member.protocols
        member.update(asked)
        self.touch(member)
        is_same = list(before.items()) == list(member.protocols.items())
        if is_same and (self.state is State.COMPLETING or (self.state is State.STABLE and member.id != self.leader)):
            return self._joined(member)
        return await self._wait_joined(member)

    async def _replace(self, asked: Fields, version: int, client_id: str, host: str) -> Fields:
        """A static member is back: it takes the place of its former self, which is fenced."""
        old = self.members.pop(self._static[asked["group_instance_id"]])
        _answer(old.join, {"error_code": e.FENCED_INSTANCE_ID, "member_id": old.id})
        _answer(old.sync, {"error_code": e.FENCED_INSTANCE_ID})
        if old.timer is not None:
            old.timer.cancel()
        member = Member(self._new_id(asked["group_instance_id"]), asked, client_id, host)
        member.assignment, member.has_synced = old.assignment, old.has_synced
        self.members[member.id] = member
        self._static[asked["group_instance_id"]] = member.id
        was_leader = self.leader == old.id
        if was_leader:
            self.leader = member.id
        is_same = list(old.protocols.items()) == list(member.protocols.items())
        if self.state is not State.STABLE or not is_same:
            return await self._wait_joined(member)
        self.touch(member)
        answer = self._joined(member)
        if was_leader and version >= SKIPS_SINCE:
            answer["skip_assignment"] = True
        elif was_leader:
            # As somebody else's follower it does not deal out what is dealt out.
            answer |= {"leader": old.id, "members": ()}
        return answer

    async def _wait_joined(self, member: Member) -> Fields:
        _answer(member.join, {"error_code": e.REBALANCE_IN_PROGRESS, "member_id": member.id})
        future: asyncio.Future[Fields] = self._loop.create_future()
        member.join = future
        self.touch(member)
        if self.state is not State.PREPARING:
            self._prepare()
        self._begin_if_complete()
        return await future

    def _prepare(self) -> None:
        was_empty = self.state is State.EMPTY
        self.state = State.PREPARING
        for member in self.members.values():
            _answer(member.sync, {"error_code": e.REBALANCE_IN_PROGRESS})
            member.sync = None
        limit_s = max((member.rebalance_s for member in self.members.values()), default=0.0)
        self._set_timer(FIRST_WAIT_S if was_empty else limit_s, self._begin)
        self._is_first = was_empty

    def _begin_if_complete(self) -> None:
        is_waiting = self.state is State.PREPARING and not self._is_first and not self._pending
        if is_waiting and all(member.join is not None for member in self.members.values()):
            self._begin()

    def _begin(self) -> None:
        """A generation begins with those who are there."""
        self._stop_timer()
        if self.state is not State.PREPARING:
            return
        for member in list(self.members.values()):
            if member.join is None and member.instance is None:
                self._drop(member)
        self.generation += 1
        if not self.members:
            self._become_empty()
            return
        joined = [member for member in self.members.values() if member.join is not None]
        if not joined:
            # Only static members that have not come back; their sessions decide.
            self._set_timer(max(member.rebalance_s for member in self.members.values()), self._begin)
            return
        self.state = State.COMPLETING
        self.protocol = self._vote()
        if self.leader not in self.members or self.members[self.leader].join is None:
            self.leader = joined[0].id
        for member in self.members.values():
            member.has_synced = False
            join, member.join = member.join, None
            self.touch(member)
            _answer(join, self._joined(member))
        self._set_timer(max(member.rebalance_s for member in self.members.values()), self._sync_is_late)

    def _vote(self) -> str:
        common = set.intersection(*(set(member.protocols) for member in self.members.values()))
        votes = Counter(next(name for name in member.protocols if name in common) for member in self.members.values())
        return votes.most_common(1)[0][0]

    def _joined(self, member: Member) -> Fields:
        is_leader = member.id == self.leader
        return {
            "generation_id": self.generation,
            "protocol_type": self.protocol_type,
            "protocol_name": self.protocol,
            "leader": self.leader,
            "member_id": member.id,
            "members": [
                {"member_id": each.id, "group_instance_id": each.instance, "metadata": each.protocols[self.protocol]}
                for each in self.members.values()
            ]
            if is_leader
            else (),
        }

    async def sync(self, asked: Fields) -> Fields:
        """SyncGroup, answered when the leader has dealt out."""
        wrong = self.wrong(asked["member_id"], asked["group_instance_id"], asked["generation_id"])
        if wrong:
            return {"error_code": wrong}
        for field, known in (("protocol_type", self.protocol_type), ("protocol_name", self.protocol)):
            if asked[field] is not None and asked[field] != known:
                return {"error_code": e.INCONSISTENT_GROUP_PROTOCOL}
        member = self.members[asked["member_id"]]
        self.touch(member)
        if self.state is State.PREPARING:
            return {"error_code": e.REBALANCE_IN_PROGRESS}
        member.has_synced = True
        if self.state is State.STABLE:
            return self._synced(member)
        _answer(member.sync, {"error_code": e.REBALANCE_IN_PROGRESS})
        future: asyncio.Future[Fields] = self._loop.create_future()
        member.sync = future
        if member.id == self.leader:
            self._deal({each["member_id"]: each["assignment"] for each in asked["assignments"]})
        return await future

    def _deal(self, dealt: dict[str, bytes]) -> None:
        self.state = State.STABLE
        for member in self.members.values():
            member.assignment = dealt.get(member.id, b"")
            sync, member.sync = member.sync, None
            _answer(sync, self._synced(member))
            self.touch(member)

    def _synced(self, member: Member) -> Fields:
        return {
            "protocol_type": self.protocol_type,
            "protocol_name": self.protocol,
            "assignment": member.assignment,
        }

    def _sync_is_late(self) -> None:
        """Members that did not ask for their share in time go, and the others begin anew."""
        self._timer = None
        late = [member for member in self.members.values() if not member.has_synced]
        if self.state in {State.COMPLETING, State.STABLE} and late:
            for member in late:
                self._drop(member)
            self._after_loss()

    def heartbeat(self, member_id: str, instance: str | None, generation: int) -> int:
        wrong = self.wrong(member_id, instance, generation)
        if not wrong:
            self.touch(self.members[member_id])
            if self.state is State.PREPARING:
                return e.REBALANCE_IN_PROGRESS
        return wrong

    def leave(self, member_id: str, instance: str | None) -> int:
        if instance is not None and not member_id:
            member_id = self._static.get(instance, "")
        if member_id in self._pending:
            self._pending.pop(member_id).cancel()
            self._begin_if_complete()
            return e.NONE
        wrong = self.wrong_member(member_id, instance)
        if not wrong:
            self._drop(self.members[member_id])
            self._after_loss()
        return wrong

    def wrong_member(self, member_id: str, instance: str | None) -> int:
        if instance is not None and instance in self._static and self._static[instance] != member_id:
            return e.FENCED_INSTANCE_ID
        return e.NONE if member_id in self.members else e.UNKNOWN_MEMBER_ID

    def wrong(self, member_id: str, instance: str | None, generation: int) -> int:
        """Why somebody may not act for a member of a generation; none if they may."""
        wrong = self.wrong_member(member_id, instance)
        if not wrong and generation != self.generation:
            return e.ILLEGAL_GENERATION
        return wrong

    def wrong_commit(self, member_id: str, instance: str | None, generation: int) -> int:
        """The same for committing: a client without membership may while nobody is there."""
        if generation < 0 and not self.members:
            return e.NONE
        if generation < 0 or self.state is State.EMPTY:
            return e.UNKNOWN_MEMBER_ID
        wrong = self.wrong(member_id, instance, generation)
        if not wrong:
            self.touch(self.members[member_id])
            if self.state is State.COMPLETING:
                return e.REBALANCE_IN_PROGRESS
        return wrong

    def touch(self, member: Member) -> None:
        """It was heard of."""
        if member.timer is not None:
            member.timer.cancel()
        member.timer = self._loop.call_later(member.session_s, self._is_silent, member)

    def _is_silent(self, member: Member) -> None:
        member.timer = None
        if self.members.get(member.id) is not member:
            return
        if member.is_waiting:
            self.touch(member)
            return
        self._drop(member)
        self._after_loss()

    def _drop(self, member: Member) -> None:
        del self.members[member.id]
        if member.timer is not None:
            member.timer.cancel()
        if member.instance is not None and self._static.get(member.instance) == member.id:
            del self._static[member.instance]
        _answer(member.join, {"error_code": e.UNKNOWN_MEMBER_ID, "member_id": member.id})
        _answer(member.sync, {"error_code": e.UNKNOWN_MEMBER_ID})

    def _after_loss(self) -> None:
        if not self.members:
            if self.state is not State.EMPTY:
                self.generation += 1
            self._become_empty()
        elif self.state in {State.STABLE, State.COMPLETING}:
            self._prepare()
        else:
            self._begin_if_complete()

    def _forget_pending(self, member_id: str) -> None:
        self._pending.pop(member_id, None)
        self._begin_if_complete()
        if not self.members and not self._pending:
            self._become_empty()

    def _become_empty(self) -> None:
        self._stop_timer()
        self.state = State.EMPTY
        self.leader = self.protocol = ""
        if not self._pending:
            self._emptied(self)

    def close(self) -> None:
        """Whoever waits is told that nobody coordinates here any more."""
        self.state = State.DEAD
        self._stop_timer()
        for timer in self._pending.values():
            timer.cancel()
        for member in self.members.values():
            if member.timer is not None:
                member.timer.cancel()
            _answer(member.join, {"error_code": e.COORDINATOR_NOT_AVAILABLE, "member_id": member.id})
            _answer(member.sync, {"error_code": e.COORDINATOR_NOT_AVAILABLE})
        self.members.clear()

    def _set_timer(self, delay_s: float, call: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(delay_s, call)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _answer(future: asyncio.Future[Fields] | None, answer: Fields) -> None:
    if future is not None and not future.done():
        future.set_result(answer)
