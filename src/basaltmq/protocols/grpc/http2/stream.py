"""State of one HTTP/2 stream: windows, end flags, and data that waits for the peer's window."""

from __future__ import annotations

from typing import Any


class Stream:
    """Plain state. `Connection` and `FrameSender` change it."""

    __slots__ = (
        "credit_bytes",
        "id",
        "is_closed",
        "owner",
        "receive_window",
        "received_end",
        "send_window",
        "sent_end",
        "trailer",
        "waiting",
        "waiting_bytes",
    )

    def __init__(self, stream_id: int, send_window: int, receive_window: int) -> None:
        self.id = stream_id
        self.send_window = send_window
        self.receive_window = receive_window
        self.credit_bytes = 0
        """Consumed bytes that have not been returned to the peer as window credit."""
        self.received_end = False
        self.sent_end = False
        """The user has ended the stream. Data may still wait to be sent."""
        self.is_closed = False
        self.waiting: list[bytes | memoryview[int]] = []
        """Usually short: a sender of many messages waits until its data is sent."""
        self.waiting_bytes = 0
        self.trailer: bytes | None = None
        """Header block to send after all waiting data. Empty: end the stream without trailers. None: do not end it."""
        self.owner: Any = None
        """Set by the user of the connection: its object for this stream."""
