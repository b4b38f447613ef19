"""A message in the hands of a consumer."""

from __future__ import annotations

import msgspec

from basaltmq.queues import rows
from basaltmq.queues.message import Message


class Delivery(msgspec.Struct, gc=False, frozen=True):
    """A leased message. `token` answers for it; the row is taken apart when somebody asks."""

    id: bytes
    token: int
    key: bytes
    row: bytes
    body: bytes | None = None
    """The payload, if it is not in the row."""

    @property
    def payload(self) -> bytes:
        return rows.payload_of(self.row) if self.body is None else self.body

    @property
    def attempts(self) -> int:
        """How often it was delivered and failed."""
        return rows.attempts_of(self.row)

    def message(self) -> Message:
        """Everything about it."""
        return rows.open_row(self.key, self.row, self.body)
