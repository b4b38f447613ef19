"""Limits of a connection, and how the two sides agree on them.

The server names its limits (`tune`), the client answers with its own (`tune-ok`), which may be lower, never higher;
zero means "no limit" and is higher than any. The heartbeat is what the client says; zero turns it off.
"""

from __future__ import annotations

from typing import Final

import msgspec

from basaltmq.broker.config import settings as config
from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.amqp091.wire.errors import NOT_ALLOWED, ConnectionFault
from basaltmq.protocols.amqp091.wire.frames import FRAME_BYTES_MIN

HANDSHAKE_FRAME_BYTES_MAX: Final = 16384
"""Before a client is known: room for a long token as password, little to hold for a stranger."""

CHANNEL_MAX: Final = 2047
"""RabbitMQ's default. A client with more channels than this leaks them."""

FRAME_BYTES_MAX: Final = 131072
"""RabbitMQ's default, which clients ask for: one read of the socket holds a whole frame."""

MESSAGE_BYTES_MAX: Final = 64 << 20
"""The largest message a queue takes."""

CONTENT_BYTES_MAX: Final = 128 << 20
"""Two of the largest messages under way at once on the channels of one connection."""

HEARTBEAT_S: Final = 60

HANDSHAKE_S: Final = 10
"""A stranger has this long to say who it is."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a server allows."""

    frame_bytes_max: int = FRAME_BYTES_MAX
    channel_max: int = CHANNEL_MAX
    heartbeat_s: int = HEARTBEAT_S
    message_bytes_max: int = MESSAGE_BYTES_MAX
    content_bytes_max: int = CONTENT_BYTES_MAX
    handshake_s: int = HANDSHAKE_S

    @classmethod
    def of(cls, settings: config.Limits) -> Limits:
        """What the configuration says."""
        return cls(
            frame_bytes_max=settings.frame_bytes_max,
            channel_max=settings.channels_max,
            heartbeat_s=settings.heartbeat_s,
            message_bytes_max=min(settings.message_bytes_max, MESSAGE_BYTES_MAX),
            content_bytes_max=max(CONTENT_BYTES_MAX, 2 * settings.message_bytes_max),
            handshake_s=-(-settings.handshake_timeout_ms // 1000),
        )


class Tuning(msgspec.Struct, frozen=True):
    """What holds for a connection."""

    frame_bytes_max: int
    channel_max: int
    heartbeat_s: int

    @classmethod
    def before(cls, limits: Limits) -> Tuning:
        """What holds until the client has answered."""
        return cls(HANDSHAKE_FRAME_BYTES_MAX, limits.channel_max, 0)

    def answered(self, limits: Limits, answer: m.ConnectionTuneOk) -> Tuning:
        """What holds after the client's answer."""
        for name, asked, allowed in (
            ("frame_max", answer.frame_max, limits.frame_bytes_max),
            ("channel_max", answer.channel_max, limits.channel_max),
        ):
            if asked == 0 or asked > allowed:
                shown = f"{asked} (no limit)" if asked == 0 else str(asked)
                raise ConnectionFault(
                    NOT_ALLOWED,
                    f"negotiated {name} = {shown} is higher than the maximum allowed value ({allowed})",
                    answer.number,
                )
        if answer.frame_max < FRAME_BYTES_MIN:
            raise ConnectionFault(
                NOT_ALLOWED,
                f"negotiated frame_max = {answer.frame_max} is lower than the minimum value ({FRAME_BYTES_MIN})",
                answer.number,
            )
        return Tuning(answer.frame_max, answer.channel_max, answer.heartbeat)
