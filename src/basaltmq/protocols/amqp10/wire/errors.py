"""Error conditions of AMQP 1.0, and the mapping from Basalt's errors to them.

A fault ends only the object that it concerns. A `LinkFault` detaches a link, a `SessionFault` ends a session, any other
`Fault` closes the connection.
"""

from __future__ import annotations

from typing import Any, Final

from basaltmq import errors
from basaltmq.errors import BasaltError

INTERNAL_ERROR: Final = "amqp:internal-error"
NOT_FOUND: Final = "amqp:not-found"
UNAUTHORIZED: Final = "amqp:unauthorized-access"
DECODE_ERROR: Final = "amqp:decode-error"
RESOURCE_LIMIT: Final = "amqp:resource-limit-exceeded"
NOT_ALLOWED: Final = "amqp:not-allowed"
INVALID_FIELD: Final = "amqp:invalid-field"
NOT_IMPLEMENTED: Final = "amqp:not-implemented"
RESOURCE_LOCKED: Final = "amqp:resource-locked"
PRECONDITION_FAILED: Final = "amqp:precondition-failed"
RESOURCE_DELETED: Final = "amqp:resource-deleted"
ILLEGAL_STATE: Final = "amqp:illegal-state"
CONNECTION_FORCED: Final = "amqp:connection:forced"
FRAMING_ERROR: Final = "amqp:connection:framing-error"
WINDOW_VIOLATION: Final = "amqp:session:window-violation"
ERRANT_LINK: Final = "amqp:session:errant-link"
HANDLE_IN_USE: Final = "amqp:session:handle-in-use"
UNATTACHED_HANDLE: Final = "amqp:session:unattached-handle"
TRANSFER_LIMIT: Final = "amqp:link:transfer-limit-exceeded"
MESSAGE_SIZE: Final = "amqp:link:message-size-exceeded"
STOLEN: Final = "amqp:link:stolen"
TRANSACTION_ROLLBACK: Final = "amqp:transaction:rollback"
UNKNOWN_TRANSACTION: Final = "amqp:transaction:unknown-id"

_TEXT_BYTES_MAX: Final = 300
"""An error must fit into the smallest frame, of 512 bytes."""


class Fault(Exception):
    """An error condition with a description. It closes the connection."""

    def __init__(self, condition: str, text: str, info: dict[Any, Any] | None = None) -> None:
        super().__init__(f"{condition}: {text}")
        self.condition = condition
        self.text = text.encode(errors="replace")[:_TEXT_BYTES_MAX].decode(errors="ignore")
        self.info = info


class SessionFault(Fault):
    """A fault that ends a session."""


class LinkFault(Fault):
    """A fault that detaches a link."""


_CONDITIONS: Final[tuple[tuple[type[BasaltError], str], ...]] = (
    (errors.VHostDownError, CONNECTION_FORCED),
    (errors.StoreClosedError, CONNECTION_FORCED),
    (errors.AuthenticationError, UNAUTHORIZED),
    (errors.AccessRefusedError, UNAUTHORIZED),
    (errors.ResourceLockedError, RESOURCE_LOCKED),
    (errors.NotFoundError, NOT_FOUND),
    (errors.PreconditionFailedError, PRECONDITION_FAILED),
    (errors.AlreadyExistsError, PRECONDITION_FAILED),
    (errors.LimitExceededError, RESOURCE_LIMIT),
    (errors.PublishersBlockedError, RESOURCE_LIMIT),
    (errors.InvalidArgumentError, INVALID_FIELD),
    (errors.InvalidConfigError, INVALID_FIELD),
    (errors.OffsetOutOfRangeError, PRECONDITION_FAILED),
    (errors.QueueFailedError, PRECONDITION_FAILED),
    (errors.TransactionError, TRANSACTION_ROLLBACK),
    (BasaltError, INTERNAL_ERROR),
)
"""The first matching class determines the condition, so subclasses come first."""


def condition_of(error: BasaltError) -> str:
    """Return the error condition for an error."""
    return next(condition for cls, condition in _CONDITIONS if isinstance(error, cls))
