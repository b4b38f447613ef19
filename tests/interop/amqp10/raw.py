"""A client that sends exactly the frames of AMQP 1.0 that a test names, over a plain socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from basaltmq.protocols.amqp10.wire import frames as f
from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire import sections as s

WAIT_S = 30.0
T = TypeVar("T", bound=p.Composite)


class RawClient:
    """A socket whose frames the test writes."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), WAIT_S)
        self.reader = f.FrameReader(1 << 20)
        self.found: list[tuple[int, p.Composite | None, bytes]] = []

    def login(self) -> RawClient:
        """Authenticate as guest."""
        self.sock.sendall(f.SASL_HEADER)
        self.take(p.SaslMechanisms)
        self.send(p.SaslInit(mechanism="PLAIN", initial_response=b"\0guest\0guest"), kind=f.SASL)
        assert self.take(p.SaslOutcome).code == 0
        self.reader.wants_header = True
        self.sock.sendall(f.AMQP_HEADER)
        return self

    def open(self, **fields: Any) -> RawClient:
        """Authenticate, and open a connection and a session on channel 0."""
        self.login()
        self.send(p.Open(container_id="raw", **fields))
        self.take(p.Open)
        self.begin(0)
        return self

    def begin(self, channel: int, **fields: Any) -> p.Begin:
        wanted = {"next_outgoing_id": 0, "incoming_window": 1000, "outgoing_window": 1000, **fields}
        self.send(p.Begin(**wanted), channel)
        return self.take(p.Begin)

    def send(self, performative: p.Composite, channel: int = 0, *, payload: bytes = b"", kind: int = f.AMQP) -> None:
        self.sock.sendall(f.frame(channel, p.encode(performative) + payload, kind))

    def attach_sender(self, handle: int, address: str | None, **fields: Any) -> p.Attach:
        target = fields.pop("target", p.Target(address=address))
        self.send(
            p.Attach(
                name=fields.pop("name", f"out-{handle}"),
                handle=handle,
                role=p.SENDER,
                source=p.Source(),
                target=target,
                initial_delivery_count=0,
                **fields,
            )
        )
        return self.take(p.Attach)

    def attach_receiver(self, handle: int, address: str | None, **fields: Any) -> p.Attach:
        source = fields.pop("source", p.Source(address=address))
        name = fields.pop("name", f"in-{handle}")
        self.send(p.Attach(name=name, handle=handle, role=p.RECEIVER, source=source, target=p.Target(), **fields))
        return self.take(p.Attach)

    def credit(self, handle: int, credit: int, *, delivery_count: int = 0, channel: int = 0, **fields: Any) -> None:
        wanted = {"incoming_window": 1000, "outgoing_window": 1000, "next_incoming_id": 0, **fields}
        self.send(p.Flow(handle=handle, delivery_count=delivery_count, link_credit=credit, **wanted), channel)

    def transfer(self, handle: int, delivery_id: int, body: bytes = b"x", **fields: Any) -> None:
        payload = fields.pop("payload", s.data_head(len(body)) + body)
        tag = fields.pop("delivery_tag", b"%d" % delivery_id)
        self.send(p.Transfer(handle=handle, delivery_id=delivery_id, delivery_tag=tag, **fields), payload=payload)

    def next(self) -> tuple[int, p.Composite | None, bytes]:
        """Return channel, performative and payload of the next frame; None at the end of the connection."""
        while not self.found:
            data = self.sock.recv(1 << 16)
            if not data:
                return 0, None, b""
            for kind, channel, raw, at, end in self.reader.feed(data):
                if kind != f.HEADER and at < end:
                    performative, at = p.decode(raw, at, end)
                    self.found.append((channel, performative, raw[at:end]))
        return self.found.pop(0)

    def take(self, kind: type[T]) -> T:
        """Skip frames until there is a performative of this type."""
        return self.take_with_payload(kind)[0]

    def take_with_payload(self, kind: type[T]) -> tuple[T, bytes]:
        while True:
            _, performative, payload = self.next()
            assert performative is not None, f"the connection ended before {kind.__name__}"
            if isinstance(performative, kind):
                return performative, payload

    def error(self, kind: type[p.Close] | type[p.End] | type[p.Detach]) -> str:
        """Return the condition of the next close, end or detach."""
        found = self.take(kind)
        assert isinstance(found.error, p.ErrorInfo), found
        return found.error.condition

    def is_alive(self, handle: int = 60_000) -> None:
        """Assert that the session still answers."""
        self.attach_sender(handle, "/exchanges/amq.fanout", name=f"alive-{handle}")
        self.take(p.Flow)


@contextmanager
def raw_client(port: int) -> Iterator[RawClient]:
    client = RawClient(port)
    try:
        yield client
    finally:
        client.sock.close()
