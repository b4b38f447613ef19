"""Policies: which one applies, and its effect on existing queues and exchanges."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.unit.broker.rig import FakePublisher, drain, publish, run, until

from basaltmq.broker.policy_effects import PolicyEffects
from basaltmq.broker.routing.policy import USERS, Policies, Policy
from basaltmq.broker.vhost import VHost
from basaltmq.errors import InvalidArgumentError, NotFoundError
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import broker as broker_keys
from basaltmq.store.memory import MemoryStore


def policy(name: str, pattern: str, definition: dict[str, Any] | None = None, **more: Any) -> Policy:
    return Policy(name, pattern, definition or {"max-length": 5}, **more)


def test_the_matching_policy_of_highest_priority_is_in_force() -> None:
    policies = Policies(MemoryStore())
    policies.set(policy("low", ".*", {"max-length": 1}))
    policies.set(policy("high", "^orders", {"max-length": 2}, priority=7))
    policies.set(policy("exchanges", ".*", {"alternate-exchange": "x"}, priority=9, apply_to="exchanges"))
    policies.set(policy("quorum", ".*", {"max-length": 3}, priority=8, apply_to="quorum_queues"))
    assert policies.of_queue("orders.new", "classic").name == "high"
    assert policies.of_queue("new.orders", "classic").name == "low"
    assert policies.of_queue("orders.new", "quorum").name == "quorum"
    assert policies.of_exchange("anything").name == "exchanges"
    policies.delete("high")
    assert policies.of_queue("orders.new", "classic").name == "low"
    with pytest.raises(NotFoundError):
        policies.delete("high")


def test_policies_survive_a_restart() -> None:
    store = MemoryStore()
    first = Policies(store)
    first.set(policy("p", "^q", {"max-length": 2, "overflow": "reject-publish"}, priority=3, apply_to="queues"))
    first.set(policy("o", "^q", {"max-length": 1}), operators=True)
    again = Policies(store)
    again.load()
    assert again.list() == first.list()
    assert again.list(operators=True) == first.list(operators=True)


def test_a_stored_policy_with_unsupported_syntax_applies_to_nothing_and_the_rest_works() -> None:
    store = MemoryStore()
    old = policy("old", "^(?!amq\\.).*", {"max-length": 2}, priority=9)
    row = b"\x01" + msgspec.msgpack.encode(old)
    batch = Batch()
    batch.put(Family.TOPOLOGY, broker_keys.policy_key(USERS, "old"), row)
    store.write(batch)
    policies = Policies(store)
    policies.load()
    policies.set(policy("new", "^q"))
    assert policies.of_queue("q", "classic").name == "new"
    assert [each.name for each in policies.list()] == ["new", "old"]
    with pytest.raises(InvalidArgumentError, match=r"'old'.*not supported"):
        policies.set(old)


def test_operator_policies_can_only_lower_limits() -> None:
    policies = Policies(MemoryStore())
    policies.set(policy("p", ".*", {"max-length": 10, "dead-letter-exchange": "dlx"}))
    policies.set(policy("o", ".*", {"max-length": 3, "message-ttl": 100}), operators=True)
    assert policies.of_queue("q", "classic").definition == {
        "max-length": 3,
        "dead-letter-exchange": "dlx",
        "message-ttl": 100,
    }
    with pytest.raises(InvalidArgumentError, match="operator policy"):
        policies.set(policy("o", ".*", {"dead-letter-exchange": "x"}), operators=True)


@pytest.mark.parametrize(
    "wrong",
    [
        policy("p", "("),
        policy("p", "x" * 2000),
        policy("p", ".*", {"max-length": -1}),
        policy("p", ".*", {"no-such-key": 1}),
        policy("p", ".*", {"alternate-exchange": 5}),
        policy("p", ".*", apply_to="everything"),
        Policy("p", ".*", {}),
    ],
)
def test_invalid_policies_are_refused(wrong: Policy) -> None:
    policies = Policies(MemoryStore())
    with pytest.raises(InvalidArgumentError, match="'p'"):
        policies.set(wrong)
    assert policies.list() == []


def test_a_policy_applies_to_existing_objects_until_it_is_deleted() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True, arguments={"x-max-length": 3})
        vhost.declare_queue("other", durable=True)
        vhost.declare_exchange("x", "direct")
        vhost.policies.set(
            policy("p", "^q$", {"max-length": 2, "dead-letter-exchange": "", "dead-letter-routing-key": "other"})
        )
        vhost.policies.set(policy("ae", "^x$", {"alternate-exchange": "amq.fanout"}, apply_to="exchanges"))
        vhost.bind_queue("other", "amq.fanout", "")
        publisher = FakePublisher()
        publish(vhost, publisher, "q", b"1", b"2", b"3")
        publish(vhost, publisher, "nowhere", b"alternate", exchange="x", first=4)
        await until(lambda: len(publisher.reported) == 4)
        assert [each.payload for each in drain(vhost, "q")] == [b"2", b"3"]
        assert sorted(each.payload for each in drain(vhost, "other")) == [b"1", b"alternate"]
        vhost.policies.delete("p")
        vhost.policies.delete("ae")
        assert vhost.plane.get("q").length_max == 3
        assert vhost.topology.get("x").alternate is None
        vhost.policies.set(policy("p", "^q$", {"max-length": 9}))
        assert vhost.plane.get("q").length_max == 3, "of two limits the smaller one counts"
        vhost.declare_queue("q", durable=True, arguments={"x-max-length": 3})

    run(test)


def test_a_policy_applies_to_later_objects_and_after_a_restart() -> None:
    store = MemoryStore()

    async def before(vhost: VHost) -> None:
        vhost.policies.set(policy("p", "^q", {"message-ttl": 1000}))
        vhost.declare_queue("q1", durable=True)
        assert vhost.plane.get("q1").ttl_ms == 1000
        assert vhost.queues.by_name["q1"].policy == "p"

    async def after(vhost: VHost) -> None:
        assert vhost.queues.by_name["q1"].policy == "p"
        vhost.policies.delete("p")
        assert vhost.plane.get("q1").ttl_ms is None

    run(before, store)
    run(after, store)


@pytest.mark.promise("P13")
def test_policies_are_applied_to_one_object_per_portion() -> None:
    async def test(vhost: VHost) -> None:
        for number in range(5):
            vhost.declare_queue(f"q{number}", durable=True)
        vhost.policies.changed = lambda: None
        vhost.policies.set(policy("p", "^q", {"max-length": 3}))
        apply = PolicyEffects(vhost.policies, vhost.topology, vhost.queues).changed()
        applied = []
        while apply():
            applied.append(sum(queue.policy == "p" for queue in vhost.queues.by_name.values()))
        assert set(applied) >= {1, 2, 3, 4}
        assert all(queue.policy == "p" for queue in vhost.queues.by_name.values())

    run(test)
