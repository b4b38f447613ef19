"""The publishing tick: routes, confirms, returns, refusals, and the effects of a failing store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.unit.broker.rig import (
    PERSISTENT,
    TRANSIENT,
    BrokenStore,
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

from basaltmq.broker.consumers.consumer import Consumer
from basaltmq.broker.vhost import REJECT, REQUEUE, Settlement, VHost
from basaltmq.errors import (
    AccessRefusedError,
    ExchangeNotFoundError,
    PreconditionFailedError,
    StaleLeaseError,
    StorePoisonedError,
    StoreStalledError,
    VHostDownError,
)
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family


@pytest.mark.spec("E6")
@pytest.mark.promise("P1")
def test_a_persistent_message_is_confirmed_after_the_sync_and_not_before() -> None:
    store = BrokenStore()

    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        publisher = FakePublisher()
        reported: list[list[int]] = []
        store.hold_sync = lambda: reported.append(publisher.numbers())
        publish(vhost, publisher, "q", b"one", b"two")
        vhost.publish(publisher, "", "q", TRANSIENT, b"three", number=3)
        await until(lambda: len(publisher.reported) == 3)
        assert reported == [[3]], "only the transient one has its confirm while the sync runs"
        assert publisher.numbers() == [3, 1, 2]

    run(test, store)


def test_a_message_to_a_transient_queue_needs_no_sync() -> None:
    store = BrokenStore()

    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=False)
        publisher = FakePublisher()
        store.fail_sync = True
        publish(vhost, publisher, "q", b"one")
        await until(lambda: publisher.numbers() == [1])
        assert vhost.is_up

    run(test, store)


@pytest.mark.promise("P2")
def test_publishes_and_settlements_of_a_turn_are_one_batch() -> None:
    store = BrokenStore()

    async def test(vhost: VHost) -> None:
        for name in ("q1", "q2", "q3"):
            vhost.declare_queue(name, durable=True)
        publisher = FakePublisher()
        publish(vhost, publisher, "q3", b"old")
        await until(lambda: publisher.numbers() == [1])
        got = vhost.get("q3")
        assert got is not None
        store.batches.clear()
        publish(vhost, publisher, "q1", b"a", b"b", first=2)
        publish(vhost, publisher, "q2", b"c", first=4)
        vhost.settle([settlement("q3", got[0])])
        await until(lambda: len(publisher.reported) == 4)
        with_messages = [b for b in store.batches if any(op[1] is Family.MESSAGES for op in b.ops)]
        assert len(with_messages) == 1
        assert sum(op[1] is Family.MESSAGES for op in with_messages[0].ops) == 4

    run(test, store)


@pytest.mark.spec("E6")
def test_a_mandatory_message_without_a_route_is_returned_before_its_confirm() -> None:
    async def test(vhost: VHost) -> None:
        publisher = FakePublisher()
        vhost.publish(publisher, "amq.direct", "nowhere", PERSISTENT, b"lost", mandatory=True, number=1)
        vhost.publish(publisher, "amq.direct", "nowhere", PERSISTENT, b"lost", mandatory=False, number=2)
        await until(lambda: len(publisher.reported) == 3)
        assert publisher.reported == [
            ("returned", ("amq.direct", "nowhere", b"lost")),
            ("ack", 1),
            ("ack", 2),
        ]

    run(test)


def test_publishes_to_missing_or_internal_exchanges_are_refused() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_exchange("inside", "fanout", internal=True)
        publisher = FakePublisher()
        with pytest.raises(ExchangeNotFoundError, match="no exchange 'nope' in vhost '/'"):
            vhost.publish(publisher, "nope", "", PERSISTENT, b"")
        with pytest.raises(AccessRefusedError, match="internal exchange"):
            vhost.publish(publisher, "inside", "", PERSISTENT, b"")

    run(test)


def test_operations_of_a_client_take_effect_in_order() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        publisher = FakePublisher()
        publish(vhost, publisher, "q", b"one")
        got = vhost.get("q", no_ack=True)
        assert got is not None
        assert got[0].payload == b"one"
        publish(vhost, publisher, "q", b"two", first=2)
        assert vhost.declare_queue("q", passive=True).messages == 1
        publish(vhost, publisher, "q", b"three", first=3)
        assert vhost.delete_queue("q") == 2
        vhost.declare_queue("q", durable=True)
        assert vhost.get("q") is None
        await until(lambda: publisher.numbers() == [1, 2, 3])

    run(test)


@pytest.mark.spec("E4")
def test_a_fan_out_stores_its_body_once_and_keeps_the_order_of_each_queue() -> None:
    store = BrokenStore()

    async def test(vhost: VHost) -> None:
        names = [f"q{n}" for n in range(5)]
        for name in names:
            vhost.declare_queue(name, durable=True)
            vhost.bind_queue(name, "amq.fanout", "")
        publisher = FakePublisher()
        publish(vhost, publisher, "q0", b"before", first=1)
        publish(vhost, publisher, "", b"x" * 5000, exchange="amq.fanout", first=2)
        publish(vhost, publisher, "q0", b"after", first=3)
        await until(lambda: len(publisher.reported) == 3)
        assert len(list(store.scan(Family.MESSAGE_CONTENT))) == 1
        assert [len(each.payload) for each in drain(vhost, "q0")] == [6, 5000, 5]
        for name in names[1:]:
            assert [each.payload for each in drain(vhost, name)] == [b"x" * 5000]
        vhost.declare_queue("q0", passive=True)
        assert list(store.scan(Family.MESSAGE_CONTENT)) == []

    run(test, store)


@pytest.mark.spec("E6")
def test_cc_and_bcc_add_routing_keys_and_bcc_is_removed() -> None:
    async def test(vhost: VHost) -> None:
        for name in ("to", "cc", "bcc"):
            vhost.declare_queue(name, durable=True)
        publisher = FakePublisher()
        vhost.publish(publisher, "", "to", props({"CC": ["cc", "to"], "BCC": ["bcc"], "other": 1}), b"x", number=1)
        await until(lambda: publisher.numbers() == [1])
        for name in ("to", "cc", "bcc"):
            found = drain(vhost, name)
            assert len(found) == 1
            assert headers_of(found[0]) == {"CC": ["cc", "to"], "other": 1}

    run(test)


def test_headers_exchanges_route_by_headers() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        vhost.bind_queue("q", "amq.headers", "", {"kind": "wanted"})
        publisher = FakePublisher()
        for number, kind in enumerate(["wanted", "other", "wanted"], 1):
            vhost.publish(publisher, "amq.headers", "k", props({"kind": kind}), b"%d" % number, number=number)
        await until(lambda: len(publisher.reported) == 3)
        assert [each.payload for each in drain(vhost, "q")] == [b"1", b"3"]

    run(test)


def test_cached_routes_are_dropped_when_the_topology_changes() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q1", durable=True)
        vhost.declare_queue("q2", durable=True)
        publisher = FakePublisher()
        vhost.bind_queue("q1", "amq.direct", "k")
        publish(vhost, publisher, "k", b"one", exchange="amq.direct")
        vhost.bind_queue("q2", "amq.direct", "k")
        publish(vhost, publisher, "k", b"two", exchange="amq.direct", first=2)
        vhost.unbind_queue("q1", "amq.direct", "k")
        publish(vhost, publisher, "k", b"three", exchange="amq.direct", first=3)
        vhost.delete_queue("q2")
        publish(vhost, publisher, "k", b"four", exchange="amq.direct", first=4)
        await until(lambda: len(publisher.reported) == 4)
        assert [each.payload for each in drain(vhost, "q1")] == [b"one", b"two"]

    run(test)


@pytest.mark.spec("E7")
def test_a_full_queue_accepts_what_fits_and_nacks_the_rest() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True, arguments={"x-max-length": 2, "x-overflow": "reject-publish"})
        publisher = FakePublisher()
        publish(vhost, publisher, "q", b"1", b"2", b"3")
        await until(lambda: len(publisher.reported) == 3)
        assert publisher.numbers("nack") == [3]
        assert sorted(publisher.numbers()) == [1, 2]
        assert [each.payload for each in drain(vhost, "q")] == [b"1", b"2"]
        publish(vhost, publisher, "q", b"4", first=4)
        await until(lambda: 4 in publisher.numbers())

    run(test)


@pytest.mark.spec("E7")
def test_a_full_queue_may_dead_letter_refused_messages() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("dead", durable=True)
        arguments = {
            "x-max-length": 1,
            "x-overflow": "reject-publish-dlx",
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": "dead",
        }
        vhost.declare_queue("q", durable=True, arguments=arguments)
        publisher = FakePublisher()
        publish(vhost, publisher, "q", b"1", b"2")
        await until(lambda: len(publisher.reported) == 2)
        assert (publisher.numbers(), publisher.numbers("nack")) == ([1], [2])
        found = drain(vhost, "dead")
        assert [each.payload for each in found] == [b"2"]
        deaths: Any = headers_of(found[0])["x-death"]
        assert (deaths[0]["reason"], deaths[0]["queue"]) == ("maxlen", "q")

    run(test)


def test_an_invalid_message_is_refused_alone() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        publisher = FakePublisher()
        publish(vhost, publisher, "q", b"1")
        vhost.publish(publisher, "", "q", b"\xff\xff", b"malformed", number=2)
        publish(vhost, publisher, "q", b"3", first=3)
        await until(lambda: len(publisher.reported) == 3)
        assert publisher.numbers("nack") == [2]
        assert [each.payload for each in drain(vhost, "q")] == [b"1", b"3"]

    run(test)


@pytest.mark.promise("P8")
def test_operations_wait_while_the_store_is_stalled_without_loss_or_duplicates() -> None:
    store = BrokenStore()

    async def test(vhost: VHost) -> None:
        held: list[bool] = []
        vhost.tick.on_stalled = held.append
        vhost.declare_queue("q", durable=True)
        publisher = FakePublisher()
        store.stall = True
        publish(vhost, publisher, "q", b"1", b"2")
        vhost.publish(publisher, "amq.direct", "nowhere", PERSISTENT, b"x", mandatory=True, number=3)
        await until(lambda: held == [True])
        was_blocked = vhost.tick.is_stalled
        await turns()
        assert (was_blocked, publisher.reported) == (True, [])
        store.stall = False
        await until(lambda: len(publisher.reported) == 4)
        assert held == [True, False]
        assert not vhost.tick.is_stalled
        assert [what for what, _ in publisher.reported].count("returned") == 1
        assert [each.payload for each in drain(vhost, "q")] == [b"1", b"2"]

    run(test, store)


@pytest.mark.promise("P11")
@pytest.mark.parametrize("broken", ["fail_write", "fail_sync"])
def test_a_disk_error_fails_the_vhost_and_confirms_nothing(broken: str) -> None:
    store = BrokenStore()

    async def test(vhost: VHost) -> None:
        failures: list[BaseException] = []
        reported: list[BaseException] = []
        vhost.on_failed = failures.append
        vhost.attach("connection", reported.append)
        vhost.declare_queue("q", durable=True)
        publisher = FakePublisher()
        setattr(store, broken, True)
        publish(vhost, publisher, "q", b"1")
        await until(lambda: bool(failures))
        await turns()
        assert publisher.reported == []
        assert reported == failures
        assert len(failures) == 1
        with pytest.raises(VHostDownError, match="is down"):
            vhost.publish(publisher, "", "q", PERSISTENT, b"2")
        with pytest.raises(VHostDownError):
            vhost.declare_queue("r")
        with pytest.raises(StorePoisonedError):
            store.size_bytes()

    run(test, store)


@pytest.mark.spec("E6")
def test_a_transaction_is_one_batch_and_completes_when_durable() -> None:
    store = BrokenStore()

    async def test(vhost: VHost) -> None:
        vhost.declare_queue("from", durable=True)
        vhost.declare_queue("to", durable=True)
        publisher = FakePublisher()
        publish(vhost, publisher, "from", b"a", b"b", b"c")
        await until(lambda: len(publisher.reported) == 3)
        taken = [vhost.get("from") for _ in range(3)]
        deliveries = [each[0] for each in taken if each is not None]
        store.batches.clear()
        await vhost.commit_tx(
            [(publisher, "", "to", PERSISTENT, b"answer", False, 0)],
            [
                settlement("from", deliveries[0]),
                settlement("from", deliveries[1], REQUEUE),
                settlement("from", deliveries[2], REJECT),
            ],
        )
        assert len([b for b in store.batches if b.ops]) == 1
        assert [each.payload for each in drain(vhost, "from")] == [b"b"]
        assert [each.payload for each in drain(vhost, "to")] == [b"answer"]

    run(test, store)


@pytest.mark.promise("P2")
def test_a_failed_transaction_has_no_effect() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        vhost.declare_queue("full", durable=True, arguments={"x-max-length": 0, "x-overflow": "reject-publish"})
        publisher = FakePublisher()
        with pytest.raises(PreconditionFailedError, match="full"):
            vhost.commit_tx(
                [(publisher, "", key, PERSISTENT, b"x", False, 0) for key in ("q", "full")],
                [],
            )
        with pytest.raises(StaleLeaseError):
            vhost.commit_tx(
                [(publisher, "", "q", PERSISTENT, b"x", False, 0)], [Settlement("q", 1, [bytes(16)], "ack")]
            )
        assert vhost.get("q") is None

    run(test)


def test_settling_twice_has_no_effect() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        publisher = FakePublisher()
        publish(vhost, publisher, "q", b"1", b"2", b"3")
        sink = FakeSink(vhost)
        vhost.subscribe("q", sink, tag="c", prefetch=10)
        await until(lambda: len(sink.got) == 3)
        first, second, third = sink.got
        vhost.settle([settlement("q", first)])
        vhost.settle([settlement("q", first)])
        vhost.settle([Settlement("q", second.token, [second.id, first.id], "ack")])
        vhost.settle([settlement("gone", third)])
        await turns()
        assert vhost.counts(vhost.queues.by_name["q"])["leased"] == 1
        vhost.settle([settlement("q", third)])
        await turns()
        assert vhost.counts(vhost.queues.by_name["q"])["messages"] == 0

    run(test)


@pytest.mark.promise("P2")
def test_an_exception_in_a_confirm_callback_duplicates_nothing() -> None:
    class Bad(FakePublisher):
        def returned(self, *reported: object) -> None:
            raise RuntimeError("the test fails")

        def confirmed(self, numbers: Sequence[int], ok: bool) -> None:
            super().confirmed(numbers, ok)
            raise RuntimeError("the test fails")

    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        bad, good = Bad(), FakePublisher()
        publish(vhost, bad, "q", b"1")
        vhost.publish(bad, "", "q", TRANSIENT, b"2", number=2)
        vhost.publish(bad, "", "nowhere", TRANSIENT, b"x", mandatory=True, number=3)
        publish(vhost, good, "q", b"4", first=4)
        await until(lambda: len(bad.reported) == 3 and len(good.reported) == 1)
        assert [each.payload for each in drain(vhost, "q")] == [b"1", b"2", b"4"]

    run(test)


@pytest.mark.promise("P2")
def test_a_stall_while_a_failed_batch_is_split_duplicates_nothing() -> None:
    store = BrokenStore()

    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        publisher = FakePublisher()
        write = store.write
        writes = [0]

        def stall_after_two(batch: Batch, *, wal: bool = True, wait_ms: int | None = None) -> None:
            writes[0] += 1
            if writes[0] in (3, 4):
                raise StoreStalledError("the test stalls")
            write(batch, wal=wal, wait_ms=wait_ms)

        store.write = stall_after_two  # type: ignore[method-assign]
        publish(vhost, publisher, "q", b"1", b"2")
        vhost.publish(publisher, "", "q", b"\xff\xff", b"malformed", number=3)
        publish(vhost, publisher, "q", b"4", b"5", first=4)
        await until(lambda: len(publisher.reported) == 5)
        assert publisher.numbers("nack") == [3]
        assert [each.payload for each in drain(vhost, "q")] == [b"1", b"2", b"4", b"5"]

    run(test, store)


def test_a_failing_consumer_does_not_affect_other_queues() -> None:
    class Bad(FakeSink):
        def deliver(self, consumer: Consumer, deliveries: Sequence[Any]) -> None:
            raise RuntimeError("the test fails")

    async def test(vhost: VHost) -> None:
        good = FakeSink(vhost)
        for name in ("bad", "good"):
            vhost.declare_queue(name, durable=True)
        vhost.subscribe("bad", Bad(vhost), tag="bad")
        vhost.subscribe("good", good, tag="good")
        publish(vhost, FakePublisher(), "bad", b"1")
        publish(vhost, FakePublisher(), "good", b"2")
        await until(lambda: good.payloads() == [b"2"])
        assert vhost.is_up

    run(test)


def test_a_consumer_cancelled_during_a_delivery_returns_its_messages() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        victim: list[Consumer] = []

        class Killer(FakeSink):
            def deliver(self, consumer: Consumer, deliveries: Sequence[Any]) -> None:
                super().deliver(consumer, deliveries)
                victim[0].cancel()

        killer, other = Killer(vhost), FakeSink(vhost)
        vhost.subscribe("q", killer, tag="killer")
        victim.append(vhost.subscribe("q", other, tag="victim"))
        publish(vhost, FakePublisher(), "q", b"1", b"2")
        await until(lambda: killer.payloads() == [b"1", b"2"])
        assert other.got == []

    run(test)


@pytest.mark.promise("P13")
def test_large_messages_of_one_turn_are_written_in_several() -> None:
    store = BrokenStore()

    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        publisher = FakePublisher()
        store.batches.clear()
        bodies = [b"%d" % number * (3 << 20) for number in range(4)]
        for number, body in enumerate(bodies):
            vhost.publish(publisher, "", "q", PERSISTENT, body, number=number + 1)
        await turns(1)
        assert len(vhost.tick.gathered.publishes) == 3
        await until(lambda: len(publisher.reported) == 4)
        assert publisher.numbers() == [1, 2, 3, 4]
        assert [message.payload for message in vhost.plane.browse("q")] == bodies
        for number, body in enumerate(bodies):
            vhost.publish(publisher, "", "q", PERSISTENT, body, number=number + 5)
        assert sum(vhost.purging("q")) == 8, "what was published before an operation is seen by it"

    run(test, store)
