"""Flow control and failures, against a real server process."""

from __future__ import annotations

import threading
from pathlib import Path

import pika
import pytest
from tests.interop.amqp091.conftest import connect
from tests.interop.amqp091.raw import declare, raw_client
from tests.interop.server import Broker, running
from tests.unit.protocols.amqp091.wire import frames, handshake, publish

from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.amqp091.wire.frames import PROTOCOL_HEADER

WAIT_S = 30
PERSISTENT = b"\x10\0\2"


@pytest.mark.spec("A11")
@pytest.mark.promise("P8")
def test_publishers_are_blocked_and_notified_while_consumers_are_served(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with (
        running(data, "--disk-free-min=1000TiB") as broker,
        raw_client(broker.port()) as publisher,
        raw_client(broker.port()) as consumer,
    ):
        publisher.open().call(declare("q", durable=True))
        # Publishes before the notification are accepted, the client is notified, and later ones are not read.
        publisher.sock.sendall(publish(b"taken", properties=PERSISTENT))
        blocked = publisher.method()
        assert isinstance(blocked, m.ConnectionBlocked)
        assert "low on disk" in blocked.reason
        publisher.sock.sendall(publish(b"held", properties=PERSISTENT))
        consumer.open()
        got = consumer.call(m.BasicGet(0, "q", True))
        assert isinstance(got, m.BasicGetOk)
        assert isinstance(consumer.call(m.BasicGet(0, "q", True)), m.BasicGetEmpty)
        assert isinstance(consumer.call(declare("another", exclusive=True)), m.QueueDeclareOk)


@pytest.mark.promise("P1")
@pytest.mark.spec("E6")
def test_after_kill_9_confirmed_messages_exist_and_acknowledged_ones_do_not(own_broker: Broker) -> None:
    confirmed: list[int] = []
    enough, more = threading.Event(), threading.Event()

    def publish_until_cut() -> None:
        with raw_client(own_broker.port()) as client:
            client.open().call(declare("q", durable=True))
            client.call(m.ConfirmSelect(False))
            number = 0
            try:
                while True:
                    number += 1
                    client.sock.sendall(publish(b"%d" % number, properties=PERSISTENT))
                    assert isinstance(client.method(), m.BasicAck)
                    confirmed.append(number)
                    if number == 300:
                        enough.set()
                    if asked and number > asked[0]:
                        more.set()
            except (OSError, EOFError):
                return

    asked: list[int] = []
    publisher = threading.Thread(target=publish_until_cut)
    publisher.start()
    try:
        assert enough.wait(WAIT_S)
        acknowledged = set()
        with raw_client(own_broker.port()) as consumer:
            consumer.open()
            for _ in range(50):
                got = consumer.call(m.BasicGet(0, "q", False))
                assert isinstance(got, m.BasicGetOk)
                consumer.frame()
                acknowledged.add(consumer.frame().payload)
                consumer.send(m.BasicAck(got.delivery_tag, False))
            consumer.call(declare("q", passive=True))
            # The acknowledgements are written. A later confirm implies that they are synced.
            asked.append(len(confirmed) + 5)
            assert more.wait(WAIT_S)
    finally:
        own_broker.kill()
        publisher.join(WAIT_S)
    own_broker.start()
    connection = connect(own_broker)
    channel = connection.channel()
    left = channel.queue_declare("q", passive=True).method.message_count
    found = [channel.basic_get("q", auto_ack=True)[2] for _ in range(left)]
    connection.close()
    assert {b"%d" % number for number in confirmed} - acknowledged <= set(found)
    assert not acknowledged & set(found)
    assert found == sorted(found, key=int)


def test_a_stop_closes_connections_and_keeps_unacknowledged_messages(own_broker: Broker) -> None:
    with raw_client(own_broker.port()) as client:
        client.open().call(declare("q", durable=True))
        client.sock.sendall(publish(b"x", properties=PERSISTENT))
        assert isinstance(client.call(m.BasicGet(0, "q", False)), m.BasicGetOk)
        stopping = threading.Thread(target=own_broker.stop)
        stopping.start()
        method = client.method()
        while isinstance(method, m.ConnectionBlocked):
            method = client.method()
        assert isinstance(method, m.ConnectionClose)
        assert method.reply_code == 320
        client.send(m.ConnectionCloseOk(), channel=0)
        assert client.rest() == b""
        stopping.join(WAIT_S)
        assert not stopping.is_alive()
    own_broker.start()
    with raw_client(own_broker.port()) as client:
        got = client.open().call(m.BasicGet(0, "q", False))
        assert isinstance(got, m.BasicGetOk)
        assert got.redelivered


def test_an_unsupported_protocol_header_gets_the_supported_one_and_a_close(broker: Broker) -> None:
    for got in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"AMQP\x02\x01\x00\x00", b"AMQP\x01\x01\x00\x0a", b"\0" * 8):
        with raw_client(broker.port()) as client:
            client.sock.sendall(got)
            assert client.rest() == PROTOCOL_HEADER


def test_invalid_frames_get_their_code_and_a_close(broker: Broker) -> None:
    with raw_client(broker.port()) as client:
        client.sock.sendall(handshake()[0] + b"\x01\0\0\0\0\0\x04garb\xce" * 3)
        found = list(frames(client.rest()))
    assert isinstance(found[0].method, m.ConnectionStart)
    close = found[-1].method
    assert isinstance(close, m.ConnectionClose)
    assert close.reply_code == 503
    assert len(found) == 2


@pytest.mark.spec("E8")
def test_a_lost_connection_requeues_messages_and_deletes_exclusive_queues(broker: Broker, name: str) -> None:
    with raw_client(broker.port()) as other:
        other.open().call(declare(name, durable=True))
        for body in (b"1", b"2"):
            other.sock.sendall(publish(body, key=name, properties=PERSISTENT))
        with raw_client(broker.port()) as owner:
            owner.open().call(declare(name + "-mine", exclusive=True))
            assert isinstance(owner.call(m.BasicGet(0, name, False)), m.BasicGetOk)
        # The socket closed without connection.close.
        until = threading.Event()
        for _ in range(200):
            reported = other.call(declare(name, passive=True))
            assert isinstance(reported, m.QueueDeclareOk)
            if reported.message_count == 2:
                break
            until.wait(0.05)
        got = other.call(m.BasicGet(0, name, True))
        assert isinstance(got, m.BasicGetOk)
        assert got.redelivered
        other.frame()
        assert other.frame().payload == b"1"
        other.call(m.QueueDelete(0, name, False, False, False))
        gone = other.call(declare(name + "-mine", passive=True))
        assert isinstance(gone, m.ChannelClose)
        assert gone.reply_code == 404


def test_heartbeats_are_sent_and_required(broker: Broker) -> None:
    with raw_client(broker.port()) as client:
        client.open(heartbeat=1)
        found = list(frames(client.rest()))
    assert found
    assert {frame.kind for frame in found} == {8}


def test_pika_keeps_a_connection_with_short_heartbeats(broker: Broker) -> None:
    connection = connect(broker, heartbeat=2)
    for _ in range(3):
        connection.process_data_events(time_limit=1.5)
    assert connection.channel().queue_declare("", exclusive=True).method.queue
    assert isinstance(connection, pika.BlockingConnection)
    connection.close()
