"""The table from Basalt's errors to AMQP's codes."""

from __future__ import annotations

import inspect

import pytest

from basaltmq import errors
from basaltmq.errors import BasaltError
from basaltmq.protocols.amqp091.wire.errors import NAMES, SOFT, ChannelFault, ConnectionFault, fault_of


def every_error() -> list[BasaltError]:
    made: list[BasaltError] = []
    for _, cls in inspect.getmembers(errors, inspect.isclass):
        if issubclass(cls, BasaltError):
            error = cls.__new__(cls)
            Exception.__init__(error, "text")
            made.append(error)
    return made


def test_every_error_class_has_a_fitting_reply_code() -> None:
    for error in every_error():
        fault = fault_of(error, (50, 10))
        assert fault.code in NAMES
        assert fault.method == (50, 10)
        soft = fault.code in SOFT and not isinstance(error, errors.AuthenticationError)
        assert isinstance(fault, ChannelFault if soft else ConnectionFault)


@pytest.mark.parametrize(
    ("cls", "code"),
    [
        (errors.QueueNotFoundError, 404),
        (errors.ExchangeNotFoundError, 404),
        (errors.AccessRefusedError, 403),
        (errors.ResourceLockedError, 405),
        (errors.PreconditionFailedError, 406),
        (errors.BadExpirationError, 406),
        (errors.InvalidArgumentError, 406),
        (errors.QueueExistsError, 406),
        (errors.MalformedTableError, 502),
        (errors.MalformedPropertiesError, 502),
        (errors.VHostNotFoundError, 530),
        (errors.VHostDownError, 320),
        (errors.PublishersBlockedError, 506),
        (errors.CorruptionError, 541),
        (BasaltError, 541),
    ],
)
def test_codes_clients_branch_on(cls: type[BasaltError], code: int) -> None:
    assert fault_of(cls("text")).code == code


def test_reply_texts_begin_with_the_name_of_the_code() -> None:
    assert fault_of(errors.QueueNotFoundError("no queue 'q' in vhost '/'")).reply_text == (
        "NOT_FOUND - no queue 'q' in vhost '/'"
    )
