"""Queues: declaration, comparison, owners, expiry, and restarts."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.broker.rig import (
    PERSISTENT,
    Clock,
    FakePublisher,
    FakeSink,
    drain,
    props,
    publish,
    run,
    settlement,
    turns,
    until,
)

from basaltmq.broker.consumers.queue import Declared
from basaltmq.broker.routing.arguments import Owner, age_ms, queue_settings
from basaltmq.broker.vhost import REQUEUE, VHost
from basaltmq.errors import (
    AccessRefusedError,
    BasaltError,
    CorruptionError,
    PreconditionFailedError,
    QueueNotFoundError,
)
from basaltmq.store.memory import MemoryStore


@pytest.mark.spec("E6")
def test_durable_queues_and_persistent_messages_survive_and_others_do_not() -> None:
    store = MemoryStore()

    async def before(vhost: VHost) -> None:
        vhost.declare_queue("durable", durable=True, arguments={"x-max-priority": 5})
        vhost.declare_queue("transient", durable=False)
        vhost.declare_queue("exclusive", durable=True, exclusive=True, owner=object())
        vhost.bind_queue("durable", "amq.topic", "a.#")
        vhost.bind_queue("transient", "amq.topic", "a.#")
        publisher = FakePublisher()
        publish(vhost, publisher, "a.b", b"kept", exchange="amq.topic")
        vhost.publish(publisher, "", "durable", props(delivery_mode=1), b"lost", number=2)
        await until(lambda: len(publisher.reported) == 2)

    async def after(vhost: VHost) -> None:
        assert list(vhost.queues.by_name) == ["durable"]
        assert vhost.queues.by_name["durable"].settings.priorities_max == 5
        assert [each.destination.name for each in vhost.topology.bindings()] == ["durable"]
        assert [each.payload for each in drain(vhost, "durable")] == [b"kept"]
        vhost.declare_queue("durable", durable=True, arguments={"x-max-priority": 5})

    run(before, store)
    run(after, store)


def test_unsettled_deliveries_are_redelivered_after_a_restart() -> None:
    store = MemoryStore()

    async def before(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        publisher = FakePublisher()
        publish(vhost, publisher, "q", b"1", b"2")
        await until(lambda: len(publisher.reported) == 2)
        got = vhost.get("q")
        assert got is not None
        assert got[0].payload == b"1"

    async def after(vhost: VHost) -> None:
        found = drain(vhost, "q")
        assert next((each.payload, each.redelivered) for each in found) == (b"1", True)
        assert [each.payload for each in found] == [b"1", b"2"]

    run(before, store)
    run(after, store)


@pytest.mark.parametrize(
    ("field", "given_"),
    [
        ("durable", {"durable": False}),
        ("auto_delete", {"auto_delete": True}),
        ("x-message-ttl", {"arguments": {"x-max-length": 3}}),
        ("x-max-length", {"arguments": {"x-message-ttl": 1000}}),
        ("x-queue-type", {"arguments": {"x-message-ttl": 1000, "x-max-length": 3, "x-queue-type": "quorum"}}),
    ],
)
def test_redeclaring_a_queue_differently_names_the_difference(field: str, given_: dict[str, Any]) -> None:
    async def test(vhost: VHost) -> None:
        asked: dict[str, Any] = {"durable": True, "arguments": {"x-message-ttl": 1000, "x-max-length": 3}}
        vhost.declare_queue("q", **asked)
        vhost.declare_queue("q", **asked)
        vhost.declare_queue("q", **{**asked, "arguments": {**asked["arguments"], "x-queue-type": "classic"}})
        with pytest.raises(PreconditionFailedError, match=f"inequivalent arg '{field}' for queue 'q' in vhost '/'"):
            vhost.declare_queue("q", **{**asked, **given_})

    run(test)


@pytest.mark.parametrize(
    "arguments",
    [
        {"x-message-ttl": -1},
        {"x-message-ttl": "1000"},
        {"x-message-ttl": True},
        {"x-expires": 0},
        {"x-max-length": -1},
        {"x-max-length-bytes": 1.5},
        {"x-overflow": "drop-tail"},
        {"x-max-priority": 256},
        {"x-dead-letter-exchange": 5},
        {"x-dead-letter-routing-key": "k"},
        {"x-single-active-consumer": "yes"},
        {"x-delivery-limit": -1},
        {"x-queue-type": "fast"},
        {"x-max-age": "1D"},
        {"x-queue-type": "stream", "x-max-age": "a day"},
        {"x-queue-type": "stream", "x-message-ttl": 5},
        {"x-basalt-lease-ms": 0},
    ],
)
def test_invalid_arguments_are_refused_by_name(arguments: dict[str, Any]) -> None:
    with pytest.raises(PreconditionFailedError, match="x-"):
        queue_settings(Owner("queue", "q", "/"), arguments, durable=True, exclusive=False, auto_delete=False)


@pytest.mark.parametrize("kind", ["quorum", "stream"])
@pytest.mark.parametrize("flags", [{"durable": False}, {"exclusive": True}, {"auto_delete": True}])
def test_quorum_queues_and_streams_must_be_durable_and_not_exclusive(kind: str, flags: dict[str, bool]) -> None:
    async def test(vhost: VHost) -> None:
        with pytest.raises(PreconditionFailedError, match="invalid property"):
            vhost.declare_queue("q", **{"durable": True, **flags}, owner=object(), arguments={"x-queue-type": kind})

    run(test)


def test_a_quorum_queue_has_a_delivery_limit() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True, arguments={"x-queue-type": "quorum"})
        assert vhost.plane.get("q").delivery_limit == 20

    run(test)


def test_queue_names_are_generated_validated_and_looked_up() -> None:
    async def test(vhost: VHost) -> None:
        first, second = vhost.declare_queue("").name, vhost.declare_queue("").name
        assert first.startswith("amq.gen-")
        assert first != second
        vhost.declare_queue(first)
        with pytest.raises(AccessRefusedError, match="reserved prefix"):
            vhost.declare_queue("amq.mine")
        with pytest.raises(QueueNotFoundError, match="no queue 'nope' in vhost '/'"):
            vhost.declare_queue("nope", passive=True)
        with pytest.raises(BasaltError):
            vhost.declare_queue("x" * 256)

    run(test)


def test_if_unused_and_if_empty_prevent_deletion() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        publish(vhost, FakePublisher(), "q", b"x")
        with pytest.raises(PreconditionFailedError, match="not empty"):
            vhost.delete_queue("q", if_empty=True)
        assert sum(vhost.purging("q")) == 1
        consumer = vhost.subscribe("q", FakeSink(vhost), tag="c")
        with pytest.raises(PreconditionFailedError, match="in use"):
            vhost.delete_queue("q", if_unused=True)
        consumer.cancel()
        assert vhost.delete_queue("q", if_unused=True, if_empty=True) == 0
        assert vhost.delete_queue("q") == 0

    run(test)


def test_an_auto_delete_queue_is_deleted_with_its_last_consumer() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", auto_delete=True)
        vhost.declare_exchange("x", "fanout", auto_delete=True)
        vhost.bind_queue("q", "x", "")
        first = vhost.subscribe("q", FakeSink(vhost), tag="a")
        second = vhost.subscribe("q", FakeSink(vhost), tag="b")
        first.cancel()
        assert "q" in vhost.queues.by_name
        second.cancel()
        assert "q" not in vhost.queues.by_name
        assert "x" not in vhost.topology.exchanges

    run(test)


@pytest.mark.spec("E7")
def test_an_unused_queue_expires_and_a_used_one_does_not() -> None:
    clock = Clock()

    async def test(vhost: VHost) -> None:
        vhost.declare_queue("idle", durable=True, arguments={"x-expires": 1000})
        vhost.declare_queue("used", durable=True, arguments={"x-expires": 1000})
        sink = FakeSink(vhost)
        consumer = vhost.subscribe("used", sink, tag="c")
        clock.pass_ms(900)
        vhost.declare_queue("idle", durable=True, arguments={"x-expires": 1000})
        clock.pass_ms(500)
        vhost.queues.expire(clock())
        assert set(vhost.queues.by_name) == {"idle", "used"}, "a declaration and a consumer are uses"
        clock.pass_ms(700)
        vhost.queues.expire(clock())
        assert set(vhost.queues.by_name) == {"used"}
        consumer.cancel()
        clock.pass_ms(1100)
        assert vhost.queues.expire(clock()) is None
        assert not vhost.queues.by_name

    run(test, clock=clock)


@pytest.mark.spec("E7")
def test_messages_expire_by_their_own_ttl_and_that_of_the_queue() -> None:
    clock = Clock()

    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True, arguments={"x-message-ttl": 5000})
        publisher = FakePublisher()
        vhost.publish(publisher, "", "q", PERSISTENT, b"long", number=1)
        vhost.publish(publisher, "", "q", props(expiration="1000"), b"short", number=2)
        await until(lambda: len(publisher.reported) == 2)
        clock.pass_ms(1500)
        vhost.plane.run_due()
        assert vhost.declare_queue("q", passive=True).messages == 1
        clock.pass_ms(5000)
        vhost.plane.run_due()
        assert vhost.declare_queue("q", passive=True).messages == 0

    run(test, clock=clock)


@pytest.mark.spec("E7")
@pytest.mark.parametrize("by", ["queue", "message"])
def test_a_message_with_ttl_zero_is_delivered_at_once_or_expires(by: str) -> None:
    clock = Clock()

    async def test(vhost: VHost) -> None:
        arguments: dict[str, Any] = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
        raw = PERSISTENT
        if by == "queue":
            arguments["x-message-ttl"] = 0
        else:
            raw = props(expiration="0")
        vhost.declare_queue("dead", durable=True)
        vhost.declare_queue("q", durable=True, arguments=arguments)
        publisher = FakePublisher()
        vhost.publish(publisher, "", "q", raw, b"nobody", number=1)
        await until(lambda: publisher.numbers() == [1])
        sink = FakeSink(vhost)
        consumer = vhost.subscribe("q", sink, tag="c", prefetch=2)
        for number, body in enumerate([b"one", b"two", b"beyond"], 2):
            vhost.publish(publisher, "", "q", raw, body, number=number)
        await until(lambda: len(publisher.reported) == 4)
        assert sink.payloads() == [b"one", b"two"]
        vhost.settle([settlement("q", sink.got[0]), settlement("q", sink.got[1], REQUEUE)])
        consumer.credit(2)
        await turns()
        clock.pass_ms(1)
        vhost.plane.run_due()
        assert sink.payloads() == [b"one", b"two"]
        assert sorted(each.payload for each in drain(vhost, "dead")) == [b"beyond", b"nobody", b"two"]
        assert vhost.counts(vhost.queues.by_name["q"])["messages"] == 0

    run(test, clock=clock)


@pytest.mark.spec("E7")
def test_the_timer_of_the_loop_runs_due_work() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("dead", durable=True)
        to_dead: dict[str, Any] = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
        vhost.declare_queue("q", durable=True, arguments={**to_dead, "x-message-ttl": 30})
        vhost.declare_queue("idle", durable=True, arguments={"x-expires": 30})
        sink = FakeSink(vhost)
        vhost.subscribe("dead", sink, tag="c")
        publish(vhost, FakePublisher(), "q", b"x")
        await until(lambda: len(sink.got) == 1 and "idle" not in vhost.queues.by_name)

    run(test, clock=time.time_ns)


@pytest.mark.spec("E7")
def test_messages_of_higher_priority_are_delivered_first() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True, arguments={"x-max-priority": 9})
        publisher = FakePublisher()
        for number, priority in enumerate([1, 9, 200, 0, 5], 1):
            vhost.publish(publisher, "", "q", props(priority=priority), b"%d" % priority, number=number)
        await until(lambda: len(publisher.reported) == 5)
        assert [each.payload for each in drain(vhost, "q")] == [b"9", b"200", b"5", b"1", b"0"]

    run(test)


def test_an_expired_lease_is_fenced_and_its_message_redelivered() -> None:
    clock = Clock()

    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True, arguments={"x-basalt-lease-ms": 1000})
        publish(vhost, FakePublisher(), "q", b"x")
        first = vhost.get("q")
        assert first is not None
        clock.pass_ms(1500)
        vhost.plane.run_due()
        second = vhost.get("q")
        assert second is not None
        assert second[0].redelivered
        vhost.settle([settlement("q", first[0])])
        await turns(3)
        assert vhost.counts(vhost.queues.by_name["q"])["leased"] == 1, "the late answer settles nothing"
        vhost.settle([settlement("q", second[0])])
        await turns(3)
        assert vhost.counts(vhost.queues.by_name["q"])["messages"] == 0

    run(test, clock=clock)


def test_a_fairness_header_serves_its_keys_round_robin() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True, arguments={"x-basalt-fairness-header": "tenant"})
        publisher = FakePublisher()
        for number in range(1, 5):
            vhost.publish(publisher, "", "q", props({"tenant": "loud"}), b"loud", number=number)
        vhost.publish(publisher, "", "q", props({"tenant": "quiet"}), b"quiet", number=5)
        await until(lambda: len(publisher.reported) == 5)
        assert b"quiet" in [each.payload for each in drain(vhost, "q")][:2]

    run(test)


def test_duplicate_message_ids_within_the_window_are_dropped() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True, arguments={"x-basalt-dedup-ms": 60_000})
        publisher = FakePublisher()
        for number in (1, 2):
            vhost.publish(publisher, "", "q", props(message_id="same"), b"x", number=number)
        await until(lambda: len(publisher.reported) == 2)
        assert len(drain(vhost, "q")) == 1

    run(test)


TABLES: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    st.text(max_size=10), st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.text(max_size=10), max_size=5
)


@given(st.booleans(), st.booleans(), st.booleans(), TABLES)
def test_declared_queues_are_described_as_declared(
    durable: bool, exclusive: bool, auto_delete: bool, arguments: dict[str, Any]
) -> None:
    declared = Declared(durable, exclusive, auto_delete, arguments)
    assert Declared.decode("q", declared.encode()) == declared


@given(st.binary(min_size=1, max_size=40))
def test_damaged_declarations_are_reported(raw: bytes) -> None:
    with contextlib.suppress(CorruptionError):
        Declared.decode("q", raw)


def test_queues_created_by_other_protocols_are_durable() -> None:
    assert Declared.decode("q", b"") == Declared(True, False, False, {})


@pytest.mark.parametrize(
    ("text", "ms"), [("7D", 604_800_000), ("1h", 3_600_000), ("30s", 30_000), ("2Y", 63_072_000_000)]
)
def test_max_age_is_parsed(text: str, ms: int) -> None:
    assert age_ms(text) == ms
