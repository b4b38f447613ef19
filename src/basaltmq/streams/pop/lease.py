"""A record that a group has received and not settled, and its row.

    key    | topic uuid (16) | lp(group) | partition u32 | offset u64 |
    value  | version u8 | token u64 | invisible until ms i64 | leased ms i64 | attempts u32 |
           | attempt id u64 | holder u64 | message group, to the end |

The attempt id and the holder are 64-bit hashes of the texts that a client sends. 0 means none.
"""

from __future__ import annotations

import hashlib
from struct import Struct as Layout
from typing import Final

from basaltmq.errors import CorruptionError

ROW_VERSION: Final = 1
_ROW: Final = Layout(">BQqqIQQ")


class Lease:
    """A record between its first delivery and its settlement.

    `token` is the fencing token. It is 0 if no consumer holds the record. Then the record is ready, or waits for an
    earlier record of its message group.
    """

    __slots__ = (
        "attempt",
        "attempts",
        "holder",
        "leased_ms",
        "message_group",
        "offset",
        "partition",
        "token",
        "until_ms",
    )

    def __init__(self, partition: int, offset: int, message_group: bytes = b"") -> None:
        self.partition = partition
        self.offset = offset
        self.token = 0
        self.until_ms = 0
        """The record is invisible to other consumers until this time."""
        self.leased_ms = 0
        """When the holder received the record."""
        self.attempts = 0
        """Number of deliveries."""
        self.attempt = 0
        """The receive call that got the record. A repeated call gets it again."""
        self.holder = 0
        """The client for which the broker extends the lease while the client is alive."""
        self.message_group = message_group

    @property
    def place(self) -> tuple[int, int]:
        return self.partition, self.offset

    def encode(self) -> bytes:
        return (
            _ROW.pack(ROW_VERSION, self.token, self.until_ms, self.leased_ms, self.attempts, self.attempt, self.holder)
            + self.message_group
        )

    @classmethod
    def decode(cls, partition: int, offset: int, raw: bytes) -> Lease:
        if len(raw) < _ROW.size:
            raise CorruptionError(f"the lease of a record has {len(raw)} bytes, fewer than {_ROW.size}")
        version, token, until_ms, leased_ms, attempts, attempt, holder = _ROW.unpack_from(raw)
        if version != ROW_VERSION:
            raise CorruptionError(f"the lease of a record has version {version}, this Basalt reads {ROW_VERSION}")
        made = cls(partition, offset, raw[_ROW.size :])
        made.token, made.until_ms, made.leased_ms = token, until_ms, leased_ms
        made.attempts, made.attempt, made.holder = attempts, attempt, holder
        return made


def hash_of(text: str) -> int:
    """Return the 64-bit hash of an attempt id or a client id. It is never 0."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest(), "big") or 1
