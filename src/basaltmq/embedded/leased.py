"""A leased message as a program sees it, with its fencing token."""

from __future__ import annotations

from uuid import UUID

from basaltmq.queues.entries.rows import split_sub_queue
from basaltmq.queues.leases.delivery import Delivery
from basaltmq.queues.message import Message
from basaltmq.store.keys.queues import decode_message_key


class Leased:
    """A message that this program holds until it is settled or its lease expires.

    `token` is the lease's fencing token. Extending a part of a lease gives the part a new token. `settled` means that
    this object was acked, nacked or released; only the queue knows whether the lease has expired.
    """

    __slots__ = ("_delivery", "_has_priorities", "_message", "queue", "settled", "token")

    def __init__(self, queue: str, delivery: Delivery, has_priorities: bool = False) -> None:
        self.queue = queue
        self.token = delivery.token
        self.settled = False
        self._delivery = delivery
        self._has_priorities = has_priorities
        self._message: Message | None = None

    @property
    def id(self) -> bytes:
        return self._delivery.id

    @property
    def payload(self) -> bytes:
        return self._delivery.payload

    @property
    def attempts(self) -> int:
        """Number of failed deliveries before this one."""
        return self._delivery.attempts

    @property
    def headers(self) -> dict[str, str]:
        return self.message.headers

    @property
    def fairness_key(self) -> str:
        return self.message.fairness_key

    @property
    def priority(self) -> int:
        return self.message.priority

    @property
    def message(self) -> Message:
        """The whole message, decoded on first use."""
        if self._message is None:
            message = self._message = self._delivery.message()
            sub_queue = decode_message_key(self._delivery.key)[1]
            if self._has_priorities and message.fairness_key == sub_queue:
                message.fairness_key = split_sub_queue(sub_queue)[1]
        return self._message

    def text(self) -> str:
        """Return the payload as UTF-8 text."""
        return self.payload.decode()

    def __repr__(self) -> str:
        state = "settled" if self.settled else f"leased by {self.token}"
        return f"<message {UUID(bytes=self.id)} of queue {self.queue!r}, {state}>"
