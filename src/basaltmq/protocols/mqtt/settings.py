"""Settings of the MQTT listeners."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Settings(Struct, frozen=True, kw_only=True):
    """Settings that all MQTT listeners of a node share. `broker/config/settings.py` describes them."""

    vhost: str = "/"
    exchange: str = "amq.topic"
    access: Literal["users", "loopback"] = "loopback"
    packet_bytes_max: int = 16 << 20
    receive_maximum: int = 1024
    in_flight_max: int = 1024
    topic_aliases_max: int = 64
    keep_alive_s_max: int = 0
    session_expiry_s_max: int = 0xFFFF_FFFF
    offline_messages_max: int = 0
    subscriptions_max: int = 10_000
    packets_per_s_max: int = 0
    connections_max: int = 10_000
    handshake_s: float = 10.0
