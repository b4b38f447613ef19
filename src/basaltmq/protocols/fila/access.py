"""Who calls, and what they may do.

    keys       everyone needs an API key (`authorization: Bearer fila_...`)
    loopback   callers on this machine need none and may do everything, so that they can make the first keys;
               everyone else needs one
    open       nobody needs one; for networks that are closed, or where TLS asks clients for certificates

A key that is sent is always checked, and then counts: a caller with a key may do what the key may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ipaddress import ip_address
from typing import Final, Literal
from urllib.parse import unquote

from basaltmq.errors import AccessRefusedError, AuthenticationError
from basaltmq.protocols.fila.api_keys import ApiKey, ApiKeys, Kind

AccessMode = Literal["keys", "loopback", "open"]

_BEARER: Final = "bearer "
_WHAT: Final[dict[Kind, str]] = {"produce": "enqueue to", "consume": "consume from", "admin": "administer"}


class Caller:
    """Who makes a call. Asked again and again by calls that last: keys are revoked meanwhile."""

    __slots__ = ("_key", "_keys", "_peer", "_peer_of")

    def __init__(self, keys: ApiKeys, key: ApiKey | None, peer: Callable[[], str]) -> None:
        self._keys = keys
        self._key = key
        self._peer_of = peer
        self._peer: str | None = None

    @property
    def peer(self) -> str:
        """The connection, as gRPC names it. Asked for once: it costs as much as the rest of this class."""
        if self._peer is None:
            self._peer = self._peer_of()
        return self._peer

    def require_current(self) -> None:
        """Raise if the caller has a key that does not count any more."""
        if self._key is not None:
            self._keys.require_current(self._key)

    def require(self, kind: Kind, queue: str) -> None:
        """Raise unless the caller may do this with the queue, at this moment."""
        if self._key is not None:
            key = self._keys.require_current(self._key)
            if not key.may(kind, queue):
                raise AccessRefusedError(
                    f"API key {key.id} ({key.name}) may not {_WHAT[kind]} queue {queue!r:.255}; "
                    f"an ACL entry '{kind}' with a pattern that matches it would allow it"
                )

    def require_everywhere(self, kind: Kind, what: str) -> None:
        """For what is not one queue's."""
        if self._key is not None:
            key = self._keys.require_current(self._key)
            if not key.may_everywhere(kind):
                raise AccessRefusedError(
                    f"API key {key.id} ({key.name}) may not {what}; an ACL entry '{kind}' with the pattern '*' "
                    "would allow it"
                )

    def require_superadmin(self, what: str) -> None:
        if self._key is not None:
            key = self._keys.require_current(self._key)
            if not key.is_superadmin:
                raise AccessRefusedError(f"API key {key.id} ({key.name}) may not {what}; that takes a superadmin")

    def sees(self, queue: str) -> bool:
        """Whether the caller may know that the queue is there."""
        if self._key is None:
            return True
        key = self._keys.require_current(self._key)
        return key.may("admin", queue) or key.may("consume", queue) or key.may("produce", queue)


class Access:
    """Tells callers apart."""

    def __init__(self, keys: ApiKeys, mode: AccessMode) -> None:
        self.keys = keys
        self.mode = mode

    def caller(self, metadata: Iterable[tuple[str, str | bytes]] | None, peer: Callable[[], str]) -> Caller:
        """Who makes a call with this metadata; AuthenticationError if that cannot be known."""
        for name, value in metadata or ():
            if name == "authorization":
                text = value if isinstance(value, str) else value.decode("latin-1")
                if text[: len(_BEARER)].lower() != _BEARER:
                    raise AuthenticationError("the authorization of a call is 'Bearer' and an API key")
                return Caller(self.keys, self.keys.authenticate(text[len(_BEARER) :].strip()), peer)
        if self.mode == "open" or (self.mode == "loopback" and is_loopback(peer())):
            return Caller(self.keys, None, peer)
        raise AuthenticationError("the call has no API key; send 'authorization: Bearer <key>'")


def is_loopback(peer: str) -> bool:
    """Whether a connection, as gRPC names it (ipv4:127.0.0.1:4711, ipv6:%5B::1%5D:4711, unix:...), is from here."""
    scheme, _, address = peer.partition(":")
    if scheme == "unix":
        return True
    host = unquote(address).rpartition(":")[0].strip("[]")
    try:
        found = ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback
