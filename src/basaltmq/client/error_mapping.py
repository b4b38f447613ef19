"""The broker's errors as the classes it raised them as.

The server sends each error's code beside its status. A code this version does not know, or an error that comes from the
transport, becomes the nearest class its status allows. A store that is closed there is a broker that stops: it may be
back in a moment, whereas a store closed in this process stays closed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from basaltmq import errors
from basaltmq.protocols.grpc.client.call import CallFailed
from basaltmq.protocols.grpc.status import Status

ERROR_CODE_KEY: Final = "basalt-error"

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


def fault_of(failure: CallFailed) -> errors.BasaltError:
    """The error behind a failed call."""
    status, text, fields = failure.outcome
    text = text or status.name.lower()
    for name, value in fields:
        if name == ERROR_CODE_KEY:
            return fault(value, text, BY_STATUS.get(status, errors.BasaltError))
    return BY_STATUS.get(status, errors.BasaltError)(text)


def fault(code: str, text: str, otherwise: type[errors.BasaltError] = errors.BasaltError) -> errors.BasaltError:
    """An error of the class that has this code."""
    kind = next((each for each in _kinds(errors.BasaltError) if each.__dict__.get("code") == code), otherwise)
    if kind is errors.StoreClosedError:
        kind = errors.UnavailableError
    # Some classes are made of more than a text, which did not travel.
    made = kind.__new__(kind)
    Exception.__init__(made, text)
    return made


def _kinds(kind: type[errors.BasaltError]) -> Iterator[type[errors.BasaltError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)
