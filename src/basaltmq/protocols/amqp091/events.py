"""What a session tells its owner."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from basaltmq.protocols.amqp091.wire.errors import ChannelFault, ConnectionFault
from basaltmq.protocols.amqp091.wire.methods import BasicPublish, Method


class Received(msgspec.Struct, gc=False):
    """A method without content. Those of channel 0 belong to the connection."""

    channel: int
    method: Method


Message: TypeAlias = tuple[BasicPublish, bytes, bytes]
"""A published message: the method, its properties and its body. Messages of one route often share one method object.

A plain tuple, because one is made for every message."""


class Published(msgspec.Struct, gc=False):
    """Messages that came one after the other on a channel, at least one."""

    channel: int
    messages: list[Message]


class HeaderRefused(msgspec.Struct):
    """The client speaks something else; ours was put out, and the socket is to be closed."""

    got: bytes


class HeaderAccepted(msgspec.Struct):
    """The client speaks AMQP 0-9-1; `start` is to be sent."""


class ChannelFailed(msgspec.Struct):
    """The client broke a rule of the channel; the session has said channel.close."""

    channel: int
    fault: ChannelFault


class ConnectionFailed(msgspec.Struct):
    """The client broke the protocol; the session has said connection.close and hears nothing but the answer."""

    fault: ConnectionFault


Event: TypeAlias = Received | Published | HeaderRefused | HeaderAccepted | ChannelFailed | ConnectionFailed
