"""Lease queues over gRPC: a server in one process, its clients in others, everything durable.

The clients are Python programs, so on two cores they are part of the measurement. Single calls are made with our own
channel, which needs little CPU time, and with grpcio, which needs more than the server. An echo server in the same run
shows the cost of gRPC alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
import uvloop
from bench.row import Row
from bench.size import sized

from basaltmq.client import AsyncClient, Draft
from basaltmq.protocols.grpc.client.channel import Channel
from basaltmq.protocols.grpc.server.methods import Unary
from basaltmq.protocols.grpc.server.server import GrpcServer
from basaltmq.protocols.grpc.services.error_status import outcome_of
from basaltmq.wire import fila_wire_pb2 as fila

SERVER: Final = Path(__file__).parents[1] / "tests" / "interop" / "fila" / "server_process.py"
ENQUEUE: Final = "/fila.v1.FilaService/Enqueue"
ENQUEUE_BAR: Final = 2_500
BATCH_BAR: Final = 50_000
SHARE_BAR: Final = 0.01
CONNECTIONS: Final = 16
SECONDS: Final = sized(6.0, 2.0)
BATCH: Final = 100
PAYLOAD: Final = os.urandom(1024)
LINES: Final = 8
"""Parallel life cycles, each with a connection and a queue, so that some work while others wait for the disk."""

WEIGHTS: Final = {"a": 1, "b": 2, "c": 3, "d": 5, "e": 8, "f": 13}
TAKEN: Final = 10_000


class Server(NamedTuple):
    address: str
    pid: int

    def processor_s(self) -> float:
        """Return the CPU time used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def echo() -> Iterator[Server]:
    with _running([sys.executable, "-m", "bench.grpc_queues"]) as found:
        yield found


@contextmanager
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="basalt-bench-grpc-") as directory:
        options = json.dumps({"access": "loopback"})
        with _running([sys.executable, str(SERVER), str(Path(directory) / "store"), options]) as found:
            yield found


@contextmanager
def _running(command: list[str]) -> Iterator[Server]:
    root = Path(__file__).parents[1]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=root, env=os.environ
    )
    try:
        assert process.stdout is not None
        yield Server(f"127.0.0.1:{int(process.stdout.readline())}", process.pid)
    finally:
        process.terminate()
        process.wait(timeout=30)


async def single_enqueues(address: str, seconds: float = SECONDS) -> float:
    """Return calls per second of connections with one pending call each."""
    host, _, port = address.rpartition(":")
    request = fila.EnqueueRequest(queue="single", payload=PAYLOAD).SerializeToString()

    async def produce(until_s: float) -> int:
        channel = Channel(host, int(port))
        count = 0
        while time.perf_counter() < until_s:
            await channel.unary(ENQUEUE, request)
            count += 1
        await channel.close()
        return count

    return await _rate(produce, seconds)


async def grpcio_enqueues(address: str, seconds: float = SECONDS) -> float:
    """Return the same for grpcio."""

    async def produce(until_s: float) -> int:
        async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            enqueue: Any = channel.unary_unary(
                ENQUEUE, fila.EnqueueRequest.SerializeToString, fila.EnqueueResponse.FromString
            )
            request = fila.EnqueueRequest(queue="single", payload=PAYLOAD)
            count = 0
            while time.perf_counter() < until_s:
                await enqueue(request)
                count += 1
            return count

    return await _rate(produce, seconds)


async def _rate(produce: Callable[[float], Coroutine[Any, Any, int]], seconds: float) -> float:
    connected_s = time.perf_counter()
    counts = await asyncio.gather(*[produce(connected_s + seconds) for _ in range(CONNECTIONS)])
    return sum(counts) / (time.perf_counter() - connected_s)


async def life_cycles(address: str, seconds: float = SECONDS) -> float:
    """Return messages per second that are enqueued, leased and acked, in batches."""
    done = 0
    until_s = time.perf_counter() + seconds

    async def line(number: int) -> None:
        nonlocal done
        async with AsyncClient(address) as client:
            queue = f"batch-{number}"
            await client.create_queue(queue)
            batch = [PAYLOAD] * BATCH
            while time.perf_counter() < until_s:
                await client.enqueue(queue, batch)
                held = await client.lease(queue, BATCH)
                assert len(held) == BATCH
                acked = await client.ack(held)
                done += acked

    connected_s = time.perf_counter()
    await asyncio.gather(*[line(number) for number in range(LINES)])
    return done / (time.perf_counter() - connected_s)


async def worst_share(address: str) -> float:
    """Return the largest relative deviation of a fairness key's share from its weight."""
    async with AsyncClient(address) as client:
        await client.create_queue("fair")
        for key, weight in WEIGHTS.items():
            drafts: list[bytes | str | Draft] = [
                Draft(payload=PAYLOAD, fairness_key=key, weight=weight) for _ in range(1_000)
            ]
            for _ in range(-(-TAKEN * weight // sum(WEIGHTS.values()) // 1_000) + 1):
                await client.enqueue("fair", drafts)
        seen: Counter[str] = Counter()
        while seen.total() < TAKEN:
            held = await client.lease("fair", BATCH)
            seen.update(each.fairness_key for each in held)
            await client.ack(held)
    total = sum(WEIGHTS.values())
    return max(abs(seen[key] / seen.total() - weight / total) / (weight / total) for key, weight in WEIGHTS.items())


def run() -> list[Row]:
    with server() as ours, echo() as bare:
        uvloop.run(_prepare(ours.address))
        echoes, echo_us = _measured(bare, single_enqueues)
        singles, single_us = _measured(ours, single_enqueues)
        foreign, foreign_us = _measured(ours, grpcio_enqueues)
        cycles, cycle_us = _measured(ours, life_cycles)
        share = uvloop.run(worst_share(ours.address))
    calls = f"single Enqueue calls, {CONNECTIONS} connections"
    batches = f"enqueue, lease, ack of 1 KB, batches of {BATCH}"
    return [
        Row(calls, singles, "msg/s", f">= {ENQUEUE_BAR:,}", singles >= ENQUEUE_BAR),
        Row("the same calls with PyPI's grpcio", foreign, "msg/s"),
        Row("the same calls to a server that echoes", echoes, "msg/s"),
        Row("processor time of the server, Enqueue", single_us, "us"),
        Row("processor time of the server, Enqueue with grpcio", foreign_us, "us"),
        Row("processor time of the server, echo", echo_us, "us"),
        Row(batches, cycles, "msg/s", f">= {BATCH_BAR:,}", cycles >= BATCH_BAR),
        Row("processor time of the server, a message", cycle_us, "us"),
        Row("worst share of 6 weighted keys, off by", share, "", f"<= {SHARE_BAR}", share <= SHARE_BAR),
    ]


def _measured(of: Server, work: Callable[[str], Coroutine[Any, Any, float]]) -> tuple[float, float]:
    """Return the rate, and the server's CPU time per message."""
    connected_s, used_s = time.perf_counter(), of.processor_s()
    rate = uvloop.run(work(of.address))
    return rate, (of.processor_s() - used_s) * 1e6 / (rate * (time.perf_counter() - connected_s))


async def _prepare(address: str) -> None:
    async with AsyncClient(address) as client:
        await client.create_queue("single")


async def _serve_echo() -> None:
    running = GrpcServer({ENQUEUE: Unary(lambda raw, call: raw, bytes)}, outcome_of)
    print(await running.listen("127.0.0.1", 0), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve_echo())
