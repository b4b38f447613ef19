"""Status codes: a refusal with its code, and the table from Basalt's errors to codes.

A response has its status in the message. The status of gRPC is OK even for a refused request, as with Apache's proxy.
"""

from __future__ import annotations

import logging
from typing import Final

from basaltmq import errors
from basaltmq.wire import rocketmq_wire_pb2 as wire

CODES: Final[dict[type[errors.BasaltError], int]] = {
    errors.BasaltError: wire.INTERNAL_SERVER_ERROR,
    errors.InvalidArgumentError: wire.BAD_REQUEST,
    errors.InvalidConfigError: wire.BAD_REQUEST,
    errors.LimitExceededError: wire.PAYLOAD_TOO_LARGE,
    errors.NotFoundError: wire.NOT_FOUND,
    errors.TopicNotFoundError: wire.TOPIC_NOT_FOUND,
    errors.GroupNotFoundError: wire.CONSUMER_GROUP_NOT_FOUND,
    errors.MessageNotFoundError: wire.MESSAGE_NOT_FOUND,
    errors.OffsetOutOfRangeError: wire.ILLEGAL_OFFSET,
    errors.StaleLeaseError: wire.INVALID_RECEIPT_HANDLE,
    errors.AuthenticationError: wire.UNAUTHORIZED,
    errors.AccessRefusedError: wire.FORBIDDEN,
    errors.TooManyLoginsError: wire.TOO_MANY_REQUESTS,
    errors.PublishersBlockedError: wire.TOO_MANY_REQUESTS,
    errors.StoreStalledError: wire.TOO_MANY_REQUESTS,
    errors.StoreOverfullError: wire.TOO_MANY_REQUESTS,
    errors.DiskFullError: wire.TOO_MANY_REQUESTS,
    errors.VHostDownError: wire.HA_NOT_AVAILABLE,
    errors.StoreClosedError: wire.HA_NOT_AVAILABLE,
    errors.TimedOutError: wire.PROXY_TIMEOUT,
}

_log: Final = logging.getLogger(__name__)


class Refused(Exception):
    """A request is refused with this code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def status_of(error: BaseException) -> wire.Status:
    """Return the status for an error. The most specific class in the table decides."""
    if isinstance(error, Refused):
        return wire.Status(code=error.code, message=str(error))  # type: ignore[arg-type]
    for kind in type(error).__mro__:
        if kind in CODES:
            return wire.Status(code=CODES[kind], message=str(error))  # type: ignore[arg-type]
    _log.error("a RocketMQ request failed", exc_info=error)
    return wire.Status(code=wire.INTERNAL_SERVER_ERROR, message="internal error of the broker; see its log")


OK: Final = wire.Status(code=wire.OK, message="OK")
