"""Limits of a connection, and their negotiation.

The server offers its limits (connection.tune). The client responds with its own (tune-ok), which must not be higher.
Zero means no limit, so it is higher than any. The client chooses the heartbeat interval; zero disables heartbeats.
"""

from __future__ import annotations

from typing import Final

import msgspec

from basaltmq.broker.config import settings as config
from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.amqp091.wire.errors import NOT_ALLOWED, ConnectionFault
from basaltmq.protocols.amqp091.wire.frames import FRAME_BYTES_MIN

HANDSHAKE_FRAME_BYTES_MAX: Final = 16384
"""Frame limit before authentication: enough for a long token as password, and little memory per unknown client."""

CHANNEL_MAX: Final = 2047
"""RabbitMQ's default. Clients with more channels usually leak them."""

FRAME_BYTES_MAX: Final = 131072
"""RabbitMQ's default, which clients request. One socket read holds a whole frame."""

MESSAGE_BYTES_MAX: Final = 128 << 20
"""Largest message that a queue accepts, in bytes."""

CONTENT_BYTES_MAX: Final = 128 << 20
"""Least limit of incomplete messages per connection. A larger setting for messages allows two of them."""

HEARTBEAT_S: Final = 60

HANDSHAKE_S: Final = 10
"""Time limit for the AMQP handshake, in seconds."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that the server offers and enforces."""

    frame_bytes_max: int = FRAME_BYTES_MAX
    channel_max: int = CHANNEL_MAX
    heartbeat_s: int = HEARTBEAT_S
    message_bytes_max: int = MESSAGE_BYTES_MAX
    content_bytes_max: int = CONTENT_BYTES_MAX
    handshake_s: int = HANDSHAKE_S

    @classmethod
    def of(cls, settings: config.Limits) -> Limits:
        """Return the limits of the configuration."""
        return cls(
            frame_bytes_max=settings.frame_bytes_max,
            channel_max=settings.channels_max,
            heartbeat_s=settings.heartbeat_s,
            message_bytes_max=min(settings.message_bytes_max, MESSAGE_BYTES_MAX),
            content_bytes_max=max(CONTENT_BYTES_MAX, 2 * settings.message_bytes_max),
            handshake_s=-(-settings.handshake_timeout_ms // 1000),
        )


class Tuning(msgspec.Struct, frozen=True):
    """Negotiated parameters of a connection."""

    frame_bytes_max: int
    channel_max: int
    heartbeat_s: int

    @classmethod
    def before(cls, limits: Limits) -> Tuning:
        """Return the parameters that apply before tune-ok."""
        return cls(HANDSHAKE_FRAME_BYTES_MAX, limits.channel_max, 0)

    def answered(self, limits: Limits, answer: m.ConnectionTuneOk) -> Tuning:
        """Return the parameters after the client's tune-ok."""
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
