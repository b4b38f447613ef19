"""Authentication and authorization of gRPC callers.

    authorization: Bearer fila_...      an API key, with its permissions
    authorization: Basic <base64>       a user of the broker, with its permissions
    none, over loopback                 the anonymous user (`auth.anonymous_user`) with its permissions, without tags
    none, from another machine          refused; with `access = "keys"` also over loopback

    call        API key       user's permission
    enqueue     produce       write
    consume     consume       read
    queues      admin         configure
    dead-letter queue of a new queue, unless it is <name>.dlq
                produce       write; if it does not exist yet, also admin or configure
    settings    admin on *    tag administrator
    API keys    superadmin    tag administrator

Credentials are always checked if they are sent. Passwords are checked in a thread, and invalid keys are refused after
a delay. In both cases `caller` returns None and `log_in` does the check. Valid keys are never delayed.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable
from typing import Final, Literal, NamedTuple, Protocol
from urllib.parse import unquote

from basaltmq.broker.auth.permissions import CONFIGURE, READ, WRITE, Permissions
from basaltmq.broker.auth.users import User, Users
from basaltmq.broker.peer import Peer, peer_at
from basaltmq.errors import AccessRefusedError, AuthenticationError, QueueNotFoundError
from basaltmq.protocols.grpc.services.api_keys import ApiKey, ApiKeys, Kind
from basaltmq.queues.config import DEAD_LETTERS, QueueConfig

AccessMode = Literal["keys", "loopback"]

_BEARER: Final = "bearer "
_BASIC: Final = "basic "
_WHAT: Final[dict[Kind, str]] = {"produce": "enqueue to", "consume": "consume from", "admin": "administer"}
_PERMISSIONS: Final[dict[Kind, str]] = {"produce": WRITE, "consume": READ, "admin": CONFIGURE}


class Accounts(NamedTuple):
    """The broker's users and their permissions in the served virtual host."""

    users: Users
    permissions: Permissions
    vhost: str


class Caller(Protocol):
    """The identity behind a call. Long-running calls check it repeatedly, because permissions can be revoked."""

    peer: str
    """The connection in gRPC notation."""

    def is_current(self) -> bool:
        """Return False if the credentials must be checked again. Raise if they are no longer valid."""
        ...

    def require(self, kind: Kind, queue: str) -> None:
        """Raise unless the caller currently has this permission for the queue."""
        ...

    def require_everywhere(self, kind: Kind, what: str) -> None:
        """Raise unless the caller has this permission for every queue. `what` names the operation."""
        ...

    def require_superadmin(self, what: str) -> None: ...

    def sees(self, queue: str) -> bool:
        """Whether the caller may know that the queue exists."""
        ...


class KeyCaller:
    """A caller with an API key."""

    __slots__ = ("_key", "_keys", "peer")

    def __init__(self, keys: ApiKeys, key: ApiKey, peer: str) -> None:
        self._keys = keys
        self._key = key
        self.peer = peer

    def is_current(self) -> bool:
        self._keys.require_current(self._key)
        return True

    def require(self, kind: Kind, queue: str) -> None:
        key = self._keys.require_current(self._key)
        if not key.may(kind, queue):
            raise AccessRefusedError(
                f"API key {key.id} ({key.name}) may not {_WHAT[kind]} queue {queue!r:.255}; "
                f"add an ACL entry '{kind}' with a pattern that matches the queue"
            )

    def require_everywhere(self, kind: Kind, what: str) -> None:
        key = self._keys.require_current(self._key)
        if not key.may_everywhere(kind):
            raise AccessRefusedError(
                f"API key {key.id} ({key.name}) may not {what}; add an ACL entry '{kind}' with the pattern '*'"
            )

    def require_superadmin(self, what: str) -> None:
        key = self._keys.require_current(self._key)
        if not key.is_superadmin:
            raise AccessRefusedError(f"API key {key.id} ({key.name}) may not {what}; use a superadmin key")

    def sees(self, queue: str) -> bool:
        key = self._keys.require_current(self._key)
        return key.may("admin", queue) or key.may("consume", queue) or key.may("produce", queue)


class UserCaller:
    """A caller that is a user of the broker, authenticated by password or anonymous."""

    __slots__ = ("_accounts", "_generation", "_user", "peer")

    def __init__(self, accounts: Accounts, user: User, peer: str) -> None:
        self._accounts = accounts
        self._user = user
        self._generation = accounts.users.generation
        self.peer = peer

    def is_current(self) -> bool:
        users, user = self._accounts.users, self._user
        return self._generation == users.generation and (not user.is_anonymous or users.anonymous_name() == user.name)

    def require(self, kind: Kind, queue: str) -> None:
        self._accounts.permissions.check(self._user, self._accounts.vhost, _PERMISSIONS[kind], queue)

    def require_everywhere(self, kind: Kind, what: str) -> None:
        self.require_superadmin(what)

    def require_superadmin(self, what: str) -> None:
        if not self._accounts.users.is_administrator(self._user):
            how = "without credentials " if self._user.is_anonymous else ""
            raise AccessRefusedError(
                f"user '{self._user.name}' {how}may not {what}; log in as a user with the tag administrator"
            )

    def sees(self, queue: str) -> bool:
        permissions, vhost = self._accounts.permissions, self._accounts.vhost
        return any(permissions.may(self._user, vhost, kind, queue) for kind in _PERMISSIONS.values())


class Access:
    """Identifies callers by their credentials."""

    def __init__(self, keys: ApiKeys, accounts: Accounts, mode: AccessMode) -> None:
        self.keys = keys
        self.mode = mode
        self._accounts = accounts

    def caller(self, metadata: Iterable[tuple[str, str | bytes]] | None, peer: str) -> Caller | None:
        """Return the caller with this metadata, or None if `log_in` must check the credentials."""
        text = _authorization(metadata)
        if text is None:
            return self._anonymous(peer)
        if text[: len(_BASIC)].lower() == _BASIC:
            return None
        if text[: len(_BEARER)].lower() != _BEARER:
            raise AuthenticationError("the authorization of a call must be 'Bearer <API key>' or 'Basic <credentials>'")
        try:
            return self._holder(text, peer)
        except AuthenticationError:
            return None

    async def log_in(self, metadata: Iterable[tuple[str, str | bytes]] | None, peer: str) -> Caller:
        """Check a password, or refuse an invalid key after the throttling delay."""
        text = _authorization(metadata) or ""
        if text[: len(_BEARER)].lower() == _BEARER:
            async with self._accounts.users.throttle.attempt("", peer_of(peer)):
                return self._holder(text, peer)
        name, password = _credentials(text[len(_BASIC) :])
        user = await self._accounts.users.authenticate(name, password, peer_of(peer))
        return self._admitted(user, peer)

    def _holder(self, text: str, peer: str) -> Caller:
        return KeyCaller(self.keys, self.keys.authenticate(text[len(_BEARER) :].strip()), peer)

    def _anonymous(self, peer: str) -> Caller:
        user = self._accounts.users.anonymous(peer_of(peer)) if self.mode == "loopback" else None
        if user is None:
            raise AuthenticationError(
                "the call has no credentials; send 'authorization: Bearer <API key>' or 'Basic <credentials>'"
            )
        return self._admitted(user, peer)

    def _admitted(self, user: User, peer: str) -> Caller:
        self._accounts.permissions.check_vhost(user, self._accounts.vhost)
        return UserCaller(self._accounts, user, peer)


def require_dead_letters(caller: Caller, config: QueueConfig, get: Callable[[str], object]) -> None:
    """Raise unless the caller may send messages to the dead-letter queue that a new queue names. `get` finds a queue.

    Without this check, a caller could write to every queue: messages that it rejects, or that expire, go there.
    """
    target = config.dead_letter_queue
    if target is None or target == config.name + DEAD_LETTERS:
        return
    caller.require("produce", target)
    try:
        get(target)
    except QueueNotFoundError:
        # It will be created together with the queue.
        caller.require("admin", target)


def _authorization(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    for name, value in metadata or ():
        if name == "authorization":
            return value if isinstance(value, str) else value.decode("latin-1")
    return None


def _credentials(encoded: str) -> tuple[str, str]:
    try:
        name, colon, password = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        colon = ""
    if not colon:
        raise AuthenticationError("Basic credentials must be 'user:password' in UTF-8, encoded in base64")
    return name, password


def peer_of(peer: str) -> Peer:
    """Parse a peer in gRPC notation: ipv4:127.0.0.1:4711, ipv6:%5B::1%5D:4711, unix:..."""
    scheme, _, address = peer.partition(":")
    if scheme == "unix":
        return Peer("", is_loopback=True)
    return peer_at(unquote(address).rpartition(":")[0].strip("[]"))
