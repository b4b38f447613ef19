"""The table of status codes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from basaltmq import errors
from basaltmq.client.error_mapping import BY_STATUS, error_of_code
from basaltmq.protocols.grpc.services.error_status import STATUS, status_of
from basaltmq.protocols.grpc.status import Status as StatusCode


def kinds(kind: type[errors.BasaltError] = errors.BasaltError) -> Iterator[type[errors.BasaltError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from kinds(below)


@pytest.mark.spec("C5")
@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.QueueNotFoundError, StatusCode.NOT_FOUND),
        (errors.MessageNotFoundError, StatusCode.NOT_FOUND),
        (errors.QueueExistsError, StatusCode.ALREADY_EXISTS),
        (errors.ScriptError, StatusCode.INVALID_ARGUMENT),
        (errors.InvalidConfigError, StatusCode.INVALID_ARGUMENT),
        (errors.QueueFullError, StatusCode.RESOURCE_EXHAUSTED),
        (errors.StaleLeaseError, StatusCode.FAILED_PRECONDITION),
        (errors.AuthenticationError, StatusCode.UNAUTHENTICATED),
        (errors.AccessRefusedError, StatusCode.PERMISSION_DENIED),
        (errors.StoreStalledError, StatusCode.UNAVAILABLE),
        (errors.CorruptionError, StatusCode.DATA_LOSS),
        (errors.StorePoisonedError, StatusCode.INTERNAL),
    ],
)
def test_errors_have_a_fitting_grpc_status(kind: type[errors.BasaltError], code: StatusCode) -> None:
    assert status_of(kind("x")) is code


def test_every_error_round_trips_to_the_client() -> None:
    for kind in kinds():
        # A closed store on the server means that the broker is stopping. It may restart.
        expected = errors.UnavailableError if kind is errors.StoreClosedError else kind
        arrived = error_of_code(kind.code, "what happened")
        assert type(arrived).code == expected.code
        assert arrived.retriable == expected.retriable
        assert str(arrived) == "what happened"


def test_an_unknown_code_becomes_the_error_of_its_status() -> None:
    assert type(error_of_code("from the future", "x", BY_STATUS[StatusCode.NOT_FOUND])) is errors.NotFoundError


def test_retriable_errors_have_a_retriable_status() -> None:
    for kind, code in STATUS.items():
        if code is StatusCode.UNAVAILABLE and kind is not errors.StoreClosedError:
            assert kind.retriable, kind
