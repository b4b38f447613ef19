"""The one table from Basalt's errors to gRPC status codes.

The most specific class of an error's ancestry decides. What is not in the table is ours to fix and is INTERNAL; its
text goes to the log, not to the client, unless Basalt raised it on purpose.

Every error carries the trailing metadata `basalt-error`, Basalt's own code, which tells apart what one status lumps
together.
"""

from __future__ import annotations

import logging
from typing import Any, Final, NoReturn

import grpc
from grpc import StatusCode
from grpc.aio import ServicerContext

from basaltmq import errors

ERROR_CODE_KEY: Final = "basalt-error"

STATUS: Final[dict[type[errors.BasaltError], StatusCode]] = {
    errors.BasaltError: StatusCode.INTERNAL,
    errors.NotFoundError: StatusCode.NOT_FOUND,
    errors.AlreadyExistsError: StatusCode.ALREADY_EXISTS,
    errors.InvalidArgumentError: StatusCode.INVALID_ARGUMENT,
    errors.InvalidConfigError: StatusCode.INVALID_ARGUMENT,
    errors.ScriptError: StatusCode.INVALID_ARGUMENT,
    errors.StaleLeaseError: StatusCode.FAILED_PRECONDITION,
    errors.PreconditionFailedError: StatusCode.FAILED_PRECONDITION,
    errors.TransactionError: StatusCode.FAILED_PRECONDITION,
    errors.ResourceLockedError: StatusCode.FAILED_PRECONDITION,
    errors.LimitExceededError: StatusCode.RESOURCE_EXHAUSTED,
    errors.DiskFullError: StatusCode.RESOURCE_EXHAUSTED,
    errors.StoreOverfullError: StatusCode.RESOURCE_EXHAUSTED,
    errors.StoreStalledError: StatusCode.UNAVAILABLE,
    errors.StoreClosedError: StatusCode.UNAVAILABLE,
    errors.PublishersHeldError: StatusCode.UNAVAILABLE,
    errors.VHostDownError: StatusCode.UNAVAILABLE,
    errors.CorruptionError: StatusCode.DATA_LOSS,
    errors.TimedOutError: StatusCode.DEADLINE_EXCEEDED,
    errors.AuthenticationError: StatusCode.UNAUTHENTICATED,
    errors.AccessRefusedError: StatusCode.PERMISSION_DENIED,
}

_log = logging.getLogger("basaltmq")


def status_of(error: errors.BasaltError) -> StatusCode:
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    raise AssertionError("the root of all errors is in the table")


async def abort(context: ServicerContext[Any, Any], error: Exception) -> NoReturn:
    """End a call with the status of an error."""
    if isinstance(error, errors.BasaltError):
        trailing = ((ERROR_CODE_KEY, error.code),)
        await context.abort(status_of(error), str(error), trailing_metadata=trailing)
    _log.error("a gRPC call failed", exc_info=error)
    await context.abort(
        StatusCode.INTERNAL, "the broker failed; its log says how", trailing_metadata=((ERROR_CODE_KEY, "internal"),)
    )
    raise AssertionError("abort raises")


def is_abort(error: BaseException) -> bool:
    """Whether a call was ended on purpose already."""
    return isinstance(error, grpc.aio.AbortError)
