"""An AMQP 1.0 server without sockets, and a client whose frames the test writes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, TypeVar

from tests.fuzz.amqp091 import Transport, Users

from basaltmq.broker.scheduling.loop_shares import LoopShares
from basaltmq.broker.vhost import VHost
from basaltmq.protocols.amqp10.connection import Connection
from basaltmq.protocols.amqp10.server import Server
from basaltmq.protocols.amqp10.wire import frames as f
from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire import sections as s
from basaltmq.store.memory import MemoryStore

TURNS_MAX = 2000
FRAME_BYTES_MAX = 1 << 20
T = TypeVar("T", bound=p.Composite)


class Harness:
    """A server with one virtual host and a queue."""

    def __init__(self) -> None:
        self.vhost = VHost("/", MemoryStore())
        self.vhost.start()
        self.registered: set[int] = set()
        numbers = itertools.count(1)

        def add(_connection: object, *, user: str, vhost: str) -> int:
            number = next(numbers)
            self.registered.add(number)
            return number

        allowed = SimpleNamespace(check=lambda *_: None, check_topic=lambda *_: None, check_vhost=lambda *_: None)
        node: Any = SimpleNamespace(
            users=AnyUsers(),
            permissions=allowed,
            limits=SimpleNamespace(check_connection=lambda *_: None, check_channel=lambda *_: None),
            connections=Registry(add, self.registered),
            vhost=lambda _name: self.vhost,
            on_blocked=lambda _callback, _vhost: lambda: None,
        )
        self.server = Server(node, shares=LoopShares(clock_s=lambda: 0.0))
        self.vhost.declare_queue("q", durable=True)

    def slow_down(self, step_s: float) -> None:
        """From now on each read of the shares' clock advances it by `step_s`."""
        ticks = itertools.count()
        self.server.shares = LoopShares(clock_s=lambda: next(ticks) * step_s)

    async def turns(self, until: Callable[[], bool] = lambda: False, count: int = 10) -> None:
        for _ in range(count):
            if until():
                return
            await asyncio.sleep(0)

    def stats(self, queue: str = "q") -> dict[str, int]:
        return self.vhost.plane.stats(queue)


class AnyUsers(Users):
    """Anonymous clients are guests."""

    def anonymous(self, _peer: object) -> Any:
        return SimpleNamespace(name="guest", tags=())


class Registry:
    """Numbers of the open connections."""

    def __init__(self, add: Callable[..., int], numbers: set[int]) -> None:
        self.add = add
        self.remove = numbers.discard
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)


class Client:
    """The client of one connection."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.connection = Connection(harness.server)
        self.transport = Transport()
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]
        self._reader = f.FrameReader(FRAME_BYTES_MAX)

    async def open(self, *, channels: int = 1) -> Client:
        self.connection.data_received(f.AMQP_HEADER)
        self.send(p.Open(container_id="client", max_frame_size=FRAME_BYTES_MAX))
        for channel in range(channels):
            self.send(p.Begin(next_outgoing_id=0, incoming_window=1 << 20, outgoing_window=1 << 20), channel)
        await self.harness.turns(lambda: len(self.connection.sessions) == channels)
        self.sent()
        return self

    def send(self, performative: p.Composite, channel: int = 0, payload: bytes = b"") -> None:
        self.connection.data_received(f.frame(channel, p.encode(performative) + payload))

    def receive(self, handle: int, credit: int, channel: int = 0) -> None:
        """Attach a link on which the client receives, and give credit."""
        source = p.Source(address="/queues/q")
        name = f"in-{channel}-{handle}"
        self.send(p.Attach(name=name, handle=handle, role=p.RECEIVER, source=source, target=p.Target()), channel)
        self.flow(handle, credit, 0, channel)

    def flow(self, handle: int, credit: int, seen: int, channel: int = 0) -> None:
        """Give credit to a link that has received `seen` messages, as all links before it together."""
        given = p.Flow(handle=handle, delivery_count=seen, link_credit=credit, next_incoming_id=seen)
        given.incoming_window = given.outgoing_window = 1 << 20
        given.next_outgoing_id = 0
        self.send(given, channel)

    def settle(self, first: int, last: int, state: p.Composite, channel: int = 0) -> None:
        self.send(p.Disposition(role=p.RECEIVER, first=first, last=last, settled=True, state=state), channel)

    def sent(self) -> list[p.Composite]:
        """Return the server's output since the last call."""
        raw, self.transport.written = b"".join(self.transport.written), []
        return [
            p.decode(data, at, end)[0]
            for kind, _, data, at, end in self._reader.feed(raw)
            if kind != f.HEADER and at < end
        ]

    def unsettled(self) -> int:
        return sum(len(each.unsettled) for each in self.connection.sessions.values())


async def fill(harness: Harness, count: int, queue: str = "q") -> None:
    """Put messages into a queue."""
    client = await Client(harness).open()
    target = p.Target(address=f"/queues/{queue}")
    attach = p.Attach(name="out", handle=0, role=p.SENDER, source=p.Source(), target=target, initial_delivery_count=0)
    client.send(attach)
    payload = s.data_head(1) + b"x"
    for number in range(count):
        client.send(p.Transfer(handle=0, delivery_id=number, delivery_tag=b"%d" % number, settled=True), 0, payload)
        if not number % 100:
            await harness.turns(count=2)
    await harness.turns(lambda: harness.stats(queue)["ready"] == count, TURNS_MAX)
    client.connection.connection_lost(None)
    await harness.turns()


def in_harness(scenario: Callable[[Harness], Awaitable[None]]) -> None:
    async def run() -> None:
        harness = Harness()
        try:
            await scenario(harness)
        finally:
            for connection in list(harness.server.connections):
                connection.connection_lost(None)
            await harness.server.close()
            await harness.vhost.close()

    asyncio.run(run())
