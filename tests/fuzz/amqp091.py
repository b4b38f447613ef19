"""Fuzz AMQP 0-9-1: whole sessions, valid at first, then damaged, against a server with a real virtual host.

    python -m tests.fuzz.amqp091 --seconds 600 [--seed N]

Each round is one connection from one seed. A client sends mostly valid frames. Some are flipped, truncated, repeated,
dropped or followed by noise. The bytes arrive in pieces of any size. After a round:

- there was no internal error, and the protocol raised no exception;
- the server sent whole frames, and none after its end;
- the connection is removed from every list, and so are its consumers and exclusive queues;
- no message stays leased;
- a valid client is served.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from tests.fuzz.rounds import command, run_rounds
from tests.unit.protocols.amqp091.wire import Frame, frames, handshake, publish

from basaltmq.broker.peer import Peer
from basaltmq.broker.scheduling.loop_shares import LoopShares
from basaltmq.broker.vhost import VHost
from basaltmq.errors import AuthenticationError
from basaltmq.protocols.amqp091.connection import Connection
from basaltmq.protocols.amqp091.server import Server
from basaltmq.protocols.amqp091.tuning import Limits
from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.amqp091.wire.frames import PROTOCOL_HEADER, encode_frame
from basaltmq.protocols.amqp091.wire.method_codec import encode_method
from basaltmq.protocols.amqp091.wire.states import Phase
from basaltmq.store.memory import MemoryStore

QUEUES = ("a", "b", "c")
TURNS_MAX = 400
"""Turns of the event loop until all effects of a session have happened."""


class Transport:
    """A socket that records what is written to it."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed, "written after the end"
        self.written.append(data)

    def writelines(self, parts: Iterable[bytes | memoryview[int]]) -> None:
        self.write(b"".join(parts))

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_write_buffer_limits(self, high: int, low: int) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else None


class Users:
    """Accepts every login."""

    async def authenticate(self, name: str, password: str, peer: Peer) -> Any:
        if (name, password) != ("guest", "guest"):
            raise AuthenticationError("who is that?")
        return SimpleNamespace(name=name, tags=())

    def accepts(self, _certificate: object, _peer: Peer) -> bool:
        return False


class Harness:
    """A server without sockets."""

    def __init__(self) -> None:
        self.vhost = VHost("/", MemoryStore())
        self.vhost.start()
        allowed = SimpleNamespace(check=lambda *_: None, check_topic=lambda *_: None, check_vhost=lambda *_: None)
        self.registered: set[int] = set()
        numbers = itertools.count(1)

        def add(_connection: object, *, user: str, vhost: str) -> int:
            number = next(numbers)
            self.registered.add(number)
            return number

        node: Any = SimpleNamespace(
            users=Users(),
            permissions=allowed,
            limits=SimpleNamespace(check_connection=lambda *_: None, check_channel=lambda *_: None),
            connections=SimpleNamespace(add=add, remove=self.registered.discard),
            vhost=lambda _name: self.vhost,
            on_blocked=lambda _callback, _vhost: lambda: None,
        )
        limits = Limits(message_bytes_max=20_000, content_bytes_max=60_000)
        # With this clock no input takes time.
        self.server = Server(node, limits=limits, shares=LoopShares(clock_s=lambda: 0.0))
        for name in QUEUES:
            self.vhost.declare_queue(name, durable=name != "c")

    def connect(self) -> tuple[Connection, Transport]:
        connection, transport = Connection(self.server), Transport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        return connection, transport

    async def settle(self, until: Callable[[], bool] = lambda: False, turns: int = 6) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
            if until():
                return

    async def close(self) -> None:
        await self.server.close()
        await self.vhost.close()


class Client:
    """The client's state of its session, to send mostly valid methods."""

    def __init__(self, rng: random.Random, transport: Transport) -> None:
        self.rng = rng
        self.tags = {1: 0, 2: 0}
        """The last delivery tag seen on each channel."""
        self.lost: set[int] = set()
        """Channels that the server closed."""
        self._transport = transport
        self._seen = 0

    def look(self) -> None:
        """Read what the server has sent since the last call."""
        news = b"".join(self._transport.written[self._seen :])
        self._seen = len(self._transport.written)
        if news.startswith(PROTOCOL_HEADER):
            return
        for frame in frames(news):
            if frame.kind != 1:
                continue
            method = frame.method
            if isinstance(method, m.BasicDeliver | m.BasicGetOk):
                self.tags[frame.channel] = method.delivery_tag
            elif isinstance(method, m.ChannelClose):
                self.lost.add(frame.channel)

    def flag(self) -> bool:
        return self.rng.random() < 0.25

    def steps(self) -> list[bytes]:
        """Return the next frames."""
        rng = self.rng
        if self.lost:
            channel = self.lost.pop()
            self.tags[channel] = 0
            return [encode_method(channel, m.ChannelCloseOk()), encode_method(channel, m.ChannelOpen())]
        channel = rng.choice([1, 1, 2])
        if rng.random() < 0.45:
            message = publish(
                b"x" * rng.choice([0, 1, 50, 50, 50, 4088, 9000] + [20_001] * (rng.random() < 0.05)),
                channel=channel,
                exchange=rng.choice(["", "", "", "amq.topic"] + ["nope"] * (rng.random() < 0.05)),
                key=rng.choice(["a", "b", "c", "k.l"]),
                properties=properties_of(rng) if rng.random() < 0.1 else b"\x10\0\2",
                mandatory=self.flag(),
            )
            return [encode_frame(*frame) for frame in frames(message)]
        return [encode_method(channel, self.method(channel))]

    def method(self, channel: int) -> m.Method:
        """Return a method that a client might send on a channel."""
        rng, flag = self.rng, self.flag
        odd = rng.random() < 0.08
        queue = rng.choice(["", "no such queue", "amq.rabbitmq.reply-to", "amq.x"] if odd else [*QUEUES, "mine"])
        exchange = rng.choice(["", "nope", "amq.headers"] if odd else ["amq.direct", "amq.topic", "x"])
        key = rng.choice(["a", "k.l", "#", ""])
        tag = rng.choice(["t", "u", "v"])
        last = self.tags[channel]
        number = rng.choice([0, last + 1, 1 << 63]) if odd or not last else rng.randint(1, last)
        arguments: Any = rng.choice([{"x-max-length": 5}, {"x-message-ttl": "no"}, {"x-match": "any"}]) if odd else {}
        makers: list[Callable[[], m.Method]] = [
            lambda: m.ChannelFlow(True),
            lambda: m.ExchangeDeclare(0, "x", "topic", flag(), False, False, False, flag(), arguments),
            lambda: m.ExchangeDelete(0, "x", flag(), flag()),
            lambda: m.ExchangeBind(0, exchange, "amq.topic", key, flag(), arguments),
            lambda: m.ExchangeUnbind(0, exchange, "amq.topic", key, flag(), arguments),
            lambda: m.QueueDeclare(0, "mine", flag(), False, True, False, flag(), arguments),
            lambda: m.QueueDeclare(0, queue, True, False, False, False, flag(), {}),
            lambda: m.QueueBind(0, queue, exchange, key, flag(), arguments),
            lambda: m.QueueUnbind(0, queue, exchange, key, arguments),
            lambda: m.QueuePurge(0, queue, flag()),
            lambda: m.QueueDelete(0, "mine", flag(), flag(), flag()),
            lambda: m.BasicQos(0, rng.choice([0, 1, 3]), flag()),
            lambda: m.BasicCancel(tag, flag()),
            lambda: m.BasicNack(number, flag(), not flag()),
            lambda: m.BasicReject(number, not flag()),
            lambda: m.BasicRecover(True),
            lambda: m.BasicRecoverAsync(True),
            lambda: m.ConfirmSelect(flag()),
            lambda: m.TxSelect(),
            lambda: m.TxCommit(),
            lambda: m.TxRollback(),
            lambda: m.ChannelClose(200, "bye", 0, 0),
            *[lambda: m.BasicConsume(0, queue, tag, False, flag(), False, flag(), arguments)] * 3,
            *[lambda: m.BasicGet(0, queue, flag())] * 3,
            *[lambda: m.BasicAck(number, flag())] * 5,
        ]
        chosen = rng.choice(makers)()
        if isinstance(chosen, m.ChannelClose):
            self.lost.discard(channel)
            self.tags[channel] = 0
        return chosen


def properties_of(rng: random.Random) -> bytes:
    return rng.choice(
        [
            b"\0\0",
            b"\x01\0\x0210",
            b"\x20\0\0\0\0\x06\1aI\0\0\0",
            b"\x20\0\0\0\0\x07\1aI\0\0\0\1",
            b"\x02\0\x15amq.rabbitmq.reply-to",
            rng.randbytes(rng.randint(0, 12)),
        ]
    )


def damage(rng: random.Random, step: bytes) -> bytes:
    """Damage a frame."""
    raw = bytearray(step)
    match rng.randrange(7):
        case 0:
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        case 1:
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        case 2:
            del raw[rng.randrange(len(raw)) :]
        case 3:
            raw += bytes(raw)
        case 4:
            raw.clear()
        case 5:
            noise = rng.randbytes(rng.randint(0, 40))
            raw += encode_frame(rng.choice([1, 2, 3, 8, 0]), rng.choice([0, 1, 2, 9]), noise)
        case 6:
            raw += rng.randbytes(rng.randint(1, 200))
    return bytes(raw)


def pieces(rng: random.Random, raw: bytes) -> Iterator[bytes]:
    """Split bytes like a socket."""
    size = rng.choice([1 << 20, 1 << 20, 500, 7] + [1] * (len(raw) < 300))
    at = 0
    while at < len(raw):
        take = rng.randint(1, size)
        yield raw[at : at + take]
        at += take


async def one_round(harness: Harness, seed: int) -> list[Frame]:
    """Run one session. Return the server's responses."""
    rng = random.Random(seed)
    connection, transport = harness.connect()
    client = Client(rng, transport)
    harm = rng.choice([0.0, 0.0, 0.01, 0.05])
    opening = handshake(rng.choice([4096, 131072]), rng.choice([3, 2047]))
    opening += [encode_method(channel, m.ChannelOpen()) for channel in (1, 2)]
    for turn in range(rng.randint(4, 80)):
        steps = [opening.pop(0)] if opening else client.steps()
        raw = b"".join(damage(rng, step) if rng.random() < harm else step for step in steps)
        if rng.random() < 0.3 and not opening:
            raw += b"".join(client.steps())
        for piece in pieces(rng, raw):
            if transport.closed:
                break
            connection.data_received(piece)
            assert len(connection.session._frame_buffer) <= connection.session.tuning.frame_bytes_max + len(piece)
            # A handshake step that waits (for a password) pauses the socket, and so does the fuzzer.
            task = connection._task
            if task is not None and not task.done():
                await harness.settle(task.done, turns=20)
        if turn % 3 == 0 or opening:
            await harness.settle(turns=2)
        client.look()
    await harness.settle()
    if rng.random() < 0.2:
        connection.data_received(encode_method(0, m.ConnectionClose(200, "bye", 0, 0)))
    for _ in range(rng.choice([0, 0, 20])):
        connection.tick()
    connection.connection_lost(None)
    await harness.settle(turns=12)
    assert connection.session.phase is Phase.CLOSED
    assert not connection.channels
    sent = b"".join(transport.written)
    return list(frames(sent)) if not sent.startswith(PROTOCOL_HEADER) else []


async def check_harness(harness: Harness) -> None:
    """Check that nothing of the sessions is left, and that other clients are served."""
    await harness.settle(turns=12)
    assert not harness.server.connections
    assert not harness.registered
    assert not harness.server.replies._consumers
    for queue in list(harness.vhost.queues):
        assert not len(queue.consumers), f"queue {queue.name!r} still has consumers"
        counts = harness.vhost.counts(queue)
        assert counts.get("leased", 0) == 0, f"queue {queue.name!r} still has messages out: {counts}"
    connection, transport = harness.connect()
    for step in [*handshake(), encode_method(1, m.ChannelOpen())]:
        connection.data_received(step)
        await harness.settle()
    connection.data_received(encode_method(1, m.QueuePurge(0, "a", False)) + encode_method(1, m.ConfirmSelect(False)))
    connection.data_received(
        publish(b"well", key="a", properties=b"\x10\0\2") + encode_method(1, m.BasicGet(0, "a", True))
    )
    got: list[Frame] = []
    for _ in range(TURNS_MAX):
        await asyncio.sleep(0.001)
        got = list(frames(b"".join(transport.written)))
        if any(frame.kind == 1 and isinstance(frame.method, m.BasicAck) for frame in got):
            break
    assert any(frame.kind == 3 and frame.payload == b"well" for frame in got), "a valid client is not served"
    connection.connection_lost(None)
    await harness.settle()


async def fuzz(seeds: Iterator[int], stop: Callable[[int], bool], check_every: int = 25) -> int:
    """Run rounds until `stop` returns True. Return their number."""
    harness = Harness()

    async def one(seed: int) -> None:
        for frame in await one_round(harness, seed):
            if frame.kind == 1 and isinstance(frame.method, m.ConnectionClose):
                assert frame.method.reply_code != 541, frame.method

    try:
        return await run_rounds("tests.fuzz.amqp091", one, lambda: check_harness(harness), seeds, stop, check_every)
    finally:
        await harness.close()


if __name__ == "__main__":
    command("AMQP 0-9-1", fuzz)
