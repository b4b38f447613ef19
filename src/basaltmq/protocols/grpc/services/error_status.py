"""Mapping from Basalt's errors to gRPC status codes.

The most specific class in an error's MRO decides. Errors outside the table are bugs and map to INTERNAL. Their text
goes to the log, not to the client.

Every error carries the trailing metadata `basalt-error` with Basalt's own code, which is finer than the gRPC status.
"""

from __future__ import annotations

import logging
from typing import Final

from basaltmq import errors
from basaltmq.protocols.grpc.status import ERROR_CODE_KEY, Outcome, Status

STATUS: Final[dict[type[errors.BasaltError], Status]] = {
    errors.BasaltError: Status.INTERNAL,
    errors.NotFoundError: Status.NOT_FOUND,
    errors.AlreadyExistsError: Status.ALREADY_EXISTS,
    errors.InvalidArgumentError: Status.INVALID_ARGUMENT,
    errors.InvalidConfigError: Status.INVALID_ARGUMENT,
    errors.ScriptError: Status.INVALID_ARGUMENT,
    errors.StaleLeaseError: Status.FAILED_PRECONDITION,
    errors.PreconditionFailedError: Status.FAILED_PRECONDITION,
    errors.TransactionError: Status.FAILED_PRECONDITION,
    errors.ResourceLockedError: Status.FAILED_PRECONDITION,
    errors.LimitExceededError: Status.RESOURCE_EXHAUSTED,
    errors.DiskFullError: Status.RESOURCE_EXHAUSTED,
    errors.StoreOverfullError: Status.RESOURCE_EXHAUSTED,
    errors.StoreStalledError: Status.UNAVAILABLE,
    errors.StoreClosedError: Status.UNAVAILABLE,
    errors.PublishersBlockedError: Status.UNAVAILABLE,
    errors.VHostDownError: Status.UNAVAILABLE,
    errors.QueueFailedError: Status.UNAVAILABLE,
    errors.CorruptionError: Status.DATA_LOSS,
    errors.TimedOutError: Status.DEADLINE_EXCEEDED,
    errors.AuthenticationError: Status.UNAUTHENTICATED,
    errors.AccessRefusedError: Status.PERMISSION_DENIED,
}

_log = logging.getLogger("basaltmq")


def status_of(error: errors.BasaltError) -> Status:
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    raise AssertionError("BasaltError is in the table")


def outcome_of(error: BaseException) -> Outcome:
    """Return the outcome of a call that ended with this error."""
    if isinstance(error, errors.BasaltError):
        return Outcome(status_of(error), str(error), ((ERROR_CODE_KEY, error.code),))
    _log.error("a gRPC call failed", exc_info=error)
    return Outcome(Status.INTERNAL, "internal error of the broker; see its log", ((ERROR_CODE_KEY, "internal"),))
