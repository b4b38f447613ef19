"""Connections that have ended leave no memory behind."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from basaltmq.broker.config.settings import Config
from basaltmq.broker.node import Node
from basaltmq.protocols.mqtt.server import Server
from basaltmq.protocols.mqtt.settings import Settings
from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire.encoder import encode
from basaltmq.protocols.mqtt.wire.properties import Properties

WAIT_S = 60.0


@pytest.fixture
def quiet_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.promise("P8")
@pytest.mark.usefixtures("quiet_collector")
@pytest.mark.parametrize("has_goodbye", [True, False], ids=["disconnect", "lost"])
def test_a_closed_connection_is_freed_without_garbage_collection(tmp_path: Path, has_goodbye: bool) -> None:
    """The collector freezes long-lived objects (cli/server/collector.py) and would not find a cycle of them."""

    async def whole() -> None:
        node = await Node.open(Config(data_dir=tmp_path))
        server = Server(node, Settings())
        server.open_hosts()
        try:
            sock = socket.create_server(("127.0.0.1", 0))
            await server.listen_on(sock)
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            packets: list[p.Packet] = [
                p.Connect("a", properties=Properties(session_expiry_s=60)),
                p.Subscribe(1, (p.Subscription("t/#", 2), p.Subscription("$share/s/t/1", 1))),
                *(p.Publish("t/1", b"payload", qos, packet_id=qos) for qos in range(3)),
            ]
            writer.write(b"".join(encode(each, p.V5) for each in packets))
            # CONNACK, SUBACK, PUBACK, PUBREC, and the deliveries of both subscriptions.
            await asyncio.wait_for(reader.readuntil(b"payload"), WAIT_S)
            (found,) = server.connections
            ended = weakref.ref(found)
            del found
            if has_goodbye:
                writer.write(encode(p.Disconnect(), p.V5))
            writer.close()
            await asyncio.wait_for(_until(lambda: not server.connections), WAIT_S)
            # The commit refers to its last batch until the next one. A durable session writes one.
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(encode(p.Connect("b", properties=Properties(session_expiry_s=60)), p.V5))
            await asyncio.wait_for(reader.readexactly(2), WAIT_S)
            writer.close()
            await asyncio.wait_for(_until(lambda: ended() is None), WAIT_S)
        finally:
            await server.close()
            await node.close()

    asyncio.run(whole())


async def _until(done: Callable[[], bool]) -> None:
    while not done():  # noqa: ASYNC110  (neither the server nor a weak reference reports it)
        await asyncio.sleep(0.01)
