"""Consumers: turns, priorities, credit, exclusive and single active ones, cancels (SPEC E8)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.unit.broker.rig import BrokenStore, FakePublisher, FakeSink, publish, run, settlement, turns, until

from basaltmq.broker.consumers.dispatch import BATCHES_PER_TURN
from basaltmq.broker.vhost import REQUEUE, VHost
from basaltmq.errors import AccessRefusedError, ResourceLockedError
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore


def bodies(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


@pytest.mark.spec("E8")
def test_consumers_are_served_round_robin() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        sink = FakeSink(vhost)
        for tag in ("a", "b", "c"):
            vhost.subscribe("q", sink, tag=tag)
        publish(vhost, FakePublisher(), "q", *bodies(7))
        await until(lambda: len(sink.got) == 7)
        assert sink.by_tag == {"a": [b"0", b"3", b"6"], "b": [b"1", b"4"], "c": [b"2", b"5"]}
        publish(vhost, FakePublisher(), "q", b"7", b"8")
        await until(lambda: len(sink.got) == 9)
        assert sink.by_tag["b"][-1] == b"7"
        assert sink.by_tag["c"][-1] == b"8"

    run(test)


@pytest.mark.spec("E8")
@pytest.mark.promise("P12")
def test_a_backlog_of_large_messages_is_delivered_completely() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        large = [b"%d" % number * (3 << 20) for number in range(3)]
        publish(vhost, FakePublisher(), "q", *large)
        await turns()
        sink = FakeSink(vhost)
        vhost.subscribe("q", sink, tag="c", no_ack=True)
        await until(lambda: len(sink.got) == 3)
        assert sink.payloads() == large

    run(test)


@pytest.mark.spec("E8")
def test_consumers_get_messages_up_to_their_credit_and_more_with_new_credit() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        sink = FakeSink(vhost)
        consumer = vhost.subscribe("q", sink, tag="c", prefetch=2)
        publish(vhost, FakePublisher(), "q", *bodies(6))
        await turns()
        assert sink.payloads() == [b"0", b"1"]
        vhost.settle([settlement("q", sink.got[0])])
        consumer.credit(1)
        await turns()
        assert sink.payloads() == [b"0", b"1", b"2"]
        consumer.limit(0)
        consumer.credit(0)
        await turns()
        assert len(sink.got) == 3
        consumer.limit(None)
        await until(lambda: len(sink.got) == 6)

    run(test)


@pytest.mark.spec("E8")
def test_a_slow_consumer_does_not_delay_others() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        slow, quick = FakeSink(vhost), FakeSink(vhost, ack=True)
        vhost.subscribe("q", slow, tag="slow", prefetch=1)
        vhost.subscribe("q", quick, tag="quick", prefetch=1)
        publish(vhost, FakePublisher(), "q", *bodies(20))
        await until(lambda: len(slow.got) + len(quick.got) == 20)
        assert len(slow.got) == 1

    run(test)


@pytest.mark.spec("E8")
def test_consumers_of_higher_priority_are_served_first_while_they_have_credit() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        sink = FakeSink(vhost)
        vhost.subscribe("q", sink, tag="low", prefetch=10)
        high = vhost.subscribe("q", sink, tag="high", prefetch=2, priority=5)
        publish(vhost, FakePublisher(), "q", *bodies(4))
        await until(lambda: len(sink.got) == 4)
        assert sink.by_tag == {"high": [b"0", b"1"], "low": [b"2", b"3"]}
        high.credit(1)
        publish(vhost, FakePublisher(), "q", b"4", b"5")
        await until(lambda: len(sink.got) == 6)
        assert sink.by_tag["high"][-1] == b"4"
        assert sink.by_tag["low"][-1] == b"5"

    run(test)


@pytest.mark.spec("E8")
def test_an_exclusive_consumer_is_alone() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        sink = FakeSink(vhost)
        first = vhost.subscribe("q", sink, tag="first")
        with pytest.raises(AccessRefusedError, match="in exclusive use"):
            vhost.subscribe("q", sink, tag="alone", exclusive=True)
        first.cancel()
        alone = vhost.subscribe("q", sink, tag="alone", exclusive=True)
        with pytest.raises(AccessRefusedError, match="in exclusive use"):
            vhost.subscribe("q", sink, tag="other")
        alone.cancel()
        vhost.subscribe("q", sink, tag="other")

    run(test)


@pytest.mark.spec("E8")
def test_the_next_single_active_consumer_takes_over() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True, arguments={"x-single-active-consumer": True})
        sink = FakeSink(vhost)
        first = vhost.subscribe("q", sink, tag="first", prefetch=2)
        vhost.subscribe("q", sink, tag="second")
        vhost.subscribe("q", sink, tag="third", priority=1)
        publish(vhost, FakePublisher(), "q", *bodies(4))
        await turns()
        assert sink.by_tag == {"first": [b"0", b"1"]}, "a lack of credit is no reason to serve another"
        first.cancel()
        vhost.settle([settlement("q", each, REQUEUE) for each in sink.got])
        await until(lambda: len(sink.got) == 6)
        assert sorted(sink.by_tag["third"]) == bodies(4)
        assert "second" not in sink.by_tag

    run(test)


@pytest.mark.promise("P8")
def test_deliveries_pause_for_a_consumer_whose_client_does_not_read() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        sink = FakeSink(vhost)
        consumer = vhost.subscribe("q", sink, tag="c")
        consumer.pause()
        publish(vhost, FakePublisher(), "q", *bodies(3))
        await turns()
        assert sink.got == []
        consumer.resume()
        await until(lambda: len(sink.got) == 3)

    run(test)


@pytest.mark.spec("E8")
def test_consumers_of_a_deleted_queue_are_notified() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        sink = FakeSink(vhost)
        vhost.subscribe("q", sink, tag="a")
        gone = vhost.subscribe("q", sink, tag="b")
        gone.cancel()
        gone.cancel()
        vhost.delete_queue("q")
        assert sink.cancels == ["a"]

    run(test)


def test_deliveries_without_acknowledgement_are_settled_when_sent() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        sink = FakeSink(vhost)
        vhost.subscribe("q", sink, tag="c", no_ack=True)
        publish(vhost, FakePublisher(), "q", *bodies(600))
        await until(lambda: len(sink.got) == 600)
        await until(lambda: vhost.counts(vhost.queues.by_name["q"])["messages"] == 0)
        assert sink.payloads() == bodies(600)

    run(test)


@pytest.mark.promise("P3")
def test_requeued_messages_come_first_and_are_marked_redelivered() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        sink = FakeSink(vhost)
        consumer = vhost.subscribe("q", sink, tag="c", prefetch=2)
        publish(vhost, FakePublisher(), "q", *bodies(4))
        await until(lambda: len(sink.got) == 2)
        assert [each.redelivered for each in sink.got] == [False, False]
        vhost.settle([settlement("q", each, REQUEUE) for each in sink.got])
        consumer.credit(2)
        await until(lambda: len(sink.got) == 4)
        assert sink.payloads()[2:] == [b"0", b"1"]
        assert [each.redelivered for each in sink.got[2:]] == [True, True]

    run(test)


def test_closing_a_connection_removes_its_consumers_and_exclusive_queues() -> None:
    async def test(vhost: VHost) -> None:
        mine, other = object(), object()
        vhost.declare_queue("shared", durable=True)
        vhost.declare_queue("mine", exclusive=True, owner=mine)
        with pytest.raises(ResourceLockedError, match="locked queue 'mine' in vhost '/'"):
            vhost.declare_queue("mine", exclusive=True, owner=other)
        with pytest.raises(ResourceLockedError):
            vhost.get("mine", owner=other)
        sink = FakeSink(vhost)
        vhost.subscribe("shared", sink, tag="a", owner=mine)
        vhost.subscribe("shared", sink, tag="b", owner=other)
        vhost.release_owner(mine)
        assert "mine" not in vhost.queues.by_name
        assert [each.tag for each in vhost.queues.by_name["shared"].consumers] == ["b"]
        assert sink.cancels == []

    run(test)


@pytest.mark.promise("P8")
def test_removed_consumers_leave_no_state() -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        sink = FakeSink(vhost)
        stays = vhost.subscribe("q", sink, tag="stays", owner="other")
        for number in range(1000):
            vhost.subscribe("q", sink, tag=str(number), owner="mine").cancel()
        assert len(stays.queue.consumers) == 1
        rotation = stays.queue.consumers.first_rotation()
        assert rotation is not None
        assert len(rotation) < 40
        publish(vhost, FakePublisher(), "q", *bodies(3))
        await until(lambda: sink.by_tag == {"stays": bodies(3)})

    run(test)


@pytest.mark.promise("P8")
def test_many_queues_with_messages_are_served_a_few_per_turn_and_all_in_the_end() -> None:
    async def test(vhost: VHost) -> None:
        sink = FakeSink(vhost)
        names = [f"q{number}" for number in range(3 * BATCHES_PER_TURN)]
        for name in names:
            vhost.declare_queue(name, durable=True)
            publish(vhost, FakePublisher(), name, b"1", b"2")
        await turns(5)
        for name in names:
            vhost.subscribe(name, sink, tag=name)
        vhost.tick.dispatch.run()
        # Fewer if the time for one turn is over before.
        assert 1 <= len(sink.by_tag) <= BATCHES_PER_TURN
        await until(lambda: len(sink.got) == 2 * len(names))
        assert set(sink.by_tag) == set(names)

    run(test)


def test_consumers_get_messages_once_after_a_store_stall() -> None:
    store = BrokenStore()

    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True, arguments={"x-basalt-lease-ms": 60_000})
        publisher = FakePublisher()
        publish(vhost, publisher, "q", *bodies(3))
        await until(lambda: len(publisher.reported) == 3)
        sink = FakeSink(vhost)
        store.stall = True
        vhost.subscribe("q", sink, tag="c", prefetch=2)
        await turns()
        assert sink.got == []
        store.stall = False
        await until(lambda: sink.payloads() == bodies(2))

    run(test, store)


@pytest.mark.promise("P7")
def test_an_unreadable_queue_does_not_affect_others() -> None:
    store = MemoryStore()

    async def test(vhost: VHost) -> None:
        sink = FakeSink(vhost)
        publisher = FakePublisher()
        for name in ("bad", "good"):
            vhost.declare_queue(name, durable=True)
        publish(vhost, publisher, "bad", b"x" * 6000)
        await until(lambda: len(publisher.reported) == 1)
        batch = Batch()
        for key, _ in store.scan(Family.MESSAGE_CONTENT):
            batch.delete(Family.MESSAGE_CONTENT, key)
        store.write(batch)
        for name in ("bad", "good"):
            vhost.subscribe(name, sink, tag=name)
        publish(vhost, publisher, "good", b"fine", first=2)
        await until(lambda: sink.payloads() == [b"fine"])
        assert vhost.get("bad", no_ack=True, owner=None) is None
        (record,) = vhost.plane.damage.records("bad")
        assert "missing" in record.reason
        publish(vhost, publisher, "bad", b"next", first=3)
        await until(lambda: sink.payloads() == [b"fine", b"next"])
        assert vhost.is_up

    run(test, store)


@pytest.mark.promise("P13")
def test_acknowledgements_of_many_consumers_are_one_operation_per_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        publish(vhost, FakePublisher(), "q", *[b"%d" % number for number in range(100)])
        sink = FakeSink(vhost)
        for number in range(100):
            vhost.subscribe("q", sink, tag=f"c{number}", prefetch=1)
        await until(lambda: len(sink.got) == 100)
        leases = {each.token for each in sink.got}
        assert len(leases) < 50
        calls: list[int] = []
        ack = vhost.plane.ack

        def counted(name: str, token: int, ids: Sequence[bytes]) -> None:
            calls.append(token)
            ack(name, token, ids)

        monkeypatch.setattr(vhost.plane, "ack", counted)
        stale = settlement("q", sink.got[0])
        vhost.settle([settlement("q", each) for each in sink.got])
        await until(lambda: vhost.plane.stats("q")["messages"] == 0)
        assert sorted(calls) == sorted(leases)
        vhost.settle([stale])
        await turns()
        assert vhost.plane.stats("q")["acked"] == 100

    run(test)
