"""Connection parameters of a client (address, TLS, API key) and the broker's methods."""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from google.protobuf.message import Message

from basaltmq.errors import InvalidArgumentError
from basaltmq.protocols.grpc.client.channel import Channel
from basaltmq.wire import basalt_pb2 as wire
from basaltmq.wire import fila_wire_pb2 as fila

ADDRESS_DEFAULT: Final = "localhost:5555"
PORT_DEFAULT: Final = 5555

API_KEY_CHARACTERS_MAX: Final = 4_096
"""Longer than the keys that the broker creates, and small enough for call metadata."""

R = TypeVar("R", bound=Message)


class Method(NamedTuple, Generic[R]):
    """A method of the broker, and how to decode its response."""

    path: str
    read: Callable[[bytes], R]


_SERVICE: Final = "/basalt.v1.Queues/"
_ADMIN: Final = "/fila.v1.FilaAdmin/"

PRODUCE: Final = _SERVICE + "Produce"
OPEN_SESSION: Final = _SERVICE + "OpenSession"
ENQUEUE: Final = Method(_SERVICE + "EnqueueBatch", wire.EnqueueBatchResponse.FromString)
LEASE: Final = Method(_SERVICE + "Lease", wire.LeaseResponse.FromString)
ACK: Final = Method(_SERVICE + "AckBatch", wire.SettleResponse.FromString)
NACK: Final = Method(_SERVICE + "NackBatch", wire.SettleResponse.FromString)
RELEASE: Final = Method(_SERVICE + "ReleaseBatch", wire.SettleResponse.FromString)
EXTEND: Final = Method(_SERVICE + "Extend", wire.ExtendResponse.FromString)
CREATE_QUEUE: Final = Method(_SERVICE + "CreateQueue", wire.CreateQueueResponse.FromString)
DELETE_QUEUE: Final = Method(_ADMIN + "DeleteQueue", fila.DeleteQueueResponse.FromString)


@dataclass(frozen=True, slots=True)
class Target:
    """Address and credentials of a broker. Certificates are PEM."""

    address: str = ADDRESS_DEFAULT
    tls: bool = False
    ca_certificate: bytes | None = None
    client_certificate: bytes | None = None
    client_key: bytes | None = None
    api_key: str | None = None

    def __post_init__(self) -> None:
        if (self.client_certificate is None) != (self.client_key is None):
            raise InvalidArgumentError("client_certificate and client_key must be given together")
        if self.client_certificate is not None and not self.is_secure:
            raise InvalidArgumentError("client_certificate needs tls=True or ca_certificate")
        key = self.api_key
        if key is not None and (len(key) > API_KEY_CHARACTERS_MAX or not (key.isascii() and key.isprintable())):
            raise InvalidArgumentError("an API key is the text shown when it was created: fila_...")

    @property
    def is_secure(self) -> bool:
        return self.tls or self.ca_certificate is not None

    def place(self) -> tuple[str, int]:
        """Return host and port of `host:port`, `[v6]:port`, or either without the port."""
        text = self.address.removeprefix("dns:").lstrip("/")
        host, colon, port = text.rpartition(":")
        if not colon or "]" in port or (":" in host and not host.startswith("[")):
            host, port = text, ""
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        if not host or (port and not (port.isdecimal() and 0 < int(port) < 65_536)):
            raise InvalidArgumentError(f"an address must be host:port, not {self.address!r:.200}")
        return host, int(port or PORT_DEFAULT)

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context for the broker's listener; None without TLS."""
        if not self.is_secure:
            return None
        try:
            authority = None if self.ca_certificate is None else self.ca_certificate.decode("ascii")
            context = ssl.create_default_context(cadata=authority)
            if self.client_certificate is not None and self.client_key is not None:
                _load(context, self.client_certificate, self.client_key)
        except (ssl.SSLError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(
                f"the certificates cannot be used: {error}; check ca_certificate, client_certificate and client_key"
            ) from None
        context.set_alpn_protocols(["h2"])
        return context

    def channel(self) -> Channel:
        """Return a new connection. The broker identifies consumers by their connection."""
        host, port = self.place()
        fields = () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)
        return Channel(host, port, tls=self.context(), fields=fields)


def _load(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Load a client certificate. OpenSSL reads it from files only, so write files that only this user can read."""
    with tempfile.TemporaryDirectory(prefix="basalt-tls-") as directory:
        file = os.path.join(directory, "client.pem")
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as both:
            both.write(certificate.rstrip() + b"\n" + key)
        context.load_cert_chain(file)
