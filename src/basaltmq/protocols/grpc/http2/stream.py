"""One stream of a connection: how far each side is, and what waits for the other side's window."""

from __future__ import annotations

from typing import Any


class Stream:
    """State only; connection.py moves it."""

    __slots__ = (
        "credit_bytes",
        "has_ended_here",
        "has_ended_there",
        "id",
        "is_closed",
        "owner",
        "receive_window",
        "send_window",
        "trailer",
        "waiting",
        "waiting_bytes",
    )

    def __init__(self, stream_id: int, send_window: int, receive_window: int) -> None:
        self.id = stream_id
        self.send_window = send_window
        self.receive_window = receive_window
        self.credit_bytes = 0
        """Consumed, and not yet given back to the other side's window."""
        self.has_ended_there = False
        self.has_ended_here = False
        """Nothing more is taken to be sent; it may wait still."""
        self.is_closed = False
        self.waiting: list[bytes | memoryview[int]] = []
        """Few: whoever sends much waits until it is on its way."""
        self.waiting_bytes = 0
        self.trailer: bytes | None = None
        """The header block that ends it once everything before it is sent; empty for an end without one."""
        self.owner: Any = None
        """Whatever the user of the connection wants to find here."""
