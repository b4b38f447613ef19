"""Kafka listener: accepts connections, and maps each API key to its handler."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import Final

from basaltmq.broker.node import Node
from basaltmq.broker.scheduling.loop_shares import LoopShares
from basaltmq.errors import BasaltError, VHostDownError
from basaltmq.protocols.kafka import fetch, list_offsets, produce, session
from basaltmq.protocols.kafka.admin import acls, cluster, configs, scram_users, topics
from basaltmq.protocols.kafka.connection import Connection
from basaltmq.protocols.kafka.context import Context, Handler, Settings
from basaltmq.protocols.kafka.groups import classic_requests as groups
from basaltmq.protocols.kafka.groups import consumer_group_requests, offset_requests
from basaltmq.protocols.kafka.transactions import requests as transaction_requests
from basaltmq.protocols.kafka.wire import api as k

BACKLOG: Final = 1024

_log: Final = logging.getLogger(__name__)


def handlers() -> dict[int, Handler]:
    """Return the handler of each API key. The connection checks versions and authentication."""
    return {
        k.PRODUCE: produce.produce,
        k.FETCH: fetch.fetch,
        k.LIST_OFFSETS: list_offsets.list_offsets,
        k.OFFSET_FOR_LEADER_EPOCH: list_offsets.offset_for_leader_epoch,
        k.METADATA: topics.metadata,
        k.CREATE_TOPICS: topics.create_topics,
        k.DELETE_TOPICS: topics.delete_topics,
        k.CREATE_PARTITIONS: topics.create_partitions,
        k.DELETE_RECORDS: topics.delete_records,
        k.DESCRIBE_CONFIGS: configs.describe_configs,
        k.ALTER_CONFIGS: configs.alter_configs,
        k.DESCRIBE_ACLS: acls.describe,
        k.CREATE_ACLS: acls.create,
        k.DELETE_ACLS: acls.delete,
        k.DESCRIBE_USER_SCRAM_CREDENTIALS: scram_users.describe,
        k.ALTER_USER_SCRAM_CREDENTIALS: scram_users.alter,
        k.DESCRIBE_CLUSTER: topics.describe_cluster,
        k.INCREMENTAL_ALTER_CONFIGS: configs.incremental_alter_configs,
        k.DESCRIBE_LOG_DIRS: cluster.describe_log_dirs,
        k.ELECT_LEADERS: cluster.elect_leaders,
        k.ALTER_PARTITION_REASSIGNMENTS: cluster.alter_reassignments,
        k.LIST_PARTITION_REASSIGNMENTS: cluster.list_reassignments,
        k.DESCRIBE_QUORUM: cluster.describe_quorum,
        k.LIST_CONFIG_RESOURCES: cluster.list_config_resources,
        k.DESCRIBE_TOPIC_PARTITIONS: cluster.describe_topic_partitions,
        k.FIND_COORDINATOR: session.find_coordinator,
        k.INIT_PRODUCER_ID: session.init_producer_id,
        k.JOIN_GROUP: groups.join_group,
        k.SYNC_GROUP: groups.sync_group,
        k.HEARTBEAT: groups.heartbeat,
        k.LEAVE_GROUP: groups.leave_group,
        k.OFFSET_COMMIT: offset_requests.offset_commit,
        k.OFFSET_FETCH: offset_requests.offset_fetch,
        k.DESCRIBE_GROUPS: groups.describe_groups,
        k.LIST_GROUPS: groups.list_groups,
        k.DELETE_GROUPS: groups.delete_groups,
        k.OFFSET_DELETE: offset_requests.offset_delete,
        k.CONSUMER_GROUP_HEARTBEAT: consumer_group_requests.heartbeat,
        k.CONSUMER_GROUP_DESCRIBE: consumer_group_requests.describe,
        k.ADD_PARTITIONS_TO_TXN: transaction_requests.add_partitions,
        k.ADD_OFFSETS_TO_TXN: transaction_requests.add_offsets,
        k.TXN_OFFSET_COMMIT: transaction_requests.commit_offsets,
        k.END_TXN: transaction_requests.end,
        k.DESCRIBE_PRODUCERS: transaction_requests.describe_producers,
        k.DESCRIBE_TRANSACTIONS: transaction_requests.describe,
        k.LIST_TRANSACTIONS: transaction_requests.listed,
    }


class Server:
    """The Kafka listeners and all client connections."""

    def __init__(self, node: Node, settings: Settings, *, shares: LoopShares | None = None) -> None:
        self.node = node
        self.settings = settings
        self.shares = shares or LoopShares()
        self.handlers = handlers()
        self.connections: set[Connection] = set()
        self._context: Context | None = None
        self._listeners: list[asyncio.AbstractServer] = []

    def context(self) -> Context:
        """Return the context of the virtual host; VHostDownError if it is down."""
        vhost = self.node.vhost(self.settings.vhost)
        if self._context is None or self._context.vhost is not vhost:
            before, self._context = self._context, None
            if before is not None:
                # Remove it first: if this or the next step fails, the next request must not close it again.
                before.close()
            self._context = Context(self.node, vhost, self.settings)
        return self._context

    async def listen_on(self, sock: socket.socket, *, tls: ssl.SSLContext | None = None) -> None:
        loop = asyncio.get_running_loop()
        try:
            # Finish transactions that were decided before the restart, even if no client connects.
            self.context()
        except VHostDownError:
            pass
        except BasaltError as error:
            # Do not raise: other virtual hosts and protocols are served. Each Kafka request tries again.
            _log.error("Kafka cannot serve vhost %r: %s", self.settings.vhost, error)
        listener = await loop.create_server(
            lambda: Connection(self),
            sock=sock,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self.settings.handshake_s,
            backlog=BACKLOG,
        )
        self._listeners.append(listener)

    def joined(self, connection: Connection) -> bool:
        """Register a connection. Return False if the connection limit is reached."""
        if len(self.connections) >= self.settings.connections_max:
            _log.warning("connection refused: the limit of %d connections is reached", self.settings.connections_max)
            return False
        self.connections.add(connection)
        return True

    def left(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if self._context is not None:
            self._context.ahead.take(connection)

    async def close(self, reason: str) -> None:
        for listener in self._listeners:
            listener.close()
        for connection in list(self.connections):
            connection.close(reason)
        if self._context is not None:
            self._context.close()
            self._context = None
        await asyncio.sleep(0)
        for connection in list(self.connections):
            connection.abort()
        for listener in self._listeners:
            await listener.wait_closed()
        self._listeners.clear()
