"""Credentials as clients send them."""

from __future__ import annotations

import pytest

from basaltmq.broker.message import amqp_table
from basaltmq.protocols.amqp091 import sasl
from basaltmq.protocols.amqp091.wire.errors import SYNTAX_ERROR, ConnectionFault


def test_plain_is_a_name_and_a_password() -> None:
    assert sasl.read_plain("\0jürgen\0gehéim".encode()) == ("jürgen", "gehéim")
    assert sasl.read_plain(b"other\0name\0") == ("name", "")


def test_amqplain_is_a_table_without_its_size() -> None:
    response = amqp_table.encode({"LOGIN": "me", "PASSWORD": "secret"})[4:]
    assert sasl.read_amqplain(response) == ("me", "secret")


@pytest.mark.parametrize("response", [b"", b"name", b"\0name", b"\0a\0b\0c", b"\0\xff\0x"])
def test_malformed_plain_is_a_syntax_error(response: bytes) -> None:
    with pytest.raises(ConnectionFault) as caught:
        sasl.read_plain(response)
    assert caught.value.code == SYNTAX_ERROR


@pytest.mark.parametrize(
    "response",
    [b"", b"\5LOGIN", amqp_table.encode({"LOGIN": "me"})[4:], amqp_table.encode({"LOGIN": 1, "PASSWORD": 2})[4:]],
)
def test_malformed_amqplain_is_a_syntax_error(response: bytes) -> None:
    with pytest.raises(ConnectionFault) as caught:
        sasl.read_amqplain(response)
    assert caught.value.code == SYNTAX_ERROR


def test_a_password_is_not_shown() -> None:
    assert "secret" not in repr(sasl.Credentials("me", "secret"))


def test_certificates_are_offered_only_where_there_is_one() -> None:
    assert sasl.EXTERNAL in sasl.mechanisms(has_certificate=True)
    assert sasl.EXTERNAL not in sasl.mechanisms(has_certificate=False)
