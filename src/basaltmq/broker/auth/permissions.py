"""Permissions: which names a user may configure, write and read in a virtual host, with RabbitMQ's semantics.

Objects of the node's catalog under their user:

    permission   vhost's name   ->   {"configure", "write", "read": patterns, "topics": {exchange: {"write", "read"}},
                                      "acls": rules for Kafka requests (`acls.py`)}

A pattern is a regular expression that must match a part of the name. An empty pattern matches only the empty name. A
user without a row for a virtual host cannot use it. If an exchange has topic permissions, routing keys must match them
too; in these patterns `{username}`, `{vhost}` and `{client_id}` (of an MQTT client) are replaced. Results are cached,
because every publish needs them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from basaltmq.broker.auth import acls as acl_rows
from basaltmq.broker.auth.acls import ACLS_MAX, Acl, Operation, Resource
from basaltmq.broker.auth.patterns import Pattern, compiled, escaped, stored
from basaltmq.broker.auth.users import User
from basaltmq.catalog.catalog import Catalog
from basaltmq.catalog.kinds import Kind
from basaltmq.catalog.objects import CatalogObject
from basaltmq.catalog.record import ROOT as _ROOT
from basaltmq.errors import AccessRefusedError, InvalidArgumentError, NotFoundError, UserNotFoundError

CONFIGURE: Final = "configure"
WRITE: Final = "write"
READ: Final = "read"
KINDS: Final = (CONFIGURE, WRITE, READ)

RESULTS_MAX: Final = 65_536
"""Maximum cached results. A full cache is emptied."""

DEFAULT_EXCHANGE: Final = "amq.default"
"""The name of the default exchange for patterns."""

PATTERNS_MAX: Final = 1024
"""Maximum cached compiled patterns: about 2 KiB each, at most 128 KiB. A full cache is emptied."""


class Permission(msgspec.Struct, frozen=True):
    """The permissions of one user in one virtual host."""

    user: str
    vhost: str
    configure: str
    write: str
    read: str


class TopicPermission(msgspec.Struct, frozen=True):
    user: str
    vhost: str
    exchange: str
    write: str
    read: str


class Permissions:
    """The permissions of a node."""

    def __init__(self, catalog: Catalog, durable: Callable[[], Awaitable[None]]) -> None:
        self._catalog = catalog
        self._durable = durable
        self._results: dict[tuple[str, ...], bool] = {}
        self._rows: dict[tuple[str, str], dict[str, Any] | None] = {}
        self._acls: dict[tuple[str, str], tuple[Acl, ...]] = {}
        self._decisions: dict[tuple[str, str, Resource, str, Operation], bool | None] = {}
        self._patterns: dict[str, Pattern] = {}
        self._watchers: list[Callable[[], None]] = []

    def may(self, user: User, vhost: str, kind: str, resource: str) -> bool:
        """Whether the user may `configure`, `write` or `read` the resource."""
        key = (user.name, vhost, kind, resource)
        result = self._results.get(key)
        if result is None:
            result = self._evaluate(user.name, vhost, kind, resource)
            self._remember(key, result)
        return result

    def check(self, user: User, vhost: str, kind: str, resource: str) -> None:
        """Raise AccessRefusedError unless `may` is true."""
        if not self.may(user, vhost, kind, resource):
            raise AccessRefusedError(f"{kind} access to '{resource}' in vhost '{vhost}' refused for user '{user.name}'")

    def check_topic(
        self, user: User, vhost: str, exchange: str, kind: str, routing_key: str, *, client_id: str = ""
    ) -> None:
        """Raise AccessRefusedError if a topic permission of this exchange does not match the routing key."""
        row = self._row(user.name, vhost)
        topics = None if row is None else row.get("topics")
        if not topics or exchange not in topics:
            return
        key = (user.name, vhost, kind, exchange, routing_key, client_id)
        result = self._results.get(key)
        if result is None:
            pattern = topics[exchange].get(kind, "")
            for name, value in (("{username}", user.name), ("{vhost}", vhost), ("{client_id}", client_id)):
                pattern = pattern.replace(name, escaped(value))
            result = self._matches(pattern, routing_key, user.name, vhost)
            self._remember(key, result)
        if not result:
            raise AccessRefusedError(
                f"{kind} access to topic '{routing_key}' in exchange '{exchange}' in vhost '{vhost}' refused for user "
                f"'{user.name}'"
            )

    def check_vhost(self, user: User, vhost: str) -> None:
        """Raise AccessRefusedError unless the user has permissions in the virtual host."""
        if self._row(user.name, vhost) is None:
            raise AccessRefusedError(f"access to vhost '{vhost}' refused for user '{user.name}'")

    def may_use(self, user: str, vhost: str) -> bool:
        return self._row(user, vhost) is not None

    async def set(self, user: str, vhost: str, *, configure: str, write: str, read: str) -> None:
        """Set the permissions of a user in a virtual host, replacing existing ones."""
        for pattern in (configure, write, read):
            compiled(pattern, "the pattern of a permission")
        old = self._find(user, vhost)
        attributes = {CONFIGURE: configure, WRITE: write, READ: read}
        if old is None:
            self._catalog.create(Kind.PERMISSION, vhost, self._owner(user).id, attributes)
        else:
            self._catalog.update(old.id, {**old.attributes, **attributes})
        self.forget()
        await self._durable()

    async def clear(self, user: str, vhost: str) -> None:
        """Remove all permissions of a user in a virtual host, including topic permissions."""
        found = self._find(user, vhost)
        if found is None:
            raise NotFoundError(f"user {user!r} has no permissions in vhost {vhost!r}")
        self._catalog.delete(found.id)
        self.forget()
        await self._durable()

    async def set_topic(self, user: str, vhost: str, exchange: str, *, write: str, read: str) -> None:
        for pattern in (write, read):
            plain = pattern.replace("{username}", "u").replace("{vhost}", "v").replace("{client_id}", "c")
            compiled(plain, "the pattern of a topic permission")
        found = self._find(user, vhost)
        if found is None:
            raise NotFoundError(
                f"user {user!r} has no permissions in vhost {vhost!r}; set them before topic permissions"
            )
        topics = {**found.attributes.get("topics", {}), exchange: {WRITE: write, READ: read}}
        self._catalog.update(found.id, {**found.attributes, "topics": topics})
        self.forget()
        await self._durable()

    async def clear_topic(self, user: str, vhost: str) -> None:
        """Remove the topic permissions of all exchanges."""
        found = self._find(user, vhost)
        if found is None:
            return
        self._catalog.update(found.id, {**found.attributes, "topics": {}})
        self.forget()
        await self._durable()

    async def forget_vhost(self, vhost: str) -> None:
        """Remove the permissions in a deleted virtual host, so that a later one of its name has none."""
        for each in list(self.list()):
            if each.vhost == vhost:
                await self.clear(each.user, vhost)

    def list(self) -> Iterator[Permission]:
        for user in self._catalog.children(_ROOT, Kind.USER):
            for each in self._catalog.children(user.id, Kind.PERMISSION):
                patterns = [each.attributes.get(kind, "") for kind in KINDS]
                yield Permission(user.name, each.name, *patterns)

    def list_topics(self) -> Iterator[TopicPermission]:
        for user in self._catalog.children(_ROOT, Kind.USER):
            for each in self._catalog.children(user.id, Kind.PERMISSION):
                for exchange, patterns in each.attributes.get("topics", {}).items():
                    yield TopicPermission(
                        user.name, each.name, exchange, patterns.get(WRITE, ""), patterns.get(READ, "")
                    )

    def acls(self, user: str, vhost: str) -> tuple[Acl, ...]:
        """Return the ACLs of a user in a virtual host."""
        key = (user, vhost)
        found = self._acls.get(key)
        if found is None:
            if len(self._acls) >= RESULTS_MAX:
                self._acls.clear()
            found = self._acls[key] = acl_rows.stored(self._row(user, vhost) or {})
        return found

    def decide(self, user: str, vhost: str, resource: Resource, name: str, operation: Operation) -> bool | None:
        """Return whether ACLs allow or deny an operation; None if no ACL covers it."""
        acls = self.acls(user, vhost)
        if not acls:
            return None
        key = (user, vhost, resource, name, operation)
        if key not in self._decisions:
            if len(self._decisions) >= RESULTS_MAX:
                self._decisions.clear()
            self._decisions[key] = acl_rows.decision(acls, resource, name, operation)
        return self._decisions[key]

    async def set_acls(self, user: str, vhost: str, acls: Sequence[Acl]) -> None:
        """Replace the ACLs of a user. A user without permissions in the virtual host may then connect to it."""
        if len(acls) > ACLS_MAX:
            raise InvalidArgumentError(f"user {user!r} can have at most {ACLS_MAX} ACLs in vhost {vhost!r}")
        old = self._find(user, vhost)
        rows = acl_rows.to_store(acls)
        if old is not None:
            self._catalog.update(old.id, {**old.attributes, "acls": rows})
        elif rows:
            attributes = {CONFIGURE: "", WRITE: "", READ: "", "acls": rows}
            self._catalog.create(Kind.PERMISSION, vhost, self._owner(user).id, attributes)
        self.forget()
        await self._durable()

    def watch(self, watcher: Callable[[], None]) -> Callable[[], None]:
        """Call `watcher` after each change of users or permissions. Returns a function that unregisters it."""
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher)

    def forget(self) -> None:
        """Empty the caches after a change of users or permissions, and notify the watchers."""
        self._results.clear()
        self._rows.clear()
        self._acls.clear()
        self._decisions.clear()
        self._patterns.clear()
        for watcher in list(self._watchers):
            watcher()

    def _evaluate(self, user: str, vhost: str, kind: str, resource: str) -> bool:
        row = self._row(user, vhost)
        if row is None:
            return False
        return self._matches(str(row.get(kind, "")), resource or DEFAULT_EXCHANGE, user, vhost)

    def _matches(self, pattern: str, name: str, user: str, vhost: str) -> bool:
        if not pattern:
            return not name
        found = self._patterns.get(pattern)
        if found is None:
            if len(self._patterns) >= PATTERNS_MAX:
                self._patterns.clear()
            what = f"the pattern of a permission of user {user!r} in vhost {vhost!r}"
            found = self._patterns[pattern] = stored(pattern, what)
        return found.is_in(name)

    def _remember(self, key: tuple[str, ...], result: bool) -> None:
        if len(self._results) >= RESULTS_MAX:
            self._results.clear()
        self._results[key] = result

    def _row(self, user: str, vhost: str) -> dict[str, Any] | None:
        key = (user, vhost)
        if key not in self._rows:
            if len(self._rows) >= RESULTS_MAX:
                self._rows.clear()
            found = self._find(user, vhost)
            self._rows[key] = None if found is None else found.attributes
        return self._rows[key]

    def _find(self, user: str, vhost: str) -> CatalogObject | None:
        owner = self._catalog.find(Kind.USER, user)
        return None if owner is None else self._catalog.find(Kind.PERMISSION, vhost, owner.id)

    def _owner(self, user: str) -> CatalogObject:
        found = self._catalog.find(Kind.USER, user)
        if found is None:
            raise UserNotFoundError(f"user {user!r} not found")
        return found
