"""Settings of the MQTT listeners."""

from __future__ import annotations

from basaltmq.broker.config.settings import MqttListener


class Settings(MqttListener, frozen=True, kw_only=True):
    """Settings that all MQTT listeners of a node share: the section `mqtt` and the limits of all protocols."""

    connections_max: int = 10_000
    handshake_s: float = 10.0
