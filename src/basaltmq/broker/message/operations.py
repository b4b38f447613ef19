"""Operations on messages that protocols request, and the interfaces that receive their results.

Every protocol uses these types to publish, enqueue and settle. `VHost` gathers them, and its tick writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias, TypeVar

from basaltmq.queues.draft import Draft
from basaltmq.queues.lifecycle.failures import Edit
from basaltmq.store.families import Family

T_contra = TypeVar("T_contra", contravariant=True)


class Publisher(Protocol):
    """Receives returns and confirms of routed messages: a channel, a session or a link."""

    def returned(self, exchange: str, routing_key: str, properties: bytes, body: bytes, number: int) -> None:
        """Return a mandatory message without a route, with its number. Called before its confirm."""
        ...

    def confirmed(self, numbers: Sequence[int], ok: bool) -> None:
        """Confirm the messages with these ascending numbers, or nack them if a full queue rejected them."""
        ...


Publish: TypeAlias = tuple[Publisher, str, str, bytes, bytes, bool, int]
"""A message for an exchange: publisher, exchange, routing key, properties, body, mandatory, number.

`broker/message/properties.py` encodes the properties. Number 0 requests no confirm. A plain tuple, because one is
created per message."""


class Waiter(Protocol[T_contra]):
    """Receives the result of one operation, or its error. Its methods do not raise. A future is one."""

    def done(self) -> bool:
        """Whether the caller no longer waits. The operation is done nevertheless."""
        ...

    def set_result(self, result: T_contra, /) -> None: ...

    def set_exception(self, error: BaseException, /) -> None: ...


class Enqueue(NamedTuple):
    """Messages for one queue, without routing. All are added, or none."""

    queue: str
    drafts: Sequence[Draft | bytes]
    size_bytes: int
    """Total size of the payloads."""
    waiter: Waiter[list[bytes]]
    """Receives the message ids, once the messages are as durable as the queue requires."""


Row: TypeAlias = tuple[Family, bytes, bytes | None]
"""A row to put, or to delete if the value is None."""


class RowChange(NamedTuple):
    """Rows of a protocol, written in the batch of the publishes that were gathered before them."""

    rows: Sequence[Row]
    waiter: Waiter[None] | None = None
    """Receives None when the rows are durable."""


class Settlement(NamedTuple):
    """Deliveries of one lease with the same outcome."""

    queue: str
    token: int
    ids: Sequence[bytes]
    outcome: str
    edit: Edit | None = None
    """Changes the messages, unless they are acknowledged."""


ACK: Final = "ack"
REQUEUE: Final = "requeue"
REJECT: Final = "reject"
FAIL: Final = "fail"
"""The delivery has failed: its attempt counts, and the message returns to its place or is dead-lettered at a limit."""

SETTLE_S: Final = {ACK: 5e-6, REQUEUE: 15e-6, REJECT: 200e-6, FAIL: 200e-6}
"""Cost of settling one delivery in the turn's batch, in seconds. A rejected or failed message may be dead-lettered."""

SETTLE_PORTIONS: Final = {ACK: 1000, REQUEUE: 500, REJECT: 50, FAIL: 50}
"""Deliveries settled per batch, which takes some milliseconds."""
