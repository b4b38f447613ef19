"""Delivery without a queue: transient messages for connected clients that may lose them.

A message costs 19 us in each queue that it is written to. An MQTT subscriber with QoS 0 does not need the write: its
client is connected, and nothing is redelivered. So the router groups such messages into runs, and each run goes to its
sinks when the batch of the turn is written.

A sink accepts messages only while its queue is empty and its client reads. Otherwise they go to the queue, so the
messages of a topic keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class DirectSink(Protocol):
    """A connected client with a queue of its own."""

    def accepts_direct(self) -> bool:
        """Whether the next message can be sent without overtaking another one."""
        ...

    def deliver_direct(self, run: DirectRun) -> None:
        """Send the messages of a run, or drop them."""
        ...


class DirectRun:
    """Consecutive messages of one exchange and routing key, for the same sinks."""

    __slots__ = ("encoded", "messages", "sinks")

    def __init__(self, sinks: Sequence[DirectSink]) -> None:
        self.sinks = sinks
        self.messages: list[tuple[bytes, bytes]] = []
        """Envelopes and bodies."""
        self.encoded: dict[Any, Any] = {}
        """Encoded packets by subscription options, shared by the sinks with equal options."""
