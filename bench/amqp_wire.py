"""A raw AMQP 0-9-1 client for benches: it pipelines prepared bytes and counts the responses.

The methods are pika's; the socket is blocking. Nothing is validated, because only the load matters.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from struct import Struct
from typing import Any, Final, Self

from pika import frame, spec

HEAD: Final = Struct(">BHI")
CONFIRM: Final = Struct(">QB")
PLAIN: Final = b"\0guest\0guest"
FRAME_BYTES_MAX: Final = 131_072
CHANNEL_MAX: Final = 2047
READ_BYTES: Final = 1 << 18


class Wire:
    """One connection, with channel 1 open."""

    def __init__(self, port: int, vhost: str = "/", *, timeout_s: float = 120.0) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""
        self.deliveries = self.confirmed = 0
        self.last_tag = 0
        self._socket.sendall(b"AMQP\0\0\x09\x01")
        self.wait(spec.Connection.Start)
        start_ok = spec.Connection.StartOk({}, "PLAIN", PLAIN.decode(), "en_US")
        self.send(0, start_ok)
        self.wait(spec.Connection.Tune)
        self.send(0, spec.Connection.TuneOk(CHANNEL_MAX, FRAME_BYTES_MAX, 0))
        self.call(0, spec.Connection.Open(vhost), spec.Connection.OpenOk)
        self.call(1, spec.Channel.Open(), spec.Channel.OpenOk)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket without connection.close."""
        self._socket.close()

    def send(self, channel: int, *methods: Any) -> None:
        self.write(methods_bytes(channel, methods))

    def write(self, data: bytes) -> None:
        self._socket.sendall(data)

    def call(self, channel: int, method: Any, answer: Any) -> bytes:
        self.send(channel, method)
        return self.wait(answer)

    def wait(self, wanted: Any, count: int = 1) -> bytes:
        """Read until `count` methods of a kind have arrived. Return the arguments of the last one."""
        return self.wait_id(wanted.INDEX, count)

    def wait_id(self, wanted: int, count: int = 1) -> bytes:
        while True:
            method, arguments = self._method()
            if method == wanted:
                count -= 1
                if not count:
                    return arguments
            elif method in (spec.Channel.Close.INDEX, spec.Connection.Close.INDEX):
                raise AssertionError(f"the broker closed the channel or the connection: {arguments!r}")

    def wait_confirms(self, last: int) -> None:
        """Read until the publish with this number is confirmed."""
        while self.confirmed < last:
            self.confirmed = int.from_bytes(self.wait(spec.Basic.Ack)[:8], "big")

    def publish_confirmed(self, message: bytes, count: int, window: int) -> float:
        """Publish the same bytes `count` times, at most `window` of them unconfirmed; return the seconds it took."""
        self.call(1, spec.Confirm.Select(), spec.Confirm.SelectOk)
        sent = acked = 0
        begin = time.perf_counter()
        while acked < count:
            room = min(window - (sent - acked), count - sent)
            if room:
                self.write(message * room)
                sent += room
            tag, flags = CONFIRM.unpack_from(self.wait(spec.Basic.Ack))
            acked = tag if flags & 1 else acked + 1
        return time.perf_counter() - begin

    def wait_deliveries(self, count: int) -> None:
        """Read until this total number of messages was delivered."""
        while self.deliveries < count:
            self._method()

    def _method(self) -> tuple[int, bytes]:
        """Return the next method frame. Deliveries are counted, contents skipped."""
        while True:
            kind, _, payload = self._frame()
            if kind != frame.spec.FRAME_METHOD:
                continue
            method = int.from_bytes(payload[:4], "big")
            if method == spec.Basic.Deliver.INDEX:
                self.deliveries += 1
                tag_at = 5 + payload[4]
                self.last_tag = int.from_bytes(payload[tag_at : tag_at + 8], "big")
            return method, payload[4:]

    def _frame(self) -> tuple[int, int, bytes]:
        kind, channel, size = HEAD.unpack(self._take(HEAD.size))
        return kind, channel, self._take(size + 1)[:-1]

    def _take(self, size: int) -> bytes:
        if len(self._buffer) < size:
            parts, have = [self._buffer], len(self._buffer)
            while have < size:
                got = self._socket.recv(max(READ_BYTES, size - have))
                if not got:
                    raise ConnectionError("the broker closed the connection")
                parts.append(got)
                have += len(got)
            self._buffer = b"".join(parts)
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken


def methods_bytes(channel: int, methods: Iterable[Any]) -> bytes:
    return b"".join([frame.Method(channel, method).marshal() for method in methods])


def publish_bytes(exchange: str, key: str, body: bytes, *, channel: int = 1, **properties: Any) -> bytes:
    """Return the bytes of one publish, which can be sent repeatedly."""
    header = spec.BasicProperties(**properties)
    size = FRAME_BYTES_MAX - 8
    bodies = [frame.Body(channel, body[at : at + size]).marshal() for at in range(0, len(body), size)]
    method = spec.Basic.Publish(exchange=exchange, routing_key=key)
    head: bytes = frame.Header(channel, len(body), header).marshal()
    return methods_bytes(channel, [method]) + head + b"".join(bodies)
