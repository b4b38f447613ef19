"""Row changes in the tick: written with the publishes before them, never earlier, and confirmed after the sync."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.broker.rig import PERSISTENT, BrokenStore, FakePublisher, run, turns, until

from basaltmq.broker.message.operations import RowChange
from basaltmq.broker.publishing.gathered import BATCH_MESSAGES_MAX, Gathered
from basaltmq.broker.vhost import VHost
from basaltmq.store.families import Family

ROWS = Family.MQTT_SESSIONS


def gather(vhost: VHost, publisher: FakePublisher, number: int, exchange: str = "") -> asyncio.Future[None]:
    """Publish a message, and a row that records it."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    vhost.publish_many([(publisher, exchange, "q", PERSISTENT, b"%d" % number, False, number)])
    vhost.write_rows(RowChange([(ROWS, b"%05d" % number, b"seen")], future))
    return future


@pytest.mark.spec("G1")
def test_a_row_is_in_the_batch_of_its_publish() -> None:
    store = BrokenStore()

    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        before = len(store.batches)
        waits = [gather(vhost, FakePublisher(), number) for number in range(1, 4)]
        await asyncio.wait_for(asyncio.gather(*waits), 20)
        assert len(store.batches) == before + 1
        families = {op[1] for op in store.batches[before].ops}
        assert {Family.MESSAGES, ROWS} <= families
        vhost.write_rows(RowChange([(ROWS, b"%05d" % 2, None)]))
        await turns()
        assert [key for key, _ in store.scan(ROWS)] == [b"00001", b"00003"]

    run(test, store)


@pytest.mark.spec("G1")
def test_no_row_is_written_before_its_publish_if_the_turn_is_cut_into_batches() -> None:
    gathered = Gathered()
    publisher = FakePublisher()
    count = BATCH_MESSAGES_MAX + 10
    for number in range(1, count + 1):
        gathered.publishes.append((publisher, "", "q", PERSISTENT, b"x", False, number))
        gathered.add_rows(RowChange([(ROWS, b"%d" % number, b"")]))
    first, _ = gathered.take(1 << 30)
    assert len(first.publishes) == len(first.rows) == BATCH_MESSAGES_MAX
    gathered.put_back([first])
    assert [position for position, _ in gathered.rows] == list(range(1, count + 1))
    first, _ = gathered.take(1 << 30)
    second, _ = gathered.take(1 << 30)
    assert len(second.publishes) == len(second.rows) == 10
    halves = second.halves()
    assert halves is not None
    for half in halves:
        assert [each[6] for each in half.publishes] == [int(change.rows[0][1]) for _, change in half.rows]
    assert not gathered


def test_the_row_of_a_refused_publish_is_not_written() -> None:
    store = BrokenStore()

    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        vhost.declare_queue("bad", durable=True)
        vhost.bind_queue("bad", "amq.fanout", "")
        publisher = FakePublisher()
        good = gather(vhost, publisher, 1)
        vhost.plane.delete("bad")  # The broker does not know, so the plane refuses the message.
        bad = gather(vhost, publisher, 2, exchange="amq.fanout")
        await until(lambda: good.done() and bad.done())
        assert bad.exception() is not None
        assert good.exception() is None
        assert publisher.numbers("nack") == [2]
        assert [key for key, _ in store.scan(ROWS)] == [b"00001"]
        vhost.queues.by_name.pop("bad")

    run(test, store)


def test_nothing_is_confirmed_if_the_disk_fails() -> None:
    store = BrokenStore()

    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True)
        store.fail_write = True
        waiter = gather(vhost, FakePublisher(), 1)
        await until(waiter.done)
        assert waiter.exception() is not None
        store.fail_write = False

    run(test, store)
