"""SASL mechanisms.

PLAIN      authorization id NUL user name NUL password
AMQPLAIN   a field table without its size, with LOGIN and PASSWORD
EXTERNAL   empty; the client certificate of the TLS connection identifies the user
"""

from __future__ import annotations

from typing import Final

from basaltmq.broker.auth.sasl import EXTERNAL, PLAIN, Credentials, read_plain
from basaltmq.broker.message import amqp_table
from basaltmq.errors import AuthenticationError, MalformedTableError
from basaltmq.protocols.amqp091.wire.errors import SYNTAX_ERROR, ConnectionFault
from basaltmq.protocols.amqp091.wire.methods import ConnectionStartOk

AMQPLAIN: Final = "AMQPLAIN"


def mechanisms(*, has_certificate: bool) -> list[str]:
    """Return the mechanisms that a connection may use, preferred ones first."""
    return [EXTERNAL, PLAIN, AMQPLAIN] if has_certificate else [PLAIN, AMQPLAIN]


def read_credentials(mechanism: str, response: bytes) -> Credentials:
    """Return the credentials in a response of PLAIN or AMQPLAIN. Raise ConnectionFault if it is malformed."""
    try:
        return read_plain(response) if mechanism == PLAIN else read_amqplain(response)
    except AuthenticationError as error:
        raise ConnectionFault(SYNTAX_ERROR, str(error), ConnectionStartOk.number) from None


def read_amqplain(response: bytes) -> Credentials:
    try:
        table = amqp_table.decode_all(len(response).to_bytes(4, "big") + response)
    except MalformedTableError as error:
        raise AuthenticationError(f"malformed AMQPLAIN response: {error}") from None
    name, password = table.get("LOGIN"), table.get("PASSWORD")
    if not isinstance(name, str) or not isinstance(password, str):
        raise AuthenticationError("malformed AMQPLAIN response: expected a table with the strings LOGIN and PASSWORD")
    return Credentials(name, password)
