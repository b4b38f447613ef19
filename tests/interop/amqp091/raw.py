"""A client that sends exactly the frames of a test over a plain socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from tests.unit.protocols.amqp091.wire import Frame, handshake

from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.amqp091.wire.frames import END, HEAD, METHOD
from basaltmq.protocols.amqp091.wire.method_codec import encode_method

WAIT_S = 30.0


class RawClient:
    """A socket without protocol logic of its own."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), WAIT_S)

    def open(self, *, channels: int = 1, frame_max: int = 131072, heartbeat: int = 0) -> RawClient:
        header, start_ok, tune_ok, open_vhost = handshake(frame_max, 100, heartbeat)
        for step, answer in ((header, True), (start_ok, True), (tune_ok, False), (open_vhost, True)):
            self.sock.sendall(step)
            if answer:
                self.frame()
        for number in range(1, channels + 1):
            self.call(m.ChannelOpen(), channel=number)
        return self

    def send(self, method: m.Method, *, channel: int = 1) -> None:
        self.sock.sendall(encode_method(channel, method))

    def call(self, method: m.Method, *, channel: int = 1) -> m.Method:
        """Send a method and return the next received one."""
        self.send(method, channel=channel)
        return self.method()

    def method(self) -> m.Method:
        while True:
            frame = self.frame()
            if frame.kind == METHOD:
                return frame.method

    def frame(self) -> Frame:
        kind, channel, size = HEAD.unpack(self._read(HEAD.size))
        payload = self._read(size)
        assert self._read(1)[0] == END
        return Frame(kind, channel, payload)

    def _read(self, size: int) -> bytes:
        raw = b""
        while len(raw) < size:
            piece = self.sock.recv(size - len(raw))
            if not piece:
                raise EOFError
            raw += piece
        return raw

    def rest(self) -> bytes:
        """Return everything received until the server closes."""
        raw = b""
        try:
            while piece := self.sock.recv(65536):
                raw += piece
        except ConnectionResetError:
            pass
        return raw

    def close(self) -> None:
        self.sock.close()


@contextmanager
def raw_client(port: int) -> Iterator[RawClient]:
    client = RawClient(port)
    try:
        yield client
    finally:
        client.close()


def declare(queue: str, *, durable: bool = False, exclusive: bool = False, passive: bool = False) -> m.QueueDeclare:
    return m.QueueDeclare(0, queue, passive, durable, exclusive, False, False, {})
