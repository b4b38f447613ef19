"""A consumer group on a loop with a manual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from basaltmq.protocols.kafka.groups.classic_group import ClassicGroup, State
from basaltmq.protocols.kafka.wire import errors as e

SESSION_S = 10.0
REBALANCE_S = 60.0


class FakeTime(asyncio.SelectorEventLoop):
    """A loop that advances to the next timer as soon as it is idle."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        live = [each._when for each in self._scheduled if not each._cancelled]  # type: ignore[attr-defined]
        if not self._ready and live:  # type: ignore[attr-defined]
            self._now = max(self._now, min(live))
        super()._run_once()  # type: ignore[misc]


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=FakeTime) as runner:
        runner.run(body())


class Harness:
    """A group and its clients."""

    def __init__(self) -> None:
        self.last = 0
        self.emptied: list[ClassicGroup] = []
        self.group = ClassicGroup("g", self._new_id, self.emptied.append)

    def _new_id(self, client: str) -> str:
        self.last += 1
        return f"{client}-{self.last}"

    def join(
        self,
        member_id: str = "",
        *,
        instance: str | None = None,
        version: int = 3,
        protocols: tuple[str, ...] = ("range",),
    ) -> asyncio.Task[dict[str, Any]]:
        asked = {
            "member_id": member_id,
            "group_instance_id": instance,
            "session_timeout_ms": int(SESSION_S * 1000),
            "rebalance_timeout_ms": int(REBALANCE_S * 1000),
            "protocol_type": "consumer",
            "protocols": [{"name": name, "metadata": name.encode()} for name in protocols],
        }
        return asyncio.create_task(self.group.join(asked, version, "client", "host"))

    def sync(self, member_id: str, generation: int, **dealt: bytes) -> asyncio.Task[dict[str, Any]]:
        asked = {
            "member_id": member_id,
            "group_instance_id": None,
            "generation_id": generation,
            "protocol_type": None,
            "protocol_name": None,
            "assignments": [
                {"member_id": name.replace("_", "-"), "assignment": share} for name, share in dealt.items()
            ],
        }
        return asyncio.create_task(self.group.sync(asked))

    async def two(self) -> tuple[str, str]:
        """Return two members of a stable group, the leader first."""
        first, second = await asyncio.gather(self.join(), self.join())
        leader, other = (first, second) if first["leader"] == first["member_id"] else (second, first)
        assert len(leader["members"]) == 2
        assert not other["members"]
        shares = {leader["member_id"].replace("-", "_"): b"A", other["member_id"].replace("-", "_"): b"B"}
        dealt = await asyncio.gather(self.sync(other["member_id"], 1), self.sync(leader["member_id"], 1, **shares))
        assert [each["assignment"] for each in dealt] == [b"B", b"A"]
        assert self.group.state is State.STABLE
        return leader["member_id"], other["member_id"]


def test_members_that_join_together_form_one_generation_and_get_their_assignments() -> None:
    async def body() -> None:
        harness = Harness()
        await harness.two()
        assert harness.group.generation == 1

    run(body)


def test_a_third_member_triggers_a_rebalance() -> None:
    async def body() -> None:
        harness = Harness()
        leader, other = await harness.two()
        third = harness.join()
        await asyncio.sleep(0)
        assert harness.group.heartbeat(leader, None, 1) == e.REBALANCE_IN_PROGRESS
        joined = await asyncio.gather(harness.join(leader), harness.join(other), third)
        assert {each["generation_id"] for each in joined} == {2}
        assert harness.group.heartbeat(leader, None, 1) == e.ILLEGAL_GENERATION
        assert harness.group.commit_error(leader, None, 1) == e.ILLEGAL_GENERATION
        assert harness.group.commit_error("stranger", None, 2) == e.UNKNOWN_MEMBER_ID

    run(body)


def test_a_member_that_does_not_rejoin_is_removed_after_the_rebalance_timeout() -> None:
    async def body() -> None:
        harness = Harness()
        leader, other = await harness.two()
        third = harness.join()
        again = harness.join(leader)
        keeps = asyncio.get_running_loop().time()
        # It sends heartbeats but does not join.
        while not again.done():
            harness.group.heartbeat(other, None, 1)
            await asyncio.sleep(1)
        assert asyncio.get_running_loop().time() - keeps >= REBALANCE_S - 1
        assert other not in harness.group.members
        assert {(await again)["generation_id"], (await third)["generation_id"]} == {2}

    run(body)


def test_a_silent_member_is_removed_after_its_session_timeout() -> None:
    async def body() -> None:
        harness = Harness()
        leader, other = await harness.two()
        for _ in range(30):
            await asyncio.sleep(SESSION_S / 10)
            if harness.group.heartbeat(leader, None, 1) == e.REBALANCE_IN_PROGRESS:
                break
        assert other not in harness.group.members
        assert (await harness.join(leader))["generation_id"] == 2

    run(body)


def test_a_group_is_empty_after_its_last_member_left_or_expired() -> None:
    async def body() -> None:
        harness = Harness()
        leader, other = await harness.two()
        assert harness.group.leave(other, None) == e.NONE
        assert harness.group.leave(other, None) == e.UNKNOWN_MEMBER_ID
        await asyncio.sleep(REBALANCE_S + SESSION_S)
        assert leader not in harness.group.members
        assert harness.group.state is State.EMPTY
        assert harness.emptied
        assert harness.group.commit_error("", None, -1) == e.NONE

    run(body)


def test_members_that_do_not_send_sync_group_are_removed() -> None:
    async def body() -> None:
        harness = Harness()
        first, second = await asyncio.gather(harness.join(), harness.join())
        lazy, other = (first, second) if first["leader"] == first["member_id"] else (second, first)
        waiting = harness.sync(other["member_id"], 1)
        for _ in range(int(REBALANCE_S) + 1):
            await asyncio.sleep(1)
            if waiting.done():
                break
            harness.group.heartbeat(lazy["member_id"], None, 1)
        assert (await waiting)["error_code"] == e.REBALANCE_IN_PROGRESS
        assert lazy["member_id"] not in harness.group.members

    run(body)


def test_a_member_must_rejoin_with_its_assigned_id() -> None:
    async def body() -> None:
        harness = Harness()
        reported = await harness.join(version=4)
        assert reported["error_code"] == e.MEMBER_ID_REQUIRED
        joined = await harness.join(reported["member_id"], version=4)
        assert (joined.get("error_code", 0), joined["generation_id"]) == (0, 1)
        assert (await harness.join("made-up", version=4))["error_code"] == e.UNKNOWN_MEMBER_ID

    run(body)


@pytest.mark.parametrize("version", [5, 9])
def test_a_returning_static_member_replaces_and_fences_its_previous_id(version: int) -> None:
    async def body() -> None:
        harness = Harness()
        first = await harness.join(instance="one", version=version)
        old = first["member_id"]
        await harness.sync(old, 1, **{old.replace("-", "_"): b"A"})
        back = await harness.join(instance="one", version=version)
        assert back["member_id"] != old
        assert back["generation_id"] == 1
        assert harness.group.state is State.STABLE
        if version >= 9:
            assert back["skip_assignment"]
        else:
            assert back["leader"] == old
        assert harness.group.heartbeat(old, "one", 1) == e.FENCED_INSTANCE_ID
        assert (await harness.sync(back["member_id"], 1))["assignment"] == b"A"

    run(body)


def test_a_common_protocol_is_chosen_and_members_without_one_are_refused() -> None:
    async def body() -> None:
        harness = Harness()
        joined = await asyncio.gather(
            harness.join(protocols=("sticky", "range")), harness.join(protocols=("roundrobin", "range"))
        )
        assert {each["protocol_name"] for each in joined} == {"range"}
        refused = await harness.join(protocols=("sticky",))
        assert refused["error_code"] == e.INCONSISTENT_GROUP_PROTOCOL

    run(body)


def test_commits_are_checked_against_the_state_of_the_group() -> None:
    async def body() -> None:
        harness = Harness()
        group = harness.group
        assert group.commit_error("", None, -1) == e.NONE, "nobody is there"
        assert group.commit_error("gone", None, 3) == e.UNKNOWN_MEMBER_ID
        first, second = await asyncio.gather(harness.join(), harness.join())
        leader, other = (first, second) if first["leader"] == first["member_id"] else (second, first)
        assert group.commit_error(leader["member_id"], None, 1) == e.REBALANCE_IN_PROGRESS, "nothing is dealt out"
        waiting = harness.sync(other["member_id"], 1)
        await harness.sync(leader["member_id"], 1)
        await waiting
        assert group.commit_error(leader["member_id"], None, 1) == e.NONE
        assert group.commit_error("", None, -1) == e.UNKNOWN_MEMBER_ID, "members are there"
        harness.join()
        await asyncio.sleep(0)
        assert group.state is State.PREPARING
        assert group.commit_error(leader["member_id"], None, 1) == e.NONE, "before it joins again it may commit"

    run(body)


def test_a_static_member_is_kept_beyond_a_rebalance_until_its_session_timeout() -> None:
    async def body() -> None:
        harness = Harness()
        static = await harness.join(instance="one", version=5)
        await harness.sync(static["member_id"], 1, **{static["member_id"].replace("-", "_"): b"A"})
        coming = harness.join()
        until = asyncio.get_running_loop().time() + REBALANCE_S + 1
        while asyncio.get_running_loop().time() < until:
            # It sends heartbeats but does not join.
            harness.group.heartbeat(static["member_id"], "one", 1)
            await asyncio.sleep(1)
        joined = await coming
        assert static["member_id"] in harness.group.members
        assert joined["leader"] == joined["member_id"], "one that is not there does not deal out"
        assert {each["group_instance_id"] for each in joined["members"]} == {"one", None}
        harness.sync(joined["member_id"], 2)
        await asyncio.sleep(SESSION_S - 1)
        assert static["member_id"] in harness.group.members
        await asyncio.sleep(2)
        assert static["member_id"] not in harness.group.members

    run(body)


def test_a_member_with_a_pending_request_does_not_expire() -> None:
    async def body() -> None:
        harness = Harness()
        leader, other = await harness.two()
        coming = harness.join()
        again = harness.join(leader)
        for _ in range(int(SESSION_S) * 3):
            # Much longer than a session. The others wait in JoinGroup for this member.
            harness.group.heartbeat(other, None, 1)
            await asyncio.sleep(1)
        assert leader in harness.group.members
        joined = await asyncio.gather(harness.join(other), coming, again)
        assert len(joined) == len(harness.group.members) == 3

    run(body)


def test_an_assigned_member_id_is_kept_for_its_session_timeout() -> None:
    async def body() -> None:
        harness = Harness()
        leader, other = await harness.two()
        reported = await harness.join(version=4)
        joining = [harness.join(leader), harness.join(other)]
        third = harness.join()
        await asyncio.sleep(SESSION_S - 1)
        assert not any(each.done() for each in (*joining, third)), "the one with the id may come any moment"
        await asyncio.sleep(2)
        assert {(await each)["generation_id"] for each in (*joining, third)} == {2}
        assert (await harness.join(reported["member_id"], version=4))["error_code"] == e.UNKNOWN_MEMBER_ID

    run(body)


def test_sync_group_of_another_protocol_or_generation_is_refused() -> None:
    async def body() -> None:
        harness = Harness()
        leader, other = await harness.two()
        asked: dict[str, Any] = {"member_id": leader, "group_instance_id": None, "generation_id": 1, "assignments": []}
        for wrong in (
            {"protocol_type": "connect", "protocol_name": None},
            {"protocol_type": None, "protocol_name": "x"},
        ):
            assert (await harness.group.sync({**asked, **wrong}))["error_code"] == e.INCONSISTENT_GROUP_PROTOCOL
        for generation in (0, 2):
            assert (await harness.sync(leader, generation))["error_code"] == e.ILLEGAL_GENERATION
            assert harness.group.heartbeat(other, None, generation) == e.ILLEGAL_GENERATION
        assert harness.group.leave(leader, None) == e.NONE
        assert harness.group.heartbeat(other, None, 1) == e.REBALANCE_IN_PROGRESS
        again = await harness.join(other)
        assert (again["leader"], again["generation_id"]) == (other, 2), "the leader that left leads no more"

    run(body)


def test_closing_the_group_fails_pending_requests() -> None:
    async def body() -> None:
        harness = Harness()
        waiting = harness.join()
        await asyncio.sleep(0)
        harness.group.close()
        assert (await waiting)["error_code"] == e.COORDINATOR_NOT_AVAILABLE

    run(body)
