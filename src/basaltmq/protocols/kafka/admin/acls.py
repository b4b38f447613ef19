"""DescribeAcls, CreateAcls and DeleteAcls, for administrators.

ACLs are rules of one user for the virtual host of the listener (`broker/auth/acls.py`). Principals are `User:NAME` of
existing users, and the host is always `*`. Management rights come from tags of users, so ACLs of the cluster have
only the operations CREATE, DESCRIBE, DESCRIBE_CONFIGS and IDEMPOTENT_WRITE.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Final, NamedTuple

from basaltmq.broker.auth.acls import ANY_NAME, OPERATIONS, Acl, Operation, Resource
from basaltmq.broker.scheduling.turns import Turns
from basaltmq.errors import BasaltError, InvalidArgumentError
from basaltmq.protocols.kafka.authorization import CLUSTER_NAME
from basaltmq.protocols.kafka.context import Client, Context
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.api import Request
from basaltmq.protocols.kafka.wire.schema import Fields

ANY: Final = 1
MATCH: Final = 2
LITERAL: Final = 3
PREFIXED: Final = 4
"""Pattern types. The first two are for filters only."""

DENY: Final = 2
ALLOW: Final = 3
"""Permission types, besides ANY."""

USER: Final = "User:"
ANY_HOST: Final = "*"

NAME_BYTES_MAX: Final = 1024

_NOT_ALLOWED: Final = "only administrators may describe and change ACLs"
_CLUSTER_OPERATIONS: Final = (
    Operation.CREATE,
    Operation.DESCRIBE,
    Operation.DESCRIBE_CONFIGS,
    Operation.IDEMPOTENT_WRITE,
)


class _Filter(NamedTuple):
    """Which ACLs a request means; None and ANY mean all."""

    resource_type: int
    name: str | None
    pattern_type: int
    principal: str | None
    host: str | None
    operation: int
    permission_type: int

    def covers(self, user: str, acl: Acl) -> bool:
        return (
            self.resource_type in {ANY, acl.resource}
            and self.principal in {None, USER + user}
            and self.host in {None, ANY_HOST}
            and self.operation in {ANY, acl.operation}
            and self.permission_type in {ANY, ALLOW if acl.is_allowed else DENY}
            and self._covers_name(acl)
        )

    def _covers_name(self, acl: Acl) -> bool:
        if self.pattern_type in {LITERAL, PREFIXED} and acl.is_prefix is not (self.pattern_type == PREFIXED):
            return False
        if self.name is None:
            return True
        return acl.covers(acl.resource, self.name) if self.pattern_type == MATCH else acl.name == self.name


def _filter(item: Fields) -> _Filter:
    """Read a filter; raise InvalidArgumentError for unknown types."""
    found = _Filter(
        item["resource_type"],
        item["resource_name"],
        item["pattern_type"],
        item["principal"],
        item["host"],
        item["operation"],
        item["permission_type"],
    )
    if not ANY <= found.pattern_type <= PREFIXED:
        raise InvalidArgumentError(f"unknown pattern type {found.pattern_type} in a filter of ACLs")
    if not ANY <= found.permission_type <= ALLOW:
        raise InvalidArgumentError(f"unknown permission type {found.permission_type} in a filter of ACLs")
    return found


async def _users(context: Context, wanted: _Filter) -> AsyncIterator[tuple[str, tuple[Acl, ...]]]:
    """Yield the users with the ACLs that a filter covers, in short turns."""
    turns = Turns()
    for user in context.node.users.list():
        acls = context.node.permissions.acls(user.name, context.vhost.name)
        covered = tuple(acl for acl in acls if wanted.covers(user.name, acl))
        if covered:
            yield user.name, covered
        await turns.yield_if_due()


async def describe(context: Context, client: Client, request: Request) -> Fields:
    if not client.is_administrator():
        return {"error_code": e.CLUSTER_AUTHORIZATION_FAILED, "error_message": _NOT_ALLOWED}
    resources: dict[tuple[int, str, int], list[Fields]] = defaultdict(list)
    try:
        async for user, acls in _users(context, _filter(request.body)):
            for acl in acls:
                shown = _shown(user, acl)
                key = shown.pop("resource_type"), shown.pop("resource_name"), shown.pop("pattern_type")
                resources[key].append(shown)
    except BasaltError as error:
        return {"error_code": e.code_of(error), "error_message": str(error)}
    return {
        "resources": [
            {"resource_type": kind, "resource_name": name, "pattern_type": pattern, "acls": acls}
            for (kind, name, pattern), acls in resources.items()
        ]
    }


def _shown(user: str, acl: Acl) -> Fields:
    return {
        "resource_type": acl.resource,
        "resource_name": acl.name,
        "pattern_type": PREFIXED if acl.is_prefix else LITERAL,
        "principal": USER + user,
        "host": ANY_HOST,
        "operation": acl.operation,
        "permission_type": ALLOW if acl.is_allowed else DENY,
    }


async def create(context: Context, client: Client, request: Request) -> Fields:
    """Create ACLs, one user at a time. An ACL that exists already is no error, as in Apache Kafka."""
    results: list[Fields] = []
    wanted: dict[str, list[tuple[Acl, Fields]]] = defaultdict(list)
    turns = Turns()
    for item in request.body["creations"]:
        await turns.yield_if_due()
        result: Fields = {"error_code": e.NONE}
        results.append(result)
        try:
            if not client.is_administrator():
                result.update(error_code=e.CLUSTER_AUTHORIZATION_FAILED, error_message=_NOT_ALLOWED)
            else:
                user, acl = _requested(item)
                wanted[user].append((acl, result))
        except BasaltError as error:
            result.update(error_code=e.code_of(error), error_message=str(error))
    vhost = context.vhost.name
    for user, requested in wanted.items():
        try:
            context.node.users.get(user)
            acls = dict.fromkeys((*context.node.permissions.acls(user, vhost), *(acl for acl, _ in requested)))
            await context.node.permissions.set_acls(user, vhost, tuple(acls))
        except BasaltError as error:
            for _, result in requested:
                result.update(error_code=e.INVALID_REQUEST, error_message=str(error))
    return {"results": results}


def _requested(item: Fields) -> tuple[str, Acl]:
    """Return the user and the ACL of an item of CreateAcls; raise InvalidArgumentError if it cannot be."""
    name, principal = item["resource_name"], item["principal"]
    if not principal.startswith(USER) or principal == USER + "*":
        raise InvalidArgumentError(f"the principal must be User:NAME of one user, not {principal!r:.300}")
    if item["host"] != ANY_HOST:
        raise InvalidArgumentError(f"the host of an ACL must be *, not {item['host']!r:.300}")
    if item["permission_type"] not in {DENY, ALLOW} or item["pattern_type"] not in {LITERAL, PREFIXED}:
        raise InvalidArgumentError("an ACL must allow or deny, and its pattern must be literal or prefixed")
    if not name or len(name.encode()) > NAME_BYTES_MAX:
        raise InvalidArgumentError(f"the resource name of an ACL must have 1 to {NAME_BYTES_MAX} bytes")
    try:
        resource, operation = Resource(item["resource_type"]), Operation(item["operation"])
    except ValueError as error:
        raise InvalidArgumentError(
            f"{error}; ACLs exist for topics, groups, transactional ids and the cluster"
        ) from None
    valid = _CLUSTER_OPERATIONS if resource is Resource.CLUSTER else (Operation.ALL, *OPERATIONS[resource])
    if operation not in valid:
        raise InvalidArgumentError(
            f"operation {operation.name} on {resource.name} is not available; "
            f"use {', '.join(each.name for each in valid)}"
        )
    if resource is Resource.CLUSTER and (name != CLUSTER_NAME or item["pattern_type"] != LITERAL):
        raise InvalidArgumentError(f"the name of the cluster is {CLUSTER_NAME!r}")
    is_prefix = item["pattern_type"] == PREFIXED
    if is_prefix and name == ANY_NAME:
        raise InvalidArgumentError("the prefix * would match only names that begin with *; use a literal *")
    return principal.removeprefix(USER), Acl(resource, name, is_prefix, operation, item["permission_type"] == ALLOW)


async def delete(context: Context, client: Client, request: Request) -> Fields:
    return {"filter_results": [await _deleted(context, client, each) for each in request.body["filters"]]}


async def _deleted(context: Context, client: Client, item: Fields) -> Fields:
    if not client.is_administrator():
        return {"error_code": e.CLUSTER_AUTHORIZATION_FAILED, "error_message": _NOT_ALLOWED}
    matching: list[Fields] = []
    permissions, vhost = context.node.permissions, context.vhost.name
    try:
        async for user, going in _users(context, _filter(item)):
            await permissions.set_acls(
                user, vhost, [each for each in permissions.acls(user, vhost) if each not in going]
            )
            matching += [_shown(user, acl) for acl in going]
    except BasaltError as error:
        return {"error_code": e.code_of(error), "error_message": str(error), "matching_acls": matching}
    return {"matching_acls": matching}
