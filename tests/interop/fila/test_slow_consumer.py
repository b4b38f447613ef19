"""A consumer that does not read neither blocks messages for others nor fills the server's memory."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Any

import fila
import grpc
import pytest
from tests.interop.fila.conftest import Admin, Server, fila_client, until

from basaltmq.protocols.grpc.services.fila.consume_streams import BATCH_MAX
from basaltmq.protocols.grpc.services.waiting_consumers import LOAD_SOFT_MAX
from basaltmq.wire import fila_wire_pb2 as wire

WAIT_S = 60


def sleeper(address: str, queue: str) -> tuple[grpc.Channel, Any]:
    """Open a stream on a separate connection and never read it."""
    window = [("grpc.http2.lookahead_bytes", 65536), ("grpc.http2.bdp_probe", 0)]
    channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1), *window])
    consume: Any = channel.unary_stream(
        "/fila.v1.FilaService/Consume", wire.ConsumeRequest.SerializeToString, wire.ConsumeResponse.FromString
    )
    return channel, consume(wire.ConsumeRequest(queue=queue))


def test_other_consumers_get_all_messages_not_sent_to_the_slow_one(admin: Admin, server: Server) -> None:
    queue = admin.queue(visibility_timeout_ms=3_600_000)
    channel, stream = sleeper(server.address, queue)
    until(lambda: admin.GetStats(queue=queue).active_consumers)
    count = 400
    payload = bytes(10_000)

    async def fill() -> None:
        async with fila.AsyncClient(server.address) as client:
            await asyncio.gather(*[client.enqueue(queue, None, payload) for _ in range(count)])

    asyncio.run(asyncio.wait_for(fill(), WAIT_S))
    got = 0
    with fila_client(server.address) as client:
        # All messages except those in the transport's window and the one that waits for room in it.
        for message in client.consume(queue):
            got += 1
            client.ack(queue, message.id)
            stats = admin.GetStats(queue=queue)
            if not stats.depth and stats.in_flight <= 40:
                break
    assert got >= count - 40
    stream.cancel()
    channel.close()
    with fila_client(server.address) as client:
        rest = list(islice(client.consume(queue), count - got))
    assert len(rest) == count - got, "what the slow one had is back when it is gone"


def test_the_server_buffers_little_for_a_client_that_does_not_read(admin: Admin, server: Server) -> None:
    queue = admin.queue()
    payload = bytes(1 << 20)
    with fila_client(server.address) as client:
        for _ in range(150):
            client.enqueue(queue, None, payload)
    before_bytes = server.memory_bytes()
    sleepers = [sleeper(server.address, queue) for _ in range(4)]
    until(lambda: admin.GetStats(queue=queue).in_flight >= 4)
    seen: list[int] = []

    def has_settled() -> bool:
        seen.append(admin.GetStats(queue=queue).in_flight)
        return seen[-20:] == seen[-1:] * 20

    until(has_settled)
    assert seen[-1] <= 4 * 20, "each has what its window takes, not the whole queue"
    grown_bytes = server.memory_bytes() - before_bytes
    assert grown_bytes < 100 << 20, f"grew by {grown_bytes >> 20} MiB"
    for channel, stream in sleepers:
        stream.cancel()
        channel.close()


@pytest.mark.spec("C8")
def test_two_consumers_share_a_backlog(admin: Admin, server: Server) -> None:
    queue = admin.queue(visibility_timeout_ms=3_600_000)
    # Nothing is settled, so a consumer with LOAD_SOFT_MAX messages waits until the other one has as many.
    count = 2 * LOAD_SOFT_MAX + 2 * BATCH_MAX

    async def share() -> tuple[int, int]:
        async with fila.AsyncClient(server.address) as client:
            counts = [0, 0]
            done = asyncio.Event()

            async def consume(number: int) -> None:
                async for _ in await client.consume(queue):
                    counts[number] += 1
                    if sum(counts) == count:
                        done.set()

            tasks = [asyncio.create_task(consume(number)) for number in range(2)]
            # A stream that is alone may take everything before the other one is open.
            await asyncio.to_thread(until, lambda: admin.GetStats(queue=queue).active_consumers == 2)
            await asyncio.gather(*[client.enqueue(queue, None, b"") for _ in range(count)])
            await done.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return counts[0], counts[1]

    counts = asyncio.run(asyncio.wait_for(share(), WAIT_S))
    assert sum(counts) == count
    assert min(counts) >= LOAD_SOFT_MAX - BATCH_MAX, counts
