"""Fila's client and ours against `basalt serve`, where AMQP serves the same queues."""

from __future__ import annotations

from itertools import islice

import fila
import grpc
import pika
import pytest
from tests.interop.fila.conftest import Admin
from tests.interop.server import Broker

from basaltmq.client import Client
from basaltmq.errors import PreconditionFailedError, ResourceLockedError
from basaltmq.queues.draft import Draft

DEAD = 'function on_failure(msg) return {action = "dlq"} end'


def address(broker: Broker) -> str:
    return f"127.0.0.1:{broker.port('fila')}"


@pytest.mark.spec("C9", "C12")
def test_dead_letters_of_a_lease_queue_are_kept_and_redriven_in_a_broker_too(broker: Broker) -> None:
    with grpc.insecure_channel(address(broker)) as channel, fila.Client(address(broker)) as client:
        admin = Admin(channel)
        queue = admin.queue(on_failure_script=DEAD)
        sent = client.enqueue(queue, {"k": "v"}, b"poison")
        stream = client.consume(queue)
        client.nack(queue, next(stream).id, "broken")
        assert admin.GetStats(queue=f"{queue}.dlq").depth == 1
        assert admin.Redrive(dlq_queue=f"{queue}.dlq").redriven == 1
        assert next(stream).id == sent
        scripts = broker.call("GET", f"/api/queues/%2F/{queue}")["scripts"]
        assert (scripts["on_failure"]["runs"], scripts["on_failure"]["failures"]) == (1, 0)


def test_the_timer_of_the_broker_expires_leases(broker: Broker) -> None:
    with Client(address(broker)) as client:
        client.create_queue("expiring", visibility_timeout_ms=300)
        client.enqueue("expiring", b"m")
        assert client.lease("expiring")[0].attempts == 0
        assert client.lease("expiring", wait=30)[0].attempts == 1


def test_queues_created_over_grpc_exist_over_amqp_and_vice_versa(broker: Broker) -> None:
    with pika.BlockingConnection(pika.URLParameters(broker.url())) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        with Client(address(broker)) as client:
            client.create_queue("shared")
            client.enqueue("shared", b"from grpc")
            client.enqueue("shared", b"second")
            channel.queue_declare("shared", passive=True)
            channel.queue_declare("shared.dlq", passive=True)
            got = channel.basic_get("shared", auto_ack=True)
            assert got[2] == b"from grpc"
            channel.basic_publish("", "shared", b"from amqp")
            assert [each.payload for each in client.lease("shared", 10)] == [b"second", b"from amqp"]
            channel.queue_declare("amqp-made", durable=True)
            client.enqueue("amqp-made", b"x")
            assert channel.basic_get("amqp-made", auto_ack=True)[2] == b"x"
            client.delete_queue("shared")
            with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="NOT_FOUND"):
                channel.queue_declare("shared", passive=True)


def test_headers_are_converted_between_grpc_and_amqp(broker: Broker) -> None:
    with (
        pika.BlockingConnection(pika.URLParameters(broker.url())) as connection,
        Client(address(broker)) as client,
        fila.Client(address(broker)) as fila_client,
    ):
        channel = connection.channel()
        channel.confirm_delivery()
        client.create_queue("crossing")
        fila_client.enqueue("crossing", {"tenant": "acme", "é": "ü"}, b"got")
        client.enqueue("crossing", Draft(payload=b"consumed", headers={"k": "v"}))
        client.enqueue("crossing", b"none")
        _, properties, body = channel.basic_get("crossing", auto_ack=True)
        assert (properties.headers, body) == ({"tenant": "acme", "é": "ü"}, b"got")
        seen = islice(channel.consume("crossing", auto_ack=True, inactivity_timeout=30), 2)
        assert [(properties.headers, body) for _, properties, body in seen] == [
            ({"k": "v"}, b"consumed"),
            (None, b"none"),
        ]
        channel.cancel()
        headers = {"trace": "t-1", "try": 3, "urgent": True, "list": [1]}
        for body in (b"leased", b"streamed"):
            channel.basic_publish("", "crossing", body, pika.BasicProperties(headers=headers, delivery_mode=2))
        (leased,) = client.lease("crossing")
        shown = {"trace": "t-1", "try": "3", "urgent": "true"}
        assert (leased.payload, leased.headers) == (b"leased", shown)
        streamed = next(fila_client.consume("crossing"))
        assert (streamed.payload, dict(streamed.headers)) == (b"streamed", shown)


def test_streams_and_exclusive_queues_are_not_lease_queues(broker: Broker) -> None:
    with pika.BlockingConnection(pika.URLParameters(broker.url())) as connection:
        channel = connection.channel()
        channel.queue_declare("log", durable=True, arguments={"x-queue-type": "stream"})
        channel.queue_declare("mine", exclusive=True)
        with Client(address(broker)) as client:
            for queue, refusal in (("log", PreconditionFailedError), ("mine", ResourceLockedError)):
                with pytest.raises(refusal):
                    client.enqueue(queue, b"")
                with pytest.raises(refusal):
                    client.lease(queue)


def test_policies_do_not_change_scripts_and_dead_letters_of_lease_queues(broker: Broker) -> None:
    with grpc.insecure_channel(address(broker)) as channel, fila.Client(address(broker)) as client:
        admin = Admin(channel)
        admin.CreateQueue(name="policed", config={"on_failure_script": DEAD})
        policy = {"pattern": "^policed$", "definition": {"max-length": 2}, "apply-to": "queues"}
        broker.call("PUT", "/api/policies/%2F/short", policy)
        for i in range(3):
            client.enqueue("policed", None, b"%d" % i)
        stream = client.consume("policed")
        assert [message.payload for message in islice(stream, 2)] == [b"1", b"2"]
        assert admin.GetStats(queue="policed.dlq").depth == 1, "what the limit dropped is a dead letter"


@pytest.mark.promise("P1")
def test_queues_and_messages_survive_a_crash_of_the_broker(own_broker: Broker) -> None:
    with grpc.insecure_channel(address(own_broker)) as channel:
        Admin(channel).CreateQueue(name="q", config={"on_failure_script": DEAD, "visibility_timeout_ms": 3_600_000})
    with fila.Client(address(own_broker)) as client:
        sent = [client.enqueue("q", None, b"%d" % i) for i in range(10)]
        stream = client.consume("q")
        held = list(islice(stream, 5))
        client.nack("q", held[0].id, "dead")
        sent.append(client.enqueue("q", None, b"after"))
        own_broker.kill()
    own_broker.start()
    with fila.Client(address(own_broker)) as client, grpc.insecure_channel(address(own_broker)) as channel:
        assert [message.id for message in islice(client.consume("q"), 10)] == sent[1:]
        assert Admin(channel).GetStats(queue="q.dlq").depth == 1
    assert own_broker.stop() == 0
