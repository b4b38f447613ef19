"""Events that a session yields to its connection."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from basaltmq.protocols.amqp091.wire.errors import ChannelFault, ConnectionFault
from basaltmq.protocols.amqp091.wire.methods import BasicPublish, Method


class Received(msgspec.Struct, gc=False):
    """A method without content. Methods on channel 0 concern the connection."""

    channel: int
    method: Method


Message: TypeAlias = tuple[BasicPublish, bytes, bytes]
"""A published message: method, properties and body. Messages with the same route often share one method object.

A plain tuple, because one is created per message."""


class Published(msgspec.Struct, gc=False):
    """One or more consecutive messages on a channel."""

    channel: int
    messages: list[Message]


class HeaderRefused(msgspec.Struct):
    """The client sent another protocol header. The server's header is in the output; the socket must be closed."""

    got: bytes


class HeaderAccepted(msgspec.Struct):
    """The client sent the AMQP 0-9-1 header; connection.start must be sent."""


class ChannelFailed(msgspec.Struct):
    """The client violated a rule of a channel. The session has sent channel.close."""

    channel: int
    fault: ChannelFault


class ConnectionFailed(msgspec.Struct):
    """The client violated the protocol. The session has sent connection.close and accepts only the response."""

    fault: ConnectionFault


Event: TypeAlias = Received | Published | HeaderRefused | HeaderAccepted | ChannelFailed | ConnectionFailed
