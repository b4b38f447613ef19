"""Converts errors of the broker to the exception classes of `basaltmq.errors`.

The server sends the code of each error with the gRPC status. Unknown codes and transport errors become the closest
class of the status. A closed store on the server means that the broker is stopping, so the error is retriable, unlike a
closed store in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from basaltmq import errors
from basaltmq.protocols.grpc.client.call import CallFailed
from basaltmq.protocols.grpc.status import ERROR_CODE_KEY, Status

BY_STATUS: Final[dict[Status, type[errors.BasaltError]]] = {
    Status.UNAVAILABLE: errors.UnavailableError,
    Status.CANCELLED: errors.UnavailableError,
    Status.DEADLINE_EXCEEDED: errors.TimedOutError,
    Status.UNAUTHENTICATED: errors.AuthenticationError,
    Status.PERMISSION_DENIED: errors.AccessRefusedError,
    Status.RESOURCE_EXHAUSTED: errors.LimitExceededError,
    Status.INVALID_ARGUMENT: errors.InvalidArgumentError,
    Status.NOT_FOUND: errors.NotFoundError,
    Status.ALREADY_EXISTS: errors.AlreadyExistsError,
    Status.FAILED_PRECONDITION: errors.PreconditionFailedError,
}


def error_of_call(failure: CallFailed) -> errors.BasaltError:
    """Return the error of a failed call."""
    status, text, fields = failure.outcome
    text = text or status.name.lower()
    for name, value in fields:
        if name == ERROR_CODE_KEY:
            return error_of_code(value, text, BY_STATUS.get(status, errors.BasaltError))
    return BY_STATUS.get(status, errors.BasaltError)(text)


def error_of_code(code: str, text: str, otherwise: type[errors.BasaltError] = errors.BasaltError) -> errors.BasaltError:
    """Return an error of the class with this code."""
    kind = next((each for each in _kinds(errors.BasaltError) if each.__dict__.get("code") == code), otherwise)
    if kind is errors.StoreClosedError:
        kind = errors.UnavailableError
    # Some classes take more arguments than the text, and those are not transmitted.
    made = kind.__new__(kind)
    Exception.__init__(made, text)
    return made


def _kinds(kind: type[errors.BasaltError]) -> Iterator[type[errors.BasaltError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)
