"""SASL mechanisms that several protocols share: PLAIN and SCRAM.

PLAIN   authorization id NUL user name NUL password
SCRAM   see `scram_exchange.py`
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final, NamedTuple

from basaltmq.broker.auth.scram_exchange import ScramExchange
from basaltmq.broker.auth.users import User, Users
from basaltmq.broker.peer import Peer
from basaltmq.errors import AuthenticationError

PLAIN: Final = "PLAIN"
EXTERNAL: Final = "EXTERNAL"

_NONCE_BYTES: Final = 24


class Credentials(NamedTuple):
    """A user name and a password."""

    name: str
    password: str
    authorization_id: str = ""

    def __repr__(self) -> str:
        return f"Credentials(name={self.name!r}, password='...')"


def read_plain(response: bytes) -> Credentials:
    """Return the credentials in a PLAIN response. Raise AuthenticationError if it is malformed."""
    parts = response.split(b"\0")
    if len(parts) != 3:
        raise AuthenticationError(
            "malformed PLAIN response: expected authorization id, user name and password, separated by NUL"
        )
    try:
        return Credentials(parts[1].decode(), parts[2].decode(), parts[0].decode())
    except UnicodeDecodeError:
        raise AuthenticationError("malformed PLAIN response: user name and password must be UTF-8") from None


class ScramLogin:
    """One SCRAM authentication of a client."""

    def __init__(self, users: Users, mechanism: str, peer: Peer, user_of: Callable[[str], str] = lambda name: name):
        """`user_of` returns the user of the name that the client sends."""
        self.user: User | None = None
        """The user, after the last step."""
        self._users = users
        self._peer = peer
        self._user_of = user_of
        nonce = secrets.token_urlsafe(_NONCE_BYTES)
        self._exchange = ScramExchange(mechanism, lambda name: users.scram_for(user_of(name), mechanism), nonce)
        self._has_begun = False

    @property
    def name(self) -> str:
        """The name that the client has sent."""
        return self._exchange.name

    async def step(self, message: bytes) -> bytes:
        """Process a message of the client and return the response. Raise AuthenticationError."""
        if not self._has_begun:
            self._has_begun = True
            return self._exchange.first(message)
        name = self._user_of(self._exchange.name)
        async with self._users.throttle.attempt(name, self._peer):
            response = self._exchange.final(message)
            self.user = self._users.authenticated_user(name, self._peer)
        return response
