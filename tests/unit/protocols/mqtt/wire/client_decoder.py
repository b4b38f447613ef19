"""Decoder of a client: reads what a server sends. Basalt's decoder reads packets of clients only."""

from __future__ import annotations

from basaltmq.protocols.mqtt.wire import bodies
from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire import reason_codes as rc
from basaltmq.protocols.mqtt.wire.decoder import Decoder, Limits
from basaltmq.protocols.mqtt.wire.properties import NO_PROPERTIES, Properties, read_properties


class ClientDecoder(Decoder):
    """Reads the packets of a server. The version is the one of the client's CONNECT."""

    def __init__(self, version: int) -> None:
        super().__init__(Limits(connect_bytes_max=p.PACKET_BYTES_MAX))
        self.version = version

    def _properties(self, data: bytes, at: int, end: int) -> tuple[Properties, int]:
        return read_properties(data, at, end, p.PUBLISH)

    def _other(self, data: bytes, first: int, at: int, begin: int, end: int) -> p.Packet:
        version = self.version
        match first:
            case 0x20:
                assert data[begin] in (0, 1)
                properties = NO_PROPERTIES
                if version == p.V5:
                    properties, after = read_properties(data, begin + 2, end, p.CONNACK)
                    assert after == end
                else:
                    assert end - begin == 2
                return p.Connack(data[begin] == 1, data[begin + 1], properties)
            case 0x90 | 0xB0:
                packet_id, after = bodies.read_packet_id(data, begin, end)
                properties = NO_PROPERTIES
                kind = first >> 4
                if version == p.V5:
                    properties, after = read_properties(data, after, end, kind)
                codes = tuple(data[after:end])
                assert set(codes) <= (rc.SUBACK if kind == p.SUBACK else rc.UNSUBACK)
                return (p.Suback if kind == p.SUBACK else p.Unsuback)(packet_id, codes, properties)
            case 0xD0:
                assert begin == end
                return p.Pingresp()
            case 0xE0:
                assert version == p.V5, "before 5.0 a server sends no DISCONNECT"
                return p.Disconnect(*bodies._reason(data, begin, end, p.DISCONNECT, rc.DISCONNECT_BY_SERVER))
            case 0xF0:
                reason_code, properties = bodies._reason(data, begin, end, p.AUTH, rc.AUTH)
                return p.Auth(reason_code, properties)
        assert first in (0x40, 0x50, 0x62, 0x70), f"a server does not send 0x{first:02X}"
        return bodies.FROM_CLIENT[first >> 4](data, begin, end, version)
