"""Dead letters: their targets, their history, and cycles (SPEC E7)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.broker.rig import (
    PERSISTENT,
    Clock,
    FakePublisher,
    FakeSink,
    drain,
    headers_of,
    props,
    publish,
    run,
    settlement,
    turns,
    until,
)

from basaltmq.broker.message import properties
from basaltmq.broker.message.amqp_table import Timestamp
from basaltmq.broker.message.death import DEATHS_MAX, Death
from basaltmq.broker.vhost import REJECT, REQUEUE, VHost


def to_dead(key: str = "dead", more: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": key, **(more or {})}


async def take(vhost: VHost, queue: str) -> Any:
    found = vhost.get(queue)
    assert found is not None, f"nothing is ready in {queue}"
    return found[0]


def deaths_of(delivery: Any) -> list[dict[str, Any]]:
    found: Any = headers_of(delivery)["x-death"]
    return list(found)


@pytest.mark.spec("E7")
def test_a_rejected_message_is_dead_lettered_with_its_history() -> None:
    clock = Clock()

    async def test(vhost: VHost) -> None:
        vhost.declare_queue("dead", durable=True)
        vhost.declare_queue("q", durable=True, arguments=to_dead())
        vhost.bind_queue("q", "amq.topic", "a.*")
        publisher = FakePublisher()
        raw = props({"own": "header"}, message_id="m1", expiration="60000")
        vhost.publish(publisher, "amq.topic", "a.b", raw, b"body", number=1)
        vhost.settle([settlement("q", await take(vhost, "q"), REJECT)])
        dead = await take(vhost, "dead")
        exchange, key, raw = properties.decode_envelope(dead.properties)
        parsed = properties.parse(raw)
        assert (exchange, key, dead.payload, parsed.message_id) == ("", "dead", b"body", "m1")
        assert parsed.expiration is None, "the time it had is used up"
        assert parsed.headers == {
            "own": "header",
            "x-death": [
                {
                    "count": 1,
                    "exchange": "amq.topic",
                    "queue": "q",
                    "reason": "rejected",
                    "routing-keys": ["a.b"],
                    "time": Timestamp(clock.now_ns // 1_000_000_000),
                    "original-expiration": "60000",
                }
            ],
            "x-first-death-queue": "q",
            "x-first-death-reason": "rejected",
            "x-first-death-exchange": "amq.topic",
            "x-last-death-queue": "q",
            "x-last-death-reason": "rejected",
            "x-last-death-exchange": "amq.topic",
        }

    run(test, clock=clock)


@pytest.mark.spec("E7")
def test_each_reason_is_named() -> None:
    clock = Clock()

    async def test(vhost: VHost) -> None:
        vhost.declare_queue("dead", durable=True)
        vhost.declare_queue("short", durable=True, arguments=to_dead(more={"x-max-length": 1}))
        vhost.declare_queue("brief", durable=True, arguments=to_dead(more={"x-message-ttl": 1000}))
        vhost.declare_queue("weary", durable=True, arguments=to_dead(more={"x-delivery-limit": 1}))
        publisher = FakePublisher()
        publish(vhost, publisher, "short", b"first", b"second")
        await until(lambda: len(publisher.reported) == 2)
        assert [(each.payload, deaths_of(each)[0]["reason"]) for each in drain(vhost, "dead")] == [(b"first", "maxlen")]
        publish(vhost, publisher, "brief", b"late", first=3)
        await until(lambda: len(publisher.reported) == 3)
        clock.pass_ms(1500)
        vhost.plane.run_due()
        assert [deaths_of(each)[0]["reason"] for each in drain(vhost, "dead")] == ["expired"]
        publish(vhost, publisher, "weary", b"again", first=4)
        for _ in range(2):
            vhost.settle([settlement("weary", await take(vhost, "weary"), REQUEUE)])
        assert vhost.get("weary") is None
        assert [deaths_of(each)[0]["reason"] for each in drain(vhost, "dead")] == ["delivery_limit"]

    run(test, clock=clock)


@pytest.mark.spec("E7")
def test_rejected_messages_without_a_dead_letter_route_are_deleted() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("none", durable=True)
        vhost.declare_queue("nowhere", durable=True, arguments={"x-dead-letter-exchange": "missing"})
        vhost.declare_queue("unbound", durable=True, arguments={"x-dead-letter-exchange": "amq.direct"})
        publisher = FakePublisher()
        for name in ("none", "nowhere", "unbound"):
            publish(vhost, publisher, name, b"x")
            vhost.settle([settlement(name, await take(vhost, name), REJECT)])
            await turns(3)
            assert vhost.counts(vhost.queues.by_name[name])["messages"] == 0

    run(test)


@pytest.mark.spec("E7")
def test_only_cycles_without_a_rejection_are_stopped() -> None:
    clock = Clock()

    async def test(vhost: VHost) -> None:
        ttl = {"x-message-ttl": 1000}
        vhost.declare_queue("a", durable=True, arguments=to_dead("b", ttl))
        vhost.declare_queue("b", durable=True, arguments=to_dead("a", ttl))
        vhost.declare_queue("work", durable=True, arguments=to_dead("wait"))
        vhost.declare_queue("wait", durable=True, arguments=to_dead("work", ttl))
        publisher = FakePublisher()
        publish(vhost, publisher, "a", b"turns")
        publish(vhost, publisher, "work", b"retried", first=2)
        await until(lambda: len(publisher.reported) == 2)
        for count in (1, 2, 3):
            delivery = await take(vhost, "work")
            if count > 1:
                assert {each["queue"]: each["count"] for each in deaths_of(delivery)} == {
                    "wait": count - 1,
                    "work": count - 1,
                }
                assert [each["queue"] for each in deaths_of(delivery)] == ["wait", "work"], "the latest comes first"
            vhost.settle([settlement("work", delivery, REJECT)])
            await turns(3)
            clock.pass_ms(1500)
            vhost.plane.run_due()
        assert (await take(vhost, "work")).payload == b"retried"
        assert [vhost.counts(vhost.queues.by_name[name])["messages"] for name in ("a", "b")] == [0, 0]

    run(test, clock=clock)


@pytest.mark.spec("E7")
def test_dead_letters_fan_out_and_keep_their_keys_without_one_of_the_queue() -> None:
    async def test(vhost: VHost) -> None:
        for name in ("d1", "d2", "copy"):
            vhost.declare_queue(name, durable=True)
        vhost.declare_exchange("dlx", "topic")
        vhost.bind_queue("d1", "dlx", "orders.#")
        vhost.bind_queue("d2", "dlx", "#")
        vhost.bind_queue("copy", "dlx", "copied")
        vhost.declare_queue("orders.new", durable=True, arguments={"x-dead-letter-exchange": "dlx"})
        publisher = FakePublisher()
        vhost.publish(publisher, "", "orders.new", props({"CC": ["copied"]}), b"x" * 5000, number=1)
        vhost.settle([settlement("orders.new", await take(vhost, "orders.new"), REJECT)])
        await turns(3)
        for name in ("d1", "d2", "copy"):
            found = drain(vhost, name)
            assert [len(each.payload) for each in found] == [5000], name
            assert deaths_of(found[0])[0]["routing-keys"] == ["orders.new", "copied"]
            assert properties.decode_envelope(found[0].properties)[:2] == ("dlx", "orders.new")

    run(test)


def test_consumers_of_the_dead_letter_queue_are_woken() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("dead", durable=True)
        vhost.declare_queue("q", durable=True, arguments=to_dead())
        sink = FakeSink(vhost)
        vhost.subscribe("dead", sink, tag="c")
        publish(vhost, FakePublisher(), "q", b"x")
        vhost.settle([settlement("q", await take(vhost, "q"), REJECT)])
        await until(lambda: len(sink.got) == 1)

    run(test)


def test_an_invalid_history_set_by_a_publisher_is_tolerated() -> None:
    for forged in ("text", [1, 2], [{"queue": 7}], [{"queue": "q", "reason": "expired", "count": "many"}]):
        envelope = properties.encode_envelope("", "q", props({"x-death": forged}))
        death = Death(envelope, "q", "expired", 1, "dlx", None)
        assert death.deaths[0]["count"] == 1
        properties.peek(properties.decode_envelope(death.envelope())[2])


def test_a_history_is_bounded() -> None:
    envelope = properties.encode_envelope("", "q", PERSISTENT)
    for number in range(DEATHS_MAX + 10):
        envelope = Death(envelope, f"q{number}", "expired", 1, "dlx", None).envelope()
    headers: Any = properties.parse(properties.decode_envelope(envelope)[2]).headers
    assert len(headers["x-death"]) == DEATHS_MAX
    assert headers["x-first-death-queue"] == "q0"
