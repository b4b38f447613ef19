"""An MQTT 5.0 client on a plain socket, which shows every packet and keeps its state over connections.

It resends what the standard requires after a reconnect: PUBLISH with DUP, or PUBREL. paho hides too much of that.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple, Self

from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire.encoder import encode
from basaltmq.protocols.mqtt.wire.fields import read_binary, read_varint
from basaltmq.protocols.mqtt.wire.properties import Properties, read_properties

WAIT_S = 60.0


class Answer(NamedTuple):
    """A packet of the server."""

    kind: int
    flags: int
    body: bytes

    @property
    def packet_id(self) -> int:
        return int.from_bytes(self.body[:2])

    @property
    def reason_code(self) -> int:
        """Of CONNACK, DISCONNECT, AUTH, or an acknowledgement."""
        if self.kind in (p.DISCONNECT, p.AUTH):
            return self.body[0] if self.body else 0
        if self.kind == p.CONNACK:
            return self.body[1]
        return self.body[2] if len(self.body) > 2 else 0

    @property
    def properties(self) -> Properties:
        at = {p.CONNACK: 2, p.DISCONNECT: 1, p.AUTH: 1, p.SUBACK: 2}.get(self.kind, 3)
        return read_properties(self.body, at, len(self.body), self.kind)[0]

    def publish(self) -> tuple[str, int, bytes]:
        """Topic, packet id and payload of a PUBLISH."""
        topic, at = read_binary(self.body, 0, len(self.body))
        packet_id = 0
        if self.flags & 6:
            packet_id = int.from_bytes(self.body[at : at + 2])
            at += 2
        size, at = read_varint(self.body, at, len(self.body))
        return topic.decode(), packet_id, self.body[at + size :]


class Raw:
    """A connection that sends and receives single packets."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), WAIT_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._data = b""

    def send(self, *packets: p.Packet | bytes, version: int = p.V5) -> None:
        self.sock.sendall(b"".join(each if isinstance(each, bytes) else encode(each, version) for each in packets))

    def read(self) -> Answer | None:
        """The next packet; None at the end of the connection."""
        while True:
            found = self._take()
            if found is not None:
                return found
            try:
                chunk = self.sock.recv(65536)
            except ConnectionError:
                return None
            if not chunk:
                return None
            self._data += chunk

    def _take(self) -> Answer | None:
        data = self._data
        length = shift = 0
        for at in range(1, min(5, len(data))):
            length |= (data[at] & 0x7F) << shift
            shift += 7
            if data[at] < 0x80:
                end = at + 1 + length
                if len(data) < end:
                    return None
                self._data = data[end:]
                return Answer(data[0] >> 4, data[0] & 15, data[at + 1 : end])
        return None

    def expect(self, kind: int) -> Answer:
        """The next packet, which must be of this type."""
        found = self.read()
        assert found is not None, f"the connection ended instead of packet type {kind}"
        assert found.kind == kind, f"expected packet type {kind}, got {found}"
        return found

    def rest(self) -> Iterator[Answer]:
        """All packets until the connection ends."""
        while (found := self.read()) is not None:
            yield found

    def connect(self, client_id: str, **fields: object) -> Answer:
        self.send(p.Connect(client_id, **fields))  # type: ignore[arg-type]
        return self.expect(p.CONNACK)

    def close(self) -> None:
        with suppress(OSError):
            self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
