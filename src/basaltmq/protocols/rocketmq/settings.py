"""Settings of the RocketMQ listener."""

from __future__ import annotations

from basaltmq.broker.config.settings import RocketmqListener


class Settings(RocketmqListener, frozen=True, kw_only=True):
    """Settings of the RocketMQ listener: the section `rocketmq` and the limits of all protocols."""

    connections_max: int = 10_000
    handshake_s: float = 10.0
