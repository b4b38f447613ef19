"""A delivered message: `Delivery`, and `Deliveries` for many of one lease."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from struct import Struct
from typing import Final, overload

import msgspec

from basaltmq.queues.entries import rows
from basaltmq.queues.message import HEAD, LAYOUT, Message

REDELIVERED: Final = 1
PRIORITY: Final = 2
"""The sub-queue in the key starts with a priority."""

_LENGTHS: Final = Struct(">II")
_LENGTHS_AT: Final = HEAD.size - 12
"""The fixed head ends with the lengths of labels, properties and payload."""


class Delivery(msgspec.Struct, gc=False, frozen=True):
    """A leased message. `token` acknowledges it. The row is decoded on demand."""

    id: bytes
    token: int
    key: bytes
    row: bytes
    body: bytes | None = None
    """The payload, if it is not in the row."""
    marks: int = 0
    """Bits: REDELIVERED, PRIORITY."""

    @property
    def redelivered(self) -> bool:
        """Whether the message was delivered before. True also when that is unknown: after a crash, or when too many
        messages were returned to track each one."""
        return bool(self.marks & REDELIVERED)

    @property
    def payload(self) -> bytes:
        return rows.payload_of(self.row) if self.body is None else self.body

    @property
    def properties(self) -> bytes:
        return rows.properties_of(self.row)

    @property
    def headers(self) -> dict[str, str]:
        """Text headers. A row without labels is not decoded."""
        inner = rows.unwrap(self.row)[0]
        return self.message().headers if _LENGTHS.unpack_from(inner, _LENGTHS_AT)[0] else {}

    def content(self) -> tuple[bytes, bytes]:
        """Return properties and payload at the cost of one of them."""
        row = self.row
        if row[0] != LAYOUT or self.body is not None:
            return self.properties, self.payload
        labels_bytes, properties_bytes = _LENGTHS.unpack_from(row, _LENGTHS_AT)
        at = HEAD.size + labels_bytes
        middle = at + properties_bytes
        return row[at:middle], row[middle:]

    @property
    def attempts(self) -> int:
        """Failed deliveries so far."""
        return rows.attempts_of(self.row)

    def message(self) -> Message:
        """Decode the whole message."""
        message = rows.open_row(self.key, self.row, self.body)
        if self.marks & PRIORITY:
            message.fairness_key = rows.split_sub_queue(message.fairness_key)[1]
        return message


class Deliveries(Sequence[Delivery]):
    """Messages of one lease whose rows hold everything there is to know about them.

    Stores columns in key order and creates a `Delivery` on access. The columns never change.
    """

    __slots__ = ("_made", "ids", "keys", "rows", "token")

    def __init__(self, token: int, ids: list[bytes], keys: list[bytes], rows: list[bytes]) -> None:
        self.token = token
        self.ids = ids
        self.keys = keys
        self.rows = rows
        self._made: list[Delivery] | None = None

    def _all(self) -> list[Delivery]:
        if self._made is None:
            self._made = list(map(Delivery, self.ids, repeat(self.token), self.keys, self.rows))
        return self._made

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Delivery: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Delivery]: ...

    def __getitem__(self, index: int | slice) -> Delivery | Sequence[Delivery]:
        if isinstance(index, int) and self._made is None:
            return Delivery(self.ids[index], self.token, self.keys[index], self.rows[index])
        return self._all()[index]

    def __iter__(self) -> Iterator[Delivery]:
        return iter(self._all())
