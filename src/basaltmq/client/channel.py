"""How a client connects: address, TLS, API key, and the calls there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import grpc

from basaltmq.errors import InvalidArgumentError

ADDRESS_DEFAULT: Final = "localhost:5555"

ANSWER_BYTES_MAX: Final = 256 << 20
"""One answer: a lease of many messages. It is in memory as a whole."""

KEEPALIVE_MS: Final = 30_000

SERVICE: Final = "/basalt.v1.Queues/"
ADMIN: Final = "/fila.v1.FilaAdmin/"


@dataclass(frozen=True, slots=True)
class Target:
    """Where the broker is and how to be let in. Certificates are PEM."""

    address: str = ADDRESS_DEFAULT
    tls: bool = False
    ca_certificate: bytes | None = None
    client_certificate: bytes | None = None
    client_key: bytes | None = None
    api_key: str | None = None

    def __post_init__(self) -> None:
        if (self.client_certificate is None) != (self.client_key is None):
            raise InvalidArgumentError("a client's certificate needs its key, and the other way round")
        if self.client_certificate is not None and not self.is_secure:
            raise InvalidArgumentError("a client's certificate needs tls=True or the authority's certificate")

    @property
    def is_secure(self) -> bool:
        return self.tls or self.ca_certificate is not None

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca_certificate, self.client_key, self.client_certificate)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)

    def options(self) -> list[tuple[str, Any]]:
        return [
            # A connection of its own: the broker tells consumers apart by theirs.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", ANSWER_BYTES_MAX),
            ("grpc.max_send_message_length", -1),
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ]

    def channel(self) -> grpc.Channel:
        if self.is_secure:
            return grpc.secure_channel(self.address, self.credentials(), options=self.options())
        return grpc.insecure_channel(self.address, options=self.options())

    def aio_channel(self) -> grpc.aio.Channel:
        if self.is_secure:
            return grpc.aio.secure_channel(self.address, self.credentials(), options=self.options())
        return grpc.aio.insecure_channel(self.address, options=self.options())
