"""Operations of Kafka, and which of them a client may use: ACLs first, then the broker's permissions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from basaltmq.broker.auth.acls import OPERATIONS, Operation, Resource
from basaltmq.broker.auth.permissions import CONFIGURE, READ, WRITE
from basaltmq.protocols.kafka.wire.schema import Fields

if TYPE_CHECKING:
    from basaltmq.protocols.kafka.context import Client

CLUSTER_NAME: Final = "kafka-cluster"
"""Name of the only resource of type CLUSTER."""

_TOPIC_KINDS: Final = {Operation.READ: READ, Operation.WRITE: WRITE}
_GROUP_KINDS: Final = {Operation.ALTER_CONFIGS: CONFIGURE}
_FOR_EVERYONE: Final = (Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS, Operation.IDEMPOTENT_WRITE)
"""Operations on the cluster that need no right."""


def may_create(client: Client, topic: str) -> bool:
    """Whether an ACL of the cluster, an ACL of the topic or a permission allows the creation of a topic."""
    return client.may(CONFIGURE, CLUSTER_NAME, Operation.CREATE, Resource.CLUSTER) or client.may(
        CONFIGURE, topic, Operation.CREATE
    )


def may_describe(client: Client, topic: str) -> bool:
    """Whether the client may see a topic. Every permission for it is enough."""
    return any(client.may(kind, topic, Operation.DESCRIBE) for kind in (READ, WRITE, CONFIGURE))


def topic_operations(client: Client, topic: str) -> int:
    """Return the operations that the client may use on a topic, as a bit field."""

    def is_allowed(operation: Operation) -> bool:
        if operation is Operation.DESCRIBE:
            return may_describe(client, topic)
        if operation is Operation.CREATE:
            return may_create(client, topic)
        if operation is Operation.DESCRIBE_CONFIGS:
            return client.may(READ, topic, operation)
        return client.may(_TOPIC_KINDS.get(operation, CONFIGURE), topic, operation)

    return _bits(filter(is_allowed, OPERATIONS[Resource.TOPIC]))


def with_group_operations(client: Client, response: Fields) -> Fields:
    """Add the operations that the client may use on a described group."""
    group = response["group_id"]
    allowed = _bits(
        each
        for each in OPERATIONS[Resource.GROUP]
        if client.may(_GROUP_KINDS.get(each, READ), group, each, Resource.GROUP)
    )
    return response if response.get("error_code") else response | {"authorized_operations": allowed}


def cluster_operations(client: Client) -> int:
    return _bits(
        each
        for each in OPERATIONS[Resource.CLUSTER]
        if each in _FOR_EVERYONE
        or client.is_administrator()
        or (each is Operation.CREATE and client.may(CONFIGURE, CLUSTER_NAME, each, Resource.CLUSTER))
    )


def _bits(operations: Iterable[Operation]) -> int:
    return sum(1 << each for each in operations)
