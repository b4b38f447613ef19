"""Enhanced authentication of MQTT 5.0 (section 4.12): SCRAM over AUTH packets.

    CONNECT   method, client's first message   ─>
                                               <─  AUTH 0x18      server's first message
    AUTH 0x18  client's final message          ─>
                                               <─  CONNACK 0      server's signature

A client authenticates again with AUTH 0x19, which takes the place of CONNECT. The last packet is then AUTH 0. The
method must be that of CONNECT, and the user that of the session.
"""

from __future__ import annotations

import secrets
from typing import Final

from basaltmq.broker.auth.scram import HASHES
from basaltmq.broker.auth.scram_exchange import ScramExchange
from basaltmq.broker.auth.users import User
from basaltmq.broker.node import Node
from basaltmq.broker.peer import Peer
from basaltmq.protocols.mqtt.access import split_user
from basaltmq.protocols.mqtt.settings import Settings

METHODS: Final = tuple(HASHES)
NONCE_BYTES: Final = 24


class Login:
    """One enhanced authentication."""

    def __init__(self, node: Node, settings: Settings, method: str, peer: Peer) -> None:
        self._node = node
        self._settings = settings
        self._peer = peer
        self._exchange = ScramExchange(
            method,
            lambda name: node.users.scram_for(split_user(node, settings, name)[1], method),
            secrets.token_urlsafe(NONCE_BYTES),
        )
        self._has_begun = False
        self.user: User | None = None
        """The user, after the last step."""
        self.vhost = settings.vhost

    async def step(self, data: bytes | None) -> bytes:
        """Process the client's data and return the server's. Raise AuthenticationError."""
        if not self._has_begun:
            if not data:
                # SASL allows CONNECT without the first message.
                return b""
            self._has_begun = True
            return self._exchange.first(data)
        users = self._node.users
        self.vhost, name = split_user(self._node, self._settings, self._exchange.name)
        async with users.throttle.attempt(name, self._peer):
            answer = self._exchange.final(data or b"")
            self.user = users.entering(name, self._peer)
        return answer
