"""Credentials in the form that clients send."""

from __future__ import annotations

import pytest

from basaltmq.broker.auth.sasl import EXTERNAL, PLAIN, Credentials
from basaltmq.broker.message import amqp_table
from basaltmq.protocols.amqp091 import sasl
from basaltmq.protocols.amqp091.wire.errors import SYNTAX_ERROR, ConnectionFault


def test_plain_carries_a_name_and_a_password() -> None:
    assert sasl.read_credentials(PLAIN, "\0jürgen\0gehéim".encode()) == Credentials("jürgen", "gehéim")
    assert sasl.read_credentials(PLAIN, b"other\0name\0") == Credentials("name", "", "other")


def test_amqplain_is_a_table_without_its_size() -> None:
    response = amqp_table.encode({"LOGIN": "me", "PASSWORD": "secret"})[4:]
    assert sasl.read_credentials(sasl.AMQPLAIN, response) == Credentials("me", "secret")


@pytest.mark.parametrize("response", [b"", b"name", b"\0name", b"\0a\0b\0c", b"\0\xff\0x"])
def test_malformed_plain_is_a_syntax_error(response: bytes) -> None:
    with pytest.raises(ConnectionFault) as caught:
        sasl.read_credentials(PLAIN, response)
    assert caught.value.code == SYNTAX_ERROR


@pytest.mark.parametrize(
    "response",
    [b"", b"\5LOGIN", amqp_table.encode({"LOGIN": "me"})[4:], amqp_table.encode({"LOGIN": 1, "PASSWORD": 2})[4:]],
)
def test_malformed_amqplain_is_a_syntax_error(response: bytes) -> None:
    with pytest.raises(ConnectionFault) as caught:
        sasl.read_credentials(sasl.AMQPLAIN, response)
    assert caught.value.code == SYNTAX_ERROR


def test_the_repr_of_credentials_hides_the_password() -> None:
    assert "secret" not in repr(Credentials("me", "secret"))


def test_external_is_offered_only_with_a_client_certificate() -> None:
    assert EXTERNAL in sasl.mechanisms(has_certificate=True)
    assert EXTERNAL not in sasl.mechanisms(has_certificate=False)
