"""A KIP-848 consumer group: identification of members, fencing, and reassignment of partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from basaltmq.protocols.kafka.groups import consumer_group as module
from basaltmq.protocols.kafka.groups.assignors import RANGE, TopicSize
from basaltmq.protocols.kafka.groups.consumer_group import WAITING_HEARTBEAT_MS, ConsumerGroup, State, Timing
from basaltmq.protocols.kafka.groups.consumer_member import STATIC_LEAVE
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.errors import Refused

T = UUID(int=1)
TIMING = Timing(session_ms=10_000, heartbeat_ms=3_000)
REBALANCE_MS = 5_000


class Harness:
    """A group over topics, with short forms of requests."""

    def __init__(self, **partitions: int) -> None:
        self.topics = {
            name: TopicSize(UUID(int=number).bytes, count) for number, (name, count) in enumerate(partitions.items(), 1)
        }
        self.group = ConsumerGroup("g", self.topics.get, timing=TIMING)
        self.now_ms = 0
        self.may: Callable[[str], bool] = lambda name: True

    def say(self, member: str, epoch: int, owned: set[int] | None = None, **fields: Any) -> Any:
        asked: dict[str, Any] = {
            "group_id": "g",
            "member_id": member,
            "member_epoch": epoch,
            "instance_id": None,
            "rack_id": None,
            "rebalance_timeout_ms": -1,
            "subscribed_topic_names": None,
            "subscribed_topic_regex": None,
            "server_assignor": None,
            "topic_partitions": None if owned is None else [{"topic_id": T, "partitions": sorted(owned)}],
        }
        asked |= fields
        if epoch < 0:
            return self.group.leave(asked, self.now_ms)
        return self.group.heartbeat(asked, "client", "host", self.may, self.now_ms)

    def join(self, member: str, names: list[str] | None = None, **fields: Any) -> Any:
        subscribed = ["t"] if names is None else names
        fields = {"rebalance_timeout_ms": REBALANCE_MS, "subscribed_topic_names": subscribed, **fields}
        return self.say(member, 0, set(), **fields)

    def refused(self, code: int, call: Callable[[], Any]) -> None:
        with pytest.raises(Refused) as caught:
            call()
        assert caught.value.code == code, caught.value


def reported(response: dict[str, Any]) -> set[int] | None:
    if response.get("assignment") is None:
        return None
    return {at for each in response["assignment"]["topic_partitions"] for at in each["partitions"]}


def test_a_partition_is_assigned_after_its_previous_member_revoked_it() -> None:
    harness = Harness(t=4)
    assert (reported(harness.join("a")), harness.group.state) == ({0, 1, 2, 3}, State.STABLE)
    second = harness.join("b")
    assert (reported(second), second["member_epoch"], harness.group.state) == (set(), 2, State.RECONCILING)
    assert second["heartbeat_interval_ms"] == WAITING_HEARTBEAT_MS, "it asks soon again"
    kept = harness.say("a", 1)
    assert (reported(kept), kept["member_epoch"]) == ({0, 1}, 1), "it is told, and stays where it is"
    assert reported(harness.say("b", 2)) is None, "nothing is free"
    assert reported(harness.say("a", 1, {0, 1, 2, 3})) is None, "it has not let go"
    assert reported(harness.say("b", 2)) is None
    assert harness.say("a", 1, {0, 1, 2})["member_epoch"] == 1
    assert reported(harness.say("b", 2)) == {3}, "what was let go of need not wait for the rest"
    done = harness.say("a", 1, {0, 1})
    assert (done["member_epoch"], reported(done), done["heartbeat_interval_ms"]) == (2, None, TIMING.heartbeat_ms)
    assert reported(harness.say("b", 2, {3})) == {2, 3}
    assert harness.group.state is State.STABLE
    assert reported(harness.say("b", 2, {2, 3})) is None


def test_partitions_of_a_leaving_or_expired_member_are_released() -> None:
    harness = Harness(t=4)
    harness.join("a")
    harness.join("b")
    harness.say("a", 1)
    harness.say("a", 1, {0, 1})
    harness.say("b", 2)
    harness.say("b", -1)
    assert reported(harness.say("a", 2)) == {0, 1, 2, 3}
    harness.join("c")
    harness.now_ms = TIMING.session_ms - 1
    harness.say("a", 3)
    assert harness.group.expire(harness.now_ms) == 0
    harness.now_ms += 1
    assert harness.group.deadline_ms() == harness.now_ms
    assert harness.group.expire(harness.now_ms) == 1
    assert set(harness.group.members) == {"a"}
    harness.refused(e.UNKNOWN_MEMBER_ID, lambda: harness.say("c", 4))


def test_a_member_that_does_not_revoke_in_time_is_fenced() -> None:
    harness = Harness(t=2)
    harness.join("a")
    harness.join("b")
    harness.say("a", 1)
    for _ in range(REBALANCE_MS // 1000):
        assert harness.group.expire(harness.now_ms) == 0
        harness.say("a", 1, {0, 1})
        harness.say("b", 2)
        harness.now_ms += 1000
    assert harness.group.expire(harness.now_ms) == 1
    harness.refused(e.UNKNOWN_MEMBER_ID, lambda: harness.say("a", 1, {0, 1}))
    assert reported(harness.say("b", 2)) == {0, 1}


def test_only_the_current_and_the_previous_epoch_of_a_member_are_accepted() -> None:
    harness = Harness(t=2)
    harness.join("a")
    harness.join("b")
    harness.say("a", 1)
    harness.say("a", 1, {0})
    assert reported(harness.say("b", 2)) == {1}
    for epoch in (3, 100):
        harness.refused(e.FENCED_MEMBER_EPOCH, lambda epoch=epoch: harness.say("a", epoch))  # type: ignore[misc]
    harness.refused(e.FENCED_MEMBER_EPOCH, lambda: harness.say("a", 1))
    harness.refused(e.FENCED_MEMBER_EPOCH, lambda: harness.say("a", 1, {0, 1}))
    again = harness.say("a", 1, {0}, rebalance_timeout_ms=REBALANCE_MS, subscribed_topic_names=["t"])
    assert (again["member_epoch"], reported(again)) == (2, {0}), "who says everything is told everything"
    harness.topics["t"] = TopicSize(T.bytes, 4)
    list(harness.group.topics_changing(frozenset(("t",)), 0))
    assert harness.say("a", 2)["member_epoch"] == 3
    harness.refused(e.FENCED_MEMBER_EPOCH, lambda: harness.say("a", 1, {0}))
    for member, epoch, code in (
        ("a", 3, e.NONE),
        ("a", 2, e.STALE_MEMBER_EPOCH),
        ("a", 4, e.STALE_MEMBER_EPOCH),
        ("a", -1, e.STALE_MEMBER_EPOCH),
        ("nobody", 2, e.UNKNOWN_MEMBER_ID),
        (None, -1, e.UNKNOWN_MEMBER_ID),
    ):
        assert harness.group.epoch_error(member, epoch) == code


def test_a_member_that_rejoins_starts_without_partitions() -> None:
    harness = Harness(t=2)
    harness.join("a")
    harness.join("b")
    harness.say("a", 1)
    assert reported(harness.join("a")) == {0}, "what it was to let go of is free"
    assert harness.group.epoch == 2, "nothing else is another"
    assert reported(harness.say("b", 2)) == {1}


def test_a_returning_static_member_gets_its_partitions_without_a_rebalance() -> None:
    harness = Harness(t=4)
    harness.join("a", instance_id="one")
    harness.join("b")
    harness.say("a", 1, instance_id="one")
    harness.say("a", 1, {0, 1}, instance_id="one")
    harness.say("b", 2)
    harness.refused(e.UNRELEASED_INSTANCE_ID, lambda: harness.join("a2", instance_id="one"))
    left = harness.say("a", STATIC_LEAVE, instance_id="one")
    assert left["member_epoch"] == STATIC_LEAVE
    harness.refused(e.FENCED_MEMBER_EPOCH, lambda: harness.say("a", 2, instance_id="one"))
    back = harness.join("a2", instance_id="one")
    assert (reported(back), back["member_epoch"], harness.group.epoch) == ({0, 1}, 2, 2)
    assert reported(harness.say("b", 2)) is None
    assert harness.group.state is State.STABLE
    harness.refused(e.FENCED_INSTANCE_ID, lambda: harness.say("a", 2, instance_id="one"))
    harness.refused(e.FENCED_INSTANCE_ID, lambda: harness.say("a", -1, instance_id="one"))
    harness.refused(e.UNKNOWN_MEMBER_ID, lambda: harness.say("a", 2, instance_id="two"))
    harness.refused(e.UNKNOWN_MEMBER_ID, lambda: harness.say("a", 2))


def test_partitions_of_a_static_member_are_kept_for_its_session_timeout() -> None:
    harness = Harness(t=2)
    harness.join("a", instance_id="one")
    harness.join("b")
    harness.say("a", 1, instance_id="one")
    harness.say("a", STATIC_LEAVE, instance_id="one")
    assert reported(harness.say("b", 2)) == {1}, "what it was letting go of is free at once"
    harness.now_ms = TIMING.session_ms - 1
    assert (harness.group.expire(harness.now_ms), reported(harness.say("b", 2))) == (0, None)
    harness.now_ms += 1
    assert harness.group.expire(harness.now_ms) == 1
    assert reported(harness.say("b", 2)) == {0, 1}
    assert reported(harness.join("c", instance_id="one")) == set(), "its name is free"


def test_a_refused_join_leaves_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(t=1)
    for pattern in ("(?!a)b", "[", "(a)\\1", "(a{1,900}){1,900}", "x" * 2000):
        harness.refused(
            e.INVALID_REGULAR_EXPRESSION,
            lambda pattern=pattern: harness.join("a", subscribed_topic_regex=pattern),  # type: ignore[misc]
        )
    monkeypatch.setattr(module, "MEMBERS_MAX", 0)
    harness.refused(e.GROUP_MAX_SIZE_REACHED, lambda: harness.join("a", subscribed_topic_regex="t"))
    assert (harness.group.members, harness.group.patterns, harness.group.epoch) == ({}, {}, 0)


def test_a_pattern_matches_whole_names_of_readable_topics_also_new_ones() -> None:
    harness = Harness(t=1, t2=1, xt=1, secret=1)
    harness.may = lambda name: name != "tsecret"
    first = harness.join("a", [], subscribed_topic_regex="t.*")
    assert reported(first) == set(), "they are searched for"
    (pattern,) = harness.group.unsearched()
    harness.topics["tlate"] = TopicSize(UUID(int=9).bytes, 1)
    list(harness.group.topics_changing(frozenset(("tlate",)), 0))
    names = pattern.among(["t", "t2", "xt", "secret", "tsecret"])
    harness.group.found(pattern, names, 0)
    assert pattern.topics == frozenset(("t", "t2", "tlate"))
    epoch = harness.group.epoch
    harness.topics["tnew"] = TopicSize(UUID(int=10).bytes, 2)
    list(harness.group.topics_changing(frozenset(("tnew",)), 0))
    assert harness.group.epoch == epoch + 1
    harness.topics["other"] = harness.topics["tsecret"] = TopicSize(UUID(int=11).bytes, 2)
    list(harness.group.topics_changing(frozenset(("other", "tsecret")), 0))
    assert harness.group.epoch == epoch + 1, "nobody asked for these"
    response = harness.say("a", first["member_epoch"])
    assert sum(len(each["partitions"]) for each in response["assignment"]["topic_partitions"]) == 5
    del harness.topics["t2"]
    list(harness.group.topics_changing(frozenset(("t2",)), 0))
    assert pattern.topics == frozenset(("t", "tlate", "tnew"))
    harness.say("a", response["member_epoch"], None, subscribed_topic_names=["t"], subscribed_topic_regex="")
    assert not harness.group.patterns


def test_only_changes_of_subscribed_topics_increase_the_group_epoch() -> None:
    harness = Harness()
    assert (reported(harness.join("a")), harness.group.epoch) == (set(), 1)
    harness.topics["t"] = TopicSize(T.bytes, 2)
    list(harness.group.topics_changing(frozenset(("t",)), 0))
    assert reported(harness.say("a", 1)) == {0, 1}
    harness.topics["t"] = TopicSize(T.bytes, 3)
    list(harness.group.topics_changing(frozenset(("t",)), 0))
    assert reported(harness.say("a", 2)) == {0, 1, 2}
    list(harness.group.topics_changing(frozenset(("t", "x")), 0))
    assert harness.group.epoch == 3, "it is as it was"
    del harness.topics["t"]
    list(harness.group.topics_changing(frozenset(("t",)), 0))
    harness.topics["t"] = TopicSize(UUID(int=7).bytes, 1)
    list(harness.group.topics_changing(frozenset(("t",)), 0))
    response = harness.say("a", 3)
    assert reported(response) == set(), "the member first releases its partitions"
    response = harness.say("a", 3, set())
    assert [each["topic_id"] for each in response["assignment"]["topic_partitions"]] == [UUID(int=7)]


def test_the_assignor_of_most_members_is_used() -> None:
    harness = Harness(t=3, u=3)
    harness.join("a", ["t", "u"], server_assignor=RANGE)
    assert harness.group.inputs.assignor == RANGE
    harness.join("b", ["t", "u"])
    assert {at for _, at in harness.group.target["a"]} == {0, 1}
    assert len(harness.group.target["a"]) == 4
    for name in ("c", "d"):
        harness.join(name, ["t", "u"], server_assignor="uniform")
    assert harness.group.inputs.assignor == "uniform"
    assert sorted(map(len, harness.group.target.values())) == [1, 1, 2, 2]


def test_targets_of_many_partitions_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RATE_LIMITED_PARTITIONS", 10)
    monkeypatch.setattr(module, "PARTITIONS_PER_MS", 1)
    harness = Harness(t=100)
    first = harness.join("a")
    assert (len(reported(first) or ()), first["member_epoch"]) == (100, 1), "the first is made at once"
    for name in ("b", "c", "d"):
        response = harness.join(name)
        assert (reported(response), response["member_epoch"], harness.group.state) == (set(), 1, State.ASSIGNING)
        assert response["heartbeat_interval_ms"] == WAITING_HEARTBEAT_MS
    harness.now_ms = 100
    harness.say("b", 1)
    assert (harness.group.target_epoch, harness.group.epoch) == (4, 4)
    assert {len(share) for share in harness.group.target.values()} == {25}


class Computing(Harness):
    """A group whose targets are computed when the test calls for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **partitions: int) -> None:
        super().__init__(**partitions)
        monkeypatch.setattr(module, "ASSIGNED_HERE_MAX", 3)
        self.asked: list[tuple[Any, Callable[[], Any]]] = []
        self.group = ConsumerGroup("g", self.topics.get, timing=TIMING, compute=self._ask)

    def _ask(self, group: ConsumerGroup) -> None:
        self.asked.append((group.inputs, group.assignment()))

    def compute(self) -> None:
        inputs, assignment = self.asked.pop(0)
        self.group.assigned(inputs, assignment(), self.now_ms)


@pytest.mark.promise("P13")
def test_a_large_target_is_computed_elsewhere_and_members_keep_what_they_have_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Computing(monkeypatch, t=4)
    first = harness.join("a")
    assert (reported(first), first["heartbeat_interval_ms"]) == (set(), WAITING_HEARTBEAT_MS)
    assert harness.group.state is State.ASSIGNING
    harness.compute()
    assert reported(harness.say("a", first["member_epoch"])) == {0, 1, 2, 3}
    second = harness.join("b")
    assert (reported(second), len(harness.asked)) == (set(), 1)
    assert reported(harness.say("a", 1)) is None, "nothing is revoked before the target is there"
    harness.compute()
    assert reported(harness.say("a", 1)) == {0, 1}


@pytest.mark.promise("P13")
def test_a_target_of_old_inputs_is_computed_again_and_only_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Computing(monkeypatch, t=4)
    first = harness.join("a")
    harness.join("b")
    harness.say("b", -1)
    harness.join("c")
    assert len(harness.asked) == 1
    harness.compute()
    assert harness.group.state is State.ASSIGNING
    assert len(harness.asked) == 1
    harness.compute()
    assert set(harness.group.target) == {"a", "c"}
    assert not harness.asked
    assert reported(harness.say("a", first["member_epoch"])) == {0, 2}


@pytest.mark.promise("P13")
def test_a_group_that_everybody_leaves_while_its_target_is_computed_computes_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Computing(monkeypatch, t=4)
    harness.join("a")
    harness.say("a", -1)
    harness.compute()
    assert not harness.asked
    assert harness.group.state is State.EMPTY
