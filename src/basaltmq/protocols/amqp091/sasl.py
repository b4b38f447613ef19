"""SASL mechanisms.

PLAIN      authorization id NUL user name NUL password
AMQPLAIN   a field table without its size, with LOGIN and PASSWORD
EXTERNAL   empty; the client certificate of the TLS connection identifies the user
"""

from __future__ import annotations

from typing import Final, NamedTuple

from basaltmq.broker.message import amqp_table
from basaltmq.errors import MalformedTableError
from basaltmq.protocols.amqp091.wire.errors import SYNTAX_ERROR, ConnectionFault

PLAIN: Final = "PLAIN"
AMQPLAIN: Final = "AMQPLAIN"
EXTERNAL: Final = "EXTERNAL"


class Credentials(NamedTuple):
    """A user name and a password."""

    name: str
    password: str

    def __repr__(self) -> str:
        return f"Credentials(name={self.name!r}, password='...')"


def mechanisms(*, has_certificate: bool) -> list[str]:
    """Return the mechanisms that a connection may use, preferred ones first."""
    return [EXTERNAL, PLAIN, AMQPLAIN] if has_certificate else [PLAIN, AMQPLAIN]


def read_plain(response: bytes) -> Credentials:
    parts = response.split(b"\0")
    if len(parts) != 3:
        raise _malformed(PLAIN, "expected authorization id, user name and password, separated by NUL")
    try:
        return Credentials(parts[1].decode(), parts[2].decode())
    except UnicodeDecodeError:
        raise _malformed(PLAIN, "user name and password must be UTF-8") from None


def read_amqplain(response: bytes) -> Credentials:
    try:
        table = amqp_table.decode_all(len(response).to_bytes(4, "big") + response)
    except MalformedTableError as error:
        raise _malformed(AMQPLAIN, str(error)) from None
    name, password = table.get("LOGIN"), table.get("PASSWORD")
    if not isinstance(name, str) or not isinstance(password, str):
        raise _malformed(AMQPLAIN, "expected a table with the strings LOGIN and PASSWORD")
    return Credentials(name, password)


def _malformed(mechanism: str, why: str) -> ConnectionFault:
    return ConnectionFault(SYNTAX_ERROR, f"malformed {mechanism} response: {why}", (10, 11))
