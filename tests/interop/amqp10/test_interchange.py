"""Messages between AMQP 1.0 and Kafka and gRPC, in both directions; and what receivers of AMQP 1.0 get unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from proton import Message
from tests.interop.amqp10.raw import raw_client
from tests.interop.amqp10.test_filters import receiver, send
from tests.interop.amqp10.test_protocol import declare, receive
from tests.interop.amqp10.test_proton import WAIT_S, connect
from tests.interop.kafka.client_modules import confluent_kafka
from tests.interop.kafka.test_clients import consumer_of, servers
from tests.interop.kafka.test_clients import receive as receive_records
from tests.interop.server import Broker, running

from basaltmq.client import Client, Draft
from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire import sections as s
from basaltmq.protocols.amqp10.wire import types as t


@pytest.fixture(scope="module")
def open_to_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    folder: Path = tmp_path_factory.mktemp("interchange")
    with running(folder / "data", "--kafka-enabled=true", "--kafka-port=0") as started:
        yield started


def from_first(offset: int = 0) -> p.Source:
    filters = {t.Symbol("o"): t.Described(t.Symbol("rabbitmq:stream-offset-spec"), t.Ulong(offset))}
    return p.Source(address="/queues/i-kafka", filter=filters)


@pytest.mark.spec("G2", "B1")
def test_kafka_and_10_read_each_other(open_to_all: Broker) -> None:
    broker = open_to_all
    broker.call("PUT", "/api/queues/%2F/i-kafka", {"durable": True, "arguments": {"x-queue-type": "stream"}})
    producer = confluent_kafka.Producer({"bootstrap.servers": servers(broker)})
    producer.produce("i-kafka", b"from kafka", key=b"k", headers=[("h", b"v")])
    assert producer.flush(WAIT_S) == 0
    client = connect(broker)
    about: Any = {"correlation_id": "c", "content_type": "text/plain", "properties": {"n": 5}}
    send(client, "/queues/i-kafka", Message(body=b"from 1.0", inferred=True, **about))
    with raw_client(broker.port()) as raw:
        raw.open()
        raw.attach_receiver(1, None, source=from_first())
        raw.credit(1, 2)
        payloads = [payload for _, payload in receive(raw, 2)]
    found = []
    for payload in payloads:
        message = Message()
        message.decode(payload)
        found.append(message)
    assert [bytes(each.body) for each in found] == [b"from kafka", b"from 1.0"]
    assert (found[1].correlation_id, found[1].content_type, found[1].properties) == ("c", "text/plain", {"n": 5})
    client.close()
    consumer = consumer_of(broker, "interchange")
    consumer.subscribe(["i-kafka"])
    try:
        assert [each.value() for each in receive_records(consumer, 2)] == [b"from kafka", b"from 1.0"]
    finally:
        consumer.close()


@pytest.mark.spec("G2")
def test_grpc_and_10_read_each_other(open_to_all: Broker) -> None:
    broker = open_to_all
    with Client(f"127.0.0.1:{broker.port('fila')}") as grpc:
        grpc.create_queue("i-grpc")
        grpc.enqueue("i-grpc", Draft(payload=b"from grpc", headers={"k": "v", "é": "ü"}))
        client = connect(broker)
        link = receiver(client, "/queues/i-grpc", credit=1)
        found = link.receive(timeout=WAIT_S)
        assert (bytes(found.body), found.properties) == (b"from grpc", {"k": "v", "é": "ü"})
        link.accept()
        link.close()
        send(client, "/queues/i-grpc", Message(body=b"from 1.0", inferred=True, properties={"n": 5, "text": "x"}))
        (leased,) = grpc.lease("i-grpc")
        assert (leased.payload, leased.headers) == (b"from 1.0", {"n": "5", "text": "x"})
        client.close()


UNUSUAL = b"".join(
    (
        # Properties as list32 with a symbol descriptor, and values in wider encodings than necessary.
        b"\0\xa3\x14amqp:properties:list\xd0\0\0\0\x0e\0\0\0\x02\x80\0\0\0\0\0\0\0\1\x40",
        s.section(s.APPLICATION_PROPERTIES, t.encode({"f": 1.5, "u": t.Ulong(1 << 63), "c": t.Char("é"), "d": None})),
    )
)
BODIES = {
    "two data sections": s.data_head(1) + b"a" + s.data_head(1) + b"b",
    "wide data": b"\0\x53\x75\xb0\0\0\0\1x",
    "sequences": s.section(s.SEQUENCE, t.encode([1, "x"])) + s.section(s.SEQUENCE, t.encode([None])),
    "a value": s.section(s.VALUE, t.encode({"k": [t.Timestamp(5), t.Described(t.Symbol("x"), 1)]})),
    "nothing": b"\0\x53\x77\x40",
}
FOOTER = s.section(s.FOOTER, t.encode({t.Symbol("x-opt-crc"): t.Uint(7)}))


@pytest.mark.spec("G2")
@pytest.mark.parametrize("kind", ["classic", "stream"])
@pytest.mark.parametrize("case", BODIES)
def test_the_bare_message_is_preserved_byte_for_byte(open_to_all: Broker, case: str, kind: str) -> None:
    broker = open_to_all
    name = f"i-bare-{kind}-{case.replace(' ', '-')}"
    broker.call("PUT", f"/api/queues/%2F/{name}", {"durable": True, "arguments": {"x-queue-type": kind}})
    bare = UNUSUAL + BODIES[case]
    sent = s.section(s.HEADER, t.encode([True, t.Ubyte(7)])) + bare + FOOTER
    with raw_client(broker.port()) as client:
        client.open()
        client.attach_sender(0, f"/queues/{name}")
        client.take(p.Flow)
        client.transfer(0, 0, payload=sent)
        assert client.take(p.Disposition).state == p.Accepted()
        chosen = {t.Symbol("o"): t.Described(t.Symbol("rabbitmq:stream-offset-spec"), "first")}
        client.attach_receiver(1, None, source=p.Source(address=f"/queues/{name}", filter=chosen))
        client.credit(1, 1)
        payload = receive(client, 1)[0][1]
    assert payload.endswith(bare + FOOTER)
    header = s.split(payload).header
    assert header is not None
    assert (header[0], header[1]) == (True, 7)


@pytest.mark.spec("G2")
def test_the_bare_message_survives_dead_lettering(open_to_all: Broker) -> None:
    broker = open_to_all
    declare(broker, "i-dead")
    about = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "i-dead"}
    broker.call("PUT", "/api/queues/%2F/i-letters", {"durable": True, "arguments": about})
    bare = UNUSUAL + BODIES["a value"]
    with raw_client(broker.port()) as client:
        client.open()
        client.attach_sender(0, "/queues/i-letters")
        client.take(p.Flow)
        client.transfer(0, 0, payload=bare)
        client.take(p.Disposition)
        client.attach_receiver(1, "/queues/i-letters")
        client.credit(1, 1)
        receive(client, 1)
        client.send(p.Disposition(role=True, first=0, settled=True, state=p.Rejected()))
        client.attach_receiver(2, "/queues/i-dead")
        client.credit(2, 1, next_incoming_id=1)
        assert receive(client, 1)[0][1].endswith(bare)
