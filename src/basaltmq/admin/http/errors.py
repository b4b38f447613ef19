"""Mapping from Basalt's errors to HTTP status codes."""

from __future__ import annotations

from typing import Final

from basaltmq import errors
from basaltmq.admin.http.message import HttpError

STATUS: Final[dict[type[errors.BasaltError], int]] = {
    errors.InvalidArgumentError: 400,
    errors.InvalidConfigError: 400,
    errors.ScriptError: 400,
    errors.UnknownFamilyError: 400,
    errors.UnknownOptionError: 400,
    errors.OffsetOutOfRangeError: 400,
    errors.NotFoundError: 404,
    errors.UnknownXidError: 404,
    errors.AlreadyExistsError: 409,
    errors.StaleLeaseError: 409,
    errors.TransactionError: 409,
    errors.PreconditionFailedError: 400,
    errors.AuthenticationError: 401,
    errors.AccessRefusedError: 403,
    errors.ResourceLockedError: 409,
    errors.LimitExceededError: 413,
    errors.QueueFullError: 429,
    errors.VHostDownError: 503,
    errors.QueueFailedError: 503,
    errors.PublishersBlockedError: 503,
    errors.TimedOutError: 503,
    errors.NotLeaderError: 503,
    errors.StoreStalledError: 503,
    errors.StoreOverfullError: 503,
    errors.StorePoisonedError: 503,
    errors.StoreClosedError: 503,
    errors.StoreLockedError: 503,
    errors.DiskFullError: 507,
    errors.BasaltError: 500,
}


def status_of(error: errors.BasaltError) -> int:
    """Return the status of the most specific class in the table."""
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def http_error(error: errors.BasaltError) -> HttpError:
    headers = {"Retry-After": "1"} if error.retriable else {}
    details: dict[str, str | int] = {}
    if isinstance(error, errors.DamagedFrameError):
        # A reader uses these fields to continue after the damaged frame.
        details = {"base_offset": error.base_offset, "last_offset": error.last_offset}
        details |= {"shard": error.shard, "damage": error.reason}
    return HttpError(status_of(error), str(error), code=error.code, headers=headers, details=details)
