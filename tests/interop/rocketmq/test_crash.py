"""RocketMQ clients and kill -9 of the broker: leases, settlements and attempts survive."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.interop.rocketmq.conftest import FLAGS
from tests.interop.rocketmq.raw import Client, bodies, handle_of, message
from tests.interop.rocketmq.test_later import delayed, end, half
from tests.interop.server import running

import basaltmq
from basaltmq.log.batches.record import Record
from basaltmq.pipeline.store_path import store_path
from basaltmq.store.batch import Batch
from basaltmq.store.keys.streams import decode_scheduled_key
from basaltmq.streams.scheduled import Scheduled, put_moved, put_scheduled
from basaltmq.wire import rocketmq_wire_pb2 as wire

pytestmark = pytest.mark.spec("G3", "C7")


def test_leases_and_settlements_survive_a_killed_broker(tmp_path: Path) -> None:
    with running(tmp_path / "data", *FLAGS) as broker:
        with Client(broker.port("rocketmq"), client_id="c") as client:
            client.route("t")
            for number in range(6):
                assert client.send(message("t", b"%d" % number)).status.code == wire.OK
            _, found = client.receive("g", "t", count=4, invisible_ms=600_000, attempt="once")
            assert client.ack("g", "t", handle_of(found[0])).status.code == wire.OK
            short = client.change("g", "t", handle_of(found[1]), 100)
            assert short.status.code == wire.OK
        broker.kill()
        broker.start()
        with Client(broker.port("rocketmq"), client_id="c") as client:
            # Two are held for ten minutes, one is due again, and two were never received.
            _, again = client.receive("g", "t", polling_ms=10_000)
            _, rest = client.receive("g", "t", polling_ms=200)
            attempts = {each.body: each.system_properties.delivery_attempt for each in [*again, *rest]}
            assert attempts == {b"1": 2, b"4": 1, b"5": 1}
            assert client.ack("g", "t", handle_of(found[0])).status.code == wire.INVALID_RECEIPT_HANDLE
            assert client.ack("g", "t", handle_of(found[2])).status.code == wire.OK
            _, repeated = client.receive("g", "t", attempt="once")
            assert bodies(repeated) == [b"3"]


def test_messages_confirmed_before_a_kill_are_received_after_it(tmp_path: Path) -> None:
    with running(tmp_path / "data", *FLAGS) as broker:
        confirmed = []
        with Client(broker.port("rocketmq")) as client:
            client.route("t")
            for text in [b"%d" % number for number in range(50)]:
                assert client.send(message("t", text)).status.code == wire.OK
                confirmed.append(text)
        broker.kill()
        broker.start()
        received: list[bytes] = []
        with Client(broker.port("rocketmq")) as client:
            while True:
                code, found = client.receive("g", "t")
                if code != wire.OK:
                    break
                received += bodies(found)
                assert client.ack("g", "t", *map(handle_of, found)).status.code == wire.OK
        assert received == confirmed
        assert len(confirmed) == 50


def drained(client: Client, topic: str, wanted: int) -> list[bytes]:
    """Receive and acknowledge what a topic has, until `wanted` messages came and no other follows."""
    found: list[bytes] = []
    while True:
        polling_ms = 20_000 if len(found) < wanted else 500
        code, some = client.receive("g", topic, polling_ms=polling_ms)
        if code != wire.OK:
            return found
        found += bodies(some)
        client.ack("g", topic, *map(handle_of, some))


def test_delayed_messages_and_transactions_survive_a_killed_broker(tmp_path: Path) -> None:
    with running(tmp_path / "data", *FLAGS) as broker:
        with Client(broker.port("rocketmq")) as client:
            client.route("t")
            assert (
                client.send(*(delayed("t", b"delayed %d" % each, 1_500) for each in range(50))).status.code == wire.OK
            )
            sent = client.send(half("t", b"committed"), half("t", b"rolled back"), half("t", b"decided later"))
            ids = [each.transaction_id for each in sent.entries]
            assert end(client, "t", ids[0], wire.COMMIT) == wire.OK
            assert end(client, "t", ids[1], wire.ROLLBACK) == wire.OK
        broker.kill()
        broker.start()
        with Client(broker.port("rocketmq")) as client:
            assert end(client, "t", ids[1], wire.COMMIT) == wire.INVALID_TRANSACTION_ID
            assert end(client, "t", ids[2], wire.COMMIT) == wire.OK
            found = drained(client, "t", 52)
        assert sorted(found) == sorted([*(b"delayed %d" % each for each in range(50)), b"committed", b"decided later"])


@pytest.mark.parametrize("kills", [4])
def test_messages_that_are_due_during_kills_arrive_exactly_once_in_the_topic(tmp_path: Path, kills: int) -> None:
    with running(tmp_path / "data", *FLAGS) as broker:
        with Client(broker.port("rocketmq")) as client:
            client.route("t")
            for after_ms in range(100, 4_100, 100):
                many = [delayed("t", b"%d %d" % (after_ms, each), after_ms) for each in range(20)]
                assert client.send(*many).status.code == wire.OK
        for _ in range(kills):
            broker.kill()
            broker.start()
        with Client(broker.port("rocketmq")) as client:
            found = drained(client, "t", 800)
        assert len(found) == 800
        assert len(set(found)) == 800


def test_a_record_that_was_appended_before_a_crash_is_not_appended_again(tmp_path: Path) -> None:
    with running(tmp_path / "data", *FLAGS) as broker:
        with Client(broker.port("rocketmq")) as client:
            client.route("t")
            client.send(message("t", b"before"))
            assert client.send(delayed("t", b"moved", 100), delayed("t", b"later", 100)).status.code == wire.OK
            _, found = client.receive("g", "t", polling_ms=10_000)
            while len(found) < 3:
                found += client.receive("g", "t", polling_ms=10_000)[1]
            client.ack("g", "t", *map(handle_of, found))
        broker.stop()
        # The state of a crash between the append and the deletion of the row.
        with basaltmq.open(store_path(tmp_path / "data", "/")) as db:
            plane = db.streams
            topic = plane.topics.get("t")
            moved = next(each for each in plane.drivers.read("t", 0, 0).records() if each.value == b"moved")
            key = bytes.fromhex(dict(moved.headers)["rocketmq.scheduled"].decode())  # type: ignore[union-attr]
            batch = Batch()
            record = Record(b"moved", None, moved.headers[:-1])
            put_scheduled(batch, *decode_scheduled_key(b"D" + key)[1:], Scheduled("t", topic.id.bytes, 0, record))
            put_moved(batch, topic.shards[0], 1)
            plane.store.write(batch)
        broker.start()
        with Client(broker.port("rocketmq")) as client:
            client.send(message("t", b"after"))
            assert drained(client, "t", 1) == [b"after"]
