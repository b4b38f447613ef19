"""The broker's errors as the classes it raised them as.

The server sends each error's code beside its status. A code this version does not know, or an error that comes from the
transport, becomes the nearest class its status allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import grpc
from grpc import StatusCode

from basaltmq import errors

ERROR_CODE_KEY: Final = "basalt-error"

BY_STATUS: Final[dict[StatusCode, type[errors.BasaltError]]] = {
    StatusCode.UNAVAILABLE: errors.UnavailableError,
    StatusCode.CANCELLED: errors.UnavailableError,
    StatusCode.DEADLINE_EXCEEDED: errors.TimedOutError,
    StatusCode.UNAUTHENTICATED: errors.AuthenticationError,
    StatusCode.PERMISSION_DENIED: errors.AccessRefusedError,
    StatusCode.RESOURCE_EXHAUSTED: errors.LimitExceededError,
    StatusCode.INVALID_ARGUMENT: errors.InvalidArgumentError,
    StatusCode.NOT_FOUND: errors.NotFoundError,
    StatusCode.ALREADY_EXISTS: errors.AlreadyExistsError,
    StatusCode.FAILED_PRECONDITION: errors.PreconditionFailedError,
}


def fault_of(error: grpc.RpcError) -> errors.BasaltError:
    """The error behind a failed call."""
    # Every failed call is a call too, sync or async, and has these.
    status: StatusCode = getattr(error, "code", lambda: StatusCode.UNKNOWN)()
    text: str = getattr(error, "details", lambda: None)() or status.name.lower()
    for name, value in getattr(error, "trailing_metadata", lambda: None)() or ():
        if name == ERROR_CODE_KEY and isinstance(value, str):
            return fault(value, text, BY_STATUS.get(status, errors.BasaltError))
    return BY_STATUS.get(status, errors.BasaltError)(text)


def fault(code: str, text: str, otherwise: type[errors.BasaltError] = errors.BasaltError) -> errors.BasaltError:
    """An error of the class that has this code."""
    kind = next((each for each in _kinds(errors.BasaltError) if each.__dict__.get("code") == code), otherwise)
    # Some classes are made of more than a text, which did not travel.
    made = kind.__new__(kind)
    Exception.__init__(made, text)
    return made


def _kinds(kind: type[errors.BasaltError]) -> Iterator[type[errors.BasaltError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)
