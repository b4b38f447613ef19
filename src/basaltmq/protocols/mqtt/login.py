"""Enhanced authentication of MQTT 5.0 (section 4.12): SCRAM over AUTH packets.

    CONNECT   method, client's first message   ─>
                                               <─  AUTH 0x18      server's first message
    AUTH 0x18  client's final message          ─>
                                               <─  CONNACK 0      server's signature

A client reauthenticates with AUTH 0x19 in place of CONNECT, and the last packet is then AUTH 0. It must use the method
of CONNECT and the user of the session.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from basaltmq.broker.auth.sasl import ScramLogin
from basaltmq.broker.auth.scram import HASHES
from basaltmq.broker.auth.users import User
from basaltmq.broker.node import Node
from basaltmq.broker.peer import Peer
from basaltmq.protocols.mqtt.access import split_user
from basaltmq.protocols.mqtt.settings import Settings

METHODS: Final = tuple(HASHES)


class Login:
    """One enhanced authentication."""

    def __init__(self, node: Node, settings: Settings, method: str, peer: Peer) -> None:
        self._split = partial(split_user, node, settings)
        self._scram = ScramLogin(node.users, method, peer, lambda name: self._split(name)[1])

    @property
    def user(self) -> User | None:
        """The user, after the last step."""
        return self._scram.user

    @property
    def vhost(self) -> str:
        """The virtual host that the client requests."""
        return self._split(self._scram.name)[0]

    async def step(self, data: bytes | None) -> bytes:
        """Process the client's data and return the server's. Raise AuthenticationError."""
        if not data and not self._scram.name:
            # SASL allows CONNECT without the first message.
            return b""
        return await self._scram.step(data or b"")
