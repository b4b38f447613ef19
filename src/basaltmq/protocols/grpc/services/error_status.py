"""The one table from Basalt's errors to gRPC status codes.

The most specific class of an error's ancestry decides. What is not in the table is ours to fix and is INTERNAL; its
text goes to the log, not to the client, unless Basalt raised it on purpose.

Every error carries the trailing metadata `basalt-error`, Basalt's own code, which tells apart what one status lumps
together.
"""

from __future__ import annotations

import logging
from typing import Final

from basaltmq import errors
from basaltmq.protocols.grpc.status import Outcome, Status

ERROR_CODE_KEY: Final = "basalt-error"

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
    errors.PublishersHeldError: Status.UNAVAILABLE,
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
    raise AssertionError("the root of all errors is in the table")


def outcome_of(error: BaseException) -> Outcome:
    """How an error ends a call."""
    if isinstance(error, errors.BasaltError):
        return Outcome(status_of(error), str(error), ((ERROR_CODE_KEY, error.code),))
    _log.error("a gRPC call failed", exc_info=error)
    return Outcome(Status.INTERNAL, "the broker failed; its log says how", ((ERROR_CODE_KEY, "internal"),))
