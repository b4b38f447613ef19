"""A leased message as a program holds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias
from uuid import UUID

from basaltmq.errors import InvalidArgumentError
from basaltmq.wire import basalt_pb2 as wire


class Leased:
    """A message in the hands of this program, until it is settled or its lease expires.

    `token` is what answers for it; extending a part of a lease gives that part another one. `settled` says that this
    object was acked, nacked or released; whether the lease has expired is known to the broker alone.
    """

    __slots__ = ("_message", "queue", "settled", "token", "visibility_ms")

    def __init__(self, queue: str, token: int, visibility_ms: int, message: wire.Message) -> None:
        self.queue = queue
        self.token = token
        self.visibility_ms = visibility_ms
        """How long the lease was for."""
        self.settled = False
        self._message = message

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
        """How often it was delivered before and failed."""
        return self._message.attempts

    @property
    def priority(self) -> int:
        return self._message.priority

    @property
    def enqueued_ns(self) -> int:
        return self._message.enqueued_ns

    def text(self) -> str:
        """The payload as UTF-8 text."""
        return self.payload.decode()

    def __repr__(self) -> str:
        state = "settled" if self.settled else f"leased by {self.token}"
        return f"<message {UUID(bytes=self.id)} of queue {self.queue!r}, {state}>"


Held: TypeAlias = Leased | Sequence[Leased]
"""What `lease` returned: one message, or several."""


def leased_of(queue: str, answer: wire.LeaseResponse) -> list[Leased]:
    return [Leased(queue, answer.token, answer.visibility_ms, message) for message in answer.messages]


def by_lease(messages: Held) -> dict[tuple[str, int], list[Leased]]:
    """Messages by queue and token, which is how they are answered for."""
    found: dict[tuple[str, int], list[Leased]] = {}
    given = [messages] if isinstance(messages, Leased) else messages
    for each in given:
        if not isinstance(each, Leased):
            raise InvalidArgumentError(f"give what lease returned, one message or a list, not {type(each).__name__}")
        found.setdefault((each.queue, each.token), []).append(each)
    return found
