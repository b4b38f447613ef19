"""Routes for users, permissions and topic permissions, for administrators only.

Passwords and hashes are never returned. The only exception are definitions, which contain hashes by design.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from basaltmq.admin.http.message import HttpError, Response
from basaltmq.admin.http.paging import listing
from basaltmq.admin.http.routes import Access, Call, Route
from basaltmq.admin.http.scope import Scope
from basaltmq.admin.objects.definitions_file import PermissionEntry, TopicPermissionEntry, UserEntry
from basaltmq.broker.auth import passwords
from basaltmq.broker.auth.permissions import Permissions
from basaltmq.broker.auth.users import User, Users

SCRYPT: Final = "basalt_scrypt"
ALGORITHMS: Final = {
    "rabbit-sha256": "rabbit_password_hashing_sha256",
    "rabbit-sha512": "rabbit_password_hashing_sha512",
}
"""RabbitMQ's algorithm name by Basalt's name."""


class UserSpec(msgspec.Struct):
    """Body of a request to create or change a user. Without password and hash, password login is disabled."""

    password: str | None = None
    password_hash: str | None = None
    hashing_algorithm: str | None = None
    tags: list[str] | str = []


class TagsSpec(msgspec.Struct):
    """Body of a request to set the tags of a user."""

    tags: list[str]


class ScramSpec(msgspec.Struct):
    """Body of a request to set a SCRAM credential."""

    password: str


class PermissionSpec(msgspec.Struct):
    """Patterns of the names that a user may configure, write to and read from."""

    configure: str
    write: str
    read: str


class TopicPermissionSpec(msgspec.Struct):
    """Patterns of the routing keys that a user may write and read through a topic exchange."""

    exchange: str
    write: str
    read: str


def shown_user(user: User, stored: str) -> dict[str, Any]:
    """Return a user for JSON, with the password hash as in definitions."""
    kind, _, rest = stored.partition("$")
    if kind in ALGORITHMS:
        hashed = {"password_hash": rest, "hashing_algorithm": ALGORITHMS[kind]}
    else:
        hashed = {"password_hash": stored if user.has_password else "", "hashing_algorithm": SCRYPT}
    return {"name": user.name, **hashed, "tags": list(user.tags)}


def stored_hash(password_hash: str, algorithm: str | None) -> str:
    """Convert a hash from definitions to the broker's format."""
    if algorithm == SCRYPT:
        return password_hash or passwords.NONE
    return passwords.rabbit_hash(algorithm or "", password_hash)


class Principals:
    """Handlers of users and permissions."""

    def __init__(self, scope: Scope, users: Users, permissions: Permissions) -> None:
        self._scope = scope
        self._users = users
        self._permissions = permissions

    def routes(self) -> list[Route]:
        only = Access.ADMINISTRATOR
        user, one = "/api/users/{user}", "/{vhost}/{user}"
        return [
            Route("GET", "/api/users", self.users, "List users.", only, paged=True),
            Route("GET", user, self.one, "A user.", only),
            Route("PUT", user, self.put, "Create or change a user.", only, takes=UserSpec,
                  returns="201 if the user was created, 204 if it was changed."),
            Route("PUT", user + "/tags", self.put_tags, "Replace the tags of a user.", only, takes=TagsSpec),
            Route("GET", user + "/access-key", self.access_key, "Access key of a user, for RocketMQ clients.",
                  only, returns="access_key and secret. A new password changes the secret."),
            Route("PUT", user + "/scram/{mechanism}", self.put_scram,
                  "Allow login with SCRAM-SHA-256 or SCRAM-SHA-512, over Kafka and MQTT 5.0.", only, takes=ScramSpec),
            Route("DELETE", user + "/scram/{mechanism}", self.delete_scram, "Remove a SCRAM credential.", only),
            Route("DELETE", user, self.delete, "Delete a user with all permissions.", only),
            Route("GET", user + "/permissions", self.of_user, "Permissions of a user.", only),
            Route("GET", user + "/topic-permissions", self.topics_of_user, "Topic permissions of a user.", only),
            Route("GET", "/api/permissions", self.permissions, "Permissions of all users.", only, paged=True),
            Route("GET", "/api/permissions" + one, self.permission, "Permissions of a user in a virtual host.", only),
            Route("PUT", "/api/permissions" + one, self.set, "Set the permissions of a user in a virtual host.", only,
                  takes=PermissionSpec),
            Route("DELETE", "/api/permissions" + one, self.clear, "Revoke the permissions of a user.", only),
            Route("GET", "/api/topic-permissions", self.topics, "Topic permissions of all users.", only, paged=True),
            Route("GET", "/api/topic-permissions" + one, self.topic,
                  "Topic permissions of a user in a virtual host.", only),
            Route("PUT", "/api/topic-permissions" + one, self.set_topic,
                  "Limit the routing keys that a user may use with an exchange.", only, takes=TopicPermissionSpec),
            Route("DELETE", "/api/topic-permissions" + one, self.clear_topic,
                  "Remove the topic permissions of a user.", only),
            Route("GET", "/api/vhosts/{vhost}/permissions", self.of_vhost, "Permissions in a virtual host.", only),
        ]  # fmt: skip

    async def users(self, call: Call) -> Any:
        return await listing(call, [(user.name, user) for user in self._users.list()], self._shown)

    def one(self, call: Call) -> Any:
        return self._shown(self._users.get(call.names["user"]))

    def _shown(self, user: User) -> dict[str, Any]:
        return shown_user(user, self._users.hash_of(user.name))

    async def put(self, call: Call) -> Response:
        name, spec = call.names["user"], call.body
        tags = UserEntry(name, tags=spec.tags).tag_list()
        if spec.password is not None and spec.password_hash is not None:
            raise HttpError(400, "send password or password_hash, not both")
        stored = None if spec.password_hash is None else stored_hash(spec.password_hash, spec.hashing_algorithm)
        if not self._has(name):
            await self._users.create(name, spec.password, tags=tags, password_hash=stored)
            return Response(201)
        if spec.password is not None or stored is not None:
            await self._users.set_password(name, spec.password, password_hash=stored)
        await self._users.set_tags(name, tags)
        return Response(204)

    async def put_tags(self, call: Call) -> None:
        await self._users.set_tags(call.names["user"], call.body.tags)

    def access_key(self, call: Call) -> Any:
        name = call.names["user"]
        self._users.get(name)
        return {"access_key": name, "secret": self._users.access_secret(name)}

    async def put_scram(self, call: Call) -> None:
        await self._users.set_scram_password(call.names["user"], call.names["mechanism"], call.body.password)

    async def delete_scram(self, call: Call) -> None:
        name, mechanism = call.names["user"], call.names["mechanism"]
        self._users.get(name)
        if self._users.scram_of(name, mechanism) is None:
            raise HttpError(404, f"user {name!r} has no {mechanism[:80]} credential")
        await self._users.set_scram(name, mechanism, None)

    async def delete(self, call: Call) -> None:
        if call.names["user"] == call.who.name:
            raise HttpError(400, "you cannot delete your own user; ask another administrator")
        await self._users.delete(call.names["user"])
        self._scope.node.connections.close_all("the user was deleted", user=call.names["user"])

    def of_user(self, call: Call) -> Any:
        self._users.get(call.names["user"])
        return [msgspec.to_builtins(each) for each in self._permissions.list() if each.user == call.names["user"]]

    def topics_of_user(self, call: Call) -> Any:
        self._users.get(call.names["user"])
        return [
            msgspec.to_builtins(each) for each in self._permissions.list_topics() if each.user == call.names["user"]
        ]

    def of_vhost(self, call: Call) -> Any:
        vhost = self._scope.vhost_name(call)
        return [msgspec.to_builtins(each) for each in self._permissions.list() if each.vhost == vhost]

    async def permissions(self, call: Call) -> Any:
        found = [(each.user, each) for each in self._permissions.list()]
        return await listing(call, found, msgspec.to_builtins, sort="user")

    def permission(self, call: Call) -> Any:
        vhost, user = self._scope.vhost_name(call), call.names["user"]
        for each in self._permissions.list():
            if (each.user, each.vhost) == (user, vhost):
                return msgspec.to_builtins(each)
        raise HttpError(404, f"user {user!r} has no permissions in vhost {vhost!r}")

    async def set(self, call: Call) -> Response:
        vhost, user, spec = self._scope.vhost_name(call), call.names["user"], call.body
        existed = self._permissions.may_use(user, vhost)
        await self._permissions.set(user, vhost, configure=spec.configure, write=spec.write, read=spec.read)
        return Response(204 if existed else 201)

    async def clear(self, call: Call) -> None:
        await self._permissions.clear(call.names["user"], self._scope.vhost_name(call))

    async def topics(self, call: Call) -> Any:
        found = [(each.user, each) for each in self._permissions.list_topics()]
        return await listing(call, found, msgspec.to_builtins, sort="user")

    def topic(self, call: Call) -> Any:
        key = (call.names["user"], self._scope.vhost_name(call))
        return [msgspec.to_builtins(each) for each in self._permissions.list_topics() if (each.user, each.vhost) == key]

    async def set_topic(self, call: Call) -> Response:
        vhost, spec = self._scope.vhost_name(call), call.body
        self._users.get(call.names["user"])
        await self._permissions.set_topic(call.names["user"], vhost, spec.exchange, write=spec.write, read=spec.read)
        return Response(204)

    async def clear_topic(self, call: Call) -> None:
        await self._permissions.clear_topic(call.names["user"], self._scope.vhost_name(call))

    def _has(self, name: str) -> bool:
        return any(user.name == name for user in self._users.list())

    def exported_users(self) -> list[dict[str, Any]]:
        """Return all users for definitions, including their password hashes."""
        return [self._shown(user) for user in self._users.list()]

    def exported_permissions(self) -> list[dict[str, Any]]:
        return [msgspec.to_builtins(each) for each in self._permissions.list()]

    def exported_topic_permissions(self) -> list[dict[str, Any]]:
        return [msgspec.to_builtins(each) for each in self._permissions.list_topics()]

    async def import_user(self, entry: UserEntry) -> None:
        stored = stored_hash(entry.password_hash or "", entry.hashing_algorithm)
        if not self._has(entry.name):
            await self._users.create(entry.name, tags=entry.tag_list(), password_hash=stored)
            return
        await self._users.set_password(entry.name, None, password_hash=stored)
        await self._users.set_tags(entry.name, entry.tag_list())

    async def import_permission(self, entry: PermissionEntry) -> None:
        self._scope.require_vhost(entry.vhost)
        await self._permissions.set(
            entry.user, entry.vhost, configure=entry.configure, write=entry.write, read=entry.read
        )

    async def import_topic_permission(self, entry: TopicPermissionEntry) -> None:
        self._scope.require_vhost(entry.vhost)
        await self._permissions.set_topic(entry.user, entry.vhost, entry.exchange, write=entry.write, read=entry.read)
