"""Lease queues over gRPC: a server in one process, its clients in others, everything durable.

The clients are Python too and take about as much processor time as the server; on two cores they are half of what is
measured.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import uvloop

import grpc
from basaltmq.client import AsyncClient, Draft
from basaltmq.wire import fila_wire_pb2 as fila

SERVER: Final = Path(__file__).parents[1] / "tests" / "interop" / "fila" / "server_process.py"
ENQUEUE_BAR: Final = 2_500
BATCH_BAR: Final = 50_000
SHARE_BAR: Final = 0.01
CONNECTIONS: Final = 16
SECONDS: Final = 6.0
BATCH: Final = 100
PAYLOAD: Final = os.urandom(1024)
LINES: Final = 4
"""Life cycles that run side by side, so that one waits for the disk while another works."""

WEIGHTS: Final = {"a": 1, "b": 2, "c": 3, "d": 5, "e": 8, "f": 13}
TAKEN: Final = 10_000


class Row(NamedTuple):
    name: str
    value: float
    unit: str
    bar: str | None = None
    passed: bool | None = None


@contextmanager
def server() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="basalt-bench-grpc-") as directory:
        process = subprocess.Popen(
            [sys.executable, str(SERVER), str(Path(directory) / "store"), json.dumps({"access": "open"})],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()
            process.wait(timeout=30)


async def single_enqueues(address: str, seconds: float = SECONDS) -> float:
    """Calls a second of connections that each have one call on its way."""
    counts = [0] * CONNECTIONS
    until_s = time.perf_counter() + seconds

    async def produce(number: int) -> None:
        async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            enqueue: Any = channel.unary_unary(
                "/fila.v1.FilaService/Enqueue",
                fila.EnqueueRequest.SerializeToString,
                fila.EnqueueResponse.FromString,
            )
            request = fila.EnqueueRequest(queue="single", payload=PAYLOAD)
            while time.perf_counter() < until_s:
                await enqueue(request)
                counts[number] += 1

    began_s = time.perf_counter()
    await asyncio.gather(*[produce(number) for number in range(CONNECTIONS)])
    return sum(counts) / (time.perf_counter() - began_s)


async def life_cycles(address: str, seconds: float = SECONDS) -> float:
    """Messages a second that are enqueued, leased and acked, in batches."""
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

    began_s = time.perf_counter()
    await asyncio.gather(*[line(number) for number in range(LINES)])
    return done / (time.perf_counter() - began_s)


async def worst_share(address: str) -> float:
    """How far the share of a fairness key is from its weight, at worst, as a part of its share."""
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
    with server() as address:
        uvloop.run(_prepare(address))
        singles = uvloop.run(single_enqueues(address))
        cycles = uvloop.run(life_cycles(address))
        share = uvloop.run(worst_share(address))
    return [
        Row(
            f"single Enqueue calls, {CONNECTIONS} connections",
            singles,
            "msg/s",
            f">= {ENQUEUE_BAR:,}",
            singles >= ENQUEUE_BAR,
        ),
        Row(
            f"enqueue, lease, ack of 1 KB, batches of {BATCH}",
            cycles,
            "msg/s",
            f">= {BATCH_BAR:,}",
            cycles >= BATCH_BAR,
        ),
        Row("worst share of 6 weighted keys, off by", share, "", f"<= {SHARE_BAR}", share <= SHARE_BAR),
    ]


async def _prepare(address: str) -> None:
    async with AsyncClient(address) as client:
        await client.create_queue("single")
