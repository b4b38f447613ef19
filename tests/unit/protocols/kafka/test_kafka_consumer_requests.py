"""Requests of KIP-848 consumer groups: invalid ones, time, topics, and the classic protocol.

They run on a loop with a manual clock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest
from tests.unit.protocols.kafka.test_kafka_context import AnyUser
from tests.unit.protocols.kafka.test_kafka_context import Harness as ContextHarness

from basaltmq.protocols.kafka.context import Client
from basaltmq.protocols.kafka.groups import assignors, consumer_group
from basaltmq.protocols.kafka.groups import consumer_group_table as module
from basaltmq.protocols.kafka.groups.consumer_group import Timing
from basaltmq.protocols.kafka.server import handlers
from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.api import APIS
from basaltmq.store.families import Family
from basaltmq.store.keys import streams as stream_keys

SESSION_S = Timing().session_ms / 1000
Fields = dict[str, Any]


class SteadyTime(asyncio.SelectorEventLoop):
    """A loop whose time only the test advances, not a wait for a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s


async def pass_time(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteadyTime)
    loop.now_s += seconds
    for _ in range(5):
        await asyncio.sleep(0)


class Harness(ContextHarness):
    async def ask(self, key: int, version: int, body: Fields) -> Fields:
        raw = k.encode_request(key, version, 1, "test", body)
        response: Any = handlers()[key](self.context, cast(Client, AnyUser()), k.decode_request(raw[4:]))
        if asyncio.iscoroutine(response):
            response = await response
        encoded = b"".join(k.encode_response(APIS[key], version, 1, response))
        return k.decode_response(key, version, encoded[4:])[1]

    async def beat(self, member: str = "m", epoch: int = 0, version: int = 1, **fields: Any) -> Fields:
        body: Fields = {"group_id": "g", "member_id": member, "member_epoch": epoch}
        if epoch == 0:
            body |= {"rebalance_timeout_ms": 60_000, "subscribed_topic_names": ["t"], "topic_partitions": []}
        return await self.ask(k.CONSUMER_GROUP_HEARTBEAT, version, body | fields)

    async def join_classic(self, group: str = "g") -> Fields:
        body = {
            "group_id": group,
            "session_timeout_ms": 10_000,
            "rebalance_timeout_ms": 10_000,
            "member_id": "",
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": b""}],
        }
        return await self.ask(k.JOIN_GROUP, 3, body)

    async def commit(self, member: str, epoch: int, version: int = 9) -> int:
        partitions = [{"partition_index": 0, "committed_offset": 1, "committed_metadata": None}]
        body = {"group_id": "g", "generation_id": epoch, "member_id": member}
        response = await self.ask(
            k.OFFSET_COMMIT, version, {**body, "topics": [{"name": "t", "partitions": partitions}]}
        )
        code: int = response["topics"][0]["partitions"][0]["error_code"]
        return code

    async def fetch_offset(self, member: str | None, epoch: int) -> tuple[int, list[int]]:
        wanted = [{"name": "t", "partition_indexes": [0]}]
        asked = {"group_id": "g", "member_id": member, "member_epoch": epoch, "topics": wanted}
        (found,) = (await self.ask(k.OFFSET_FETCH, 9, {"groups": [asked]}))["groups"]
        offsets = [each["committed_offset"] for topic in found["topics"] for each in topic["partitions"]]
        return found["error_code"], offsets

    async def listed(self, **filters: list[str]) -> list[tuple[str, str, str]]:
        found = await self.ask(k.LIST_GROUPS, 5, {"states_filter": [], "types_filter": [], **filters})
        return [(each["group_id"], each["group_type"], each["group_state"]) for each in found["groups"]]

    async def described(self, group: str = "g") -> Fields:
        found = await self.ask(k.CONSUMER_GROUP_DESCRIBE, 1, {"group_ids": [group]})
        one: Fields = found["groups"][0]
        return one

    def kept(self) -> bytes | None:
        return self.store.get(Family.CONSUMER_GROUPS, stream_keys.consumer_group_key("g"))


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Callable[[Harness], Coroutine[Any, Any, None]]], None]:
    def run_it(body: Callable[[Harness], Coroutine[Any, Any, None]]) -> None:
        harness = Harness(tmp_path / "store")
        harness.topic("t")
        try:
            with asyncio.Runner(loop_factory=SteadyTime) as runner:
                runner.run(body(harness))
        finally:
            harness.close()

    return run_it


Run = Callable[[Callable[[Harness], Coroutine[Any, Any, None]]], None]


def partitions(response: Fields) -> int:
    return sum(len(each["partitions"]) for each in response["assignment"]["topic_partitions"])


WRONG: list[tuple[Fields, int]] = [
    ({"member_id": ""}, e.INVALID_REQUEST),
    ({"member_epoch": -3}, e.INVALID_REQUEST),
    ({"member_epoch": -2}, e.INVALID_REQUEST),
    ({"instance_id": ""}, e.INVALID_REQUEST),
    ({"rack_id": ""}, e.INVALID_REQUEST),
    ({"member_id": "m" * 2000}, e.INVALID_REQUEST),
    ({"rebalance_timeout_ms": -1}, e.INVALID_REQUEST),
    ({"rebalance_timeout_ms": -7}, e.INVALID_REQUEST),
    ({"subscribed_topic_names": None}, e.INVALID_REQUEST),
    ({"subscribed_topic_names": ["t"] * 10_001}, e.INVALID_REQUEST),
    ({"topic_partitions": None}, e.INVALID_REQUEST),
    ({"server_assignor": "mine"}, e.UNSUPPORTED_ASSIGNOR),
    ({"subscribed_topic_regex": "(?!a)b"}, e.INVALID_REGULAR_EXPRESSION),
    ({"group_id": ""}, e.INVALID_GROUP_ID),
    ({"member_epoch": 1}, e.UNKNOWN_MEMBER_ID),
    ({"member_epoch": -1}, e.UNKNOWN_MEMBER_ID),
]


def test_invalid_heartbeats_are_refused_and_leave_no_state(run: Run) -> None:
    async def body(harness: Harness) -> None:
        for fields, code in WRONG:
            response = await harness.beat(**fields)
            assert (response["error_code"], response["assignment"]) == (code, None), fields
        assert not harness.context.consumer_groups.by_name
        assert harness.kept() is None
        named = await harness.beat("", version=0)
        assert named["error_code"] == 0
        assert len(named["member_id"]) > 10, "in the first version the broker names members"

    run(body)


def test_silent_members_expire_and_their_empty_group_is_freed(run: Run) -> None:
    async def body(harness: Harness) -> None:
        await harness.beat("a")
        await pass_time(SESSION_S / 2)
        await harness.beat("b")
        await pass_time(SESSION_S / 2 - 1)
        group = harness.context.consumer_groups.by_name["g"]
        assert set(group.members) == {"a", "b"}
        await pass_time(1.01)
        assert set(group.members) == {"b"}
        assert (await harness.beat("b", 2))["member_epoch"] == 3
        for _ in range(5):
            await pass_time(SESSION_S - 1)
            assert (await harness.beat("b", 3, topic_partitions=[]))["error_code"] == 0
        await pass_time(SESSION_S + 0.01)
        assert not harness.context.consumer_groups.by_name
        assert harness.kept() is None, "it had nothing to remember"
        assert (await harness.beat("b", 3))["error_code"] == e.UNKNOWN_MEMBER_ID

    run(body)


def test_topics_created_in_any_thread_reach_members_by_name_and_by_pattern(run: Run) -> None:
    async def body(harness: Harness) -> None:
        first = await harness.beat("a", subscribed_topic_names=["t", "late"])
        assert partitions(first) == 1
        second = await harness.beat("b", group_id="h", subscribed_topic_names=[], subscribed_topic_regex="la.*|t")
        assert partitions(second) == 0
        group = harness.context.consumer_groups.by_name["h"]
        await asyncio.wait(harness.context.consumer_groups._tasks)
        second = await harness.beat("b", second["member_epoch"], group_id="h")
        assert partitions(second) == 1
        await asyncio.to_thread(harness.topic, "late")
        await pass_time(0)
        assert partitions(await harness.beat("a", first["member_epoch"])) == 2
        assert partitions(await harness.beat("b", second["member_epoch"], group_id="h")) == 2
        await asyncio.to_thread(harness.context.plane.topics.delete, "late")
        await pass_time(0)
        assert group.patterns["la.*|t"].topics == frozenset(("t",))

    run(body)


def test_offsets_are_committed_and_fetched_by_members_in_their_epoch(run: Run) -> None:
    async def body(harness: Harness) -> None:
        assert await harness.commit("", -1) == 0, "nobody is there"
        assert await harness.commit("m", 1) == e.UNKNOWN_MEMBER_ID
        assert await harness.commit("m", 1, version=8) == e.ILLEGAL_GENERATION
        epoch = (await harness.beat())["member_epoch"]
        assert await harness.commit("m", epoch) == 0
        assert await harness.commit("m", epoch, version=8) == e.UNSUPPORTED_VERSION
        assert await harness.commit("m", epoch + 1) == e.STALE_MEMBER_EPOCH
        assert await harness.commit("", -1) == e.UNKNOWN_MEMBER_ID
        assert await harness.fetch_offset("m", epoch) == (0, [1])
        assert await harness.fetch_offset(None, -1) == (0, [1]), "anybody may look"
        assert await harness.fetch_offset("m", epoch - 1) == (e.STALE_MEMBER_EPOCH, [])
        assert await harness.fetch_offset("other", epoch) == (e.UNKNOWN_MEMBER_ID, [])

    run(body)


def test_a_group_changes_its_protocol_only_while_it_is_empty(run: Run) -> None:
    async def body(harness: Harness) -> None:
        joining = asyncio.ensure_future(harness.join_classic())
        await pass_time(0)
        await pass_time(1)
        assert (await joining)["error_code"] == 0
        refused = await harness.beat()
        assert refused["error_code"] == e.GROUP_ID_NOT_FOUND
        assert "classic" in refused["error_message"]
        await pass_time(11)
        assert (await harness.beat())["error_code"] == 0, "the classic member is gone"
        assert (await harness.join_classic())["error_code"] == e.INCONSISTENT_GROUP_PROTOCOL
        member = {"group_id": "g", "generation_id": 1, "member_id": "m"}
        for key in (k.HEARTBEAT, k.SYNC_GROUP):
            assert (await harness.ask(key, 3, member))["error_code"] == e.UNKNOWN_MEMBER_ID
        left = await harness.ask(k.LEAVE_GROUP, 3, {"group_id": "g", "members": [{"member_id": "m"}]})
        assert left["members"][0]["error_code"] == e.UNKNOWN_MEMBER_ID
        assert await harness.commit("m", 1) == 0
        assert (await harness.beat(epoch=-1))["error_code"] == 0
        assert await harness.listed() == [("g", "consumer", "Empty")], "it has offsets, and is what it was"
        assert (await harness.described())["group_epoch"] == 2
        joining = asyncio.ensure_future(harness.join_classic())
        await pass_time(0)
        assert await harness.listed() == [("g", "classic", "PreparingRebalance")]
        await pass_time(1)
        assert (await joining)["error_code"] == 0
        assert (await harness.described())["error_code"] == e.GROUP_ID_NOT_FOUND

    run(body)


def test_groups_are_listed_by_type_and_described_with_it(run: Run) -> None:
    async def body(harness: Harness) -> None:
        await harness.beat("a", instance_id="i", rack_id="r")
        joining = asyncio.ensure_future(harness.join_classic("old"))
        await pass_time(0)
        everything = {("g", "consumer", "Stable"), ("old", "classic", "PreparingRebalance")}
        assert set(await harness.listed()) == everything
        assert await harness.listed(types_filter=["Consumer"]) == [("g", "consumer", "Stable")]
        assert await harness.listed(states_filter=["stable"]) == [("g", "consumer", "Stable")]
        assert await harness.listed(states_filter=["Empty"]) == []
        found = await harness.described()
        assert (found["group_state"], found["group_epoch"], found["assignment_epoch"]) == ("Stable", 1, 1)
        (member,) = found["members"]
        (share,) = member["assignment"]["topic_partitions"]
        assert (share["topic_name"], share["partitions"]) == ("t", [0])
        assert (member["member_id"], member["instance_id"], member["rack_id"]) == ("a", "i", "r")
        assert (member["member_type"], member["target_assignment"]) == (1, member["assignment"])
        for version, code in ((5, 0), (6, e.GROUP_ID_NOT_FOUND)):
            shown = (await harness.ask(k.DESCRIBE_GROUPS, version, {"groups": ["g"]}))["groups"][0]
            assert (shown["group_state"], shown["error_code"]) == ("Dead", code)
        joining.cancel()

    run(body)


def test_groups_with_members_and_offsets_of_their_topics_are_not_deleted(run: Run) -> None:
    async def body(harness: Harness) -> None:
        await harness.beat("m")
        await harness.commit("m", 1)
        deleted = await harness.ask(k.DELETE_GROUPS, 2, {"groups_names": ["g"]})
        assert deleted["results"][0]["error_code"] == e.NON_EMPTY_GROUP
        asked = {"group_id": "g", "topics": [{"name": "t", "partitions": [{"partition_index": 0}]}]}
        gone = await harness.ask(k.OFFSET_DELETE, 0, asked)
        assert gone["topics"][0]["partitions"][0]["error_code"] == e.GROUP_SUBSCRIBED_TO_TOPIC
        await harness.beat("m", 1, subscribed_topic_names=["other"])
        gone = await harness.ask(k.OFFSET_DELETE, 0, asked)
        assert gone["topics"][0]["partitions"][0]["error_code"] == 0
        await harness.beat("m", -1)
        assert harness.kept() is None
        deleted = await harness.ask(k.DELETE_GROUPS, 2, {"groups_names": ["g"]})
        assert deleted["results"][0]["error_code"] == e.GROUP_ID_NOT_FOUND
        await harness.commit("", -1)
        await harness.beat("m")
        await harness.beat("m", -1)
        assert harness.kept() is not None
        deleted = await harness.ask(k.DELETE_GROUPS, 2, {"groups_names": ["g"]})
        assert (deleted["results"][0]["error_code"], harness.kept()) == (0, None)
        assert await harness.listed() == []

    run(body)


def test_group_epochs_continue_after_a_restart(run: Run) -> None:
    async def body(harness: Harness) -> None:
        for name in ("a", "b", "c"):
            await harness.beat(name)
        harness.context.consumer_groups.close()
        again = harness.context.consumer_groups = module.ConsumerGroups(harness.context.vhost, harness.context.plane)
        assert (await harness.beat("a", 1))["error_code"] == e.UNKNOWN_MEMBER_ID
        back = await harness.beat("a")
        assert (back["member_epoch"], partitions(back)) == (4, 1)
        assert again.by_name["g"].epoch == 4

    run(body)


def test_the_number_of_members_of_all_groups_is_limited(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEMBERS_MAX", 2)

    async def body(harness: Harness) -> None:
        await harness.beat("a", group_id="one")
        await harness.beat("b", group_id="two")
        assert (await harness.beat("c", group_id="three"))["error_code"] == e.GROUP_MAX_SIZE_REACHED
        await harness.beat("a", -1, group_id="one")
        assert (await harness.beat("c", group_id="three"))["error_code"] == 0
        await harness.beat("b", -1, group_id="two")
        await pass_time(SESSION_S / 2)
        assert (await harness.beat("d", group_id="three"))["error_code"] == 0
        # Both stop sending heartbeats, one after the other.
        await pass_time(SESSION_S / 2 + 0.01)
        assert set(harness.context.consumer_groups.by_name["three"].members) == {"d"}
        await pass_time(SESSION_S / 2 + 0.01)
        assert not harness.context.consumer_groups.by_name
        for name in ("e", "f"):
            assert (await harness.beat(name))["error_code"] == 0

    run(body)


def test_group_settings_are_described_changed_validated_and_stored(run: Run) -> None:
    session, beat = "consumer.session.timeout.ms", "consumer.heartbeat.interval.ms"

    async def body(harness: Harness) -> None:
        async def shown() -> dict[str, tuple[str, int]]:
            asked = {"resources": [{"resource_type": 32, "resource_name": "g", "configuration_keys": None}]}
            found = (await harness.ask(k.DESCRIBE_CONFIGS, 4, asked))["results"][0]
            return {each["name"]: (each["value"], each["config_source"]) for each in found["configs"]}

        async def alter(
            *changes: tuple[str, str | None], operation: int = 0, name: str = "g", trial: bool = False
        ) -> int:
            configs = [{"name": label, "config_operation": operation, "value": value} for label, value in changes]
            resource = {"resource_type": 32, "resource_name": name, "configs": configs}
            asked = {"resources": [resource], "validate_only": trial}
            code: int = (await harness.ask(k.INCREMENTAL_ALTER_CONFIGS, 1, asked))["responses"][0]["error_code"]
            return code

        assert await shown() == {session: ("45000", 5), beat: ("5000", 5)}
        response = await harness.beat("a")
        assert response["heartbeat_interval_ms"] == 5000
        assert await alter((session, "20000"), trial=True) == 0
        assert await alter((session, "3000"), (beat, "1000")) == 0
        assert await shown() == {session: ("3000", 8), beat: ("1000", 8)}
        assert (await harness.beat("a", 1))["heartbeat_interval_ms"] == 1000
        for changes in ([(session, "1000")], [(session, "x")], [(session, None)], [(beat, "99")], [("other", "1")]):
            assert await alter(*changes) == e.INVALID_CONFIG, changes
        assert await alter((session, "4000"), operation=2) == e.INVALID_CONFIG
        assert await alter((session, "4000"), name="") == e.INVALID_REQUEST
        await pass_time(3.01)
        assert not harness.context.consumer_groups.by_name, "it was silent for the session that was set"
        assert (await harness.ask(k.DELETE_GROUPS, 2, {"groups_names": ["g"]}))["results"][0]["error_code"] != 0
        assert (await harness.described())["error_code"] == e.GROUP_ID_NOT_FOUND, "settings do not make a group"
        assert await harness.listed() == []
        assert (await harness.beat("a"))["heartbeat_interval_ms"] == 1000
        await harness.beat("a", -1)
        assert await alter((beat, None), operation=1) == e.INVALID_CONFIG, "by default they speak every 5 s"
        assert await alter((beat, None), (session, None), operation=1) == 0
        assert harness.kept() is None

    run(body)


@pytest.mark.promise("P13")
def test_a_new_topic_is_matched_with_many_patterns_in_several_turns(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One match may take 10 ms, and a client may subscribe to thousands of patterns."""
    monkeypatch.setattr(module, "SLICE_S", 0.0)

    async def body(harness: Harness) -> None:
        groups = harness.context.consumer_groups
        for number in range(30):
            await harness.beat("m", group_id=f"g{number}", subscribed_topic_regex=f"n.*|{number}")
        await asyncio.wait(groups._tasks)
        harness.topic("new")
        turns = 0
        while groups._applying is None or not groups._applying.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 30
        patterns = [pattern for each in groups.by_name.values() for pattern in each.patterns.values()]
        assert all("new" in (pattern.topics or ()) for pattern in patterns)

    run(body)


@pytest.mark.promise("P13")
def test_a_large_target_is_computed_in_a_thread_and_a_failed_one_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    uniform = assignors.ASSIGNORS["uniform"]
    threads: list[int] = []

    def computed(*given: Any) -> Any:
        threads.append(threading.get_ident())
        if len(threads) == 1:
            raise ValueError("broken")
        return uniform(*given)

    async def body(harness: Harness) -> None:
        monkeypatch.setattr(consumer_group, "ASSIGNED_HERE_MAX", 0)
        monkeypatch.setattr(consumer_group, "ASSIGNORS", {"uniform": computed})
        groups = harness.context.consumer_groups
        joined = await harness.beat()
        assert joined["assignment"]["topic_partitions"] == []
        for _ in range(2):
            await asyncio.gather(*groups._tasks)
            found = await harness.beat(epoch=joined["member_epoch"])
        assert [each["partitions"] for each in found["assignment"]["topic_partitions"]] == [[0]]
        assert len(threads) == 2
        assert threading.get_ident() not in threads

    run(body)


@pytest.mark.promise("P13")
def test_a_group_may_go_and_the_broker_may_stop_while_a_target_is_computed(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(harness: Harness) -> None:
        monkeypatch.setattr(consumer_group, "ASSIGNED_HERE_MAX", 0)
        groups = harness.context.consumer_groups
        await harness.beat()
        await harness.beat(epoch=-1)
        await harness.beat("other")
        await asyncio.gather(*groups._tasks)
        group = groups.get("g")
        assert group is not None
        assert set(group.target) == {"other"}
        await harness.beat("third")
        (task,) = groups._tasks
        groups.close()
        await asyncio.wait([task])
        assert task.cancelled()

    run(body)
    assert not caplog.records
