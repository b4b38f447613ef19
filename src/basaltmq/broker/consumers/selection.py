"""Selection: a consumer receives only messages that a filter accepts, or copies of all messages.

Most consumers receive messages from the head of the queue. A consumer with a selection reads the queue with a scan of
its own (`queues/browsing/scan.py`), each message once, and leases those that it accepts. Messages that it does not
accept stay where they are. A consumer of copies leases nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from basaltmq.queues.browsing.scan import Scan


class Selection:
    """The filter of one consumer, and how far it has read the queue."""

    __slots__ = ("accepts", "is_copy", "scan", "waiting")

    def __init__(self, accepts: Callable[[Any], bool] | None, *, is_copy: bool = False) -> None:
        """`accepts` gets a delivery. It is called for each message of the queue, so it must be fast and not raise."""
        self.accepts = accepts
        self.is_copy = is_copy
        self.scan = Scan()
        self.waiting: deque[bytes] = deque()
        """Keys of accepted messages for which the consumer had no credit."""

    def start_over(self) -> Scan:
        """Read the queue again from its head, where leased messages are not ready. Return the old scan."""
        self.waiting.clear()
        old, self.scan = self.scan, Scan()
        return old

    @property
    def is_behind(self) -> bool:
        """Whether there may be messages that the consumer has not read."""
        return bool(self.waiting) or self.scan.is_behind
