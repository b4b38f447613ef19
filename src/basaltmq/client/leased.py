"""A leased message as a program sees it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import TypeAlias
from uuid import UUID

import msgspec

from basaltmq.errors import InvalidArgumentError
from basaltmq.wire import basalt_pb2 as wire


class Leased(msgspec.Struct, eq=False, gc=False):
    """A message that this program holds until it is settled or its lease expires.

    `token` is the lease's fencing token. Extending a part of a lease gives the part a new token. `settled` means that
    this object was acked, nacked or released; only the broker knows whether the lease has expired.
    """

    queue: str
    token: int
    visibility_ms: int
    """Duration of the lease, in milliseconds."""
    _count: int
    """Number of messages leased together, including this one; 0 after the lease was split."""
    _message: wire.Message
    settled: bool = False

    @property
    def id(self) -> bytes:
        return self._message.id

    @property
    def payload(self) -> bytes:
        return self._message.payload

    @property
    def headers(self) -> dict[str, str]:
        return dict(self._message.headers)

    @property
    def fairness_key(self) -> str:
        return self._message.fairness_key

    @property
    def weight(self) -> int:
        return self._message.weight

    @property
    def attempts(self) -> int:
        """Number of failed deliveries before this one."""
        return self._message.attempts

    @property
    def priority(self) -> int:
        return self._message.priority

    @property
    def enqueued_ns(self) -> int:
        return self._message.enqueued_ns

    def text(self) -> str:
        """Return the payload as UTF-8 text."""
        return self.payload.decode()

    def __repr__(self) -> str:
        state = "settled" if self.settled else f"leased by {self.token}"
        return f"<message {UUID(bytes=self.id)} of queue {self.queue!r}, {state}>"


Held: TypeAlias = Leased | Sequence[Leased]
"""What `lease` returned: one message, or several."""


def leased_of(queue: str, response: wire.LeaseResponse) -> list[Leased]:
    messages = response.messages
    shared = map(repeat, (queue, response.token, response.visibility_ms, len(messages)))
    return list(map(Leased, *shared, messages))


def by_lease(messages: Held) -> dict[tuple[str, int], list[Leased]]:
    """Group messages by queue and token, because each request settles messages of one lease."""
    given = [messages] if isinstance(messages, Leased) else messages
    for each in given:
        if not isinstance(each, Leased):
            raise InvalidArgumentError(f"pass what lease returned, one message or a list, not {type(each).__name__}")
    leases = {(each.queue, each.token) for each in given}
    if len(leases) == 1:
        return {leases.pop(): list(given)}
    found: dict[tuple[str, int], list[Leased]] = {}
    for each in given:
        found.setdefault((each.queue, each.token), []).append(each)
    return found


def ids_of(messages: Sequence[Leased]) -> list[bytes]:
    """Return the ids of messages of one lease; an empty list means the whole lease."""
    if len({*messages}) == messages[0]._count == len(messages) and not [each for each in messages if each.settled]:
        return []
    return [each.id for each in messages]


def settled(messages: Sequence[Leased]) -> None:
    for each in messages:
        each.settled = True


def extended(messages: Sequence[Leased], token: int) -> None:
    """Set the new token of messages after an extension."""
    for each in messages:
        if each.token != token:
            each.token = token
            each._count = 0
