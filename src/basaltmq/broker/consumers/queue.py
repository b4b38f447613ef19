"""A queue of the broker: its declaration, owner, consumers and effective settings.

The queue plane holds the messages. The field `extra` of its queue row stores the declaration:

    | layout u8 | flags u8 | arguments, an AMQP field table |

A queue with an empty `extra` (created by another protocol) is a durable classic queue without arguments.

Arguments and the current policy together give the effective settings (`effective`). Of two limits the smaller one
applies. For other settings the argument overrides the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from basaltmq.broker.consumers.consumer import Consumer, Consumers
from basaltmq.broker.consumers.direct import DirectSink
from basaltmq.broker.consumers.groups import MessageGroups
from basaltmq.broker.message import amqp_table
from basaltmq.broker.routing.arguments import (
    QUEUE_ARGUMENTS,
    QUORUM,
    QUORUM_DELIVERY_LIMIT,
    STREAM,
    Owner,
    QueueSettings,
    queue_settings,
)
from basaltmq.broker.routing.exchange import Arguments
from basaltmq.durability import Durability
from basaltmq.errors import CorruptionError, MalformedTableError, PreconditionFailedError
from basaltmq.queues.config import Overflow, QueueConfig

LAYOUT: Final = 1
DURABLE: Final = 1
EXCLUSIVE: Final = 2
AUTO_DELETE: Final = 4

LEASE_MAX: Final = 256
"""Maximum messages per lease: enough to amortize its cost, few enough not to delay the loop."""

LEASE_BYTES: Final = 4 << 20
"""Maximum total size of the messages of one lease, in bytes."""

LEASE_FIRST: Final = 8
"""Messages in the first lease from a queue, while the size of its messages is unknown."""

UNLIMITED_CREDIT: Final = 1 << 62
"""The publish credit of a queue that does not limit its publishers."""

_SMALLER: Final = ("ttl_ms", "expires_ms", "length_max", "bytes_max", "delivery_limit", "age_ms_max")
"""Limits: if both argument and policy set one, the smaller value applies."""


class QueueInfo(NamedTuple):
    """The reply to a declaration."""

    name: str
    messages: int
    consumers: int


class Declared(msgspec.Struct, frozen=True):
    """The declaration of a queue."""

    durable: bool = True
    exclusive: bool = False
    auto_delete: bool = False
    arguments: Arguments = {}

    @property
    def survives(self) -> bool:
        """Whether the queue survives a restart."""
        return self.durable and not self.exclusive

    def encode(self) -> bytes:
        flags = DURABLE * self.durable | EXCLUSIVE * self.exclusive | AUTO_DELETE * self.auto_delete
        return bytes((LAYOUT, flags)) + amqp_table.encode(self.arguments)

    @classmethod
    def decode(cls, name: str, raw: bytes) -> Declared:
        if not raw:
            return cls()
        try:
            if raw[0] != LAYOUT:
                raise MalformedTableError(f"unknown layout {raw[0]}")
            flags = raw[1]
            arguments = amqp_table.decode_all(raw[2:])
        except (IndexError, MalformedTableError) as error:
            raise CorruptionError(f"the stored declaration of queue {name!r} is damaged: {error}") from None
        return cls(bool(flags & DURABLE), bool(flags & EXCLUSIVE), bool(flags & AUTO_DELETE), arguments)


def effective(settings: QueueSettings, definition: Mapping[str, Any]) -> QueueSettings:
    """Return the settings of a queue under a policy."""
    changes: dict[str, Any] = {}
    for name, value in definition.items():
        known = QUEUE_ARGUMENTS.get(f"x-{name}")
        if known is None or name in ("queue-type", "max-priority", "single-active-consumer", "basalt-message-groups"):
            continue
        checked = known.check(value)
        has = getattr(settings, known.field)
        if has is None:
            changes[known.field] = checked
        elif known.field in _SMALLER:
            changes[known.field] = min(has, checked)
    return msgspec.structs.replace(settings, **changes) if changes else settings


def plane_config(name: str, declared: Declared, settings: QueueSettings) -> QueueConfig:
    """Return the configuration for the queue plane. The broker itself routes dead letters and expires queues."""
    if settings.type == STREAM:
        # The queue plane stores only the declaration. The stream plane holds the messages.
        return QueueConfig(name=name, extra=declared.encode())
    limit = settings.delivery_limit
    if limit is None and settings.type == QUORUM:
        limit = QUORUM_DELIVERY_LIMIT
    config = QueueConfig(
        name=name,
        ttl_ms=settings.ttl_ms,
        length_max=settings.length_max,
        bytes_max=settings.bytes_max,
        overflow=Overflow.DROP_HEAD if settings.overflow in (None, Overflow.DROP_HEAD) else Overflow.REJECT_PUBLISH,
        priorities_max=settings.priorities_max,
        durability=Durability.WRITTEN,
        dedup_window_ms=settings.dedup_ms,
        delivery_limit=limit,
        extra=declared.encode(),
    )
    if settings.lease_ms is not None:
        return msgspec.structs.replace(config, visibility_timeout_ms=settings.lease_ms)
    return config


class BrokerQueue:
    """One queue of a virtual host."""

    __slots__ = (
        "acked",
        "consumers",
        "declared",
        "delivered",
        "direct",
        "durable",
        "groups",
        "has_ready",
        "is_plain",
        "is_stream",
        "lease_max",
        "lease_ms",
        "name",
        "owner",
        "policy",
        "publish_credit",
        "published",
        "redelivered",
        "rejects",
        "returned",
        "settings",
        "settings_declared",
        "stream",
        "used_ns",
    )

    def __init__(
        self,
        name: str,
        declared: Declared,
        settings: QueueSettings,
        *,
        owner: object = None,
        used_ns: int = 0,
        wake: Callable[[BrokerQueue], None],
        removed: Callable[[BrokerQueue, Consumer], None],
    ) -> None:
        self.name = name
        self.declared = declared
        self.durable = declared.survives
        self.settings_declared = settings
        self.owner = owner
        self.used_ns = used_ns
        """Time of the last declaration, read or consumer change. x-expires counts from it."""
        self.policy: str | None = None
        self.is_stream = settings.type == STREAM
        self.stream: Any = None
        self.has_ready = True
        """False after a lease found the queue empty. The plane's ready notification sets it again."""
        self.groups = MessageGroups() if settings.message_groups else None
        self.direct: DirectSink | None = None
        """Receives transient messages without the queue, while the queue is empty."""
        self.lease_max = LEASE_FIRST
        self.publish_credit = UNLIMITED_CREDIT
        """Messages that publishers may still send in this turn (publishing/credit.py)."""
        self.published = self.delivered = self.redelivered = self.acked = self.returned = 0
        self.consumers = Consumers(self, single_active=settings.single_active, wake=wake, removed=removed)
        self.configure(settings)

    def configure(self, settings: QueueSettings) -> None:
        """Apply new effective settings."""
        self.settings = settings
        self.lease_ms = settings.lease_ms or 0
        self.rejects = settings.overflow not in (None, Overflow.DROP_HEAD)
        self.is_plain = (
            not settings.priorities_max
            and settings.fairness_header is None
            and settings.throttle_header is None
            and settings.dedup_ms is None
            and not self.rejects
            and settings.ttl_ms != 0
            and not self.is_stream
        )
        """Whether a draft needs only payload, properties and the message's own TTL."""

    def adapt_lease(self, deliveries: list[Any]) -> None:
        """Adapt the size of the next lease to the size of these messages."""
        size = sum([len(each.row) if each.body is None else len(each.body) for each in deliveries])
        if size > LEASE_BYTES or self.lease_max < LEASE_MAX:
            self.lease_max = max(1, min(LEASE_MAX, LEASE_BYTES * len(deliveries) // max(1, size)))

    @property
    def type(self) -> str:
        return self.settings.type


def declared_settings(
    vhost: str, name: str, *, durable: bool, exclusive: bool, auto_delete: bool, arguments: Arguments
) -> tuple[Declared, QueueSettings]:
    """Validate a declaration and return it with its settings."""
    owner = Owner("queue", name, vhost)
    settings = queue_settings(owner, arguments, durable=durable, exclusive=exclusive, auto_delete=auto_delete)
    declared = Declared(durable, exclusive, auto_delete, dict(arguments))
    try:
        declared.encode()
    except MalformedTableError as error:
        raise PreconditionFailedError(f"invalid arguments for {owner}: {error}") from None
    return declared, settings
