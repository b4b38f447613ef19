"""The server is killed while consumers hold messages: no confirmed message is lost, no acked one is redelivered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import islice

import fila
import grpc
import pytest
from tests.interop.fila.conftest import Admin, Server, fila_client

from basaltmq.client import Client
from basaltmq.errors import StaleLeaseError

PRODUCERS = 4


@pytest.mark.promise("P1")
@pytest.mark.spec("C6", "C7")
def test_stream_leases_are_released_immediately_after_a_crash(serve: Callable[..., Server]) -> None:
    server = serve()
    with grpc.insecure_channel(server.address) as channel:
        Admin(channel).CreateQueue(name="q", config={"visibility_timeout_ms": 3_600_000})
    with fila_client(server.address) as client:
        sent = [client.enqueue("q", None, b"%d" % i) for i in range(40)]
        stream = client.consume("q")
        held = [message.id for message in islice(stream, 25)]
        for message_id in held[:10]:
            client.ack("q", message_id)
        # Acks are written before the response, and durable with the next enqueue.
        sent.append(client.enqueue("q", None, b"last"))
        server.kill()
    server.start()
    with fila_client(server.address) as again:
        got = [(message.id, message.attempt_count) for message in islice(again.consume("q"), 31)]
        assert got == [(message_id, 0) for message_id in sent if message_id not in held[:10]]
        with pytest.raises(fila.MessageNotFoundError):
            again.ack("q", held[0])


@pytest.mark.promise("P1")
def test_every_confirmed_enqueue_survives_a_crash(serve: Callable[..., Server]) -> None:
    server = serve()
    with grpc.insecure_channel(server.address) as channel:
        Admin(channel).CreateQueue(name="q")
    confirmed: list[list[str]] = [[] for _ in range(PRODUCERS)]
    enough = threading.Barrier(PRODUCERS + 1)

    def produce(number: int) -> None:
        client = fila.Client(server.address)
        try:
            for i in range(10_000):
                confirmed[number].append(client.enqueue("q", {"n": str(number)}, b"%d" % i))
                if i == 30:
                    enough.wait(120)
        except fila.RPCError:
            return

    threads = [threading.Thread(target=produce, args=(number,)) for number in range(PRODUCERS)]
    for thread in threads:
        thread.start()
    enough.wait(120)
    server.kill()
    for thread in threads:
        thread.join(60)
    server.start()
    expected = {message_id for ids in confirmed for message_id in ids}
    assert len(expected) > 30 * PRODUCERS
    with grpc.insecure_channel(server.address) as channel:
        depth = Admin(channel).GetStats(queue="q").depth
    with fila_client(server.address) as client:
        got = {message.id for message in islice(client.consume("q"), depth)}
    assert expected <= got
    assert len(got) <= len(expected) + PRODUCERS, "one call of each may have been written and not responded"


@pytest.mark.spec("C7")
def test_a_lease_with_a_token_survives_a_crash(serve: Callable[..., Server]) -> None:
    server = serve()
    client = Client(server.address)
    client.create_queue("q", visibility_timeout_ms=3_600_000)
    client.enqueue("q", [b"a", b"b"])
    held = client.lease("q", 2)
    assert len(held) == 2
    # Leases are written before the response, and durable with the next enqueue.
    client.enqueue("q", b"last")
    server.kill()
    client.close()
    server.start()
    with Client(server.address) as other:
        assert [each.payload for each in other.lease("q", 10)] == [b"last"], "the others are leased still"
        assert other.ack(held) == 2
        with pytest.raises(StaleLeaseError):
            other.ack(held)
