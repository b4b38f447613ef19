"""AMQP faults and reply codes, and the mapping from Basalt's errors to them.

A *channel fault* closes a channel with channel.close; the connection continues. A *connection fault* closes the
connection. Clients check the reply codes. A *local protocol error* is a server bug: an attempt to send something that
the protocol does not allow.

    311 content-too-large    403 access-refused       501 frame-error        505 unexpected-frame
    312 no-route (return)    404 not-found            502 syntax-error       506 resource-error
    313 no-consumers (ret.)  405 resource-locked      503 command-invalid    530 not-allowed
    320 connection-forced    406 precondition-failed  504 channel-error      540 not-implemented
    402 invalid-path                                                         541 internal-error
"""

from __future__ import annotations

from typing import Final

from basaltmq import errors
from basaltmq.errors import BasaltError

CONTENT_TOO_LARGE: Final = 311
NO_ROUTE: Final = 312
NO_CONSUMERS: Final = 313
CONNECTION_FORCED: Final = 320
INVALID_PATH: Final = 402
ACCESS_REFUSED: Final = 403
NOT_FOUND: Final = 404
RESOURCE_LOCKED: Final = 405
PRECONDITION_FAILED: Final = 406
FRAME_ERROR: Final = 501
SYNTAX_ERROR: Final = 502
COMMAND_INVALID: Final = 503
CHANNEL_ERROR: Final = 504
UNEXPECTED_FRAME: Final = 505
RESOURCE_ERROR: Final = 506
NOT_ALLOWED: Final = 530
NOT_IMPLEMENTED: Final = 540
INTERNAL_ERROR: Final = 541

NAMES: Final = {
    CONTENT_TOO_LARGE: "CONTENT_TOO_LARGE",
    NO_ROUTE: "NO_ROUTE",
    NO_CONSUMERS: "NO_CONSUMERS",
    CONNECTION_FORCED: "CONNECTION_FORCED",
    INVALID_PATH: "INVALID_PATH",
    ACCESS_REFUSED: "ACCESS_REFUSED",
    NOT_FOUND: "NOT_FOUND",
    RESOURCE_LOCKED: "RESOURCE_LOCKED",
    PRECONDITION_FAILED: "PRECONDITION_FAILED",
    FRAME_ERROR: "FRAME_ERROR",
    SYNTAX_ERROR: "SYNTAX_ERROR",
    COMMAND_INVALID: "COMMAND_INVALID",
    CHANNEL_ERROR: "CHANNEL_ERROR",
    UNEXPECTED_FRAME: "UNEXPECTED_FRAME",
    RESOURCE_ERROR: "RESOURCE_ERROR",
    NOT_ALLOWED: "NOT_ALLOWED",
    NOT_IMPLEMENTED: "NOT_IMPLEMENTED",
    INTERNAL_ERROR: "INTERNAL_ERROR",
}

SOFT: Final = frozenset({CONTENT_TOO_LARGE, ACCESS_REFUSED, NOT_FOUND, RESOURCE_LOCKED, PRECONDITION_FAILED})
"""Codes that close a channel; all others close the connection."""

NO_METHOD: Final = (0, 0)
_TEXT_BYTES_MAX: Final = 255


class Fault(Exception):
    """A reply code, a text, and the method that caused the fault."""

    def __init__(self, code: int, text: str, method: tuple[int, int] = NO_METHOD) -> None:
        super().__init__(f"{code} {NAMES[code]}: {text}")
        self.code = code
        self.text = text
        self.method = method

    @property
    def reply_text(self) -> str:
        """Return the text in RabbitMQ's form, truncated to a short string."""
        return shorten(f"{NAMES[self.code]} - {self.text}")


class ChannelFault(Fault):
    """A fault that closes a channel."""


class ConnectionFault(Fault):
    """A fault that closes the connection."""


class LocalProtocolError(BasaltError):
    """An attempt to send something that the protocol does not allow in this state: a server bug."""

    code = "amqp_local_protocol_error"


def shorten(text: str) -> str:
    """Truncate text to the length of a short string."""
    raw = text.encode(errors="backslashreplace")
    return raw.decode() if len(raw) <= _TEXT_BYTES_MAX else raw[: _TEXT_BYTES_MAX - 3].decode(errors="ignore") + "..."


_CODES: Final[tuple[tuple[type[BasaltError], int], ...]] = (
    (errors.MalformedTableError, SYNTAX_ERROR),
    (errors.MalformedPropertiesError, SYNTAX_ERROR),
    (errors.UnknownExchangeTypeError, COMMAND_INVALID),
    (errors.VHostNotFoundError, NOT_ALLOWED),
    (errors.VHostDownError, CONNECTION_FORCED),
    (errors.AuthenticationError, ACCESS_REFUSED),
    (errors.AccessRefusedError, ACCESS_REFUSED),
    (errors.ResourceLockedError, RESOURCE_LOCKED),
    (errors.NotFoundError, NOT_FOUND),
    (errors.PreconditionFailedError, PRECONDITION_FAILED),
    (errors.AlreadyExistsError, PRECONDITION_FAILED),
    (errors.StaleLeaseError, PRECONDITION_FAILED),
    (errors.QueueFailedError, PRECONDITION_FAILED),
    (errors.TransactionError, PRECONDITION_FAILED),
    (errors.OffsetOutOfRangeError, PRECONDITION_FAILED),
    (errors.LimitExceededError, PRECONDITION_FAILED),
    (errors.InvalidArgumentError, PRECONDITION_FAILED),
    (errors.InvalidConfigError, PRECONDITION_FAILED),
    (errors.PublishersBlockedError, RESOURCE_ERROR),
    (errors.StoreClosedError, CONNECTION_FORCED),
    (BasaltError, INTERNAL_ERROR),
)
"""The first matching class determines the code, so subclasses come first."""


def fault_of(error: BasaltError, method: tuple[int, int] = NO_METHOD) -> Fault:
    """Return the fault for an error."""
    code = next(code for cls, code in _CODES if isinstance(error, cls))
    # A failed login closes the connection, although its code is a channel code.
    soft = code in SOFT and not isinstance(error, errors.AuthenticationError)
    return (ChannelFault if soft else ConnectionFault)(code, str(error), method)
