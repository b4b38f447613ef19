"""Access control lists (ACLs) of Kafka: rules for operations on topics, groups and transactional ids.

An ACL allows or denies one operation to one user in one virtual host. It is evaluated for Kafka requests only, before
the permissions of the user. A matching deny refuses, and a matching allow grants. Without a match, the permissions
decide.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any, Final

import msgspec

ANY_NAME: Final = "*"
"""A literal name that matches every name."""

ACLS_MAX: Final = 1000
"""Maximum ACLs of one user in one virtual host."""


class Resource(IntEnum):
    """Types of resources, with the numbers of Kafka's protocol."""

    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5


class Operation(IntEnum):
    """Operations, with the numbers of Kafka's protocol."""

    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


OPERATIONS: Final = {
    Resource.TOPIC: (
        Operation.READ,
        Operation.WRITE,
        Operation.CREATE,
        Operation.DELETE,
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
    ),
    Resource.GROUP: (
        Operation.READ,
        Operation.DELETE,
        Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
    ),
    Resource.TRANSACTIONAL_ID: (Operation.WRITE, Operation.DESCRIBE),
    Resource.CLUSTER: (
        Operation.CREATE,
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
        Operation.IDEMPOTENT_WRITE,
    ),
}
"""Operations that exist for each type of resource."""

_IMPLIED_BY: Final = {
    Operation.DESCRIBE: {Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER},
    Operation.DESCRIBE_CONFIGS: {Operation.ALTER_CONFIGS},
}
"""Operations whose allow also allows the key, as in Apache Kafka."""


class Acl(msgspec.Struct, frozen=True, array_like=True):
    """One rule."""

    resource: Resource
    name: str
    is_prefix: bool
    """Whether `name` is the beginning of the names that match."""
    operation: Operation
    is_allowed: bool

    def covers(self, resource: Resource, name: str) -> bool:
        if self.resource is not resource:
            return False
        return name.startswith(self.name) if self.is_prefix else self.name in {name, ANY_NAME}


def stored(attributes: dict[str, Any]) -> tuple[Acl, ...]:
    """Return the ACLs in the attributes of a permission object."""
    return tuple(
        Acl(Resource(resource), name, is_prefix, Operation(operation), is_allowed)
        for resource, name, is_prefix, operation, is_allowed in attributes.get("acls", ())
    )


def to_store(acls: Iterable[Acl]) -> list[list[Any]]:
    return [[int(each.resource), each.name, each.is_prefix, int(each.operation), each.is_allowed] for each in acls]


def decision(acls: Iterable[Acl], resource: Resource, name: str, operation: Operation) -> bool | None:
    """Return whether the ACLs allow or deny an operation; None if no ACL covers it."""
    allowing = {operation, Operation.ALL, *_IMPLIED_BY.get(operation, ())}
    found = None
    for acl in acls:
        if not acl.covers(resource, name):
            continue
        if acl.is_allowed:
            found = True if acl.operation in allowing else found
        elif acl.operation in {operation, Operation.ALL}:
            return False
    return found
