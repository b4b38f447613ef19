"""Errors of the MQTT decoder. Each has the reason code that CONNACK or DISCONNECT reports to the client."""

from __future__ import annotations

from typing import ClassVar, Final

from basaltmq.errors import BasaltError
from basaltmq.protocols.mqtt.wire import reason_codes as rc


class MqttError(BasaltError):
    """The input of a connection is invalid. The connection ends with `reason_code`."""

    code: ClassVar[str] = "mqtt_error"

    def __init__(self, reason_code: int, text: str) -> None:
        super().__init__(f"{rc.name(reason_code)}: {text}")
        self.reason_code: Final = reason_code
        self.text: Final = text
        """Text for the reason string and the log."""


class MalformedPacket(MqttError):
    """The bytes cannot be parsed as the standard defines it: reason 0x81, or a more specific one."""

    code = "mqtt_malformed_packet"


class ProtocolViolation(MqttError):
    """The packet can be parsed but is not allowed: reason 0x82, or a more specific one."""

    code = "mqtt_protocol_error"
