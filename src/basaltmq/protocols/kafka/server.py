"""Listens for Kafka's clients."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from contextlib import suppress
from typing import Final

from basaltmq.broker.loop_shares import LoopShares
from basaltmq.broker.node import Node
from basaltmq.errors import VHostDownError
from basaltmq.protocols.kafka import configs, fetch, produce, scram_users, session, topics
from basaltmq.protocols.kafka import list_offsets as positions
from basaltmq.protocols.kafka.connection import Connection
from basaltmq.protocols.kafka.context import Desk, Handler, Settings
from basaltmq.protocols.kafka.groups import classic_groups as groups
from basaltmq.protocols.kafka.groups import consumer_requests
from basaltmq.protocols.kafka.transactions import requests as transactions_requests
from basaltmq.protocols.kafka.wire import api as k

BACKLOG: Final = 1024

_log: Final = logging.getLogger(__name__)


def handlers() -> dict[int, Handler]:
    """Who serves which request; versions and authentication are the connection's."""
    return {
        k.PRODUCE: produce.produce,
        k.FETCH: fetch.fetch,
        k.LIST_OFFSETS: positions.list_offsets,
        k.OFFSET_FOR_LEADER_EPOCH: positions.offset_for_leader_epoch,
        k.METADATA: topics.metadata,
        k.CREATE_TOPICS: topics.create_topics,
        k.DELETE_TOPICS: topics.delete_topics,
        k.CREATE_PARTITIONS: topics.create_partitions,
        k.DELETE_RECORDS: topics.delete_records,
        k.DESCRIBE_CONFIGS: configs.describe_configs,
        k.ALTER_CONFIGS: configs.alter_configs,
        k.DESCRIBE_USER_SCRAM_CREDENTIALS: scram_users.describe,
        k.ALTER_USER_SCRAM_CREDENTIALS: scram_users.alter,
        k.DESCRIBE_CLUSTER: topics.describe_cluster,
        k.INCREMENTAL_ALTER_CONFIGS: configs.incremental_alter_configs,
        k.FIND_COORDINATOR: session.find_coordinator,
        k.INIT_PRODUCER_ID: session.init_producer_id,
        k.JOIN_GROUP: groups.join_group,
        k.SYNC_GROUP: groups.sync_group,
        k.HEARTBEAT: groups.heartbeat,
        k.LEAVE_GROUP: groups.leave_group,
        k.OFFSET_COMMIT: groups.offset_commit,
        k.OFFSET_FETCH: groups.offset_fetch,
        k.DESCRIBE_GROUPS: groups.describe_groups,
        k.LIST_GROUPS: groups.list_groups,
        k.DELETE_GROUPS: groups.delete_groups,
        k.OFFSET_DELETE: groups.offset_delete,
        k.CONSUMER_GROUP_HEARTBEAT: consumer_requests.heartbeat,
        k.CONSUMER_GROUP_DESCRIBE: consumer_requests.describe,
        k.ADD_PARTITIONS_TO_TXN: transactions_requests.add_partitions,
        k.ADD_OFFSETS_TO_TXN: transactions_requests.add_offsets,
        k.TXN_OFFSET_COMMIT: transactions_requests.commit_offsets,
        k.END_TXN: transactions_requests.end,
        k.DESCRIBE_PRODUCERS: transactions_requests.describe_producers,
        k.DESCRIBE_TRANSACTIONS: transactions_requests.describe,
        k.LIST_TRANSACTIONS: transactions_requests.listed,
    }


class Server:
    """All connections of Kafka's clients."""

    def __init__(self, node: Node, settings: Settings, *, shares: LoopShares | None = None) -> None:
        self.node = node
        self.settings = settings
        self.shares = shares or LoopShares()
        self.handlers = handlers()
        self.connections: set[Connection] = set()
        self._desk: Desk | None = None
        self._listeners: list[asyncio.AbstractServer] = []

    def desk(self) -> Desk:
        """For the virtual host as it is; VHostDownError if it does not serve."""
        vhost = self.node.vhost(self.settings.vhost)
        if self._desk is None or self._desk.vhost is not vhost:
            if self._desk is not None:
                self._desk.close()
            self._desk = Desk(self.node, vhost, self.settings)
        return self._desk

    async def listen_on(self, sock: socket.socket, *, tls: ssl.SSLContext | None = None) -> None:
        loop = asyncio.get_running_loop()
        with suppress(VHostDownError):
            # What transactions left behind is finished whether or not a client comes.
            self.desk()
        listener = await loop.create_server(
            lambda: Connection(self),
            sock=sock,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self.settings.handshake_s,
            backlog=BACKLOG,
        )
        self._listeners.append(listener)

    def joined(self, connection: Connection) -> bool:
        """False: there are too many."""
        if len(self.connections) >= self.settings.connections_max:
            _log.warning("a client is refused: the limit of %d connections is reached", self.settings.connections_max)
            return False
        self.connections.add(connection)
        return True

    def left(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if self._desk is not None:
            self._desk.ahead.take(connection)

    async def close(self, reason: str) -> None:
        for listener in self._listeners:
            listener.close()
        for connection in list(self.connections):
            connection.close(reason)
        if self._desk is not None:
            self._desk.close()
            self._desk = None
        await asyncio.sleep(0)
        for connection in list(self.connections):
            connection.abort()
        for listener in self._listeners:
            await listener.wait_closed()
        self._listeners.clear()
