"""The Kafka server over a node whose virtual host fails."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from basaltmq.broker.config.settings import Config
from basaltmq.broker.node import Node
from basaltmq.errors import BasaltError, CorruptionError, DiskFullError
from basaltmq.protocols.kafka.context import Settings
from basaltmq.protocols.kafka.server import Server
from basaltmq.store.rocks import RocksStore


@pytest.mark.promise("P11")
def test_the_server_recovers_after_its_context_failed_to_open(tmp_path: Path) -> None:
    async def whole() -> None:
        node = await Node.open(Config(data_dir=tmp_path))
        try:
            server = Server(node, Settings())
            before = server.context()
            await node.restart_vhost("/")
            store = node.vhost("/").store
            assert isinstance(store, RocksStore)
            # The disk is full before the first Kafka request after the restart.
            store.poison(DiskFullError("no space left"))
            for _ in range(2):
                with pytest.raises(BasaltError):
                    server.context()
            await node.restart_vhost("/")
            assert server.context() is not before
            await server.close("the test ends")
        finally:
            await node.close()

    asyncio.run(whole())


@pytest.mark.promise("P11")
def test_a_virtual_host_that_kafka_cannot_read_does_not_stop_the_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def whole() -> None:
        node = await Node.open(Config(data_dir=tmp_path))
        try:
            server = Server(node, Settings())
            node.vhost("/").store.poison(CorruptionError("a table of transactions is damaged"))
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", 0))
                await server.listen_on(sock)
                await server.close("the test ends")
        finally:
            await node.close()

    asyncio.run(whole())
    assert "Kafka cannot serve vhost '/'" in caplog.text
