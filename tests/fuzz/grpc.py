"""Fuzz gRPC: whole sessions over HTTP/2, valid at first, then damaged, against the services on a real queue plane.

    python -m tests.fuzz.grpc --seconds 600 [--seed N]

Each round is one connection from one seed. A client makes mostly valid calls, and may not read. Some frames are
flipped, truncated, repeated, dropped or followed by noise. The bytes arrive in pieces of any size. After a round:

- there was no internal error, and the protocol raised no exception;
- the server sent whole frames within the client's limits and windows, and none after its end;
- the server's buffer for the client was always bounded;
- the connection is removed from every list, no message stays leased, and no task is left;
- a valid client is served.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.fuzz.amqp091 import Transport, pieces
from tests.fuzz.rounds import command, run_rounds
from tests.interop.fila.server_process import guest_accounts
from tests.unit.protocols.http2.peer import data, frames, headers, prefixed

from basaltmq.broker.resources.flow import Alarms
from basaltmq.broker.vhost import VHost
from basaltmq.catalog.catalog import Catalog
from basaltmq.durability import Durability
from basaltmq.protocols.grpc.http2 import frames as f
from basaltmq.protocols.grpc.http2.frames import (
    FRAME_BYTES_ACCEPTED,
    FRAME_BYTES_MIN,
    HEAD_BYTES,
    WINDOW_DEFAULT,
    Setting,
)
from basaltmq.protocols.grpc.http2.header_blocks import encode
from basaltmq.protocols.grpc.messages import PREFIX
from basaltmq.protocols.grpc.server.connection import ServerConnection
from basaltmq.protocols.grpc.services.access import Accounts
from basaltmq.protocols.grpc.services.api_keys import ApiKeys
from basaltmq.protocols.grpc.services.queue_server import QueueServer, QueueServerOptions
from basaltmq.queues.config import QueueConfig
from basaltmq.store.memory import MemoryStore
from basaltmq.wire import basalt_pb2 as wire
from basaltmq.wire import fila_wire_pb2 as fila

QUEUES = ("a", "b")
REQUEST_BYTES_MAX = 60_000
MESSAGE_BYTES_MAX = 20_000
TURNS_MAX = 400
"""Turns of the event loop until all effects of a session have happened."""


class Harness:
    """A server without sockets."""

    @classmethod
    async def open(cls) -> Harness:
        store = MemoryStore()
        catalog = Catalog(MemoryStore())
        return cls(store, catalog, await guest_accounts(catalog))

    def __init__(self, store: MemoryStore, catalog: Catalog, accounts: Accounts) -> None:
        self.store = store
        self.catalog = catalog
        self.vhost = VHost("/", self.store)
        self.vhost.start()
        self.plane = self.vhost.plane
        for name in QUEUES:
            self.vhost.queues.adopt(QueueConfig(name=name, durability=Durability.WRITTEN, length_max=200))
        options = QueueServerOptions(request_bytes_max=REQUEST_BYTES_MAX, message_bytes_max=MESSAGE_BYTES_MAX)
        self.fila = QueueServer(self.vhost, Alarms(), ApiKeys(self.store), accounts, options)
        self.server = self.fila._server

    def connect(self) -> tuple[ServerConnection, Transport]:
        connection, transport = ServerConnection(self.server), Transport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        return connection, transport

    async def settle(self, until: Callable[[], bool] = lambda: False, turns: int = 6) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
            if until():
                return

    async def close(self) -> None:
        await self.fila.stop(1)
        await self.vhost.close()
        self.catalog.close()


class Client:
    """The client's state of its session, to make mostly valid calls."""

    def __init__(self, rng: random.Random, transport: Transport, *, is_harmed: bool) -> None:
        """Whether frames were damaged, so that the server's state is unknown."""
        self.rng = rng
        self.is_harmed = is_harmed
        self.is_reader = rng.random() < 0.7
        """Whether the client sends window updates."""
        self.open: list[int] = []
        self.ids: list[str] = []
        self.sent_bytes = 0
        self.granted_bytes = WINDOW_DEFAULT
        self.taken_bytes = [FRAME_BYTES_MIN]
        """Maximum frame sizes announced since the last read, and the one before."""
        self._cut_bytes = rng.choice([FRAME_BYTES_MIN, 3_000, 40_000, FRAME_BYTES_ACCEPTED])
        self._last = -1
        self._transport = transport
        self._seen = 0

    def opening(self) -> list[bytes]:
        window = self.rng.choice([0, 1, 100, WINDOW_DEFAULT, 1 << 20])
        return [f.PREFACE, f.settings([(Setting.INITIAL_WINDOW_SIZE, window)]), f.SETTINGS_ACK]

    def look(self) -> None:
        """Read what the server has sent since the last call."""
        news = b"".join(self._transport.written[self._seen :])
        self._seen = len(self._transport.written)
        for frame in frames(news):
            assert len(frame.payload) <= max(self.taken_bytes) or self.is_harmed
            if frame.kind == f.DATA:
                self.sent_bytes += len(frame.payload)
                if len(frame.payload) == 43:
                    self.ids.append(frame.payload[7:].decode("latin-1"))
            if frame.flags & f.END_STREAM and frame.stream in self.open:
                self.open.remove(frame.stream)
        del self.taken_bytes[:-1]

    def steps(self) -> list[bytes]:
        """Return the next frames."""
        rng = self.rng
        dice = rng.random()
        if self.open and dice < 0.12:
            return [f.rst_stream(self.open.pop(rng.randrange(len(self.open))), rng.choice([0, 8, 2]))]
        if dice < 0.17:
            self.taken_bytes.append(rng.choice([FRAME_BYTES_MIN, 20_000, 100_000, 1 << 20]))
            return [f.settings([(Setting.MAX_FRAME_SIZE, self.taken_bytes[-1])])]
        if dice < 0.2:
            return [rng.choice([f.ping(b"12345678"), f.SETTINGS_ACK])]
        if self.is_reader and dice < 0.4:
            by = rng.choice([1, 100, 70_000])
            self.granted_bytes += by
            return [f.window_update(0, by)] + [f.window_update(each, by) for each in self.open]
        return self.call()

    def call(self) -> list[bytes]:
        rng = self.rng
        self._last += 2
        stream = self._last
        self.open.append(stream)
        path, message = self.request()
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), ("content-type", "application/grpc")]
        if rng.random() < 0.2:
            fields.append(("grpc-timeout", rng.choice(["1n", "50m", "1H", "x", "123456789S"])))
        if rng.random() < 0.05:
            fields.append(rng.choice([("grpc-encoding", "gzip"), ("Bad", "x"), ("te", "gzip"), ("x", "y" * 500)]))
        content = prefixed(message)
        if rng.random() < 0.05:
            content = PREFIX.pack(rng.choice([0, 1, 9]), rng.choice([0, 5, 1 << 31])) + message
        if path.endswith("Produce"):
            content *= rng.randint(0, 4)
        parts = [content[at : at + self._cut_bytes] for at in range(0, len(content), self._cut_bytes)]
        ends = rng.random() < 0.85
        # Some clients set the size of the header table to 0.
        table = b"\x20" if self.is_reader and stream == 1 else b""
        flags = f.END_HEADERS | (f.END_STREAM if not parts and ends else 0)
        sent = [f.frame(f.HEADERS, flags, stream, table + encode(fields))]
        return sent + [data(stream, part, ends=ends and at == len(parts) - 1) for at, part in enumerate(parts)]

    def request(self) -> tuple[str, bytes]:
        rng = self.rng
        queue = rng.choice([*QUEUES, *QUEUES, "missing", ""])
        payload = b"x" * rng.choice([0, 10, 10, 900, 15_000, MESSAGE_BYTES_MAX + 1, REQUEST_BYTES_MAX])
        held = rng.choice(self.ids) if self.ids and rng.random() < 0.8 else "no id"
        batch = wire.EnqueueBatchRequest(queue=queue, payloads=[payload[:900]] * rng.choice([0, 1, 5, 40, 80]))
        token = rng.choice([0, 1, 1 << 60])
        makers: list[Callable[[], tuple[str, Any]]] = [
            *[lambda: ("fila.v1.FilaService/Enqueue", fila.EnqueueRequest(queue=queue, payload=payload))] * 4,
            *[lambda: ("fila.v1.FilaService/Consume", fila.ConsumeRequest(queue=queue))] * 2,
            lambda: ("fila.v1.FilaService/Ack", fila.AckRequest(queue=queue, message_id=held)),
            lambda: ("fila.v1.FilaService/Nack", fila.NackRequest(queue=queue, message_id=held, error="e")),
            lambda: ("fila.v1.FilaAdmin/GetStats", fila.GetStatsRequest(queue=queue)),
            lambda: ("fila.v1.FilaAdmin/ListQueues", fila.ListQueuesRequest()),
            lambda: ("basalt.v1.Queues/EnqueueBatch", batch),
            *[lambda: ("basalt.v1.Queues/Produce", wire.ProduceRequest(number=1, batch=batch))] * 2,
            lambda: ("basalt.v1.Queues/OpenSession", wire.OpenSessionRequest()),
            lambda: ("basalt.v1.Queues/AckBatch", wire.AckBatchRequest(queue=queue, token=token)),
            lambda: ("basalt.v1.Queues/Nothing", wire.OpenSessionRequest()),
        ]
        path, message = rng.choice(makers)()
        return "/" + path, message.SerializeToString() if rng.random() < 0.95 else rng.randbytes(20)


def damage(rng: random.Random, step: bytes) -> bytes:
    """Return an invalid frame."""
    raw = bytearray(step)
    match rng.randrange(7):
        case 0:
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        case 1:
            raw[rng.randrange(min(HEAD_BYTES, len(raw)))] = rng.randrange(256)
        case 2:
            del raw[rng.randrange(len(raw)) :]
        case 3:
            raw += bytes(raw)
        case 4:
            raw.clear()
        case 5:
            noise = rng.randbytes(rng.randint(0, 40))
            raw += f.frame(rng.randrange(12), rng.randrange(256), rng.choice([0, 1, 3, 8, 99]), noise)
        case 6:
            raw += rng.randbytes(rng.randint(1, 200))
    return bytes(raw)


async def one_round(harness: Harness, seed: int) -> None:
    """Run one session."""
    rng = random.Random(seed)
    connection, transport = harness.connect()
    harm = rng.choice([0.0, 0.0, 0.02, 0.1])
    client = Client(rng, transport, is_harmed=harm > 0)
    opening = client.opening()
    for turn in range(rng.randint(4, 60)):
        steps = [opening.pop(0)] if opening else client.steps()
        raw = b"".join(damage(rng, step) if rng.random() < harm else step for step in steps)
        for piece in pieces(rng, raw):
            if transport.closed:
                break
            connection.data_received(piece)
            assert len(connection.core._frame_buffer) <= FRAME_BYTES_ACCEPTED + HEAD_BYTES
            assert 0 <= connection._held_bytes <= harness.server.held_bytes_max + FRAME_BYTES_ACCEPTED
        if turn % 3 == 0:
            await harness.settle(turns=rng.choice([1, 4]))
        if rng.random() < 0.05:
            connection.pause_writing()
            await harness.settle(turns=2)
            connection.resume_writing()
        client.look()
        assert harm or client.sent_bytes <= client.granted_bytes, "the server exceeded the client's window"
    await harness.settle()
    client.look()
    if rng.random() < 0.3:
        connection.tick(connection.loop.time() + rng.choice([0, 31, 100]))
    connection.connection_lost(None)
    await harness.settle(lambda: not connection.calls, TURNS_MAX)
    assert not connection.calls
    assert connection._held_bytes == 0


async def check_harness(harness: Harness) -> None:
    """Check that nothing of the sessions is left, and that other clients are served."""

    def is_quiet() -> bool:
        return not len(harness.fila._streams) and len(asyncio.all_tasks()) == 1

    until_s = time.monotonic() + 30
    while not is_quiet() and time.monotonic() < until_s:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert not harness.server.connections
    assert not len(harness.fila._streams)
    assert not harness.fila._streams.held
    assert not len(harness.fila._queues._sessions)
    assert len(asyncio.all_tasks()) == 1, asyncio.all_tasks()
    for name in QUEUES:
        assert harness.plane.stats(name)["leased"] == 0
    connection, transport = harness.connect()
    fields = [(":method", "POST"), (":scheme", "http"), (":path", "/fila.v1.FilaService/Enqueue")]
    fields.append(("content-type", "application/grpc"))
    request = fila.EnqueueRequest(queue="a", payload=b"fine").SerializeToString()
    connection.data_received(f.PREFACE + f.settings([]) + headers(1, fields) + data(1, prefixed(request), ends=True))

    def is_answered() -> bool:
        return any(each.kind == f.DATA for each in frames(b"".join(transport.written)))

    while not is_answered() and time.monotonic() < until_s:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert is_answered()
    connection.connection_lost(None)


async def fuzz(seeds: Iterator[int], stop: Callable[[int], bool], check_every: int = 50) -> int:
    """Run rounds until `stop` returns True. Return their number."""
    harness = await Harness.open()
    try:
        return await run_rounds(
            "tests.fuzz.grpc",
            lambda seed: one_round(harness, seed),
            lambda: check_harness(harness),
            seeds,
            stop,
            check_every,
        )
    finally:
        await harness.close()


if __name__ == "__main__":
    command("gRPC", fuzz)
