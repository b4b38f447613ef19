"""State machine of one consumer group of the classic protocol: members, generations, pending requests.

    Empty ──join──> PreparingRebalance ──all joined, or timeout──> CompletingRebalance ──leader syncs──> Stable
      ^                    ^  ^                                          │                                 │
      └── last member left │  └──── a member joins, leaves or rejoins ───┴─────────────────────────────────┘

In PreparingRebalance, members wait in JoinGroup. A generation starts when all have joined, or after the longest
rebalance timeout. The members vote for a protocol that all support, and the leader gets every member's metadata. In
CompletingRebalance, members wait in SyncGroup for the leader's assignment. A member whose session timeout passes
without a request is removed. A pending JoinGroup or SyncGroup keeps its session alive.

A static member (with an instance id) that returns replaces its previous self, without a rebalance if the group is
Stable. The previous member id is fenced. A static member that misses a rebalance stays until its session ends.

Membership is not persistent. After a restart, members are unknown, rejoin, and continue from the committed offsets.
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
"""Seconds that an empty group waits for more members before its first generation. Members often start together."""

MEMBERS_MAX: Final = 10_000
SESSION_MS_MIN: Final = 1_000
SESSION_MS_MAX: Final = 1_800_000
SKIPS_SINCE: Final = 9
"""First JoinGroup version whose response has skip_assignment for the leader."""

ID_REQUIRED_SINCE: Final = 4


class State(enum.StrEnum):
    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


class Member:
    """A member of a classic group."""

    def __init__(self, member_id: str, body: Fields, client_id: str, host: str) -> None:
        self.id = member_id
        self.instance: str | None = body["group_instance_id"]
        self.client_id = client_id
        self.host = host
        self.assignment = b""
        self.join: asyncio.Future[Fields] | None = None
        self.sync: asyncio.Future[Fields] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.has_synced = False
        self.update(body)

    def update(self, body: Fields) -> None:
        self.session_s = body["session_timeout_ms"] / 1000
        rebalance_ms = body["rebalance_timeout_ms"]
        self.rebalance_s = self.session_s if rebalance_ms < 0 else rebalance_ms / 1000
        self.protocols: dict[str, bytes] = {each["name"]: each["metadata"] for each in body["protocols"]}

    @property
    def is_waiting(self) -> bool:
        """Whether the member has a pending JoinGroup or SyncGroup."""
        return any(future is not None and not future.done() for future in (self.join, self.sync))


class ClassicGroup:
    """A classic group. All calls come from one event loop."""

    def __init__(self, name: str, new_id: Callable[[str], str], emptied: Callable[[ClassicGroup], None]) -> None:
        self.name = name
        self.state = State.EMPTY
        self.generation = 0
        self.protocol_type = ""
        self.protocol = ""
        self.leader = ""
        self.members: dict[str, Member] = {}
        self._static: dict[str, str] = {}
        self._pending: dict[str, asyncio.TimerHandle] = {}
        """Member ids that were issued by MEMBER_ID_REQUIRED and have not joined, with their timeouts."""
        self._new_id = new_id
        self._emptied = emptied
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_first = False
        """The current rebalance is the first of an empty group, which always waits for FIRST_WAIT_S."""

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    async def join(self, body: Fields, version: int, client_id: str, host: str) -> Fields:
        """Handle JoinGroup. Returns when a generation starts."""
        member_id, instance = body["member_id"], body["group_instance_id"]
        refused = self._join_error(body)
        if refused:
            return {"error_code": refused, "member_id": member_id}
        if not member_id and instance is not None and instance in self._static:
            return await self._replace(body, version, client_id, host)
        if not member_id:
            if len(self.members) + len(self._pending) >= MEMBERS_MAX:
                return {"error_code": e.GROUP_MAX_SIZE_REACHED}
            member_id = self._new_id(instance or client_id)
            if version >= ID_REQUIRED_SINCE and instance is None:
                self._pending[member_id] = self._loop.call_later(
                    body["session_timeout_ms"] / 1000, self._forget_pending, member_id
                )
                return {"error_code": e.MEMBER_ID_REQUIRED, "member_id": member_id}
            return await self._add(member_id, body, client_id, host)
        if member_id in self._pending:
            self._pending.pop(member_id).cancel()
            return await self._add(member_id, body, client_id, host)
        code = self.member_error(member_id, instance)
        if code:
            return {"error_code": code, "member_id": member_id}
        return await self._rejoin(self.members[member_id], body)

    def _join_error(self, body: Fields) -> int:
        if not SESSION_MS_MIN <= body["session_timeout_ms"] <= SESSION_MS_MAX:
            return e.INVALID_SESSION_TIMEOUT
        if not body["protocols"] or not body["protocol_type"]:
            return e.INCONSISTENT_GROUP_PROTOCOL
        others = [each for each in self.members.values() if each.id != body["member_id"]]
        if others:
            offered = {each["name"] for each in body["protocols"]}
            common = set.intersection(*(set(each.protocols) for each in others))
            if body["protocol_type"] != self.protocol_type or not offered & common:
                return e.INCONSISTENT_GROUP_PROTOCOL
        return e.NONE

    async def _add(self, member_id: str, body: Fields, client_id: str, host: str) -> Fields:
        member = self.members[member_id] = Member(member_id, body, client_id, host)
        if member.instance is not None:
            self._static[member.instance] = member_id
        self.protocol_type = body["protocol_type"]
        return await self._wait_joined(member)

    async def _rejoin(self, member: Member, body: Fields) -> Fields:
        before = member.protocols
        member.update(body)
        self.touch(member)
        is_same = list(before.items()) == list(member.protocols.items())
        if is_same and (self.state is State.COMPLETING or (self.state is State.STABLE and member.id != self.leader)):
            return self._join_response(member)
        return await self._wait_joined(member)

    async def _replace(self, body: Fields, version: int, client_id: str, host: str) -> Fields:
        """Replace a static member that has returned, and fence its previous member id."""
        old = self.members.pop(self._static[body["group_instance_id"]])
        _complete(old.join, {"error_code": e.FENCED_INSTANCE_ID, "member_id": old.id})
        _complete(old.sync, {"error_code": e.FENCED_INSTANCE_ID})
        if old.timer is not None:
            old.timer.cancel()
        member = Member(self._new_id(body["group_instance_id"]), body, client_id, host)
        member.assignment, member.has_synced = old.assignment, old.has_synced
        self.members[member.id] = member
        self._static[body["group_instance_id"]] = member.id
        was_leader = self.leader == old.id
        if was_leader:
            self.leader = member.id
        is_same = list(old.protocols.items()) == list(member.protocols.items())
        if self.state is not State.STABLE or not is_same:
            return await self._wait_joined(member)
        self.touch(member)
        response = self._join_response(member)
        if was_leader and version >= SKIPS_SINCE:
            response["skip_assignment"] = True
        elif was_leader:
            # Name the old id as leader, so that the member acts as a follower and keeps the current assignment.
            response |= {"leader": old.id, "members": ()}
        return response

    async def _wait_joined(self, member: Member) -> Fields:
        _complete(member.join, {"error_code": e.REBALANCE_IN_PROGRESS, "member_id": member.id})
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
            _complete(member.sync, {"error_code": e.REBALANCE_IN_PROGRESS})
            member.sync = None
        limit_s = max((member.rebalance_s for member in self.members.values()), default=0.0)
        self._set_timer(FIRST_WAIT_S if was_empty else limit_s, self._begin)
        self._is_first = was_empty

    def _begin_if_complete(self) -> None:
        is_waiting = self.state is State.PREPARING and not self._is_first and not self._pending
        if is_waiting and all(member.join is not None for member in self.members.values()):
            self._begin()

    def _begin(self) -> None:
        """Start a generation with the members that have joined."""
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
            # Only static members that have not rejoined are left; their session timeouts remove them.
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
            _complete(join, self._join_response(member))
        self._set_timer(max(member.rebalance_s for member in self.members.values()), self._sync_timed_out)

    def _vote(self) -> str:
        common = set.intersection(*(set(member.protocols) for member in self.members.values()))
        votes = Counter(next(name for name in member.protocols if name in common) for member in self.members.values())
        return votes.most_common(1)[0][0]

    def _join_response(self, member: Member) -> Fields:
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

    async def sync(self, body: Fields) -> Fields:
        """Handle SyncGroup. Returns when the leader has sent the assignment."""
        code = self.generation_error(body["member_id"], body["group_instance_id"], body["generation_id"])
        if code:
            return {"error_code": code}
        for field, known in (("protocol_type", self.protocol_type), ("protocol_name", self.protocol)):
            if body[field] is not None and body[field] != known:
                return {"error_code": e.INCONSISTENT_GROUP_PROTOCOL}
        member = self.members[body["member_id"]]
        self.touch(member)
        if self.state is State.PREPARING:
            return {"error_code": e.REBALANCE_IN_PROGRESS}
        member.has_synced = True
        if self.state is State.STABLE:
            return self._sync_response(member)
        _complete(member.sync, {"error_code": e.REBALANCE_IN_PROGRESS})
        future: asyncio.Future[Fields] = self._loop.create_future()
        member.sync = future
        if member.id == self.leader:
            self._assign({each["member_id"]: each["assignment"] for each in body["assignments"]})
        return await future

    def _assign(self, assignments: dict[str, bytes]) -> None:
        self.state = State.STABLE
        for member in self.members.values():
            member.assignment = assignments.get(member.id, b"")
            sync, member.sync = member.sync, None
            _complete(sync, self._sync_response(member))
            self.touch(member)

    def _sync_response(self, member: Member) -> Fields:
        return {
            "protocol_type": self.protocol_type,
            "protocol_name": self.protocol,
            "assignment": member.assignment,
        }

    def _sync_timed_out(self) -> None:
        """Remove members that did not send SyncGroup in time, and rebalance."""
        self._timer = None
        late = [member for member in self.members.values() if not member.has_synced]
        if self.state in {State.COMPLETING, State.STABLE} and late:
            for member in late:
                self._drop(member)
            self._after_removal()

    def heartbeat(self, member_id: str, instance: str | None, generation: int) -> int:
        code = self.generation_error(member_id, instance, generation)
        if not code:
            self.touch(self.members[member_id])
            if self.state is State.PREPARING:
                return e.REBALANCE_IN_PROGRESS
        return code

    def leave(self, member_id: str, instance: str | None) -> int:
        if instance is not None and not member_id:
            member_id = self._static.get(instance, "")
        if member_id in self._pending:
            self._pending.pop(member_id).cancel()
            self._begin_if_complete()
            return e.NONE
        code = self.member_error(member_id, instance)
        if not code:
            self._drop(self.members[member_id])
            self._after_removal()
        return code

    def member_error(self, member_id: str, instance: str | None) -> int:
        if instance is not None and instance in self._static and self._static[instance] != member_id:
            return e.FENCED_INSTANCE_ID
        return e.NONE if member_id in self.members else e.UNKNOWN_MEMBER_ID

    def generation_error(self, member_id: str, instance: str | None, generation: int) -> int:
        """Return the error code if the member or its generation is invalid, else NONE."""
        code = self.member_error(member_id, instance)
        if not code and generation != self.generation:
            return e.ILLEGAL_GENERATION
        return code

    def commit_error(self, member_id: str, instance: str | None, generation: int) -> int:
        """Like `generation_error`, for OffsetCommit. Non-members may commit while the group is empty."""
        if generation < 0 and not self.members:
            return e.NONE
        if generation < 0 or self.state is State.EMPTY:
            return e.UNKNOWN_MEMBER_ID
        code = self.generation_error(member_id, instance, generation)
        if not code:
            self.touch(self.members[member_id])
            if self.state is State.COMPLETING:
                return e.REBALANCE_IN_PROGRESS
        return code

    def touch(self, member: Member) -> None:
        """Restart the member's session timeout."""
        if member.timer is not None:
            member.timer.cancel()
        member.timer = self._loop.call_later(member.session_s, self._session_expired, member)

    def _session_expired(self, member: Member) -> None:
        member.timer = None
        if self.members.get(member.id) is not member:
            return
        if member.is_waiting:
            self.touch(member)
            return
        self._drop(member)
        self._after_removal()

    def _drop(self, member: Member) -> None:
        del self.members[member.id]
        if member.timer is not None:
            member.timer.cancel()
        if member.instance is not None and self._static.get(member.instance) == member.id:
            del self._static[member.instance]
        _complete(member.join, {"error_code": e.UNKNOWN_MEMBER_ID, "member_id": member.id})
        _complete(member.sync, {"error_code": e.UNKNOWN_MEMBER_ID})

    def _after_removal(self) -> None:
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
        """Fail the pending requests with COORDINATOR_NOT_AVAILABLE."""
        self.state = State.DEAD
        self._stop_timer()
        for timer in self._pending.values():
            timer.cancel()
        for member in self.members.values():
            if member.timer is not None:
                member.timer.cancel()
            _complete(member.join, {"error_code": e.COORDINATOR_NOT_AVAILABLE, "member_id": member.id})
            _complete(member.sync, {"error_code": e.COORDINATOR_NOT_AVAILABLE})
        self.members.clear()

    def _set_timer(self, delay_s: float, call: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(delay_s, call)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _complete(future: asyncio.Future[Fields] | None, response: Fields) -> None:
    if future is not None and not future.done():
        future.set_result(response)
