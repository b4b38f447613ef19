"""Stream of bytes to packets, as a server reads it. No I/O.

    | type 4 bits | flags 4 bits | remaining length varint | body |

`feed` adds received bytes and returns an iterator over the complete packets. A caller may stop iterating and continue
later: `packets` yields the remaining packets. After an error the decoder cannot continue.

The first packet must be CONNECT. It sets `version`, which determines how later packets are read. The decoder checks
each packet by itself, and that CONNECT comes first and only once. Packet identifiers in use, topic aliases and quotas
belong to the session.

A packet is buffered only until it is complete, and its size is checked when its header arrives. A buffer therefore has
at most the maximum packet size plus the bytes of one `feed`.

PUBLISH is decoded in the loop itself, without a call per packet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from basaltmq.protocols.mqtt.wire import bodies
from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire import reason_codes as rc
from basaltmq.protocols.mqtt.wire.connect import UnsupportedLevel, read_connect, read_version
from basaltmq.protocols.mqtt.wire.errors import ProtocolViolation
from basaltmq.protocols.mqtt.wire.fields import malformed, text_of
from basaltmq.protocols.mqtt.wire.properties import NO_PROPERTIES, Properties, read_properties, violation
from basaltmq.protocols.mqtt.wire.topics import TOPIC_LEVELS_MAX, check_name

CONNECT_BYTES_MAX: Final = 512 * 1024
"""Limit for CONNECT, because its sender is not authenticated yet. Five fields of 65,535 bytes fit."""

_FLAGS: Final = {kind: 2 if kind in (p.PUBREL, p.SUBSCRIBE, p.UNSUBSCRIBE) else 0 for kind in range(1, 16)}
"""Fixed flags of every type but PUBLISH."""

_HEADER_BYTES_MAX: Final = 5


class Limits(Struct, frozen=True):
    """Limits of a listener."""

    packet_bytes_max: int = p.PACKET_BYTES_MAX
    connect_bytes_max: int = CONNECT_BYTES_MAX


class Decoder:
    """Reads the packets of one client."""

    __slots__ = (
        "_at",
        "_block",
        "_block_properties",
        "_bytes_max",
        "_data",
        "_need",
        "_packet_bytes_max",
        "_rest",
        "version",
    )

    def __init__(self, limits: Limits) -> None:
        self.version = 0
        """Protocol version 3, 4 or 5; 0 before CONNECT. After an invalid CONNECT: the version of the response."""
        self._packet_bytes_max = limits.packet_bytes_max
        self._bytes_max = min(limits.connect_bytes_max, limits.packet_bytes_max)
        self._data = b""
        """Bytes that `packets` reads, from `_at` on."""
        self._at = 0
        self._rest = bytearray()
        """An incomplete packet. Used only while `_data` is empty."""
        self._need = 2
        """Bytes that `_rest` must have before reading continues."""
        self._block = b""
        self._block_properties = NO_PROPERTIES

    @property
    def buffered_bytes(self) -> int:
        """Received bytes that are not returned as packets yet."""
        return len(self._data) - self._at + len(self._rest)

    def feed(self, data: bytes) -> Iterator[p.Packet]:
        """Add received bytes. Return an iterator over the complete packets.

        The iterator raises MalformedPacket or ProtocolViolation at the first invalid packet.
        """
        rest = self._rest
        if rest:
            rest += data
            if len(rest) < self._need:
                return iter(())
            self._data, self._at = bytes(rest), 0
            rest.clear()
        elif self._at < len(self._data):
            self._data, self._at = self._data[self._at :] + data, 0
        else:
            self._data, self._at = data, 0
        return self.packets()

    def packets(self) -> Iterator[p.Packet]:
        """Yield the complete packets that were not taken yet."""
        data, at, version = self._data, self._at, self.version
        while True:
            size = len(data)
            if size - at < 2:
                self._need = 2
                break
            first = data[at]
            if not version and first != p.CONNECT << 4:
                self._refuse_first(first)
            end = data[at + 1]
            begin = at + 2
            if end >= 0x80:
                end, begin = self._length(data, at)
                if not begin:
                    break
            end += begin
            if end - at > self._bytes_max:
                raise ProtocolViolation(
                    rc.PACKET_TOO_LARGE, f"a packet of {end - at} bytes exceeds the limit of {self._bytes_max} bytes"
                )
            if end > size:
                self._need = end - at
                break
            packet: p.Packet
            if first >> 4 != 3:
                packet = self._other(data, first, at, begin, end)
                version = self.version
            else:
                qos = first >> 1 & 3
                if qos == 3 or first & 0x0E == 0x08:
                    raise malformed("PUBLISH has QoS 3, or DUP with QoS 0")
                if begin + 2 > end:
                    raise malformed("PUBLISH ends before its topic")
                after = begin + 2 + (data[begin] << 8 | data[begin + 1])
                if after > end:
                    raise malformed("the topic name crosses the end of the packet")
                try:
                    topic = data[begin + 2 : after].decode()
                except UnicodeDecodeError:
                    text_of(data[begin + 2 : after])
                    raise
                if "\0" in topic:
                    raise malformed("the topic name contains U+0000")
                # A topic with fewer bytes than the limit of levels cannot have too many levels.
                if "+" in topic or "#" in topic or len(topic) >= TOPIC_LEVELS_MAX:
                    check_name(topic)
                packet_id = 0
                if qos:
                    if after + 2 > end:
                        raise malformed("PUBLISH ends before its packet identifier")
                    packet_id = data[after] << 8 | data[after + 1]
                    if not packet_id:
                        raise violation("the packet identifier is 0")
                    after += 2
                properties = NO_PROPERTIES
                if version == 5:
                    if after < end and not data[after]:
                        after += 1
                    else:
                        properties, after = self._properties(data, after, end)
                if not topic and properties.topic_alias is None:
                    self._refuse_empty_topic()
                packet = p.Publish(topic, data[after:end], qos, first & 1 == 1, first & 8 == 8, packet_id, properties)
            self._at = end
            yield packet
            # The consumer may have fed more bytes in between.
            data, at = self._data, self._at
        self._keep(data, at)

    def _properties(self, data: bytes, at: int, end: int) -> tuple[Properties, int]:
        """Read the properties of PUBLISH. Publishers repeat them, so the last short block is kept with its value."""
        after = at + 1 + data[at] if at < end else end
        is_short = at < end and data[at] < 0x80 and after <= end
        if is_short and data[at:after] == self._block:
            return self._block_properties, after
        properties, after = read_properties(data, at, end, p.PUBLISH)
        if properties.subscription_ids:
            raise violation("a client sent a subscription identifier in PUBLISH")
        if is_short:
            self._block, self._block_properties = data[at:after], properties
        return properties, after

    def _keep(self, data: bytes, at: int) -> None:
        """Keep an incomplete packet until more bytes arrive."""
        if at < len(data):
            self._rest += data[at:]
        self._data, self._at = b"", 0

    def _length(self, data: bytes, at: int) -> tuple[int, int]:
        """Read a remaining length of several bytes. Return (length, begin of the body), or (0, 0) if incomplete."""
        value = 0
        for index in range(_HEADER_BYTES_MAX - 1):
            if at + 1 + index >= len(data):
                self._need = 2 + index
                return 0, 0
            byte = data[at + 1 + index]
            value |= (byte & 0x7F) << 7 * index
            if byte < 0x80:
                if not byte and self.version == p.V5:
                    raise malformed("the remaining length is longer than necessary")
                return value, at + 2 + index
        raise malformed("the remaining length has more than 4 bytes")

    def _other(self, data: bytes, first: int, at: int, begin: int, end: int) -> p.Packet:
        kind = first >> 4
        if not self.version:
            return self._connect(data, at, begin, end)
        reader = bodies.FROM_CLIENT.get(kind)
        if reader is None:
            if kind == 0:
                raise malformed("packet type 0 is reserved")
            raise violation(
                "a second CONNECT" if kind == p.CONNECT else f"packet type {kind} is sent by servers, not by clients"
            )
        # MQTT 3.1 does not require the flags of packets other than PUBLISH.
        if first & 0x0F != _FLAGS[kind] and self.version != p.V31:
            raise malformed(f"packet type {kind} has invalid flags 0x{first & 0x0F:X}")
        return reader(data, begin, end, self.version)

    def _connect(self, data: bytes, at: int, begin: int, end: int) -> p.Connect:
        try:
            version, bridge, body = read_version(data, begin, end)
        except UnsupportedLevel as error:
            self.version = error.response_version
            raise
        self.version = version
        if version == p.V5:
            # The length was read before the version was known. Only 5.0 requires its shortest form.
            self._length(data, at)
        packet = read_connect(data, body, end, version, bridge)
        self._bytes_max = self._packet_bytes_max
        return packet

    def _refuse_first(self, first: int) -> None:
        if first >> 4 == p.CONNECT:
            raise malformed(f"CONNECT has invalid flags 0x{first & 0x0F:X}")
        raise violation("the first packet is not CONNECT; check that the client speaks MQTT and not TLS or HTTP")

    def _refuse_empty_topic(self) -> None:
        if self.version == p.V5:
            raise violation("PUBLISH has neither a topic name nor a topic alias")
        raise ProtocolViolation(rc.TOPIC_NAME_INVALID, "the topic name is empty")
