"""Arguments of queues and exchanges: validation, conversion to settings, and comparison.

Names and semantics are RabbitMQ's. Error texts resemble RabbitMQ's, because users search for them. As in RabbitMQ, an
unknown argument is stored, not compared, and has no effect.

Basalt's own arguments:

    x-basalt-lease-ms         a delivery that is not settled within this time fails and is redelivered
    x-basalt-fairness-header  the header whose value is a message's fairness key
    x-basalt-throttle-header  the header whose value is a message's throttle key
    x-basalt-message-groups   all messages with the same group-id (or app_id) go to one consumer, in order
    x-basalt-dedup-ms         deduplication window: a second message with the same id within it is dropped

A quorum queue is a durable queue with a delivery limit: there is one node, and confirmed messages are on disk.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from basaltmq.broker.routing.exchange import Arguments
from basaltmq.errors import PreconditionFailedError
from basaltmq.queues.config import DURATION_MS_MAX, Overflow

CLASSIC: Final = "classic"
QUORUM: Final = "quorum"
STREAM: Final = "stream"

QUORUM_DELIVERY_LIMIT: Final = 20
"""RabbitMQ's default for quorum queues."""

INT_MAX: Final = (1 << 63) - 1
MESSAGE_TTL_MS_MAX: Final = 315_360_000_000
"""Ten years, RabbitMQ's limit."""

_AGE: Final = re.compile(r"(\d{1,9})([YMDhms])")
_AGE_MS: Final = {
    "Y": 365 * 86_400_000,
    "M": 30 * 86_400_000,
    "D": 86_400_000,
    "h": 3_600_000,
    "m": 60_000,
    "s": 1000,
}


class Owner(NamedTuple):
    """The object that has the arguments, for error texts."""

    kind: str
    name: str
    vhost: str

    def __str__(self) -> str:
        return f"{self.kind} '{self.name}' in vhost '{self.vhost}'"


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings from a queue's arguments. None means not set."""

    type: str = CLASSIC
    ttl_ms: int | None = None
    expires_ms: int | None = None
    length_max: int | None = None
    bytes_max: int | None = None
    overflow: Overflow | None = None
    dead_letter_exchange: str | None = None
    dead_letter_routing_key: str | None = None
    priorities_max: int = 0
    single_active: bool = False
    message_groups: bool = False
    delivery_limit: int | None = None
    lease_ms: int | None = None
    fairness_header: str | None = None
    throttle_header: str | None = None
    dedup_ms: int | None = None
    age_ms_max: int | None = None
    """Retention time of a stream."""


def _whole(low: int, high: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"expected an integer, got {_typed(value)}")
        if not low <= value <= high:
            raise ValueError(f"expected {low} to {high}, got {value}")
        return int(value)

    return check


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, got {_typed(value)}")
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {_typed(value)}")
    return value


def _overflow(value: Any) -> Overflow:
    try:
        return Overflow(_text(value))
    except ValueError:
        expected = ", ".join(each.value for each in Overflow)
        raise ValueError(f"expected one of {expected}, got {_typed(value)}") from None


def _queue_type(value: Any) -> str:
    if value not in (CLASSIC, QUORUM, STREAM):
        raise ValueError(f"expected {CLASSIC}, {QUORUM} or {STREAM}, got {_typed(value)}")
    return str(value)


def age_ms(value: Any) -> int:
    """Parse an age such as `7D` or `12h`: a number and one of Y, M, D, h, m, s."""
    found = _AGE.fullmatch(_text(value))
    if found is None:
        raise ValueError(f"expected a number and one of Y, M, D, h, m, s, such as 7D, got {_typed(value)}")
    return int(found[1]) * _AGE_MS[found[2]]


class _Argument(NamedTuple):
    field: str
    check: Callable[[Any], Any]


QUEUE_ARGUMENTS: Final[Mapping[str, _Argument]] = {
    "x-queue-type": _Argument("type", _queue_type),
    "x-message-ttl": _Argument("ttl_ms", _whole(0, MESSAGE_TTL_MS_MAX)),
    "x-expires": _Argument("expires_ms", _whole(1, MESSAGE_TTL_MS_MAX)),
    "x-max-length": _Argument("length_max", _whole(0, INT_MAX)),
    "x-max-length-bytes": _Argument("bytes_max", _whole(0, INT_MAX)),
    "x-overflow": _Argument("overflow", _overflow),
    "x-dead-letter-exchange": _Argument("dead_letter_exchange", _text),
    "x-dead-letter-routing-key": _Argument("dead_letter_routing_key", _text),
    "x-max-priority": _Argument("priorities_max", _whole(0, 255)),
    "x-single-active-consumer": _Argument("single_active", _truth),
    "x-delivery-limit": _Argument("delivery_limit", _whole(0, (1 << 32) - 1)),
    "x-max-age": _Argument("age_ms_max", age_ms),
    "x-basalt-lease-ms": _Argument("lease_ms", _whole(1, DURATION_MS_MAX)),
    "x-basalt-fairness-header": _Argument("fairness_header", _text),
    "x-basalt-throttle-header": _Argument("throttle_header", _text),
    "x-basalt-message-groups": _Argument("message_groups", _truth),
    "x-basalt-dedup-ms": _Argument("dedup_ms", _whole(1, DURATION_MS_MAX)),
}

STREAM_ONLY: Final = ("x-max-age",)
NOT_OF_STREAMS: Final = (
    "x-message-ttl",
    "x-max-priority",
    "x-overflow",
    "x-dead-letter-exchange",
    "x-dead-letter-routing-key",
    "x-single-active-consumer",
    "x-delivery-limit",
    "x-expires",
    "x-max-length",
    "x-basalt-lease-ms",
    "x-basalt-fairness-header",
    "x-basalt-throttle-header",
    "x-basalt-message-groups",
    "x-basalt-dedup-ms",
)


def queue_settings(
    owner: Owner, arguments: Arguments, *, durable: bool, exclusive: bool, auto_delete: bool
) -> QueueSettings:
    """Return the settings from a queue's arguments. PreconditionFailedError names an invalid one."""
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        known = QUEUE_ARGUMENTS.get(name)
        if known is not None:
            try:
                found[known.field] = known.check(value)
            except ValueError as error:
                raise _invalid(owner, name, str(error)) from None
    settings = QueueSettings(**found)
    if settings.type in (QUORUM, STREAM):
        for flag, is_wrong in (("durable", not durable), ("exclusive", exclusive), ("auto-delete", auto_delete)):
            if is_wrong:
                shown = "false" if flag == "durable" else "true"
                raise PreconditionFailedError(
                    f"invalid property '{flag}' for {owner}: a {settings.type} queue "
                    f"must be durable, not exclusive and not auto-delete, got {shown}"
                )
    if settings.type == STREAM:
        for name in NOT_OF_STREAMS:
            if name in arguments:
                raise _invalid(owner, name, "not supported for streams")
    else:
        for name in STREAM_ONLY:
            if name in arguments:
                raise _invalid(owner, name, "only supported for streams")
    if settings.dead_letter_routing_key is not None and settings.dead_letter_exchange is None:
        raise _invalid(owner, "x-dead-letter-routing-key", "x-dead-letter-exchange is missing")
    return settings


def check_exchange_arguments(owner: Owner, arguments: Arguments) -> None:
    alternate = arguments.get("alternate-exchange")
    if "alternate-exchange" in arguments and not isinstance(alternate, str):
        raise _invalid(owner, "alternate-exchange", f"expected text, got {_typed(alternate)}")


def _invalid(owner: Owner, name: str, reason: str) -> PreconditionFailedError:
    return PreconditionFailedError(f"invalid arg '{name}' for {owner}: {reason}")


def check_same(owner: Owner, field: str, has: object, asked: object) -> None:
    """Raise if a field of a declaration differs from the existing object."""
    if has != asked or isinstance(has, bool | float) is not isinstance(asked, bool | float):
        raise PreconditionFailedError(
            f"inequivalent arg '{field}' for {owner}: received {_shown(asked)} but current is {_shown(has)}"
        )


def check_same_arguments(owner: Owner, has: Arguments, asked: Arguments) -> None:
    """Raise if a known argument differs. A missing queue type means the default."""
    for name in QUEUE_ARGUMENTS:
        if name == "x-queue-type":
            check_same(owner, name, has.get(name, CLASSIC), asked.get(name, CLASSIC))
        else:
            check_same(owner, name, has.get(name), asked.get(name))


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"'{str(value).lower()}'"
    if isinstance(value, str):
        return f"'{value}'"
    return f"the value {_typed(value)}"


def _typed(value: object) -> str:
    names = {bool: "bool", int: "number", float: "float", str: "longstr", bytes: "binary", list: "array", dict: "table"}
    kind = next((name for python, name in names.items() if isinstance(value, python)), "void")
    return f"'{value!s:.80}' of type '{kind}'"
