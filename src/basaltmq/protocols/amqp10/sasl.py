"""SASL: authenticates the client before the connection is opened.

    client   header AMQP 3              broker   header AMQP 3, sasl-mechanisms
    client   sasl-init                  broker   sasl-challenge (SCRAM)
    client   sasl-response (SCRAM)      broker   sasl-outcome

PLAIN, ANONYMOUS, EXTERNAL (the client certificate of the TLS connection), SCRAM-SHA-256 and SCRAM-SHA-512.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Final

from basaltmq.broker.auth.scram import HASHES
from basaltmq.broker.auth.scram_exchange import ScramExchange
from basaltmq.broker.auth.users import User, Users
from basaltmq.broker.peer import Peer
from basaltmq.errors import AuthenticationError
from basaltmq.protocols.amqp10.wire.errors import NOT_ALLOWED, Fault
from basaltmq.protocols.amqp10.wire.performatives import (
    Composite,
    SaslChallenge,
    SaslInit,
    SaslOutcome,
    SaslResponse,
)

PLAIN: Final = "PLAIN"
ANONYMOUS: Final = "ANONYMOUS"
EXTERNAL: Final = "EXTERNAL"

OK, AUTH = range(2)
"""Outcome codes."""

_NONCE_BYTES: Final = 18


def mechanisms(users: Users, peer: Peer, certificate: Mapping[str, Any]) -> list[str]:
    """Return the mechanisms that a client may use, preferred ones first."""
    offered = [EXTERNAL] if users.accepts(certificate, peer) else []
    # Clients prefer SCRAM if it is offered, so offer it only if a user has SCRAM credentials.
    offered += [*[each for each in sorted(HASHES, reverse=True) if users.has_scram(each)], PLAIN]
    if users.anonymous(peer) is not None:
        offered.append(ANONYMOUS)
    return offered


class Login:
    """One authentication."""

    def __init__(self, users: Users, peer: Peer, certificate: Mapping[str, Any]) -> None:
        self.mechanism = ""
        self.user: User | None = None
        self._users = users
        self._peer = peer
        self._certificate = certificate
        self._scram: ScramExchange | None = None

    async def handle(self, received: Composite) -> Composite:
        """Process sasl-init or sasl-response, and return the answer. `user` is set if the client is authenticated."""
        if isinstance(received, SaslInit) and not self.mechanism:
            self.mechanism = received.mechanism
            return await self._begin(received.mechanism, received.initial_response or b"")
        if isinstance(received, SaslResponse) and self._scram is not None:
            return await self._scram_response(received.response)
        raise Fault(NOT_ALLOWED, f"{type(received).__name__} is not expected here")

    async def _begin(self, mechanism: str, response: bytes) -> Composite:
        if mechanism not in mechanisms(self._users, self._peer, self._certificate):
            raise AuthenticationError(f"mechanism '{mechanism}' was not offered")
        if mechanism in HASHES:
            self._scram = ScramExchange(
                mechanism,
                lambda name: self._users.scram_for(name, mechanism),
                secrets.token_urlsafe(_NONCE_BYTES),
            )
            return SaslChallenge(challenge=self._scram.first(response))
        if mechanism == PLAIN:
            name, password = _read_plain(response)
            self.user = await self._users.authenticate(name, password, self._peer)
        elif mechanism == EXTERNAL:
            self.user = self._users.external(self._certificate, self._peer)
        else:
            self.user = self._users.anonymous(self._peer)
        return SaslOutcome(code=OK)

    async def _scram_response(self, response: bytes) -> Composite:
        assert self._scram is not None
        async with self._users.throttle.attempt(self._scram.name, self._peer):
            signature = self._scram.final(response)
            self.user = self._users.authenticated_user(self._scram.name, self._peer)
        return SaslOutcome(code=OK, additional_data=signature)


def _read_plain(response: bytes) -> tuple[str, str]:
    parts = response.split(b"\0")
    if len(parts) != 3:
        raise AuthenticationError(
            "malformed PLAIN response: expected authorization id, user name and password, separated by NUL"
        )
    try:
        return parts[1].decode(), parts[2].decode()
    except UnicodeDecodeError:
        raise AuthenticationError("malformed PLAIN response: user name and password must be UTF-8") from None
